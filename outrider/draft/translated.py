"""A draft model with another tokenizer that guesses by the tokens it shares with the target.

Token-level intersection (TLI in Timor et al. 2025, arXiv 2502.05202). Each token of the text is put into the draft's by
a fixed table, so the draft's text only grows, as the target's does, and all is worked out on the device. The draft's
scores are moved to the target's ids before anything is drawn: rules, noise and q are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.draft.chain import Chain
from outrider.draft.drafter import WithCache
from outrider.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.draft.drafter import DraftRows
    from outrider.draft.roomy import RoomyRunner
    from outrider.draft.token_map import TokenMap

__all__ = ["TranslatedDrafter"]


@dataclass(frozen=True)
class _Translation:
    """B rows of the target's text as the draft reads them.

    Attributes:
        tokens: The target's, ``[B, L]``.
        sizes: Draft tokens for each, ``[B, L]``; 0 beyond the text.
        ends: Where in the draft's text each of them ends, ``[B, L]``.
        leads: Draft tokens before the first one (what it begins every text with), ``[B, 1]``.
    """

    tokens: Tensor
    sizes: Tensor
    ends: Tensor
    leads: Tensor

    def end(self, lengths: Tensor) -> Tensor:
        """Count the draft tokens of each row's first `lengths` tokens ``[B, 1]``: ``[B, 1]``."""
        return self.ends.gather(1, (lengths - 1).clamp(min=0)).where(lengths > 0, 0)


