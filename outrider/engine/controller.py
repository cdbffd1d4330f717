"""How far to draft: as far as it pays, by measured cost and by each sequence's own agreement so far.

A chain of k guesses of which each agrees with chance a gives ``E(k) = 1 + a + ... + a^k`` tokens a round; it is worth
``E(k) / (V(k+1) + D(k))``, V the target's pass by width and D the drafting, both measured on this machine. The
estimate of a looks at past rounds alone, so no decision depends on a token that is still to be judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from outrider.sequence import Sequence

__all__ = ["Controller", "CostModel"]

PRIOR_AGREEMENT = 0.7
PRIOR_WEIGHT = 2.0
MEMORY = 0.9  # weight that the past keeps with each round of guesses
TRIAL_ROUNDS = 2  # every sequence's first rounds draft in full: they measure
PROBE_LENGTH = 2
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # rounds without guesses before the next probe


@dataclass(frozen=True)
class CostModel:
    """Seconds of a target pass by tokens fed, and of drafting by guesses, as measured.

    Attributes:
        target: Tokens fed -> seconds, at least one entry, rising.
        draft: Guesses -> seconds, by drafter; none costs nothing.
    """

    target: tuple[tuple[int, float], ...]
    draft: dict[str, tuple[tuple[int, float], ...]]

    def verify_seconds(self, num_tokens: int) -> float:
        """Seconds of one pass over `num_tokens` tokens in all."""
        return _interpolated(self.target, num_tokens)

    def draft_seconds(self, drafter: str, num_tokens: int) -> float:
        """Seconds of drafting chains of `num_tokens`."""
        points = self.draft.get(drafter)
        return _interpolated(points, num_tokens) if points and num_tokens else 0.0


def _interpolated(points: tuple[tuple[int, float], ...], at: int) -> float:
    """Read a measured curve between its points, and on along its last stretch."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    right = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


class _Pace:
    """One sequence's agreement and whether it is resting from speculation."""

    def __init__(self) -> None:
        self.right = PRIOR_AGREEMENT * PRIOR_WEIGHT
        self.judged = PRIOR_WEIGHT
        self.rounds = 0
        self.pause = FIRST_PAUSE
        self.rested = 0

    @property
    def agreement(self) -> float:
        """Estimated chance that a guess agrees, given that those before it did."""
        return self.right / self.judged

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in a round: of the guesses that were reached, all but perhaps the last agreed."""
        self.rounds += 1
        self.right = self.right * MEMORY + accepted
        self.judged = self.judged * MEMORY + min(drafted, accepted + 1)


class Controller:
    """Chooses each sequence's draft length for the next round; holds no state but by sequence."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._paces: WeakKeyDictionary[Sequence, _Pace] = WeakKeyDictionary()

    def length(self, sequence: Sequence, drafter: str, most: int, num_rows: int) -> int:
        """Choose how many guesses to ask for, 0 to `most`, where `num_rows` share the round."""
        pace = self._pace(sequence)
        if most == 0 or pace.rounds < TRIAL_ROUNDS:
            return most
        best = self._best(pace.agreement, drafter, most, num_rows)
        if best:
            pace.pause, pace.rested = FIRST_PAUSE, 0
            return best
        pace.rested += 1
        if pace.rested < pace.pause:
            return 0
        pace.pause, pace.rested = min(2 * pace.pause, LONGEST_PAUSE), 0
        return min(PROBE_LENGTH, most)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Take in how a sequence's guesses fared."""
        if drafted:
            self._pace(sequence).learn(drafted, accepted)

    def _pace(self, sequence: Sequence) -> _Pace:
        return self._paces.setdefault(sequence, _Pace())

    def _best(self, agreement: float, drafter: str, most: int, num_rows: int) -> int:
        best, best_worth = 0, 1 / self._cost.verify_seconds(num_rows)
        tokens, chance = 1.0, 1.0
        for length in range(1, most + 1):
            chance *= agreement
            tokens += chance
            seconds = self._cost.verify_seconds(num_rows * (length + 1)) + self._cost.draft_seconds(drafter, length)
            if tokens / seconds > best_worth:
                best, best_worth = length, tokens / seconds
        return best
