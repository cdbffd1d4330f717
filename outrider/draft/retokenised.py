"""A draft model with another tokenizer that guesses by text: encoded anew for the draft, and back for the target.

String-level matching (SLEM in Timor et al. 2025, arXiv 2502.05202; universal assisted generation). Encoding is not by
token: a new token may change how the end of the text is encoded. So each row keeps the text in the draft's ids, encodes
its end again whenever text is added, and feeds what differs from what the draft's cache holds. Only the end is ever
encoded again, and by bytes, so half a character is no loss.

What the draft writes is its likeliest text. It was not drawn from any distribution over the target's tokens, so guesses
count as certainties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from outrider.draft.drafter import WithCache
from outrider.proposal import Proposal
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import DraftRows
    from outrider.draft.roomy import RoomyRunner
    from outrider.draft.token_map import TokenMap

__all__ = ["RetokenisedDrafter"]

LAG = 64  # target tokens that a chain takes in by itself, however many of the draft's they are
WINDOW = 32  # draft tokens a row that are fed together with other rows'
LOOSE = 12  # draft tokens at the end of the text that are encoded again when it grows
LONGEST_CHARACTER = 4  # bytes
CONTEXT = 8  # target tokens before a guess that shape how it is encoded


@dataclass
class _Text:
    """One row's text in the draft's ids.

    Attributes:
        num_read: Target tokens taken in.
        tail: The last of them, as far as they are ordinary.
        ids: The text.
        held: Bytes at its end that the draft has no token for, unless more of the character comes.
        border: Where the run of ordinary tokens begins that ends the text: nothing before it changes any more.
        cached: The ids that the draft's cache holds, guesses included.
        settled: Leading ids that are surely the same in both.
    """

    num_read: int = 0
    tail: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    held: bytes = b""
    border: int = 0
    cached: list[int] = field(default_factory=list)
    settled: int = 0

    def cut(self, place: int) -> list[int]:
        """Cut the ids off from `place` on, and give them."""
        loose = self.ids[place:]
        del self.ids[place:]
        self.settled = min(self.settled, place)
        return loose

    def num_cached(self) -> int:
        """Count the ids that need not be fed: all that agree, but never the last, whose scores are wanted."""
        most = min(len(self.ids) - 1, len(self.cached))
        place = min(self.settled, most)
        while place < most and self.ids[place] == self.cached[place]:
            place += 1
        return max(0, place)


class RetokenisedDrafter(WithCache):
    """Drafts with a causal language model by text.

    A row that the draft's context or cache cannot hold gets no guesses.

    Args:
        runner: The draft, its cache allocated with as many blocks as the target's.
        token_map: From the target's vocabulary to the draft's.
        name: What statistics call it.
    """

    makes_trees = False
    shares_blocks = False  # its texts are longer or shorter: a block holds what only this text has there
    device_side = False  # texts are strings, and strings are the host's
    context_length: int | None = None  # in target tokens nobody knows it; rows beyond it get no guesses

    def __init__(self, runner: RoomyRunner, token_map: TokenMap, name: str = "draft_model") -> None:
        super().__init__(runner)
        self.runner = runner
        self.name = name
        self.overlap = token_map.overlap
        self._target, self._draft = token_map.target, token_map.draft
        counterparts = token_map.counterparts.tolist()
        self._to_draft = {index: counterparts[index] for index in self._target.specials if counterparts[index] >= 0}
        self._to_target = {other: index for index, other in self._to_draft.items()}
        for role, index in self._target.roles.items():  # several specials may be read as the draft's one of that role
            other = self._draft.roles[role]
            if index in self._target.specials and other in self._draft.specials:
                self._to_draft.setdefault(index, other)
        self._ratio = self.overlap.ratio
        self._texts: dict[int, _Text] = {}

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Find the fastest products for passes of one token a row."""
        self.runner.tune([(rows, 1) for rows in sorted(set(num_rows))], places, (1,))

    def missing(self, slot: int, length: int) -> int:
        """Count the target tokens that were not taken in, where they are more than a chain should take in itself."""
        missing = length - self._text(slot, length).num_read
        return missing if missing > LAG else 0

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Take in the next tokens, and feed what that changes."""
        tables, capacity = rows.tables.to(self.runner.device), self._capacity(rows)
        for row, (slot, count) in enumerate(zip(rows.slots, counts, strict=True)):
            text = self._text(slot)
            self._take_in(text, rows.tokens[row, text.num_read : text.num_read + count].tolist())
            if text.ids and len(text.ids) <= capacity[row]:
                self._feed(text, len(text.ids), tables[row : row + 1], rows.start)

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Let the draft write on, and encode what it wrote for the target: up to `num_tokens` guesses a row."""
        texts = []
        for row, (slot, length) in enumerate(zip(rows.slots, rows.lengths.tolist(), strict=True)):
            texts.append(self._text(slot, length))
            self._take_in(texts[-1], rows.tokens[row, texts[-1].num_read : length].tolist())
        steps = max(1, math.ceil(self._ratio * num_tokens))
        capacity = self._capacity(rows)
        fitting = [row for row, text in enumerate(texts) if text.ids and len(text.ids) + steps <= capacity[row]]
        guesses = [list[int]() for _ in texts]
        if fitting:
            written = self._written(rows, fitting, [texts[row] for row in fitting], steps)
            for row, ids in zip(fitting, written, strict=True):
                guesses[row] = self._guesses(texts[row], ids)[:num_tokens]
        padded = torch.tensor([ids + [0] * (num_tokens - len(ids)) for ids in guesses]).view(len(texts), num_tokens)
        return Proposal(padded, torch.tensor([len(ids) for ids in guesses])).to(rows.lengths.device)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Learn nothing: the next round compares texts."""

    def release(self, slot: int) -> None:
        """Forget a slot's text and cache."""
        self._texts.pop(slot, None)

    def context(self, slot: int) -> tuple[int, ...]:
        """Give a slot's text in the draft's ids, as far as it was taken in."""
        return tuple(self._text(slot).ids)

    # --- the text in the draft's ids

    def _text(self, slot: int, length: int | None = None) -> _Text:
        """Give a slot's text; a new one where there is none, or one longer than the row, so not the row's."""
        text = self._texts.get(slot)
        if text is None or (length is not None and text.num_read > length):
            text = self._texts[slot] = _Text()
        return text

    def _take_in(self, text: _Text, tokens: list[int]) -> None:
        """Add target tokens; those of a run of ordinary ones are encoded together."""
        bos = self._draft.bos
        if tokens and not text.num_read and bos is not None and self._to_draft.get(tokens[0]) != bos:
            self._add_special(text, bos)
        text.num_read += len(tokens)
        run: list[int] = []
        for token in tokens:
            if self._is_text(token):
                run.append(token)
                continue
            self._add_run(text, run)
            run = []
            self._add_special(text, self._to_draft.get(token))
        self._add_run(text, run)

    def _is_text(self, token: int) -> bool:
        return token < len(self._target.pieces) and self._target.pieces[token] is not None

    def _add_special(self, text: _Text, index: int | None) -> None:
        """Add a special token; one that the draft has no counterpart of still parts what it stands between."""
        if index is not None:
            text.ids.append(index)
        text.border, text.tail, text.held = len(text.ids), [], b""

    def _add_run(self, text: _Text, run: list[int]) -> None:
        """Encode the end of the text again, together with what is added."""
        added = self._target.meaning(run)
        if not added:
            return
        text.tail = (text.tail + run)[-CONTEXT:]
        if all(index in self._draft.specials for index in text.ids):  # the text begins
            added = self._begun(added)
        cut = self._loose(text)
        data = self._draft.meaning(text.cut(cut)) + text.held + added
        before = self._draft.meaning(text.ids[max(text.border, cut - LOOSE) :])
        spelled = self._draft.spell(data, before)
        num_held = sum(1 for _ in takewhile(lambda index: index is None, reversed(spelled)))
        text.held = data[len(data) - num_held :] if num_held < LONGEST_CHARACTER else b""
        text.ids += [index for index in spelled if index is not None]

    def _begun(self, data: bytes) -> bytes:
        """Give the beginning of a text as the draft's tokenizer would see it: a leading space may be no part of it."""
        if self._target.leads and not self._draft.leads:
            return data.removeprefix(b" ")
        if self._draft.leads and not self._target.leads:
            return b" " + data
        return data

    def _loose(self, text: _Text) -> int:
        """Find where to begin encoding again: at a word's beginning, where one is near."""
        latest = max(text.border, len(text.ids) - LOOSE)
        earliest = max(text.border, latest - LOOSE)
        begins = (place for place in range(latest, earliest, -1) if self._begins_word(text.ids[place : place + 1]))
        return next(begins, latest)

    def _begins_word(self, ids: list[int]) -> bool:
        return self._draft.meaning(ids)[:1].isspace()

    # --- the draft

    def _capacity(self, rows: DraftRows) -> list[int]:
        capacity: list[int] = self.runner.capacity(rows.tables).clamp(max=self.runner.context_length).tolist()
        return capacity

    def _feed(self, text: _Text, end: int, table: torch.Tensor, start: int | None) -> None:
        """Feed a row's ids up to `end` that the cache does not hold."""
        begin = text.num_cached()
        if begin < end:
            device = self.runner.device
            fed, positions = upload(text.ids[begin:end], device), torch.arange(begin, end, device=device)
            self.runner.feed(fed[None], positions[None], table, end, start)
        text.cached = text.ids[: max(begin, end)]
        text.settled = len(text.cached)

    def _written(self, rows: DraftRows, fitting: list[int], texts: list[_Text], steps: int) -> list[list[int]]:
        """Let the draft write `steps` ids behind each text."""
        device = self.runner.device
        tables = rows.tables[upload(fitting, rows.tables.device)].to(device)
        for row, text in enumerate(texts):
            if len(text.ids) - text.num_cached() > WINDOW:
                self._feed(text, len(text.ids) - 1, tables[row : row + 1], rows.start)
        width = max(len(text.ids) - text.num_cached() for text in texts)
        ends = torch.tensor([len(text.ids) for text in texts])[:, None]
        positions = (ends - torch.arange(width, 0, -1)).clamp(min=0)
        ids = [[text.ids[place] for place in row] for text, row in zip(texts, positions.tolist(), strict=True)]
        fed = torch.tensor(ids)
        fed, positions, ends = fed.to(device), positions.to(device), ends.to(device)
        context = max(len(text.ids) for text in texts)
        written = []
        for step in range(steps):
            fed = self.runner.forward(fed, positions, tables, context + step, rows.start)[:, -1:].argmax(-1)
            positions = ends + step
            written.append(fed)
        ids = torch.cat(written, 1).tolist()
        for text, new in zip(texts, ids, strict=True):
            text.cached = text.ids + new[:-1]
            text.settled = len(text.ids)
        return ids

    # --- back to the target

    def _guesses(self, text: _Text, written: list[int]) -> list[int]:
        """Encode what the draft wrote behind a text for the target, up to what it cannot say."""
        guesses: list[int] = []
        before, rest = self._target.meaning(text.tail), written
        while rest:
            run = list(takewhile(self._is_draft_text, rest))
            spelled = self._target.spell(self._draft.meaning(run), before)
            guesses += takewhile(lambda index: index is not None, spelled)  # type: ignore[arg-type]
            special = None if len(run) == len(rest) else self._to_target.get(rest[len(run)])
            if special is None or None in spelled:
                break
            guesses.append(special)
            before, rest = b"", rest[len(run) + 1 :]
        return guesses

    def _is_draft_text(self, index: int) -> bool:
        return index < len(self._draft.pieces) and self._draft.pieces[index] is not None
