"""`outrider tune`: the best setting for the user's own prompts, in a file that the other commands load."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from outrider.bench.plan import engine_arguments, whole_numbers
from outrider.bench.questions import BUILTIN, read_questions, spread
from outrider.bench.trials import Budget
from outrider.cli.bench import BENCH_WITHOUT
from outrider.cli.console import FAILED, INTERRUPTED, reported, say
from outrider.cli.options import SAMPLING, STOPPING, ModelOptions
from outrider.cli.show import wants_colour
from outrider.cli.values import check_models, check_writable, one_model
from outrider.config import Method, methods_of
from outrider.config_file import CONFIG_NAME
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.questions import Question
    from outrider.tune.search import Search, Wish
    from outrider.tune.verdict import Verdict

__all__ = ["TUNE_EXAMPLES", "TUNE_HELP", "TUNE_WITHOUT", "TuneOptions", "tune"]

SEARCH, RESULT = "Search", "Result"
PROMPTS = 12
# What is searched for, and what bench leaves out too; a file's settings are the search's result, not its start.
TUNE_WITHOUT = (*BENCH_WITHOUT, "tree", "config")
TREES = (Method.DRAFT_MODEL, Method.EAGLE, Method.MTP, Method.MEDUSA, Method.DFLASH, Method.SUFFIX)

TUNE_HELP = """Find the best setting for your own prompts, and write it to outrider.toml.

First every method is calibrated: one long draft against plain decoding tells how often guesses are right and what
rounds cost, and a cost model ranks all draft lengths by that. Then the promising ones are measured, beside plain
decoding and by turns, within `--budget` minutes. The error of every prediction is shown.

`outrider serve --config outrider.toml` (generate, chat and `LLM.from_config` too) runs what was found. Where
speculation is not worth it, that is said, and the file switches it off.

What was measured is kept beside the file (outrider.tune.json): an interrupted search goes on where it was.
"""

TUNE_EXAMPLES = """**Examples**

    outrider tune --dataset my_prompts.jsonl

    outrider tune Qwen/Qwen2.5-7B-Instruct -md Qwen/Qwen2.5-0.5B-Instruct --concurrency 1,8 --budget 20

    outrider serve --config outrider.toml

**Exit codes:** 0 done, 1 nothing could be measured, 2 something you gave was wrong, 130 interrupted.
"""


@dataclass(frozen=True)
class TuneOptions:
    """What to search among, how long, and where the result goes."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    output: Annotated[
        Path, Option("--output", "-o", metavar="FILE", help="The file to write.", rich_help_panel=RESULT)
    ] = Path(CONFIG_NAME)
    budget: Annotated[
        float, Option(metavar="MINUTES", help="How long the search may take, loading included.", rich_help_panel=SEARCH)
    ] = 10.0
    fresh: Annotated[bool, Option("--fresh", help="Forget what an earlier search found.", rich_help_panel=SEARCH)] = (
        False
    )
    methods: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Methods to search among.",
            show_default="ngram, suffix; with a draft, what it is, and ngram with it",
            rich_help_panel=SEARCH,
        ),
    ] = None
    lengths: Annotated[
        str,
        Option("--num-speculative-tokens", metavar="N,N", help="Draft lengths, 1 to 64 each.", rich_help_panel=SEARCH),
    ] = "2,3,5,8"
    trees: Annotated[
        bool, Option("--trees/--no-trees", help="Try trees of guesses too, where a method makes them.",
                     rich_help_panel=SEARCH),
    ] = False  # fmt: skip
    concurrency: Annotated[
        str,
        Option(metavar="N,N", help="Texts under way at a time; one setting is to serve all.", rich_help_panel=SEARCH),
    ] = "1"
    temperature: Annotated[float, Option(help="Of the texts; 0 is greedy.", rich_help_panel=SAMPLING)] = 0.0
    dataset: Annotated[
        str, Option(metavar="FILE|builtin", help="Your prompts: .jsonl, as bench takes it.", rich_help_panel=SEARCH)
    ] = BUILTIN
    num_prompts: Annotated[
        int, Option(min=1, help="Take so many at most, from each kind in turn.", rich_help_panel=SEARCH)
    ] = PROMPTS
    max_tokens: Annotated[int, Option("--max-tokens", "-n", help="Of each text.", rich_help_panel=STOPPING)] = 128
    seed: Annotated[int, Option(help="Of drawn texts.", rich_help_panel=SAMPLING)] = 0
    repeats: Annotated[int, Option(min=1, help="Turns of each setting.", rich_help_panel=SEARCH)] = 2
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.", rich_help_panel=RESULT)] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.", rich_help_panel=RESULT)] = False


def tune(options: TuneOptions, model: ModelOptions) -> None:
    """Check everything that needs no model, search, and write what was found."""
    with reported(show_traceback=options.traceback):
        model = replace(model, model=one_model(options.target, model.model))
        check_writable("--output", options.output)
        if not 0 < options.budget < math.inf:
            raise ConfigError(f"--budget must be a number of minutes above 0, got {options.budget:g}")
        questions = spread(read_questions(options.dataset), options.num_prompts)
        arguments = model.arguments()
        base, methods = _absolute(arguments), _methods(options, model)
        wish = _wish(options, base, methods)
        check_models(arguments)
        search = _search(options, wish, base, questions)
        model.use_threads()
        interrupted = _run(search, quiet=options.quiet)
        found = _close(search, options, base)
        if interrupted or not found:
            raise typer.Exit(INTERRUPTED if interrupted else FAILED)


