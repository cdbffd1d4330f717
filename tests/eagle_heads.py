"""Tiny EAGLE heads, random or right, written in every published format.

A `TinyHead` knows its tensors by names of these tests; each writer says what its format calls them, and what its config
says. Names and settings are those of the public code that `outrider.model.eagle_files` cites.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tests.heads import write_head
from tests.tiny import tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "CASES",
    "DIM",
    "FORMATS",
    "HIDDEN",
    "LAYERS",
    "VOCAB",
    "TinyHead",
    "narrow",
    "right_first",
    "right_third",
    "target",
    "tiny_head",
    "written",
]

HIDDEN, VOCAB, LAYERS = 64, 320, 6  # of the target
HEADS, KV_HEADS, DIM, INNER = 4, 2, 16, 96


@dataclass(frozen=True)
class TinyHead:
    """A head's tensors and settings.

    Attributes:
        third: Whether it is an EAGLE-3 head.
        tensors: By names of these tests.
        taps: Hidden states of the target that it reads, as transformers numbers them.
        ids: What its ids are in the target's vocabulary; None: the same.
        layer: What its config says of the decoder layer.
        says: What else its config says.
        stretch: By how much its rotary embedding is stretched.
    """

    third: bool
    tensors: dict[str, torch.Tensor]
    taps: tuple[int, ...]
    ids: torch.Tensor | None = None
    layer: dict[str, Any] = field(default_factory=dict)
    says: dict[str, Any] = field(default_factory=dict)
    stretch: float = 1.0

    def but(self, tensors: dict[str, torch.Tensor | None] | None = None, **others: Any) -> TinyHead:
        """The same head with other tensors (None: without it) and settings."""
        changed = {name: one for name, one in (self.tensors | (tensors or {})).items() if one is not None}
        return replace(self, tensors=changed, **others)


def _layer(**others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0,
    } | others  # fmt: skip


def tiny_head(
    third: bool,
    *,
    hidden: int = HIDDEN,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    taps: Sequence[int] | None = None,
    ids: torch.Tensor | None = None,
    extra: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    **settings: Any,
) -> TinyHead:
    """A random head.

    Args:
        third: EAGLE-3 rather than EAGLE-1.
        hidden: Its width.
        heads: Attention heads, and heads of keys.
        taps: Hidden states that it reads.
        ids: Its short vocabulary.
        extra: Shapes of more tensors.
        seed: Of its numbers.
        settings: Of the `TinyHead`; those of `layer` are added to the usual ones.
    """
    taps = tuple(taps or ((2, LAYERS // 2, LAYERS - 3) if third else (LAYERS,)))
    taken = 2 * hidden if third else hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, len(taps) * HIDDEN if third else 2 * hidden),
        "q": (heads[0] * DIM, taken), "k": (heads[1] * DIM, taken), "v": (heads[1] * DIM, taken),
        "o": (hidden, heads[0] * DIM), "gate": (INNER, hidden), "up": (INNER, hidden), "down": (hidden, INNER),
        "post_norm": (hidden,),
    }  # fmt: skip
    if third:
        shapes |= {"input_norm": (hidden,), "hidden_norm": (hidden,), "norm": (hidden,)}
        shapes |= {"head": (VOCAB if ids is None else len(ids), hidden)}
    tensors = {}
    for number, (name, shape) in enumerate((shapes | (extra or {})).items()):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + number))
        tensors[name] = 1 + 0.1 * noise if "norm" in name else noise * 1.5 * shape[-1] ** -0.5
    sizes = {"hidden_size": hidden, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    layer = _layer(**sizes) | settings.pop("layer", {})
    return TinyHead(third, tensors, taps, ids, layer, **settings)


def narrow(step: int = 3) -> torch.Tensor:
    """A short vocabulary: some of the target's ids, rising."""
    return torch.arange(1, VOCAB, step)


