"""`outrider doctor`: why acceptance or speed is poor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path  # Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from outrider.cli.console import reported, say, working
from outrider.cli.options import DRAFTING, SAMPLING, STOPPING, ModelOptions
from outrider.cli.prompts import read_prompts
from outrider.cli.values import one_model
from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from outrider.advice.doctor import Diagnosis
    from outrider.advice.evidence import Evidence
    from outrider.llm import LLM

__all__ = ["DOCTOR_EXAMPLES", "DOCTOR_HELP", "DoctorOptions", "doctor", "record_of", "show_diagnosis"]

DOCTOR_HELP = """Say why acceptance or speed is poor: each fault by name, with the numbers that show it and the remedy.

First looks at the files (vocabulary, special tokens, chat template, a head's layers and norms, contexts, bits, sizes),
then loads the pair and runs prompts: agreement by place in the chain and in the text, against temperature and against
the draft's own quantisation, what passes cost, and where the time of a round goes. Best run on your own prompts, at
your temperature, with as many texts together (--max-num-seqs) as you will have.
"""

DOCTOR_EXAMPLES = """**Examples**

    outrider doctor Qwen/Qwen2.5-7B-Instruct --speculative-model Qwen/Qwen2.5-0.5B-Instruct

    outrider doctor -m target.gguf -md draft.gguf -f prompts.jsonl --temperature 0.7 --max-num-seqs 8

    outrider doctor MODEL --speculative-model EAGLE_HEAD --files-only --json

**Exit codes:** 0 nothing that costs speed was found, 1 something was, 2 something you gave was wrong.
"""


@dataclass(frozen=True)
class DoctorOptions:
    """What to examine with, besides the options of loading."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    file: Annotated[
        Path | None,
        Option("--file", "-f", help='Your prompts: a text, or a .jsonl with "prompt" or "messages" a line.',
               show_default="built-in texts", rich_help_panel=SAMPLING),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int, Option("--max-tokens", "-n", min=1, help="Tokens of each text.", rich_help_panel=STOPPING)
    ] = 64
    temperature: Annotated[
        float, Option(help="At which to generate; agreement is compared with greedy.", rich_help_panel=SAMPLING)
    ] = 0.0
    files_only: Annotated[
        bool, Option("--files-only", help="Look at files alone; load nothing.", rich_help_panel=DRAFTING)
    ] = False
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.")] = False


def doctor(examining: DoctorOptions, model: ModelOptions) -> None:
    """Examine, then show what was found."""
    with reported(show_traceback=examining.traceback):
        if not 0 <= examining.temperature <= 100:
            raise InvalidRequestError(f"--temperature must be 0 to 100, got {examining.temperature}")
        given = read_prompts(None, None, examining.file) if examining.file is not None else None
        model = replace(model, model=one_model(examining.target, model.model))
        arguments = model.arguments()
        with working(f"examining {model.shown_model}", quiet=examining.as_json):
            from outrider.advice.doctor import diagnose

            model.use_threads()

            def prepared(llm: LLM) -> list[Any]:
                return [one.prepared(llm, chat=None, system=None) for one in given or ()]

            found = diagnose(
                arguments,
                prepared if given else None,
                max_tokens=examining.max_tokens,
                temperature=examining.temperature,
                measure=not examining.files_only,
            )
        if examining.as_json:
            print(json.dumps(record_of(found), indent=1))
        else:
            show_diagnosis(found)
    if not found.healthy:
        raise typer.Exit(1)


def record_of(found: Diagnosis) -> dict[str, Any]:
    """Give a diagnosis as JSON holds it."""
    record = asdict(found)
    if found.evidence is not None:
        rounds = found.evidence.timings.rounds
        record["evidence"]["timings"]["rounds"] = [
            {"texts": rows, "guesses": length, "seconds": seconds} for (rows, length), seconds in rounds.items()
        ]
    return record | {"healthy": found.healthy}


def show_diagnosis(found: Diagnosis) -> None:
    """Print a diagnosis for people."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)  # names and remedies may hold brackets
    by = f"with {found.draft} ({found.method})" if found.draft else f"by {found.method}"
    console.print(Text.assemble((found.target, "bold"), f", drafting {by}"), soft_wrap=True)
    if found.evidence is not None:
        _show_evidence(console, found.evidence)
    if found.healthy:
        console.print("\nNothing found that costs speed.", style="bold green")
    for one in found.findings:
        colour = {"severe": "red", "moderate": "yellow"}.get(one.severity, "dim")
        console.print(f"\n{one.severity}: {one.code}", style=f"bold {colour}")
        console.print(f"  {_capital(one.what)}.")
        numbers = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in one.evidence.items())
        console.print(Text.assemble(("  evidence: ", "dim"), numbers))
        console.print(Text.assemble(("  remedy:   ", "dim"), one.remedy))
    for note in found.notes:
        say(f"note: {note}")


def _show_evidence(console: Any, evidence: Evidence) -> None:
    from rich import box
    from rich.table import Table

    timings, agreement = evidence.timings, evidence.agreement
    chain = " ".join(f"{one:.2f}" for one in agreement.by_position) or "no guesses"
    halves = f"in the texts' first half {agreement.early:.0%}, in the second {agreement.late:.0%}"
    faster = timings.drafted_rate / max(timings.plain_rate, 1e-9)
    rows = [
        ("guesses judged", f"{agreement.drafted}, {evidence.num_tokens} a round, {evidence.rows} texts together"),
        ("agreement by place", chain),
        ("agreement in all", f"{agreement.share:.0%}; {halves}"),
        ("tokens a round", f"{agreement.tokens(evidence.num_tokens):.2f}"),
        ("tokens a second", f"{timings.drafted_rate:.1f}, plainly {timings.plain_rate:.1f}: {faster:.2f}x"),
        ("a round without guesses", f"{timings.target_pass * 1e3:.2f} ms"),
    ]
    if timings.draft_pass is not None:
        rows.append(("a guess more", f"{timings.draft_pass * 1e3:.2f} ms"))
    alone = "" if timings.models_seconds is None else f"; profiled alone {timings.models_seconds * 1e3:.2f} ms"
    rows.append(("a round", f"{timings.round_seconds * 1e3:.2f} ms{alone}"))
    rows.append(("threads", f"{evidence.threads} on {evidence.cores} cores"))
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
