"""Verifiers with a fault, to be put in place of the real ones, which must be found."""

from __future__ import annotations

import torch

from outrider.proposal import Acceptance, Proposal
from outrider.verify.coupled import verify_coupled


def accepts_the_first_guess(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
    """Coupled verification that takes the first guess whether it is right or not."""
    if not proposal.num_tokens:
        return verify_coupled(proposal, choice)
    taken = choice.clone()
    taken[:, 0] = torch.where(proposal.lengths > 0, proposal.tokens[:, 0], choice[:, 0])
    return verify_coupled(proposal, taken)


def accepts_whatever_comes(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """An acceptance chance of 1 for every guess: what comes out is the draft's distribution."""
    return torch.ones(tokens.shape)


def residual_backwards(p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """What is drawn after a refusal, with the difference taken the wrong way round."""
    left = (q - scale * p).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.where(mass > 0, 1.0), p)
