"""Who is let in next: the most important first, in order of arrival among equals; and nobody waits for ever."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.sequence import Sequence

__all__ = ["FAIR_TURN", "WaitingQueue"]

FAIR_TURN = 8  # of so many that are let in, one at least is the one that came first


class WaitingQueue:
    """Sequences that wait for a slot and for blocks.

    Of any `FAIR_TURN` sequences that are let in, one at least is the one that came first of those that wait, however
    unimportant. So a sequence that finds k others waiting is among the next ``FAIR_TURN * (k + 1)`` that are let in,
    whoever comes after it (those that are sent back count as others: they came before).
    """

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []  # by importance, then by arrival
        self._passed_over = 0  # let in since the last one that had come first

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait at the place that its importance and its arrival give it."""
        insort(self._waiting, sequence, key=_importance)

    def remove(self, sequence: Sequence) -> None:
        """Wait for it no longer."""
        self._waiting.remove(sequence)

    def head(self) -> Sequence:
        """Who is let in next."""
        return self._first() if self._passed_over + 1 >= FAIR_TURN else self._waiting[0]

    def pop(self) -> Sequence:
        """Take out who is let in."""
        sequence = self.head()
        self._passed_over = 0 if sequence is self._first() else self._passed_over + 1
        self._waiting.remove(sequence)
        return sequence

    def _first(self) -> Sequence:
        """Who came first."""
        if self._waiting[0].priority == self._waiting[-1].priority:
            return self._waiting[0]
        return min(self._waiting, key=lambda one: one.number)


def _importance(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.number
