"""A report's plots, as SVG. Needs matplotlib, which the extra "bench" brings."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["acceptance_plot", "latency_plot", "speedup_plot"]

COLOURS = ("#0b6e99", "#d1495b", "#3a7d44", "#8f5db7", "#c77d1e", "#555555", "#1b9e9e", "#a83279")
MOST_LINES = 12

Cells = "Sequence[dict[str, Any]]"


def speedup_plot(cells: Sequence[dict[str, Any]]) -> str | None:
    """Draw the speedup over plain decoding by method and draft length, with the spread of the turns."""
    shown = [one for one in cells if one["status"] == "measured" and one["speedup"] is not None]
    if not shown:
        return None
    figure, axes = _figure(max(4.5, 1.2 + 0.55 * len(shown)), 3.4)
    methods = list(dict.fromkeys(_method(one) for one in shown))
    for place, one in enumerate(shown):
        told = one["speedup"]
        low, high = told["median"] - told["min"], told["max"] - told["median"]
        colour = COLOURS[methods.index(_method(one)) % len(COLOURS)]
        axes.bar(place, told["median"], color=colour, alpha=1 if told["median"] >= 1 else 0.45, width=0.75)
        axes.errorbar(place, told["median"], yerr=[[low], [high]], color="#222222", capsize=3, linewidth=1)
        axes.annotate(
            f"{told['median']:.2f}", (place, told["max"]), ha="center", va="bottom", fontsize=8, xytext=(0, 2),
            textcoords="offset points",
        )  # fmt: skip
    axes.axhline(1, color="#222222", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(shown)), [str(one["length"]) for one in shown])
    axes.set_ylabel("times as fast as plain")
    axes.set_xlabel("guesses a round")
    axes.set_ylim(0, max(1.1, *(one["speedup"]["max"] for one in shown)) * 1.12)
    _name_methods(axes, methods)
    return _svg(figure)


def acceptance_plot(cells: Sequence[dict[str, Any]]) -> str | None:
    """Draw how often a guess was accepted, by its place in the chain."""
    shown = [one for one in cells if one["status"] == "measured" and one["acceptance_by_position"]]
    if not shown:
        return None
    figure, axes = _figure(5.5, 3.4)
    for number, one in enumerate(shown[:MOST_LINES]):
        rates = one["acceptance_by_position"]
        axes.plot(
            range(1, len(rates) + 1), rates, marker="o", markersize=3, linewidth=1.2, label=one["title"],
            color=COLOURS[number % len(COLOURS)], linestyle=("-", "--")[number // len(COLOURS) % 2],
        )  # fmt: skip
    axes.set_xticks(range(1, 1 + max(len(one["acceptance_by_position"]) for one in shown[:MOST_LINES])))
    axes.set_xlabel("place of the guess")
    axes.set_ylabel("share accepted")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def latency_plot(cells: Sequence[dict[str, Any]]) -> str | None:
    """Draw how whole texts' times, and waits between deliveries, are distributed."""
    # Plain decoding once: on every engine it is the same line.
    once = [one for one in cells if not one["plain"] or one["method"] in ("none", "server")]
    shown = [one for one in once if one["status"] == "measured" and one["quantiles"]["end_to_end"]]
    if not shown:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name, words, scale in (
        (left, "end_to_end", "seconds of a whole text", 1),
        (right, "between_deliveries", "milliseconds between deliveries", 1000),
    ):
        for number, one in enumerate(shown[:MOST_LINES]):
            points = [scale * value for value in one["quantiles"][name]]
            if not points:
                continue
            shares = [place / (len(points) - 1) for place in range(len(points))]
            axes.plot(
                points, shares, linewidth=1.2, label="plain" if one["title"] == "none" else one["title"],
                color=COLOURS[number % len(COLOURS)], linestyle=("-", "--")[number // len(COLOURS) % 2],
            )  # fmt: skip
        axes.set_xlabel(words)
        axes.set_ylim(0, 1.02)
        _plainly(axes)
    left.set_ylabel("share that took no longer")
    right.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _method(cell: dict[str, Any]) -> str:
    return f"transformers {cell['method']}" if cell["engine"] == "transformers" else str(cell["method"])


def _name_methods(axes: Axes, methods: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[place % len(COLOURS)], label=name) for place, name in enumerate(methods)]
    axes.legend(handles=patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=(width + 1.6, height), layout="constrained")
    axes = figure.subplots()
    _plainly(axes)
    return figure, axes


def _plainly(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)


def _svg(figure: Figure) -> str:
    """Give the figure as an element for a page: no header, no link to anywhere."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
