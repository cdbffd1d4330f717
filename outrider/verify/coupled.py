"""Coupled verification: keep guesses while they equal the target's own choice.

The choice is a function of the target's scores and of counter-based noise (`sampling.choose`), so what is committed
is what the target alone would have sampled with the same seed: the drafter, the draft length and the batch can change
only how many rounds that takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.proposal import Acceptance, Proposal

if TYPE_CHECKING:
    import torch

__all__ = ["verify_coupled"]


def verify_coupled(proposal: Proposal, choice: torch.Tensor) -> Acceptance:
    """Walk while the proposal ``[B, K]`` agrees with the choice ``[B, K+1]``; then commit the choice itself."""
    agrees = (proposal.tokens == choice[:, :-1]) & proposal.within()
    return Acceptance(choice, agrees.long().cumprod(1).sum(1))
