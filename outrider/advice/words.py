"""Vocabularies of target and draft side by side, from tokenizer files alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Overlap", "Words", "overlap", "words_of_gguf", "words_of_tokenizer"]

_ADDED = (3, 4)  # GGUF's token types of control and user-defined tokens


@dataclass(frozen=True)
class Words:
    """What a tokenizer knows.

    Attributes:
        ids: Token -> id.
        special: bos, eos, pad and unk, by name -> id; None where it has none.
        added: Tokens that were added to the vocabulary -> id.
        chat_template: As it stands in the files; None where there is none.
    """

    ids: dict[str, int]
    special: dict[str, int | None] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass(frozen=True)
class Overlap:
    """How much of two vocabularies is the same.

    Attributes:
        same_ids: Tokens that both know by the same id.
        moved: Tokens that both know, by different ids.
        clashing: Ids that mean one token to the target and another to the draft.
        target_size, draft_size: Tokens that each knows.
        special: Names of special tokens whose ids differ -> (target's, draft's).
    """

    same_ids: int
    moved: int
    clashing: int
    target_size: int
    draft_size: int
    special: dict[str, tuple[int | None, int | None]]

    @property
    def share(self) -> float:
        """Of the target's tokens, those that the draft knows by the same id."""
        return self.same_ids / max(1, self.target_size)

    @property
    def shared_strings(self) -> float:
        """Of the target's tokens, those that the draft knows by any id."""
        return (self.same_ids + self.moved) / max(1, self.target_size)

    @property
    def fits(self) -> bool:
        """Whether the draft can guess by ids alone."""
        return self.clashing == 0


def overlap(target: Words, draft: Words) -> Overlap:
    """Compare two vocabularies."""
    common = target.ids.keys() & draft.ids.keys()
    same = sum(target.ids[token] == draft.ids[token] for token in common)
    theirs = {index: token for token, index in target.ids.items()}
    clashing = sum(theirs.get(index, token) != token for token, index in draft.ids.items())
    names = target.special.keys() | draft.special.keys()
    special = {name: (target.special.get(name), draft.special.get(name)) for name in sorted(names)}
    differing = {name: pair for name, pair in special.items() if pair[0] != pair[1]}
    return Overlap(same, len(common) - same, clashing, len(target.ids), len(draft.ids), differing)


def words_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Words:
    """What a tokenizer of transformers knows."""
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    template: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return Words(tokenizer.get_vocab(), special, dict(added), template)


def words_of_gguf(metadata: dict[str, Any]) -> Words | None:
    """What the tokenizer of a GGUF knows, from its metadata; None where it carries none."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        return None
    ids = {token: index for index, token in enumerate(tokens)}
    spellings = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {name: metadata.get(f"tokenizer.ggml.{spelled}_token_id") for name, spelled in spellings.items()}
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    added = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind in _ADDED}
    return Words(ids, special, added, metadata.get("tokenizer.chat_template"))
