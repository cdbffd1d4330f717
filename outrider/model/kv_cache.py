"""Where keys and values live: blocks of slots handed out on the host, storage on the device.

A sequence owns a list of blocks; the slot of position ``p`` is ``block[p // size] * size + p % size``. Target and
draft share one block list a sequence and keep storage of their own, so a block is paid for in both. Rollback is
nothing at all: a cache's length is a number elsewhere, and what lies beyond it is overwritten before it can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import CapacityError
from outrider.kernels.attention import BLOCK_SIZE  # slots a block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_SIZE", "NULL_BLOCK", "RESERVED", "TRASH_BLOCK", "KVCache", "LayerShape", "block_slots", "blocks_for"]

NULL_BLOCK = 0  # always zeros: read in place of what must not be seen
TRASH_BLOCK = 1  # never read for a result: written by positions that belong to nobody
RESERVED = 2
COPIED_TOGETHER = 64  # blocks: what is copied is held twice meanwhile


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps a token, and how it looks back."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    softcap: float | None = None

    @property
    def width(self) -> int:
        """Numbers kept a token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys and values of one model: two tensors a layer, ``[slots, kv heads, dim]``.

    Layers of one shape lie in one tensor, so that a token's entries in all of them are moved at once.
    """

    def __init__(self, layers: list[LayerShape], num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        slots = num_blocks * BLOCK_SIZE
        key_sizes = [(layer.num_kv_heads, layer.key_dim) for layer in layers]
        value_sizes = [(layer.num_kv_heads, layer.value_dim) for layer in layers]
        sizes = [*key_sizes, *value_sizes]
        try:
            self._pools = {
                size: torch.empty(sizes.count(size), slots, *size, dtype=dtype, device=device)
                for size in dict.fromkeys(sizes)
            }
        except (RuntimeError, MemoryError) as error:
            wanted = slots * self.bytes_per_slot(layers, dtype)
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks ({wanted / 2**30:.2f} GiB) does not fit on {device}; "
                "lower max_model_len, max_num_seqs or the KV memory budget"
            ) from error
        # Empty memory costs nothing until it is written, and nothing unwritten is read but for the null block.
        for pool in self._pools.values():
            pool[:, :BLOCK_SIZE] = 0
        parts = {size: iter(pool.unbind()) for size, pool in self._pools.items()}
        self.keys = [next(parts[size]) for size in key_sizes]
        self.values = [next(parts[size]) for size in value_sizes]
        self.layers = layers
        self.num_blocks = num_blocks

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what all layers keep at the slots `source` ``[n]`` to the slots `target` ``[n]``; all is read first."""
        for pool in self._pools.values():
            pool.index_copy_(1, target, pool.index_select(1, source))

    def taken(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Copy out what is kept at some slots ``[n]``: a tensor ``[layers, n, kv heads, dim]`` a kind of layer."""
        return [pool.index_select(1, slots) for pool in self._pools.values()]

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what all layers keep in some blocks to others, one by one; none may be on both sides."""
        device = self.keys[0].device
        for slots in block_slots(source, target, device):
            self.move(*slots)

    @staticmethod
    def bytes_per_slot(layers: list[LayerShape], dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers."""
        return sum(layer.width for layer in layers) * dtype.itemsize


def block_slots(source: Sequence[int], target: Sequence[int], device: torch.device) -> Iterator[torch.Tensor]:
    """Give the slots of blocks to copy and of those that they are copied to, ``[2, n]``, some blocks at a time."""
    places = torch.arange(BLOCK_SIZE, device=device)
    for begin in range(0, len(source), COPIED_TOGETHER):
        part = slice(begin, begin + COPIED_TOGETHER)
        blocks = torch.tensor([source[part], target[part]], device=device)
        yield (blocks[..., None] * BLOCK_SIZE + places).flatten(1)


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
