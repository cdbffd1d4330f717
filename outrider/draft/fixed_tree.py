"""From logits of several places at once to a tree of guesses, of a fixed shape.

Heads that guess places independently of each other (Medusa, a block drafter) give the likeliest ids of each place; a
tree then is a list of paths, each the ranks of its guesses (`medusa_choices` in the authors' code of 2401.10774). The
earlier paths are those that count most, since a round may have room for a few only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_TREE_NODES
from outrider.errors import ConfigError
from outrider.proposal import ROOT, Proposal
from outrider.sampling.choose import preferences
from outrider.sampling.rules import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.draft.drafter import DraftRows

__all__ = ["PUBLISHED_TREE", "FixedTree", "best_paths", "ordered_paths", "widest_paths"]

Path = tuple[int, ...]

# `mc_sim_7b_63` of github.com/FasterDecoding/Medusa, found by its authors on Vicuna 7B: ranks written as digits, the
# paths that gain most first.
_PUBLISHED = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011
006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""
PUBLISHED_TREE: tuple[Path, ...] = tuple(tuple(int(rank) for rank in path) for path in _PUBLISHED.split())


class FixedTree:
    """A tree of a fixed shape.

    Args:
        paths: Its nodes, each by the ranks on its way from the root.
        most_deep: Places that are guessed.
        vocab_size: Ids to rank.
        device: Where guesses are made.

    Raises:
        ConfigError: A path is deeper, asks for more ids than there are, or stands there twice; or there are more than
            an ancestor mask can tell apart.
    """

    def __init__(
        self, paths: Sequence[Sequence[int]], most_deep: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self.paths = ordered_paths(paths)
        _check(self.paths, most_deep, vocab_size)
        number = {path: place for place, path in enumerate(self.paths)} | {(): ROOT}
        # Made once: a captured round may read them, but not copy them from the host.
        self._parents = torch.tensor([number[path[:-1]] for path in self.paths], device=device)
        self._depths = torch.tensor([len(path) - 1 for path in self.paths], device=device)
        self._ranks = torch.tensor([path[-1] for path in self.paths], device=device)

    def depth(self, num_tokens: int) -> int:
        """How deep the first `num_tokens` nodes reach."""
        return max(map(len, self.paths[:num_tokens]), default=0)

    def guesses(self, rows: DraftRows, num_tokens: int, logits: Tensor, drafted: Tensor) -> Proposal:
        """Make the first `num_tokens` nodes of the ids that each place's logits, ``[B, depth, V]``, rank highest.

        Rows that are not `drafted` ``[B]`` get none.
        """
        count = min(num_tokens, len(self.paths))
        tokens = rows.tokens
        nodes = tokens.new_zeros(len(tokens), num_tokens)
        parents = torch.full_like(nodes, ROOT)
        parents[:, :count] = self._parents[:count]
        widest = max((path[-1] for path in self.paths[:count]), default=0) + 1
        likeliest = []
        for step in range(self.depth(count)):
            # Rules that look at the text see the likeliest guesses in it, whatever the branch.
            prefix = Prefix(tokens, rows.lengths[:, None] + step)
            scores = preferences(logits[:, step : step + 1], rows.rules, prefix, prefix.ends)
            ids = scores.topk(widest, -1).indices
            tokens.scatter_(1, prefix.ends, ids[..., 0])
            likeliest.append(ids)
        if likeliest:
            nodes[:, :count] = torch.cat(likeliest, 1)[:, self._depths[:count], self._ranks[:count]]
        return Proposal(nodes, torch.where(drafted, count, 0), None, parents)


def _check(paths: Sequence[Path], most_deep: int, vocab_size: int) -> None:
    if not paths or any(not path or min(path) < 0 for path in paths):
        raise ConfigError(f"a tree is a list of paths of ranks from 0, got {list(paths)!r}")
    deepest, widest = max(map(len, paths)), max(map(max, paths))
    if deepest > most_deep:
        raise ConfigError(f"the tree is {deepest} deep, but only {most_deep} places are guessed; cut it")
    if widest >= vocab_size:
        raise ConfigError(f"the tree asks for rank {widest}, but the vocabulary has {vocab_size} ids; narrow it")
    if len(paths) > MAX_TREE_NODES:
        raise ConfigError(f"a tree holds at most {MAX_TREE_NODES} guesses, got {len(paths)}; leave some out")


def ordered_paths(paths: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """Put a path's beginnings before it, and leave the order as it is otherwise: what is missing is added.

    Raises:
        ConfigError: A path stands there twice.
    """
    given = [tuple(path) for path in paths]
    twice = next((path for path in given if given.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"the tree names the path {list(twice)} twice; leave one out")
    found: dict[Path, None] = {}
    for path in given:
        found.update(dict.fromkeys(path[:end] for end in range(1, len(path) + 1)))
    return tuple(found) if all(given) else tuple(given)


def widest_paths(widths: Sequence[int], num_nodes: int = MAX_TREE_NODES) -> tuple[Path, ...]:
    """Make a tree of each place's likeliest few, at most `num_nodes` in all: the lowest ranks first.

    Args:
        widths: How many guesses of each place may follow each guess of the one before.
        num_nodes: What is kept.
    """
    found: list[Path] = []
    level: list[Path] = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        level = sorted(level, key=_lateness)[:num_nodes]  # no later one can be among the first
        found += level
    return tuple(sorted(found, key=_lateness)[:num_nodes])


def _lateness(path: Path) -> tuple[int, int, Path]:
    return sum(path) + len(path), len(path), path


def best_paths(accuracies: Sequence[Sequence[float]], num_nodes: int = MAX_TREE_NODES) -> tuple[Path, ...]:
    """Make the tree that is expected to have the most guesses right (2401.10774, section 2.3.3).

    Args:
        accuracies: How often the guess of each rank was right, place by place, on texts like those to come.
        num_nodes: What is kept.
    """
    chosen: list[Path] = []
    open_ends: dict[Path, float] = {(rank,): share for rank, share in enumerate(accuracies[0])} if accuracies else {}
    while open_ends and len(chosen) < num_nodes:
        path = max(open_ends, key=lambda one: (open_ends[one], -len(one), [-rank for rank in one]))
        share = open_ends.pop(path)
        chosen.append(path)
        if len(path) < len(accuracies):
            open_ends |= {(*path, rank): share * right for rank, right in enumerate(accuracies[len(path)])}
    return tuple(chosen)
