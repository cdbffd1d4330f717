"""What a call of transformers' `generate` asks for, in Outrider's terms; what cannot be met is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.config import MAX_DRAFT_TOKENS
from outrider.errors import InvalidRequestError
from outrider.sampling.params import SamplingParams

__all__ = ["SUPPORTED", "GenerationRequest", "resolved"]

SUPPORTED = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "eos_token_id", "pad_token_id", "num_return_sequences", "stop_strings",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens",
)  # fmt: skip
# Settings that change how transformers works, or nothing here, but never which tokens come.
IGNORED = frozenset({
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "bos_token_id", "decoder_start_token_id",
    "length_penalty", "early_stopping", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "compile_config", "disable_compile", "renormalize_logits",
    "remove_invalid_values", "is_assistant", "transformers_version", "prefill_chunk_size", "logits_to_keep",
})  # fmt: skip
# Arguments of `generate` that are no fields of a GenerationConfig.
ARGUMENTS = frozenset({
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer",
    "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "assistant_tokenizer", "tokenizer",
    "inputs_embeds", "past_key_values",
})  # fmt: skip
NEUTRAL: dict[str, float] = {
    "num_beams": 1, "num_beam_groups": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0, "guidance_scale": 1.0,
}  # fmt: skip
DEFAULT_NEW_TOKENS = 20
DEFAULT_TOP_K = 50
DEFAULT_DRAFT_LENGTH = 5
DEFAULT_MATCH = 2


@dataclass(frozen=True)
class GenerationRequest:
    """One call, ready for an engine.

    Attributes:
        prompts: Ids of each row, without padding.
        params: How to sample, the same for all rows; the seed is set later.
        pad_token_id: Fills rows that end early.
        lookup_tokens: Guesses a round by lookup; None without.
        lookup_match: Longest run that lookup matches.
        assistant_tokens: Guesses a round where there is an assistant.
    """

    prompts: list[list[int]]
    params: SamplingParams
    pad_token_id: int | None
    lookup_tokens: int | None
    lookup_match: int
    assistant_tokens: int


def resolved(
    model: Any, input_ids: Any, attention_mask: Any, generation_config: Any, given: dict[str, Any]
) -> GenerationRequest:
    """Merge what was given over the configs as transformers does, and check it all.

    Raises:
        InvalidRequestError: Something is unknown, unsupported or out of range.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or 0 in input_ids.shape:
        shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise InvalidRequestError(f"input_ids must be a tensor of token ids [rows, tokens], got {shape}")
    # A fresh config tells which fields this transformers has; what else a checkpoint's config holds, nobody reads.
    fields = set(vars(type(model.generation_config)()))
    stated = _fields(model.generation_config, fields) | _fields(generation_config, fields)
    known = fields.union(SUPPORTED, IGNORED, ARGUMENTS, NEUTRAL)
    for name in given:
        if name not in known:
            raise InvalidRequestError(f"generate() does not know {name!r}; it supports {', '.join(SUPPORTED)}")
    settings = stated | given
    for name, value in settings.items():
        if name not in SUPPORTED and name not in IGNORED and not _neutral(name, value):
            raise InvalidRequestError(
                f"{name}={value!r} is not supported; leave it out (generate() supports {', '.join(SUPPORTED)})"
            )
    eos = _eos(settings.get("eos_token_id"))
    pad = settings.get("pad_token_id")
    if pad is None and eos:
        pad = eos[0]
    prompts = _unpadded(input_ids, attention_mask, settings.get("pad_token_id"), eos)
    lengths = _lengths(settings, input_ids.shape[1], model)
    return GenerationRequest(
        prompts=prompts,
        params=_params(settings, eos, *lengths),
        pad_token_id=pad,
        lookup_tokens=_draft_length("prompt_lookup_num_tokens", settings),
        lookup_match=settings.get("max_matching_ngram_size") or DEFAULT_MATCH,
        assistant_tokens=_draft_length("num_assistant_tokens", settings) or DEFAULT_DRAFT_LENGTH,
    )


def _fields(config: Any, known: set[str]) -> dict[str, Any]:
    """Give what a GenerationConfig states; its private fields are transformers' own business."""
    stated = {} if config is None else vars(config)
    return {
        name: value
        for name, value in stated.items()
        if value is not None and name in known and not name.startswith("_")
    }


