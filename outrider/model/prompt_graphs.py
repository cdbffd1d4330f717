"""Prompts as CUDA graphs: a pass that fills the cache, captured for a few sizes and then started with a single call.

A short prompt is some hundred launches for the host and few milliseconds for the card: launched one by one, the card
waits for the host, and so does whoever asked for the first token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.kernels.attention import slots_of
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, TRASH_BLOCK, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.model.kv_cache import KVCache

__all__ = ["LENGTHS", "GraphRecorder", "PromptGraphs"]

logger = logging.getLogger("outrider")
LENGTHS = (64, 128, 192, 256, 384, 512)  # multiples of a block
MOST_ROWS = 8
FEW_IDS = 64  # tokens of a check: ids that every vocabulary has
TOLERANCE = 0.02  # of a check, relative to the largest number: the kernels are the same, the shapes almost
MOST_TOKENS = 512  # a pass of more keeps the card busy for longer than the host needs to launch it


@dataclass(frozen=True)
class _Captured:
    """A pass over ``[rows, length]`` tokens from each text's beginning on, and all that it reads: none may go away."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    start: Callable[[], object]


class PromptGraphs:
    """Captures and replays passes over the beginnings of texts.

    Args:
        feed: Feeds tokens at positions of rows with these tables, for their keys and values alone; the last argument
            is the number of tokens a row.
        device: Where.
        recorded: Makes of a piece of work what repeats it.
    """

    def __init__(
        self,
        feed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None],
        device: torch.device,
        recorded: Callable[[Callable[[], None]], Callable[[], object]],
    ) -> None:
        self._feed, self._device, self._recorded = feed, device, recorded
        self._captured: dict[tuple[int, int], _Captured | None] = {}  # None: when it is first needed
        self.num_replays = 0

    def capture(self, longest: int, cache: KVCache) -> None:
        """Capture passes that serve texts of up to `longest` tokens, the largest first: of lone ones all.

        Of several texts at once the longest pass is captured now, for what it shows, and others when they are needed.
        Where a model cannot be captured, or what is captured does something else, prompts are fed as ever.
        """
        try:
            for rows in (1 << power for power in range(MOST_ROWS.bit_length())):
                lengths = [one for one in LENGTHS if one <= longest and rows * one <= MOST_TOKENS]
                self._captured |= {(rows, length): None for length in lengths}
                for length in lengths[::-1] if rows == 1 else lengths[-1:]:
                    self._captured[rows, length] = self._capture(rows, length)
            self._check(cache)
        except Exception as error:  # noqa: BLE001 - whatever a model does that cannot be captured
            logger.warning("prompts cannot be captured and are fed kernel by kernel: %s", error)
            self._captured.clear()

    def replay(self, tokens: torch.Tensor, tables: torch.Tensor) -> bool:
        """Feed the first tokens ``[B, T]`` of rows with these tables; False where no captured pass is large enough."""
        num_rows, num_tokens = tokens.shape
        rows = 1 << (num_rows - 1).bit_length()
        length = next((one for one in LENGTHS if one >= num_tokens), 0)
        one = self._ready(rows, length)
        if one is None:
            return False
        one.tokens[:num_rows, :num_tokens] = tokens
        # What is fed beyond a row's end goes into its last block, to be written again, or where nobody reads.
        blocks = min(blocks_for(num_tokens), tables.shape[1])
        one.tables.fill_(TRASH_BLOCK)
        one.tables[:num_rows, :blocks] = tables[:, :blocks]
        one.start()
        self.num_replays += 1
        return True

    def _ready(self, rows: int, length: int) -> _Captured | None:
        if (rows, length) not in self._captured:
            return None
        if self._captured[rows, length] is None:
            try:
                self._captured[rows, length] = self._capture(rows, length)
            except Exception as error:  # noqa: BLE001 - want of memory, as it seems: others of its kind went well
                logger.warning("prompts of %d x %d tokens are fed kernel by kernel: %s", rows, length, error)
                del self._captured[rows, length]
        return self._captured.get((rows, length))

    def _capture(self, rows: int, length: int) -> _Captured:
        tokens = torch.zeros(rows, length, dtype=torch.long, device=self._device)
        tables = torch.full((rows, length // BLOCK_SIZE), TRASH_BLOCK, dtype=torch.long, device=self._device)
        positions = torch.arange(length, device=self._device).repeat(rows, 1)
        start = self._recorded(lambda: self._feed(tokens, positions, tables, length))
        return _Captured(tokens, positions, tables, start)

    def _check(self, cache: KVCache) -> None:
        """Hold what a pass of each number of rows writes against what is written without it; raises where they differ.

        Blocks that belong to nobody yet are written.
        """
        for rows, length in {rows: (rows, length) for (rows, length), one in self._captured.items() if one}.values():
            blocks = rows * length // BLOCK_SIZE
            if RESERVED + blocks > cache.num_blocks:
                continue
            tables = torch.arange(RESERVED, RESERVED + blocks, device=self._device).view(rows, -1)
            tokens = torch.arange(rows * length, device=self._device).view(rows, -1) % FEW_IDS
            positions = torch.arange(length, device=self._device).repeat(rows, 1)
            slots = slots_of(tables, positions)[:, : length - 1].flatten()
            self._feed(tokens, positions, tables, length)
            wanted = cache.taken(slots)
            self._feed(tokens * 0, positions, tables, length)  # something else
            self.replay(tokens[:, : length - 1], tables)
            for one, other in zip(wanted, cache.taken(slots), strict=True):
                if not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * float(one.abs().max())):
                    raise RuntimeError(f"a captured pass over {rows} x {length} tokens does not do what it should")
        self.num_replays = 0


class GraphRecorder:
    """Records what pieces of work launch on a card; what is given starts all of it at once. They share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Callable[[], object]:
        """Record one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            work()  # compiles what is missing, and finds its scratch memory
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay
