"""A shortened vocabulary for a draft: it guesses among the most frequent tokens only, and its head gets cheaper.

The head of a small draft is a large part of its weights (128k rows of a 1B Llama are a fifth). A guess is judged by the
target in any case, so a token that is never guessed costs an acceptance now and then and never changes the text
(FR-Spec, Zhao et al. 2025, arXiv 2502.14856).

Frequencies come from a text that the user names. Without one the tokenizer's own order stands for them: byte-pair
merges were learned most frequent first.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

__all__ = ["coverage", "frequent_ids", "token_counts"]

logger = logging.getLogger(__name__)

MAX_CORPUS = 1 << 24  # characters that are counted; the most frequent few thousand tokens have settled long before
_CHUNK = 1 << 16  # characters encoded together
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's name for a byte
_NOT_TEXT = {"role", "id", "type", "name", "source", "url", "model"}  # keys of chat records whose strings nobody writes


def frequent_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    size: int,
    vocab_size: int,
    corpus: Path | None = None,
    *,
    keep: Iterable[int] = (),
) -> Tensor:
    """Choose the token ids that a draft may guess.

    Always in, where `size` leaves room for them: `keep`, the end of text, the other special tokens and the bytes (out
    of which any text can be spelled). Then the tokens of the corpus, most frequent first; then, and among equals, the
    tokenizer's own order.

    Args:
        tokenizer: The draft's.
        size: How many ids to choose.
        vocab_size: Ids that target and draft share; none at or above it is chosen.
        corpus: A text file, or a `.jsonl` file whose strings are text; None goes by the tokenizer's order alone.
        keep: Ids to choose before all others, such as every end-of-text id of the target.

    Returns:
        [size] int64, ascending, on the CPU.

    Raises:
        ConfigError: `size` is out of range, there is no tokenizer, or the corpus cannot be read or is empty.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"draft_vocab_size must be between 1 and the shared vocabulary of {vocab_size}, got {size}")
    if tokenizer is None:
        raise ConfigError(
            "draft_vocab_size needs a tokenizer to tell which tokens are frequent; pass tokenizer=... or leave it out"
        )
    order = _own_order(tokenizer, vocab_size)
    if corpus is not None:
        counts = token_counts(tokenizer, vocab_size, corpus)
        order = order[counts[order].argsort(descending=True, stable=True)]
    ends = [token for token in (*keep, tokenizer.eos_token_id) if isinstance(token, int)]
    first = _known([*ends, *_specials(tokenizer), *_bytes(tokenizer)], vocab_size)
    if len(first) > size:
        logger.warning(
            "draft_vocab_size=%d has no room for the %d special and byte tokens; only the end of text is always in",
            size, len(first),
        )  # fmt: skip
        first = _known(ends, vocab_size)
    chosen = torch.tensor(_known([*first, *order.tolist()], vocab_size)[:size])
    if corpus is not None:
        logger.info("%d of %d tokens cover %.1f%% of %s", size, vocab_size, 100 * coverage(chosen, counts), corpus)
    return chosen.sort().values


def token_counts(tokenizer: PreTrainedTokenizerBase, vocab_size: int, corpus: Path) -> Tensor:
    """Count how often each token comes in a text or `.jsonl` file, in its first 16 million characters.

    Returns:
        [vocab_size] int64; ids beyond are not counted.

    Raises:
        ConfigError: The file cannot be read, is no JSON where it says so, or has no text.
    """
    encode: Any = tokenizer  # untyped
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in _chunks(_texts(corpus)):
        ids = torch.tensor(encode(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)
        counts += torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
    if not counts.any():
        raise ConfigError(
            f"draft_vocab_corpus {corpus} holds no text; name a file of text such as the model will write"
        )
    return counts


def coverage(ids: Tensor, counts: Tensor) -> float:
    """Share of a text's tokens that are among `ids`, 0 to 1: what a draft of that vocabulary could guess at best.

    Args:
        ids: [size] token ids, each once.
        counts: [vocab_size] as `token_counts` gives them; not all zero.
    """
    return float(counts[ids].sum() / counts.sum())


# --- texts


def _texts(corpus: Path) -> Iterator[str]:
    """Lines of a text file, or the strings of a `.jsonl` file's records."""
    left = MAX_CORPUS
    try:
        with corpus.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                for text in _strings(_record(line, number, corpus)) if corpus.suffix == ".jsonl" else (line,):
                    yield text[:left]
                    left -= len(text)
                if left <= 0:
                    return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"draft_vocab_corpus {corpus} cannot be read ({error}); name a text or .jsonl file in UTF-8"
        ) from error


def _record(line: str, number: int, corpus: Path) -> Any:
    try:
        return json.loads(line) if line.strip() else None
    except ValueError as error:
        raise ConfigError(f"draft_vocab_corpus {corpus}: line {number} is not JSON ({error})") from error


def _strings(record: Any) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, list | dict):
        values = record if isinstance(record, list) else [one for key, one in record.items() if key not in _NOT_TEXT]
        for value in values:
            yield from _strings(value)


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Join lines to pieces that are worth a call of the tokenizer."""
    parts: list[str] = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield "".join(parts)
            parts, size = [], 0
    if size:
        yield "".join(parts)


# --- what the tokenizer tells


def _known(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Each id once, in their order, without those out of range."""
    return [token for token in dict.fromkeys(ids) if 0 <= token < vocab_size]


def _own_order(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor:
    """[vocab_size] every id, most frequent first as far as the tokenizer tells.

    Single ASCII characters, then tokens by the merge that makes them, then the rest by id; ids without a token last.
    """
    vocabulary = tokenizer.get_vocab()
    ranks: dict[str, int] = {}
    for token in _merges(tokenizer):
        ranks.setdefault(token, len(ranks))
    keys = torch.full((vocab_size,), 2 * (len(ranks) + vocab_size), dtype=torch.int64)
    for token, index in vocabulary.items():
        if 0 <= index < vocab_size:
            ascii_letter = len(token.lstrip("▁Ġ")) <= 1 and token.lstrip("▁Ġ").isascii()
            keys[index] = -1 if ascii_letter else ranks.get(token, len(ranks) + index)
    return keys.argsort(stable=True)


def _merges(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The tokens that byte-pair merges make, first merge first; none where the tokenizer has no merges."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    for merge in model.get("merges") or ():
        yield merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def _specials(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special and added tokens, but for those that stand in reserve and were never trained."""
    added = {token: index for token, index in tokenizer.get_added_vocab().items() if not _in_reserve(token)}
    return sorted({*tokenizer.all_special_ids, *added.values()})


def _in_reserve(token: str) -> bool:
    return "reserved" in token or re.fullmatch(r"[<\[]unused_?\d+[>\]]", token) is not None


def _bytes(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of single bytes, by either way to write one: "<0x0A>", or a character of GPT-2's alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    named = [index for token, index in vocabulary.items() if _BYTE.fullmatch(token)]
    if named:
        return sorted(named)
    return sorted(vocabulary[character] for character in ByteLevel.alphabet() if character in vocabulary)