def right_first(model: Any) -> TinyHead:
    """An EAGLE-1 head that knows a cycle target: its state is the last token's embedding, whatever came before."""
    head = tiny_head(False)
    tensors = {name: torch.zeros_like(one) for name, one in head.tensors.items()}
    tensors["fc"][:, :HIDDEN] = torch.eye(HIDDEN)
    _even(model)
    return head.but(tensors)


def right_third(model: Any, ids: torch.Tensor | None = None) -> TinyHead:
    """The same as an EAGLE-3 head: it attends to its own place alone, by keys that say nothing but where they are.

    What it fed back is in its residual, so the value there takes it away again.
    """
    head = tiny_head(True, heads=(HEADS, HEADS), ids=ids, extra={"q_bias": (HIDDEN,), "k_bias": (HIDDEN,)})
    tensors = {name: torch.zeros_like(one) for name, one in head.tensors.items()}
    tensors |= {"q_bias": torch.full((HIDDEN,), 30.0), "k_bias": torch.full((HIDDEN,), 30.0)}
    tensors["v"][:] = torch.cat([torch.eye(HIDDEN), -torch.eye(HIDDEN)], 1)
    tensors["o"][:] = torch.eye(HIDDEN)
    tensors |= {name: torch.ones(HIDDEN) for name in ("input_norm", "hidden_norm", "norm")}
    _even(model)
    matrix = model.get_output_embeddings().weight.detach()
    tensors["head"] = matrix.clone() if ids is None else matrix[ids]
    return head.but(tensors)


