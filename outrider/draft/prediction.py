"""The caller's prediction: guess from a text that the answer is expected to resemble, and find it again after edits.

A cursor runs along the prediction as long as the output agrees. Where it does not, the place is found again by the
longest run of last output tokens that stands in the prediction, the nearest ahead of where agreement ended first: a
sentence that was put in or left out costs a few plain rounds. Right after a difference a single token will do, at the
few places that a small edit leads to: a word replaced by another is the most frequent difference of all.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.draft.drafter import WithoutCache
from outrider.draft.host_text import padded, read_news
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import DraftRows
    from outrider.proposal import Proposal

__all__ = ["PredictionDrafter"]

NEAR = 4  # tokens that a small edit may replace, leave out or put in
CANDIDATES = 8  # places whose matches are compared, on either side of where agreement ended
LONGEST = 64  # tokens that a comparison goes back
WARRANTED = 4  # guesses a matched token, while too few match to be sure


@dataclass
class _Row:
    """Where one slot's output is in the prediction.

    Attributes:
        tokens: The row's text, as far as it was read.
        cursor: Place of the prediction's next token; None where it is lost.
        matched: Output tokens that led there without a difference.
        agreed: The last cursor that enough tokens led to: from there on it is looked for.
        parted: Output tokens since agreement ended.
    """

    tokens: array[int] = field(default_factory=lambda: array("q"))
    cursor: int | None = 0
    matched: int = 0
    agreed: int = 0
    parted: int = 0


class PredictionDrafter(WithoutCache):
    """Drafts one request's samples from the text that its caller expects.

    Args:
        tokens: The expected output.
        prompt_length: Tokens of the prompt. A row that comes back after preemption is then followed from there; where
            it is not known, a row's output begins where the row was first seen, and a round's guesses may be lost.
        min_match: Tokens that must agree before a place is found again, unless it is very near.

    Raises:
        ConfigError: `min_match` is not positive.
    """

    name = "prediction"
    context_length: int | None = None
    device_side = False  # where a text goes on is the host's to find
    makes_trees = False

    def __init__(self, tokens: Sequence[int], prompt_length: int | None = None, *, min_match: int = 3) -> None:
        if min_match < 1:
            raise ConfigError(f"prediction: min_match must be at least 1, got {min_match}")
        self._prediction = array("q", list(tokens))  # bytes alone would be taken for the memory of an array
        self._min_match = min_match
        self._prompt_length = prompt_length
        self._rows: dict[int, _Row] = {}
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of each run of `min_match` tokens, rising
        for end in range(min_match, len(self._prediction) + 1):
            self._ends.setdefault(tuple(self._prediction[end - min_match : end]), []).append(end)

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Copy up to `num_tokens` tokens from where each row is in the prediction."""
        known = [self._rows.setdefault(slot, _Row()).tokens for slot in rows.slots]
        guesses = []
        for slot, news in zip(rows.slots, read_news(rows, known, rows.host_lengths), strict=True):
            if not news.stands:
                self._rows[slot] = _Row()
            row = self._rows[slot]
            begin = len(row.tokens)
            row.tokens.extend(news.tokens)
            if not begin:
                begin = len(row.tokens) if self._prompt_length is None else self._prompt_length
            for end in range(begin, len(row.tokens)):
                self._follow(row, end)
            guesses.append(self._guessed(row, num_tokens))
        return padded(guesses, num_tokens, rows.lengths.device)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Learn nothing: the next round follows the text."""

    def release(self, slot: int) -> None:
        """Forget where a slot was."""
        self._rows.pop(slot, None)

    # --- where a row is

    def _guessed(self, row: _Row, num_tokens: int) -> array[int]:
        if row.cursor is None:
            return self._prediction[:0]
        sure = row.matched >= self._min_match or row.cursor == row.agreed
        most = num_tokens if sure else min(num_tokens, WARRANTED * row.matched)
        return self._prediction[row.cursor : row.cursor + most]

    def _follow(self, row: _Row, end: int) -> None:
        """Go along with the output token at place `end` of the row's text."""
        token, cursor = row.tokens[end], row.cursor
        if cursor is not None and cursor < len(self._prediction) and self._prediction[cursor] == token:
            row.cursor, row.matched = cursor + 1, row.matched + 1
            row.parted += row.parted > 0
        else:
            row.parted += 1
            row.cursor, row.matched = self._found(row, end)
        if row.cursor is not None and row.matched >= self._min_match:
            row.agreed, row.parted = row.cursor, 0

    def _found(self, row: _Row, end: int) -> tuple[int | None, int]:
        """Look for the place again: where it goes on, and how many tokens say so."""
        last = row.tokens[max(0, end + 1 - LONGEST) : end + 1]
        ends = self._ends.get(tuple(last[-self._min_match :]), [])
        ahead = bisect_left(ends, row.agreed)
        nearest = ends[ahead : ahead + CANDIDATES] + ends[max(0, ahead - CANDIDATES) : ahead][::-1]
        found = max(
            ((self._agreement(place, last), -order, place) for order, place in enumerate(nearest)), default=None
        )
        if found is not None:
            return found[2], found[0]
        if row.parted <= NEAR:
            for place in range(row.agreed, min(row.agreed + NEAR + 1, len(self._prediction))):
                if self._prediction[place] == last[-1]:
                    return place + 1, 1
        return None, 0

    def _agreement(self, place: int, last: array[int]) -> int:
        """Count how many of the last tokens stand in the prediction up to `place`."""
        size, most = 0, min(place, len(last))
        while size < most and self._prediction[place - 1 - size] == last[-1 - size]:
            size += 1
        return size
