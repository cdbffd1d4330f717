"""Suffix lookup: copy what followed the last tokens wherever they stood before (SuffixDecoding, 2411.04975).

Three kinds of text are searched: the row's own, outputs that its caller was given lately (only if asked), and a corpus
loaded at start. Each is a `SuffixIndex`. Of the longest match in each, and of a few shorter ones, the guesses of which
most may be expected to be right are taken: an own text of one match is not drowned by a corpus of thousands, nor the
other way round.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outrider.config import MAX_TREE_NODES
from outrider.draft.drafter import WithoutCache
from outrider.draft.host_text import padded, read_news
from outrider.draft.shared_texts import SharedTexts, load_corpus
from outrider.draft.suffix_index import SuffixIndex
from outrider.errors import ConfigError
from outrider.proposal import Proposal

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from outrider.draft.drafter import DraftRows

__all__ = ["SuffixDrafter"]

WINDOW = 64  # tokens that are matched anew where an index has changed: a longer match says no more
LAG = 64  # tokens that a round takes in by itself; more are fed in portions before
MOST_TRIED = 3  # matches of one index that guesses are made from, the longest first


class _Match(NamedTuple):
    """Where a row's text ends in an index, and how many tokens the index had then."""

    state: int
    matched: int
    num_tokens: int


class _Guess(NamedTuple):
    """Guesses for one row, their parents if they are a tree, and how many may be expected to be right."""

    tokens: list[int]
    parents: list[int]
    expected: float


