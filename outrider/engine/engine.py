"""The engine: admits requests, feeds prompts, runs rounds, and hands out what they gave.

One call of `step` is one turn of everything: feed some prompt tokens, then one round for every row that is ready. The
engine decides on the host who takes part and how far to draft; the round itself decides nothing. On a card the next
round is started before the last one is read, so that the card never waits for the host.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import MAX_DRAFT_TOKENS, EngineConfig, SpeculationConfig, Verification
from outrider.engine.block_pool import BlockPool
from outrider.engine.constraint import ended_by_grammar, masked, why_stuck, with_forced
from outrider.engine.figures import EngineFigures
from outrider.engine.flight import Flight, Readback
from outrider.engine.graphs import RoundGraphs
from outrider.engine.prefill import PromptFeeder
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.profile import Profiler
from outrider.engine.round import STUCK, RoundPlan, propose, verify
from outrider.engine.round_clock import RoundClock
from outrider.engine.scheduler import Scheduler
from outrider.engine.speculator import Speculator
from outrider.engine.state import DeviceState
from outrider.outputs import TokenLogprob
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outrider.draft.drafter import Drafter
    from outrider.engine.flight import Decision
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["Engine"]

logger = logging.getLogger("outrider")
LEAST_CATCH_UP = 16  # tokens a step that lagging drafts may feed: more than a step adds, so that they do catch up


class Engine:
    """Runs sequences to their end over one target and any number of drafters.

    Args:
        runner: The target, its cache allocated.
        drafter: Guesses for every sequence that brings no drafter of its own; None decodes plainly.
        config: Sizes; ``config.max_model_len`` is set.
        speculation: Draft length and verification.
        num_blocks: Cache blocks, as the runners were allocated with.
        depth: Rounds that may be started before the last one is read: 1 on a card, 0 on a CPU.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None,
        config: EngineConfig,
        speculation: SpeculationConfig,
        num_blocks: int,
        *,
        depth: int | None = None,
    ) -> None:
        assert config.max_model_len is not None
        self.runner = runner
        self.config, self._num_blocks = config, num_blocks
        self.speculation = speculation
        self._lookahead = lookahead = MAX_DRAFT_TOKENS
        most = speculation.num_speculative_tokens
        if config.exact:  # every round has the same width
            self._lookahead = lookahead = most
        self._depth = int(runner.device.type == "cuda") if depth is None else depth
        self._flights: deque[Flight] = deque()
        self._clock = RoundClock(apart=self._depth == 0)
        sizes = config.max_num_seqs, config.max_model_len, lookahead
        self.state = DeviceState(*sizes, runner.device, runner.features)
        self.speculator = Speculator(
            runner,
            self.state,
            drafter,
            num_tokens=most,
            longest=lookahead,
            independent=speculation.verification.draws_guesses,
            adaptive=not config.exact,
            profiler=Profiler(runner, self.state, speculation.verification, most, num_blocks),
        )
        pool, prefixes = BlockPool(num_blocks), None
        if config.prefix_caching:
            chunk = config.prefill_chunk_size if config.exact else None
            prefixes = PrefixCache(pool, self.speculator, across_scopes=config.share_prefixes, chunk=chunk)
        self.figures = EngineFigures(prefixes)
        self.scheduler = Scheduler(
            self.state,
            pool,
            self.speculator.release,
            reserve=lookahead if config.exact else None,
            prefixes=prefixes,
            copy=self.speculator.copy_blocks if runner.device.type == "cpu" else None,
        )
        self._prompts = PromptFeeder(runner, self.state, config, self.scheduler)
        self.graphs: RoundGraphs | None = None
        if runner.device.type == "cuda":
            self.graphs = RoundGraphs(
                runner, self.state, speculation.verification, drafter, most=most, exact=config.exact
            )

    @torch.inference_mode()
    def prepare(self, counted: Callable[[list[Any], str], Iterable[Any]] = lambda items, _: items) -> None:
        """Do once what would otherwise delay the first request: capture rounds on a card, measure what they cost.

        `counted` goes through a list and shows how far it is.
        """
        if self.graphs is None:
            self.speculator.prepare()
            return
        self.graphs.prepare(counted)
        self.speculator.prepare(self.graphs.costing(self._num_blocks))

    @property
    def drafter(self) -> Drafter | None:
        """What drafts for sequences that bring no drafter of their own."""
        return self.speculator.drafter

    @property
    def longest_draft(self) -> int:
        """Guesses a round that a request may ask for at most."""
        return self._lookahead

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.speculator.meet(sequence.request.drafter)
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; nothing is computed for it any more."""
        if not sequence.finished:
            sequence.finish("abort")
            self.scheduler.retire(sequence)

    @torch.inference_mode()
    def step(self) -> None:
        """Feed prompts, start a round, and read the one before it (on a CPU: this one)."""
        self._clock.enter()
        try:
            self._step()
        finally:
            self.figures.step_seconds += self._clock.leave()

    def relieve(self) -> None:
        """After steps that ran out of memory: read what is under way, and end the youngest text."""
        self._read(0)
        self.scheduler.relieve()

    def _step(self) -> None:
        self.scheduler.admit()
        feeding = len(self._ready()) < len(self.scheduler.running)
        self._prompts.feed(self.scheduler.running)
        ready = [one for one in self._ready() if not one.surely_ends]
        if self._flights and self._must_read_first(ready):
            self._read(0)
            ready = self._ready()
        for one in ready:
            if one.ended_at_limit() or ended_by_grammar(one):
                self.scheduler.retire(one)
        # The most important first: what one row needs may send away lesser ones, which then no longer run.
        ready = [one for one in self.scheduler.ranked(ready) if one.slot is not None and self.scheduler.secure(one)]
        if ready:
            self._flights.append(self._launch(ready, alone=not feeding))
        self._read(self._depth if ready else 0)

    def _ready(self) -> list[Sequence]:
        return [one for one in self.scheduler.running if one.uncached == 0]

    def _must_read_first(self, ready: list[Sequence]) -> bool:
        """Whether the next round must wait for the host to read the last one.

        It must where that one may have ended all texts (another round would be wasted), where somebody would have to
        be sent away for want of room, or where a drafter or a grammar needs to see the tokens on the host.
        """
        if all(one.may_end for one in ready) or not self.speculator.device_side(ready) or _constrained(ready):
            return True
        return not all(self.scheduler.grow(one, one.reach) for one in ready)

    def _read(self, leave: int) -> None:
        """Read rounds back until only `leave` are under way."""
        while len(self._flights) > leave:
            self._collect(self._flights.popleft())

    def _launch(self, ready: list[Sequence], *, alone: bool) -> Flight:
        """Decide how far to draft for each row, and start the round; `alone`: no prompt was fed before it."""
        began = time.perf_counter()
        budget = max(self.config.prefill_chunk_size, LEAST_CATCH_UP)
        decision = self.speculator.decide(ready, budget, self._prompts.traffic())
        wanted = decision.wanted
        for place, sequence in enumerate(ready):
            if wanted[place] and not self.scheduler.grow(sequence, sequence.reach + wanted[place]):
                wanted[place] = 0  # no room for guesses: decode plainly rather than send somebody away
        flight = self._replay(ready, decision) or self._run(ready, decision)
        for sequence, length in zip(ready, wanted, strict=True):
            sequence.ahead += length + 1
        self.figures.rounds += 1
        return replace(flight, began=began, clean=alone)

    def _replay(self, ready: list[Sequence], decision: Decision) -> Flight | None:
        """Start a captured round; None where there is none for this."""
        wanted = decision.wanted
        drafter = self.speculator.lone_drafter(ready, wanted)
        if self.graphs is None or (drafter is not self.drafter and any(wanted)) or _constrained(ready):
            return None
        result = self.graphs.replay(ready, wanted, _reported(ready))
        if result is None:
            return None
        members = tuple(place for place, length in enumerate(wanted) if length)
        served = [(drafter, members)] if drafter is not None and members else []
        return Flight(ready, wanted, served, Readback(result), decision)

    def _run(self, ready: list[Sequence], decision: Decision) -> Flight:
        """Run a round operation by operation; on a card, what comes after guesses that needed the host is captured."""
        began, wanted = time.perf_counter(), decision.wanted
        plan = self._plan(ready, wanted)
        proposal, served = propose(plan, self.runner.vocab_size, self.speculator.failed)
        own, constrained = None, _constrained(ready)
        if constrained and proposal.parents is None and plan.num_tokens:
            proposal, own = with_forced(proposal, ready, wanted)
        if not plan.fixed_width and self.runner.device.type == "cpu":
            proposal = proposal.narrowed(int(proposal.lengths.max()))
        if constrained:
            plan = masked(plan, proposal, ready)
        middle = time.perf_counter()
        result = None
        if self.graphs is not None and not constrained and served and plan.num_tokens:
            result = self.graphs.replay(ready, wanted, plan.num_logprobs, proposal)
        readback = Readback(verify(plan, proposal, self.runner, self.state) if result is None else result)
        self.figures.propose_seconds += middle - began
        self.figures.verify_seconds += time.perf_counter() - middle
        shares = [(share.drafter, share.members) for share in served]
        return Flight(ready, wanted, shares, readback, decision, own=own, drafting=middle - began)

    def _plan(self, ready: list[Sequence], wanted: list[int]) -> RoundPlan:
        exact = self.config.exact
        num_tokens = self._lookahead if exact else max(wanted)
        rows = self.state.gather(ready, pad_to=self.config.max_num_seqs if exact else 0, room=num_tokens + 1)
        return RoundPlan(
            rows=rows,
            allowance=upload(wanted + [0] * (len(rows.slots) - len(ready)), self.state.device),
            num_tokens=num_tokens,
            drafting=self.speculator.shares(ready, wanted),
            verification=self.speculation.verification,
            num_logprobs=_reported(ready),
            fixed_width=exact,
        )

    def _collect(self, flight: Flight) -> None:
        """Read a round: append tokens up to each sequence's end, keep the books, let go of what is finished."""
        packed, report = flight.readback.rows()
        now = time.perf_counter()
        credited = flight.readback.credited()
        for drafter, members in flight.served:
            alive = [member for member in members if not flight.sequences[member].finished]
            accepted = [packed[member][-3] for member in alive]
            if flight.own is not None:
                accepted = [min(count, flight.own[member]) for count, member in zip(accepted, alive, strict=True)]
            parts = None if credited is None else [credited[member] for member in alive]
            self.speculator.tell(drafter, [flight.sequences[member] for member in alive], accepted, parts)
        before = self.figures.tokens
        for row, sequence in enumerate(flight.sequences):
            sequence.ahead -= flight.wanted[row] + 1
            if not sequence.finished:  # neither aborted nor ended in the round before this one
                columns = None if report is None else [column[row] for column in report]
                own = None if flight.own is None else flight.own[row]
                self._take_in(sequence, packed[row], columns, now, own, flight.wanted[row])
        width, taken, following = len(packed[0]) - 4, self.figures.tokens - before, next(iter(self._flights), None)
        times = self._clock.read(flight, width, taken, arrived=now, following=following)
        self.speculator.timed(flight.decision, times)

    def _take_in(
        self, sequence: Sequence, packed: list[int], columns: list[Any] | None, now: float, own: int | None, asked: int
    ) -> None:
        """Give a sequence what a round made for it; its fault is its own."""
        *tokens, accepted, drafted, broken = packed
        try:
            if 0 < broken < STUCK:
                raise FloatingPointError("the target's logits are not numbers (NaN)")
            most = broken - STUCK if broken else None
            kept = self._append(sequence, tokens[:most], accepted, drafted, now)
            if broken and not sequence.finished:
                sequence.fail(why_stuck(sequence))
            if columns is not None and sequence.request.params.logprobs is not None:
                _report(sequence, [column[:kept] for column in columns])
            self._book(sequence, drafted, accepted, kept, asked if own is None else own)
        except Exception as error:
            logger.exception("request %s failed and is ended; others go on", sequence.request.id)
            sequence.fail(f"{type(error).__name__}: {error}")
        if sequence.finished:
            self.scheduler.retire(sequence)

    def _book(self, sequence: Sequence, drafted: int, accepted: int, kept: int, asked: int) -> None:
        """Count a round. Where the text ended among the accepted guesses, those behind its end are not counted.

        Of how its drafter fares, only the guesses tell that it was `asked` for.
        """
        if kept <= accepted:
            drafted = accepted = asked = kept
        sequence.ledger.record(drafted, accepted)
        sequence.cached = len(sequence) - 1
        self.scheduler.share(sequence)
        self.speculator.learn(sequence, asked, min(drafted, asked), min(accepted, asked))
        self.figures.drafted += drafted
        self.figures.accepted += accepted
        self.figures.tokens += kept

    def _append(self, sequence: Sequence, tokens: list[int], accepted: int, drafted: int, now: float) -> int:
        """Append a round's tokens until the sequence ends; give how many it took."""
        sequence.lossy |= self.speculation.verification is Verification.TYPICAL and drafted > 0
        last = "plain" if drafted == 0 else "bonus" if accepted == drafted else "recovered"
        tokens = tokens[: accepted + 1]
        for place, token in enumerate(tokens):
            sequence.append(token, "accepted" if place < accepted else last, now)
            if sequence.finished:
                return place + 1
        return len(tokens)


def _constrained(sequences: list[Sequence]) -> bool:
    return any(one.constraint is not None for one in sequences)


def _reported(sequences: list[Sequence]) -> int | None:
    """How many likeliest tokens anybody wants to know of; None where nobody asked."""
    asked = [one.request.params.logprobs for one in sequences if one.request.params.logprobs is not None]
    return max(asked) if asked else None


def _report(sequence: Sequence, columns: list[list[Any]]) -> None:
    num_top = sequence.request.params.logprobs or 0
    begin = len(sequence.logprobs)
    for token, taken, ids, values in zip(sequence.output[begin:], *columns, strict=True):
        sequence.logprobs.append(TokenLogprob(token, taken, dict(zip(ids[:num_top], values[:num_top], strict=True))))
