"""`outrider bench`: what speculation gains on this machine, with this model, on these prompts; and where it loses."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from outrider.bench.plan import Plan, engine_arguments, whole_numbers
from outrider.bench.questions import BUILTIN, read_questions, spread
from outrider.bench.trials import Budget
from outrider.cli.bench_run import measured
from outrider.cli.console import FAILED, INTERRUPTED, reported, say
from outrider.cli.options import SAMPLING, STOPPING, ModelOptions
from outrider.cli.show import wants_colour
from outrider.cli.values import check_models, check_writable, one_model
from outrider.config import Method, methods_of
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.local import Job
    from outrider.bench.questions import Question

    Measured = tuple[dict[str, Any], bool]

__all__ = ["BENCH_EXAMPLES", "BENCH_HELP", "BENCH_WITHOUT", "BenchOptions", "bench"]

WORK, REPORT, OTHERS = "What to measure", "Report", "Other engines"
PROMPTS = 6  # of the built-in ones, one of each kind
PEERS = ("transformers",)
# What the command says itself, or what would make settings unlike each other.
BENCH_WITHOUT = ("method", "num_speculative_tokens", "speculative_config", "max_num_seqs", "enable_prefix_caching")

BENCH_HELP = """Measure what speculation gains here: every method and draft length beside plain decoding.

Without MODEL: SmolLM2-135M-Instruct, plainly and with lookup. Prompts are our own, in the six kinds of Spec-Bench;
`--dataset` takes Spec-Bench's question.jsonl as it is, or lines with "prompt" or "messages". In conversations later
turns go on from the model's own plain answers.

Each method is an engine of its own, one after another. On each, plain decoding and all lengths take turns, in an order
that rotates, so that a slow moment of the machine hits all; each speedup is over plain decoding on the same engine.
"first" is the time to the first token, "token" the time a token after that, "wait" what a reader waits between
deliveries (a round's tokens come together), "equal" how many texts have the tokens of plain decoding.

`--url` measures a server instead, whichever it is; for an Outrider server, with speculation off and auto by request.
"""

BENCH_EXAMPLES = """**Examples**

    outrider bench

    outrider bench Qwen/Qwen2.5-7B-Instruct -md Qwen/Qwen2.5-0.5B-Instruct --methods ngram,draft_model \\
    --num-speculative-tokens 3,5,8 --concurrency 1,8 --temperature 0,0.7 --html report.html

    outrider bench --dataset question.jsonl --num-prompts 48 --json figures.json

    outrider bench --peer transformers

    outrider bench --url http://localhost:8000 --concurrency 1,8

**Exit codes:** 0 done, 1 nothing could be measured or tokens differ that must not, 2 something you gave was wrong,
130 interrupted (what was measured is shown).
"""


@dataclass(frozen=True)
class BenchOptions:
    """What to vary, what to ask, where the report goes."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    methods: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Methods to measure, as --method of generate names them; plain decoding always is one.",
            show_default="ngram, and what the draft is",
            rich_help_panel=WORK,
        ),
    ] = None
    lengths: Annotated[
        str,
        Option(
            "--num-speculative-tokens",
            metavar="N,N",
            help="Guesses a round, 1 to 64 each; auto is measured beside them.",
            rich_help_panel=WORK,
        ),
    ] = "3,5,8"
    concurrency: Annotated[str, Option(metavar="N,N", help="Texts under way at a time.", rich_help_panel=WORK)] = "1"
    temperature: Annotated[str, Option(metavar="T,T", help="0 is greedy; 0 to 100 each.", rich_help_panel=SAMPLING)] = (
        "0"
    )
    dataset: Annotated[
        str, Option(metavar="FILE|builtin", help="Prompts: a .jsonl file, or our own.", rich_help_panel=WORK)
    ] = BUILTIN
    num_prompts: Annotated[
        int | None,
        Option(
            min=1,
            help="Take so many, from each kind in turn.",
            show_default=f"{PROMPTS} of our own, all of a file",
            rich_help_panel=WORK,
        ),
    ] = None
    max_tokens: Annotated[int, Option("--max-tokens", "-n", help="Of each text.", rich_help_panel=STOPPING)] = 128
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="All texts to their full length.", rich_help_panel=STOPPING)
    ] = False
    repeats: Annotated[int, Option(help="Turns of each setting.", rich_help_panel=WORK)] = 3
    warmup: Annotated[int, Option(help="Prompts that each setting reads uncounted before.", rich_help_panel=WORK)] = 1
    seed: Annotated[int, Option(help="Of drawn texts.", rich_help_panel=SAMPLING)] = 0
    peer: Annotated[
        list[str],
        Option(metavar="transformers", help="Measure this too, side by side; repeatable.", rich_help_panel=OTHERS),
    ] = field(default_factory=list)
    url: Annotated[
        str | None,
        Option(
            help="Measure an OpenAI-compatible server; its key is taken from OPENAI_API_KEY.", rich_help_panel=OTHERS
        ),
    ] = None
    served_model: Annotated[
        str | None,
        Option(help="--url: what the server calls the model.", show_default="its first", rich_help_panel=OTHERS),
    ] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Write all figures.", rich_help_panel=REPORT)
    ] = None
    html_file: Annotated[
        Path | None,
        Option("--html", metavar="FILE", help="Write a page with plots, complete in itself.", rich_help_panel=REPORT),
    ] = None
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.", rich_help_panel=REPORT)] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.", rich_help_panel=REPORT)] = False

    def plan(self, methods: Sequence[str]) -> Plan:
        """Give what to measure.

        Raises:
            ConfigError: A value is out of range.
        """
        return Plan(
            methods=tuple(methods),
            lengths=whole_numbers("--num-speculative-tokens", self.lengths),
            concurrency=whole_numbers("--concurrency", self.concurrency),
            temperatures=_temperatures(self.temperature),
            budget=Budget(self.max_tokens, self.seed, self.ignore_eos),
            repeats=self.repeats,
            warmup=self.warmup,
        )

    def questions(self) -> list[Question]:
        """Read what to ask.

        Raises:
            InvalidRequestError: The file is missing or not as it should be.
        """
        default = PROMPTS if self.dataset == BUILTIN else None
        return spread(read_questions(self.dataset), self.num_prompts or default)


