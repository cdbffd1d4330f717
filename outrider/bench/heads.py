"""Synthetic heads of real sizes: random weights in published formats, to measure what drafting with them costs.

Nothing is learned: guesses are right by luck alone, so of a run with such heads the seconds count, not the tokens.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.shards import SHARD_BYTES, Weight, normal, write_weights
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.bench.shapes import Shape

__all__ = ["EAGLE3_VOCAB", "MEDUSA_HEADS", "eagle3_tensors", "medusa_tensors", "write_eagle3", "write_medusa"]

EAGLE3_VOCAB = 32000  # ids that published EAGLE-3 heads guess
EAGLE3_LAYERS = 3  # hidden states that they read
EAGLE3_POSITIONS = 2048  # that they were trained for
MEDUSA_HEADS = 5
MEDUSA_FILE = "medusa_lm_head.safetensors"


def eagle3_tensors(target: Shape, draft_vocab: int = EAGLE3_VOCAB) -> dict[str, tuple[int, ...]]:
    """Name and shape of each float tensor of an EAGLE-3 head for `target`, as its authors store it (2503.01840).

    Raises:
        ConfigError: The target has fewer ids, or too few layers for the three that such heads read.
    """
    if not 1 <= draft_vocab <= target.vocab:
        raise ConfigError(f"draft_vocab must be in [1, {target.vocab}], the target's ids, got {draft_vocab}")
    if target.layers < 5:  # the inputs of layers 2, n // 2 and n - 3
        raise ConfigError(
            f"an EAGLE-3 head reads three layers of a target of 5 or more, but this one has {target.layers}"
        )
    hidden, query, keys = target.hidden, target.heads * target.head_dim, target.kv_heads * target.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "hidden_norm": (hidden,),
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (target.intermediate, hidden),
        "mlp.up_proj": (target.intermediate, hidden),
        "mlp.down_proj": (hidden, target.intermediate),
    }
    found = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    found |= {"fc.weight": (hidden, EAGLE3_LAYERS * hidden), "norm.weight": (hidden,)}
    return found | {"lm_head.weight": (draft_vocab, hidden)}


def medusa_tensors(target: Shape, num_heads: int = MEDUSA_HEADS, num_layers: int = 1) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of Medusa heads for `target`, as their authors store them (2401.10774)."""
    found: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = (target.hidden, target.hidden)
            found[f"{head}.{layer}.linear.bias"] = (target.hidden,)
        found[f"{head}.{num_layers}.weight"] = (target.vocab, target.hidden)
    return found


def write_eagle3(
    folder: Path,
    target: Shape,
    *,
    draft_vocab: int = EAGLE3_VOCAB,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Path:
    """Write an EAGLE-3 head of random weights for `target`, and give its folder.

    Its ids are spread evenly over the target's. Weights are drawn on `device`. Files of the same names are replaced;
    config.json comes last, so that a folder that has one is whole.

    Raises:
        ConfigError: `draft_vocab` or `target` does not go with such a head.
    """
    shapes, place = eagle3_tensors(target, draft_vocab), torch.device(device)
    ids = torch.arange(draft_vocab) * target.vocab // draft_vocab
    known = torch.zeros(target.vocab, dtype=torch.bool)
    known[ids] = True
    distances = ids - torch.arange(draft_vocab)
    weights = [
        Weight("d2t", (draft_vocab,), torch.int64, lambda start, stop: distances[start:stop]),  # wide numbers first:
        *_random(shapes, f"eagle3/{seed}", dtype, place),  # then all of them lie aligned
        Weight("t2d", (target.vocab,), torch.bool, lambda start, stop: known[start:stop]),
    ]
    config = target.config(str(dtype).removeprefix("torch.")) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": min(EAGLE3_POSITIONS, target.positions),
        "rope_scaling": None,
    }
    return _written(folder, weights, config)


def write_medusa(
    folder: Path,
    target: Shape,
    *,
    num_heads: int = MEDUSA_HEADS,
    num_layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Path:
    """Write Medusa heads of random weights for `target`, each with a matrix of its own to the vocabulary.

    The rest is as in `write_eagle3`.
    """
    shapes = medusa_tensors(target, num_heads, num_layers)
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "hidden_size": target.hidden,
        "vocab_size": target.vocab,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return _written(folder, _random(shapes, f"medusa/{seed}", dtype, torch.device(device)), config, MEDUSA_FILE)


def _random(shapes: dict[str, tuple[int, ...]], seed: str, dtype: torch.dtype, device: torch.device) -> list[Weight]:
    """Norms that change nothing, and matrices that keep a vector about as long as it was."""

    def weight(name: str, shape: tuple[int, ...]) -> Weight:
        def piece(start: int, stop: int) -> torch.Tensor:
            if len(shape) == 1:
                return torch.full((stop - start,), float("norm" in name), dtype=dtype, device=device)
            rows = normal(f"{seed}/{name}/{start}", (stop - start, shape[1]), dtype, device)
            return rows.mul_(1 / math.sqrt(shape[1]))

        return Weight(name, shape, dtype, piece)

    return [weight(name, shape) for name, shape in shapes.items()]


def _written(folder: Path, weights: list[Weight], config: dict[str, Any], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.unlink(missing_ok=True)
    total = sum(weight.num_bytes for weight in weights)
    # Whatever their size, heads are published as one file.
    write_weights(folder, weights, lambda _: None, shard_bytes=max(SHARD_BYTES, total))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # whoever goes on in this process finds the card as it was
    (folder / "model.safetensors").rename(folder / name)
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder
