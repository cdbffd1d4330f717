"""A state machine over the whole engine with models that are hashes: whatever happens in whatever order, nothing mixes.

Each model keeps, for every place, a hash of all tokens up to there, made from what its cache holds of the place before;
what comes next is a function of that hash. So an entry that is stale, another text's, or written where somebody else
reads makes another text. Beside the engine stands a dictionary model: what each sequence must say, worked out from its
tokens alone, and who holds which block.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.config import EngineConfig, SpeculationConfig
from outrider.draft.draft_model import DraftModelDrafter
from outrider.engine.engine import Engine
from outrider.engine.intake import Intake
from outrider.engine.waiting import FAIR_TURN
from outrider.kernels.attention import slots_of
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.sequence import Sequence

VOCAB = 23
MODULUS = 1_000_003
SEED = 11
LONGEST = 120


def rolled(before: Any, token: Any, place: Any) -> Any:
    """The hash at a place: of numbers or of tensors."""
    return (before * 31 + token * 7919 + place * 101 + 13) % MODULUS


def hashes(tokens: Seq[int]) -> list[int]:
    made, last = [], SEED
    for place, token in enumerate(tokens):
        last = rolled(last, token, place)
        made.append(last)
    return made


def following(value: Any) -> Any:
    """What comes next, by the hash of all before."""
    return (value // 7 + value) % VOCAB


def guessed(value: int) -> int:
    """What the draft says: wrong by one in a third of all places."""
    return int(following(value) + (value % 3 == 0)) % VOCAB


class HashModel:
    """A runner whose keys and values are hashes; `errs` makes it a draft that is wrong now and then."""

    def __init__(self, errs: bool = False) -> None:
        self.vocab_size, self.context_length = VOCAB, LONGEST + 80
        self.device = torch.device("cpu")
        self.features: torch.Tensor | None = None
        self.bytes_per_slot = 8
        self.kept = torch.zeros(0, dtype=torch.long)
        self._errs = errs
        self.guarded: set[int] = set()  # blocks that must not be written

    def allocate(self, num_blocks: int) -> None:
        self.kept = torch.full((num_blocks * BLOCK_SIZE,), -1)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None,
        ancestors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert ancestors is None
        slots = slots_of(tables, positions)
        before = slots_of(tables, (positions - 1).clamp(min=0))
        if start is not None:  # a lone row is read as a slice
            before = start + (positions - 1).clamp(min=0)
        made = torch.empty_like(slots)
        for step in range(tokens.shape[1]):
            place = positions[:, step]
            last = self.kept[before[:, step]].where(place > 0, SEED)
            made[:, step] = rolled(last, tokens[:, step], place)
            self.kept[slots[:, step]] = made[:, step]
        written = set((slots // BLOCK_SIZE).flatten().tolist())
        assert not written & self.guarded, "a block that others may read was written"
        says = (following(made) + (made % 3 == 0) * self._errs) % VOCAB
        return torch.nn.functional.one_hot(says, VOCAB).float() * 9

    def feed(self, *fed: Any) -> None:
        self.forward(*fed)

    def keep_path(self, *_: Any) -> None:
        raise AssertionError("no trees here")

    def tune(self, passes: Any, places: int, lagging: Any = ()) -> None:
        pass

    def copy_blocks(self, source: Seq[int], target: Seq[int]) -> None:
        assert not set(target) & self.guarded
        for one, other in zip(source, target, strict=True):
            entries = self.kept[one * BLOCK_SIZE : (one + 1) * BLOCK_SIZE].clone()
            self.kept[other * BLOCK_SIZE : (other + 1) * BLOCK_SIZE] = entries


BEGINNINGS = [
    [1],
    [2] * 17,
    list(range(20)) * 2,
    list(range(20)) * 2 + [5] * 9,
    list(range(20)) + [7] * 40,
    [3, 4] * 40,
]


class EngineMachine(RuleBasedStateMachine):
    """Anything that can happen to an engine with room for about three long texts."""

    drafts, exact, depth, scopes = True, False, 0, ("", "a")

    def __init__(self) -> None:
        super().__init__()
        self.target, self.draft = HashModel(), HashModel(errs=True)
        num_blocks = RESERVED + (40 if self.exact else 18)
        for model in (self.target, self.draft):
            model.allocate(num_blocks)
        drafter = DraftModelDrafter(self.draft, VOCAB, VOCAB) if self.drafts else None
        config = EngineConfig(LONGEST, 4, prefill_chunk_size=32, exact=self.exact)
        speculation = SpeculationConfig(num_speculative_tokens=4)
        self.engine = Engine(self.target, drafter, config, speculation, num_blocks, depth=self.depth)
        self.intake = Intake(
            None, VOCAB, LONGEST, (), longest_draft=4, can_draft=True, seed=1, drafter_for=lambda _: drafter
        )  # type: ignore[arg-type]
        self.target.guarded = self.engine.scheduler._pool._kept
        self.alive: list[Sequence] = []
        self.wanted: dict[int, list[int]] = {}  # the texts, by the number of their sequence
        self._watch_the_queue()

    # --- what can happen

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        scope=st.integers(0, 1),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.sampled_from([1, 5, 20, 39]),
        guesses=st.sampled_from([0, 1, 4]),
    )
    def add(
        self, beginning: list[int], more: list[int], scope: int, priority: int, n: int, max_tokens: int, guesses: int
    ) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, priority=priority, n=n, speculation=guesses if self.drafts else "off"
        )
        request = self.intake.request([*beginning, *more], params, scope=self.scopes[scope % len(self.scopes)])
        for sequence in self.intake.sequences(request):
            self.engine.add(sequence)
            self.alive.append(sequence)
            text = list(request.prompt_token_ids)
            while len(text) < sequence.limit:
                text.append(int(following(hashes(text)[-1])))
            self.wanted[sequence.number] = text

    @precondition(lambda self: self.alive)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.check()

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        sequence = self.alive[which % len(self.alive)]
        self.engine.abort(sequence)
        self.alive.remove(sequence)

    @precondition(lambda self: self.engine.scheduler.running and not self.exact and not self.engine._flights)
    @rule(which=st.integers(0, 50))
    def preempt(self, which: int) -> None:
        running = self.engine.scheduler.running
        self.engine.scheduler._preempt(running[which % len(running)])

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """Somebody takes blocks for a moment."""
        pool = self.engine.scheduler._pool
        blocks = pool.allocate(min(count, pool.num_free))
        assert blocks is not None
        for model in (self.target, self.draft):
            for block in blocks:
                model.kept[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = -1
        pool.free(blocks)

    @precondition(lambda self: self.alive)
    @rule()
    def finish(self) -> None:
        steps = 0
        while self.engine.busy:
            self.engine.step()
            self.check()
            steps += 1
            assert steps < 3000, "nothing comes to its end"

    # --- what must hold

    def check(self) -> None:
        for sequence in self.alive:
            text = self.wanted[sequence.number]
            assert sequence.tokens == text[: len(sequence)], "not the text that the target writes alone"
            if sequence.finished:
                assert sequence.finish_reason == "length"
                assert len(sequence) == len(text)
        self.alive = [sequence for sequence in self.alive if not sequence.finished]

    @invariant()
    def blocks_are_conserved(self) -> None:
        scheduler = self.engine.scheduler
        pool, running = scheduler._pool, scheduler.running
        held = Counter(block for sequence in running for block in sequence.blocks)
        assert held == Counter(pool._holders), "holders are not those who have it"
        everywhere = [*held, *pool._empty, *pool._idle]
        assert sorted(everywhere) == list(range(RESERVED, RESERVED + pool.capacity))
        assert pool._empty <= pool._queued == set(pool._queue)
        assert set(pool._idle) <= pool._kept
        assert all(len(set(sequence.blocks)) == len(sequence.blocks) for sequence in running)

    @invariant()
    def what_is_registered_is_reachable_and_right(self) -> None:
        scheduler = self.engine.scheduler
        prefixes = scheduler._prefixes
        assert prefixes is not None
        assert {one.block for one in prefixes._found.values()} == set(prefixes._of_block) == scheduler._pool._kept
        for digest, one in prefixes._found.items():
            assert one.digest == digest
            assert one.before is None or (prefixes.at(one.before.block) is one.before and one in one.before.after)
            text, at = list(one.tokens), one
            while at.before is not None:
                at = at.before
                text = [*at.tokens[:BLOCK_SIZE], *text]
            entries = hashes(text)[:-1][-BLOCK_SIZE:]
            slots = slice(one.block * BLOCK_SIZE, (one.block + 1) * BLOCK_SIZE)
            assert self.target.kept[slots].tolist() == entries
            if one.drafts:
                assert self.draft.kept[slots].tolist() == entries

    @invariant()
    def caches_hold_what_they_are_said_to_hold(self) -> None:
        engine = self.engine
        for sequence in engine.scheduler.running:
            slot = sequence.slot
            assert slot is not None
            assert engine.state.holder(slot) is sequence
            assert len(sequence) <= int(engine.state.lengths[slot]) <= sequence.reach
            assert engine.state.tokens[slot, : len(sequence)].tolist() == sequence.tokens
            table = engine.state.tables[slot]
            assert table[: len(sequence.blocks)].tolist() == sequence.blocks
            entries = hashes(sequence.tokens)
            slots = slots_of(table[None], torch.arange(len(sequence))[None])[0]
            assert self.target.kept[slots[: sequence.cached]].tolist() == entries[: sequence.cached]
            if engine.drafter is not None:
                kept = engine.drafter.kept(slot)
                assert kept < len(sequence)
                assert self.draft.kept[slots[:kept]].tolist() == entries[:kept]

    @invariant()
    def shared_blocks_lie_before_what_is_written(self) -> None:
        pool = self.engine.scheduler._pool
        for sequence in self.engine.scheduler.running:
            behind = sequence.blocks[sequence.cached // BLOCK_SIZE :]
            assert all(pool.num_holders(block) == 1 and block not in pool._kept for block in behind)

    @invariant()
    def nobody_reads_across_scopes(self) -> None:
        prefixes = self.engine.scheduler._prefixes
        assert prefixes is not None
        for sequence in self.engine.scheduler.running:
            assert all(one.scope == sequence.request.scope for one in prefixes._chain(sequence).blocks)

    def _watch_the_queue(self) -> None:
        """In order of arrival within a priority; and nobody waits longer than is said."""
        queue = self.engine.scheduler.waiting
        add, pop = queue.add, queue.pop
        bounds: dict[int, list[int]] = {}  # number -> sequences let in since it waits, older ones that wait with it

        def adding(sequence: Sequence) -> None:
            older = sum(one.number < sequence.number for one in queue)
            for one in queue:
                bounds[one.number][1] += one.number > sequence.number  # one that was sent back
            bounds[sequence.number] = [0, older]
            add(sequence)

        def popping() -> Sequence:
            sequence = pop()
            for one in queue:
                assert one.priority != sequence.priority or one.number > sequence.number, "not in order of arrival"
                bound = bounds[one.number]
                bound[0] += 1
                assert bound[0] < FAIR_TURN * (bound[1] + 1), "waits too long"
            return sequence

        queue.add, queue.pop = adding, popping  # type: ignore[method-assign]

    def teardown(self) -> None:
        self.finish_up()

    def finish_up(self) -> None:
        """To the end, whatever is left: all texts are whole, and everything is given back."""
        if self.alive:
            self.finish()
        pool = self.engine.scheduler._pool
        assert pool.num_free == pool.capacity
        assert self.engine.state.num_free == self.engine.config.max_num_seqs
        assert self.engine.speculator.num_failures == 0


class PlainMachine(EngineMachine):
    drafts = False


class LaggingMachine(EngineMachine):
    """The host reads a round when the next one is under way, as on a card."""

    depth = 1


class ExactMachine(EngineMachine):
    exact = True


quick = settings(
    max_examples=40, stateful_step_count=50, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
EngineMachine.TestCase.settings = quick
PlainMachine.TestCase.settings = settings(quick, max_examples=15)
LaggingMachine.TestCase.settings = settings(quick, max_examples=15)
ExactMachine.TestCase.settings = settings(quick, max_examples=15)
TestDraftedEngine = EngineMachine.TestCase
TestPlainEngine = PlainMachine.TestCase
TestLaggingEngine = LaggingMachine.TestCase
TestExactEngine = ExactMachine.TestCase
