"""`outrider plan`: what a model would take and what speculation could bring, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from outrider.cli.console import reported, say, working
from outrider.cli.options import ModelOptions
from outrider.cli.values import one_model
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from outrider.advice.forecast import Forecast
    from outrider.advice.plan import Plan

__all__ = ["PLAN_EXAMPLES", "PLAN_HELP", "PlanOptions", "plan", "record_of", "show_plan"]

PLANNING = "Planning"

PLAN_HELP = """Say what a model and its draft would take, what fits, and what speculation could bring: by configs alone.

Reads config.json, the headers of the weights (of a Hub repository: a few kilobytes of them) and tokenizer files; no
weight is loaded or fetched. The bill is made by the engine's own arithmetic, for this machine or for a card that you
name (`--gpu`). Speedups are predicted from bytes and bandwidth, not measured. Drafts known for the model are listed,
each with the page that names it.

All options of loading mean what they mean elsewhere; with --max-model-len, all --max-num-seqs texts must fit at that
length.
"""

PLAN_EXAMPLES = """**Examples**

    outrider plan

    outrider plan Qwen/Qwen2.5-7B-Instruct --speculative-model Qwen/Qwen2.5-0.5B-Instruct --gpu "RTX 4090"

    outrider plan --shape llama-3.1-8b --draft-shape llama-3.2-1b --gpu "H100 80GB" --max-model-len 8192

    outrider plan model.gguf --json

**Exit codes:** 0 it fits, 1 it does not (what would is said), 2 something you gave was wrong.
"""


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for, besides the options of loading."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    shape: Annotated[
        str | None,
        Option(metavar="SHAPE", help="Sizes in place of a model, as `outrider pair` takes them.", show_default="none",
               rich_help_panel=PLANNING),
    ] = None  # fmt: skip
    draft_shape: Annotated[
        str | None,
        Option(metavar="SHAPE", help="The same for the draft.", show_default="none", rich_help_panel=PLANNING),
    ] = None
    gpu: Annotated[
        str | None,
        Option(metavar="NAME", help='A card to plan for, such as "H100 80GB", "L4" or "RTX 4090".',
               show_default="this machine", rich_help_panel=PLANNING),
    ] = None  # fmt: skip
    context: Annotated[
        int | None,
        Option(help="Tokens of context that speedups are predicted for.", min=0, show_default="1024",
               rich_help_panel=PLANNING),
    ] = None  # fmt: skip
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.", rich_help_panel=PLANNING)] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.")] = False


def plan(planning: PlanOptions, model: ModelOptions) -> None:
    """Make the plan and show it."""
    with reported(show_traceback=planning.traceback):
        if planning.gpu is not None and model.device is not None:
            raise ConfigError(f"--gpu {planning.gpu!r} and --device {model.device!r} name two places; give one")
        from outrider.advice.cards import card_named

        card = None if planning.gpu is None else card_named(planning.gpu)
        arguments = replace(model, model=one_model(planning.target, model.model)).arguments()
        if planning.draft_shape is not None and model.method is None:
            arguments["method"] = None  # a draft is named after all
            if model.num_speculative_tokens is None:
                arguments["num_speculative_tokens"] = 5
        with working("reading configs", quiet=True):
            from outrider.advice.plan import planned

            made = planned(
                arguments, shape=planning.shape, draft_shape=planning.draft_shape, card=card, context=planning.context
            )
        if planning.as_json:
            print(json.dumps(record_of(made), indent=1))
        else:
            show_plan(made)
    if not made.bill.fits:
        raise typer.Exit(1)


def record_of(made: Plan) -> dict[str, Any]:
    """Give a plan as JSON holds it."""
    from outrider.advice.forecast import ASSUMPTIONS

    record = asdict(made)
    record["bill"] |= {"total": made.bill.total, "fits": made.bill.fits}
    if made.overlap is not None:
        record["overlap"] |= {"share": made.overlap.share, "shared_strings": made.overlap.shared_strings}
    return record | {"assumptions": list(ASSUMPTIONS)}


def show_plan(made: Plan) -> None:
    """Print a plan for people."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # names may hold brackets
    _show_bill(console, made)
    _show_fit(console, made)
    _show_overlap(console, made)
    _show_forecasts(console, made)
    _show_candidates(console, made)
    for note in made.notes:
        say(f"note: {note}")


