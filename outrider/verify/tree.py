"""Verification of trees: which path from the root the target would have taken.

The rules are those of chains (`coupled`, `rejection`, `typical`), for several guesses at a position. Fed token 0 is the
root, a row's last committed token; node i is fed token i + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.proposal import Acceptance, Proposal, Tree
from outrider.sampling.random import Purpose, gumbel, uniform
from outrider.verify.rejection import accept_probability, residual
from outrider.verify.typical import is_typical

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["verify_tree_coupled", "verify_tree_rejection", "verify_tree_typical"]


def verify_tree_coupled(proposal: Proposal, tree: Tree, choice: Tensor) -> Acceptance:
    """Walk from the root while the choice is a child, then commit the choices along the way: choice ``[B, N+1]``."""
    agrees = (proposal.tokens == choice.gather(1, tree.parents)) & proposal.within()
    agrees &= ~_repeated(proposal.tokens, tree.parents, proposal.within())
    return _accepted(agrees, tree, choice)


def verify_tree_typical(proposal: Proposal, tree: Tree, p: Tensor, choice: Tensor) -> Acceptance:
    """Accept what is typical enough after its parent; take the longest such path. LOSSY, see `verify_typical`.

    Args:
        proposal: N nodes a row.
        tree: The proposal's.
        p: The target's distribution after each fed token, ``[B, N+1, V]``.
        choice: The target's own choice there, ``[B, N+1]``: committed after the last accepted guess.
    """
    before = p.gather(1, tree.parents[..., None].expand(-1, -1, p.shape[-1]))
    good = _whole_paths(is_typical(before, proposal.tokens) & proposal.within(), tree)
    depth = tree.depths.masked_fill(~good, -1)
    last = depth.argmax(1, keepdim=True)  # of equally long paths the first
    on_path = tree.above.gather(1, last[..., None].expand(-1, -1, tree.above.shape[-1]))[:, 0]
    path, accepted = _ordered(on_path, tree)
    fed = torch.cat([choice[:, :1], proposal.tokens], 1).gather(1, path).roll(-1, 1)
    past = torch.arange(choice.shape[1], device=choice.device) >= accepted[:, None]
    return Acceptance(torch.where(past, choice.gather(1, last), fed), accepted, path)


def verify_tree_rejection(proposal: Proposal, tree: Tree, p: Tensor, seeds: Tensor, positions: Tensor) -> Acceptance:
    """Judge siblings one after another; each refusal leaves its residual to the next. Exact in distribution.

    Recursive rejection sampling (2402.14160, algorithm 1; with replacement it is SpecInfer's, 2305.09781): a child
    x drawn from q is accepted with probability ``min(1, r(x) / q(x))``, where r is what is left of the target there,
    at first p; refused, it leaves ``norm(max(r - q, 0))``. In the end one token is drawn from what is left.

    Args:
        proposal: N nodes a row, in an order that has parents before children, with their q.
        tree: The proposal's.
        p: The target's distribution after each fed token, ``[B, N+1, V]``.
        seeds: One seed a row, ``[B]``.
        positions: Of noise: one number for each fed token, ``[B, N+1]``, no two the same.
    """
    q = proposal.probs_or_certain(p.shape[-1])
    coins = uniform(seeds, positions[:, :-1], Purpose.ACCEPT)
    at = torch.zeros_like(proposal.lengths)  # the fed token that the walk has come to
    left, within = p[:, 0], proposal.within()
    on_path = torch.zeros_like(tree.depths, dtype=torch.bool)
    on_path[:, 0] = True
    for node in range(proposal.num_tokens):
        asked = (tree.parents[:, node] == at) & within[:, node]
        chance = accept_probability(left, q[:, node], proposal.tokens[:, node])
        taken = asked & (coins[:, node] < chance)
        refused = asked & ~taken
        left = torch.where(refused[:, None], residual(left, q[:, node]), left)
        left = torch.where(taken[:, None], p[:, node + 1], left)
        at = torch.where(taken, node + 1, at)
        on_path[:, node + 1] = taken
    path, accepted = _ordered(on_path, tree)
    noise = gumbel(seeds, positions.gather(1, at[:, None]), Purpose.RECOVER, p.shape[-1])[:, 0]
    last = (left.log() + noise).argmax(-1, keepdim=True)
    fed = torch.cat([last, proposal.tokens], 1).gather(1, path).roll(-1, 1)
    return Acceptance(fed.scatter(1, accepted[:, None], last), accepted, path)


def _accepted(agrees: Tensor, tree: Tree, choice: Tensor) -> Acceptance:
    path, accepted = _ordered(_whole_paths(agrees, tree), tree)
    return Acceptance(choice.gather(1, path), accepted, path)


def _whole_paths(good: Tensor, tree: Tree) -> Tensor:
    """Which fed tokens are good together with all before them: nodes ``[B, N]`` -> ``[B, N+1]``, the root is."""
    broken = torch.cat([torch.zeros_like(good[:, :1]), ~good], 1)
    return ~(tree.above & broken[:, None]).any(-1)


def _ordered(on_path: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Put the tokens of one path in order: ``[B, N+1]`` by depth, beyond its end the depth itself; and its nodes."""
    width = on_path.shape[1]
    index = torch.arange(width, device=on_path.device).expand_as(on_path)
    accepted = on_path.sum(1) - 1
    # What is not on the path goes to one more column, which is cut off.
    by_depth = torch.zeros(len(on_path), width + 1, dtype=torch.long, device=on_path.device)
    by_depth = by_depth.scatter(1, tree.depths.where(on_path, width), index)[:, :width]
    return torch.where(index <= accepted[:, None], by_depth, index), accepted


def _repeated(tokens: Tensor, parents: Tensor, within: Tensor) -> Tensor:
    """Which nodes repeat an earlier sibling's guess, ``[B, N]``."""
    same = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None]) & within[:, None]
    return same.tril(-1).any(-1)
