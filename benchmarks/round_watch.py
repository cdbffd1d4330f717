"""What rounds there were in a turn, by how wide they were and what they were for: to see where a turn's time went."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider import LLM
    from outrider.engine.choice import RoundTimes
    from outrider.engine.flight import Decision

__all__ = ["RoundWatch"]


class RoundWatch:
    """Listens to what an engine tells its controller of each round.

    Args:
        llm: The engine; what it does is not changed.
    """

    def __init__(self, llm: LLM) -> None:
        self._speculator: Any = llm.engine.speculator
        self._told = self._speculator.timed
        self._speculator.timed = self._timed
        self._seen = self._nothing()
        self._collecting = 0.0
        gc.callbacks.append(self._collected)

    def close(self) -> None:
        """Listen no longer."""
        gc.callbacks.remove(self._collected)

    def take(self) -> dict[str, list[float]]:
        """Give rounds, seconds, tokens, and the seconds of the longest since the last call, by kind.

        A kind is rows x the guesses that the pass was as wide as ("4 x 3"), and "probe", "fed" (a draft read what it
        lacked) and "busy" (something else was done in that time, as a prompt that was read) where that is so.
        "garbage" are collections of all that Python holds, which stop every thread.
        """
        seen, self._seen = self._seen, self._nothing()
        return {
            kind: [count, round(seconds, 5), tokens, round(longest, 5)]
            for kind, (count, seconds, tokens, longest) in sorted(seen.items())
        }

    @staticmethod
    def _nothing() -> defaultdict[str, list[float]]:
        return defaultdict(lambda: [0, 0.0, 0, 0.0])

    def _note(self, kind: str, seconds: float, tokens: int) -> None:
        seen = self._seen[kind]
        for place, value in enumerate((1, seconds, tokens)):
            seen[place] += value
        seen[3] = max(seen[3], seconds)

    def _collected(self, phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif facts["generation"] == 2:
            self._note("garbage", time.perf_counter() - self._collecting, 0)

    def _timed(self, decision: Decision, times: RoundTimes) -> None:
        words = {"probe": decision.probe, "fed": bool(times.fed), "busy": not times.clean}
        kind = " ".join([f"{decision.party.num_rows} x {times.width}", *(word for word, so in words.items() if so)])
        self._note(kind, times.seconds, times.tokens)
        self._told(decision, times)
