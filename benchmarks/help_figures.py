"""What the lines of when_it_helps.py say: points, tables and plots. Nothing here runs an engine."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.regret_figures import PLAIN
from benchmarks.terminal import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["LINES", "draw", "line_table", "point"]

LINES = {
    "agreement": "share of tokens on which the draft agrees",
    "tokens": "new tokens of a text",
    "rows": "texts at a time",
    "size": "the draft's bytes a pass, by the target's",
    "temperature": "temperature",
}


def point(at: float, rates: dict[str, list[float]], accepted: dict[str, float], **more: Any) -> dict[str, Any]:
    """Work a point out of its rates (tokens a second) by setting and turn: speedups over plain, turn by turn."""
    plain = rates[PLAIN]
    ratios = {
        name: sorted(one / other for one, other in zip(values, plain, strict=True))
        for name, values in rates.items()
        if name != PLAIN
    }
    return {
        "at": at,
        **more,
        "rates": rates,
        "accepted": accepted,
        "speedup": {name: median(values) for name, values in ratios.items()},
        "lowest": {name: values[0] for name, values in ratios.items()},
        "highest": {name: values[-1] for name, values in ratios.items()},
    }


def groups(points: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Part the points of a line where something besides the line's own quantity differs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in points:
        name = one.get("prompt") or (f"agreement {one['agreement']:g}" if "agreement" in one else "")
        found.setdefault(name if one.get("agreement") != one["at"] else "", []).append(one)
    return found


def max_length(one: dict[str, Any]) -> int:
    """The longest fixed draft length of a point."""
    return max((int(name[-1]) for name in one["speedup"] if name[-1:].isdigit()), default=0)


def line_table(name: str, points: Sequence[dict[str, Any]]) -> Table:
    """Lay out a line: times as fast as plain, by setting."""
    table = Table(title=f"Times as fast as plain, by {LINES[name]}", title_justify="left")
    settings = list(dict.fromkeys(setting for one in points for setting in one["speedup"]))
    for column in (name, "", *settings, "accepted"):
        table.add_column(column, justify="right")
    for kind, some in groups(points).items():
        for one in some:
            shares = [f"{share:.2f}" for each, share in one["accepted"].items() if each.endswith(str(max_length(one)))]
            cells = (f"{one['speedup'][each]:.2f}" if each in one["speedup"] else "" for each in settings)
            table.add_row(f"{one['at']:.3g}", kind, *cells, " / ".join(shares))
    return table


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw each line of a record into a folder: an SVG each, named after the line and after where it was measured."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    where, place = record.get("card") or record["machine"]["cpu"], "-card" if record.get("card") else ""
    for name, points in record["lines"].items():
        parts = groups(points)
        figure, panes = plt.subplots(1, len(parts), figsize=(1.5 + 4.2 * len(parts), 3.6), sharey=True, squeeze=False)
        for pane, (kind, some) in zip(panes[0], parts.items(), strict=True):
            _lines(pane, name, some)
            pane.set_title(kind)
        panes[0][0].set_ylabel("times as fast as plain")
        panes[0][-1].legend(fontsize="small")
        figure.suptitle(f"{where}, {record['date'][:10]}", fontsize="small")
        figure.tight_layout()
        figure.savefig(folder / f"when-{name}{place}.svg", metadata={"Date": None})
        plt.close(figure)


def _lines(pane: Any, name: str, points: Sequence[dict[str, Any]]) -> None:
    """Draw the speedup of each setting, from its lowest to its highest turn."""
    at = [one["at"] for one in points]
    for setting in points[0]["speedup"]:
        middle = [one["speedup"][setting] for one in points]
        around = [
            [one["speedup"][setting] - one["lowest"][setting] for one in points],
            [one["highest"][setting] - one["speedup"][setting] for one in points],
        ]
        label = setting if not setting[-1:].isdigit() else f"{setting[:-1]}K={setting[-1]}"
        thick = {"linewidth": 2.2, "color": "black"} if setting == "auto" else {"linewidth": 1.2}
        pane.errorbar(at, middle, around, label=label, marker=".", capsize=2, **thick)
    pane.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    pane.set_xlabel(LINES[name])
    if name in ("tokens", "rows", "size"):
        pane.set_xscale("log", base=2 if name != "size" else 10)
        pane.set_xticks(at, [f"{100 * one:.0f} %" if name == "size" else f"{one:g}" for one in at])
        pane.minorticks_off()
