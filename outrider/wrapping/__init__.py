"""`wrap`: for those who hold transformers objects. The call is `model.generate`'s, the work Outrider's engine's."""

from __future__ import annotations

from typing import Any

from outrider.wrapping.wrapped import WrappedModel

__all__ = ["WrappedModel", "wrap"]


def wrap(model: Any, tokenizer: Any = None) -> WrappedModel:
    """Give a transformers model a `generate` that speculates.

    ``outrider.wrap(model, tokenizer).generate(input_ids=..., assistant_model=draft, max_new_tokens=256)`` returns the
    tensor that ``model.generate`` would.

    Args:
        model: A causal language model; its attention must go through transformers' AttentionInterface.
        tokenizer: Its tokenizer; needed for `stop_strings` alone.
    """
    return WrappedModel(model, tokenizer)