def _show_bill(console: Console, made: Plan) -> None:
    bill = made.bill
    drafting = f", drafting with {made.draft}" if made.draft else f", drafting by {made.method}"
    where = f", on {bill.place.name} ({_size(bill.place.total)}{'' if bill.place.device == 'cuda' else ' free'})"
    console.print(_begun(made.target, drafting + where), soft_wrap=True)
    table = _table("memory", "", "", "")
    for line in bill.lines:
        table.add_row(line.what, _size(line.num_bytes), line.how, line.detail)
    table.add_row("in all", _size(bill.total), "", "", style="bold")
    console.print(table)


def _show_fit(console: Console, made: Plan) -> None:
    bill = made.bill
    table = _table("tokens a text", *(f"{length}" for length in bill.sequences))
    table.add_row("texts that fit together", *(f"{count}" for count in bill.sequences.values()))
    console.print(table)
    each = f"{bill.per_token / 1024:.1f} KiB of cache a token"
    if bill.fits:
        together = min(bill.max_num_seqs, bill.sequences[bill.max_model_len])
        console.print(
            f"It fits: {each}, texts of up to {bill.max_model_len} tokens, {together} of {bill.max_num_seqs} together "
            f"at that length, {bill.longest_alone} tokens alone."
        )
        return
    console.print(_begun("It does not fit:", f" {bill.problem}.", "bold red"))
    if bill.over:
        console.print(f"Weights and working memory alone are {_size(bill.over)} too much.")
    console.print("What would:" if made.remedies else "Nothing that was tried would.")
    for remedy in made.remedies:
        console.print(f"  - {remedy}")


def _show_overlap(console: Console, made: Plan) -> None:
    found = made.overlap
    if found is None:
        return
    verdict = "the draft can guess by ids"
    if not found.fits:
        verdict = f"{found.clashing} ids mean two things: the draft is refused without --cross-vocabulary auto"
    console.print(
        f"\nVocabularies: {found.same_ids} of the target's {found.target_size} tokens are the draft's too, by the same "
        f"id ({found.share:.1%}), {found.moved} by another; {verdict}."
    )
    for name, (one, other) in found.special.items():
        console.print(f"Their {name} ids differ: {one} and {other}.")


def _show_forecasts(console: Console, made: Plan) -> None:
    from outrider.advice.forecast import AGREEMENTS, ASSUMPTIONS, BATCHES

    console.print(_begun("\nPredicted speedup over plain decoding", ", and the draft length (K) it takes"))
    for method in dict.fromkeys(one.method for one in made.forecasts):
        console.print(f"  {method}")
        table = _table("texts", *(f"agree {one:.0%}" for one in AGREEMENTS))
        for rows in BATCHES:
            cells = [_cell(one) for one in made.forecasts if (one.method, one.rows) == (method, rows)]
            table.add_row(f"{rows}", *cells)
        console.print(table)
    machine = made.machine
    limits = "No card of the table: bytes are compared and arithmetic is left out, so larger batches look too good."
    if machine is not None and machine.compute is not None:
        limits = (
            f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.compute / 1e12:.0f} TFLOPS, as the datasheet states them."
        )
    for words in (*ASSUMPTIONS, limits):
        console.print(f"- {words}", style="dim")


def _cell(one: Forecast) -> str:
    return f"{one.speedup:.2f}x K={one.best}" if one.best else "plain"


def _show_candidates(console: Console, made: Plan) -> None:
    if not made.candidates:
        return
    console.print("\nDrafts known for this model", style="bold")
    for one in made.candidates:
        console.print(f"- {one.id} ({one.kind}){f': {one.note}' if one.note else ''}", soft_wrap=True)
        console.print(f"  {one.source}", style="dim", soft_wrap=True)


def _begun(strong: str, rest: str, style: str = "bold") -> Text:
    from rich.text import Text

    return Text.assemble((strong, style), rest)


def _table(first: str, *others: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if not name else "right")
    return table


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"