def bench(options: BenchOptions, model: ModelOptions) -> None:
    """Check everything that needs no model, measure, and report."""
    with reported(show_traceback=options.traceback):
        model = replace(model, model=one_model(options.target, model.model))
        _check_outputs(options)
        questions = options.questions()
        if options.url is not None:
            from outrider.cli.bench_url import measure_url

            report, interrupted = measure_url(options, model, questions)
        else:
            report, interrupted = _measure_local(options, model, questions)
        _write(report, options)
        if interrupted:
            raise typer.Exit(INTERRUPTED)
        from outrider.bench.report import failed

        if failed(report):
            raise typer.Exit(FAILED)


def _measure_local(options: BenchOptions, model: ModelOptions, questions: list[Question]) -> Measured:
    """Check all settings, then load one engine after another; Ctrl-C keeps what was measured."""
    _check_peers(options.peer)
    if options.served_model is not None:
        raise ConfigError("--served-model is what a server calls its model; give --url with it, or leave it out")
    base = model.arguments()
    plan = options.plan(_methods(options, model, base))
    jobs = _jobs(base, plan)
    check_models(base)
    from outrider.bench.local import LocalBench
    from outrider.bench.report import prompt_facts, report_of

    model.use_threads()
    run = LocalBench(jobs, questions, plan, peers=options.peer)
    interrupted = measured(run, plan.repeats, quiet=options.quiet)
    told = prompt_facts(options.dataset, run.prompts)
    return report_of(run.outcome, run.settings, plan, run.facts, told), interrupted


def _methods(options: BenchOptions, model: ModelOptions, base: dict[str, Any]) -> list[str]:
    """Give what to measure, plain decoding first: what was named, or lookup and what draft or config file imply."""
    if options.methods is not None:
        named = [one.strip() for one in options.methods.split(",") if one.strip()]
        if not named:
            raise ConfigError("--methods names none; give one or more, such as ngram,draft_model, or leave it out")
    else:
        named = [str(Method.NGRAM)]
        if model.config is not None and base["method"] is not None:
            named.append(base["method"])
        elif base["speculative_model"] is not None:
            from outrider.setup import implied_method

            named.append(str(implied_method(base["speculative_model"])))
    return list(dict.fromkeys([str(Method.NONE), *("+".join(methods_of(one)) for one in named)]))


def _jobs(base: dict[str, Any], plan: Plan) -> list[Job]:
    """Give the engines; in exact mode each draft length has one of its own, since its rounds all have that width."""
    from outrider.bench.local import Job

    together, jobs = max(plan.concurrency), []
    for method in plan.methods:
        split = base["exact"] and method != Method.NONE
        for lengths in [(one,) for one in plan.lengths] if split else [plan.lengths]:
            settings = tuple(plan.settings(method, lengths))
            jobs.append(Job(method, settings, engine_arguments(base, method, max(lengths), together)))
    return jobs


def _check_peers(peers: Sequence[str]) -> None:
    for one in peers:
        if one not in PEERS:
            raise ConfigError(f"--peer must be {' or '.join(PEERS)}, got {one!r}")


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--temperature must be numbers such as 0,0.7, got {text!r}") from None


def _check_outputs(options: BenchOptions) -> None:
    """Refuse, before any work, a report that could not be written."""
    check_writable("--json", options.json_file)
    check_writable("--html", options.html_file)
    if options.html_file is not None and options.html_file == options.json_file:
        raise ConfigError(f"--json and --html both name {options.html_file}; name two files")
    if options.html_file is not None and find_spec("matplotlib") is None:
        raise ConfigError("--html needs matplotlib, which is not installed: pip install 'outrider[bench]'")


def _write(report: dict[str, Any], options: BenchOptions) -> None:
    from rich.console import Console

    from outrider.cli.bench_tables import show_report

    show_report(report, Console(file=sys.stdout, no_color=not wants_colour(), highlight=False, markup=False))
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"figures: {options.json_file}")
    if options.html_file is not None:
        from outrider.bench.page import page

        options.html_file.write_text(page(report), encoding="utf-8")
        say(f"page:    {options.html_file}")