def _even(model: Any) -> None:
    """Give all of a cycle target's embeddings the same length, so that norms leave them as they are."""
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_((table.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


# --- formats

_PARTS = {
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias",
    "o": "self_attn.o_proj.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
    "input_norm": "input_layernorm.weight", "hidden_norm": "hidden_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
}  # fmt: skip
_OTHERS = {
    "fc": "fc.weight", "fc_bias": "fc.bias", "norm": "norm.weight", "head": "lm_head.weight",
    "embedding": "embed_tokens.weight", "taps_norm": "input_norm.weight",
}  # fmt: skip
_SPECULATORS = {
    "fc": "fusion_fc.weight", "fc_bias": "fusion_fc.bias", "embedding_norm": "embedding_layernorm.weight",
    "norm": "pre_lm_head_layernorm.weight",
}  # fmt: skip


def _named(head: TinyHead, layer: str, others: dict[str, str]) -> dict[str, torch.Tensor]:
    made = {}
    for name, one in head.tensors.items():
        if name == "tap_norms":
            made |= {f"fc_norm.{place}.weight": weight for place, weight in enumerate(one)}
        else:
            made[layer + _PARTS[name] if name in _PARTS else others[name]] = one
    return made


def _maps(head: TinyHead) -> dict[str, torch.Tensor]:
    if head.ids is None:
        return {}
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[head.ids] = True
    return {"d2t": head.ids - torch.arange(len(head.ids)), "t2d": known}


def _authors(folder: Path, head: TinyHead) -> Path:
    """EAGLE-1 and 2 by their authors: nothing in the config says what it is."""
    config = head.layer | {"architectures": ["LlamaForCausalLM"], "bias": "fc_bias" in head.tensors} | head.says
    return write_head(folder, config, _named(head, "layers.0.", _OTHERS), "model.safetensors")


def _third(folder: Path, head: TinyHead) -> Path:
    """EAGLE-3 by its authors, SpecForge and SGLang; layers are named by their output, in `eagle_config`."""
    config = head.layer | {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    config |= {"draft_vocab_size": len(head.tensors.get("head", torch.empty(VOCAB)))}
    if head.taps != (2, LAYERS // 2, LAYERS - 3):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]}
    return write_head(folder, config | head.says, _named(head, "midlayer.", _OTHERS) | _maps(head), "model.safetensors")


def _vllm(folder: Path, head: TinyHead) -> Path:
    """EAGLE-3 with the names that vLLM's trainers use; layers are named by their input, at the config's top."""
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": one
        for name, one in _named(head, "layers.0.", _OTHERS).items()
    }
    config = head.layer | {"architectures": ["Eagle3LlamaForCausalLM"]}
    config |= {"eagle_aux_hidden_state_layer_ids": list(head.taps)} | head.says
    return write_head(folder, config, tensors | _maps(head), "model.safetensors")


def _speculators(folder: Path, head: TinyHead) -> Path:
    """speculators' JSON format, of either kind."""
    kind = "eagle3" if head.third else "eagle"
    config = {
        "speculators_model_type": kind, "transformer_layer_config": head.layer, "model_type": "speculators",
        "architectures": ["Eagle3DraftModel" if head.third else "EagleSpeculator"],
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "a/target"}},
    }  # fmt: skip
    if head.third:
        config |= {"eagle_aux_hidden_state_layer_ids": list(head.taps), "draft_vocab_size": len(head.tensors["head"])}
        tensors = _named(head, "layers.0.", _OTHERS) | _maps(head)
    else:
        config |= {"fusion_bias": "fc_bias" in head.tensors, "layernorms": "norm" in head.tensors}
        tensors = _named(head, "transformer.", _OTHERS | _SPECULATORS)
    return write_head(folder, config | head.says, tensors, "model.safetensors")


FORMATS: dict[str, Callable[[Path, TinyHead], Path]] = {
    "authors": _authors, "eagle3": _third, "vllm": _vllm, "speculators": _speculators
}  # fmt: skip


# --- heads to be tried

EXTRA: dict[str, tuple[int, ...]] = {"embedding_norm": (64,), "norm": (64,), "input_norm": (64,), "fc_bias": (64,)}
OWN: dict[str, tuple[int, ...]] = {"embedding": (320, 48)}
CASES: dict[str, tuple[str, TinyHead]] = {
    "EAGLE-1": ("authors", tiny_head(False)),
    "EAGLE-1 with a bias and biased attention": (
        "authors",
        tiny_head(False, extra={"fc_bias": (64,), "q_bias": (64,), "k_bias": (32,), "v_bias": (32,)}),
    ),
    "EAGLE-1 stretched": (
        "authors",
        tiny_head(False, stretch=4.0, layer={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ),
    "EAGLE-3, short vocabulary": ("eagle3", tiny_head(True, ids=narrow())),
    "EAGLE-3, narrower than its target": (
        "eagle3",
        tiny_head(True, hidden=48, ids=narrow(), extra=OWN, says={"target_hidden_size": 64}),
    ),
    "EAGLE-3, layers by their output": ("eagle3", tiny_head(True, taps=(1, 4, 6), ids=narrow())),
    "EAGLE-3, last hidden state": (
        "eagle3",
        tiny_head(True, taps=(LAYERS,), says={"eagle_config": {"use_aux_hidden_state": False}}).but({"fc": None}),
    ),
    "EAGLE-3.1, a norm a layer": (
        "eagle3",
        tiny_head(True, ids=narrow(), extra={"tap_norms": (3, 64)}, says={"fc_norm": True, "norm_output": True}),
    ),
    "EAGLE-3 as vLLM names it": ("vllm", tiny_head(True, taps=(0, 3, 5), ids=narrow(), extra={"embedding": (320, 64)})),
    "EAGLE-3, two hidden states, a window": (
        "vllm",
        tiny_head(True, taps=(1, 5), layer={"layer_types": ["sliding_attention"], "sliding_window": 7}),
    ),
    "speculators EAGLE": ("speculators", tiny_head(False)),
    "speculators EAGLE with norms": ("speculators", tiny_head(False, extra=EXTRA)),
    "speculators EAGLE-3": ("speculators", tiny_head(True, ids=narrow(), says={"norm_before_residual": False})),
    "speculators EAGLE-3, normed": (
        "speculators",
        tiny_head(
            True, ids=narrow(), extra={"taps_norm": (192,), "q_norm": (DIM,), "k_norm": (DIM,)},
            says={"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        ),
    ),
}  # fmt: skip


@functools.cache
def target() -> Any:
    return tiny_target(num_hidden_layers=LAYERS)


def written(case: str, folder: Path) -> Path:
    kind, head = CASES[case]
    return FORMATS[kind](folder, head)
