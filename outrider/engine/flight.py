"""A round under way: what the host must remember of it, and its results on their way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from outrider.draft.drafter import Drafter
    from outrider.engine.choice import Party
    from outrider.engine.round import RoundResult
    from outrider.sequence import Sequence

__all__ = ["Decision", "Flight", "Readback"]


class Readback:
    """Copies a round's results to the host without making either side wait; `rows` waits for them."""

    def __init__(self, result: RoundResult) -> None:
        self._has_credited = result.credited is not None
        parts = [result.packed, *([] if result.credited is None else [result.credited]), *(result.logprobs or ())]
        self._parts = parts
        self._arrived: torch.cuda.Event | None = None
        if result.packed.is_cuda:
            self._parts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in parts]
            for mine, theirs in zip(self._parts, parts, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def rows(self) -> tuple[list[list[int]], list[list[Any]] | None]:
        """Give the packed results of each row, and the columns of the report on log-probabilities, if there is one."""
        self._wait()
        packed, *report = (part.tolist() for part in self._parts)
        return packed, report[self._has_credited :] or None

    def credited(self) -> list[list[list[int]]] | None:
        """Give of each row whose the guesses were and which were accepted; None where no mixture drafted."""
        self._wait()
        credited: list[list[list[int]]] | None = self._parts[1].tolist() if self._has_credited else None
        return credited

    def _wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()


@dataclass(frozen=True)
class Decision:
    """What was decided before a round.

    Attributes:
        wanted: Guesses for each row.
        party: Who drafts, and in what round, as costs go by.
        probe: Whether any of it is for the sake of knowledge alone.
        feeding: Seconds that drafters took to read what they lacked.
        fed: Tokens that they read, of each row that lacked some.
    """

    wanted: list[int]
    party: Party
    probe: bool
    feeding: float
    fed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Flight:
    """A round that was started and not yet read.

    Attributes:
        sequences: Its rows, in order; some may have ended since.
        wanted: Guesses that each was allowed.
        served: Drafters that guessed, and for which rows.
        readback: Its results.
        decision: What was decided for it.
        began: When it was begun, what drafters read before it included.
        clean: Whether nothing was started with it, such as a prompt; but for what drafters lacked.
        own: How many of each row's first guesses are its drafter's own; None: all.
        drafting: Seconds that guesses took which were made outside of the pass.
    """

    sequences: list[Sequence]
    wanted: list[int]
    served: list[tuple[Drafter, tuple[int, ...]]]
    readback: Readback
    decision: Decision
    began: float = 0.0
    clean: bool = False
    own: list[int] | None = None
    drafting: float = 0.0
