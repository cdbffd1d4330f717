"""How often guesses turn out right: of one sequence, place by place, and of all that a drafter guessed for lately.

Both are sums of evidence that fades. A sequence begins with what its drafter was worth to others, as if it had seen a
little of that itself; its own rounds soon outweigh it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Agreement", "Outlook", "Reputation"]

FIRST_CHANCE, FIRST_WEIGHT = 0.7, 2.0  # of a drafter of which nothing was seen yet: hope, so that it is tried
LENT_WEIGHT = 2.0  # rounds that a drafter's reputation counts for in a sequence's own estimate
LEANING_WEIGHT = 1.0  # the same for a place after the first, which leans on the place before it
OWN_MEMORY, SHARED_MEMORY = 0.9, 0.98  # weight that the past keeps with each round of guesses
REST_MEMORY, REST_WEIGHT = 0.98, 4.0  # with each round without; no further down than to so much evidence
SURE = 0.995


@dataclass(frozen=True)
class Outlook:
    """What to expect of guesses, by how many are asked for (0, 1, ...).

    Attributes:
        gain: Guesses accepted.
        made: Chance that so many guesses, or more, are made at all.
    """

    gain: Sequence[float]
    made: Sequence[float]


@dataclass
class _Evidence:
    """Weighted counts by place: of those reached, how many were right; of those asked for, how many were made."""

    right: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    made: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)

    def fade(self, share: float) -> None:
        for column in (self.right, self.reached, self.made, self.asked):
            column[:] = [share * value for value in column]

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        for column in (self.right, self.reached, self.made, self.asked):
            column.extend([0.0] * (asked - len(column)))
        for place in range(asked):
            self.asked[place] += 1
            self.made[place] += place < drafted
            if place <= accepted:
                self.reached[place] += 1
                self.right[place] += place < accepted

    def share(self, part: list[float], whole: list[float], place: int, lent: float, weight: float) -> float:
        if place >= len(whole):
            return lent
        return (part[place] + weight * lent) / (whole[place] + weight)


class Reputation:
    """What was seen of one drafter lately, in whatever sequences it guessed for."""

    def __init__(self) -> None:
        self._seen = _Evidence([FIRST_CHANCE * FIRST_WEIGHT], [FIRST_WEIGHT], [FIRST_WEIGHT], [FIRST_WEIGHT])
        self._depths: dict[int, int] = {}  # of trees: nodes asked for -> places reached

    def depth(self, num_nodes: int) -> int:
        """How many places a tree of so many nodes reaches: as seen, else as far as any did."""
        if num_nodes not in self._depths:
            return min(num_nodes, max(self._depths.values(), default=num_nodes))
        return self._depths[num_nodes]

    def chances(self, most: int) -> list[tuple[float, float]]:
        """Give for each place the chance that its guess is right if those before were, and that it is made."""
        found, right, made = [], FIRST_CHANCE, 1.0
        seen = self._seen
        for place in range(most):
            right = seen.share(seen.right, seen.reached, place, right, LEANING_WEIGHT * (place > 0))
            made = min(made, seen.share(seen.made, seen.asked, place, made, LEANING_WEIGHT * (place > 0)))
            found.append((right, made))
        return found

    def learn(self, asked: int, drafted: int, accepted: int) -> None:
        """Take in one row of a round."""
        self._seen.fade(SHARED_MEMORY)
        self._seen.add(asked, drafted, accepted)

    def note_depth(self, num_nodes: int, depth: int) -> None:
        """Note how far a tree reached."""
        self._depths[num_nodes] = max(depth, self._depths.get(num_nodes, 0))


class Agreement:
    """One sequence's agreement with its drafter."""

    def __init__(self, reputation: Reputation) -> None:
        self._reputation = reputation
        self._own = _Evidence()

    def outlook(self, most: int) -> Outlook:
        """Say what to expect of up to `most` guesses in a chain, or places of a tree.

        A place leans on the one before it, as far as the drafter's reputation falls from that one to this: guesses that
        came far go on agreeing (a copied passage), so one number for all places would cut chains too short.
        """
        gain, made = [0.0], [1.0]
        reached, chance, before = 1.0, 0.0, 1.0
        for place, (known, likely) in enumerate(self._reputation.chances(most)):
            lent = known if place == 0 else min(SURE, chance * known / max(before, 0.01))
            weight = LENT_WEIGHT if place == 0 else LEANING_WEIGHT
            own = self._own
            chance = min(SURE, own.share(own.right, own.reached, place, lent, weight))
            reached *= chance
            gain.append(gain[-1] + reached)
            made.append(min(made[-1], own.share(own.made, own.asked, place, likely, LENT_WEIGHT)))
            before = known
        return Outlook(gain, made)

    def learn(self, asked: int, drafted: int, accepted: int) -> None:
        """Take in a round: guesses that were not made are as good as wrong."""
        self._own.fade(OWN_MEMORY)
        self._own.add(asked, drafted, accepted)
        self._reputation.learn(asked, drafted, accepted)

    def rest(self) -> None:
        """Take in a round without guesses: what was seen before says a little less of what comes."""
        if self._own.reached and self._own.reached[0] > REST_WEIGHT:
            self._own.fade(REST_MEMORY)
