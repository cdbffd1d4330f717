"""The sizes of models: those of published ones by name, or given one by one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.errors import ConfigError

__all__ = ["SHAPES", "Shape", "parse_shape"]

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SPELLINGS = "hidden=4096,layers=32,heads=32,kv_heads=8,head_dim=128,intermediate=14336,vocab=128256[,type=qwen3]"


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; what is not said is as Llama 3 has it.

    Attributes:
        type: "llama" or "qwen3" (the same with a norm on each head's query and key).
        positions: Longest context that the config states.
        rope_factor: Stretch of Llama 3.1's rope scaling; None for none.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    type: str = "llama"
    positions: int = 131072
    eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.vocab < 2:
            raise ConfigError(f"vocab must be 2 or more, got {self.vocab}")
        if self.type not in _CLASSES:
            raise ConfigError(f"type must be one of {', '.join(_CLASSES)}, got {self.type!r}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}), and head_dim "
                f"({self.head_dim}) even"
            )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Give every weight's name and shape, in the order of the passes through them."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        if self.type == "qwen3":
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for place in range(self.layers):
            found |= {f"model.layers.{place}.{name}.weight": shape for name, shape in layer.items()}
        return found | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def config(self, dtype: str) -> dict[str, Any]:
        """Give the checkpoint's config.json, spelled as published ones are. No token ends a text."""
        scaling = None if self.rope_factor is None else {"factor": self.rope_factor, **_LLAMA3_ROPE}
        return {
            "architectures": [_CLASSES[self.type]],
            "model_type": self.type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": dtype,
        }

    def with_vocab(self, vocab: int) -> Shape:
        """Give the same sizes with another vocabulary."""
        return replace(self, vocab=vocab)

    def record(self) -> dict[str, Any]:
        """Give it as JSON holds it; ``Shape(**record)`` reads it back."""
        return asdict(self)


_LLAMA3: dict[str, Any] = {"kv_heads": 8, "vocab": 128256}
_QWEN3: dict[str, Any] = {
    "type": "qwen3", "kv_heads": 8, "head_dim": 128, "vocab": 151936, "positions": 40960, "eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip

SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(4096, 32, 32, head_dim=128, intermediate=14336, rope_factor=8.0, **_LLAMA3),
    "llama-3.1-70b": Shape(8192, 80, 64, head_dim=128, intermediate=28672, rope_factor=8.0, **_LLAMA3),
    "llama-3.2-1b": Shape(2048, 16, 32, head_dim=64, intermediate=8192, rope_factor=32.0, **_LLAMA3),
    "qwen3-8b": Shape(4096, 36, 32, intermediate=12288, **_QWEN3),
    "qwen3-0.6b": Shape(1024, 28, 16, intermediate=3072, **_QWEN3),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512, positions=16384, rope_theta=10000.0),
}


def parse_shape(text: str | Shape, vocab: int | None = None) -> Shape:
    """Read a name such as "llama-3.1-8b", or sizes such as "hidden=64,layers=2,heads=4,intermediate=128,vocab=512".

    kv_heads is heads where not given, head_dim is hidden / heads. `vocab` takes the place of the shape's own.

    Raises:
        ConfigError: Neither; the message lists the known names and how sizes are spelled.
    """
    if isinstance(text, Shape):
        shape = text
    elif text in SHAPES:
        shape = SHAPES[text]
    elif "=" in text:
        shape = _from_sizes(text, vocab)
    else:
        raise ConfigError(f"there is no shape {text!r}; known are {', '.join(SHAPES)}, or give the sizes: {_SPELLINGS}")
    return shape if vocab is None else shape.with_vocab(vocab)


def _from_sizes(text: str, vocab: int | None) -> Shape:
    given: dict[str, Any] = {} if vocab is None else {"vocab": vocab}
    known = {"hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "type", "positions"}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in known or not (value.isdecimal() or name == "type"):
            raise ConfigError(f"{part.strip()!r} is no size; sizes are spelled {_SPELLINGS}")
        given[name] = value if name == "type" else int(value)
    missing = [name for name in ("hidden", "layers", "heads", "intermediate", "vocab") if name not in given]
    if missing:
        raise ConfigError(f"the sizes {text!r} lack {', '.join(missing)}; sizes are spelled {_SPELLINGS}")
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("head_dim", given["hidden"] // max(1, given["heads"]))
    return Shape(**given)