class TranslatedDrafter(WithCache):
    """Drafts with a causal language model by the tokens that its vocabulary shares with the target's.

    A row that the draft's context or cache cannot hold gets no guesses. Where a prompt was too long, that is for good:
    nothing says that what a later round would read was fed.

    Args:
        runner: The draft, its cache allocated with as many blocks as the target's.
        token_map: From the target's vocabulary to the draft's.
        name: What statistics call it.
        follows: The target's device.
    """

    makes_trees = False
    shares_blocks = False  # its texts are longer or shorter: a block holds what only this text has there

    def __init__(
        self,
        runner: RoomyRunner,
        token_map: TokenMap,
        name: str = "draft_model",
        *,
        follows: torch.device | None = None,
    ) -> None:
        super().__init__(runner)  # in the target's tokens its context may be shorter
        self.runner = runner
        self.name = name
        self.overlap = token_map.overlap
        self.device_side = follows is None or follows == runner.device
        device = runner.device
        self._spellings, self._sizes = token_map.spellings.to(device), token_map.sizes.to(device)
        self._counterparts = token_map.counterparts.to(device)
        self._foreign = self._counterparts < 0
        self._bos = token_map.draft.bos
        # Window of a chain's first pass: the last guess, if it was right, and the token after it.
        self._widest = 1 + self._spellings.shape[1]
        self._guessed: set[int] = set()  # slots whose first token behind those was a guess: one draft token
        self._refused: set[int] = set()  # slots whose text did not fit once, and is not fed any more

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Find the fastest products for a chain's passes: of a window a row, then of one token."""
        self.runner.tune(sorted({(rows, width) for rows in num_rows for width in (1, self._widest)}), places, (1,))

    def missing(self, slot: int, length: int) -> int:
        """Count the target tokens whose spelling is not cached, but for what a chain feeds itself."""
        if slot in self._refused:
            return 0
        lacking = length - self._cached.get(slot, 0)
        if slot in self._guessed and lacking <= 2:
            return 0
        return max(0, lacking - 1)

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed the spelling of the next tokens that are not cached, as far as the draft can hold it, row by row."""
        device = self.runner.device
        capacity = self._capacity(rows.tables).tolist()
        for row, (slot, count) in enumerate(zip(rows.slots, counts, strict=True)):
            part, begin = slice(row, row + 1), self._cached.get(slot, 0)
            length = torch.full((1, 1), begin + count, device=device)
            text = self._translated(rows.tokens[part, : begin + count].to(device), length)
            first, last = int(text.end(length.new_full((1, 1), begin))), int(text.end(length))
            if last > capacity[row]:
                self._refused.add(slot)
                continue
            if last > first:
                positions = torch.arange(first, last, device=device)[None]
                fed = self._read(text, positions)
                self.runner.feed(fed, positions, rows.tables[part].to(device), last, rows.start)
            self._cached[slot] = begin + count
            self._guessed.discard(slot)

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Guess `num_tokens` tokens a row, drawn among the shared ones by the row's own rules and prefix."""
        device = self.runner.device
        chain, tables = Chain(rows, device), rows.tables.to(device)
        text = self._translated(chain.tokens, chain.lengths)
        total, capacity = text.end(chain.lengths), self._capacity(tables)[:, None]
        fits = (total > 0) & (total + num_tokens <= capacity)
        positions = total - torch.arange(self._width(text, chain.lengths), 0, -1, device=device)
        fed = self._read(text, positions.clamp(min=0))
        if device.type == "cpu" and not fits.any():
            return Proposal.empty(len(fits), num_tokens, rows.lengths.device)
        for step in range(num_tokens):
            # A row that does not fit may be fed anything; it only must not reach beyond its own blocks.
            places = torch.minimum(positions.clamp(min=0), capacity - 1)
            context = self._context(places)
            logits = self.runner.forward(fed, places, tables, context, rows.start)[:, -1:]
            guess = chain.add(self._moved(logits))
            fed, positions = self._counterparts[guess].clamp(min=0), total + step
        # Where every shared token is ruled out, what was taken is not one; no guess behind it counts.
        counted = ((~self._foreign[chain.guesses]) & fits).long().cumprod(1).sum(1)
        return chain.proposal(counted, num_tokens).to(rows.lengths.device)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Count as cached what was fed and turned out right: all but the last right guess, which may not be fed yet."""
        for slot, length, right in zip(slots, lengths, accepted, strict=True):
            self._cached[slot] = length + max(0, right - 1)
            if right:
                self._guessed.add(slot)
            else:
                self._guessed.discard(slot)

    def release(self, slot: int) -> None:
        """Forget a slot's cache."""
        super().release(slot)
        self._guessed.discard(slot)
        self._refused.discard(slot)

    # --- the text as the draft reads it

    def _translated(self, tokens: Tensor, lengths: Tensor) -> _Translation:
        """Lay out the draft's text for rows of tokens ``[B, L]``, of which `lengths` ``[B, 1]`` count."""
        known = tokens.clamp(0, len(self._sizes) - 1)
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths
        sizes = self._sizes[known] * inside
        leads = torch.zeros_like(lengths)
        if self._bos is not None:  # unless the target's own first token is read as that
            first = known[:, :1]
            leads = ((self._sizes[first] == 0) | (self._spellings[first, 0] != self._bos)).long()
        return _Translation(known, sizes, sizes.cumsum(1) + leads, leads)

    def _read(self, text: _Translation, positions: Tensor) -> Tensor:
        """Give the draft's ids at positions ``[B, T]`` of its text; anything where there is no text."""
        place = torch.searchsorted(text.ends, positions.contiguous(), right=True).clamp(max=text.ends.shape[1] - 1)
        begin = text.ends.gather(1, place) - text.sizes.gather(1, place)
        within = (positions - begin).clamp(0, self._spellings.shape[1] - 1)
        ids = self._spellings[text.tokens.gather(1, place), within]
        return ids if self._bos is None else ids.where(positions >= text.leads, self._bos)

    def _width(self, text: _Translation, lengths: Tensor) -> int:
        """Draft tokens that a chain's first pass feeds: all that may lack; on a CPU, where a look is free, no more."""
        if lengths.device.type != "cpu":
            return self._widest
        return 1 + int(text.sizes.gather(1, lengths - 1).max())

    def _capacity(self, tables: Tensor) -> Tensor:
        return self.runner.capacity(tables).clamp(max=self.runner.context_length)

    def _context(self, places: Tensor) -> int:
        """Tell how far a pass reaches; on a card attention looks at the rows themselves."""
        return self.runner.context_length if places.device.type != "cpu" else int(places.max()) + 1

    # --- the draft's scores

    def _moved(self, logits: Tensor) -> Tensor:
        """Move the draft's logits ``[B, 1, N]`` to the target's ids ``[B, 1, V]``; others cannot be guessed."""
        return logits.index_select(-1, self._counterparts.clamp(min=0)).masked_fill(self._foreign, float("-inf"))
