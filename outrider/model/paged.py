"""One forward pass's view of the paged cache on a card: keys and values are read where they lie, by kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from outrider.config import MAX_DRAFT_TOKENS
from outrider.kernels.attention import paged_attention, slots_of, stored_places

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.model.kv_cache import KVCache

__all__ = ["PagedStep"]

# cuDNN's attention makes a plan for every shape it meets: 50 ms and more for each new length of a prompt (H200).
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class PagedStep:
    """Where a pass writes and what it sees. Shapes alone are known to the host, so a pass can be captured.

    Attributes:
        cache: Where keys and values are kept.
        positions: Absolute position of each fresh token, ``[B, T]``; it is stored at the place of that number.
        tables: Blocks of each row, ``[B, blocks]``.
        context: At least the highest position + 1. Where a prompt is fed (T beyond any round's width) it is the end of
            the chunk, and several rows then all begin at 0.
        fixed_length: Split attention by this length and not by the row's own, so that a query's bits depend on its
            position alone (exact mode).
        ancestors: For fresh tokens that are trees, int64 ``[B, T]``: see `outrider.kernels.attention`. They are then
            stored side by side from the first one's position on, whatever their own is.
    """

    cache: KVCache
    positions: Tensor
    tables: Tensor
    context: int
    fixed_length: int | None = None
    ancestors: Tensor | None = None

    @property
    def feeds_prompt(self) -> bool:
        """Whether this is a chunk of a prompt rather than a round."""
        return self.ancestors is None and self.positions.shape[1] > MAX_DRAFT_TOKENS + 1

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write fresh keys and values ``[B, Hkv, T, D]``."""
        for pool, fresh in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            pool.index_copy_(0, self.write, fresh.transpose(1, 2).reshape(-1, *pool.shape[1:]).to(pool.dtype))

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """Attend from ``[B, T, H, D]`` to what is stored, the fresh tokens included: ``[B, T, H, D]``."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        rows, steps = self.positions.shape
        if self.feeds_prompt and window is None and softcap is None and (rows == 1 or self.context == steps):
            return self._dense(query, keys, values, scale)
        return paged_attention(
            query,
            keys,
            values,
            self.tables,
            self.positions,
            scale=scale,
            window=window,
            softcap=softcap,
            ancestors=self.ancestors,
            fixed_length=self.fixed_length,
        )

    def _dense(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Use torch's flash attention over a gathered copy: for a prompt it is the fastest there is."""
        read, steps = self._read, query.shape[1]
        with sdpa_kernel(_WITHOUT_PLANS):
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys[read].transpose(1, 2),
                values[read].transpose(1, 2),
                attn_mask=None if steps == self.context else causal_lower_right(steps, self.context),
                is_causal=steps == self.context,
                scale=scale,
                enable_gqa=query.shape[2] != keys.shape[1],
            )
        return out.transpose(1, 2).contiguous()

    # Worked out once for all layers, on first need: fused layers write by themselves, rounds read by kernels.

    @cached_property
    def places(self) -> Tensor:
        """Where in its row each fresh token is stored, ``[B, T]``."""
        return stored_places(self.positions, self.ancestors)

    @cached_property
    def write(self) -> Tensor:
        """Slot of each fresh token, ``[B * T]``."""
        return slots_of(self.tables, self.places).flatten()

    @cached_property
    def _read(self) -> Tensor:
        """Slots of the places 0 to context - 1 of each row, ``[B, context]``."""
        places = torch.arange(self.context, device=self.positions.device)
        return slots_of(self.tables, places.expand(len(self.tables), -1))
