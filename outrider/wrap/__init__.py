"""`wrap`: for those who hold transformers objects. The call is `model.generate`'s, the work Outrider's engine's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from outrider.wrap.wrapped import WrappedModel

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


class _CallableModule(ModuleType):
    """Importing this module makes it the package's attribute `wrap`, in place of the function: so it can be called."""

    def __call__(self, model: Any, tokenizer: Any = None) -> WrappedModel:
        return wrap(model, tokenizer)


sys.modules[__name__].__class__ = _CallableModule
