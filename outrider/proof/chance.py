"""Pearson's chi-square test with a stated power, and with room for what rounding does to the distribution.

With n draws and a true law that differs from the tested one by a total variation distance t, the statistic follows, for
large n, a noncentral chi-square law whose noncentrality is at least ``4 n t**2``, whatever the difference looks like:
``sum(d**2 / p)`` over cells whose changes ``|d|`` add up to ``2 t`` is smallest where half of the mass gains, and half
loses, in proportion. So the smallest distance that is found with a given chance can be said for the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Outcome", "critical_value", "exceeds", "judged", "smallest_distance"]

FOUND = 0.95  # chance with which the stated distance is found


@dataclass(frozen=True)
class Outcome:
    """What a test found.

    Attributes:
        statistic: Pearson's.
        freedom: Degrees of freedom.
        rounding: Noncentrality that rounding alone may cause.
        p_value: Chance of such a statistic, or a larger one, where nothing but rounding is wrong.
        level: Below which p-value the test fails.
        smallest: The smallest total variation distance, on average over the draws and in whatever direction, that the
            test finds with a chance of 95 %.
    """

    statistic: float
    freedom: int
    rounding: float
    p_value: float
    level: float
    smallest: float

    @property
    def failed(self) -> bool:
        """Whether the distribution is another one."""
        return self.p_value < self.level


def judged(statistic: float, freedom: int, draws: int, level: float, rounding: float = 0.0) -> Outcome:
    """Judge Pearson's statistic of `draws` draws.

    Args:
        statistic: The sum of ``(observed - expected)**2 / expected`` over all cells.
        freedom: Cells less the groups they are in, at least 1.
        draws: How many draws the cells hold.
        level: The chance of a false alarm.
        rounding: The noncentrality that rounding alone may cause.
    """
    chance = exceeds(statistic, freedom, rounding)
    return Outcome(statistic, freedom, rounding, chance, level, smallest_distance(freedom, draws, level, rounding))


def exceeds(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Give the chance that a chi-square variable, noncentral or not, is above `statistic`.

    A noncentral one is a Poisson mixture of central ones.
    """
    half = noncentrality / 2
    spread = 10 * math.sqrt(half) + 20
    terms = torch.arange(max(0, math.floor(half - spread)), math.ceil(half + spread) + 1, dtype=torch.float64)
    weights = terms.mul(math.log(half)).sub(half).sub(torch.lgamma(terms + 1)).exp() if half else (terms == 0).double()
    tails = torch.special.gammaincc(terms + freedom / 2, torch.full_like(terms, statistic / 2))
    return min(1.0, float((weights * tails).sum()))


def critical_value(freedom: int, level: float, noncentrality: float = 0.0) -> float:
    """Find the statistic that is exceeded with the chance `level`."""
    high = freedom + noncentrality + 1.0
    while exceeds(high, freedom, noncentrality) > level:
        high *= 2
    return _crossing(lambda x: exceeds(x, freedom, noncentrality) > level, 0.0, high)


def smallest_distance(freedom: int, draws: int, level: float, rounding: float = 0.0) -> float:
    """Give the smallest total variation distance that `draws` draws tell with a chance of 95 %; 1 at most."""
    bound = critical_value(freedom, level, rounding)
    high = bound + 1.0
    while exceeds(bound, freedom, high) < FOUND:
        high *= 2
    needed = _crossing(lambda x: exceeds(bound, freedom, x) < FOUND, 0.0, high)
    return min(1.0, math.sqrt(needed / (4 * draws)))


def _crossing(below: Callable[[float], bool], low: float, high: float) -> float:
    """Find where `below`, true at `low` and false at `high`, changes."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
