"""What each round took, told from the times at which the host reads rounds anyway: nothing waits for the sake of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outrider.engine.choice import RoundTimes

if TYPE_CHECKING:
    from outrider.engine.flight import Flight

__all__ = ["RoundClock"]

MOST_AWAY = 0.1  # of a round: time that callers spent between two steps, beyond which a round's time says nothing


class RoundClock:
    """Times rounds from read to read.

    Where a round was started before the last one was read, its time runs from that reading on: until then the device
    was busy with the other, and what drafters read before it is part of it. Otherwise it runs from its own start.
    The host may read a round late, since it asked for what drafters read before the next one: that is told.

    A round ends when its results are there. What the host then does with them (more where guesses were judged) it does
    while the next one runs: counted in, it would make a round after a plain one seem longer, and a plain one after it
    shorter, by five percent of a small batch's. Only where the host waits for each round is it part of it.

    Args:
        apart: Whether the host waits for each round, and for what drafters read before it, which is then timed by
            itself.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._read_at = self._left_at = self._entered_at = 0.0

    def enter(self) -> None:
        """A step begins."""
        self._entered_at = time.perf_counter()

    def leave(self) -> float:
        """A step ends; give its seconds."""
        self._left_at = time.perf_counter()
        return self._left_at - self._entered_at

    def read(
        self, flight: Flight, width: int, tokens: int, *, arrived: float, following: Flight | None = None
    ) -> RoundTimes:
        """A round of so many guesses was read, and sequences took so many tokens of it.

        Its results had `arrived` at that time; `following` is the one that was started meanwhile, if any was.
        """
        now = time.perf_counter() if self._apart else arrived
        began = flight.began + (flight.decision.feeding if self._apart else 0.0)
        seconds = now - max(began, self._read_at)
        self._read_at = now
        away = self._entered_at - self._left_at if flight.began < self._entered_at else 0.0
        lone = len(flight.served) == (1 if any(flight.wanted) else 0)
        return RoundTimes(
            seconds=seconds,
            drafting=flight.drafting,
            feeding=flight.decision.feeding,
            width=width,
            asked=max(flight.wanted),
            rows_asked=sum(length > 0 for length in flight.wanted),
            tokens=tokens,
            clean=flight.clean and lone and away <= MOST_AWAY * seconds,
            fed=flight.decision.fed,
            apart=self._apart,
            delayed=following is not None and bool(following.decision.fed),
        )
