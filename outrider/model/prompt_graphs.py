"""Passes that fill a cache as CUDA graphs: captured for a few sizes, and then each started with a single call.

A short prompt is some hundred launches for the host and few milliseconds for the card: launched one by one, the card
waits for the host, and so does whoever asked for the first token. It is the same with what a draft reads that has not
guessed for a while, a few tokens in the middle of a text: ten milliseconds for the host, less than one for the card.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.kernels.attention import power_of_2, slots_of
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, TRASH_BLOCK, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.model.kv_cache import KVCache

__all__ = ["LENGTHS", "GraphRecorder", "PromptGraphs"]

logger = logging.getLogger("outrider")
LENGTHS = (64, 128, 192, 256, 384, 512)  # multiples of a block
MOST_ROWS = 8
FEW_IDS = 64  # tokens of a check: ids that every vocabulary has
TOLERANCE = 0.02  # of a check, relative to the largest number: the kernels are the same, the shapes almost
MOST_TOKENS = 512  # of a captured pass
WIDTHS = (4, 16, 32)  # tokens a row of a pass that goes on with texts: on an H200 one of 64 takes as long as two of 32
MOST_GOING_ON, MOST_PASSES = 1024, 8  # tokens of such a pass, and how many of them a lone text is fed by
LAUNCHED = 1.2e13  # operations that a card does while the host launches a model's kernels one by one, about


class _Size(NamedTuple):
    """Of a pass: rows, tokens a row, and whether it goes on with texts rather than begin them."""

    rows: int
    length: int
    goes_on: bool = False


@dataclass(frozen=True)
class _Captured:
    """A pass over ``[rows, length]`` tokens of as many texts, and all that it reads: none may go away."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    start: Callable[[], object]

    def seat(self, tables: torch.Tensor) -> None:
        """Let the first rows have these tables ``[B, blocks]``; what is behind them belongs to nobody."""
        self.tables.fill_(TRASH_BLOCK)
        self.tables[: tables.shape[0], : tables.shape[1]] = tables