@dataclass
class _Row:
    """What is known of a slot's text.

    Attributes:
        scope: Whose it is.
        tokens: The text, as far as it was read.
        index: The same, or the end of it, to look up.
        begin: Its length when guesses were first made for it: the prompt's.
        matches: Its end in other indexes.
        guessed: The chain that was guessed last.
        tail: What of that was accepted, and not read yet.
    """

    scope: str | None
    tokens: array[int] = field(default_factory=lambda: array("q"))
    index: SuffixIndex = field(default_factory=SuffixIndex)
    begin: int | None = None
    matches: dict[SuffixIndex, _Match] = field(default_factory=dict)
    guessed: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)

    def take_in(self, tokens: list[int], others: tuple[SuffixIndex, ...], most: int) -> None:
        """Let the text grow; its own index holds its last `most` tokens at most, and at least half of them."""
        self.tail = []
        self.tokens.extend(tokens)
        self.index.extend(tokens[-most:])
        if self.index.num_tokens > most:
            self.index = SuffixIndex()
            self.index.extend(self.tokens[-(most // 2) :])
        self.matches = {index: self._match(index, tokens) for index in others}

    def _match(self, index: SuffixIndex, new: list[int]) -> _Match:
        known = self.matches.get(index)
        if known is None or known.num_tokens != index.num_tokens or len(new) > WINDOW:
            return _Match(*index.match(self.tokens[-WINDOW:]), index.num_tokens)
        return _Match(*index.match(new, known.state, known.matched), index.num_tokens) if new else known

    def sources(self) -> Iterator[tuple[SuffixIndex, int, int]]:
        """Give all indexes and the longest match in each, the own text first: it wins where others are no better."""
        yield (self.index, *self.index.match_of_end())
        for index, match in self.matches.items():
            yield (index, match.state, match.matched)


class SuffixDrafter(WithoutCache):
    """Looks last tokens up in the row's own text, in its caller's recent outputs, and in a corpus.

    Nothing is shared unless `sharing` is on. Then a row's output goes to the texts of its scope when its slot is
    released, and rows of that scope alone see it. A prompt is never shared; a row without a scope neither gives nor
    takes.

    Args:
        per_match: Guesses a matched token at most (the paper's alpha).
        min_chance: Guesses end where the chance that all of them are right is less, by what was counted.
        min_match: Tokens that must match.
        branches: Ways on that are tried after each guess; 1 makes chains, more make trees.
        own_tokens: Of a row's own text, how much is searched at most; in a longer one its second half at least.
        sharing: Whether outputs are kept for later requests of the same scope.
        shared_tokens: Tokens of outputs that are kept at most, of all scopes together.
        scope_of: Says whose text a slot holds, None for nobody's; asked when a slot is first seen. On the idle slot
            drafters are timed: it is nobody's.
        corpus: A text that all rows may copy from: a text file, or `.jsonl` of strings or records of strings.
        tokenize: From the corpus' text to ids, no special tokens added.
        corpus_tokens: Tokens of the corpus that are taken in at most.

    Raises:
        ConfigError: A number makes no sense, the corpus cannot be read, or `tokenize` or `scope_of` is missing.
    """

    name = "suffix"
    context_length: int | None = None
    device_side = False  # an automaton is a walk of single steps

    def __init__(
        self,
        *,
        per_match: float = 3.0,
        min_chance: float = 0.1,
        min_match: int = 1,
        branches: int = 1,
        own_tokens: int = 1 << 16,
        sharing: bool = False,
        shared_tokens: int = 1 << 18,
        scope_of: Callable[[int], str | None] | None = None,
        corpus: str | os.PathLike[str] | None = None,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        corpus_tokens: int = 1 << 18,
    ) -> None:
        least = {"min_match": min_match, "branches": branches, "shared_tokens": shared_tokens, "own_tokens": own_tokens}
        for setting, value in {**least, "corpus_tokens": corpus_tokens}.items():
            if value < 1:
                raise ConfigError(f"suffix lookup: {setting} must be at least 1, got {value}")
        if not per_match > 0 or not 0 <= min_chance <= 1:
            raise ConfigError(
                f"suffix lookup: per_match must be above 0 and min_chance in [0, 1], got {per_match} and {min_chance}"
            )
        if sharing and scope_of is None:
            raise ConfigError("suffix lookup: sharing needs scope_of, to know whose texts a row may see")
        if corpus is not None and tokenize is None:
            raise ConfigError(f"suffix lookup: corpus {corpus} needs tokenize, to become tokens")
        self._per_match, self._min_chance, self._min_match = per_match, min_chance, min_match
        self._branches, self._own_tokens = branches, own_tokens
        self._scope_of = scope_of
        self.shared = SharedTexts(shared_tokens) if sharing else None
        both = corpus is not None and tokenize is not None
        self._corpus = (load_corpus(Path(corpus), tokenize, corpus_tokens),) if both else ()  # type: ignore[arg-type]
        self._rows: dict[int, _Row] = {}

    @property
    def makes_trees(self) -> bool:
        """Whether several ways on are tried."""
        return self._branches > 1

    def missing(self, slot: int, length: int) -> int:
        """Count the tokens that were not taken in, where they are more than a round should take in itself."""
        row = self._rows.get(slot)
        lag = length - (len(row.tokens) if row is not None and len(row.tokens) <= length else 0)
        return lag if lag > LAG else 0

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Take in the next tokens of each row."""
        known = [len(self._row(slot).tokens) for slot in rows.slots]
        known = [there if there <= length else 0 for there, length in zip(known, rows.host_lengths, strict=True)]
        reach = [there + count for there, count in zip(known, counts, strict=True)]
        self._read(rows, [min(end, length) for end, length in zip(reach, rows.host_lengths, strict=True)])

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Copy up to `num_tokens` tokens from behind each row's best match."""
        guesses = []
        for row in self._read(rows, rows.host_lengths):
            if row.begin is None:
                row.begin = len(row.tokens)
            guess = self._guess(row, num_tokens)
            row.guessed = [] if self.makes_trees else guess.tokens
            guesses.append(guess)
        device = rows.lengths.device
        proposal = padded([guess.tokens for guess in guesses], num_tokens, device)
        if not self.makes_trees:
            return proposal
        parents = padded([guess.parents for guess in guesses], num_tokens, device).tokens
        return Proposal(proposal.tokens, proposal.lengths, None, parents)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Note what the text may end with: a released slot's last round is never shown."""
        for slot, count in zip(slots, accepted, strict=True):
            row = self._rows.get(slot)
            if row is not None:
                row.tail = row.guessed[:count]

    def release(self, slot: int) -> None:
        """Forget a slot; if asked, keep its output for others of its scope."""
        row = self._rows.pop(slot, None)
        if row is not None and row.begin is not None and row.scope is not None:
            self.remember(row.scope, [*row.tokens[row.begin :], *row.tail])

    def remember(self, scope: str, tokens: Sequence[int]) -> None:
        """Keep a text for rows of a scope to copy from; nothing happens unless sharing is on."""
        if self.shared is not None:
            self.shared.add(scope, tokens)

    # --- rows

    def _row(self, slot: int) -> _Row:
        if slot not in self._rows:
            self._rows[slot] = _Row(None if self._scope_of is None else self._scope_of(slot))
        return self._rows[slot]

    def _read(self, rows: DraftRows, lengths: Sequence[int]) -> list[_Row]:
        """Take in what is new in each row, up to `lengths`. A text that does not go on as it was is another text."""
        known = [self._row(slot).tokens for slot in rows.slots]
        for slot, news in zip(rows.slots, read_news(rows, known, lengths), strict=True):
            if not news.stands:
                del self._rows[slot]
            row = self._row(slot)
            others = self._corpus if self.shared is None else (*self.shared.of(row.scope), *self._corpus)
            row.take_in(news.tokens, others, self._own_tokens)
        return [self._rows[slot] for slot in rows.slots]

    # --- guesses

    def _guess(self, row: _Row, num_tokens: int) -> _Guess:
        """Make guesses from every match, and take those of which most may be expected to be right."""
        best = _Guess([], [], 0.0)
        for index, state, matched in row.sources():
            matches = index.shorter(state, matched, self._min_match)
            for _, (place, size) in zip(range(MOST_TRIED), matches, strict=False):
                deepest = min(num_tokens, max(1, int(self._per_match * size)))
                if (num_tokens if self.makes_trees else deepest) <= best.expected:
                    break  # not even if all of them were right
                made = self._made(index, place, size, num_tokens, deepest)
                best = made if made.expected > best.expected else best
        return best

    def _made(self, index: SuffixIndex, state: int, matched: int, num_tokens: int, deepest: int) -> _Guess:
        if not self.makes_trees:
            tokens, expected = index.chain(state, matched, deepest, self._min_chance)
            return _Guess(tokens, [], expected)
        most = min(num_tokens, MAX_TREE_NODES)
        shape = {"deepest": deepest, "branches": self._branches}
        return _Guess(*index.tree(state, matched, most, self._min_chance, **shape))
