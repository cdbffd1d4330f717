"""What a draft's own certainty is worth: a chain goes on only while one more guess is likely enough to be right.

A draft that is sure of a guess is right more often (on a real pair: 27 % where it gives its likeliest token less than
0.3, all where more than 0.9; docs/performance.md). How often exactly, differs from draft to draft, so it is counted.
Only the draft's distribution at a place is looked at, never which token was drawn from it, and only to decide whether
there shall be a guess after that one. So the law of what is guessed at any place stays what it was.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from outrider.draft.drafter import DraftRows

__all__ = ["Confidence", "Watch"]

EDGES = (0.3, 0.5, 0.7, 0.9, 0.97)  # of the classes of certainty
TRUST = 4.0  # guesses that the draft's own word counts for, in each class
USUAL = 0.7  # guesses that are right, before any was seen
MEMORY = 0.998  # weight that the past keeps with each guess


class Confidence:
    """Counts how often a drafter's guesses are right, by how sure it was of them; greedy and drawn text apart."""

    def __init__(self) -> None:
        self._counts = {drawn: _Counts() for drawn in (False, True)}
        self._chains: dict[int, tuple[bool, list[float]]] = {}  # by slot, how sure it was in the last chain

    def watch(self, rows: DraftRows) -> Watch | None:
        """Watch a chain as it is written; None where it is to be as long as asked."""
        for slot in rows.slots:
            self._chains.pop(slot, None)
        return Watch(self, rows, self._counts[rows.rules.flags.random]) if rows.least > 0 else None

    def note(self, slot: int, drawn: bool, sure: list[float]) -> None:
        """Keep how sure a slot's chain was, until it is known how it fared."""
        self._chains[slot] = drawn, sure

    def learn(self, slot: int, accepted: int) -> None:
        """Take in how many guesses of a slot's last chain were right; of one that was not watched nothing is known."""
        drawn, sure = self._chains.pop(slot, (False, []))
        for place, one in enumerate(sure[: accepted + 1]):
            self._counts[drawn].add(one, place < accepted)


class _Counts:
    """Guesses by certainty: how many there were, and how many were right; the past fades."""

    def __init__(self) -> None:
        self.right = torch.zeros(len(EDGES) + 1)
        self.made = torch.zeros(len(EDGES) + 1)

    @property
    def usual(self) -> float:
        """How many guesses are right, of all."""
        return (float(self.right.sum()) + TRUST * USUAL) / (float(self.made.sum()) + TRUST)

    def chances(self, sure: torch.Tensor) -> torch.Tensor:
        """Give the chance of being right of guesses by how sure the draft is of them, both ``[B]``."""
        kind = torch.bucketize(sure, torch.tensor(EDGES), right=True)
        return (self.right[kind] + TRUST * sure) / (self.made[kind] + TRUST)

    def add(self, sure: float, right: bool) -> None:
        kind = bisect_right(EDGES, sure)
        self.right *= MEMORY
        self.made *= MEMORY
        self.right[kind] += right
        self.made[kind] += 1


class Watch:
    """One chain of B rows: whether it pays to go on.

    Args:
        confidence: Learns from it.
        rows: Whom it is for; their `least` is what a step must be expected to give.
        counts: What is known.
    """

    def __init__(self, confidence: Confidence, rows: DraftRows, counts: _Counts) -> None:
        self._confidence, self._rows, self._counts = confidence, rows, counts
        self._alive = torch.ones(len(rows.slots))
        self._sure: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor) -> None:
        """Take in the logits ``[B, 1, V]`` that a guess is taken from."""
        sure = logits[:, 0].float().softmax(-1).amax(-1).cpu()
        self._sure.append(sure)
        self._alive = self._alive * self._counts.chances(sure)

    @property
    def goes_on(self) -> bool:
        """Whether another guess for every row is expected to give as many tokens as it must."""
        return float(self._alive.sum()) * self._counts.usual >= self._rows.least

    def close(self) -> None:
        """The chain is as long as it will be."""
        drawn = self._rows.rules.flags.random
        for slot, sure in zip(self._rows.slots, torch.stack(self._sure, 1).tolist(), strict=True):
            self._confidence.note(slot, drawn, sure)
