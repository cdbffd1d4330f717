"""From token ids to text, as they come: never half a character, never half a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Detokenizer"]

CONTEXT_TOKENS = 6  # prompt tokens decoded along, so that a tokenizer's leading space comes out right
UNFINISHED = "\ufffd"  # how a decoder shows bytes that do not make a character yet
LONGEST_CHARACTER = 4  # bytes, so tokens at most


class Detokenizer:
    """Decodes one sequence and watches for its stop strings.

    Args:
        tokenizer: A transformers tokenizer, or None: then all text is empty.
        prompt: Ids of the prompt.
        stop: Strings that end the text.
        include_stop: Whether the stop string stays in the text.
        skip_special_tokens: Whether special tokens are left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._prefix, self._read = 0, len(self._ids)
        self._stop, self._include_stop = tuple(stop), include_stop
        self._stop_tokens = _left_out(tokenizer, self._stop) if skip_special_tokens and tokenizer is not None else {}
        self._watched = True
        self._emitted = 0
        self._ends: list[int] = []  # how long the text was after each token
        self.text = ""

    def push(self, token: int, *, watch: bool = True) -> str | None:
        """Add one token; give the stop string that it completed, if any, with the text cut there.

        Of several stop strings the one that ends first in the text counts, then the longer. With `watch` off, stop
        strings pass (before min_tokens).
        """
        if self._tokenizer is None:
            return None
        self._watched = watch
        found = self._push(token, watch=watch)
        if found is None and watch and token in self._stop_tokens:
            found = self.finish() or self._stop_tokens[token]
            if self._include_stop and found is self._stop_tokens[token]:
                self.text += found
        self._ends.append(len(self.text))
        return found

    def _push(self, token: int, *, watch: bool) -> str | None:
        self._ids.append(token)
        end = len(self._ids)
        whole = self._decode(self._prefix, end)
        if whole.endswith(UNFINISHED):
            # A character that began LONGEST_CHARACTER tokens ago would be whole by now: what is older than that is
            # broken for good, and only the rest may still become something.
            end -= LONGEST_CHARACTER - 1
            settled = self._decode(self._prefix, end) if end > self._read else ""
            if not settled or not whole.startswith(settled):
                return None
            whole = settled
        return self._add(whole, end, watch=watch)

    def finish(self) -> str | None:
        """Let out what was still waiting for the rest of a character; give the stop string in it, if any, as `push`."""
        if self._tokenizer is None or self._read == len(self._ids):
            return None
        return self._add(self._decode(self._prefix, len(self._ids)), len(self._ids), watch=self._watched)

    def take(self, *, final: bool) -> str:
        """Give the text that is new since the last call and settled: no stop string can begin in it."""
        end = len(self.text) if final else len(self.text) - self._held_back()
        new, self._emitted = self.text[self._emitted : end], max(end, self._emitted)
        return new

    def ends(self, first: int, taken: str) -> tuple[int, ...]:
        """Say how far from the beginning of the text just `taken` each token from the `first` new one on reaches.

        That may be beyond its end, where text is held back.
        """
        begin = self._emitted - len(taken)
        return tuple(max(end - begin, 0) for end in self._ends[first:])

    def _add(self, whole: str, end: int, *, watch: bool) -> str | None:
        """Take in the text of the tokens from `_prefix` to `end`."""
        known = self._decode(self._prefix, self._read)
        if whole == known:  # left out, as special tokens are: what comes next follows the text before it
            del self._ids[self._read : end]
            return None
        before = len(self.text)
        self.text += whole[len(known) :]
        self._prefix, self._read = self._read, end
        return self._cut(before) if watch and self._stop else None

    def _cut(self, before: int) -> str | None:
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is None:
            return None
        end, start, stop = found
        self.text = self.text[: end if self._include_stop else start]
        return stop

    def _held_back(self) -> int:
        """How many last characters might be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _decode(self, start: int, end: int) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[start:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
            )
        )


def _left_out(tokenizer: Any, stop: Sequence[str]) -> dict[int, str]:
    """Stop strings that are special tokens, by id: the text does not show them, so the token itself must tell."""
    found = {}
    for one in stop:
        token = tokenizer.convert_tokens_to_ids(one)
        if token is None or tokenizer.decode([token], skip_special_tokens=True):
            continue
        if tokenizer.decode([token], skip_special_tokens=False) == one:
            found[token] = one
    return found
