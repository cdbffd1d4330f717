"""Who drafts for whom, and how far; and that no drafter can do more harm than cost time."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from outrider.draft.drafter import DraftRows
from outrider.engine.controller import Controller
from outrider.engine.cost import measured, measured_draft
from outrider.engine.round import Drafting

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.draft.drafter import Drafter
    from outrider.engine.round import RoundPlan
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner
    from outrider.proposal import Acceptance
    from outrider.sequence import Sequence

__all__ = ["Speculator"]

logger = logging.getLogger("outrider")
MOST_FAILURES = 3  # of a drafter in a row, before it is switched off


class Speculator:
    """Assigns drafters to rows before a round, and hears what became of their guesses after it.

    Args:
        runner: The target, whose passes are timed where draft lengths adapt.
        state: The device rows.
        drafter: Drafts for every sequence that brings no drafter of its own; None for nobody.
        num_tokens: Guesses a round where a request says nothing.
        longest: Guesses a round at most, whatever a request says.
        independent: Whether guesses must be drawn independently of the target's choice.
        adaptive: Whether "auto" requests draft only as far as it pays.
    """

    def __init__(
        self,
        runner: Runner,
        state: DeviceState,
        drafter: Drafter | None,
        *,
        num_tokens: int,
        longest: int,
        independent: bool,
        adaptive: bool,
    ) -> None:
        self.drafter = drafter
        self.num_failures = 0
        self.num_limited = 0  # sequences that grew beyond their draft's context
        self._runner, self._state = runner, state
        self._num_tokens, self._longest = num_tokens, longest
        self._independent, self._adaptive = independent, adaptive
        self._drafters: list[Drafter] = [] if drafter is None else [drafter]
        self._failures: dict[int, int] = {}  # of each drafter, in a row
        self._limited: WeakSet[Sequence] = WeakSet()
        self._controller: Controller | None = None

    def meet(self, drafter: Drafter | None) -> None:
        """Get to know a request's own drafter."""
        if drafter is not None and drafter not in self._drafters:
            self._drafters.append(drafter)

    def prepare(self) -> None:
        """Measure what passes and drafts cost now, rather than in the first request's time."""
        if self._adaptive and self.drafter is not None:
            self._control(self.drafter)

    # --- before a round

    def lengths(self, ready: list[Sequence], budget: int) -> list[int]:
        """Choose how many guesses each row is to get.

        Drafters whose caches lag are fed first, with at most `budget` tokens in all; a row that still lags gets none.
        """
        wanted = [self._length(sequence, len(ready)) for sequence in ready]
        for place, sequence in enumerate(ready):
            drafter = self._drafter_of(sequence)
            if not wanted[place] or drafter is None or sequence.slot is None:
                continue
            try:
                missing = drafter.missing(sequence.slot, len(sequence))
                if missing and budget > 0:
                    drafter.catch_up(self._draft_row(sequence), min(missing, budget))
            except Exception as error:  # noqa: BLE001 - whatever a drafter does, requests go on
                self.failed(drafter, error)
                missing = budget + 1
            wanted[place] = wanted[place] if missing <= budget else 0
            budget = max(0, budget - missing)
        return wanted

    def shares(self, ready: list[Sequence], wanted: list[int]) -> tuple[Drafting, ...]:
        """Give each drafter the rows that it drafts for."""
        shares = []
        for drafter in self._drafters:
            members = tuple(
                place for place, one in enumerate(ready) if wanted[place] and self._drafter_of(one) is drafter
            )
            if members:
                shares.append(Drafting(drafter, members, torch.tensor(members, device=self._state.device)))
        return tuple(shares)

    def _drafter_of(self, sequence: Sequence) -> Drafter | None:
        own: Drafter | None = sequence.request.drafter
        drafter = own if own is not None else self.drafter
        return None if drafter is None or self._failures.get(id(drafter), 0) >= MOST_FAILURES else drafter

    def _length(self, sequence: Sequence, num_rows: int) -> int:
        """Choose a row's guesses: as wished, within what is left to generate and the draft's reach."""
        drafter, params = self._drafter_of(sequence), sequence.request.params
        if drafter is None:
            return 0
        asked = params.draft_length
        most = self._num_tokens if asked is None else asked
        most = min(most, self._longest, sequence.limit - len(sequence) - 1)
        if drafter.context_length is not None and most > drafter.context_length - len(sequence):
            most = max(0, drafter.context_length - len(sequence))
            self._note_limit(sequence, drafter)
        if most <= 0 or not self._adaptive or asked is not None:
            return max(0, most)
        return self._control(drafter).length(sequence, drafter.name, most, num_rows)

    def _note_limit(self, sequence: Sequence, drafter: Drafter) -> None:
        if sequence not in self._limited:
            self._limited.add(sequence)
            self.num_limited += 1
            words = "request %s is longer than the draft's context of %s tokens: it goes on without guesses"
            logger.warning(words, sequence.request.id, drafter.context_length)

    def _control(self, drafter: Drafter) -> Controller:
        """Make the controller on first need, and time each drafter on first sight: real passes, for a moment."""
        most = max(1, min(self._num_tokens, self._longest))
        if self._controller is None:
            self._controller = Controller(measured(self._runner, self._state, most))
        if not self._controller.knows(drafter.name):
            self._controller.note_cost(drafter.name, measured_draft(drafter, self._state, most))
        return self._controller

    def _draft_row(self, sequence: Sequence) -> DraftRows:
        rows = self._state.gather([sequence])
        return DraftRows(
            slots=rows.slots,
            tokens=rows.tokens,
            lengths=rows.lengths,
            host_lengths=rows.host_lengths,
            tables=rows.tables,
            start=rows.start,
            rules=rows.rules,
            independent=self._independent,
        )

    # --- after it

    def tell(self, served: tuple[Drafting, ...], plan: RoundPlan, acceptance: Acceptance) -> None:
        """Let each drafter that guessed know how its guesses fared."""
        if not served:
            return
        rows, accepted = plan.rows, acceptance.num_accepted.tolist()
        for share in served:
            told = (
                tuple(rows.slots[member] for member in share.members),
                tuple(rows.host_lengths[member] for member in share.members),
                tuple(accepted[member] for member in share.members),
            )
            if self._guarded(share.drafter, partial(share.drafter.commit, *told)):
                self._failures.pop(id(share.drafter), None)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Take in how a sequence's guesses fared, for the lengths to come."""
        if self._controller is not None:
            self._controller.learn(sequence, drafted, accepted)

    def release(self, slot: int) -> None:
        """Let every drafter forget a slot."""
        for drafter in self._drafters:
            self._guarded(drafter, partial(drafter.release, slot))

    def failed(self, drafter: Drafter, error: Exception) -> None:
        """Count a failure; a drafter that fails again and again is switched off. Requests go on."""
        self.num_failures += 1
        count = self._failures.get(id(drafter), 0) + 1
        self._failures[id(drafter)] = count
        verdict = "switched off" if count >= MOST_FAILURES else "this round goes on without it"
        logger.warning("drafter %s failed (%s: %s); %s", drafter.name, type(error).__name__, error, verdict)

    def _guarded(self, drafter: Drafter, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(drafter, error)
            return False
        return True
