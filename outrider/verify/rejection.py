"""Speculative sampling: exact in distribution for guesses drawn from a known q.

Sources: Leviathan et al. 2211.17192 (algorithm 1), Chen et al. 2302.01318; block verification is
Sun et al. 2403.10444 (algorithm 2). All take p, the target's distribution after every rule, and q, the distribution
each guess was drawn from (one-hot for a guess that was not drawn).
"""

from __future__ import annotations

import torch

from outrider.proposal import Acceptance, Proposal
from outrider.sampling.random import Purpose, gumbel, uniform

__all__ = ["accept_probability", "block_walk", "residual", "verify_block", "verify_rejection"]


def accept_probability(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Give ``min(1, p(x)/q(x))`` for each guess: p, q ``[..., V]``, tokens ``[...]`` -> ``[...]``.

    A guess that q says could not have been drawn is judged as one drawn with certainty: p(x).
    """
    at_p, at_q = (table.gather(-1, tokens[..., None])[..., 0] for table in (p, q))
    return (at_p / at_q.where(at_q > 0, 1.0)).clamp(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Give what is left of the target to draw from after a rejection, ``norm(max(scale * p - q, 0))``: ``[..., V]``.

    Where nothing is left (p equals q up to rounding, so a rejection has probability 0) it is p.
    """
    left = (scale * p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.where(mass > 0, 1.0), p)


def verify_rejection(proposal: Proposal, p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> Acceptance:
    """Accept each guess with probability ``min(1, p/q)``, and draw from the residual at the first refusal.

    Args:
        proposal: K guesses a row, with their q.
        p: The target's distribution at every position, ``[B, K+1, V]``.
        seeds: One seed a row, ``[B]``.
        positions: Absolute position of each token chosen, ``[B, K+1]``.
    """
    q = proposal.probs_or_certain(p.shape[-1])
    chance = accept_probability(p[:, :-1], q, proposal.tokens)
    coins = uniform(seeds, positions[:, :-1], Purpose.ACCEPT)
    accepted = ((coins < chance) & proposal.within()).long().cumprod(1).sum(1)
    rest = torch.cat([residual(p[:, :-1], q), p[:, -1:]], 1)
    rest = torch.where((accepted == proposal.lengths)[:, None, None], p, rest)
    return _committed(proposal, accepted, rest, seeds, positions)


def block_walk(proposal: Proposal, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give block verification's quantities: the acceptance chance h of each prefix ``[B, K]`` and its weight.

    The weight ``[B, K+1]`` is p_i of the paper: ``p_0 = 1``, ``p_i = min(p_{i-1} * p(x_i)/q(x_i), 1)``. A prefix of
    i guesses is accepted with chance ``h_i = s / (s + 1 - p_i)``, ``s = sum_x max(p_i * p(x) - q(x), 0)`` at the next
    position, and ``h = p_i`` for the whole block.
    """
    at_p, at_q = (t.gather(-1, proposal.tokens[..., None])[..., 0] for t in (p[:, :-1], q))
    ratio = at_p / at_q.where(at_q > 0, 1.0)
    weights = [torch.ones_like(ratio[:, 0])]
    for step in range(proposal.num_tokens):
        weights.append((weights[-1] * ratio[:, step]).clamp(max=1.0))
    weight = torch.stack(weights, 1)
    surplus = (weight[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    missing = 1 - weight[:, 1:-1]
    whole = surplus + missing
    chance = torch.where(whole > 0, surplus / whole.where(whole > 0, 1.0), 1.0)
    chance = torch.cat([chance, weight[:, -1:]], 1)
    last = torch.arange(1, proposal.num_tokens + 1, device=p.device) == proposal.lengths[:, None]
    return torch.where(last, weight[:, 1:], chance), weight


def verify_block(proposal: Proposal, p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> Acceptance:
    """Judge the guesses as one block: accept the longest prefix whose coin falls below its chance.

    Arguments as for `verify_rejection`. Never accepts fewer tokens in expectation.
    """
    q = proposal.probs_or_certain(p.shape[-1])
    chance, weight = block_walk(proposal, p, q)
    coins = uniform(seeds, positions[:, :-1], Purpose.ACCEPT)
    index = torch.arange(1, proposal.num_tokens + 1, device=p.device)
    accepted = ((coins < chance) & proposal.within()).long().mul(index).amax(1)
    rest = torch.cat([residual(p[:, :-1], q, weight[:, :-1, None]), p[:, -1:]], 1)
    rest = torch.where((accepted == proposal.lengths)[:, None, None], p, rest)
    return _committed(proposal, accepted, rest, seeds, positions)


def _committed(
    proposal: Proposal, accepted: torch.Tensor, rest: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> Acceptance:
    """Append one draw from ``rest[b, accepted[b]]`` to the accepted guesses."""
    at = accepted[:, None]
    left = rest.gather(1, at[..., None].expand(-1, -1, rest.shape[-1]))
    noise = gumbel(seeds, positions.gather(1, at), Purpose.RECOVER, rest.shape[-1])
    last = (left.log() + noise).argmax(-1)
    tokens = torch.cat([proposal.tokens, torch.zeros_like(last)], 1).scatter(1, at, last)
    return Acceptance(tokens, accepted)
