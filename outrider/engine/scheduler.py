"""Who runs: slots and cache blocks go to the most important first, and the least important gives them back."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.engine.waiting import WaitingQueue
from outrider.model.kv_cache import BLOCK_SIZE, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.engine.block_pool import BlockPool
    from outrider.engine.prefix_cache import CachedBlock, PrefixCache
    from outrider.engine.state import DeviceState
    from outrider.sequence import Sequence

__all__ = ["Scheduler"]

logger = logging.getLogger("outrider")


class Scheduler:
    """Admits, grows, preempts and retires sequences.

    Order of importance: lower `SamplingParams.priority` first, then who came first. Among those that run the one that
    came first is never sent away for others, so it gets to its end; and so does everybody, in turn: see
    `WaitingQueue` for how long that can take.

    Args:
        state: The device rows.
        pool: The cache blocks.
        on_release: Told each slot that changes hands, so that drafters can forget it.
        reserve: Tokens to hold blocks for at admission beyond a sequence's limit; None takes blocks as a sequence
            grows. Reserving means that nothing is ever preempted (exact mode).
        prefixes: Finds blocks that hold what a sequence begins with; None computes everything anew.
        copy: Copies what is kept for a sequence in some blocks to others. Where it is given, a sequence that is alone
            gets a copy of what it would share, in blocks that lie in a row: on a CPU those are read without a copy a
            round.
    """

    def __init__(
        self,
        state: DeviceState,
        pool: BlockPool,
        on_release: Callable[[int], None],
        reserve: int | None = None,
        *,
        prefixes: PrefixCache | None = None,
        copy: Callable[[Sequence, list[int], list[int]], None] | None = None,
    ) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._state, self._pool = state, pool
        self._on_release = on_release
        self._reserve = reserve
        self._prefixes, self._copy = prefixes, copy
        self._num_added = 0
        self._in_vain: tuple[Sequence, int, int] | None = None  # who found no room, and how little there was

    @property
    def busy(self) -> bool:
        """Whether anybody runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks that nobody owns."""
        return self._pool.num_free

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that somebody owns; what is merely kept counts as free."""
        return 1 - self._pool.num_free / self._pool.capacity

    def relieve(self) -> None:
        """End the least important and youngest of those that run, so that the others may go on."""
        if self.running:
            last = self.ranked(self.running)[-1]
            self.retire(last)
            last.fail("memory ran out")

    def ranked(self, sequences: list[Sequence]) -> list[Sequence]:
        """Sort some of those that run: who is to be served first, and sent away last."""
        first = min(self.running, key=lambda one: one.number, default=None)
        return sorted(sequences, key=lambda one: (one is not first, one.priority, one.number))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        sequence.number = self._num_added
        self._num_added += 1
        self.waiting.add(sequence)

    def admit(self) -> None:
        """Let sequences in while there is a slot, and blocks for the whole of their tokens."""
        while self.waiting and self._state.num_free:
            sequence = self.waiting.head()
            tried = sequence, self._pool.num_free, len(self.running)
            if tried == self._in_vain:
                return
            found = [] if self._prefixes is None else self._prefixes.find(sequence)
            blocks = self._blocks_for(sequence, [one.block for one in found])
            if blocks is None:
                self._in_vain = tried
                return
            self.waiting.pop()
            self.running.append(sequence)
            try:
                self._state.admit(sequence)
                self._state.extend(sequence, blocks)
            except Exception as error:
                logger.exception("request %s could not be admitted and is ended", sequence.request.id)
                sequence.blocks = blocks
                self.retire(sequence)
                sequence.fail(f"{type(error).__name__}: {error}")
                continue
            if self._prefixes is not None and self._prefixes.may_take(sequence):
                self._prefixes.queries += len(sequence)
            self._start_from(sequence, found)

    def _blocks_for(self, sequence: Sequence, shared: list[int]) -> list[int] | None:
        """Own blocks for all of a sequence's tokens, the first of them shared, or copies of those; None for no room."""
        spare = len(self.running)  # a block each for those already here, or they would be preempted at once
        needed = blocks_for(len(sequence))
        if self._reserve is not None:
            needed, spare = blocks_for(sequence.limit + self._reserve), 0
        self._pool.hold(shared)
        try:
            if not self.running and self._copy is not None and needed <= self._pool.num_free:
                blocks = self._pool.allocate_in_a_row(needed, blocks_for(sequence.limit))
                if blocks is not None and shared:
                    with self._or_back(blocks):
                        self._copy(sequence, shared, blocks[: len(shared)])
                return blocks
            if needed - len(shared) + spare <= self._pool.num_free:
                last = shared[-1] if shared else None
                more = self._pool.allocate(needed - len(shared), after=last)
                if more is not None:
                    self._pool.hold(shared)
                    return [*shared, *more]
            return None
        finally:
            self._pool.free(shared)

    def beginning(self, sequence: Sequence) -> bytes | None:
        """Name what a sequence could share with others that begin alike; None where it cannot."""
        return None if self._prefixes is None else self._prefixes.beginning(sequence)

    def reuse(self, sequence: Sequence) -> None:
        """Before a sequence is fed: take over what others have computed of its tokens since it was let in."""
        if self._prefixes is None or self._prefixes.known(sequence) != sequence.cached:
            return
        found = self._prefixes.find(sequence)
        if found:
            begin, shared = sequence.cached // BLOCK_SIZE, [one.block for one in found]
            own = sequence.blocks[begin : begin + len(shared)]
            self._pool.hold(shared)
            with self._or_back(shared):
                self._state.replace(sequence, begin, shared)
            self._pool.free(own)
            self._start_from(sequence, found)

    def _start_from(self, sequence: Sequence, found: list[CachedBlock]) -> None:
        """Count what was found as cached."""
        if self._prefixes is not None and found:
            copied = sequence.blocks[sequence.cached // BLOCK_SIZE] != found[0].block
            self._prefixes.take(sequence, found, copied=copied)
            sequence.cached = self._prefixes.known(sequence)
            if not sequence.returned:
                sequence.reused += len(found) * BLOCK_SIZE

    def share(self, sequence: Sequence) -> None:
        """Let others find what a sequence's cache holds by now."""
        if self._prefixes is not None and sequence.cached - sequence.shared >= BLOCK_SIZE:
            self._prefixes.register(sequence)
            sequence.shared = sequence.cached // BLOCK_SIZE * BLOCK_SIZE

    def forget(self) -> None:
        """Start nobody from what the cache holds now."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Own blocks for `num_tokens` tokens if they are to be had without hurting anybody."""
        missing = blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else None)
        if blocks is None:
            return False
        with self._or_back(blocks):
            self._state.extend(sequence, blocks)
        return True

    @contextmanager
    def _or_back(self, blocks: list[int]) -> Iterator[None]:
        """Give blocks back where what is done with them fails: a step that ran out of memory may be tried again."""
        try:
            yield
        except BaseException:
            self._pool.free(blocks)
            raise

    def secure(self, sequence: Sequence) -> bool:
        """Own blocks for what the sequence holds now, preempting the least important; False where that was itself."""
        while not self.grow(sequence, sequence.reach):
            last = self.ranked(self.running)[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def retire(self, sequence: Sequence) -> None:
        """Take back everything a finished (or aborted) sequence has."""
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Let a sequence wait again; its tokens are kept, and fed anew as far as the cache no longer holds them."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.returned = True
        self.waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        if self._prefixes is not None:
            if sequence.error is None:
                self._prefixes.register(sequence)
            else:
                self._prefixes.distrust(sequence)
            self._prefixes.release(sequence)
        self._on_release(sequence.slot)
        self._pool.free(sequence.blocks)
        self._state.dismiss(sequence)
        sequence.blocks = []
        sequence.cached = sequence.shared = 0
