"""What tests of trained heads share: a target whose greedy text is known, and an engine that drafts with a head."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.llm import LLM
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outrider.draft.drafter import Drafter
    from outrider.drafters import DraftSite

__all__ = ["NoLooking", "acceptance", "cycle_target", "drafting", "following", "write_head"]

NUM_WORDS = 200  # ids that a cycle target speaks


def following(token: int, steps: int = 1) -> int:
    """What a cycle target says `steps` places after `token`."""
    return (token + 7 * steps) % NUM_WORDS


def cycle_target(*, hidden: int = 64, sharpness: float = 40.0, **overrides: Any) -> Any:
    """A target whose layers add nothing: after token t it says `following(t)`, more surely the sharper it is."""
    model = tiny_target(hidden_size=hidden, **overrides)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)))
        model.model.norm.weight.fill_(1.0)
        head = model.get_output_embeddings().weight
        head.zero_()
        words = torch.arange(NUM_WORDS)
        head[following(words)] = torch.nn.functional.normalize(embedding[:NUM_WORDS]) * sharpness / hidden**0.5  # type: ignore[index, call-overload, arg-type]
    return model


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> Path:
    """Write a head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: one.contiguous().clone() for key, one in tensors.items()}, folder / name)
    return folder


def drafting(model: Any, make: Callable[[DraftSite], Drafter], *, lookahead: int = 4, **settings: Any) -> LLM:
    """Give an `LLM` whose drafter `make` makes, where LLM makes its own."""

    class Headed(LLM):
        def _drafter(self, site: DraftSite) -> Drafter | None:
            return make(site)

    settings = {
        "tokenizer": byte_tokenizer(),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
    } | settings
    return Headed(model, method="ngram", num_speculative_tokens=lookahead, **settings)


def acceptance(outputs: Any) -> float:
    """Share of the guesses that were accepted; guesses must have been made."""
    drafted = sum(one.stats.drafted for one in outputs)
    assert drafted, "nothing was guessed"
    return sum(one.stats.accepted for one in outputs) / drafted  # type: ignore[no-any-return]


class NoLooking(TorchDispatchMode):
    """Refuse whatever would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host looks at a value"
        assert func is not torch.ops.aten.nonzero.default, "a shape depends on values"
        return func(*args, **(kwargs or {}))