class PromptGraphs:
    """Captures and replays passes over the beginnings of texts, and over what comes further on.

    Args:
        feed: Feeds tokens at positions of rows with these tables, for their keys and values alone; the last argument
            is the number of tokens a row.
        device: Where.
        recorded: Makes of a piece of work what repeats it.
        num_weights: Of the model. With few of them a card is done with many tokens before the host has launched all.
    """

    def __init__(
        self,
        feed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None],
        device: torch.device,
        recorded: Callable[[Callable[[], None]], Callable[[], object]],
        num_weights: int = 0,
    ) -> None:
        self._feed, self._device, self._recorded = feed, device, recorded
        self._captured: dict[_Size, _Captured | None] = {}  # None: when it is first needed
        self._num_blocks = 0  # of a row's table, at most
        self._most_tokens = max(MOST_TOKENS, int(LAUNCHED / (2 * num_weights))) if num_weights else MOST_TOKENS
        self.num_replays = 0

    def capture(self, longest: int, cache: KVCache, num_blocks: int = 0, going_on: Sequence[int] = ()) -> None:
        """Capture passes that serve texts of up to `longest` tokens, the largest first: of lone ones all.

        Of several texts at once the longest pass is captured now, for what it shows, and others when they are needed.
        Passes that go on with texts are captured for so many rows as `going_on` says, with tables of `num_blocks`.
        Where a model cannot be captured, or what is captured does something else, tokens are fed as ever.
        """
        self._num_blocks = num_blocks
        try:
            for rows in (1 << power for power in range(MOST_ROWS.bit_length())):
                lengths = [one for one in LENGTHS if one <= longest and rows * one <= MOST_TOKENS]
                self._captured |= {_Size(rows, length): None for length in lengths}
                for length in lengths[::-1] if rows == 1 else lengths[-1:]:
                    self._captured[_Size(rows, length)] = self._capture(_Size(rows, length))
            for rows in sorted(set(map(power_of_2, going_on))):
                for width in (one for one in WIDTHS if one <= longest and rows * one <= MOST_GOING_ON):
                    size = _Size(rows, width, goes_on=True)
                    self._captured[size] = self._capture(size)
            self._check(cache)
        except Exception as error:  # noqa: BLE001 - whatever a model does that cannot be captured
            logger.warning("prompts cannot be captured and are fed kernel by kernel: %s", error)
            self._captured.clear()

    def replay(self, tokens: torch.Tensor, tables: torch.Tensor) -> bool:
        """Feed the first tokens ``[B, T]`` of rows with these tables, in several passes where one is too small.

        False where no captured pass is long enough, or where there is so much to feed that the card is busy with it for
        longer than the host is.
        """
        num_rows, num_tokens = tokens.shape
        length = next((one for one in LENGTHS if one >= num_tokens), 0)
        at_once = max(1, min(MOST_ROWS, MOST_TOKENS // max(1, length)))
        if num_rows > at_once and num_rows * length > self._most_tokens:
            return False
        rows = (slice(begin, begin + at_once) for begin in range(0, num_rows, at_once))
        return all(self._replay(length, tokens[part], tables[part]) for part in rows)

    def _replay(self, length: int, tokens: torch.Tensor, tables: torch.Tensor) -> bool:
        num_rows, num_tokens = tokens.shape
        one = self._ready(_Size(power_of_2(num_rows), length))
        if one is None:
            return False
        one.tokens[:num_rows, :num_tokens] = tokens
        # What is fed beyond a row's end goes into its last block, to be written again, or where nobody reads.
        one.seat(tables[:, : blocks_for(num_tokens)])
        one.start()
        self.num_replays += 1
        return True

    def go_on(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> bool:
        """Feed tokens ``[B, T]`` at any positions of texts, several passes after each other if need be.

        False where no captured pass is large enough, and where a lone text has so much to be fed that it is faster
        otherwise; nothing is fed then.
        """
        num_rows, num_tokens = tokens.shape
        rows = power_of_2(num_rows)
        widths = [width for width in WIDTHS if _Size(rows, width, goes_on=True) in self._captured]
        width = next((one for one in widths if one >= num_tokens), max(widths, default=0))
        if (rows == 1 and num_tokens > MOST_PASSES * width) or tables.shape[1] > self._num_blocks:
            return False
        one = self._ready(_Size(rows, width, goes_on=True))
        if one is None:
            return False
        one.seat(tables)
        one.positions[num_rows:] = 0  # nobody looks back far
        for begin in range(0, num_tokens, width):
            end = min(begin + width, num_tokens)
            for column, given in ((one.tokens, tokens), (one.positions, positions)):
                column[:num_rows, : end - begin] = given[:, begin:end]
                column[:num_rows, end - begin :] = given[:, end - 1 : end]  # the last one, written again
            one.start()
        self.num_replays += 1
        return True

    def _ready(self, size: _Size) -> _Captured | None:
        if size not in self._captured:
            return None
        if self._captured[size] is None:
            try:
                self._captured[size] = self._capture(size)
            except Exception as error:  # noqa: BLE001 - want of memory, as it seems: others of its kind went well
                logger.warning("texts of %d x %d tokens are fed kernel by kernel: %s", size.rows, size.length, error)
                del self._captured[size]
        return self._captured.get(size)

    def _capture(self, size: _Size) -> _Captured:
        blocks = self._num_blocks if size.goes_on else size.length // BLOCK_SIZE
        tokens = torch.zeros(size.rows, size.length, dtype=torch.long, device=self._device)
        tables = torch.full((size.rows, blocks), TRASH_BLOCK, dtype=torch.long, device=self._device)
        positions = torch.arange(size.length, device=self._device).repeat(size.rows, 1)
        start = self._recorded(lambda: self._feed(tokens, positions, tables, blocks * BLOCK_SIZE))
        return _Captured(tokens, positions, tables, start)

    def _check(self, cache: KVCache) -> None:
        """Hold what a pass of each number of rows writes against what is written without it; raises where they differ.

        Blocks that belong to nobody yet are written.
        """
        for size in {(one.rows, one.goes_on): one for one, there in self._captured.items() if there}.values():
            rows, length = size.rows, size.length
            blocks = rows * blocks_for(length)
            if RESERVED + blocks > cache.num_blocks:
                continue
            tables = torch.arange(RESERVED, RESERVED + blocks, device=self._device).view(rows, -1)
            tokens = torch.arange(rows * length, device=self._device).view(rows, -1) % FEW_IDS
            positions = torch.arange(length, device=self._device).repeat(rows, 1)
            slots = slots_of(tables, positions)[:, : length - 1].flatten()
            self._feed(tokens, positions, tables, length)
            wanted = cache.taken(slots)
            self._feed(tokens * 0, positions, tables, length)  # something else
            if size.goes_on:
                self.go_on(tokens[:, : length - 1], positions[:, : length - 1], tables)
            else:
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
