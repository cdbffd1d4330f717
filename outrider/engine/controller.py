"""How far to draft: as far as it pays, by measured cost and by each sequence's own agreement so far.

A chain of k guesses gives ``E(k) = 1 + a_1 + ... + a_k`` tokens a round, a_j the chance that its first j guesses all
agree; it is worth ``E(k) / (V(k+1) + D(k))``, V the target's pass by width and D the drafting, both measured on this
machine. The estimates look at past rounds alone, so no decision depends on a token that is still to be judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.sequence import Sequence

__all__ = ["Controller", "CostModel", "Costs"]

PRIOR_AGREEMENT = 0.7
PRIOR_WEIGHT = 2.0
LEANING_WEIGHT = 1.0  # of the place before, in a place's own estimate
MEMORY = 0.9  # weight that the past keeps with each round of guesses
TRIAL_ROUNDS = 2  # every sequence's first rounds draft in full: they measure
PROBE_LENGTH = 2
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # rounds without guesses before the next probe


class Costs(Protocol):
    """What rounds cost on this machine."""

    def round_seconds(self, drafter: str, num_rows: int, num_tokens: int) -> float:
        """Seconds of a round in which each of `num_rows` rows is given `num_tokens` guesses; 0: plain decoding."""

    def knows(self, drafter: str) -> bool:
        """Whether the drafter's cost is known."""

    def noted(self, drafter: str, seconds: tuple[tuple[int, float], ...]) -> Costs:
        """Take in what a drafter costs: guesses -> seconds."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of a target pass by tokens fed, and of drafting by guesses, as measured.

    Attributes:
        target: Tokens fed -> seconds, at least one entry, rising.
        draft: Guesses -> seconds, by drafter; none costs nothing.
    """

    target: tuple[tuple[int, float], ...]
    draft: dict[str, tuple[tuple[int, float], ...]]

    def round_seconds(self, drafter: str, num_rows: int, num_tokens: int) -> float:
        """Add a pass of the target to the drafting; what lies between them is not counted."""
        return self.verify_seconds(num_rows * (num_tokens + 1)) + self.draft_seconds(drafter, num_tokens)

    def knows(self, drafter: str) -> bool:
        """Whether the drafter's cost is known."""
        return drafter in self.draft

    def noted(self, drafter: str, seconds: tuple[tuple[int, float], ...]) -> CostModel:
        """Take in what a drafter costs."""
        return replace(self, draft={**self.draft, drafter: seconds})

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
    """One sequence's agreement by place in the chain, and whether it is resting from speculation."""

    def __init__(self) -> None:
        self.right = [PRIOR_AGREEMENT * PRIOR_WEIGHT]  # the prior is evidence like any other, and fades like it
        self.judged = [PRIOR_WEIGHT]
        self.rounds = 0
        self.pause = FIRST_PAUSE
        self.rested = 0

    def agreements(self, most: int) -> Iterator[float]:
        """Estimate for each place the chance that its guess agrees, given that those before it did.

        A place leans on the one before it until it has been seen often enough itself: guesses that came far go on
        agreeing (a copied passage), so one number for all places would cut chains too short.
        """
        chance = self.right[0] / self.judged[0]
        for place in range(most):
            if 0 < place < len(self.judged):
                chance = (self.right[place] + LEANING_WEIGHT * chance) / (self.judged[place] + LEANING_WEIGHT)
            yield chance

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in a round: of the guesses that were reached, all but perhaps the last agreed."""
        self.rounds += 1
        if accepted:  # what comes next may be worth guessing again: look sooner
            self.pause = FIRST_PAUSE
        for column in (self.right, self.judged):
            column[:] = [MEMORY * value for value in column] + [0.0] * (drafted - len(column))
        for place in range(min(drafted, accepted + 1)):
            self.judged[place] += 1
            self.right[place] += place < accepted


class Controller:
    """Chooses each sequence's draft length for the next round; holds no state but by sequence."""

    def __init__(self, cost: Costs) -> None:
        self._cost = cost
        self._paces: WeakKeyDictionary[Sequence, _Pace] = WeakKeyDictionary()

    def length(self, sequence: Sequence, drafter: str, most: int, num_rows: int, *, whole: bool = False) -> int:
        """Choose how many guesses to ask for, 0 to `most`, where `num_rows` share the round.

        `whole`: guesses are trees, drafted as wide as may be or not at all: half a tree is not half as good.
        """
        pace = self._pace(sequence)
        if most == 0 or pace.rounds < TRIAL_ROUNDS:
            return most
        best = (self._worth if whole else self._best)(pace, drafter, most, num_rows)
        if best:
            pace.pause, pace.rested = FIRST_PAUSE, 0
            return best
        pace.rested += 1
        if pace.rested < pace.pause:
            return 0
        pace.pause, pace.rested = min(2 * pace.pause, LONGEST_PAUSE), 0
        return most if whole else min(PROBE_LENGTH, most)

    def note_cost(self, drafter: str, seconds: tuple[tuple[int, float], ...]) -> None:
        """Take in what a drafter costs: guesses -> seconds."""
        self._cost = self._cost.noted(drafter, seconds)

    def knows(self, drafter: str) -> bool:
        """Whether the drafter's cost is known."""
        return self._cost.knows(drafter)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Take in how a sequence's guesses fared."""
        if drafted:
            self._pace(sequence).learn(drafted, accepted)

    def _pace(self, sequence: Sequence) -> _Pace:
        return self._paces.setdefault(sequence, _Pace())

    def _worth(self, pace: _Pace, drafter: str, most: int, num_rows: int) -> int:
        """Weigh the whole width against none, by how deep trees were right."""
        tokens, chance = 1.0, 1.0
        for agreement in pace.agreements(min(most, len(pace.judged))):
            chance *= agreement
            tokens += chance
        plain, drafted = (self._cost.round_seconds(drafter, num_rows, length) for length in (0, most))
        return most if tokens / drafted > 1 / plain else 0

    def _best(self, pace: _Pace, drafter: str, most: int, num_rows: int) -> int:
        best, best_worth = 0, 1 / self._cost.round_seconds(drafter, num_rows, 0)
        tokens, chance = 1.0, 1.0
        for length, agreement in enumerate(pace.agreements(most), 1):
            chance *= agreement
            tokens += chance
            seconds = self._cost.round_seconds(drafter, num_rows, length)
            if tokens / seconds > best_worth:
                best, best_worth = length, tokens / seconds
        return best
