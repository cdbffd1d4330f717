"""Typical acceptance (Medusa, Cai et al. 2401.10774, section 3.3.2): LOSSY, more guesses for a changed distribution."""

from __future__ import annotations

import torch

from outrider.proposal import Acceptance, Proposal

__all__ = ["is_typical", "verify_typical"]

EPSILON = 0.09  # the paper's hard threshold
DELTA = 0.3  # and entropy-dependent one, sqrt(epsilon) as the paper sets it


def verify_typical(proposal: Proposal, p: torch.Tensor, choice: torch.Tensor) -> Acceptance:
    """Accept each guess that is typical enough: ``p(x) > min(epsilon, delta * exp(-H(p)))``.

    Args:
        proposal: K guesses a row.
        p: The target's distribution, ``[B, K+1, V]``; one-hot for a greedy row, which is then exact.
        choice: The target's own choice, ``[B, K+1]``: committed after the last accepted guess.
    """
    typical = is_typical(p[:, :-1], proposal.tokens)
    accepted = (typical & proposal.within()).long().cumprod(1).sum(1)
    guesses = torch.cat([proposal.tokens, choice[:, -1:]], 1)
    past = torch.arange(choice.shape[1], device=choice.device) >= accepted[:, None]
    return Acceptance(torch.where(past, choice, guesses), accepted)


def is_typical(p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether each token ``[B, K]`` is likely enough for how certain the target is there: p ``[B, K, V]``."""
    entropy = -(p * p.clamp(min=1e-12).log()).sum(-1)
    threshold = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return p.gather(-1, tokens[..., None])[..., 0] > threshold
