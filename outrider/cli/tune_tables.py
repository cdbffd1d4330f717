"""What a search found, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.bench.words import times, times_range
from outrider.tune.equivalents import equivalents
from outrider.tune.search import typical_error

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.tune.search import Search
    from outrider.tune.verdict import Verdict

__all__ = ["show_equivalents", "show_search"]

MOST_ROWS = 16


def show_search(search: Search, verdict: Verdict | None, console: Console) -> None:
    """Write the candidates with what was predicted and measured, and the verdict."""
    ranked, state = search.ranked(), search.state
    for name, reason in state.failures.items():
        console.print(f"{name} failed: {reason}", style="red", markup=False)
    if not ranked:
        why = f" within {search.wish.minutes:g} minutes; give it a larger --budget" if search.spent else ""
        console.print(f"nothing could be calibrated{why}", style="red")
        return
    for together in search.wish.concurrency:
        _table(search, together, console)
    error = typical_error(state.measured)
    if error is not None:
        console.print(f"predictions were off by {error:.0%} (median of {len(state.measured)} candidates)")
    if search.spent:
        console.print(
            f"the budget of {search.wish.minutes:g} minutes is spent; the same command goes on from here",
            style="yellow",
        )
    if verdict is None:
        console.print("nothing was measured, so nothing is recommended; give it a larger --budget", style="red")
        return
    console.print(f"\n{verdict.reason}", style="bold green" if verdict.worth else "bold yellow", markup=False)
    for name, told in verdict.speedups.items():
        console.print(f"  expected at {name} at a time: {times(told)} ({times_range(told)})", markup=False)


def _table(search: Search, together: int, console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("one at a time" if together == 1 else f"{together} at a time")
    for name in ("predicted", "measured", "error", "auto", "of turns"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(search.ranked(), key=lambda one: one.title not in search.state.measured)  # the measured ones first
    for one in rows[:MOST_ROWS]:
        told = search.state.measured.get(one.title)
        predicted = f"{one.predicted[together]:.2f}x"
        table.add_row(one.title, predicted, *(_seen(told, str(together)) if told else ("-",) * 4))
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS} more that promised less")


def _seen(told: dict[str, Any], together: str) -> tuple[str, ...]:
    error = told["error"][together]
    auto = told["auto"][together]
    return times(told["fixed"][together]), "-" if error is None else f"{error:+.0%}", times(auto), times_range(auto)


def show_equivalents(verdict: Verdict, draft: str | None, console: Console) -> None:
    """Write the same setting as other engines spell it."""
    console.print("\nthe same elsewhere (their speed is not measured here):")
    for engine, flags in equivalents(verdict.variant, verdict.length, draft).items():
        console.print(f"  {engine}: {flags}", markup=False, soft_wrap=True)
