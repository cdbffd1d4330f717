"""Which tokens of two vocabularies mean the same bytes, and how the one's tokens are spelled in the other.

A draft with another tokenizer can still guess: only the proposal passes between the two vocabularies, so under any
verification the text stays the target's. Two ways lead across (Timor et al. 2025, arXiv 2502.05202):

- by *tokens* (their TLI): each token of the text is put into the draft's, and the draft's scores are moved to the
  target's ids, all but the shared tokens ruled out. Guesses keep their probabilities, and share the target's noise.
- by *text* (their SLEM; transformers' universal assisted generation): the text is encoded anew for the draft, and what
  the draft writes is encoded for the target. Needs no shared token, but the host, and guesses count as certainties.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from outrider.draft.spelling import Speller
from outrider.errors import ConfigError, VocabularyMismatchError

if TYPE_CHECKING:
    from outrider.draft.vocab import HasVocabulary

__all__ = ["ENOUGH", "LONGEST_SPELLING", "SAMPLE", "Overlap", "TokenMap", "Way", "map_tokens"]

logger = logging.getLogger(__name__)

Way = Literal["auto", "tokens", "text"]
LONGEST_SPELLING = 12  # draft tokens for one of the target's; of the few longer ones the draft sees the end
# Of a text's tokens, in either vocabulary, the share that must be had by both for guesses to cross by tokens. At 0.87
# (Qwen 2.5 0.5B, drafted by SmolLM2) tokens won where text was sampled, and text where it was greedy.
ENOUGH = 0.85
POOR = 0.5
MARGIN = 1.25  # of the room in the cache over what the sample text takes
MOST_ROOM = 8  # draft tokens a target token that the draft's cache is made for

# What a model may be asked to write, a little of each: how often tokens come is what counts, not how many there are.
SAMPLE = """The station was closed for three days, so they walked along the river instead. "We should have left \
earlier," she said, but nobody was in a hurry. By the evening most of the houses in the valley could be seen, and the \
price of a room had fallen to 45 euros. Here is how to do it in two steps:

1. Heat the oven to 180 degrees, then mix the flour with 250 g of butter.
2. Let it rest; it shouldn't take longer than an hour.

```python
def mean(values: list[float], *, default: float = 0.0) -> float:
    if not values:
        return default
    total = sum(value for value in values if value is not None)
    return total / len(values)  # never empty here
```

{"name": "Ada", "id": 1024, "tags": ["first", "second"], "active": true, "score": null}

| Year | Share |
|------|-------|
| 1998 | 12.5% |

Die Straße führt über die Brücke zurück zum Bahnhof. Hier, après la pluie, le café était déjà fermé. \
¿Cuántos años tiene la niña? Сегодня мы идём домой. 今天天气很好。"""


@dataclass(frozen=True)
class Overlap:
    """How much two vocabularies have in common.

    Attributes:
        num_shared: Target ids that have a counterpart in the draft's vocabulary.
        num_known: Target ids that mean anything.
        target_share: Of a sample text's tokens in the target's vocabulary, the share that have a counterpart.
        draft_share: The same of the draft's: about the share of its probability that its guesses keep.
        ratio: The draft's tokens for the sample text, by the target's.
    """

    num_shared: int
    num_known: int
    target_share: float
    draft_share: float
    ratio: float

    @property
    def usable(self) -> float:
        """Share of a text on which the two can agree by tokens: each must have the other's token."""
        return min(self.target_share, self.draft_share)

    @property
    def share(self) -> float:
        """Part of the target's known ids that are shared, 0 to 1."""
        return self.num_shared / max(1, self.num_known)

    def __str__(self) -> str:
        return (
            f"{self.num_shared} of the target's {self.num_known} tokens ({self.share:.1%}) are the draft's too; of a "
            f"sample text, {self.target_share:.1%} of the target's tokens and {self.draft_share:.1%} of the draft's"
        )


@dataclass(frozen=True)
class TokenMap:
    """From one vocabulary to the other, V the target's number of logits and E the longest spelling.

    Attributes:
        target: The target's tokenizer by bytes.
        draft: The draft's.
        spellings: How the draft spells each target id, ``[V, E]``; places at or beyond `sizes` hold 0.
        sizes: Draft tokens for each target id, ``[V]``; 0 where it means nothing to the draft.
        counterparts: The draft id whose score each target id takes, ``[V]``, no draft id twice; -1 where none.
        overlap: What they have in common.
        way: How guesses cross.
        room: Draft tokens a target token that the draft's cache needs room for.
    """

    target: Speller
    draft: Speller
    spellings: torch.Tensor
    sizes: torch.Tensor
    counterparts: torch.Tensor
    overlap: Overlap
    way: Literal["tokens", "text"]
    room: int


