"""What a drafter guesses and what the target keeps of it: two values that every round passes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Acceptance", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Guesses for the next tokens of B rows, as chains of up to K.

    Attributes:
        tokens: Guessed ids, ``[B, K]``; what lies at or beyond a row's length is meaningless.
        lengths: Guesses that count, ``[B]``, 0 to K; 0 makes the row's round a plain decoding step.
        probs: The distribution each guess was *drawn from*, ``[B, K, V]`` fp32, or None where guesses were not drawn
            (lookup): a verifier then takes each guess for a certainty, ``q(guess) = 1``.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    probs: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, device: torch.device) -> Proposal:
        """Guess nothing for any row."""
        return cls(
            torch.zeros(num_rows, num_tokens, dtype=torch.long, device=device),
            torch.zeros(num_rows, dtype=torch.long, device=device),
        )

    @property
    def num_tokens(self) -> int:
        """K: how many guesses a row can hold."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> Proposal:
        """Give the same guesses on another device."""
        probs = None if self.probs is None else self.probs.to(device)
        return Proposal(self.tokens.to(device), self.lengths.to(device), probs)

    def limited(self, allowance: torch.Tensor, vocab_size: int) -> Proposal:
        """Cut each row at its allowance ``[B]``, at the first id outside the vocabulary, and at the first broken q.

        A drafter may be wrong in any way; what leaves here is safe to feed and to verify.
        """
        known = (self.tokens >= 0) & (self.tokens < vocab_size)
        probs = self.probs
        if probs is not None:
            known &= torch.isfinite(probs).all(-1) & (probs >= 0).all(-1)
            probs = torch.nan_to_num(probs, nan=0.0, posinf=0.0, neginf=0.0)
        usable = known.long().cumprod(1).sum(1)
        lengths = torch.minimum(torch.minimum(self.lengths, allowance), usable).clamp(min=0)
        return Proposal(self.tokens.clamp(0, vocab_size - 1), lengths, probs)

    def narrowed(self, num_tokens: int) -> Proposal:
        """Keep the first `num_tokens` columns; no row may be longer."""
        if num_tokens == self.num_tokens:
            return self
        probs = None if self.probs is None else self.probs[:, :num_tokens]
        return Proposal(self.tokens[:, :num_tokens], self.lengths, probs)

    def with_rows(self, members: torch.Tensor, part: Proposal) -> Proposal:
        """Put another drafter's guesses in place of the rows `members` ``[b]``.

        Where only one of the two knows its probabilities, the other's guesses count as certainties (one-hot q).
        """
        probs = None
        if self.probs is not None or part.probs is not None:
            vocab_size = next(p.shape[-1] for p in (part.probs, self.probs) if p is not None)
            probs = self.probs_or_certain(vocab_size).index_copy(0, members, part.probs_or_certain(vocab_size))
        return Proposal(
            self.tokens.index_copy(0, members, part.tokens), self.lengths.index_copy(0, members, part.lengths), probs
        )

    def probs_or_certain(self, vocab_size: int) -> torch.Tensor:
        """Q as ``[B, K, V]``: the drafter's, or one-hot on each guess."""
        if self.probs is not None:
            return self.probs
        return torch.nn.functional.one_hot(self.tokens.clamp(0, vocab_size - 1), vocab_size).float()

    def within(self) -> torch.Tensor:
        """Which guesses count, ``[B, K]`` bool."""
        return torch.arange(self.num_tokens, device=self.lengths.device) < self.lengths[:, None]


@dataclass(frozen=True)
class Acceptance:
    """What one round commits.

    Attributes:
        tokens: ``[B, K+1]``; row b commits its first ``num_accepted[b] + 1``: the accepted guesses, then one token of
            the target's own (*recovered* after a rejection, *bonus* after full acceptance).
        num_accepted: Guesses that the target agreed with, ``[B]``.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens each row commits, ``[B]``, at least 1."""
        return self.num_accepted + 1
