"""The record as tables in a terminal: every engine, every prompt, also where we lose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from benchmarks.terminal import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from benchmarks.summary import Goal, Spread

__all__ = ["show"]


def show(
    console: Console,
    *,
    prompts: Sequence[str],
    engines: Sequence[str],
    unavailable: dict[str, str],
    cells: dict[tuple[str, str], dict[str, Spread]],
    ratios: dict[str, dict[str, Spread]],
    speculation: dict[tuple[str, str], dict[str, float]],
    equality: list[dict[str, Any]],
    passes: dict[str, dict[int, float]],
    goals: Sequence[Goal],
) -> None:
    """Print all tables."""
    for column, title, digits in (
        ("decode", "Decode, tokens a second after the first: median (lowest..highest)", 1),
        ("total", "End to end, tokens a second, prompt included: median (lowest..highest)", 1),
        ("first", "Seconds to the first token: median (lowest..highest)", 3),
    ):
        table = _table(title, "engine", prompts)
        for engine in engines:
            row = [cells.get((engine, prompt)) for prompt in prompts]
            table.add_row(engine, *(_spread(cell[column] if cell else None, digits) for cell in row))
        for engine, reason in unavailable.items():
            table.add_row(engine, f"unavailable: {reason}"[:60], *[""] * (len(prompts) - 1), style="dim")
        console.print(table)
    console.print(_speculation(prompts, engines, speculation))
    console.print(_ratios(prompts, ratios))
    if passes:
        console.print(_passes(passes))
    console.print(_equality(equality))
    console.print(_goals(goals))


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None or math.isnan(spread.median):
        return "-"
    low, high = _number(spread.low, digits), _number(spread.high, digits)
    return f"{_number(spread.median, digits)} ({low}..{high})"


def _speculation(
    prompts: Sequence[str], engines: Sequence[str], figures: dict[tuple[str, str], dict[str, float]]
) -> Table:
    table = _table("Speculation: tokens a round / share of guesses accepted / guesses a run", "engine", prompts)
    for engine in engines:
        row = [figures.get((engine, prompt)) for prompt in prompts]
        if any(row):
            table.add_row(engine, *(_speculated(one) for one in row))
    return table


def _speculated(figures: dict[str, float] | None) -> str:
    if figures is None:
        return "-"
    acceptance = figures["acceptance"]
    share = "-" if math.isnan(acceptance) else f"{acceptance:.0%}"
    return f"{_number(figures['tokens_per_round'], 2)} / {share} / {_number(figures['drafted'], 0)}"


def _ratios(prompts: Sequence[str], ratios: dict[str, dict[str, Spread]]) -> Table:
    table = _table("Ratios of decode speed, repeat by repeat: median (lowest..highest); red: slower", "ratio", prompts)
    for name, row in ratios.items():
        cells = []
        for prompt in prompts:
            ratio = row.get(prompt)
            slower = ratio is not None and ratio.median < 1
            cells.append(f"[red]{_spread(ratio, 2)}[/red]" if slower else _spread(ratio, 2))
        table.add_row(name, *cells)
    return table


def _passes(passes: dict[str, dict[int, float]]) -> Table:
    widths = next(iter(passes.values())).keys()
    columns = [*(f"{width} pos." for width in widths), "6 / 1"]
    table = _table("One pass at a context of 200 tokens, ms (median)", "engine", columns)
    for engine, row in passes.items():
        ratio = row[6] / row[1] if 6 in row and 1 in row else None
        table.add_row(engine, *(_number(1000 * seconds, 1) for seconds in row.values()), _number(ratio, 2))
    return table


def _equality(comparisons: list[dict[str, Any]]) -> Table:
    title = "Are the tokens the same? (bf16 may flip a near-tie; fp32 must not)"
    table = _table(title, "compared", ["prompt", "tokens"])
    for one in comparisons:
        at = one["first_divergence"]
        table.add_row(one["compared"], one["prompt"], "equal" if at is None else f"from token {at}")
    return table


def _goals(goals: Sequence[Goal]) -> Table:
    table = _table("Goals", "goal", ["bound", "measured", "worst prompt", "reached"])
    for goal in goals:
        worst = min(goal.by_prompt.items(), key=lambda item: item[1], default=None)
        verdict = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not measured"}[goal.reached]
        bound = f"{'>=' if goal.at_least else '<='} {goal.bound}"
        place = f"{worst[0]} {worst[1]:.2f}" if worst else "-"
        table.add_row(goal.name, bound, _number(goal.value, 2), place, verdict)
    return table
