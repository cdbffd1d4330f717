"""Outrider: exact speculative decoding. The same text, in less time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    OutriderError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from outrider.sampling.grammar import Grammar
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.wrapping import wrap

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "ConfigError",
    "Grammar",
    "InvalidRequestError",
    "ModelLoadError",
    "OutriderError",
    "SamplingParams",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "__version__",
    "wrap",
]


def __getattr__(name: str) -> Any:
    # Torch and transformers take seconds to import; `outrider --help` should not.
    if name == "LLM":
        from outrider.llm import LLM

        return LLM
    if name == "wrap":
        from outrider.wrapping import wrap

        return wrap
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
