"""The cells that no_regret.py measures, and what their rates say. Nothing here runs."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.summary import spread
from benchmarks.terminal import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AUTO", "MIXED", "PLAIN", "Cell", "cells", "in_turn", "judged", "regret_table", "verdicts"]

AUTO, PLAIN = "auto", "off"
MIXED = "mixed"
MOST_REGRET = 0.03
LEAST_GAIN = 0.10
SHORTEST = 0.6  # of a cell's tokens, where texts end apart

_Rounds = dict[str, list[dict[str, list[float]]]]  # by setting and turn, see `RoundWatch.take`


@dataclass(frozen=True)
class Cell:
    """One workload.

    Attributes:
        rows: Requests at a time.
        tokens: New tokens of each.
        temperature: Of all.
        text: An agreement; "mixed" (all of them, in turn), or the name of a prompt of the real model.
    """

    rows: int
    tokens: int
    temperature: float
    text: float | str

    @property
    def name(self) -> str:
        """What tables call it."""
        text = self.text if isinstance(self.text, str) else f"agreement {self.text:g}"
        return f"{text}, {self.rows} x {self.tokens}, T={self.temperature:g}"

    @property
    def to_the_end(self) -> bool:
        """Whether the clock runs until all texts have ended: of mixed ones side by side until the last has come."""
        return self.text != MIXED or self.rows == 1

    def count(self, least: int) -> int:
        """Give the texts of a turn with at least so many tokens a row."""
        return max(self.rows, self.rows * round(least / self.tokens))

    def lengths(self, count: int, *, apart: bool, seed: int = 0) -> list[int]:
        """Give the tokens of so many texts: equally many, or 60 to 100 percent, so that they end apart."""
        shares = random.Random(seed)
        return [max(1, round(self.tokens * (shares.uniform(SHORTEST, 1.0) if apart else 1.0))) for _ in range(count)]


def in_turn(settings: list[Any], number: int) -> list[Any]:
    """Give settings in a turn's order: whoever is first then comes last, then one before that, and so on."""
    place = number * (len(settings) - 1) % len(settings)
    return settings[place:] + settings[:place]


