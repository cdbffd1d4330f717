"""A benchmark's report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.bench.words import conditions, counted, memory_words, milliseconds, parting, share, times, times_range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

__all__ = ["show_report"]

WIDE = 118  # columns from which on all figures are shown
MOST_LOSSES = 8


def show_report(report: dict[str, Any], console: Console) -> None:
    """Write tables, losses and notes."""
    plan, prompts = report["plan"], report["prompts"]
    kinds = f" in {len(prompts['kinds'])} kinds" if len(prompts["kinds"]) > 1 else ""
    console.print(
        f"\n{_title(report)}: {counted(prompts['count'], 'prompt')}{kinds}, up to {plan['max_tokens']} tokens each, "
        f"{counted(plan['repeats'], 'turn')} of each setting. Medians (least to most); speedup over plain decoding "
        "beside it.",
        markup=False,
    )
    groups: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault((cell["temperature"], cell["concurrency"]), []).append(cell)
    for (temperature, concurrency), cells in groups.items():
        console.print(f"\n{conditions(temperature, concurrency)}", style="bold", markup=False)
        _table(cells, console)
        parted = [told for one in cells if (told := parting(one, report["model"].get("dtype"))) is not None]
        for told in parted:
            console.print(told, markup=False)
    _memory(report["memory"], console)
    _losses(report, console)
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)


def _title(report: dict[str, Any]) -> str:
    model = report["model"]
    where = ", ".join(str(model[name]) for name in ("dtype", "device") if model.get(name))
    return f"{model['name']} ({where})" if where else str(model["name"])


def _columns(*, wide: bool) -> Sequence[tuple[str, Callable[[dict[str, Any]], str]]]:
    """Give the titles and what stands below them; a narrow terminal gets the figures that decide."""
    return [
        ("tok/s", lambda one: _number(one["tokens_per_second"]["median"], ".1f")),
        *([("least to most", lambda one: _rates(one["tokens_per_second"]))] if wide else []),
        ("speedup", lambda one: times(one["speedup"])),
        *([("of turns", lambda one: times_range(one["speedup"]))] if wide else []),
        ("accept", lambda one: share(one["acceptance_rate"])),
        ("tok/round", lambda one: _number(one["tokens_per_round"], ".2f")),
        ("first", lambda one: milliseconds(one["first_token"]["p50"])),
        ("token", lambda one: milliseconds(one["per_token"]["p50"])),
        *([("token p99", lambda one: milliseconds(one["per_token"]["p99"]))] if wide else []),
        *([("wait", lambda one: milliseconds(one["between_deliveries"]["p50"]))] if wide else []),
        *([("wait p99", lambda one: milliseconds(one["between_deliveries"]["p99"]))] if wide else []),
        *([("whole text", lambda one: milliseconds(one["end_to_end"]["p50"]))] if wide else []),
        *([("drafting", lambda one: share((one["time"] or {}).get("draft")))] if wide else []),
        ("equal", lambda one: _equal(one["equality"])),
    ]


def _table(cells: Sequence[dict[str, Any]], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = _columns(wide=console.width >= WIDE)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")  # long names wrap before figures are cut
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    failures = []
    for cell in cells:
        title = "plain" if cell["title"] == "none" else str(cell["title"])
        if cell["status"] == "failed":
            failures.append(f"{title} failed: {cell['reason']}")
            table.add_row(Text(f"{title} FAILED", style="red"))
            continue
        speedup = (cell["speedup"] or {}).get("median")
        style = "" if speedup is None else "green" if speedup >= 1 else "red"
        row = [Text(tell(cell), style=style if name == "speedup" else "") for name, tell in columns]
        table.add_row(Text(title), *row)
    console.print(table)
    for failure in failures:
        console.print(failure, style="red", markup=False)


def _memory(memory: dict[str, dict[str, Any]], console: Console) -> None:
    for method, told in memory.items():
        console.print(f"memory, {method}: {memory_words(told)}", markup=False)


def _losses(report: dict[str, Any], console: Console) -> None:
    found = report["losses"]
    compared = [one for one in report["cells"] if one["status"] == "measured" and one["speedup"] is not None]
    if not compared:
        return
    if not found:
        console.print("nothing was slower than plain decoding", style="green")
        return
    console.print(f"\nwhere it loses ({len(found)}):", style="bold")
    for one in found[:MOST_LOSSES]:
        where = conditions(one["temperature"], one["concurrency"])
        what = f", {one['kind'].replace('_', ' ')}" if one["kind"] else ""
        unsure = " (not in every turn)" if one["steady"] is False else ""
        console.print(f"  {one['title']}, {where}{what}: {one['speedup']:.2f}x{unsure}", markup=False)
    if len(found) > MOST_LOSSES:
        console.print(f"  and {len(found) - MOST_LOSSES} more, by setting and kind of prompt (--json, --html)")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _rates(spread: dict[str, float]) -> str:
    return f"{spread['min']:.1f} to {spread['max']:.1f}"


def _equal(told: dict[str, Any] | None) -> str:
    if told is None:
        return "-"
    if told["equal"] == told["texts"]:
        return "all"
    return f"{told['equal']} of {told['texts']}"
