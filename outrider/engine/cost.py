"""What rounds cost on this machine: a profile taken at start, corrected by what rounds really take.

A round's seconds are those of its drafting and of its pass (all that comes after the guesses: the target's pass,
choice, judging, commit, the books). Where a card runs both as one captured graph, all of it counts as the pass. The
profile is seldom right to a few percent: it was taken in another moment, without requests. So every round that is
timed corrects it, and not for its own shape alone: what slows one width has mostly slowed all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

__all__ = ["CHAIN", "DRAFT_LENGTHS", "Grid", "PassShape", "RoundCosts", "unknown_costs"]

DRAFT_LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)  # guesses a round that are weighed, and captured on a card
CHAIN = ""  # the kind of pass that judges chains made outside of it, or nothing
NEAR = 128  # cached tokens that the grids of passes look back on

NOISE, LEAST_NOISE = 0.1, 0.01  # of one timed round, at first and at least (deviations of its logarithm, as all here)
NOISE_RATE = 0.02  # weight of the newest round in it
DOUBT = 0.2  # of a profile: in what all have in common, and in each narrower kind of round
SWAY = 0.01, 0.002, 0.002, 0.002  # what each of these may change by, a round: the machine's speed as a whole most
FEED_RATE = 0.2  # weight of the newest reading of what a drafter lacked
OUTLIER = 2.5  # deviations beyond which a timing says little: a page fault, a captured graph, a neighbour


@dataclass(frozen=True)
class Grid:
    """Seconds by rows and guesses, as measured.

    Attributes:
        seconds: (rows, guesses) -> seconds, for every combination of some numbers of rows and of guesses.
        stepped: Whether rows are rounded up to the next number that was measured (captured rounds), not read between.
    """

    seconds: dict[tuple[int, int], float]
    stepped: bool = False
    _axes: tuple[list[int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = tuple(sorted({key[place] for key in self.seconds}) for place in (0, 1))
        object.__setattr__(self, "_axes", axes)

    def at(self, num_rows: int, num_tokens: int) -> float:
        """Read between what was measured, and on along the last stretch beyond it."""
        rows, widths = self._axes
        if self.stepped:
            num_rows = next((one for one in rows if one >= num_rows), num_rows)
            num_tokens = next((one for one in widths if one >= num_tokens), num_tokens)
        columns = [(one, _along(widths, [self.seconds[one, width] for width in widths], num_tokens)) for one in rows]
        return _along(rows, [seconds for _, seconds in columns], num_rows)

    def record(self) -> dict[str, Any]:
        """Give it as JSON holds it."""
        cells = [[rows, width, seconds] for (rows, width), seconds in self.seconds.items()]
        return {"stepped": self.stepped, "cells": cells}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Grid:
        """Read it back.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        cells = {(int(rows), int(width)): float(seconds) for rows, width, seconds in record["cells"]}
        grid = cls(cells, bool(record["stepped"]))
        rows, widths = grid._axes
        if not cells or len(cells) != len(rows) * len(widths) or not all(0 <= one < 1e6 for one in cells.values()):
            raise ValueError("not a grid of seconds")
        return grid


