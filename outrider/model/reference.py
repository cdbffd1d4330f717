"""A loaded model as transformers runs it, with nothing of ours: what our engine's results are held against."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["logits_after", "logits_of"]

CACHE_NAMES = ("cache", "past_key_values")  # the newer name first


@torch.inference_mode()
def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Give the logits after every token: fp32 ``[T, V]`` on the CPU."""
    found: torch.Tensor = model(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0]
    return found.float().cpu()


@torch.inference_mode()
def logits_after(model: Any, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Give the logits that each token of some texts after one prompt was chosen from: fp32 ``[B, T, V]`` on the CPU.

    The prompt is read once for all of them. What lies beyond a text's end means nothing.
    """
    width, more = max(map(len, texts)), dict[str, Any]()
    if len(prompt) > 1:
        name = next(one for one in CACHE_NAMES if one in inspect.signature(model.forward).parameters)
        before = torch.tensor([list(prompt[:-1])], device=model.device)
        cache = model(before, use_cache=True)[name]
        cache.batch_repeat_interleave(len(texts))
        more = {name: cache, "use_cache": True}
    fed = [[prompt[-1], *text, *[0] * (width - len(text))][:width] for text in texts]
    found: torch.Tensor = model(torch.tensor(fed, device=model.device), **more).logits
    return found.float().cpu()
