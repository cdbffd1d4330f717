"""What `outrider verify` found, for people and for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from outrider.cli.show import wants_colour
from outrider.proof.record import summary, without_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from outrider.proof.prove import Cell, Proof, Target
    from outrider.proof.replay import Recall
    from outrider.proof.texts import Parting

__all__ = ["as_json", "closing", "tables"]

MOST_LINES = 20  # partings shown one by one
WIDTH = 120  # of tables that no terminal limits


def as_json(proof: Proof, recalls: list[Recall] | None, differences: list[str] | None) -> dict[str, Any]:
    """Give all findings, without texts."""
    found = summary(proof)
    if recalls is not None:
        found["replayed"] = [
            {
                "setting": one.setting,
                "run": one.run,
                "texts": one.texts,
                "defects": one.defects,
                "partings": [without_text(each) for each in one.partings],
            }
            for one in recalls
        ]
        found["machine_differences"] = differences or []
        if any(one.defects for one in recalls):
            found["verdict"] = "defect"
    return found


def tables(proof: Proof, tokenizer: Any, recalls: list[Recall] | None) -> None:
    """Write the tables, and where texts part."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(file=sys.stdout, no_color=not wants_colour(), highlight=False, markup=False, width=width)
    compared = [cell for cell in proof.cells if not cell.by_distribution]
    drawn = [cell for cell in proof.cells if cell.by_distribution]
    if compared:
        console.print(_token_table(compared))
    if drawn:
        console.print(_law_table(drawn))
        for line in _about_laws(drawn):
            console.print(line, markup=False)
    lines = [_line(f"{_setting(cell.setting)}, ", one, tokenizer) for cell in proof.cells for one in cell.partings]
    for recall in recalls or []:
        where = f"{_setting(recall.setting)}, {recall.run} text against the record, "
        lines += [_line(where, one, tokenizer, ("recorded", "now")) for one in recall.partings]
    for line in lines[:MOST_LINES]:
        console.print(line, markup=False, soft_wrap=True)
    if len(lines) > MOST_LINES:
        console.print(f"and {len(lines) - MOST_LINES} more (--json has all)")


def _table(names: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left")
    return table


def _token_table(cells: list[Cell]) -> Table:
    table = _table(("setting", "texts", "equal", "part", "near-ties", "defects", "accepted"))
    for cell in cells:
        parted = len(cell.partings)
        counts = (len(cell.plain), len(cell.plain) - parted, parted, parted - cell.defects, cell.defects)
        table.add_row(_setting(cell.setting), *map(str, counts), f"{cell.accepted} of {cell.drafted}")
    return table


def _law_table(cells: list[Cell]) -> Table:
    table = _table(("setting", "position", "draws", "cells", "p-value", "would find", "law"))
    for cell in cells:
        for one in cell.tests:
            table.add_row(_setting(cell.setting), *_test(one))
    return table


def _about_laws(cells: list[Cell]) -> list[str]:
    lines = [
        f"{_setting(cell.setting)}: {len(cell.speculative)} texts, {cell.accepted} of {cell.drafted} guesses accepted."
        for cell in cells
    ]
    levels = [one.outcome.level for cell in cells for one in cell.tests if one.outcome is not None]
    if levels:
        lines.append(
            f"A test fails below a p-value of {levels[0]:.1g}. It would find, with a chance of 95 %, draws whose "
            "distribution is at that total variation distance (TV) from the target's."
        )
    return lines


def _setting(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in setting.items())


def _test(one: Any) -> tuple[str, ...]:
    if one.outcome is None:
        told = ("-", "-")
    else:
        outcome = one.outcome
        told = (f"{outcome.p_value:.3g}", f"TV {outcome.smallest:.3f}")
    verdict = "another: defect" if one.failed else "not tested" if one.outcome is None else "the target's"
    if one.impossible:
        verdict += f" ({one.impossible} impossible)"
    return (str(one.position), str(one.draws), str(one.cells), *told, verdict)


def _line(where: str, one: Parting, tokenizer: Any, names: tuple[str, str] = ("plain", "speculative")) -> str:
    begin = f"{where}prompt {one.prompt + 1}: token {one.position}: "
    if one.plain is None and one.speculative is None:
        return f"{begin}{names[0]} ended by {one.reasons[0]}, {names[1]} by {one.reasons[1]}: {one.verdict}"
    words = [_named(token, tokenizer) for token in (one.plain, one.speculative)]
    gap = "none: one is ruled out" if one.gap is None else f"{one.gap:.4f}"
    top2 = "" if one.top2 is None else f", top-2 gap {one.top2:.4f}"
    return f"{begin}{names[0]} {words[0]}, {names[1]} {words[1]}, gap {gap}{top2}: {one.verdict}"


def _named(token: int | None, tokenizer: Any) -> str:
    if token is None:
        return "the end"
    return f"{token}" if tokenizer is None else f"{tokenizer.decode([token])!r} ({token})"


def closing(proof: Proof, target: Target, recalls: Sequence[Recall] | None) -> str:
    """Say in a line or two what it comes to, and how far that reaches."""
    again = sum(one.defects for one in recalls or ())
    if proof.defects or again:
        told = f"NOT PROVEN: {proof.defects + again} defects"
        return f"{told}, {again} of them against the record" if recalls is not None else told
    texts = sum(len(cell.plain) for cell in proof.cells)
    ties = sum(len(cell.partings) for cell in proof.cells)
    parts = []
    if texts:
        reach = f" (with 95 % confidence, of texts like these fewer than {3 / texts:.2%} have one)" if texts > 3 else ""
        parts.append(f"{texts} texts, {ties} near-{'tie' if ties == 1 else 'ties'}, no defect{reach}")
    drawn = sum(len(cell.speculative) for cell in proof.cells if cell.by_distribution)
    if drawn:
        parts.append(f"{drawn} texts follow the target's distribution, as far as the table says")
    if recalls is not None:
        parts.append("the record is confirmed")
    dtype = str(target.dtype).removeprefix("torch.")
    granted = (
        "nothing is granted to rounding" if proof.near is None else f"rounding reaches {proof.near:.3f} of a logit"
    )
    return f"proven as far as tested: {'; '.join(parts)}. In {dtype} on {target.device}, {granted}."
