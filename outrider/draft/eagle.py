"""EAGLE heads draft chains and trees from the target's hidden states (2401.15077, 2406.16858, 2503.01840).

So does a model's own MTP module (2412.19437), in the same way.

A head has a cache of its own, by the target's block tables. For every place but the last it is fed the target's true
feature and the token after it. What a chain or a tree fed itself beyond that came from the head's own features: each
round begins with a window of the last places, whose true entries take their place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.draft.catching_up import runs
from outrider.draft.chain import Chain
from outrider.draft.drafter import WithCache
from outrider.draft.tree import Growth, TreeShape, grow, ranked
from outrider.kernels.attention import slots_of
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.draft.drafter import DraftRows
    from outrider.model.eagle_head import EagleHead
    from outrider.model.mtp import MtpHead
    from outrider.proposal import Proposal

__all__ = ["EagleDrafter"]


class EagleDrafter(WithCache):
    """Drafts with a head that reads the target's features.

    Args:
        head: The head, on the target's device.
        longest: Guesses a round at most that its window allows for; a round of more is caught up with afterwards.
        shape: How trees grow; None drafts chains. Where guesses must be drawn with their q, they are chains too.
        name: What statistics call it.
    """

    device_side = True

    def __init__(
        self, head: EagleHead | MtpHead, longest: int, shape: TreeShape | None = None, name: str = "eagle"
    ) -> None:
        super().__init__(head)
        self.head = head
        self.name = name
        self.makes_trees = shape is not None
        self._shape = shape
        deepest = longest if shape is None else shape.depth(longest)
        self._window = max(deepest, 1) + 1  # all that a round may commit

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Nothing: the products are the library's."""

    def missing(self, slot: int, length: int) -> int:
        """Count the pairs of feature and token that are not cached, but for those of the window."""
        return max(0, length - 1 - self._window - self._cached.get(slot, 0))

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed the next pairs; what a shorter row is fed beyond its count is fed again before it is read."""
        begins = [self._cached.get(slot, 0) for slot in rows.slots]
        device = rows.lengths.device
        for run in runs(begins, counts, together=device.type == "cuda"):
            places = run.positions(rows.tokens.shape[1] - 2, device)
            self._fed(rows, upload(run.places, device), places, run.context)
        for slot, begin, count in zip(rows.slots, begins, counts, strict=True):
            self._cached[slot] = begin + count

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Guess a chain, or a tree of `num_tokens` nodes; a row of one token, of which nothing was fed, gets none."""
        width = self._window
        steps = torch.arange(-1 - width, -1, device=rows.lengths.device)
        places = (rows.lengths[:, None] + steps).clamp(min=0)
        context = max(max(rows.host_lengths) - 1, 1)
        hidden = self._fed(rows, slice(None), places, context)[:, -1:]
        if self._shape is not None and not rows.independent:
            proposal = self._tree(rows, num_tokens, hidden, context)
        else:
            proposal = self._chain(rows, num_tokens, hidden, context)
        return replace(proposal, lengths=proposal.lengths.where(rows.lengths > 1, 0))

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Count as cached what was fed with true features, unless more than the window was missing."""
        for slot, length in zip(slots, lengths, strict=True):
            if self.missing(slot, length) == 0:
                self._cached[slot] = length - 1

    # --- how it is done

    def _fed(self, rows: DraftRows, part: slice | Tensor, places: Tensor, context: int) -> Tensor:
        """Feed true pairs at these places ``[b, T]`` of some rows: ``[b, T, hidden]``."""
        assert rows.features is not None, "the target was not asked to keep hidden states"
        tables = rows.tables[part]
        features = rows.features[slots_of(tables, places)]
        tokens = rows.tokens[part].gather(1, places + 1)
        return self.head.forward(tokens, features, places, tables, context, rows.start)

    def _chain(self, rows: DraftRows, num_tokens: int, hidden: Tensor, context: int) -> Proposal:
        """Generate: each guess is fed with what the head thought of the place before it."""
        chain = Chain(rows, rows.lengths.device)
        guess = chain.add(self.head.logits(hidden))
        for step in range(1, num_tokens):
            places = chain.lengths + (step - 2)
            hidden = self.head.forward(guess, hidden, places, rows.tables, context + step, rows.start)
            guess = chain.add(self.head.logits(hidden))
        return chain.proposal(torch.full_like(rows.lengths, num_tokens), num_tokens)

    def _tree(self, rows: DraftRows, num_tokens: int, hidden: Tensor, context: int) -> Proposal:
        """Grow a tree; its root is the pair of the last place, fed once more with the nodes after it."""
        assert self._shape is not None
        assert rows.features is not None
        root = (rows.lengths[:, None] - 2).clamp(min=0)
        root_feature = rows.features[slots_of(rows.tables, root)]
        root_token = rows.tokens.gather(1, root + 1)
        known = hidden  # what the nodes fed last gave, the root's first

        def advance(growth: Growth, level: int) -> Tensor:
            nonlocal known
            tree = growth.tree
            above = tree.parents[..., None].expand(-1, -1, known.shape[-1])
            features = torch.cat([root_feature.to(known.dtype), known.gather(1, above)], 1)
            tokens = torch.cat([root_token, growth.tokens], 1)
            last = context + growth.tokens.shape[1]
            ancestors = tree.ancestors
            known = self.head.forward(tokens, features, root + tree.depths, rows.tables, last, rows.start, ancestors)
            return ranked(self.head.logits(known[:, -growth.num_last :]), rows, level)

        return grow(self._shape, num_tokens, ranked(self.head.logits(hidden), rows, 0), advance)
