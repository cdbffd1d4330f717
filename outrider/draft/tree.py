"""Growing trees level by level: fixed branches, or best-first within a budget of nodes.

A drafter that guesses one place after another (a draft model, an EAGLE head) can follow several guesses at once: the
nodes of a level are its next pass. Which are followed is one of two shapes. *Branches* "4x2x1": so many after each
node, all of them followed and verified. *Dynamic* (EAGLE-2, 2406.16858, section 4): of each level the few best paths
are followed, and of all that were seen the best are verified. A path's score is the sum of its guesses' log-scores, so
no node is better than the one before it, and what is kept is a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_TREE_NODES
from outrider.errors import ConfigError
from outrider.proposal import ROOT, Proposal, Tree
from outrider.sampling.choose import preferences
from outrider.sampling.rules import Prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outrider.draft.drafter import DraftRows

__all__ = ["Growth", "TreeShape", "grow", "ranked"]

DEEPEST = 6  # levels of a dynamic tree: later ones are rarely reached
SEEN = 8  # ways on from each node that a dynamic tree looks at, at least: they cost nothing until they are followed


@dataclass(frozen=True)
class TreeShape:
    """How a tree grows.

    Attributes:
        branches: Guesses after each node, level by level; empty lets scores decide.
    """

    branches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size, total = 1, 0
        for width in self.branches:
            size *= width
            total += size
        if total > MAX_TREE_NODES:
            shown = "x".join(map(str, self.branches))
            raise ConfigError(f"a tree of {shown} has {total} guesses, but {MAX_TREE_NODES} is the most; cut it")

    def depth(self, num_nodes: int) -> int:
        """Levels of a tree of at most `num_nodes`."""
        return min(len(self.branches) if self.branches else DEEPEST, max(1, num_nodes))

    def followed(self, num_nodes: int) -> int:
        """Nodes of each level that a dynamic tree follows: all followed ones together fit into `num_nodes` places."""
        return max(1, num_nodes // self.depth(num_nodes))


@dataclass(frozen=True)
class Growth:
    """The nodes that were followed so far, in the order in which they are fed.

    Attributes:
        tokens: ``[B, n]``.
        parents: What each follows, ``[B, n]``, by its place among them; `ROOT` for the first level's.
        num_last: How many of them are the last level's.
    """

    tokens: Tensor
    parents: Tensor
    num_last: int

    @property
    def tree(self) -> Tree:
        """How they hang together with the root."""
        lengths = torch.full_like(self.tokens[:, 0], self.tokens.shape[1])
        return Proposal(self.tokens, lengths, None, self.parents).tree()


def grow(
    shape: TreeShape,
    num_nodes: int,
    scores: Tensor,
    advance: Callable[[Growth, int], Tensor],
) -> Proposal:
    """Grow one tree a row: always ``[B, num_nodes]``.

    Args:
        shape: How.
        num_nodes: Guesses at most.
        scores: Log-scores of the first guesses, ``[B, 1, V]``, at most 0.
        advance: Feeds the nodes followed so far (and the level's number, from 1), and gives log-scores of what may come
            after each of the last level's, ``[B, num_last, V]``.
    """
    growing = _Growing(shape, num_nodes)
    depth = shape.depth(num_nodes)
    growing.add(scores)
    for level in range(1, depth):
        if shape.branches and growing.num_seen >= num_nodes:
            break
        growing.add(advance(growing.growth(), level))
    return growing.proposal()


class _Growing:
    """All nodes seen so far, and which of them are followed."""

    def __init__(self, shape: TreeShape, num_nodes: int) -> None:
        self._shape, self._num_nodes = shape, num_nodes
        self._tokens: list[Tensor] = []  # of all nodes seen, level by level, [B, n]
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # by number among all seen
        self._followed: list[Tensor] = []  # numbers of those followed, level by level
        self._levels = 0

    @property
    def num_seen(self) -> int:
        """Nodes seen."""
        return sum(tokens.shape[1] for tokens in self._tokens)

    def add(self, scores: Tensor) -> None:
        """Take in what may follow each of the last level's nodes: ``[B, m, V]``."""
        rows, above, vocab_size = scores.shape
        branches = self._shape.branches
        width = branches[self._levels] if branches else max(SEEN, self._shape.followed(self._num_nodes))
        best, ids = scores.topk(min(width, vocab_size), -1)
        width = best.shape[-1]
        begin = self.num_seen
        if self._followed:
            parents = self._followed[-1]
            known = torch.cat(self._scores, 1).gather(1, parents)
            best = best + known[..., None]
        else:
            parents = torch.full((rows, above), ROOT, device=ids.device)
        flat = best.flatten(1)
        self._tokens.append(ids.flatten(1))
        self._scores.append(flat)
        self._parents.append(parents.repeat_interleave(width, 1))
        if branches:
            chosen = torch.arange(flat.shape[1], device=ids.device).expand(rows, -1)
        else:
            chosen = flat.topk(min(self._shape.followed(self._num_nodes), flat.shape[1]), -1).indices
        self._followed.append(chosen + begin)
        self._levels += 1

    def growth(self) -> Growth:
        """The nodes followed."""
        followed = torch.cat(self._followed, 1)
        tokens = torch.cat(self._tokens, 1).gather(1, followed)
        parents = _renumbered(torch.cat(self._parents, 1).gather(1, followed), followed)
        return Growth(tokens, parents, self._followed[-1].shape[1])

    def proposal(self) -> Proposal:
        """The best of all that were seen; of branches the first ones, which are the upper ones."""
        tokens, scores, parents = (torch.cat(part, 1) for part in (self._tokens, self._scores, self._parents))
        count = min(self._num_nodes, tokens.shape[1])
        if self._shape.branches:
            kept = torch.arange(count, device=tokens.device).expand(len(tokens), -1)
        else:  # no node is better than its parent, and of equals the earlier one comes first
            order = scores.sort(dim=1, descending=True, stable=True).indices
            kept = order[:, :count].sort(1).values
        made = Proposal(
            tokens.gather(1, kept),
            torch.full_like(tokens[:, 0], count),
            None,
            _renumbered(parents.gather(1, kept), kept),
        )
        return made.widened(self._num_nodes)


def _renumbered(parents: Tensor, kept: Tensor) -> Tensor:
    """Say parents ``[B, n]`` by their place in `kept` ``[B, m]`` instead of by number; `ROOT` stays."""
    same = kept[:, None] == parents[..., None]
    return torch.where(same.any(-1), same.int().argmax(-1), ROOT)


def ranked(logits: Tensor, rows: DraftRows, step: int) -> Tensor:
    """Log-scores ``[B, m, V]`` of what may stand `step` places after the text, from logits of m nodes of one level.

    The best is what `choose` would take, the next what it would take instead: where the target draws, its noise at this
    position is known, and with it guesses agree as often as two distributions allow. Rules that look at the text before
    a choice see the text without the guesses.
    """
    text, ends = Prefix(rows.tokens, rows.lengths[:, None]), rows.lengths[:, None] + step
    logits, rules = logits.float(), rows.rules
    if rules.flags.simple:
        return preferences(logits, rules, text, ends).log_softmax(-1)
    # Every node alone: side by side they would count as one after another.
    each = [preferences(logits[:, node : node + 1], rules, text, ends) for node in range(logits.shape[1])]
    return torch.cat(each, 1).log_softmax(-1)
