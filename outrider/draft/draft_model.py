"""A small model that drafts by generating, on a KV cache of its own that may lag behind the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from outrider.draft.catching_up import runs
from outrider.draft.chain import Chain
from outrider.draft.drafter import WithCache
from outrider.draft.tree import Growth, TreeShape, grow, ranked
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import DraftRows
    from outrider.model.runner import Runner
    from outrider.proposal import Proposal

__all__ = ["DraftModelDrafter"]

REFED = 2  # tokens fed at the start of every chain: after full acceptance the cache lacks the last two
REFED_FREE = 4  # so many where a captured pass costs no more for it: after a plain round or two nothing need be read
FREE_PASS = 16  # tokens of such a pass, at most: as many as kernels compute in any case


class DraftModelDrafter(WithCache):
    """Drafts with a causal language model that shares the target's vocabulary.

    Args:
        runner: The draft, its cache allocated with as many blocks as the target's: both use one block list.
        target_vocab_size: Size of the target's logits, to which q is padded.
        shared_vocab_size: Ids that mean the same to both; no other is guessed.
        name: What statistics call it.
        shortlist: Ids that the draft's head was cut down to, ``[N]`` rising; None for a whole head.
        follows: The target's device.
        own_cache: Whether the draft has a cache of its own. One made of the target's own layers reads what the target
            has cached: nothing is ever missing, and only the last committed token is fed again.
        shape: How trees grow; None drafts chains. Where guesses must be drawn with their q, they are chains too.
        longest: Guesses of a usual round, at most: how deep a tree can be, and how much of a text it feeds anew.
    """

    def __init__(
        self,
        runner: Runner,
        target_vocab_size: int,
        shared_vocab_size: int,
        name: str = "draft_model",
        *,
        shortlist: torch.Tensor | None = None,
        follows: torch.device | None = None,
        own_cache: bool = True,
        shape: TreeShape | None = None,
        longest: int = 1,
    ) -> None:
        super().__init__(runner)
        self.runner = runner
        self._own_cache = own_cache
        self.device_side = follows is None or follows == runner.device
        self._shape = shape if self.device_side else None
        refed = REFED if self._shape is None else self._shape.depth(longest) + 1
        self._fed_first = refed if own_cache else 1
        self._buckets: list[int] = []  # rows of captured rounds
        self.name = name
        self._shortlist = None if shortlist is None else shortlist.to(runner.device)
        self._target_vocab_size = target_vocab_size
        self._shared_vocab_size = shared_vocab_size
        self.makes_trees = self._shape is not None

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Make a chain's passes fast: of the first few tokens a row, then of one."""
        self._buckets = sorted(num_rows)
        passes = sorted({(rows, width) for rows in num_rows for width in (1, self._window(rows))})
        self.runner.tune(passes, places, num_rows if self._own_cache else ())

    def missing(self, slot: int, length: int) -> int:
        """Count what is not cached, but for what a chain feeds itself."""
        return max(0, length - self._fed_first - self._cached.get(slot, 0)) if self._own_cache else 0

    def slack(self, num_rows: int) -> int:
        """Count what a chain's first pass feeds beyond what it must."""
        return self._window(num_rows) - self._fed_first

    def _window(self, num_rows: int) -> int:
        """Give the tokens a row of a chain's first pass, in a round of so many rows."""
        bucket = next((one for one in self._buckets if one >= num_rows), FREE_PASS)
        free = self._own_cache and not self.makes_trees and bucket * REFED_FREE <= FREE_PASS
        return REFED_FREE if free else self._fed_first

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed the next tokens that are not cached; on a card, rows that lack about as many share a pass.

        What a shorter row is fed beyond its count is not counted as cached, and so fed again before it is read.
        """
        device = self.runner.device
        begins = [self._cached.get(slot, 0) for slot in rows.slots]
        for run in runs(begins, counts, together=device.type == "cuda"):
            places = upload(run.places, rows.tokens.device)
            tokens = rows.tokens[places].to(device)
            positions = run.positions(tokens.shape[1] - 1, device)
            fed = self._known(tokens.gather(1, positions))
            self.runner.feed(fed, positions, rows.tables[places].to(device), run.context, rows.start)
        for slot, begin, count in zip(rows.slots, begins, counts, strict=True):
            self._cached[slot] = begin + count

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Generate `num_tokens` tokens a row, by the row's own sampling parameters and prefix; or a tree of them."""
        if self._shape is not None and not rows.independent:
            return self._tree(self._shape, rows, num_tokens)
        device = self.runner.device
        chain, tables = Chain(rows, device), rows.tables.to(device)
        window = torch.arange(self._window(len(rows.slots)), 0, -1, device=device)
        positions = (chain.lengths - window).clamp(min=0)
        context = max(rows.host_lengths)
        for step in range(num_tokens):
            fed = self._known(chain.tokens.gather(1, positions))
            logits = self.runner.forward(fed, positions, tables, context + step, rows.start)[:, -1:]
            chain.add(self._widened(logits))
            positions = chain.lengths + step  # of the guess
        counted = torch.full_like(chain.lengths[:, 0], num_tokens)
        return chain.proposal(counted, num_tokens, self._target_vocab_size).to(rows.lengths.device)

    def kept(self, slot: int) -> int:
        """Count what a cache of its own holds; the target's needs no counting."""
        return super().kept(slot) if self._own_cache else 0

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Count as cached what was fed and turned out right; the next chain feeds the two tokens after that.

        A tree's nodes lie where they were fed, not where the text has them: none of them counts.
        """
        for slot, length, right in zip(slots, lengths, accepted, strict=True):
            self._cached[slot] = length if self.makes_trees else length - 1 + right

    def _tree(self, shape: TreeShape, rows: DraftRows, num_tokens: int) -> Proposal:
        """Grow a tree; its root is the last committed token, fed once more with the nodes after it."""
        last = rows.lengths[:, None] - 1
        root = self._known(rows.tokens.gather(1, last))
        positions = (last - torch.arange(self._fed_first - 1, -1, -1, device=last.device)).clamp(min=0)
        context = max(rows.host_lengths)
        fed = self._known(rows.tokens.gather(1, positions))
        first = self.runner.forward(fed, positions, rows.tables, context, rows.start)[:, -1:]

        def advance(growth: Growth, level: int) -> torch.Tensor:
            tree, tokens = growth.tree, torch.cat([root, self._known(growth.tokens)], 1)
            place = context + growth.tokens.shape[1]
            ancestors = tree.ancestors
            logits = self.runner.forward(tokens, last + tree.depths, rows.tables, place, rows.start, ancestors)
            return ranked(self._padded(logits[:, -growth.num_last :]), rows, level)

        return grow(shape, num_tokens, ranked(self._padded(first), rows, 0), advance)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Give logits over the target's ids; what the draft does not know cannot be guessed."""
        known = self._widened(logits)
        return F.pad(known, (0, self._target_vocab_size - known.shape[-1]), value=float("-inf"))

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Give logits ``[B, 1, N]`` over the shared vocabulary; ids that the head was cut down by are never guessed."""
        if self._shortlist is None:
            return logits[..., : self._shared_vocab_size]
        whole = logits.new_full((*logits.shape[:-1], self.runner.vocab_size), float("-inf"))
        whole[..., self._shortlist] = logits
        return whole[..., : self._shared_vocab_size]

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keep ids that only the target's padding knows from indexing past the draft's embedding."""
        if self.runner.vocab_size >= self._target_vocab_size:
            return tokens
        return tokens.clamp(max=self.runner.vocab_size - 1)
