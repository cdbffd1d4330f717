"""Medusa heads draft a chain or a tree in one product, from the target's last hidden state (2401.10774).

With L committed tokens, the last one that the target has seen is that of place L - 2: its hidden state gives head i
(from 0) the guess for place L + i. There is no cache, and nothing to catch up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.draft.chain import Chain
from outrider.draft.drafter import WithoutCache
from outrider.draft.fixed_tree import FixedTree
from outrider.kernels.attention import slots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.draft.drafter import DraftRows
    from outrider.model.medusa_heads import MedusaHeads
    from outrider.proposal import Proposal

__all__ = ["MedusaDrafter"]


class MedusaDrafter(WithoutCache):
    """Drafts with Medusa heads.

    Args:
        heads: The heads, on the target's device.
        paths: The tree's nodes, each by the ranks on its way from the root, see `FixedTree`; None: a chain.
        name: What statistics call it.

    Raises:
        ConfigError: The tree does not fit the heads, see `FixedTree`.
    """

    device_side = True
    context_length: int | None = None

    def __init__(self, heads: MedusaHeads, paths: Sequence[Sequence[int]] | None = None, name: str = "medusa") -> None:
        self.heads = heads
        self.name = name
        device = heads.weights[0].device
        self.tree = None if paths is None else FixedTree(paths, heads.num_heads, heads.vocab_size, device)
        self.makes_trees = self.tree is not None

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Guess a chain, or the tree's first `num_tokens` nodes; a chain of drawn tokens where q is asked for.

        A row of one token was never fed to the target, so there is no hidden state of it, and no guess.
        """
        drafted = rows.lengths > 1
        if self.tree is not None and not rows.independent:
            logits = self._logits(rows, self.tree.depth(num_tokens))
            return self.tree.guesses(rows, num_tokens, logits, drafted)
        depth = min(num_tokens, self.heads.num_heads)
        chain, logits = Chain(rows, rows.lengths.device), self._logits(rows, depth)
        for step in range(depth):
            chain.add(logits[:, step : step + 1])
        return chain.proposal(torch.where(drafted, depth, 0), num_tokens)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Nothing is learned."""

    def release(self, slot: int) -> None:
        """Nothing is kept."""

    def _logits(self, rows: DraftRows, num_heads: int) -> Tensor:
        """What the first heads make of each row's last hidden state, ``[B, num_heads, V]``."""
        assert rows.features is not None, "the target was not asked to keep hidden states"
        last = (rows.lengths[:, None] - 2).clamp(min=0)
        return self.heads.logits(rows.features[slots_of(rows.tables, last)[:, 0]], num_heads)
