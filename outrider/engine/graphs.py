"""Whole rounds as CUDA graphs: captured once for each shape, then started with a single call.

A round asks nothing of the host (`engine/round.py`), so the drafter's steps, the target's pass, the choice with all its
rules and the commit can be recorded together. What differs from round to round lies in two small tensors: which slots
take part, and how many guesses each may get. All else is read from the device state when the graph runs.

A shape (`Bucket`) is: rows, rounded up to a power of two; guesses, rounded up to the next captured length; whether
anybody drafts; which kinds of rule are in force; whether log-probabilities are reported. The usual ones are captured
when the engine starts, others when they are first needed. Where a model cannot be captured, rounds run eagerly.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_DRAFT_TOKENS, MAX_TREE_NODES
from outrider.draft.drafter import PartedDrafter
from outrider.engine.cost import CHAIN, DRAFT_LENGTHS, NEAR, Grid, RoundCosts
from outrider.engine.profile import FAR, clear_blocks
from outrider.engine.round import Drafting, RoundPlan, RoundResult, propose, verify
from outrider.kernels.attention import BLOCK_SIZE, power_of_2
from outrider.kernels.compilers import dismiss
from outrider.model.kv_cache import RESERVED, TRASH_BLOCK, blocks_for
from outrider.proposal import Proposal
from outrider.sampling.rules import RuleFlags
from outrider.sampling.upload import put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outrider.config import Verification
    from outrider.draft.drafter import Drafter
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["Bucket", "RoundGraphs"]

logger = logging.getLogger("outrider")
SAMPLED = RuleFlags(random=True)  # serves greedy rows too: the kernel looks at each row's temperature
REPORTS = (0, 1, 5, 20)  # likeliest tokens that a report may hold
TIMED_REPLAYS = 3


@dataclass(frozen=True)
class Given:
    """What is known of guesses besides their tokens and number."""

    parents: bool
    sources: bool


@dataclass(frozen=True)
class Bucket:
    """What a captured round is made for.

    Attributes:
        num_rows: B.
        num_tokens: K.
        drafted: Whether the drafter guesses; otherwise all rows are decoded plainly, in a round of width K+1.
        flags: Kinds of rule in force.
        num_logprobs: Likeliest tokens to report on; None for no report.
        shapes: Of the ragged rule tables that it reads: when one grows, it moves.
        given: What guesses it takes that were made outside of it, by a drafter that needs the host; None: it makes
            its own.
    """

    num_rows: int
    num_tokens: int
    drafted: bool
    flags: RuleFlags
    num_logprobs: int | None = None
    shapes: tuple[torch.Size, ...] = ()
    given: Given | None = None


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: RoundResult


class RoundGraphs:
    """Captures and replays rounds over one target and one drafter.

    Args:
        runner: The target.
        state: The device rows.
        verification: How guesses are judged.
        drafter: Who guesses; one that needs the host does so before a round, and what follows is captured.
        most: Guesses that a round makes where no request asks for more.
        exact: All rounds have one width and one number of rows.
    """

    def __init__(
        self,
        runner: Runner,
        state: DeviceState,
        verification: Verification,
        drafter: Drafter | None,
        *,
        most: int,
        exact: bool,
    ) -> None:
        self._runner, self._state = runner, state
        self._verification, self._exact = verification, exact
        self._drafter = drafter if drafter is not None and drafter.device_side else None
        self._usual: Given | None = None  # guesses that come from outside
        apart = self._drafter is None and not (drafter is not None and drafter.makes_trees)
        self._kind = CHAIN if drafter is None or apart else drafter.name
        if drafter is not None and not drafter.device_side:
            self._usual = Given(drafter.makes_trees, isinstance(drafter, PartedDrafter))
        self._most = most
        self._num_rows = len(state.lengths) - 1
        self._index = torch.full((self._num_rows,), state.idle, device=state.device)
        self._allowance = torch.zeros(self._num_rows, dtype=torch.long, device=state.device)
        self._guesses = _GivenGuesses(self._num_rows, state.device)
        self._sent: tuple[list[int], list[int]] | None = None
        self._captured: dict[Bucket, _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]
        self.num_replays = 0

    @property
    def num_captured(self) -> int:
        """Rounds that stand ready."""
        return sum(one is not None for one in self._captured.values())

    def prepare(self, counted: Callable[[list[Bucket], str], Iterable[Bucket]]) -> None:
        """Capture the rounds that requests with ordinary settings need: greedy and sampled, none to `most` guesses.

        `counted` goes through a list and shows how far it is.
        """
        rows = [self._num_rows] if self._exact else _row_counts(self._num_rows)
        every = sorted({one for one in (*DRAFT_LENGTHS, self._most) if one <= self._most})
        lengths = [self._most] if self._exact else every
        kinds = [(lengths[0], False)]  # plain decoding: in exact mode, too, as wide as the rest
        if self._drafter is not None or self._usual is not None:
            kinds += [(length, True) for length in lengths if length]
        shapes = self._state.rules.shapes(SAMPLED)
        buckets = [
            Bucket(num_rows, length, drafted, SAMPLED, None, shapes, self._usual if drafted else None)
            for num_rows in reversed(rows)  # the largest first: the others then fit into its memory
            for length, drafted in reversed(kinds)
        ]
        self._state.places([], 1)  # the idle row's rules
        began = time.perf_counter()
        places = self._state.tables.shape[1] * BLOCK_SIZE
        self._runner.tune(sorted({(one.num_rows, one.num_tokens + 1) for one in buckets}), places)
        if self._drafter is not None:
            self._drafter.tune(rows, places)
        tuned = time.perf_counter()
        for bucket in counted(buckets, "capturing rounds"):
            if self._ready(bucket) is None:
                break  # what stopped one will stop all
        dismiss()
        took = tuned - began, time.perf_counter() - tuned
        logger.info("products tuned in %.1f s, %d rounds captured in %.1f s", took[0], self.num_captured, took[1])

    def replay(
        self,
        sequences: list[Sequence],
        wanted: list[int],
        num_logprobs: int | None,
        proposal: Proposal | None = None,
    ) -> RoundResult | None:
        """Start a round for `sequences`, each allowed its `wanted` guesses; None where it cannot be captured.

        `proposal` has guesses that were made already, for these rows in this order: the round verifies them. Those
        that come with their q are not captured.
        """
        drafted = any(wanted)
        if drafted and (self._drafter is None if proposal is None else proposal.probs is not None):
            return None
        num_rows = self._num_rows if self._exact else power_of_2(len(sequences))
        num_rows = min(num_rows, self._num_rows)
        slots = self._state.places(sequences, num_rows)
        most = max(wanted) if proposal is None else proposal.num_tokens
        sizes = (*DRAFT_LENGTHS, self._most if proposal is None or proposal.parents is None else MAX_TREE_NODES)
        length = self._most if self._exact else min(one for one in sizes if one >= most)
        report = None if num_logprobs is None else min((one for one in REPORTS if one >= num_logprobs), default=None)
        if num_logprobs is not None and report is None:
            return None
        flags = self._state.rules.flags(slots)
        flags = SAMPLED if flags.simple else replace(flags, random=True)
        shapes, given = self._state.rules.shapes(flags), None
        if proposal is not None:
            given = Given(proposal.parents is not None, proposal.sources is not None)
        captured = self._ready(Bucket(num_rows, length, drafted, flags, report, shapes, given))
        if captured is None:
            return None
        if proposal is not None:
            self._guesses.fill(proposal)
        self._send(slots, wanted + [0] * (num_rows - len(wanted)))
        captured.graph.replay()
        self.num_replays += 1
        return captured.result

    def costing(self, num_blocks: int) -> Callable[[], RoundCosts | None] | None:
        """Give what times the captured rounds, `costs`; None where there are none."""
        return partial(self.costs, num_blocks) if self.num_captured else None

    def costs(self, num_blocks: int) -> RoundCosts | None:
        """Time the captured rounds of simple rules, before anybody runs; None where there are none.

        Rows look back on blocks of their own, short and far; at their limit, they commit nothing.
        """
        context = min(FAR, self._state.tokens.shape[1] - MAX_DRAFT_TOKENS - 2)
        if context <= 0 or not self.num_captured:
            return None
        near = self._timed(min(NEAR, context), num_blocks)
        far = self._timed(context, num_blocks) if context > 2 * NEAR else near
        span = max(1, context - NEAR)
        slopes = {
            kind: {key: max(0.0, far[kind][key] - seconds) / span for key, seconds in times.items()}
            for kind, times in near.items()
        }
        passes, growth = (
            {kind: Grid(times, stepped=True) for kind, times in table.items()} for table in (near, slopes)
        )
        return RoundCosts(passes, growth) if CHAIN in passes else None

    def _timed(self, context: int, num_blocks: int) -> dict[str, dict[tuple[int, int], float]]:
        """Give seconds by kind of pass, rows and guesses."""
        state, rows = self._state, list(range(self._num_rows))
        needed, free = blocks_for(context + MAX_DRAFT_TOKENS + 1), num_blocks - RESERVED
        places = torch.arange(self._num_rows * needed, device=state.device).view(self._num_rows, needed)
        seconds: dict[str, dict[tuple[int, int], float]] = {}
        clear_blocks([self._runner, *([] if self._drafter is None else [self._drafter])], places.numel(), num_blocks)
        state.lengths[:-1] = context
        state.tables[:-1, :needed] = RESERVED + places % free
        try:
            for bucket, captured in self._captured.items():
                if captured is None or bucket.flags != SAMPLED or bucket.drafted != (bucket.num_tokens > 0):
                    continue
                self._send(rows, [0] * self._num_rows)
                kind = self._kind if bucket.drafted else CHAIN
                seconds.setdefault(kind, {})[bucket.num_rows, bucket.num_tokens] = self._best_replay(captured)
        finally:
            state.lengths[:-1] = 1
            state.tables[:-1] = TRASH_BLOCK
        return seconds

    def _best_replay(self, captured: _Captured) -> float:
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(TIMED_REPLAYS + 1)
        ]
        events[0].record()
        for event in events[1:]:
            captured.graph.replay()
            event.record()
        torch.cuda.synchronize(self._state.device)
        return min(float(one.elapsed_time(other)) for one, other in pairwise(events)) / 1e3

    def _send(self, slots: list[int], allowance: list[int]) -> None:
        """Tell the device who takes part, unless it was the same the last time."""
        if self._sent == (slots, allowance):
            return
        put(slots, self._index[: len(slots)])
        put(allowance, self._allowance[: len(slots)])
        self._sent = (slots, allowance)

    def _ready(self, bucket: Bucket) -> _Captured | None:
        if bucket not in self._captured:
            try:
                self._captured[bucket] = self._capture(bucket)
            except Exception as error:  # noqa: BLE001 - whatever a model does that cannot be captured, eager rounds work
                logger.warning("rounds of %s cannot be captured and run eagerly: %s", bucket, error)
                self._captured[bucket] = None
        return self._captured[bucket]

    @torch.inference_mode()
    def _capture(self, bucket: Bucket) -> _Captured:
        self._send([self._state.idle] * self._num_rows, [bucket.num_tokens] * self._num_rows)
        self._stream.wait_stream(torch.cuda.current_stream(self._state.device))
        with torch.cuda.stream(self._stream):
            self._round(bucket)  # compiles what is missing, and finds its scratch memory
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._round(bucket)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._state.device).wait_stream(self._stream)
        return _Captured(graph, result)

    def _round(self, bucket: Bucket) -> RoundResult:
        if bucket.given is not None:
            plan = replace(self._plan(bucket), drafting=())
            proposal = self._guesses.proposal(bucket.num_rows, bucket.num_tokens, bucket.given)
            return verify(plan, proposal.limited(plan.allowance, self._runner.vocab_size), self._runner, self._state)
        plan = self._plan(bucket)
        proposal, _ = propose(plan, self._runner.vocab_size, _raise)
        return verify(plan, proposal, self._runner, self._state)

    def _plan(self, bucket: Bucket) -> RoundPlan:
        return RoundPlan(
            rows=self._state.gather_at(self._index[: bucket.num_rows], bucket.flags),
            allowance=self._allowance[: bucket.num_rows],
            num_tokens=bucket.num_tokens,
            drafting=(Drafting(self._drafter),) if bucket.drafted and self._drafter is not None else (),
            verification=self._verification,
            num_logprobs=bucket.num_logprobs,
            fixed_width=self._exact,
        )


class _GivenGuesses:
    """Guesses that a captured round reads: filled by the host before it starts."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        shape = num_rows, MAX_DRAFT_TOKENS
        self._columns = {name: torch.zeros(shape, dtype=torch.long, device=device) for name in ("tokens", "sources")}
        self._columns["parents"] = (torch.arange(MAX_DRAFT_TOKENS, device=device) - 1).repeat(num_rows, 1)
        self._lengths = torch.zeros(num_rows, dtype=torch.long, device=device)

    def fill(self, proposal: Proposal) -> None:
        """Put a proposal's rows first; the rest has no guesses."""
        rows, width = proposal.tokens.shape
        for name, column in self._columns.items():
            value = getattr(proposal, name)
            if value is not None:
                column[:rows, :width] = value
        self._lengths[:rows] = proposal.lengths
        self._lengths[rows:] = 0

    def proposal(self, num_rows: int, num_tokens: int, given: Given) -> Proposal:
        """Give what lies there now, as a captured round will find it."""
        tokens, sources, parents = (column[:num_rows, :num_tokens] for column in self._columns.values())
        lengths = self._lengths[:num_rows]
        return Proposal(tokens, lengths, None, parents if given.parents else None, sources if given.sources else None)


def _raise(drafter: Drafter, error: Exception) -> None:
    raise RuntimeError(f"drafter {drafter.name}: {error}") from error


def _row_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most` itself."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