def cells(
    rows: Sequence[int], tokens: Sequence[int], temperatures: Sequence[float], agreements: Sequence[float], usual: int
) -> list[Cell]:
    """Give the design: lines through one point rather than every combination, the most telling first.

    The point is one greedy request of `usual` tokens. Every agreement is measured there; every number of rows and every
    length with the lowest, a middle and the highest agreement, as what pays depends on both; short texts of many rows;
    temperatures with a low and a high one. Then texts of all agreements together, one by one and side by side.
    """
    first = temperatures[0]
    low, middle, high = agreements[0], agreements[len(agreements) // 2], agreements[-1]
    found = [Cell(1, usual, first, agreement) for agreement in (low, high, middle)]
    found.append(Cell(1, usual, first, MIXED))
    found += [Cell(count, usual, first, agreement) for count in rows[1:] for agreement in (low, middle, high)]
    found += [Cell(1, length, first, one) for length in tokens if length != usual for one in (low, middle, high)]
    found += [Cell(count, usual, first, MIXED) for count in rows[1:]]
    found += [Cell(1, usual, first, agreement) for agreement in agreements]
    found += [Cell(rows[len(rows) // 2], min(tokens), first, agreement) for agreement in (low, high)]
    found += [Cell(1, usual, one, agreement) for one in temperatures[1:] for agreement in (low, high)]
    found += [Cell(rows[-1], min(tokens), first, agreement) for agreement in (low, high)]
    found.append(Cell(rows[-1], usual, temperatures[-1], high))
    return list(dict.fromkeys(found))


def judged(cell: Cell, rates: dict[str, list[float]], rounds: _Rounds | None = None, **more: Any) -> dict[str, Any]:
    """Work a cell out of its rates (tokens a second), by setting and turn.

    Settings are compared turn by turn, as those of one turn stood side by side in time; the median of turns counts.
    `noise` is how far the same setting's own turns lie apart: half the spread of plain decoding's, as a share.

    `level`, where `rounds` are told, is auto by the best of the others if every kind of round had taken as long in all
    turns, which is as long as it did on average: on a machine with neighbours that is what the choice of rounds is
    worth, and the rest is theirs.
    """
    best, ratios = _of_the_best(rates)
    plain = rates[PLAIN]
    if rounds is not None:
        more |= {"rounds": rounds, "level": min(_of_the_best(_levelled(rates, rounds))[1].values())}
    return {
        **asdict(cell),
        "name": cell.name,
        "rates": rates,
        "spread": {setting: asdict(spread(values)) for setting, values in rates.items()},
        "ratios": ratios,
        "best": best,
        "regret": 1 - ratios[best],
        "noise": (max(plain) - min(plain)) / 2 / median(plain),
        "first_turn": rates[AUTO][0] / max(values[0] for setting, values in rates.items() if setting != AUTO),
        **more,
    }


def _of_the_best(rates: dict[str, list[float]]) -> tuple[str, dict[str, float]]:
    """Give the setting that auto comes off worst against, and how it stands against each."""
    ratios = {
        setting: median(mine / other for mine, other in zip(rates[AUTO], values, strict=True))
        for setting, values in rates.items()
        if setting != AUTO
    }
    return min(ratios, key=lambda setting: ratios[setting]), ratios


def _levelled(rates: dict[str, list[float]], rounds: _Rounds) -> dict[str, list[float]]:
    """Give rates as if every kind of round had always taken what it took on average.

    Those beside which prompts were read are left as they are, unless there is one row: how many were is not known.
    """
    sums: dict[str, tuple[float, float]] = {}
    turns = [turn for told in rounds.values() for turn in told]
    for turn in turns:
        for kind, (count, seconds, *_) in turn.items():
            if kind[0].isdigit() and ("busy" not in kind or kind.startswith("1 x")):
                known = sums.get(kind, (0, 0.0))
                sums[kind] = known[0] + count, known[1] + seconds
    found: dict[str, list[float]] = {}
    for setting, values in rates.items():
        found[setting] = []
        for rate, turn in zip(values, rounds[setting], strict=True):
            tokens = sum(one[2] for one in turn.values())
            more = sum(
                turn[kind][0] * seconds / count - turn[kind][1]
                for kind, (count, seconds) in sums.items()
                if kind in turn
            )
            found[setting].append(tokens / (tokens / rate + more))
    return found


def verdicts(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Hold all cells against the promises; `reached` is None where nothing was measured."""
    losing = [
        {key: one[key] for key in ("name", "regret", "noise", "best", "level") if key in one}
        for one in found
        if one["regret"] > MOST_REGRET
    ]
    mixed = []
    for one in found:
        fixed = {setting: ratio for setting, ratio in one["ratios"].items() if setting != PLAIN}
        if one["text"] == MIXED and fixed:
            best = min(fixed, key=lambda setting: fixed[setting])
            mixed.append({"name": one["name"], "best": best, "gain": fixed[best] - 1, "rows": one["rows"]})
    whole = [_workload(found, pair) for pair in dict.fromkeys(str(one.get("pair")) for one in found)]
    return {
        "never slower": {
            "bound": MOST_REGRET,
            "cells": len(found),
            "losing": losing,
            "reached": not losing if found else None,
        },
        "mixed": {
            "bound": LEAST_GAIN,
            "cells": mixed,
            "reached": _reached(mixed),
        },
        "workload": {
            "bound": LEAST_GAIN,
            "pairs": whole,
            "reached": _reached(whole),
        },
    }


def _reached(gains: Sequence[dict[str, Any]]) -> bool | None:
    return all(one["gain"] >= LEAST_GAIN for one in gains) if gains else None


def _workload(found: Sequence[dict[str, Any]], pair: str) -> dict[str, Any]:
    """Take all cells of a pair as one workload: as many tokens of each row of each cell, whoever is at it.

    What is best among fixed lengths is one for all of them then, as it is for a server whose traffic changes.
    """
    cells = [one for one in found if str(one.get("pair")) == pair]
    settings = set.intersection(*(set(one["rates"]) for one in cells)) - {AUTO}
    tokens = sum(one["rows"] for one in cells)

    def rate(setting: str) -> float:
        return tokens / sum(one["rows"] / median(one["rates"][setting]) for one in cells)

    rates = {setting: rate(setting) for setting in (AUTO, *sorted(settings))}
    best = max(settings, key=lambda setting: rates[setting])
    gain = rates[AUTO] / rates[best] - 1
    return {"pair": pair, "cells": len(cells), "rates": rates, "best": best, "gain": gain}


def regret_table(found: Sequence[dict[str, Any]]) -> Table:
    """Lay out every cell: tokens a second by setting, and how auto stands against the best of the others."""
    table = Table(title="Tokens a second (median of turns); auto against the best of the others", title_justify="left")
    settings = list(dict.fromkeys(setting for one in found for setting in one["rates"]))
    table.add_column("cell", no_wrap=True)
    for name in (*settings, "best", "auto / best", "level", "noise", "guesses"):
        table.add_column(name, justify="right")
    for one in found:
        ratio, losing = 1 - one["regret"], one["regret"] > MOST_REGRET
        rates = (f"{median(one['rates'][setting]):.1f}" if setting in one["rates"] else "" for setting in settings)
        shown, level = f"{ratio:.3f}", f"{one['level']:.3f}" if "level" in one else ""
        table.add_row(
            one["name"], *rates, one["best"], f"[red]{shown}[/red]" if losing else shown, level, f"{one['noise']:.3f}",
            f"{one.get('guesses', 0):.2f}",
        )  # fmt: skip
    return table
