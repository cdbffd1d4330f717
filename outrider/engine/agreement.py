"""How often guesses turn out right: of one sequence, place by place, and of all that a drafter guessed for lately.

Both are sums of evidence that fades. A sequence begins with what its drafter was worth to others, as if it had seen a
little of that itself; its own rounds soon outweigh it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    _Pair = tuple[list[float], list[float]]

__all__ = ["Agreement", "Outlook", "Reputation"]

FIRST_CHANCE, FIRST_WEIGHT = 0.7, 2.0  # of a drafter of which nothing was seen yet: hope, so that it is tried
LEANING_WEIGHT = 8.0  # rounds that the place before counts for, in the estimate of a place after the first
FAST, SLOW = 0.95, 0.995  # weight that the past of all sequences keeps with each row's guesses
LOSS_MEMORY = 0.99  # the same in how well views foretold
PACE_RATE, USUAL_RATE = 0.1, 0.02  # weight of the newest round in a text's pace, and in that of all texts
REST_MEMORY, REST_WEIGHT = 0.85, 4.0  # with every `RESTS` rounds without; no further down than to so much evidence
RESTS = 8
SURE = 0.995
LARGEST_UNIT = 1e9


@dataclass(frozen=True)
class Outlook:
    """What to expect of guesses, by how many are asked for (0, 1, ...).

    Attributes:
        gain: Guesses accepted.
        wide: Chance that so many guesses, or more, are made at all.
    """

    gain: Sequence[float]
    wide: Sequence[float]


class View(NamedTuple):
    """A way to see the past, see `Reputation`.

    Attributes:
        weight: Rounds that the reputation counts for beside a sequence's own past.
        own: Weight that a sequence's past keeps with each round of guesses.
        shared: The same for the past of all sequences.
    """

    weight: float
    own: float
    shared: float


VIEWS = tuple(
    View(*view)
    for view in ((2, 0.9, FAST), (8, 0.97, FAST), (2, 0.97, SLOW), (8, 0.97, SLOW), (32, 0.97, SLOW), (8, 0.99, SLOW))
)


class _Chances(NamedTuple):
    """Of one place: that a guess is right, that one is made after right ones, that one is made at all."""

    right: float
    made: float
    wide: float


class _Evidence:
    """Weighted counts by place, each of two columns: how often it was so, of how often it could have been.

    `right`: a guess that was made, all before it being right. `made`: a guess after right ones, whether it was made at
    all. `wide`: a guess, whether it was made, whatever those before it were worth. `full`: all that were asked for were
    made, as with a draft model; `made` and `wide` then need not be read.
    """

    def __init__(self, hope: float = 0.0, weight: float = 0.0) -> None:
        self._unit = 1.0  # what a round counts now: the past fades by others counting more
        first = [hope * weight] if weight else [], [weight] if weight else []
        self.right: _Pair = first
        self.made: _Pair = [], []
        self.wide: _Pair = [], []
        self.full = True

    @property
    def weight(self) -> float:
        """Rounds that it stands for."""
        return self.made[1][0] / self._unit if self.made[1] else 0.0

    def fade(self, share: float) -> None:
        """Let the past count less."""
        self._unit /= share
        if self._unit > LARGEST_UNIT:
            for pair in (self.right, self.made, self.wide):
                for column in pair:
                    column[:] = [value / self._unit for value in column]
            self._unit = 1.0

    def add(self, asked: int, drafted: int, accepted: int, weight: float = 1.0) -> None:
        """Take in one row of a round, which counts so much."""
        if asked > len(self.wide[1]):
            for pair in (self.right, self.made, self.wide):
                for column in pair:
                    column.extend([0.0] * (asked - len(column)))
        unit = self._unit * weight
        self.full &= drafted >= asked
        for place in range(asked):
            made = place < drafted
            self.wide[0][place] += unit * made
            self.wide[1][place] += unit
            if place <= accepted:
                self.made[0][place] += unit * made
                self.made[1][place] += unit
                if made:
                    self.right[0][place] += unit * (place < accepted)
                    self.right[1][place] += unit

    def share(self, pair: _Pair, place: int, lent: float, weight: float) -> float:
        """Give how often it was so at a place, leaning on `lent` as on so much evidence."""
        so, of = pair
        weight *= self._unit
        if place >= len(of) or not of[place] + weight:
            return lent
        return (so[place] + weight * lent) / (of[place] + weight)

    def chain(self, known: Sequence[_Chances], weight: float) -> list[float]:
        """Give how often a guess is right, place by place, leaning on what is `known` as on so much evidence.

        A place leans on the one before it, as far as what is known falls from that one to this: guesses that came far
        go on agreeing (a copied passage), so one number for all places would cut chains too short.
        """
        (so, of), leaning = self.right, LEANING_WEIGHT * self._unit
        found: list[float] = []
        weight, right, before = weight * self._unit, 1.0, 1.0
        for place, (lent, _, _) in enumerate(known):
            leant = min(SURE, right * lent / max(before, 0.01)) if place else lent
            right = min(SURE, leant if place >= len(of) else (so[place] + weight * leant) / (of[place] + weight))
            found.append(right)
            weight, before = leaning, lent
        return found


class Reputation:
    """What was seen of one drafter lately, in whatever sequences it guessed for.

    Texts may be all alike to a drafter, or each another; they may change as they go, or not; and so may the traffic. So
    how much a sequence's own past counts, and how long, is not fixed: several `VIEWS` foretell every first guess, and
    the one that has foretold best lately is believed.
    """

    def __init__(self) -> None:
        self.num_rounds = 0  # that were taken in
        self.pace = 1.0  # of texts lately, see `Agreement`
        self._seen = {memory: _Evidence(FIRST_CHANCE, FIRST_WEIGHT) for memory in (FAST, SLOW)}
        self._tokens = 1.0  # of a round with guesses, usually
        self._depths: dict[int, int] = {}  # of trees: nodes asked for -> places reached
        self._losses = [0.0] * len(VIEWS)
        self._chances: dict[float, list[_Chances]] = {FAST: [], SLOW: []}  # as last asked for

    @property
    def view(self) -> View:
        """The view that foretold best."""
        return VIEWS[self._losses.index(min(self._losses))]

    def depth(self, num_nodes: int) -> int:
        """How many places a tree of so many nodes reaches: as seen, else as far as any did."""
        if num_nodes not in self._depths:
            return min(num_nodes, max(self._depths.values(), default=num_nodes))
        return self._depths[num_nodes]

    def chances(self, most: int, memory: float) -> list[_Chances]:
        """Give what is to be expected at each place."""
        seen, found = self._seen[memory], self._chances[memory]
        right, made, wide = found[-1] if found else (FIRST_CHANCE, 1.0, 1.0)
        for place in range(len(found), most):
            right = seen.share(seen.right, place, right, LEANING_WEIGHT)
            if not seen.full:
                made = seen.share(seen.made, place, 1.0 if place else made, LEANING_WEIGHT)
                wide = min(wide, seen.share(seen.wide, place, wide, LEANING_WEIGHT))
            found.append(_Chances(right, made, wide))
        return found[:most]

    def learn(self, asked: int, drafted: int, accepted: int, foretold: Sequence[float], tokens: float) -> None:
        """Take in one row of a round, and how likely each view held its first guess to be right.

        `tokens`: what the row's rounds give, by those before. Texts that are hard to guess take many rounds, and easy
        ones few: with rounds counted alike, the next text would be held for a hard one. So a round counts as its text's
        rounds give tokens, by what is usual. The memory that is to follow new traffic at once counts them alike.
        """
        self.num_rounds += 1
        weight = tokens / self._tokens
        self._tokens += USUAL_RATE * (tokens - self._tokens)
        for memory, seen in self._seen.items():
            self._chances[memory] = []
            seen.fade(memory)
            seen.add(asked, drafted, accepted, weight if memory == SLOW else 1.0)
        for place, chance in enumerate(foretold):
            likely = min(SURE, max(1 - SURE, chance if accepted else 1 - chance))
            self._losses[place] = LOSS_MEMORY * self._losses[place] - math.log(likely)

    def note_depth(self, num_nodes: int, depth: int) -> None:
        """Note how far a tree reached."""
        self._depths[num_nodes] = max(depth, self._depths.get(num_nodes, 0))


class Agreement:
    """One sequence's agreement with its drafter.

    Attributes:
        pace: Tokens a round that it comes to as things go, resting or not.
        reading: Seconds that its drafter has taken to read what it lacked.
    """

    def __init__(self, reputation: Reputation) -> None:
        self._reputation = reputation
        self._own = {view.own: _Evidence() for view in VIEWS}
        self._last: tuple[tuple[int, int], Outlook] | None = None  # stands until something is learned or forgotten
        self.pace = reputation.pace
        self.reading = 0.0
        self._tokens = 1.0  # of its rounds with guesses, lately
        self._rests = 0

    @property
    def share(self) -> float:
        """Of a round, that a token of its takes as things go: what tokens of several texts are weighed by."""
        return 1 / self.pace

    @property
    def untried(self) -> bool:
        """Whether nothing was guessed for it so far."""
        return not self._own[VIEWS[0].own].weight

    def outlook(self, most: int) -> Outlook:
        """Say what to expect of up to `most` guesses in a chain, or places of a tree."""
        key = most, self._reputation.num_rounds
        if self._last is None or self._last[0] != key:
            self._last = key, self._outlook(most)
        return self._last[1]

    def _outlook(self, most: int) -> Outlook:
        weight, memory, shared = self._reputation.view
        own, known = self._own[memory], self._reputation.chances(most, shared)
        reached = list(accumulate(own.chain(known, weight), mul))
        wide = [1.0] * (len(known) + 1)
        if not (own.full and known and known[-1].wide == 1):  # else every guess was made so far
            made = 1.0
            for place, one in enumerate(known):
                made *= own.share(own.made, place, one.made, LEANING_WEIGHT if place else weight)
                reached[place] *= made
                wide[place + 1] = min(wide[place], own.share(own.wide, place, one.wide, weight))
        return Outlook([0.0, *accumulate(reached)], wide)

    def learn(self, asked: int, drafted: int, accepted: int) -> None:
        """Take in a round."""
        foretold = []
        for weight, memory, shared in VIEWS:
            own, first = self._own[memory], self._reputation.chances(1, shared)[0]
            made = 1.0 if own.full and first.made == 1 else own.share(own.made, 0, first.made, weight)
            foretold.append(made * own.share(own.right, 0, first.right, weight))
        self._reputation.learn(asked, drafted, accepted, foretold, self._tokens)
        self._tokens += PACE_RATE * (1 + accepted - self._tokens)
        for memory, own in self._own.items():
            own.fade(memory)
            own.add(asked, drafted, accepted)

    def goes_on(self, tokens: float) -> None:
        """Take in how many tokens a round is expected to give."""
        self.pace += PACE_RATE * (tokens - self.pace)
        self._reputation.pace += USUAL_RATE * (tokens - self._reputation.pace)

    def rest(self) -> None:
        """Take in a round without guesses: what was seen before says a little less of what comes."""
        self._rests += 1
        if self._rests % RESTS:
            return
        for own in self._own.values():
            if own.weight > REST_WEIGHT:
                own.fade(REST_MEMORY)
                self._last = None
