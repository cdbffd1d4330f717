"""Small host values onto the device without waiting for what runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["put", "upload"]


def upload(values: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a (nested) list of numbers to `device`.

    An ordinary copy to a card waits until all work queued before it is done. From pinned memory it takes its place in
    the queue instead; torch keeps that memory until the copy is over.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def put(values: Sequence[object], place: torch.Tensor) -> None:
    """Copy a list of numbers to where a tensor lies, in the same way."""
    on_card = place.device.type == "cuda"
    place.copy_(torch.tensor(values, dtype=place.dtype, pin_memory=on_card), non_blocking=on_card)
