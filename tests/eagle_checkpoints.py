"""Tiny EAGLE heads with random weights, written in each published format; and what they compute, from the papers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

__all__ = ["FORMATS", "Written", "features_of", "greedy_chain", "next_logits", "write"]

FORMATS = ("eagle", "eagle bias", "eagle3", "eagle3 whole", "speculators eagle", "speculators eagle3")
HEADS, KV_HEADS, MLP, THETA, EPS = 4, 2, 96, 10000.0, 1e-5


@dataclass
class Written:
    """A head as it was written, and its tensors by what they are for."""

    folder: Path
    third: bool
    taps: tuple[int, ...]
    parts: dict[str, torch.Tensor]
    ids: list[int] | None = None
    norm_before_residual: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def save(self) -> Path:
        """Write what it says now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: one.clone().contiguous() for name, one in self.tensors.items()}, self.folder / "model.safetensors"
        )
        return self.folder


def write(kind: str, folder: Path, target: Any, *, seed: int = 0, num_ids: int = 64) -> Written:
    """Write a random head for a target in one of `FORMATS`."""
    config = target.config
    hidden, vocab, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    luck = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=luck) * scale * shape[-1] ** -0.5

    third, short = "eagle3" in kind, kind in ("eagle3", "speculators eagle3")
    wide = 2 * hidden if third else hidden
    dim = hidden // HEADS
    parts = {
        "q": drawn(HEADS * dim, wide), "k": drawn(KV_HEADS * dim, wide), "v": drawn(KV_HEADS * dim, wide),
        "o": drawn(hidden, HEADS * dim), "gate": drawn(MLP, hidden), "up": drawn(MLP, hidden),
        "down": drawn(hidden, MLP), "post": 1 + drawn(hidden),
    }  # fmt: skip
    taps: tuple[int, ...] = (layers,)
    ids = None
    if third:
        taps = (0, 1, layers) if kind == "speculators eagle3" else (1, layers - 1, layers)
        parts |= {"fc": drawn(hidden, 3 * hidden), "input": 1 + drawn(hidden), "hidden": 1 + drawn(hidden)}
        parts |= {"norm": 1 + drawn(hidden), "lm_head": drawn(num_ids if short else vocab, hidden, scale=6.0)}
        ids = sorted(torch.randperm(vocab, generator=luck)[:num_ids].tolist()) if short else None
    else:
        parts["fc"] = drawn(hidden, 2 * hidden)
    if kind == "eagle bias":
        parts["fc_bias"] = drawn(hidden)
    if kind == "speculators eagle":
        parts |= {"input": 1 + drawn(hidden), "embedding": 1 + drawn(hidden), "norm": 1 + drawn(hidden)}
        parts["fc_bias"] = drawn(hidden)
    made = Written(folder, third, taps, parts, ids, norm_before_residual=kind == "speculators eagle3")
    made.config, made.tensors = _formatted(kind, made, hidden, vocab, target)
    made.save()
    return made


def _formatted(kind: str, made: Written, hidden: int, vocab: int, target: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layer = {
        "hidden_size": hidden, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1, "vocab_size": vocab, "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
        "max_position_embeddings": 512, "model_type": "llama",
    }  # fmt: skip
    prefix = {"eagle": "layers.0.", "eagle bias": "layers.0.", "speculators eagle": "transformer."}.get(
        kind, "midlayer."
    )
    if kind == "speculators eagle3":
        prefix = "layers.0."
    names = {
        "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight", "post": "post_attention_layernorm.weight", "input": "input_layernorm.weight",
        "hidden": "hidden_norm.weight",
    }  # fmt: skip
    spec = kind == "speculators eagle"
    outer = {
        "fc": "fusion_fc.weight" if spec else "fc.weight",
        "fc_bias": "fusion_fc.bias" if spec else "fc.bias",
        "embedding": "embedding_layernorm.weight",
        "norm": "pre_lm_head_layernorm.weight" if spec else "norm.weight",
        "lm_head": "lm_head.weight",
    }
    tensors = {(prefix + names[key] if key in names else outer[key]): one for key, one in made.parts.items()}
    if kind.startswith("eagle") and not made.third:
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        return {**layer, "architectures": ["LlamaForCausalLM"], "bias": "fc_bias" in made.parts}, tensors
    if spec:
        config = {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "layernorms": True}
        return {**config, "fusion_bias": True, "transformer_layer_config": layer}, tensors
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "draft_vocab_size": len(made.ids or ()) or vocab}
    if kind == "speculators eagle3":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": True,
        }
        config |= {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": list(made.taps)}
    else:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in made.taps]}
    if made.ids is not None:
        ids = torch.tensor(made.ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors


# --- what they compute: whole prefixes, no cache


def features_of(made: Written, target: Any, tokens: list[int]) -> torch.Tensor:
    """The target's features of all tokens: ``[L, hidden]``."""
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    joined = torch.cat([states[tap][0] for tap in made.taps], -1)
    return joined @ made.parts["fc"].T if made.third else joined


def _norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _layer(made: Written, target: Any, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Outputs of the head's layer over pairs of feature and next token, all of them: ``[n, hidden]``."""
    parts = made.parts
    embedded = target.get_input_embeddings().weight.detach()[torch.tensor(tokens)]
    if made.third:
        normed = _norm(features, parts["hidden"])
        taken = torch.cat([_norm(embedded, parts["input"]), normed], -1)
        residual = normed if made.norm_before_residual else features
    else:
        embedded = _norm(embedded, parts.get("embedding"))
        residual = torch.cat([embedded, features], -1) @ parts["fc"].T + parts.get("fc_bias", 0)
        taken = _norm(residual, parts.get("input"))
    count, dim = len(tokens), parts["q"].shape[0] // HEADS
    query, key, value = ((taken @ parts[name].T).view(count, -1, dim).transpose(0, 1) for name in "qkv")
    angles = torch.outer(torch.arange(count).float(), THETA ** (-torch.arange(0, dim, 2).float() / dim))

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (turned(key), value))
    scores = turned(query) @ key.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    hidden = residual + mixed @ parts["o"].T
    inner = _norm(hidden, parts["post"])
    return hidden + (F.silu(inner @ parts["gate"].T) * (inner @ parts["up"].T)) @ parts["down"].T


def next_logits(made: Written, target: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits over the target's ids of one output ``[hidden]``; what the head cannot say is -inf."""
    normed = _norm(hidden, made.parts.get("norm"))
    matrix = made.parts.get("lm_head")
    own = normed @ (target.get_output_embeddings().weight.detach() if matrix is None else matrix).T
    if made.ids is None:
        return own
    return torch.full((target.config.vocab_size,), float("-inf")).index_copy(0, torch.tensor(made.ids), own)


def greedy_chain(made: Written, target: Any, tokens: list[int], length: int) -> list[int]:
    """The head's greedy guesses after a text: true features as far as there are any, its own after that."""
    features = features_of(made, target, tokens)[:-1]
    pairs, guesses = list(tokens[1:]), []
    for _ in range(length):
        out = _layer(made, target, features, pairs)[-1]
        guesses.append(int(next_logits(made, target, out).argmax()))
        features, pairs = torch.cat([features, out[None]]), [*pairs, guesses[-1]]
    return guesses
