"""A block drafter guesses several tokens in one pass, from hidden states of the target (DFlash, 2602.06036; DSpark).

With L committed tokens, the target's features of the places 0 to L - 2 are there. The drafter's cache holds keys and
values that were made of them; it may lag by as many places as a round of its own can add, and every round makes the
last few anew. The block stands behind them, from place L - 1 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.draft.chain import Chain
from outrider.draft.drafter import WithCache
from outrider.draft.fixed_tree import FixedTree
from outrider.kernels.attention import slots_of
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import DraftRows
    from outrider.model.dflash import BlockDraft
    from outrider.proposal import Proposal

__all__ = ["BlockDrafter"]


class BlockDrafter(WithCache):
    """Drafts with a block drafter.

    Args:
        network: The drafter's network, on the target's device; its cache goes by the target's block tables.
        paths: The tree's nodes, each by the ranks on its way from the root, see `FixedTree`; None: a chain. A Markov
            head corrects chains alone.
        name: What statistics call it.

    Raises:
        ConfigError: The tree does not fit, see `FixedTree`.
    """

    device_side = True

    def __init__(self, network: BlockDraft, paths: Sequence[Sequence[int]] | None = None, name: str = "dflash") -> None:
        super().__init__(network)
        self.network = network
        self.name = name
        most = network.settings.num_guesses
        self.tree = None if paths is None else FixedTree(paths, most, network.vocab_size, network.device)
        self.makes_trees = self.tree is not None
        self._window = most + 1  # what a round of its own adds: its guesses and the target's own token

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Nothing: the products are the library's."""

    def missing(self, slot: int, length: int) -> int:
        """Count the places whose features are not kept, but for those that a round makes itself."""
        return max(0, length - 1 - self._window - self._cached.get(slot, 0))

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Make keys and values of the next `counts` places of each row; shorter ones repeat their last place."""
        device = self.network.device
        begins = [self._cached.get(slot, 0) for slot in rows.slots]
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        steps = torch.arange(max(counts), device=device)
        places = torch.minimum(upload(begins, device)[:, None] + steps, upload(ends, device)[:, None] - 1)
        self._keep(rows, places.clamp(min=0))
        self._cached.update(zip(rows.slots, ends, strict=True))

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Guess a chain, or the tree's first `num_tokens` nodes; a chain of drawn tokens where q is asked for."""
        last = rows.lengths[:, None] - 1
        self._keep(rows, (last - torch.arange(self._window, 0, -1, device=last.device)).clamp(min=0))
        tree = None if rows.independent else self.tree
        most = self.network.settings.num_guesses
        depth = min(num_tokens, most) if tree is None else tree.depth(num_tokens)
        longest = max(rows.host_lengths)
        guess = rows.tokens.gather(1, last)
        logits = self.network.guess(guess, last, rows.tables, longest, rows.start, depth)
        if tree is not None:
            return tree.guesses(rows, num_tokens, self.network.spread(logits), rows.lengths > 0)
        chain = Chain(rows, rows.lengths.device)
        for step in range(depth):
            guess = chain.add(self.network.corrected(logits[:, step : step + 1], guess))
        return chain.proposal(torch.full_like(rows.lengths, depth), num_tokens)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Count as kept what the round made: all before the last token, unless more than its window was missing."""
        for slot, length in zip(slots, lengths, strict=True):
            if self.missing(slot, length) == 0:
                self._cached[slot] = length - 1

    def _keep(self, rows: DraftRows, places: torch.Tensor) -> None:
        assert rows.features is not None, "the target was not asked to keep hidden states"
        self.network.keep(rows.features[slots_of(rows.tables, places)], places, rows.tables)
