"""Telling what a model thinks from what it answers: text between ``<think>`` and ``</think>``.

The markers are single tokens, so it is ids that are looked for, never words: nothing is held back, the same text
written out letter by letter is no marker, and what is told apart does not depend on how a text was cut into chunks. A
text begins inside where its prompt ends with ``<think>``; otherwise the marker must come before anything else is said.
It thinks once: markers after that are text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.outputs import StreamChunk
    from outrider.sequence import Request

__all__ = ["CLOSE", "OPEN", "Part", "Reader", "Thinking", "thinking_of"]

OPEN, CLOSE = "<think>", "</think>"
TAIL_TOKENS = 4  # blanks that a template may put behind the marker


class Part(NamedTuple):
    """A piece of a text, and whether it was thought rather than said."""

    text: str
    thought: bool


def thinking_of(tokenizer: Any, template: str | None, parser: str) -> Thinking | None:
    """Give what tells reasoning apart; None where nothing is to be told.

    Args:
        tokenizer: The target's.
        template: Its chat template.
        parser: "none", "think", or "auto": where both markers are tokens and the template speaks of one.

    Raises:
        ConfigError: "think", and there are no such tokens.
    """
    if parser == "none":
        return None
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    missing = [marker for marker in (OPEN, CLOSE) if marker not in vocabulary]
    if missing and parser == "think":
        raise ConfigError(
            f"--reasoning-parser think needs a tokenizer that has {OPEN} and {CLOSE} as tokens, and this one lacks "
            f"{' and '.join(missing)}; leave the option out"
        )
    if missing or (parser == "auto" and not (template and (OPEN in template or CLOSE in template))):
        return None
    return Thinking(tokenizer, vocabulary[OPEN], vocabulary[CLOSE])


class Thinking:
    """How a model marks what it thinks.

    Args:
        tokenizer: The target's.
        opening, closing: The markers' ids.
    """

    def __init__(self, tokenizer: Any, opening: int, closing: int) -> None:
        self._tokenizer, self.opening, self.closing = tokenizer, opening, closing

    def reader(self, request: Request) -> Reader | None:
        """Give what reads one text of a request; None where a grammar shapes all of it, and leaves no room to think."""
        if request.params.grammar is not None:
            return None
        return Reader(self, opened=self._opens(request.prompt_token_ids), skip=request.params.skip_special_tokens)

    def text(self, token: int, *, skip: bool) -> str:
        """Give a token's text, as it stands in the whole."""
        decode = self._tokenizer.decode
        return str(decode([token], skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def _opens(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt ends inside. Only its end is looked at, where the template writes, and no client."""
        for token in reversed(prompt[-TAIL_TOKENS - 1 :]):
            if token == self.opening:
                return True
            if self.text(token, skip=False).strip():
                return False
        return False


class Reader:
    """Reads one text as it comes.

    Args:
        thinking: The markers.
        opened: Whether the text begins inside.
        skip: Whether special tokens, which a marker may be, are left out of the text.
    """

    def __init__(self, thinking: Thinking, *, opened: bool, skip: bool) -> None:
        self._thinking, self._skip = thinking, skip
        # Places in the text, in characters: the markers' beginnings and ends as far as they have come.
        self._opening = (0.0, 0.0) if opened else (math.inf, math.inf)
        self._closing = (math.inf, math.inf)
        self._may_open = not opened
        self._starts: list[float] = []  # where each token after the opening marker begins
        self._length = 0  # of the text so far
        self._end = 0  # of the last token's text, which may not be in the text yet

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far: of those that belong to text which was given out and not cut off again."""
        return bisect_left(self._starts, min(self._closing[0], self._length))

    def push(self, chunk: StreamChunk) -> list[Part]:
        """Take a chunk in; give its text, told apart and without the markers."""
        begin = self._length
        for token, end in zip(chunk.token_ids, chunk.text_ends, strict=True):
            self._take(token, begin + end)
        self._length += len(chunk.text)
        places = (0, *self._opening, *self._closing, math.inf)
        found = []
        for region, thought in ((0, False), (2, True), (4, False)):
            first, last = (min(max(place - begin, 0), len(chunk.text)) for place in places[region : region + 2])
            if piece := chunk.text[int(first) : int(last)]:
                found.append(Part(piece, thought))
        return found

    def _take(self, token: int, end: int) -> None:
        start, self._end = self._end, end
        if self._may_open:
            if token == self._thinking.opening:
                self._opening, self._may_open = self._marked(token, start, end), False
            elif self._thinking.text(token, skip=self._skip).strip():
                self._may_open = False
        elif self._opening[1] < math.inf and self._closing[0] == math.inf:
            if token == self._thinking.closing:
                self._closing = self._marked(token, start, end)
            else:
                self._starts.append(start)

    def _marked(self, token: int, start: int, end: int) -> tuple[float, float]:
        """Say where a marker stands that came with the text from `start` to `end`.

        Before it there may be half a character, which a marker shows to be broken; and the text may have been cut by a
        stop string that ends in the marker.
        """
        return max(start, end - len(self._thinking.text(token, skip=self._skip))), end
