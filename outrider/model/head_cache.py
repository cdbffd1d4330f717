"""The keys and values of a head that has some of its own: paged, by the target's block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.kernels.launch import uses_kernels
from outrider.model.attention import Step
from outrider.model.kv_cache import KVCache, LayerShape
from outrider.model.paged import PagedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["HeadCache"]


class HeadCache:
    """A cache that is made when the target's is, with as many blocks.

    Args:
        layers: What each of the head's attention layers keeps.
        dtype: Of keys and values.
        device: Where the head runs.
    """

    def __init__(self, layers: list[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype, self._device = layers, dtype, device
        self._made: KVCache | None = None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one cached token takes in all layers."""
        return KVCache.bytes_per_slot(self._layers, self._dtype)

    @property
    def made(self) -> KVCache:
        """Where keys and values are kept."""
        assert self._made is not None, "allocate() comes first"
        return self._made

    def allocate(self, num_blocks: int) -> None:
        """Make it; a larger one that stands already is kept."""
        if self._made is None or self._made.num_blocks < num_blocks:
            self._made = KVCache(self._layers, num_blocks, self._dtype, self._device)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what is kept in some blocks to others, one by one."""
        self.made.copy_blocks(source, target)

    def step(
        self,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None,
        ancestors: torch.Tensor | None = None,
    ) -> Step | PagedStep:
        """Give a pass's view of it: arguments as for `TorchRunner.forward`."""
        if uses_kernels(self._device):
            return PagedStep(self.made, positions, tables, context, None, ancestors)
        return Step.over(self.made, positions, tables, context, start=start, ancestors=ancestors)
