"""A draft model as a user names it, ready to guess for a target: of its vocabulary, or of another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.retokenised import RetokenisedDrafter
from outrider.draft.roomy import RoomyRunner
from outrider.draft.shortlist import frequent_ids
from outrider.draft.token_map import map_tokens
from outrider.draft.translated import TranslatedDrafter
from outrider.draft.tree import TreeShape
from outrider.draft.vocab import check_vocabulary
from outrider.errors import ConfigError, VocabularyMismatchError
from outrider.model.load import LoadedModel, load_model
from outrider.model.runner import TorchRunner
from outrider.setup import check_draft_quantization, optimized, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.config import SpeculationConfig
    from outrider.draft.drafter import Drafter
    from outrider.draft.token_map import TokenMap, Way
    from outrider.kernels.weights import WeightQuantization

__all__ = ["DraftSite", "draft_model", "drafter_over", "tree_settings"]


@dataclass(frozen=True)
class DraftSite:
    """What a drafter is made for.

    Attributes:
        speculation: The settings.
        target: The loaded target.
        runner: Runs it; its cache is not allocated yet.
        num_slots: Rows of the engine, the idle one included.
        dtype, device: Of the draft, as the user named them.
        like: The target's dtype as the user named it: a draft's where no other is asked for.
        scope_of: Says whose text a slot holds; None for nobody's.
        owned: Runners that were made for drafting, to be closed with the engine.
    """

    speculation: SpeculationConfig
    target: LoadedModel
    runner: TorchRunner
    num_slots: int
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    like: torch.dtype | str | None = None
    owned: list[TorchRunner] = field(default_factory=list)
    scope_of: Callable[[int], str | None] | None = None


def draft_model(site: DraftSite) -> Drafter:
    """A model like the target, which is as the target is where nothing else is asked; a model object stays as it is."""
    speculation, target = site.speculation, site.target
    dtype, device = site.dtype, site.device
    if not hasattr(speculation.model, "device"):
        dtype, device = dtype or site.like, device or target.device
    source = speculation.model
    if speculation.draft_vocab_size and not (isinstance(source, str) or hasattr(source, "__fspath__")):
        raise ConfigError(
            "draft_vocab_size would change the model object that was passed in; pass its folder or Hub id instead"
        )
    if isinstance(getattr(source, "loaded", None), LoadedModel):  # another LLM
        check_draft_quantization(speculation.draft_quantization, source, target.device)
        return drafter_over(source.loaded, target, site.owned, speculation.cross_vocabulary)
    where = resolve_device(device, source)
    check_draft_quantization(speculation.draft_quantization, source, where)
    return drafter_over(
        load_model(source, dtype=dtype, device=where), target, site.owned, speculation.cross_vocabulary, speculation
    )


def tree_settings(speculation: SpeculationConfig) -> dict[str, Any]:
    """What a draft that generates needs to know of trees; nothing where chains are drafted, as in mixtures."""
    if speculation.tree is None or len(speculation.methods) > 1:
        return {}
    return {"shape": TreeShape(speculation.branches), "longest": speculation.num_speculative_tokens}


def drafter_over(
    draft: LoadedModel,
    target: LoadedModel,
    owned: list[TorchRunner],
    cross_vocabulary: str = "off",
    speculation: SpeculationConfig | None = None,
    name: str = "draft_model",
) -> Drafter:
    """Give the drafter that a loaded draft makes for a target.

    Args:
        draft: The draft.
        target: Whom it guesses for.
        owned: Its runner is appended here, to be closed with the engine.
        cross_vocabulary: What to do where their vocabularies differ: see `SpeculationConfig`.
        speculation: Settings that change the draft itself; None leaves it as it is.
        name: What statistics call it.

    Raises:
        VocabularyMismatchError: Their vocabularies differ, and guesses may not or cannot cross.
        ConfigError: A setting does not fit the draft.
    """
    token_map: TokenMap | None = None
    size, shortlist = 0, None
    try:
        size = check_vocabulary(target, draft).size
    except VocabularyMismatchError:
        if cross_vocabulary == "off":
            raise
        token_map = map_tokens(target, draft, cast("Way", cross_vocabulary))  # checked with the other settings
    if speculation is not None:
        kind = cast("WeightQuantization | None", speculation.draft_quantization)  # checked with the other settings
        if speculation.draft_vocab_size and token_map is not None:
            raise ConfigError("draft_vocab_size is not possible for a draft of another vocabulary; leave it out")
        if speculation.draft_vocab_size:
            shortlist = _shortened(speculation, target, draft, size)
        on_card = draft.device.type == "cuda"
        draft = optimized(draft, speculation.model, None if on_card else kind)
        runner = TorchRunner(draft, quantization=kind if on_card else None)
    else:
        runner = TorchRunner(draft)
    owned.append(runner)
    if token_map is None:
        sizes = target.vocab_size, min(target.vocab_size, size)
        how: dict[str, Any] = {} if speculation is None else tree_settings(speculation)
        return DraftModelDrafter(runner, *sizes, name, shortlist=shortlist, follows=target.device, **how)
    if speculation is not None and tree_settings(speculation):
        raise ConfigError(f"tree={speculation.tree!r} is not possible for a draft of another vocabulary; leave it out")
    roomy = RoomyRunner(runner, token_map.room)
    if token_map.way == "tokens":
        return TranslatedDrafter(roomy, token_map, name, follows=target.device)
    return RetokenisedDrafter(roomy, token_map, name)


def _shortened(
    speculation: SpeculationConfig, target: LoadedModel, draft: LoadedModel, vocab_size: int
) -> torch.Tensor | None:
    """Cut the draft's head down to its most frequent tokens, in place; give their ids."""
    size, corpus = speculation.draft_vocab_size, speculation.draft_vocab_corpus
    assert size is not None
    if size >= vocab_size:
        return None
    words: Any = draft.tokenizer or target.tokenizer
    ids = frequent_ids(words, size, vocab_size, None if corpus is None else Path(corpus), keep=target.eos_token_ids).to(
        draft.device
    )
    model: Any = draft.model
    whole = model.get_output_embeddings()
    short = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
    short.weight = nn.Parameter(whole.weight[ids].clone(), requires_grad=False)
    if whole.bias is not None:
        short.bias = nn.Parameter(whole.bias[ids].clone(), requires_grad=False)
    model.set_output_embeddings(short.eval())
    return ids
