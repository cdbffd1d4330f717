"""The arithmetic of gpu_rounds.py: floors, ratios, goals, and its tables. Pure functions of what was measured."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.terminal import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    Cell = dict[str, Any]

__all__ = [
    "best",
    "cell_of",
    "find",
    "floor_rate",
    "goals",
    "goals_table",
    "rounds_table",
    "start_table",
    "tokens_a_round",
]

OURS, PEER, STOCK = "outrider", "vllm", "transformers"
AGREEMENT = 0.8  # of the goals
PLAIN_DRAFT = "bf16"  # weights of a draft as it was written


def tokens_a_round(agreement: float, lookahead: int) -> float:
    """Expect ``1 + a + ... + a^K`` tokens from a chain of K guesses, each right with chance a."""
    return sum(agreement**place for place in range(lookahead + 1))


def floor_rate(
    cell: Cell, weights: dict[str, dict[str, int]], bytes_per_second: float, *, with_cache: bool = False
) -> float:
    """Tokens a second if nothing cost time but bytes: the target's weights once a round, the draft's once a guess.

    `with_cache` also reads every row's keys and values once a pass (of the context; what is generated is left out).
    """
    rows, lookahead = cell["rows"], cell["lookahead"]
    held = rows * cell["context"] if with_cache else 0
    target = weights["target"]["read"] + held * weights["target"]["token"]
    draft = weights["draft"]["read"] + held * weights["draft"]["token"]
    seconds = (target + lookahead * draft) / bytes_per_second
    return rows * tokens_a_round(cell["agreement"], lookahead) / seconds


def cell_of(engine: str, raw: Cell, mismatches: int) -> Cell:
    """Add what follows from a cell's seconds; the first of them warmed up and does not count. Token ids are dropped."""
    tokens = sum(len(ids) for ids in raw["token_ids"])
    rates = [tokens / one for one in raw["seconds"][1:]]
    kept = {key: value for key, value in raw.items() if key != "token_ids"}
    return {"engine": engine, **kept, "tokens": tokens, "rates": rates, "rate": median(rates), "mismatches": mismatches}


def find(cells: Iterable[Cell], engine: str, **wanted: Any) -> Cell | None:
    """Give the cell with these settings; agreement counts only where there are guesses."""
    for cell in cells:
        plain = cell["lookahead"] == 0
        if cell["engine"] == engine and all(
            cell[name] == value or (name == "agreement" and plain) for name, value in wanted.items()
        ):
            return cell
    return None


def best(cells: Iterable[Cell], engine: str, **wanted: Any) -> Cell | None:
    """Give the fastest of the cells with these settings."""
    fitting = [cell for cell in cells if find([cell], engine, **wanted) is not None]
    return max(fitting, key=lambda cell: cell["rate"], default=None)


