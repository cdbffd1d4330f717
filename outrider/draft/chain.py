"""A chain as it is written: one guess after another, each by its row's own rules, and with the target's noise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from outrider.kernels.choose import take
from outrider.kernels.launch import uses_kernels
from outrider.proposal import Proposal
from outrider.sampling.choose import choose, distribution
from outrider.sampling.random import Purpose, round_seeds
from outrider.sampling.rules import Prefix

if TYPE_CHECKING:
    from outrider.draft.drafter import DraftRows

__all__ = ["Chain"]


class Chain:
    """Guesses of B rows; where they must be drawn independently of the target's choice, with their q.

    Args:
        rows: Whom to guess for; on their own device, their copy of the tokens takes the guesses.
        device: Where the draft runs.

    Attributes:
        tokens: The rows' tokens there, ``[B, L]``, the guesses after the committed ones.
        lengths: Committed tokens, ``[B, 1]``.
    """

    def __init__(self, rows: DraftRows, device: torch.device) -> None:
        self.tokens, self.lengths = rows.tokens.to(device), rows.lengths.to(device)[:, None]
        self._rules = rows.rules if rows.lengths.device == device else rows.rules.to(device)
        self._independent, self._purpose = rows.independent, Purpose.CHOICE
        if rows.independent:
            self._purpose = Purpose.GUESS
            self._rules = replace(self._rules, seeds=round_seeds(self._rules.seeds, self.lengths[:, 0]))
        self._guesses: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []

    @property
    def guesses(self) -> torch.Tensor:
        """What was guessed so far, ``[B, K]``."""
        return torch.cat(self._guesses, 1)

    def add(self, logits: torch.Tensor) -> torch.Tensor:
        """Take the next guess by its logits: ``[B, 1, V]`` -> ids ``[B, 1]``."""
        prefix = Prefix(self.tokens, self.lengths + len(self._guesses))
        if uses_kernels(logits.device):
            guess = take(logits, self._rules, prefix, self._purpose)[0]
        else:
            guess = choose(logits, self._rules, prefix, self._purpose)
        if self._independent:
            self._probs.append(distribution(logits, self._rules, prefix))
        self.tokens.scatter_(1, prefix.ends, guess)
        self._guesses.append(guess)
        return guess

    def proposal(self, counted: torch.Tensor, num_tokens: int, vocab_size: int | None = None) -> Proposal:
        """Propose what was guessed, `counted` ``[B]`` of it, in `num_tokens` columns; q over the target's ids."""
        guesses, more = self.guesses, num_tokens - len(self._guesses)
        if not self._probs:
            return Proposal(F.pad(guesses, (0, more)), counted)
        probs = torch.cat(self._probs, 1)
        wider = 0 if vocab_size is None else vocab_size - probs.shape[-1]
        return Proposal(F.pad(guesses, (0, more)), counted, F.pad(probs, (0, wider, 0, more)))
