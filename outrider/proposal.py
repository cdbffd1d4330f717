"""What a drafter guesses and what the target keeps of it: two values that every round passes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ROOT", "Acceptance", "Proposal", "Tree"]

ROOT = -1  # as a parent: the row's last committed token


@dataclass(frozen=True)
class Tree:
    """How the fed tokens of a round hang together: the root, a row's last committed token, and its N nodes.

    Attributes:
        above: Whether token j is token i or precedes it on its path from the root, ``[B, N+1, N+1]`` bool, [.., i, j].
        depths: Tokens between the root and each, ``[B, N+1]``; the root's is 0.
        parents: Fed index of each node's parent, ``[B, N]``.
    """

    above: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor

    @property
    def ancestors(self) -> torch.Tensor:
        """The same as bits, int64 ``[B, N+1]``: bit j of token i says that j is i or precedes it."""
        bits = torch.arange(self.above.shape[-1], device=self.above.device)
        return (self.above.long() << bits).sum(-1)


@dataclass(frozen=True)
class Proposal:
    """Guesses for the next tokens of B rows: a chain of up to K each, or a tree of up to N nodes.

    Attributes:
        tokens: Guessed ids, ``[B, K]``; what lies at or beyond a row's length is meaningless.
        lengths: Guesses that count, ``[B]``, 0 to K; 0 makes the row's round a plain decoding step.
        probs: The distribution each guess was *drawn from*, ``[B, K, V]`` fp32, or None where guesses were not drawn
            (lookup): a verifier then takes each guess for a certainty, ``q(guess) = 1``. In a tree it is that given
            the siblings before it.
        parents: For trees: what each guess follows, ``[B, K]``, by its place among the guesses, always before its own;
            `ROOT` is the row's last committed token. None: each follows the one before it.
        sources: For mixtures: which of the drafter's parts made each guess, ``[B, K]``. None: it has but one.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    probs: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    sources: torch.Tensor | None = None

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
        return self._mapped(lambda one: one.to(device))

    def limited(self, allowance: torch.Tensor, vocab_size: int) -> Proposal:
        """Cut each row at its allowance ``[B]``, at the first id outside the vocabulary, and at the first broken q.

        A drafter may be wrong in any way; what leaves here is safe to feed and to verify.
        """
        known = (self.tokens >= 0) & (self.tokens < vocab_size)
        probs, parents = self.probs, self.parents
        if probs is not None:
            known &= torch.isfinite(probs).all(-1) & (probs >= 0).all(-1)
            probs = torch.nan_to_num(probs, nan=0.0, posinf=0.0, neginf=0.0)
        if parents is not None:
            place = torch.arange(self.num_tokens, device=parents.device)
            known &= (parents >= ROOT) & (parents < place)
            parents = parents.where(known, ROOT)
        usable = known.long().cumprod(1).sum(1)
        lengths = torch.minimum(torch.minimum(self.lengths, allowance), usable).clamp(min=0)
        return Proposal(self.tokens.clamp(0, vocab_size - 1), lengths, probs, parents, self.sources)

    def narrowed(self, num_tokens: int) -> Proposal:
        """Keep the first `num_tokens` columns; no row may be longer."""
        if num_tokens == self.num_tokens:
            return self
        columns = self.tokens, self.probs, self.parents, self.sources
        tokens, probs, parents, sources = (None if one is None else one[:, :num_tokens] for one in columns)
        assert tokens is not None
        return Proposal(tokens, self.lengths, probs, parents if num_tokens else None, sources)

    def widened(self, num_tokens: int) -> Proposal:
        """Append columns that do not count, up to `num_tokens`; or cut down to it, rows too. Without q."""
        assert self.probs is None
        more = num_tokens - self.num_tokens
        if more <= 0:
            return replace(self, lengths=self.lengths.clamp(max=num_tokens)).narrowed(num_tokens)
        columns = self.tokens, self.parents, self.sources
        tokens, parents, sources = (None if one is None else F.pad(one, (0, more)) for one in columns)
        assert tokens is not None
        return Proposal(tokens, self.lengths, None, parents, sources)

    def with_rows(self, members: torch.Tensor, part: Proposal) -> Proposal:
        """Put another drafter's guesses in place of the rows `members` ``[b]``.

        Where only one of the two knows its probabilities, the other's guesses count as certainties (one-hot q); where
        only one guesses trees, the other's chains are trees without branches.
        """
        probs = parents = sources = None
        if self.probs is not None or part.probs is not None:
            vocab_size = next(p.shape[-1] for p in (part.probs, self.probs) if p is not None)
            probs = self.probs_or_certain(vocab_size).index_copy(0, members, part.probs_or_certain(vocab_size))
        if self.parents is not None or part.parents is not None:
            parents = self.parents_or_chain().index_copy(0, members, part.parents_or_chain())
        if self.sources is not None or part.sources is not None:
            sources = self.sources_or(0).index_copy(0, members, part.sources_or(0))
        tokens = self.tokens.index_copy(0, members, part.tokens)
        return Proposal(tokens, self.lengths.index_copy(0, members, part.lengths), probs, parents, sources)

    def probs_or_certain(self, vocab_size: int) -> torch.Tensor:
        """Q as ``[B, K, V]``: the drafter's, or one-hot on each guess."""
        if self.probs is not None:
            return self.probs
        return F.one_hot(self.tokens.clamp(0, vocab_size - 1), vocab_size).float()

    def parents_or_chain(self) -> torch.Tensor:
        """What each guess follows, ``[B, K]``."""
        if self.parents is not None:
            return self.parents
        return (torch.arange(self.num_tokens, device=self.tokens.device) - 1).expand_as(self.tokens)

    def sources_or(self, number: int) -> torch.Tensor:
        """Which part made each guess, ``[B, K]``: all by part `number` where nothing else is said."""
        return torch.full_like(self.tokens, number) if self.sources is None else self.sources

    def within(self) -> torch.Tensor:
        """Which guesses count, ``[B, K]`` bool."""
        return torch.arange(self.num_tokens, device=self.lengths.device) < self.lengths[:, None]

    def tree(self) -> Tree:
        """Work out who precedes whom; a handful of operations, whatever the tree."""
        parents = self.parents_or_chain() + 1
        num_fed = self.num_tokens + 1
        eye = torch.eye(num_fed, device=parents.device).expand(len(parents), -1, -1)
        reached = eye.clone()
        reached[:, 1:].scatter_(2, parents[..., None], 1.0)
        for _ in range((num_fed - 1).bit_length()):  # paths of up to 1, 2, 4, ... steps
            reached = (reached @ reached).clamp(max=1.0)
        above = reached > 0
        return Tree(above, above.sum(-1) - 1, parents)

    def positions_guessed(self, tree: Tree | None = None) -> torch.Tensor:
        """How far each row's guesses reach, ``[B]``: a chain's length, a tree's depth; its `tree`, if already known."""
        if self.parents is None:
            return self.lengths
        return (tree or self.tree()).depths[:, 1:].masked_fill(~self.within(), 0).amax(1)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Proposal:
        named: dict[str, Any] = {name: None if one is None else change(one) for name, one in vars(self).items()}
        return Proposal(**named)


@dataclass(frozen=True)
class Acceptance:
    """What one round commits.

    Attributes:
        tokens: ``[B, K+1]``; row b commits its first ``num_accepted[b] + 1``: the accepted guesses, then one token of
            the target's own (*recovered* after a rejection, *bonus* after full acceptance).
        num_accepted: Guesses that the target agreed with, ``[B]``.
        path: For trees: which fed token stands at each depth, ``[B, K+1]``, the root first; beyond the last accepted
            one it is the depth itself. None for chains, whose tokens stand where they are.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    path: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens each row commits, ``[B]``, at least 1."""
        return self.num_accepted + 1
