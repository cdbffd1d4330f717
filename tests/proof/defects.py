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


def too_kind(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """An acceptance chance that is the square root of what it should be: wrong guesses pass too often."""
    at_p, at_q = (table.gather(-1, tokens[..., None])[..., 0] for table in (p, q))
    return (at_p / at_q.where(at_q > 0, 1.0)).clamp(max=1.0).sqrt()


def not_from_the_residual(p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """What is drawn after a refusal comes from the target's whole distribution."""
    return p
