"""Which cache blocks are free, which are held and by how many, and which are kept for the sake of what they hold."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from outrider.errors import CapacityError
from outrider.model.kv_cache import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["BlockPool"]

PLACES_TRIED = 16  # idle blocks about which a row is looked for


class BlockPool:
    """Hands out block numbers, counts who holds them, and takes them back.

    A block is one of three things: *held* by one or more sequences; *idle*: held by nobody, but kept because what it
    holds may be wanted again; or *empty*. Idle blocks count as free: they are given away when no empty one is left,
    the one that was not wanted for longest first.

    Args:
        num_blocks: Blocks of the cache, the reserved ones included.
        on_evict: Told each kept block whose contents are given up for a new holder.

    Raises:
        CapacityError: There is not one block beside the reserved ones.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda _: None) -> None:
        if num_blocks <= RESERVED:
            raise CapacityError(f"a pool of {num_blocks} blocks holds nothing; at least {RESERVED + 1} are needed")
        self.on_evict = on_evict
        self.capacity = num_blocks - RESERVED
        self._empty = set(range(RESERVED, num_blocks))
        self._queue = list(range(RESERVED, num_blocks))  # a heap: empty blocks, and some that were taken by number
        self._queued = set(self._queue)
        self._holders: dict[int, int] = {}
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one not wanted for longest first

    @property
    def num_free(self) -> int:
        """Blocks that can be had: empty and idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that are free, but kept as long as may be."""
        return len(self._idle)

    def num_holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders.get(block, 0)

    def allocate(self, count: int, *, after: int | None = None) -> list[int] | None:
        """Take `count` blocks, or None (and nothing) where there are too few.

        The empty block behind `after` comes first, then the lowest ones, so that a lone sequence gets neighbours.
        """
        if count > self.num_free:
            return None
        taken: list[int] = []
        for _ in range(count):
            wanted = None if after is None else after + 1
            block = wanted if wanted in self._empty else self._lowest()
            assert block is not None
            self._take(block)
            taken.append(block)
            after = block
        return taken

    def allocate_in_a_row(self, count: int, room: int) -> list[int] | None:
        """Take `count` neighbouring blocks with `room` in all to grow into; as `allocate` where there is no such row.

        For a sequence that is alone: its cache can then be read as one slice. Idle blocks in the way are given up.
        """
        first = self._row(max(count, room))
        if first is None:
            return self.allocate(count)
        for block in range(first, first + max(count, room)):
            if block in self._idle:
                self._evict(block)
        taken = list(range(first, first + count))
        for block in taken:
            self._take(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Take part in holding blocks that somebody holds, or that are idle."""
        for block in blocks:
            assert block in self._holders or block in self._idle, f"block {block} holds nothing that could be shared"
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks. Of those that become idle the last is given away first: it is of use to the fewest."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._give_back(block)

    def keep(self, block: int) -> None:
        """Keep what a held block holds when nobody holds it any more."""
        assert block in self._holders
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Keep it no longer."""
        self._kept.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        self._empty.add(block)
        if block not in self._queued:
            self._queued.add(block)
            heapq.heappush(self._queue, block)

    def _take(self, block: int) -> None:
        self._empty.remove(block)
        self._holders[block] = 1

    def _evict(self, block: int) -> None:
        """Give up what an idle block holds; whoever hears of it may forget other blocks."""
        del self._idle[block]
        self._kept.discard(block)
        self._give_back(block)
        self.on_evict(block)

    def _lowest(self) -> int:
        """Find the lowest empty block, after making one where there is none."""
        if not self._empty:
            self._evict(next(iter(self._idle)))
        while True:
            block = heapq.heappop(self._queue)
            self._queued.discard(block)
            if block in self._empty:
                return block

    def _row(self, length: int) -> int | None:
        """Find the first of `length` empty blocks in a row; else of a row that takes idle ones long not wanted."""
        run = 0
        for before, block in pairwise([-1, *sorted(self._empty)]):
            run = run + 1 if block == before + 1 else 1
            if run == length:
                return block - length + 1
        for block in islice(self._idle, PLACES_TRIED):
            for first in (block - length + 1, block):  # the end of its sequence, most likely: what precedes goes too
                row = range(first, first + length)
                if first >= RESERVED and row.stop <= self.capacity + RESERVED and self._holders.keys().isdisjoint(row):
                    return first
        return None
