"""A draft whose texts are longer than the target's: every block of the target's stands for several of its own.

A draft with another tokenizer may need more tokens for a text than the target does, and its cache more room. Block b of
the target's is the blocks ``b * room`` to ``b * room + room - 1`` of the draft's. So the target's tables still say
where everything is, and nothing has to be handed out, given back or known on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.model.kv_cache import BLOCK_SIZE, TRASH_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.model.runner import TorchRunner

__all__ = ["RoomyRunner"]


class RoomyRunner:
    """Runs a model over a cache with `room` places for each of the target's.

    All tables and starts that it takes are the target's; positions, places and contexts are the draft's own.

    Args:
        runner: Runs the draft; nobody else may allocate or use its cache.
        room: The draft's tokens a target token, at least 1.
    """

    def __init__(self, runner: TorchRunner, room: int) -> None:
        self.inner = runner
        self.room = room
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.device = runner.device

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that the draft keeps for one place of the target's cache."""
        return self.inner.bytes_per_slot * self.room

    def allocate(self, num_blocks: int) -> None:
        """Make a cache for `num_blocks` of the target's blocks."""
        self.inner.allocate(num_blocks * self.room)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what is kept for some of the target's blocks to others."""
        parts = range(self.room)
        own = ([block * self.room + part for block in blocks for part in parts] for blocks in (source, target))
        self.inner.copy_blocks(*own)

    def capacity(self, tables: torch.Tensor) -> torch.Tensor:
        """How many draft tokens rows with these tables ``[B, blocks]`` can hold, ``[B]``.

        A row without any block belongs to nobody, and may be fed as far as a full table reaches.
        """
        blocks = (tables != TRASH_BLOCK).sum(1)
        return blocks.where(blocks > 0, tables.shape[1]) * (BLOCK_SIZE * self.room)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
    ) -> torch.Tensor:
        """Feed tokens, give logits at each of them; see `TorchRunner.forward`."""
        return self.inner.forward(tokens, positions, self._own(tables), context, self._begin(start))

    def feed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
    ) -> None:
        """Feed tokens for their keys and values alone."""
        self.inner.feed(tokens, positions, self._own(tables), context, self._begin(start))

    def tune(self, passes: Sequence[tuple[int, int]], places: int, lagging: Sequence[int] = ()) -> None:
        """Make passes fast; `places`: what a row's table of the target's holds."""
        self.inner.tune(passes, places * self.room, lagging)

    def activation_bytes(self, num_tokens: int) -> int:
        """Measure what one pass over so many prompt tokens takes besides weights and cache."""
        return self.inner.activation_bytes(num_tokens)

    def close(self) -> None:
        """Give the model its own attention back and drop the cache."""
        self.inner.close()

    def _own(self, tables: torch.Tensor) -> torch.Tensor:
        """[B, blocks] of the target's -> [B, blocks * room] of the draft's."""
        if self.room == 1:
            return tables
        parts = torch.arange(self.room, device=tables.device)
        return (tables[..., None] * self.room + parts).flatten(1)

    def _begin(self, start: int | None) -> int | None:
        return None if start is None else start * self.room