def goals(cells: list[Cell], start_up: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold what was measured against issue 3's numbers; reached is None where a cell is missing."""
    first = min((cell["context"] for cell in cells), default=0)
    at: dict[str, Any] = {"context": first, "agreement": AGREEMENT}
    plain = find(cells, OURS, rows=1, lookahead=0, **at)
    peer = best((cell for cell in cells if cell["lookahead"]), PEER, rows=1, **at)
    sixteen, sixteen_plain = best(cells, OURS, rows=16, **at), find(cells, OURS, rows=16, lookahead=0, **at)
    found = [_goal("1 row, plain, tok/s", 175, plain and plain["rate"])]
    for kind in dict.fromkeys([PLAIN_DRAFT, *(cell["draft"] for cell in cells)]):
        spoken = find(cells, OURS, rows=1, lookahead=5, draft=kind, **at)
        four = best((cell for cell in cells if cell["lookahead"]), OURS, rows=4, draft=kind, **at)
        found += [
            _goal(f"1 row, K=5, {kind} draft, tok/s", 340, spoken and spoken["rate"]),
            _goal(f"1 row, K=5, {kind} draft, by vLLM's best speculative", 1.5, _ratio(spoken, peer)),
            _goal(f"4 rows, best K, {kind} draft, tok/s", 1250, _rate(four)),
        ]
    found += [
        _goal("16 rows, best, tok/s", 3500, _rate(sixteen)),
        _goal("16 rows, best by plain", 1, _ratio(sixteen, sixteen_plain)),
    ]
    ours = [one for one in start_up if one["engine"] == OURS]
    cold = next((one["all"] for one in ours if one.get("cold")), None)
    warm = min((one["all"] for one in ours if not one.get("cold")), default=None)
    found += [
        _goal("start to first token, cold, s", 40, cold, at_most=True),
        _goal("start to first token, warm cache, s", 15, warm, at_most=True),
    ]
    wrong = sum(cell["mismatches"] for cell in cells if cell["engine"] == OURS)
    return [*found, _goal("wrong tokens", 0, wrong if cells else None, at_most=True)]


def _goal(name: str, bound: float, value: float | None, *, at_most: bool = False) -> dict[str, Any]:
    reached = None if value is None else (value <= bound if at_most else value >= bound)
    return {"goal": name, "bound": bound, "at_most": at_most, "measured": value, "reached": reached}


def _rate(cell: Cell | None) -> float | None:
    return None if cell is None else float(cell["rate"])


def _ratio(one: Cell | None, other: Cell | None) -> float | None:
    return None if one is None or other is None else one["rate"] / other["rate"]


# --- tables


def rounds_table(cells: list[Cell], weights: dict[str, dict[str, int]], bytes_per_second: float) -> Table:
    """Lay out each of our cells with its floor and its peers; where we lose, the ratio is red."""
    table = Table(
        title=f"Greedy, tokens a second (median); floor at {bytes_per_second / 1e9:.0f} GB/s", title_justify="left"
    )
    for name in ("rows", "K", "draft", "agree", "context", "tok/s", "floor", "share", "ms/round", "tok/round", "wrong"):
        table.add_column(name, justify="right")
    for name in ("vLLM plain", "ratio", "vLLM same K", "ratio", "transformers", "ratio"):
        table.add_column(name, justify="right")
    for cell in cells:
        if cell["engine"] != OURS:
            continue
        floor = floor_rate(cell, weights, bytes_per_second)
        same = {name: cell[name] for name in ("rows", "context", "agreement")}
        peers = (
            find(cells, PEER, lookahead=0, **same),
            find(cells, PEER, lookahead=cell["lookahead"], **same) if cell["lookahead"] else None,
            find(cells, STOCK, lookahead=cell["lookahead"], **same),
        )
        rounds = cell["rounds"][1:]
        table.add_row(
            str(cell["rows"]),
            str(cell["lookahead"]),
            cell["draft"] if cell["lookahead"] else "-",
            f"{cell['agreement']:g}" if cell["lookahead"] else "-",
            str(cell["context"]),
            f"[bold]{cell['rate']:.1f}[/bold]",
            f"{floor:.0f}",
            f"{cell['rate'] / floor:.0%}",
            f"{median(one['ms'] for one in rounds):.2f}",
            f"{median(one['tokens'] for one in rounds):.2f}",
            f"[red]{cell['mismatches']}[/red]" if cell["mismatches"] else "0",
            *(text for peer in peers for text in _against(cell, peer)),
        )
    return table


def _against(cell: Cell, peer: Cell | None) -> tuple[str, str]:
    ratio = _ratio(cell, peer)
    if peer is None or ratio is None:
        return "-", "-"
    return f"{peer['rate']:.1f}", f"[red]{ratio:.2f}[/red]" if ratio < 1 else f"{ratio:.2f}"


def start_table(start_up: list[dict[str, Any]]) -> Table:
    """Lay out where each process's first seconds went."""
    table = Table(title="Start-up, seconds", title_justify="left")
    for name in ("engine", "setting", "imports", "load", "ready", "first token", "all"):
        table.add_column(name, justify="left" if name in ("engine", "setting") else "right")
    for one in start_up:
        parts = [one.get(name) for name in ("imports", "load", "ready", "first_token", "all")]
        table.add_row(one["engine"], one["setting"], *("-" if part is None else f"{part:.1f}" for part in parts))
    return table


def goals_table(found: list[dict[str, Any]]) -> Table:
    """Lay out the goals."""
    table = Table(title="Goals", title_justify="left")
    for name in ("goal", "bound", "measured", "reached"):
        table.add_column(name, justify="left" if name == "goal" else "right")
    verdicts = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not measured"}
    for one in found:
        measured = "-" if one["measured"] is None else f"{one['measured']:.2f}"
        bound = f"{'<=' if one['at_most'] else '>='} {one['bound']}"
        table.add_row(one["goal"], bound, measured, verdicts[one["reached"]])
    return table
