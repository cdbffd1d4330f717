"""From what a user names to a drafter that is ready to guess: one line a method in `MAKERS`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import Method
from outrider.draft.dflash import BlockDrafter
from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.early_exit import best_exit, best_skips, kept_layers, own_texts
from outrider.draft.fixed_tree import PUBLISHED_TREE, widest_paths
from outrider.draft.medusa import MedusaDrafter
from outrider.draft.mixture import MixtureDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.draft_models import DraftSite, draft_model, tree_settings
from outrider.errors import CapacityError, ConfigError, OutriderError
from outrider.model.dflash_files import load_block_draft
from outrider.model.eagle_files import load_eagle
from outrider.model.features import last_hidden_tap
from outrider.model.medusa_heads import load_medusa
from outrider.model.mtp import load_mtp
from outrider.model.subset import LayerSubsetRunner
from outrider.progress import counted
from outrider.samples import SAMPLE_PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.config import SpeculationConfig
    from outrider.draft.drafter import Drafter
    from outrider.model.eagle_head import EagleHead
    from outrider.model.mtp import MtpHead

__all__ = ["MAKERS", "make_drafter"]

BLOCK_TREE = (4, 3, 2, 2, 1, 1)  # guesses after each, where a block drafter makes a tree
SUFFIX_BRANCHES = 3  # ways on after each guess, where lookup guesses trees


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


def _medusa(site: DraftSite) -> Drafter:
    heads = load_medusa(site.speculation.model, site.target)
    site.runner.tap(last_hidden_tap(site.target))
    return MedusaDrafter(heads, _paths(site.speculation, PUBLISHED_TREE, heads.num_heads))


def _dflash(site: DraftSite) -> Drafter:
    network = load_block_draft(site.speculation.model, site.target)
    site.runner.tap(network.tap)
    return BlockDrafter(network, _paths(site.speculation, widest_paths(BLOCK_TREE), network.settings.num_guesses))


def _paths(
    speculation: SpeculationConfig, usual: tuple[tuple[int, ...], ...], depth: int
) -> tuple[tuple[int, ...], ...] | None:
    """The tree of heads that guess all places at once: as named, or the usual one as deep as they reach."""
    shape = tree_settings(speculation).get("shape")
    if shape is None:
        return None
    return widest_paths(shape.branches) if shape.branches else tuple(path for path in usual if len(path) <= depth)


def _mtp(site: DraftSite) -> Drafter:
    return _over_head(load_mtp(site.target), site, "mtp")


def _eagle(site: DraftSite) -> Drafter:
    return _over_head(load_eagle(site.speculation.model, site.target), site, "eagle")


def _over_head(head: EagleHead | MtpHead, site: DraftSite, name: str) -> Drafter:
    site.runner.tap(head.tap)
    shape = tree_settings(site.speculation).get("shape")
    return EagleDrafter(head, site.speculation.num_speculative_tokens, shape, name)


def _early_exit(site: DraftSite) -> Drafter:
    """The target's own layers: those that were named, or those that the search finds on sample texts."""
    speculation, runner, num_layers = site.speculation, site.runner, len(site.runner.layers)
    if speculation.exit_layer is not None or isinstance(speculation.skip_layers, tuple):
        skips = speculation.skip_layers if isinstance(speculation.skip_layers, tuple) else None
        keep = kept_layers(num_layers, speculation.exit_layer, skips)
    else:
        search = best_skips if speculation.skip_layers == "auto" else best_exit
        texts = own_texts(runner, counted(_sample_ids(site), "writing sample texts for early exit"))
        keep = search(runner, texts, speculation.num_speculative_tokens).keep
    size = runner.vocab_size
    how = tree_settings(speculation)
    return DraftModelDrafter(LayerSubsetRunner(runner, keep), size, size, "early_exit", own_cache=False, **how)


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
    Method.DRAFT_MODEL: draft_model,
    Method.EARLY_EXIT: _early_exit,
    Method.EAGLE: _eagle,
    Method.MEDUSA: _medusa,
    Method.DFLASH: _dflash,
    Method.MTP: _mtp,
}
