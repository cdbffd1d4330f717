"""Who drafts for whom, and how far; and that no drafter can do more harm than cost time."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from outrider.draft.drafter import PartedDrafter
from outrider.engine.choice import FIRST_LENGTH, Party, Wish
from outrider.engine.controller import Controller
from outrider.engine.cost import Grid, unknown_costs
from outrider.engine.flight import Decision
from outrider.engine.round import Drafting
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outrider.draft.drafter import Drafter
    from outrider.engine.choice import RoundTimes, Traffic
    from outrider.engine.cost import RoundCosts
    from outrider.engine.profile import Profiler
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["Speculator"]

logger = logging.getLogger("outrider")
MOST_FAILURES = 3  # of a drafter in a row, before it is switched off


class Speculator:
    """Assigns drafters to rows before a round, and hears what became of their guesses after it.

    Args:
        runner: The target.
        state: The device rows.
        drafter: Drafts for every sequence that brings no drafter of its own; None for nobody.
        num_tokens: Guesses a round where a request says nothing.
        longest: Guesses a round at most, whatever a request says.
        independent: Whether guesses must be drawn independently of the target's choice.
        adaptive: Whether "auto" requests draft only as far as it pays.
        profiler: Times rounds, where draft lengths adapt.
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
        profiler: Profiler,
    ) -> None:
        self.drafter = drafter
        self.num_failures = 0
        self.num_limited = 0  # sequences that grew beyond their draft's context
        self._runner, self._state = runner, state
        self._num_tokens, self._longest = num_tokens, longest
        self._independent, self._adaptive, self._profiler = independent, adaptive, profiler
        # Requests bring drafters of their own: known as long as anybody holds them.
        self._drafters: WeakSet[Drafter] = WeakSet([] if drafter is None else [drafter])
        self._failures: WeakKeyDictionary[Drafter, int] = WeakKeyDictionary()  # of each drafter, in a row
        self._limited: WeakSet[Sequence] = WeakSet()
        self._controller: Controller | None = None

    def meet(self, drafter: Drafter | None) -> None:
        """Get to know a request's own drafter."""
        if drafter is not None:
            self._drafters.add(drafter)

    def prepare(self, captured: Callable[[], RoundCosts | None] | None = None) -> None:
        """Measure what rounds cost now, rather than in the first request's time; `captured` as for `Profiler.costs`."""
        if not self._adaptive or self.drafter is None:
            return
        costs = None
        try:
            costs = self._profiler.costs(self.drafter, captured)
        except Exception as error:  # noqa: BLE001 - it will fail in its rounds too, where that is dealt with
            logger.debug("rounds with drafter %s could not be timed: %s", self.drafter.name, error)
        self._controller = Controller(costs or unknown_costs())

    @property
    def costs(self) -> RoundCosts | None:
        """What rounds are expected to cost, by what was measured so far; None where nothing was."""
        return None if self._controller is None else self._controller.costs

    # --- before a round

    def decide(self, ready: list[Sequence], budget: int, traffic: Traffic) -> Decision:
        """Choose how many guesses each row is to get.

        Drafters whose caches lag are fed first, with at most `budget` tokens in all; a row that still lags gets none.
        """
        usual = FIRST_LENGTH if self._controller is None else self._controller.length.tokens
        wishes = [Wish(one, most := self._most(one), self._lag(one, most, len(ready)), usual) for one in ready]
        wanted, probe = self._lengths(wishes, traffic)
        lagging: dict[int, list[tuple[Sequence, int]]] = {}
        for place, sequence in enumerate(ready):
            missing = wishes[place].lag
            if not wanted[place] or not missing:
                continue
            if budget > 0:
                lagging.setdefault(id(self._drafter_of(sequence)), []).append((sequence, min(missing, budget)))
            wanted[place] = wanted[place] if missing <= budget else 0
            budget = max(0, budget - missing)
        began = time.perf_counter()
        for rows in lagging.values():
            failed = self._catch_up(rows)
            wanted = [0 if one in failed else length for one, length in zip(ready, wanted, strict=True)]
        party = self._party(self.lone_drafter(ready, wanted) or self.drafter, wishes, traffic)
        feeding = time.perf_counter() - began if lagging else 0.0
        fed = tuple(count for rows in lagging.values() for _, count in rows)
        return Decision(wanted, party, probe, feeding, fed)

    def _lag(self, sequence: Sequence, most: int, num_rows: int) -> int:
        """Count what a row's drafter must read before it can guess for it, in a round of so many rows."""
        drafter = self._drafter_of(sequence)
        if not most or drafter is None or sequence.slot is None:
            return 0
        try:
            missing = drafter.missing(sequence.slot, sequence.settled)
            return missing if missing > drafter.slack(num_rows) else 0
        except Exception as error:  # noqa: BLE001 - whatever a drafter does, requests go on
            self.failed(drafter, error)
            return 0

    def _lengths(self, wishes: list[Wish], traffic: Traffic) -> tuple[list[int], bool]:
        """Choose by drafter: as asked, or as far as it pays; and say whether any of it is a probe."""
        wanted: list[int] = []
        open_to: dict[int, list[int]] = {}
        probe = False
        for place, wish in enumerate(wishes):
            choosing = wish.most > 0 and self._adaptive and wish.sequence.request.params.draft_length is None
            wanted.append(0 if choosing else wish.most)
            if choosing:
                open_to.setdefault(id(self._drafter_of(wish.sequence)), []).append(place)
        for places in open_to.values():
            drafter = self._drafter_of(wishes[places[0]].sequence)
            assert drafter is not None
            party = replace(self._party(drafter, wishes, traffic), floor=max(wanted))
            choice = self._control(drafter).choose(party, [wishes[place] for place in places])
            probe |= choice.probe
            for place, length in zip(places, choice.lengths, strict=True):
                wanted[place] = max(length, self._forced(wishes[place], drafter))
        return wanted, probe

    def _forced(self, wish: Wish, drafter: Drafter) -> int:
        """Count what a grammar forces next: such guesses are right nearly always, and cost little."""
        constraint = wish.sequence.constraint
        return 0 if constraint is None or drafter.makes_trees else len(constraint.forced(wish.most))

    def _party(self, drafter: Drafter | None, wishes: list[Wish], traffic: Traffic) -> Party:
        on_card, ready = self._runner.device.type == "cuda", [wish.sequence for wish in wishes]
        return Party(
            drafter="" if drafter is None else drafter.name,
            num_rows=len(ready),
            most=self._num_tokens,
            trees=drafter is not None and drafter.makes_trees,
            inside=on_card and drafter is not None and drafter is self.drafter and drafter.device_side,
            narrows=not on_card and drafter is not None and not drafter.makes_trees,
            drawn=any(one.request.params.temperature > 0 for one in ready),
            context=sum(map(len, ready)) // max(1, len(ready)),
            ceiling=_ceiling(wishes, traffic.turnover),
            coming=traffic.coming,
        )

    def _catch_up(self, lagging: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Feed one drafter's lagging rows; give those that it failed."""
        sequences = [sequence for sequence, _ in lagging]
        drafter = self._drafter_of(sequences[0])
        if drafter is None:
            return sequences
        rows = self._state.gather(sequences).drafting(self._independent)
        work = partial(drafter.catch_up, rows, tuple(count for _, count in lagging))
        return [] if self._guarded(drafter, work) else sequences

    def shares(self, ready: list[Sequence], wanted: list[int]) -> tuple[Drafting, ...]:
        """Give each drafter the rows that it drafts for."""
        members: dict[int, tuple[Drafter, list[int]]] = {}
        for place, one in enumerate(ready):
            drafter = self._drafter_of(one)
            if wanted[place] and drafter is not None:
                members.setdefault(id(drafter), (drafter, []))[1].append(place)
        device = self._state.device
        return tuple(Drafting(drafter, tuple(rows), upload(rows, device)) for drafter, rows in members.values())

    def lone_drafter(self, sequences: list[Sequence], wanted: list[int]) -> Drafter | None:
        """Give the drafter of all rows that want guesses, where it is one."""
        drafters = [self._drafter_of(one) for one, length in zip(sequences, wanted, strict=True) if length]
        return drafters[0] if drafters and all(one is drafters[0] for one in drafters) else None

    def device_side(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all that draft for these sequences need nothing of the host: the host may lag a round behind."""
        drafters = {id(one): one for one in map(self._drafter_of, sequences) if one is not None}
        return all(drafter.device_side for drafter in drafters.values())

    def shares_blocks(self, sequence: Sequence) -> bool:
        """Whether what drafts for a sequence allows that its first blocks are another's too."""
        drafter = self._meant_for(sequence)
        return drafter is None or drafter.shares_blocks

    def kept(self, sequence: Sequence) -> tuple[Drafter | None, int]:
        """Say what drafts for a sequence, and how many of its first tokens that one has cached."""
        drafter = self._drafter_of(sequence)
        if drafter is None or sequence.slot is None:
            return None, 0
        try:
            return drafter, drafter.kept(sequence.slot)
        except Exception as error:  # noqa: BLE001 - whatever a drafter does, requests go on
            self.failed(drafter, error)
            return None, 0

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """Tell what drafts for a sequence that so many of its first tokens are cached already."""
        drafter = self._drafter_of(sequence)
        if drafter is not None and sequence.slot is not None:
            self._guarded(drafter, partial(drafter.adopt, sequence.slot, num_tokens))

    def copy_blocks(self, sequence: Sequence, source: list[int], target: list[int]) -> None:
        """Copy what target and draft keep in some blocks to others."""
        self._runner.copy_blocks(source, target)
        drafter = self._drafter_of(sequence)
        if drafter is not None:
            self._guarded(drafter, partial(drafter.copy_blocks, source, target))

    def _meant_for(self, sequence: Sequence) -> Drafter | None:
        own: Drafter | None = sequence.request.drafter
        return own if own is not None else self.drafter

    def _drafter_of(self, sequence: Sequence) -> Drafter | None:
        drafter = self._meant_for(sequence)
        return None if drafter is None or self._failures.get(drafter, 0) >= MOST_FAILURES else drafter

    def _most(self, sequence: Sequence) -> int:
        """Give a row's guesses at most: as wished, within what is left to generate and the draft's reach."""
        drafter, params = self._drafter_of(sequence), sequence.request.params
        if drafter is None:
            return 0
        asked = params.draft_length
        most = self._num_tokens if asked is None else asked
        most = min(most, self._longest, sequence.limit - len(sequence) - 1)
        if drafter.context_length is not None and most > drafter.context_length - sequence.reach:
            most = max(0, drafter.context_length - sequence.reach)
            self._note_limit(sequence, drafter)
        return max(0, most)

    def _note_limit(self, sequence: Sequence, drafter: Drafter) -> None:
        if sequence not in self._limited:
            self._limited.add(sequence)
            self.num_limited += 1
            words = "request %s is longer than the draft's context of %s tokens: it goes on without guesses"
            logger.warning(words, sequence.request.id, drafter.context_length)

    def _control(self, drafter: Drafter) -> Controller:
        """Make the controller on first need, and time a request's own drafter on first sight: for a moment."""
        if self._controller is None:
            self._controller = Controller(unknown_costs())
        if not self._controller.costs.knows(drafter.name):
            try:
                self._controller.costs.note(drafter.name, *self._profiler.drafter(drafter, whole=False))
            except Exception as error:  # noqa: BLE001 - it will fail in its rounds too, where that is dealt with
                logger.debug("drafter %s could not be timed: %s", drafter.name, error)
                self._controller.costs.note(drafter.name, Grid({(1, 1): 0.0}))
        return self._controller

    # --- after it

    def tell(
        self,
        drafter: Drafter,
        sequences: list[Sequence],
        accepted: list[int],
        credited: list[list[list[int]]] | None = None,
    ) -> None:
        """Let a drafter know how its guesses fared, before the sequences take in what was committed.

        `credited` says of each row whose its guesses were and which were accepted, as `RoundResult.credited`.
        """
        told = tuple(one.slot for one in sequences if one.slot is not None), tuple(len(one) for one in sequences)
        if credited is not None and isinstance(drafter, PartedDrafter):
            each = [_by_part(row, len(drafter.part_names)) for row in credited]
            for sequence, counts in zip(sequences, each, strict=True):
                sequence.ledger.record_parts(drafter.part_names, counts)
            right = tuple(tuple(-1 if not made else good for made, good in counts) for counts in each)
            self._guarded(drafter, partial(drafter.credit, told[0], right))
        if self._guarded(drafter, partial(drafter.commit, *told, tuple(accepted))):
            self._failures.pop(drafter, None)

    def learn(self, sequence: Sequence, asked: int, drafted: int, accepted: int) -> None:
        """Take in how a sequence's guesses fared, for the lengths to come."""
        drafter = self._meant_for(sequence)
        if self._controller is not None and drafter is not None:
            self._controller.learn(sequence, drafter.name, asked, drafted, accepted, tree=drafter.makes_trees)

    def timed(self, decision: Decision, times: RoundTimes) -> None:
        """Take in what a round took, for the lengths to come."""
        if self._controller is not None:
            self._controller.took(decision.party, decision.probe, times)

    def release(self, slot: int) -> None:
        """Let every drafter forget a slot."""
        for drafter in list(self._drafters):
            self._guarded(drafter, partial(drafter.release, slot))

    @property
    def disabled(self) -> bool:
        """Whether the engine's own drafter failed so often that it is switched off."""
        return self.drafter is not None and self._failures.get(self.drafter, 0) >= MOST_FAILURES

    def failed(self, drafter: Drafter, error: Exception) -> None:
        """Count a failure; a drafter that fails again and again is switched off. Requests go on."""
        self.num_failures += 1
        count = self._failures[drafter] = self._failures.get(drafter, 0) + 1
        verdict = "switched off" if count >= MOST_FAILURES else "this round goes on without it"
        logger.warning("drafter %s failed (%s: %s); %s", drafter.name, type(error).__name__, error, verdict)

    def _guarded(self, drafter: Drafter, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(drafter, error)
            return False
        return True


def _ceiling(wishes: list[Wish], turnover: float) -> float:
    """Give `Party.ceiling`."""
    return sum(wish.in_all for wish in wishes) / len(wishes) / turnover if turnover else math.inf


def _by_part(credited: list[list[int]], num_parts: int) -> list[tuple[int, int]]:
    """Count guesses and accepted guesses of each part."""
    counts = [(0, 0)] * num_parts
    for part, accepted in zip(*credited, strict=True):
        if 0 <= part < num_parts:
            made, right = counts[part]
            counts[part] = made + 1, right + accepted
    return counts
