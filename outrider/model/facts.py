"""What an engine must know about a model and only its config tells: where it may stop, and how far it reaches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["context_length", "eos_token_ids", "require_context"]

logger = logging.getLogger(__name__)

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_SWITCHING_ROPES = ("longrope", "dynamic")  # their frequencies change with the longest position of the whole batch


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The union, in the order generation config, config, tokenizer."""
    found: dict[int, None] = {}
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        stated = getattr(holder, "eos_token_id", None)
        for token_id in stated if isinstance(stated, list | tuple) else [stated]:
            if isinstance(token_id, int) and token_id >= 0:
                found[token_id] = None
    return tuple(found)


def context_length(config: PreTrainedConfig, name: str) -> int:
    """How many positions the model can hold.

    Yarn stretches the original length by its factor, whatever max_position_embeddings says. Longrope and dynamic
    scaling change every frequency once the longest row passes the original length, so neither a round nor a batch
    mate may cross it: the length stops there.
    """
    stated = next((getattr(config, key) for key in _LENGTH_NAMES if isinstance(getattr(config, key, None), int)), None)
    if stated is None:
        raise UnsupportedModelError(f"{name}: the config states no context length ({', '.join(_LENGTH_NAMES[:2])})")
    length = int(stated)
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        original = int(rope.get("original_max_position_embeddings") or stated)
        if kind == "yarn":
            length = max(length, int(original * float(rope.get("factor") or 1.0)))
        elif kind in _SWITCHING_ROPES and original < length:
            logger.warning(
                "%s: rope scaling %r cannot be served exactly beyond its original %d positions; the context ends there",
                name, kind, original,
            )  # fmt: skip
            length = original
    return length


def require_context(wanted: int | None, available: int) -> None:
    """Refuse a `max_model_len` beyond the model's context.

    Raises:
        ConfigError: The message has both numbers.
    """
    if wanted is not None and wanted > available:
        raise ConfigError(
            f"max_model_len={wanted} is beyond the model's context of {available} tokens; "
            f"lower it to {available} or less"
        )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rope settings: one, none, or (Gemma 3) one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
