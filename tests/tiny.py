"""Tiny random models for every test: seeded, CPU, fp32, made in a fraction of a second.

Weights are wide, so greedy text wanders instead of repeating one token, and logits are far enough apart that a wrong
window, a missing soft cap or a wrong position changes the text. Names follow shared/cases.md: T is `tiny_target()`;
D=, D~ and D! are `tiny_draft(target, "same" | "noisy" | "unrelated")`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "FAMILIES",
    "NUM_TOKENS",
    "PAD_ID",
    "UNK_ID",
    "byte_tokenizer",
    "greedy",
    "hybrid_config",
    "save",
    "tiny_absolute",
    "tiny_draft",
    "tiny_family",
    "tiny_sliding",
    "tiny_target",
]

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 256, 257, 258, 259
NUM_TOKENS = 260
_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_SPECIAL = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """260 ids: byte b is id b; then <pad>, <s>, </s>, <unk>. Decodes multi-byte UTF-8, adds no BOS by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>", "<unk>")])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    return tokenizer


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _build(config: PreTrainedConfig, *, seed: int, std: float, attention_scale: float = 1.0) -> PreTrainedModel:
    """A model of `config` with every weight matrix drawn from N(0, std), biases and norms slightly off their defaults.

    The head's rows for bos, eos and pad are zero, so no greedy text ever holds one of them.
    """
    from transformers import AutoModelForCausalLM

    config.architectures = None
    build: Any = AutoModelForCausalLM.from_config  # untyped
    model: PreTrainedModel = build(config, dtype=torch.float32, attn_implementation="eager")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=noise)
            if parameter.ndim == 1:
                parameter.add_(draw * 0.1)
                continue
            width = std * attention_scale if any(part in name for part in ("q_proj", "k_proj", "qkv")) else std
            parameter.copy_(draw * width)
        for special in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
            if special is not None:
                _head(model)[special] = 0.0
    model.train(False)
    model.requires_grad_(False)
    return model


def _head(model: Any) -> torch.Tensor:
    """[V, H] the rows that make the logits (never tied to the embedding in these models)."""
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight


def tiny_target(*, seed: int = 0, std: float = 0.6, speaks_padding: bool = False, **overrides: Any) -> PreTrainedModel:
    """T: a 2-layer Llama, hidden 64, 4 heads and 2 KV heads, vocabulary 320 (260 known ids), context 512.

    `speaks_padding` lets greedy text hold ids from 260 up, which the tokenizer does not know (case M01).
    """
    from transformers import LlamaConfig

    config = LlamaConfig(**{**_SHAPE, **_SPECIAL, "tie_word_embeddings": False, **overrides})
    model = _build(config, seed=seed, std=std)
    if not speaks_padding:
        with torch.no_grad():
            _head(model)[UNK_ID:] = 0.0
    return model


def tiny_sliding(*, seed: int = 0, std: float = 0.6, window: int = 16, **overrides: Any) -> PreTrainedModel:
    """Tswa: T's shape as a Mistral, every layer with a sliding window."""
    from transformers import MistralConfig

    settings = {**_SHAPE, **_SPECIAL, "tie_word_embeddings": False, "sliding_window": window, **overrides}
    return _build(MistralConfig(**settings), seed=seed, std=std)


def tiny_absolute(*, seed: int = 0, std: float = 0.6, positions: int = 64, **overrides: Any) -> PreTrainedModel:
    """Tabs: T's size as a GPT-2 with `positions` learned absolute positions; past them there is nothing to look up."""
    from transformers import GPT2Config

    settings = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": positions, **_SPECIAL}
    return _build(GPT2Config(**{**settings, "tie_word_embeddings": False, **overrides}), seed=seed, std=std)


def hybrid_config() -> PreTrainedConfig:
    """Thyb: the config of a model with linear-attention layers, to be refused at load (no weights needed)."""
    from transformers import Qwen3NextConfig

    settings: dict[str, Any] = {**_SHAPE, **_SPECIAL, "head_dim": 16, "num_experts": 4}
    return Qwen3NextConfig(**settings, layer_types=["linear_attention", "full_attention"])


def tiny_draft(
    target: PreTrainedModel,
    kind: Literal["same", "noisy", "unrelated"],
    *,
    seed: int = 1,
    noise: float = 0.03,
    vocab_size: int | None = None,
) -> PreTrainedModel:
    """D=: a copy of the target; D~: plus noise, about half of its guesses accepted; D!: nearly none accepted.

    `vocab_size` cuts the vocabulary or pads it with zero rows (case M01: 288 beside a target of 320).
    """
    draft = copy.deepcopy(target)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        silent = _head(draft).abs().sum(dim=1) == 0  # [V] what the target never says, the draft never says
        for parameter in draft.parameters():
            if kind == "same" or parameter.ndim == 1:
                continue
            drawn = torch.randn(parameter.shape, generator=draws) * parameter.std()
            parameter.copy_(drawn if kind == "unrelated" else parameter + drawn * noise)
        _head(draft)[silent] = 0.0
    if vocab_size is not None:
        _resize_vocabulary(draft, vocab_size)
    return draft


def _resize_vocabulary(model: Any, vocab_size: int) -> None:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        old: torch.Tensor = module.weight
        new = torch.zeros(vocab_size, old.shape[1])
        kept = min(vocab_size, old.shape[0])
        new[:kept] = old[:kept]
        module.weight = torch.nn.Parameter(new, requires_grad=False)
    model.get_input_embeddings().num_embeddings = vocab_size
    model.get_output_embeddings().out_features = vocab_size
    model.config.vocab_size = vocab_size


_FAMILY_SHAPE = {**_SHAPE, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
_WINDOW = 8
# family -> (config class, settings beyond the shape, std, extra width of the query and key projections)
_FAMILIES: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "llama": ("LlamaConfig", {}, 0.6, 1.0),
    "mistral": ("MistralConfig", {"sliding_window": _WINDOW}, 0.6, 1.0),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
        0.6,
        1.0,
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
        0.6,
        1.0,
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
        },
        0.6,
        1.0,
    ),
    "gemma": ("GemmaConfig", {"head_dim": 8}, 0.4, 1.0),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": _WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
        0.4,
        2.0,
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        0.4,
        1.0,
    ),
    "phi3": ("Phi3Config", {"sliding_window": _WINDOW}, 0.6, 1.0),
    "olmo2": ("Olmo2Config", {}, 0.6, 1.0),
    "gpt_neox": ("GPTNeoXConfig", {}, 0.6, 1.0),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}, 0.6, 1.0),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}, 0.6, 1.0),
}
FAMILIES = tuple(_FAMILIES)


def tiny_family(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """One of FAMILIES, 2 or 3 layers, hidden 32, vocabulary 96, a window of 8 and soft caps where it has them."""
    import transformers

    config_name, extra, std, attention_scale = _FAMILIES[name]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    shape = {key: value for key, value in _FAMILY_SHAPE.items() if not (name == "gpt2" and key != "vocab_size")}
    config = getattr(transformers, config_name)(**{**shape, **special, **extra, **overrides})
    return _build(config, seed=seed, std=std, attention_scale=attention_scale)


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The oracle: `num_tokens` greedy ids after `prompt`, recomputing everything each step; no cache, no EOS."""
    ids = torch.tensor([prompt], device=model.device)  # [1, T]
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]  # [1, V]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, path: Path) -> Path:
    """Write an ordinary checkpoint folder (safetensors) and return it."""
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path
