"""A small model that drafts by generating, on a KV cache of its own that may lag behind the text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from outrider.proposal import Proposal
from outrider.sampling.choose import choose, distribution
from outrider.sampling.random import Purpose, round_seeds
from outrider.sampling.rules import Prefix

if TYPE_CHECKING:
    from outrider.draft.drafter import DraftRows
    from outrider.model.runner import Runner

__all__ = ["DraftModelDrafter"]

REFED = 2  # tokens fed at the start of every chain: after full acceptance the cache lacks the last two


class DraftModelDrafter:
    """Drafts with a causal language model that shares the target's vocabulary.

    Args:
        runner: The draft, its cache allocated with as many blocks as the target's: both use one block list.
        target_vocab_size: Size of the target's logits, to which q is padded.
        shared_vocab_size: Ids that mean the same to both; no other is guessed.
        name: What statistics call it.
    """

    def __init__(
        self, runner: Runner, target_vocab_size: int, shared_vocab_size: int, name: str = "draft_model"
    ) -> None:
        self.runner = runner
        self.name = name
        self._target_vocab_size = target_vocab_size
        self._shared_vocab_size = shared_vocab_size
        self._cached: dict[int, int] = {}

    @property
    def context_length(self) -> int | None:
        """Positions that the draft was made for."""
        return self.runner.context_length

    def missing(self, slot: int, length: int) -> int:
        """Count what is not cached, but for what a chain feeds itself."""
        return max(0, length - REFED - self._cached.get(slot, 0))

    def catch_up(self, rows: DraftRows, num_tokens: int) -> None:
        """Feed the next tokens that are not cached."""
        device, slot = self.runner.device, rows.slots[0]
        begin = self._cached.get(slot, 0)
        end = begin + num_tokens
        positions = torch.arange(begin, end, device=device)[None]
        self.runner.feed(self._known(rows.tokens[:, begin:end]), positions, rows.tables.to(device), end, rows.start)
        self._cached[slot] = end

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Generate `num_tokens` tokens a row, each by the row's own sampling parameters and prefix."""
        device = self.runner.device
        tokens, lengths, tables = rows.tokens.to(device), rows.lengths.to(device), rows.tables.to(device)
        rules = rows.rules if rows.lengths.device == device else rows.rules.to(device)
        purpose = Purpose.CHOICE
        if rows.independent:
            purpose, rules = Purpose.GUESS, replace(rules, seeds=round_seeds(rules.seeds, lengths))
        positions = (lengths[:, None] - torch.arange(REFED, 0, -1, device=device)).clamp(min=0)
        context = max(rows.host_lengths)
        guesses, probs = [], []
        for step in range(num_tokens):
            fed = self._known(tokens.gather(1, positions))
            logits = self.runner.forward(fed, positions, tables, context + step, rows.start)
            logits = logits[:, -1:, : self._shared_vocab_size]
            positions = lengths[:, None] + step  # of the guess
            prefix = Prefix(tokens, positions)
            guess = choose(logits, rules, prefix, purpose)
            if rows.independent:
                q = distribution(logits, rules, prefix)
                probs.append(F.pad(q, (0, self._target_vocab_size - q.shape[-1])))
            tokens = tokens.scatter(1, positions, guess)
            guesses.append(guess)
        lengths = torch.full_like(lengths, num_tokens)
        return Proposal(torch.cat(guesses, 1), lengths, torch.cat(probs, 1) if probs else None).to(rows.lengths.device)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Count as cached what was fed and turned out right; the next chain feeds the two tokens after that."""
        for slot, length, right in zip(slots, lengths, accepted, strict=True):
            self._cached[slot] = length - 1 + right

    def release(self, slot: int) -> None:
        """Forget a slot's cache."""
        self._cached.pop(slot, None)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keep ids that only the target's padding knows from indexing past the draft's embedding."""
        return tokens.to(self.runner.device).clamp(max=self.runner.vocab_size - 1)
