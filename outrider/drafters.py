"""From what a user names as a draft to a drafter that is ready to guess."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from outrider.config import Method, SpeculationConfig
from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.shortlist import frequent_ids
from outrider.draft.vocab import check_vocabulary
from outrider.errors import CapacityError, ConfigError, OutriderError
from outrider.model.load import LoadedModel, load_model
from outrider.model.runner import TorchRunner
from outrider.setup import check_draft_quantization, optimized, resolve_device

if TYPE_CHECKING:
    from outrider.draft.drafter import Drafter
    from outrider.kernels.weights import WeightQuantization

__all__ = ["LoadedDraft", "load_draft", "make_drafter"]


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model ready to run, and the ids that its head was cut down to, if it was."""

    runner: TorchRunner
    shortlist: torch.Tensor | None = None


def load_draft(
    speculation: SpeculationConfig,
    target: LoadedModel,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    *,
    like: torch.dtype | str | None,
) -> LoadedDraft | None:
    """Load the draft, as the target is where nothing else is asked; a model object stays as it is.

    A draft for which memory does not suffice costs its speed, not the service: a warning, and plain decoding.

    Raises:
        ConfigError: A setting does not fit the draft.
        ModelLoadError: It is missing, broken, or of another vocabulary (and failure is not allowed).
    """
    if speculation.method is not Method.DRAFT_MODEL:
        return None
    if not hasattr(speculation.model, "device"):
        dtype, device = dtype or like, device or target.device
    try:
        return _loaded(speculation, target, dtype, device)
    except torch.OutOfMemoryError as error:
        problem: Exception = error
    except OutriderError as error:
        if not speculation.allow_failure and not isinstance(error, CapacityError):
            raise
        problem = error
    warnings.warn(f"no speculation: the draft could not be used ({problem})", stacklevel=4)
    return None


def _loaded(
    speculation: SpeculationConfig,
    target: LoadedModel,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> LoadedDraft:
    source = speculation.model
    if speculation.draft_vocab_size and not (isinstance(source, str) or hasattr(source, "__fspath__")):
        raise ConfigError(
            "draft_vocab_size would change the model object that was passed in; pass its folder or Hub id instead"
        )
    if isinstance(getattr(source, "loaded", None), LoadedModel):  # another LLM
        check_draft_quantization(speculation.draft_quantization, source, target.device)
        loaded: LoadedModel = source.loaded
        check_vocabulary(target, loaded)
        return LoadedDraft(TorchRunner(loaded))
    where = resolve_device(device, source)
    check_draft_quantization(speculation.draft_quantization, source, where)
    loaded = load_model(source, dtype=dtype, device=where)
    shared = check_vocabulary(target, loaded)
    shortlist = _shortened(speculation, target, loaded, shared.size) if speculation.draft_vocab_size else None
    on_card = loaded.device.type == "cuda"
    kind = cast("WeightQuantization | None", speculation.draft_quantization)  # checked with the other settings
    loaded = optimized(loaded, source, None if on_card else kind)
    return LoadedDraft(TorchRunner(loaded, quantization=kind if on_card else None), shortlist)


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


def make_drafter(speculation: SpeculationConfig, draft: LoadedDraft | None, target: LoadedModel) -> Drafter | None:
    """Give the drafter of sequences that bring none of their own; None where nothing drafts."""
    if speculation.num_speculative_tokens == 0:
        return None
    if speculation.method is Method.NGRAM:
        return NGramDrafter(speculation.prompt_lookup_max, speculation.prompt_lookup_min)
    if draft is None:
        return None
    vocab_size = draft.runner.vocab_size
    return DraftModelDrafter(
        draft.runner,
        target.vocab_size,
        min(target.vocab_size, vocab_size),
        shortlist=draft.shortlist,
        follows=target.device,
    )
