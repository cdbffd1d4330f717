"""From what a user names to a drafter that is ready to guess: one line a method in `MAKERS`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from outrider.config import Method, SpeculationConfig
from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.early_exit import best_exit, best_skips, kept_layers, own_texts
from outrider.draft.mixture import MixtureDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.shortlist import frequent_ids
from outrider.draft.suffix import SuffixDrafter
from outrider.draft.vocab import check_vocabulary
from outrider.errors import CapacityError, ConfigError, OutriderError
from outrider.model.load import LoadedModel, load_model
from outrider.model.runner import TorchRunner
from outrider.model.subset import LayerSubsetRunner
from outrider.samples import SAMPLE_PROMPTS
from outrider.setup import check_draft_quantization, optimized, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.draft.drafter import Drafter
    from outrider.kernels.weights import WeightQuantization

__all__ = ["DraftSite", "make_drafter"]

SUFFIX_BRANCHES = 3  # ways on after each guess, where lookup guesses trees


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


def make_drafter(site: DraftSite) -> Drafter | None:
    """Give the drafter of sequences that bring none of their own; None where nothing drafts.

    A draft for which memory does not suffice costs its speed, not the service: a warning, and plain decoding (or what
    else drafts in a mixture).

    Raises:
        ConfigError: A setting does not fit the draft.
        ModelLoadError: It is missing, broken, or does not fit the target (and failure is not allowed).
    """
    speculation = site.speculation
    if speculation.num_speculative_tokens == 0:
        return None
    made = [drafter for method in speculation.methods if (drafter := _made(method, site)) is not None]
    if len(made) < 2:
        return made[0] if made else None
    return MixtureDrafter(made, site.num_slots, site.target.device, merge=speculation.tree is not None)


def _made(method: Method, site: DraftSite) -> Drafter | None:
    try:
        return MAKERS[method](site)
    except torch.OutOfMemoryError as error:
        problem: Exception = error
    except OutriderError as error:
        unusable = method.takes_model and site.speculation.allow_failure
        if not unusable and not (method.takes_model and isinstance(error, CapacityError)):
            raise
        problem = error
    warnings.warn(f"no speculation: the draft could not be used ({problem})", stacklevel=6)
    return None


# --- a draft model


def _draft_model(site: DraftSite) -> Drafter:
    """A model like the target, which is as the target is where nothing else is asked; a model object stays as it is."""
    speculation, target = site.speculation, site.target
    dtype, device = site.dtype, site.device
    if not hasattr(speculation.model, "device"):
        dtype, device = dtype or site.like, device or target.device
    runner, shortlist = _loaded(speculation, target, dtype, device)
    site.owned.append(runner)
    return DraftModelDrafter(
        runner,
        target.vocab_size,
        min(target.vocab_size, runner.vocab_size),
        shortlist=shortlist,
        follows=target.device,
    )


def _loaded(
    speculation: SpeculationConfig,
    target: LoadedModel,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> tuple[TorchRunner, torch.Tensor | None]:
    source = speculation.model
    if speculation.draft_vocab_size and not (isinstance(source, str) or hasattr(source, "__fspath__")):
        raise ConfigError(
            "draft_vocab_size would change the model object that was passed in; pass its folder or Hub id instead"
        )
    if isinstance(getattr(source, "loaded", None), LoadedModel):  # another LLM
        check_draft_quantization(speculation.draft_quantization, source, target.device)
        loaded: LoadedModel = source.loaded
        check_vocabulary(target, loaded)
        return TorchRunner(loaded), None
    where = resolve_device(device, source)
    check_draft_quantization(speculation.draft_quantization, source, where)
    loaded = load_model(source, dtype=dtype, device=where)
    shared = check_vocabulary(target, loaded)
    shortlist = _shortened(speculation, target, loaded, shared.size) if speculation.draft_vocab_size else None
    on_card = loaded.device.type == "cuda"
    kind = cast("WeightQuantization | None", speculation.draft_quantization)  # checked with the other settings
    loaded = optimized(loaded, source, None if on_card else kind)
    return TorchRunner(loaded, quantization=kind if on_card else None), shortlist


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


# --- others


def _ngram(site: DraftSite) -> Drafter:
    return NGramDrafter(site.speculation.prompt_lookup_max, site.speculation.prompt_lookup_min)


def _suffix(site: DraftSite) -> Drafter:
    speculation = site.speculation
    tokenizer: Any = site.target.tokenizer
    if speculation.suffix_corpus is not None and tokenizer is None:
        raise ConfigError("suffix_corpus needs a tokenizer, and the target has none; leave it out")
    return SuffixDrafter(
        branches=SUFFIX_BRANCHES if speculation.tree is not None and len(speculation.methods) == 1 else 1,
        sharing=speculation.suffix_sharing,
        scope_of=site.scope_of,
        corpus=speculation.suffix_corpus,
        tokenize=lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
    )


def _early_exit(site: DraftSite) -> Drafter:
    """The target's own layers: those that were named, or those that the search finds on sample texts."""
    speculation, runner, num_layers = site.speculation, site.runner, len(site.runner.layers)
    if speculation.exit_layer is not None or isinstance(speculation.skip_layers, tuple):
        skips = speculation.skip_layers if isinstance(speculation.skip_layers, tuple) else None
        keep = kept_layers(num_layers, speculation.exit_layer, skips)
    else:
        search = best_skips if speculation.skip_layers == "auto" else best_exit
        keep = search(runner, own_texts(runner, _sample_ids(site)), speculation.num_speculative_tokens).keep
    size = runner.vocab_size
    return DraftModelDrafter(LayerSubsetRunner(runner, keep), size, size, "early_exit", own_cache=False)


def _sample_ids(site: DraftSite) -> list[list[int]]:
    """Prompts to try drafts on; without a tokenizer single tokens, which say less."""
    tokenizer = site.target.tokenizer
    if tokenizer is None:
        return [[token] for token in range(1, min(4, site.target.vocab_size))]
    return [list(tokenizer(text, verbose=False).input_ids) for text in SAMPLE_PROMPTS]


MAKERS: dict[Method, Callable[[DraftSite], Drafter | None]] = {
    Method.NONE: lambda _: None,
    Method.NGRAM: _ngram,
    Method.SUFFIX: _suffix,
    Method.DRAFT_MODEL: _draft_model,
    Method.EARLY_EXIT: _early_exit,
}
