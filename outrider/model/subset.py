"""Some of a target's own layers, run as a draft on the target's own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.model.runner import TorchRunner

__all__ = ["LayerSubsetRunner"]


class LayerSubsetRunner:
    """Some of a target's own layers as a draft: they share its weights and its cache, so nothing is to be caught up.

    What the draft writes into those layers' cache lies at places that the target's pass will write again.

    Args:
        whole: The target.
        keep: The layers that run, in order.
    """

    def __init__(self, whole: TorchRunner, keep: Sequence[int]) -> None:
        self.vocab_size, self.context_length, self.device = whole.vocab_size, whole.context_length, whole.device
        self.bytes_per_slot = 0
        self.features: torch.Tensor | None = None
        self._whole, self._network = whole, whole.network.only(keep)

    def allocate(self, num_blocks: int) -> None:
        """Nothing: the target's cache is used."""

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
        ancestors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run those layers, the last norm and the head: see `TorchRunner.forward`."""
        step, positions = self._whole.step(positions, tables, context, start, ancestors)
        return self._network.logits(tokens, positions, step)[0]

    def feed(self, *_: object) -> None:
        """Nothing is ever missing."""
        raise AssertionError("a draft of the target's own layers has nothing to feed")

    def keep_path(self, *_: object) -> None:
        """Nothing: the target moves its own."""

    def copy_blocks(self, *_: object) -> None:
        """Nothing: the target copies its own."""

    def tune(self, passes: Sequence[tuple[int, int]], places: int, lagging: Sequence[int] = ()) -> None:
        """Make passes of (rows, tokens a row) as fast as they can be; no row lags."""
        assert not lagging
        self._network.tune(passes, places, self._whole.step)