def map_tokens(target: HasVocabulary, draft: HasVocabulary, way: Way = "auto", room: int | None = None) -> TokenMap:
    """Compare two tokenizers by bytes, choose how guesses cross, and log both. Takes a second or two for 150k tokens.

    Args:
        target: The target.
        draft: The draft.
        way: "tokens" or "text"; "auto" takes tokens where enough of a text's tokens are shared.
        room: Draft tokens a target token to have room for; by default with a margin over what a sample text takes.

    Raises:
        ConfigError: `way` or `room` is out of range.
        VocabularyMismatchError: One side has no tokenizer, or one that cannot be told by bytes, or (unless way is
            "text") no token is shared.
    """
    if way not in ("auto", "tokens", "text"):
        raise ConfigError(f'a draft of another vocabulary guesses by way "auto", "tokens" or "text", not {way!r}')
    if room is not None and room < 1:
        raise ConfigError(f"room must be 1 draft token a target token or more, got {room}")
    ours, theirs = _speller(target, "target"), _speller(draft, "draft")
    counterparts = _counterparts(ours, theirs)
    num_shared = int((counterparts >= 0).sum())
    if num_shared == 0 and way != "text":
        raise VocabularyMismatchError(
            f"draft {draft.name} and target {target.name} share no token at all (of {theirs.num_known} and "
            f'{ours.num_known}); let guesses cross by text (way="text"), or use a draft with a more similar tokenizer'
        )
    overlap = _measured(ours, theirs, counterparts)
    chosen: Literal["tokens", "text"] = "tokens" if way == "tokens" or overlap.usable >= ENOUGH else "text"
    if way == "text":
        chosen = "text"
    _report(target, draft, overlap, chosen)
    spellings, sizes, needed = counterparts[:, None], torch.ones_like(counterparts), overlap.ratio
    if chosen == "tokens":
        spellings, sizes = _spellings(ours, theirs, counterparts)
        needed = float(sizes[_sample_ids(ours)].float().mean())
    if room is None:
        same = chosen == "tokens" and theirs.bos is None and int(sizes.max()) <= 1  # never longer than the target's
        room = 1 if same else min(MOST_ROOM, max(2, math.ceil(MARGIN * needed)))
    return TokenMap(ours, theirs, spellings, sizes, counterparts, overlap, chosen, room)


def _report(target: HasVocabulary, draft: HasVocabulary, overlap: Overlap, way: str) -> None:
    words = "draft %s has another vocabulary than target %s: %s; guesses cross by %s"
    logger.info(words, draft.name, target.name, overlap, way)
    if overlap.usable < POOR:
        remedy = (
            "few guesses will be right: prefer a draft with a more similar tokenizer"
            if way == "tokens"
            else "guesses cross by text, on the host: a draft of the target's own family would be faster"
        )
        logger.warning("draft %s and target %s have little in common: %s; %s", draft.name, target.name, overlap, remedy)


def _speller(model: HasVocabulary, role: str) -> Speller:
    if model.tokenizer is None:
        raise VocabularyMismatchError(
            f"the {role} {model.name} has no tokenizer, so its vocabulary cannot be compared with another; pass its "
            "tokenizer, or use a draft that is known to share the target's ids"
        )
    return Speller(model.tokenizer, model.vocab_size, model.name)


# --- counterparts


def _counterparts(target: Speller, draft: Speller) -> torch.Tensor:
    """[V] the draft id that means what each target id does; each draft id at most once, -1 where none."""
    found = [-1] * len(target.pieces)
    for piece, index in target.ids.items():
        found[index] = draft.ids.get(piece, -1)
    for index, other in _special_pairs(target, draft).items():
        found[index] = other
    return torch.tensor(found, dtype=torch.long)


def _special_pairs(target: Speller, draft: Speller) -> dict[int, int]:
    """Pair special tokens of one name, then those left over by their role; no id twice."""
    by_name = {name: index for index, name in draft.specials.items()}
    pairs = {index: by_name[name] for index, name in target.specials.items() if name in by_name}
    for role, index in target.roles.items():
        other = draft.roles[role]
        if index in target.specials and other in draft.specials and index not in pairs and other not in pairs.values():
            pairs[index] = other
    return pairs


def _spellings(target: Speller, draft: Speller, counterparts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Spell every target token by the draft's: ``[V, E]``, and how many it takes ``[V]``.

    A token that the draft has not is spelled by itself, whatever stands around it: so a text's spelling only grows.
    """
    spelled = [[other] if other >= 0 else [] for other in counterparts.tolist()]
    for role, index in target.roles.items():  # an end of text may be read as the draft's, where that is taken too
        other = draft.roles[role]
        if index in target.specials and other in draft.specials and not spelled[index]:
            spelled[index] = [other]
    foreign = [index for index, piece in enumerate(target.pieces) if piece and not spelled[index]]
    pieces: list[Any] = [target.pieces[index] for index in foreign]
    for index, ids in zip(foreign, draft.spell_each(pieces), strict=True):
        spelled[index] = [one for one in ids if one is not None][-LONGEST_SPELLING:]
    sizes = torch.tensor([len(ids) for ids in spelled])
    table = torch.zeros(len(spelled), max(1, int(sizes.max())), dtype=torch.long)
    table[torch.arange(table.shape[1]) < sizes[:, None]] = torch.tensor(
        [one for ids in spelled for one in ids], dtype=torch.long
    )
    return table, sizes


# --- how much it is


def _measured(target: Speller, draft: Speller, counterparts: torch.Tensor) -> Overlap:
    """Count what is shared, in the vocabulary and in the sample text."""
    ours, theirs = _sample_ids(target), _sample_ids(draft)
    shared = counterparts[counterparts >= 0]
    return Overlap(
        num_shared=len(shared),
        num_known=target.num_known,
        target_share=float((counterparts[ours] >= 0).float().mean()),
        draft_share=float(torch.isin(theirs, shared).float().mean()),
        ratio=len(theirs) / len(ours),
    )


def _sample_ids(speller: Speller) -> torch.Tensor:
    """The sample text's ids, at least one, all below the number of logits."""
    ids = [index for index in speller.encode(SAMPLE) if index < len(speller.pieces)]
    return torch.tensor(ids or [0])
