"""Texts that rows may copy from beside their own: recent outputs, each for its scope alone, and a corpus for all.

A suffix automaton cannot forget, so what must forget is a ring of them: outputs go into the newest of a scope's
indexes, and the index that was fed least recently is dropped whole. A trie of bounded depth could drop single texts,
but takes as many nodes a token as it is deep, and matches no further.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from outrider.draft.suffix_index import SuffixIndex
from outrider.errors import ConfigError, InvalidRequestError
from outrider.sampling.params import check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["SharedTexts", "load_corpus"]

GENERATIONS = 4  # indexes that a scope's texts are spread over, where one scope has them all
SHORTEST_TEXT = 8  # tokens; shorter outputs are not worth an index's keeping
PIECE = 1 << 16  # characters of a text file that are tokenized together


class SharedTexts:
    """Recent outputs, by scope: who may see them. Bounded; the oldest go first.

    Args:
        max_tokens: Of all scopes together. One scope alone keeps its last three quarters of them at least.

    Attributes:
        num_tokens: Kept now.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._generation = max(1, max_tokens // GENERATIONS)
        self._indexes: dict[str, tuple[SuffixIndex, ...]] = {}  # by scope, the newest last
        self._scopes: dict[SuffixIndex, str] = {}  # the other way round, the least recently fed first

    def of(self, scope: str | None) -> tuple[SuffixIndex, ...]:
        """Give the indexes that a scope may read; without a scope, none."""
        return self._indexes.get(scope, ()) if scope is not None else ()

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """Keep a text, its end alone if it is very long."""
        tokens = tokens[-self._generation :]
        if len(tokens) < min(SHORTEST_TEXT, self._generation):
            return
        indexes = self._indexes.get(scope, ())
        if not indexes or indexes[-1].num_tokens + len(tokens) > self._generation:
            indexes = self._indexes[scope] = (*indexes, SuffixIndex())
        self._scopes.pop(indexes[-1], None)
        self._scopes[indexes[-1]] = scope
        indexes[-1].add(tokens)
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._scopes)))

    def _forget(self, oldest: SuffixIndex) -> None:
        scope = self._scopes.pop(oldest)
        left = tuple(index for index in self._indexes[scope] if index is not oldest)
        if left:
            self._indexes[scope] = left
        else:
            del self._indexes[scope]
        self.num_tokens -= oldest.num_tokens


def load_corpus(path: Path, tokenize: Callable[[str], Sequence[int]], max_tokens: int) -> SuffixIndex:
    """Make an index of a text file, or of the strings of a `.jsonl` file's records, each a text of its own.

    Raises:
        ConfigError: The file cannot be read, or is no JSON where it says so.
    """
    index = SuffixIndex()
    try:
        with path.open(encoding="utf-8") as file:
            for text in _records(file, path) if path.suffix == ".jsonl" else iter(lambda: file.read(PIECE), ""):
                if path.suffix == ".jsonl":
                    index.end = 0
                tokens = tokenize(text)
                room = max_tokens - index.num_tokens
                index.extend(tokens[:room])
                if len(tokens) > room:
                    words = f"corpus {path}: its first {max_tokens} tokens are used; raise corpus_tokens to use more"
                    warnings.warn(words, stacklevel=3)
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"corpus {path} cannot be read ({error}); name a text or .jsonl file in UTF-8") from error
    index.end = 0
    return index


def _records(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            texts = [*_strings(json.loads(line) if line.strip() else None)]
        except ValueError as error:
            raise ConfigError(f"corpus {path}: line {number} is not JSON ({error})") from error
        try:
            for text in texts:
                check_text(f"corpus {path}: line {number}", text)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from None
        yield from texts


def _strings(record: Any) -> Iterator[str]:
    """Give the strings of a record; a chat's roles and the like are texts too, but too short to matter."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, list | dict):
        for value in record.values() if isinstance(record, dict) else record:
            yield from _strings(value)
