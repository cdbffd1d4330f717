"""Which architectures Outrider serves exactly, decided from a config before any weight is read.

Rollback is setting a length (design.md section 1), so a layer may keep keys and values by position and nothing else.
Layer types are therefore an allow-list: what is unknown is refused by name, never served wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["TEXT_HALF_KEYS", "causal_text_class", "check_config", "check_model", "layer_types"]

_SERVED = frozenset({"full_attention", "sliding_attention", "attention", "sliding", "full"})
_RECURRENT = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding", "m", "recurrent_layer"}
)
_REASONS = {
    "chunked_attention": "attention cut into chunks is not implemented",
    "indexed_attention": "an indexer's own cache is not implemented",
    "deepseek_sparse_attention": "an indexer's own cache is not implemented",
    "qwen_sparse_attention": "an indexer's own cache is not implemented",
}
_SINKS = "its attention has sinks (a learned extra logit in each softmax), which are not implemented yet"
_REFUSED_TYPES = {
    "deepseek_v4": _SINKS,
    "flint": _SINKS,
    "gpt_oss": _SINKS,
    "granite_swa": _SINKS,
    "granitemoe_swa": _SINKS,
    "hy_v4": _SINKS,
    "mimo_v2_flash": _SINKS,
    "diffllama": "each layer attends twice with the same keys",
    "doge": "its attention mask is computed inside the layer",
    "hrm_text": "its layers run several times a token",
    "gemma4_assistant": "it is a draft head that reads the target's keys, not a language model of its own",
    "gemma4_unified_assistant": "it is a draft head that reads the target's keys, not a language model of its own",
}
# Multimodal types whose text half is a model of its own -> how the whole names that half's weights.
TEXT_HALF_KEYS: dict[str, dict[str, str]] = {
    "gemma3": {
        r"^language_model\.model\.": "model.",
        r"^language_model\.lm_head\.": "lm_head.",
        r"^model\.language_model\.": "model.",
    }
}
_CAUSAL_THOUGH_NOT_DECODER = frozenset({"gpt_neox"})  # its config says is_decoder=False and its attention is causal
_REMEDY = "use a decoder-only attention model such as Llama, Mistral, Qwen2/3, Gemma, Phi-3 or OLMo2"


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """The type of each layer as the config states it; empty where it states none (then all layers are alike)."""
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        types = getattr(config, attribute, None)
        if types:
            return tuple(str(kind) for kind in types)
    return ()


def _refuse(name: str, config: PreTrainedConfig, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: model type {config.model_type!r} cannot be served: {reason}; {_REMEDY}")


def _mapped_class(config: PreTrainedConfig) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return None
    return mapped[0] if isinstance(mapped, list | tuple) else mapped


def causal_text_class(config: PreTrainedConfig, name: str) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The text config and causal class that serve `config`.

    A multimodal config is reduced to its text half where transformers has a causal class for that half alone and
    can read it out of the whole checkpoint.

    Raises: UnsupportedModelError for encoder-decoders, encoders, and models without a causal text class.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(name, config, "it is an encoder-decoder")
    whole = _mapped_class(config)
    if whole is None:
        raise _refuse(name, config, "transformers has no causal language model for it")
    text_config = config.get_text_config(decoder=True)
    if text_config is not config:
        text = whole if whole.config_class is type(text_config) else _mapped_class(text_config)
        readable = text is whole or config.model_type in TEXT_HALF_KEYS
        if text is None or text.config_class is not type(text_config) or not readable:
            raise _refuse(name, config, "it is multimodal and has no text-only causal class")
        if getattr(text_config, "quantization_config", None) is None:
            quantization = getattr(config, "quantization_config", None)
            if quantization is not None:
                text_config.quantization_config = quantization
        return text_config, text
    if config.sub_configs:
        raise _refuse(name, config, f"it is multimodal ({', '.join(sorted(config.sub_configs))})")
    return config, whole


def check_config(config: PreTrainedConfig, model_class: type[PreTrainedModel], name: str) -> None:
    """Refuse, by layer type where there is one, whatever cannot be rolled back or would be attended wrongly.

    Raises: UnsupportedModelError naming the model type, the layer type and the reason.
    """
    model_type = config.model_type
    if model_type in _REFUSED_TYPES:
        raise _refuse(name, config, _REFUSED_TYPES[model_type])
    types = layer_types(config)
    for kind in types:
        if kind in _RECURRENT:
            raise _refuse(name, config, f"layers of type {kind!r} keep a recurrent state that cannot be rolled back")
        if kind not in _SERVED:
            raise _refuse(name, config, f"layers of type {kind!r}: {_REASONS.get(kind, 'not implemented')}")
    if model_class._is_stateful and not types:  # noqa: SLF001
        raise _refuse(name, config, f"layers of type {model_type!r} keep a recurrent state that cannot be rolled back")
    if getattr(config, "is_decoder", None) is False and model_type not in _CAUSAL_THOUGH_NOT_DECODER:
        raise _refuse(name, config, "it is an encoder (is_decoder is false), so its attention looks ahead")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise _refuse(name, config, "its attention is bidirectional (use_bidirectional_attention)")
    # Not `_supports_sdpa`: Gemma 2 says no to that (soft caps) and yes to a registered attention function.
    if not model_class._supports_attention_backend:  # noqa: SLF001
        raise _refuse(name, config, f"{model_class.__name__} does not let its attention be replaced")


def check_model(model: PreTrainedModel, name: str) -> None:
    """Refuse what only the built network shows: sinks under a model type this list does not know."""
    sinks = [key for key, _ in model.named_parameters() if "sink" in key.rsplit(".", 1)[-1]]
    if sinks:
        raise _refuse(name, model.config, f"{_SINKS} ({sinks[0]})")