def _methods(options: TuneOptions, model: ModelOptions) -> list[str]:
    if options.methods is not None:
        named = [one.strip() for one in options.methods.split(",") if one.strip()]
    elif model.speculative_model is not None:
        from outrider.setup import implied_method

        drafts = str(implied_method(model.speculative_model))
        named = [str(Method.NGRAM), drafts, f"{Method.NGRAM}+{drafts}"]
    else:
        named = [str(Method.NGRAM), str(Method.SUFFIX)]
    found = ["+".join(methods_of(one)) for one in named]
    found = list(dict.fromkeys(one for one in found if one != Method.NONE))
    if not found:
        raise ConfigError("--methods names nothing that drafts; plain decoding is always measured beside it")
    return found


def _wish(options: TuneOptions, base: dict[str, Any], methods: list[str]) -> Wish:
    """Check every engine's settings before one is loaded."""
    from outrider.bench.plan import Plan
    from outrider.tune.prediction import Variant
    from outrider.tune.search import Wish

    lengths = whole_numbers("--num-speculative-tokens", options.lengths)
    concurrency = whole_numbers("--concurrency", options.concurrency)
    budget = Budget(options.max_tokens, options.seed)
    Plan(tuple(methods), lengths, concurrency, (options.temperature,), budget, options.repeats)
    variants = [Variant(method) for method in methods]
    if options.trees and not base["exact"]:
        variants += [Variant(one, "auto") for one in methods if set(methods_of(one)) & set(TREES)]
    for variant in variants:
        engine_arguments({**base, "tree": variant.tree}, variant.method, max(lengths), max(concurrency))
    return Wish(
        tuple(variants), lengths, concurrency, options.temperature, budget, options.budget, repeats=options.repeats
    )


def _absolute(base: dict[str, Any]) -> dict[str, Any]:
    """Give paths as the file is to have them, which may be read from elsewhere."""
    paths = ("model", "speculative_model", "suffix_corpus", "draft_vocab_corpus")
    there = {name: Path(base[name]).expanduser() for name in paths if base.get(name) is not None}
    return base | {name: str(path.resolve()) for name, path in there.items() if path.exists()}


def _search(options: TuneOptions, wish: Wish, base: dict[str, Any], questions: list[Question]) -> Search:
    from outrider import __version__
    from outrider.tune.search import Search
    from outrider.tune.state import State, key_of

    same = {name: value for name, value in vars(wish).items() if name != "minutes"}
    key = key_of(version=__version__, base=base, wish=same, questions=questions)
    state = State.opened(options.output.with_suffix(".tune.json"), key, fresh=options.fresh)
    if state.begun and not options.quiet:
        say(
            f"going on where an earlier search was ({len(state.measured)} candidates measured in "
            f"{state.seconds / 60:.1f} minutes); --fresh starts anew"
        )
    return Search(wish, base, questions, state)


def _run(search: Search, *, quiet: bool) -> bool:
    """Search with progress; say whether Ctrl-C ended it."""
    total = 60 * search.wish.minutes
    if not quiet:
        say(f"budget: {search.wish.minutes:g} minutes, for {', '.join(one.title for one in search.wish.variants)}")
    try:
        if quiet:
            search.run()
        elif not sys.stderr.isatty():
            search.tell = lambda what: _line(search, what)
            search.run()
        else:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("", total=total)
                search.tell = lambda what: bar.update(task, description=what, completed=total - search.left)
                search.run()
    except KeyboardInterrupt:
        say("interrupted; what was measured is kept, and the same command goes on from there")
        return True
    return False


def _line(search: Search, what: str) -> None:
    """Write a line where an engine changes; turns go by too fast for a log."""
    if not what.startswith("measuring"):
        say(f"[{search.wish.minutes - search.left / 60:.1f} of {search.wish.minutes:g} min] {what}")


def _close(search: Search, options: TuneOptions, base: dict[str, Any]) -> bool:
    """Show what was found, write the file, and give other engines' flags; say whether there was anything to write."""
    from rich.console import Console

    from outrider.cli.tune_tables import show_equivalents, show_search
    from outrider.tune.verdict import config_text, verdict_of

    console = Console(file=sys.stdout, no_color=not wants_colour(), highlight=False, markup=False)
    verdict = verdict_of(search)
    show_search(search, verdict, console)
    if verdict is None:
        return False
    options.output.write_text(config_text(verdict, base, _notes(search, verdict, options)), encoding="utf-8")
    named = shlex.quote(str(options.output))
    console.print(f"\nwrote {options.output}: outrider serve --config {named}", markup=False)
    show_equivalents(verdict, base.get("speculative_model"), console)
    return True


def _notes(search: Search, verdict: Verdict, options: TuneOptions) -> list[str]:
    notes = [f"{verdict.reason}."]
    for together, told in verdict.speedups.items():
        notes.append(f"{together} at a time: {told['median']:.2f} ({told['min']:.2f} to {told['max']:.2f}).")
    notes.append(
        f"Prompts: {options.dataset}, {len(search.state.prompts)} of them, {options.max_tokens} tokens each at most, "
        f"temperature {options.temperature:g}."
    )
    return notes
