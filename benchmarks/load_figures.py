"""From cells of load runs to ratios, goals and tables: pure functions, no server, no clock."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.terminal import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["OFFLINE", "OURS", "PEER", "goals", "goals_table", "interference_table", "load_table", "paired"]

OURS, OFFLINE, PEER = "outrider serve", "outrider offline", "vllm serve"
PEER_GOAL, PLAIN_GOAL, OVERHEAD_GOAL = 1.3, 1.0, 0.05
PEER_CLIENTS = (1, 4, 16)
PLAIN, SPECULATIVE = "off", "auto"  # what a cell's `speculation` is


def paired(
    cells: Sequence[dict[str, Any]], over: tuple[str, str], under: tuple[str, str], clients: int
) -> float | None:
    """Give how many times the throughput of (engine, speculation) `under` that of `over` is.

    Cells of one repeat are compared with each other, then the median of those ratios counts. A cell in which a request
    failed, and one that is missing, leave it unmeasured.
    """
    ratios = []
    rates = {
        (cell["engine"], cell["speculation"], cell["repeat"]): math.nan if cell["failed"] else cell["rate"]
        for cell in cells
        if cell["clients"] == clients
    }
    for (engine, speculation, repeat), rate in rates.items():
        if (engine, speculation) == over and (*under, repeat) in rates:
            ratios.append(rate / rates[*under, repeat])
    return None if not ratios or any(math.isnan(ratio) for ratio in ratios) else median(ratios)


def goals(cells: Sequence[dict[str, Any]], clients: Sequence[int]) -> list[dict[str, Any]]:
    """Hold ratios against the goals; `reached` is None where one could not be measured."""
    auto, plain = (OURS, SPECULATIVE), (OURS, PLAIN)
    found = [
        _goal(f"beside vLLM's speculation, {many} clients", PEER_GOAL, paired(cells, auto, (PEER, SPECULATIVE), many))
        for many in PEER_CLIENTS
    ]
    found += [
        _goal(f"beside own plain, {many} clients", PLAIN_GOAL, paired(cells, auto, plain, many)) for many in clients
    ]
    offline = sorted({cell["clients"] for cell in cells if cell["engine"] == OFFLINE})
    for many in offline or [None]:
        for kind in (PLAIN, SPECULATIVE):
            ratio = None if many is None else paired(cells, (OURS, kind), (OFFLINE, kind), many)
            name = f"share lost to the server, {kind}" + (f", {many} clients" if many else "")
            found.append(_goal(name, OVERHEAD_GOAL, None if ratio is None else 1 - ratio, at_least=False))
    return found


def _goal(name: str, bound: float, value: float | None, *, at_least: bool = True) -> dict[str, Any]:
    reached = None if value is None else (value >= bound if at_least else value <= bound)
    return {"name": name, "bound": bound, "at_least": at_least, "value": value, "reached": reached}


def load_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Show every engine at every number of clients: medians over repeats."""
    table = _table("Load: medians over repeats; milliseconds are p50 / p99", "engine", "speculation")
    for name in ("clients", "tokens/s", "first token", "between pieces", "a token", "end to end", "failed"):
        table.add_column(name, justify="right")
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["clients"], cell["engine"], cell["speculation"]), []).append(cell)
    for (clients, engine, speculation), group in sorted(groups.items()):
        waits = [_waits(group, name) for name in ("first_token", "gap", "per_token", "end_to_end")]
        failed = sum(len(cell["failed"]) for cell in group)
        table.add_row(
            engine, speculation, str(clients), _median(group, "rate", "{:.1f}".format), *waits,
            f"[red]{failed}[/red]" if failed else "0",
        )  # fmt: skip
    return table


def interference_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Show what a long prompt does to streams that run: milliseconds between pieces."""
    table = _table("Running streams while a long prompt arrives: ms between pieces", "engine", "speculation")
    for name in ("streams", "prompt", "p50", "p99", "longest", "its first token"):
        table.add_column(name, justify="right")
    for cell in cells:
        figures = [_milliseconds(cell[name]) for name in ("gap_p50", "gap_p99", "longest", "first_token")]
        table.add_row(cell["engine"], cell["speculation"], str(cell["streams"]), str(cell["prompt"]), *figures)
    return table


def goals_table(found: Sequence[dict[str, Any]]) -> Table:
    """Show the goals."""
    table = _table("Goals", "goal")
    for name in ("bound", "measured", "reached"):
        table.add_column(name, justify="right")
    for goal in found:
        verdict = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not measured"}[goal["reached"]]
        value = "-" if goal["value"] is None else f"{goal['value']:.3f}"
        table.add_row(goal["name"], f"{'>=' if goal['at_least'] else '<='} {goal['bound']}", value, verdict)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _waits(group: Sequence[dict[str, Any]], name: str) -> str:
    return " / ".join(_median(group, f"{name}_{share}", _milliseconds) for share in ("p50", "p99"))


def _median(group: Sequence[dict[str, Any]], name: str, shown: Callable[[float], str]) -> str:
    values = [cell[name] for cell in group if cell.get(name) is not None]
    return shown(median(values)) if values else "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
