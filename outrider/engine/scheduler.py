"""Who runs: slots and cache blocks go to the oldest first, and the youngest gives them back when they run out."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from outrider.model.kv_cache import BlockPool, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.engine.state import DeviceState
    from outrider.sequence import Sequence

__all__ = ["Scheduler"]

logger = logging.getLogger("outrider")


class Scheduler:
    """Admits, grows, preempts and retires sequences. First come, first served.

    Args:
        state: The device rows.
        pool: The cache blocks.
        on_release: Told each slot that changes hands, so that drafters can forget it.
        reserve: Tokens to hold blocks for at admission beyond a sequence's limit; None takes blocks as a sequence
            grows. Reserving means that nothing is ever preempted (exact mode).
    """

    def __init__(
        self,
        state: DeviceState,
        pool: BlockPool,
        on_release: Callable[[int], None],
        reserve: int | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._state, self._pool = state, pool
        self._on_release = on_release
        self._reserve = reserve

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
        """Share of the cache's blocks that somebody owns."""
        return 1 - self._pool.num_free / self._pool.capacity

    def relieve(self) -> None:
        """End the youngest of those that run, so that the others may go on."""
        if self.running:
            youngest = self.running[-1]
            self.retire(youngest)
            youngest.fail("memory ran out")

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def admit(self) -> None:
        """Let sequences in while there is a slot, and blocks for the whole of their tokens."""
        while self.waiting and self._state.num_free:
            sequence = self.waiting[0]
            spare = len(self.running)  # a block each for those already here, or they would be preempted at once
            needed = blocks_for(len(sequence))
            if self._reserve is not None:
                needed, spare = blocks_for(sequence.limit + self._reserve), 0
            if needed + spare > self._pool.num_free:
                return
            blocks = self._pool.allocate(needed)
            assert blocks is not None
            self.waiting.popleft()
            self.running.append(sequence)
            try:
                self._state.admit(sequence)
                self._state.extend(sequence, blocks)
            except Exception as error:
                logger.exception("request %s could not be admitted and is ended", sequence.request.id)
                sequence.blocks = blocks
                self.retire(sequence)
                sequence.fail(f"{type(error).__name__}: {error}")

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Own blocks for `num_tokens` tokens if they are to be had without hurting anybody."""
        missing = blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is not None:
            self._state.extend(sequence, blocks)
        return blocks is not None

    def secure(self, sequence: Sequence) -> bool:
        """Own blocks for what the sequence holds now, preempting the youngest for it; False where that was itself."""
        while not self.grow(sequence, sequence.reach):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
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
        """Send a sequence back to the head of the queue; its tokens are kept and will be fed anew."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._on_release(sequence.slot)
        self._pool.free(sequence.blocks)
        self._state.dismiss(sequence)
        sequence.blocks = []
        sequence.cached = 0