def _along(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Read a curve, never below what it starts with beyond its ends."""
    if len(places) == 1 or at <= places[0]:
        return values[0]
    right = min(bisect_left(places, at), len(places) - 1)
    low, high = places[right - 1], places[right]
    slope = (values[right] - values[right - 1]) / (high - low)
    return max(values[right - 1] + slope * (at - low), values[right] if at > high else 0.0)


@dataclass(frozen=True)
class PassShape:
    """What a pass costs by.

    Attributes:
        num_rows, num_tokens: Rows, and guesses fed for each.
        kind: `CHAIN`; the drafter's name where its guesses are trees, or are made within the captured round.
        drawn: Whether any row draws its tokens.
        context: Cached tokens that a row looks back on, on average.
    """

    num_rows: int
    num_tokens: int
    kind: str = CHAIN
    drawn: bool = False
    context: int = NEAR


class _Corrections:
    """How far timings lie from a profile: a sum of effects, each shared by a narrower kind of round than the last.

    Each timing moves all effects that it speaks of, in proportion to how uncertain each still is (a Kalman filter that
    keeps variances alone). Effects may change with time, so none is ever certain.
    """

    def __init__(self) -> None:
        self._effects: dict[Hashable, tuple[float, float]] = {}  # mean and variance of a logarithm
        self._noise = NOISE**2

    def factor(self, keys: Iterable[Hashable]) -> float:
        """Give what to multiply the profile by."""
        return math.exp(sum(self._effects.get(key, (0.0, 0.0))[0] for key in keys))

    def doubt(self, keys: Iterable[Hashable]) -> float:
        """Give the standard deviation that is left, as a share."""
        return math.sqrt(sum(self._effects.get(key, (0.0, DOUBT**2))[1] for key in keys))

    def learn(self, keys: Sequence[Hashable], ratio: float) -> None:
        """Take in a timing: seconds taken by seconds of the profile."""
        effects = [self._effects.get(key, (0.0, DOUBT**2)) for key in keys]
        error = math.log(ratio) - sum(mean for mean, _ in effects)
        known = sum(variance for _, variance in effects)
        noise = self._noise
        usual = OUTLIER**2 * (known + noise)
        self._noise += NOISE_RATE * (max(LEAST_NOISE**2, min(error**2, usual) - known) - noise)
        if error**2 > usual:
            noise = error**2
        for key, (mean, variance), sway in zip(keys, effects, SWAY, strict=True):
            gain = variance / (known + noise)
            self._effects[key] = mean + gain * error, min(DOUBT**2, variance * (1 - gain) + sway**2)


class RoundCosts:
    """Predicts a round's seconds, and learns from those that rounds take.

    Args:
        passes: By kind, seconds at a context of `NEAR` tokens; `CHAIN` has plain rounds (no guesses) at least.
        growth: By kind, seconds more for each further token of context.
        drafts: By drafter, seconds that drafting takes outside of the pass.
        feeds: By drafter, seconds to let it read tokens that its cache lacks: of a call, and of each token.
    """

    def __init__(
        self,
        passes: dict[str, Grid],
        growth: dict[str, Grid] | None = None,
        drafts: dict[str, Grid] | None = None,
        feeds: dict[str, tuple[float, float]] | None = None,
    ) -> None:
        self.passes, self.growth = passes, growth or {}
        self.drafts, self.feeds = drafts or {}, feeds or {}
        self._corrections = _Corrections()
        self._read: dict[tuple[str, str, int, int], float] = {}  # grids, as far as they were asked

    # --- what is expected

    def pass_seconds(self, shape: PassShape) -> float:
        """Seconds of all that comes after the guesses."""
        return self._profiled(shape) * self._corrections.factor(_pass_keys(shape))

    def draft_seconds(self, drafter: str, num_rows: int, num_tokens: int, *, drawn: bool = False) -> float:
        """Seconds of the guesses of so many rows; 0 of a drafter that is not known, or works within the pass."""
        if not num_tokens or not num_rows or drafter not in self.drafts:
            return 0.0
        keys = _draft_keys(drafter, num_rows, num_tokens, drawn)
        return self._at("drafts", drafter, num_rows, num_tokens) * self._corrections.factor(keys)

    def feed_seconds(self, drafter: str, num_tokens: int, calls: float = 1) -> float:
        """Seconds until a drafter has read `num_tokens` tokens that its cache lacks, in so many calls."""
        call, token = self.feeds.get(drafter, (0.0, 0.0))
        return calls * call + token * num_tokens if num_tokens else 0.0

    def doubt(self, shape: PassShape) -> float:
        """Give the standard deviation of a pass's prediction, as a share of it."""
        return self._corrections.doubt(_pass_keys(shape))

    def knows(self, drafter: str) -> bool:
        """Whether a drafter's cost is known."""
        return drafter in self.drafts or drafter in self.passes

    # --- what was measured

    def note(self, drafter: str, seconds: Grid, feed: tuple[float, float] = (0.0, 0.0)) -> None:
        """Take in what a drafter costs."""
        self.drafts[drafter], self.feeds[drafter] = seconds, feed

    def took_pass(self, shape: PassShape, seconds: float) -> None:
        """Learn what a pass took."""
        profiled = self._profiled(shape)
        if seconds > 0 and profiled > 0:
            self._corrections.learn(_pass_keys(shape), seconds / profiled)

    def took_draft(self, drafter: str, num_rows: int, num_tokens: int, seconds: float, *, drawn: bool = False) -> None:
        """Learn what drafting took."""
        if not num_rows or not num_tokens or seconds <= 0 or drafter not in self.drafts:
            return
        profiled = self._at("drafts", drafter, num_rows, num_tokens)
        if profiled > 0:
            self._corrections.learn(_draft_keys(drafter, num_rows, num_tokens, drawn), seconds / profiled)

    def took_feed(self, drafter: str, num_tokens: int, calls: int, seconds: float) -> None:
        """Learn what it took to read tokens that were lacking."""
        expected = self.feed_seconds(drafter, num_tokens, calls)
        if expected > 0:
            change = 1 + FEED_RATE * (min(seconds / expected, 1 / FEED_RATE) - 1)
            call, token = self.feeds[drafter]
            self.feeds[drafter] = call * change, token * change

    def _profiled(self, shape: PassShape) -> float:
        kind = shape.kind if shape.kind in self.passes else CHAIN
        seconds = self._at("passes", kind, shape.num_rows, shape.num_tokens)
        if kind in self.growth:
            slope = self._at("growth", kind, shape.num_rows, shape.num_tokens)
            seconds = max(0.2 * seconds, seconds + slope * (shape.context - NEAR))
        return seconds

    def _at(self, table: str, name: str, num_rows: int, num_tokens: int) -> float:
        key = table, name, num_rows, num_tokens
        if key not in self._read:
            grids: dict[str, Grid] = getattr(self, table)
            self._read[key] = grids[name].at(num_rows, num_tokens)
        return self._read[key]


def unknown_costs() -> RoundCosts:
    """Costs of which nothing was measured: that guesses cost nothing is believed until rounds were timed."""
    return RoundCosts({CHAIN: Grid({(1, 0): 1e-3})})


def _pass_keys(shape: PassShape) -> tuple[Hashable, ...]:
    kind = "pass", shape.kind, shape.drawn
    rows = (*kind, (shape.num_rows - 1).bit_length())
    return "machine", kind, rows, (*rows, shape.num_tokens)


def _draft_keys(drafter: str, num_rows: int, num_tokens: int, drawn: bool) -> tuple[Hashable, ...]:
    kind = "draft", drafter, drawn
    rows = (*kind, (num_rows - 1).bit_length())
    return "machine", kind, rows, (*rows, num_tokens)
