"""Prompt lookup: what followed the last tokens when they stood here before (Saxena 2023; also in 2304.04487)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.draft.drafter import WithoutCache
from outrider.proposal import Proposal

if TYPE_CHECKING:
    from outrider.draft.drafter import DraftRows

__all__ = ["NGramDrafter"]

WARRANTED = 3  # guesses a matched token; on real texts, best of 2 to 4 and unlimited at 5 to 16 guesses
ROUND_UP = 256  # the searched length grows in these steps, so that shapes rarely change


class NGramDrafter(WithoutCache):
    """Looks the last tokens up in the row's own text, prompt and output alike, and copies what followed.

    Which match: the longest one, of up to `max_size` and at least `min_size` tokens; among equals the most recent one
    that enough tokens follow; failing that, the one that most tokens follow. No match, no guess.

    A short match says little: each matched token warrants three guesses, and no more are made.
    """

    name = "ngram"
    context_length: int | None = None
    device_side = True
    makes_trees = False

    def __init__(self, max_size: int = 8, min_size: int = 1) -> None:
        self._max_size = max_size
        self._min_size = min_size

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Copy up to `num_tokens` tokens from behind each row's best match."""
        searched = min(rows.tokens.shape[1], -(-max(rows.host_lengths) // ROUND_UP) * ROUND_UP)
        tokens, last = rows.tokens[:, :searched], rows.lengths[:, None] - 1
        place = torch.arange(searched, device=tokens.device)
        size = self._match_sizes(tokens, last)
        size = size.masked_fill((size < self._min_size) | (place >= last), 0)  # the last tokens match themselves
        following = last - place  # tokens that stand behind a match ending at this place
        recent = torch.where(following >= num_tokens, searched + place, following)
        best = (size * (2 * searched) + recent.clamp(min=0)).argmax(1, keepdim=True)
        matched = size.gather(1, best)
        ahead = best + 1 + torch.arange(num_tokens, device=tokens.device)
        guesses = tokens.gather(1, ahead.clamp(max=searched - 1))
        warranted = (WARRANTED * matched).clamp(max=num_tokens)  # 0 where nothing matched
        lengths = torch.minimum(last - best, warranted)[:, 0]
        return Proposal(guesses, lengths)

    def _match_sizes(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Count, for each place, how many tokens up to it equal the row's last ones: ``[B, L]``."""
        size = torch.zeros_like(tokens)
        alive = torch.ones_like(tokens, dtype=torch.bool)
        for back in range(min(self._max_size, tokens.shape[1])):
            wanted = tokens.gather(1, (last - back).clamp(min=0))
            same = torch.zeros_like(alive)
            same[:, back:] = tokens[:, : tokens.shape[1] - back] == wanted
            alive &= same & (last >= back)
            size += alive
        return size

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Learn nothing: the text itself is the state."""

    def release(self, slot: int) -> None:
        """Forget nothing."""