def _neutral(name: str, value: Any) -> bool:
    """Whether a setting, as it stands, asks for nothing."""
    if value is None or value is False or (hasattr(value, "__len__") and len(value) == 0):
        return True
    return name == "tokenizer" or (name in NEUTRAL and value == NEUTRAL[name])  # stop_strings use the wrapped tokenizer


def _eos(stated: Any) -> tuple[int, ...]:
    if stated is None:
        return ()
    if hasattr(stated, "tolist"):
        stated = stated.tolist()
    return tuple(stated) if isinstance(stated, list | tuple) else (stated,)


def _unpadded(ids: torch.Tensor, mask: Any, pad: int | None, eos: tuple[int, ...]) -> list[list[int]]:
    """Take the padding off each row's left.

    Without a mask, the padding is guessed as transformers guesses it: from the pad token, unless that also ends texts.
    """
    if mask is None:
        mask = torch.ones_like(ids) if pad is None or pad in eos else ids != pad
    if mask.shape != ids.shape:
        raise InvalidRequestError(f"attention_mask is {tuple(mask.shape)}, but input_ids are {tuple(ids.shape)}")
    prompts = []
    for row, (tokens, seen) in enumerate(zip(ids.tolist(), mask.bool().tolist(), strict=True)):
        start = seen.index(True) if True in seen else len(seen)
        if not all(seen[start:]) or start == len(seen):
            raise InvalidRequestError(
                f"attention_mask of row {row} hides tokens that are not on its left, or all: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        prompts.append(tokens[start:])
    return prompts


def _lengths(settings: dict[str, Any], width: int, model: Any) -> tuple[int, int]:
    """Give the most and the least number of new tokens; max_length and min_length count the padded prompt."""
    most = settings.get("max_new_tokens")
    if most is None:
        if settings.get("max_length") is not None:
            most = settings["max_length"] - width
        else:
            most = DEFAULT_NEW_TOKENS
            positions = getattr(model.config, "max_position_embeddings", None)
            most = most if positions is None else min(most, positions - width)
    if most <= 0:
        raise InvalidRequestError(
            f"the prompt has {width} tokens, so max_new_tokens={settings.get('max_new_tokens')} and "
            f"max_length={settings.get('max_length')} leave no room for new ones; raise them"
        )
    least = settings.get("min_new_tokens")
    if least is None:
        least = max(0, (settings.get("min_length") or 0) - width)
    return most, min(least, most)


def _params(settings: dict[str, Any], eos: tuple[int, ...], most: int, least: int) -> SamplingParams:
    samples = settings.get("num_return_sequences")
    if least and settings.get("stop_strings"):
        raise InvalidRequestError(
            f"stop_strings with min_new_tokens or min_length ({least} new tokens) are not supported: transformers "
            "looks for them from the first token on; leave one of them out"
        )
    shared: dict[str, Any] = {
        "n": 1 if samples is None else samples,
        "repetition_penalty": _or(settings.get("repetition_penalty"), 1.0),
        "max_tokens": most,
        "min_tokens": least,
        "ignore_eos": True,  # the call's own list counts, even an empty one
        "stop_token_ids": eos,
        "stop": settings.get("stop_strings") or (),
    }
    if not settings.get("do_sample"):
        if shared["n"] != 1:
            raise InvalidRequestError(
                f"num_return_sequences={shared['n']} gives equal rows when greedy; set do_sample=True"
            )
        return SamplingParams(temperature=0, **shared)
    temperature = _or(settings.get("temperature"), 1.0)
    if temperature == 0:
        raise InvalidRequestError("temperature=0 with do_sample=True is greedy; set do_sample=False")
    top_k = settings.get("top_k", DEFAULT_TOP_K)
    return SamplingParams(
        temperature=temperature,
        top_k=_or(top_k, 0),
        top_p=_or(settings.get("top_p"), 1.0),
        min_p=_or(settings.get("min_p"), 0.0),
        **shared,
    )


def _or(value: Any, default: float) -> Any:
    return default if value is None else value


def _draft_length(name: str, settings: dict[str, Any]) -> int | None:
    value = settings.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or not 1 <= value <= MAX_DRAFT_TOKENS:
        raise InvalidRequestError(f"{name} must be an integer in [1, {MAX_DRAFT_TOKENS}], got {value!r}")
    return value
