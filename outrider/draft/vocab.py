"""Do target and draft mean the same string by the same token id? Asked once, at load.

Family members pad their vocabularies to different sizes; that is fine. Different strings behind one id are not: such a
draft would never be agreed with, and nobody would be told why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HasVocabulary", "SharedVocabulary", "check_vocabulary"]

logger = logging.getLogger(__name__)

_REMEDY = (
    "use a draft of the target's own family (trained with the same tokenizer), a drafter without a model, or "
    "cross_vocabulary='auto' to let guesses cross between the two"
)
_SPECIALS = ("bos_token_id", "eos_token_id")


class HasVocabulary(Protocol):
    """What the check needs to know of a model; `outrider.model.load.LoadedModel` has it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None where only ids are known."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""

    @property
    def name(self) -> str:
        """What to call it in a message."""


@dataclass(frozen=True)
class SharedVocabulary:
    """What target and draft can say to each other.

    Ids at or above `size` must never be proposed. `padded` says that the two heads differ in their number of rows.
    `notes` names differences that do no harm to exactness: special ids used differently.
    """

    size: int
    padded: bool
    notes: tuple[str, ...] = ()


def check_vocabulary(target: HasVocabulary, draft: HasVocabulary) -> SharedVocabulary:
    """Compare id by id below the smaller head; without both tokenizers, only the sizes are known.

    Raises: VocabularyMismatchError naming the first id that means two things, both strings, and the remedy.
    """
    size = min(target.vocab_size, draft.vocab_size)
    padded = target.vocab_size != draft.vocab_size
    if target.tokenizer is None or draft.tokenizer is None or target.tokenizer is draft.tokenizer:
        return SharedVocabulary(size, padded)
    theirs, ours = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    notes = _special_differences(target.tokenizer, draft.tokenizer)
    if theirs != ours:  # one dict comparison settles the usual case
        _compare(target, draft, _by_id(theirs, size), _by_id(ours, size), notes)
    if notes:
        logger.warning("draft %s and target %s share a vocabulary, but %s", draft.name, target.name, "; ".join(notes))
    return SharedVocabulary(size, padded, notes)


def _by_id(vocabulary: dict[str, int], size: int) -> list[str | None]:
    """[size] token strings; None where the tokenizer knows no such id."""
    tokens: list[str | None] = [None] * size
    for token, index in vocabulary.items():
        if 0 <= index < size:
            tokens[index] = token
    return tokens


def _compare(
    target: HasVocabulary,
    draft: HasVocabulary,
    theirs: list[str | None],
    ours: list[str | None],
    notes: tuple[str, ...],
) -> None:
    pairs = enumerate(zip(theirs, ours, strict=True))
    # An id that only one of them knows (a newer member's extra special token) can be guessed and refused, no more.
    differing = [index for index, (one, other) in pairs if one is not None and other is not None and one != other]
    if not differing:
        return
    first = differing[0]
    message = (
        f"draft {draft.name} and target {target.name} have different vocabularies: token id {first} is "
        f"{theirs[first]!r} to the target and {ours[first]!r} to the draft ({len(differing)} of "
        f"{len(theirs)} ids differ)"
    )
    raise VocabularyMismatchError("; ".join((message, *notes, _REMEDY)))


def _special_differences(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> tuple[str, ...]:
    notes = []
    for kind in _SPECIALS:
        one, other = getattr(target, kind, None), getattr(draft, kind, None)
        if one != other:
            notes.append(f"their {kind.removesuffix('_token_id')} ids differ (target {one}, draft {other})")
    return tuple(notes)
