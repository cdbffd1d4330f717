"""From logits to the tokens taken where temperature is the only rule: no score in full, nothing of size V written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.kernels.launch import runs_kernels
from outrider.sampling.choose import choose
from outrider.sampling.random import Purpose, gumbel

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.sampling.rules import Prefix, Rules

__all__ = ["choose_tokens", "choose_tokens_reference", "take"]


def take(logits: Tensor, rules: Rules, prefix: Prefix, purpose: Purpose = Purpose.CHOICE) -> tuple[Tensor, Tensor]:
    """Take a token at every position by whatever rules there are: `choose_tokens` where it can, else torch's `choose`.

    Logits ``[B, T, V]`` -> ids ``[B, T]`` and their logits, fp32 ``[B, T]``: NaN where any of the position's is.
    """
    if rules.flags.simple:
        return choose_tokens(logits, rules.temperature, rules.seeds, prefix.ends, purpose, random=rules.flags.random)
    ids = choose(logits, rules, prefix, purpose)
    best = logits.gather(-1, ids[..., None])[..., 0].float()
    return ids, best.masked_fill(logits.amax(-1).isnan(), float("nan"))  # a draw among NaNs need not find one


def choose_tokens(
    logits: Tensor, temperature: Tensor, seeds: Tensor, ends: Tensor, purpose: Purpose = Purpose.CHOICE, *, random: bool
) -> tuple[Tensor, Tensor]:
    """Take a token at every position, as `outrider.sampling.choose.choose` does with no rule but temperature.

    A draw is Gumbel-max, ``argmax((logit - max) / temperature + gumbel(seed, end, id))``; scores are fp32 whatever the
    logits are. Of equals the lowest id wins. Where a logit is NaN, the first such id is taken, drawn row or not.

    On a device, all launches share counters: call it from one stream, and once before a CUDA graph captures it.

    Args:
        logits: ``[B, T, V]``, fp32, bf16 or fp16.
        temperature: fp32 ``[B]``; 0 takes the likeliest.
        seeds: int64 ``[B]``.
        ends: int64 ``[B, T]``: the absolute position of each token taken.
        purpose: What the noise is for.
        random: Known to the host: whether any row's temperature is above 0.

    Returns:
        Ids, int64 ``[B, T]``, and their logits (before noise), fp32 ``[B, T]``: NaN where any of the position's is.
    """
    if not runs_kernels(logits):
        return choose_tokens_reference(logits, temperature, seeds, ends, purpose, random=random)
    from outrider.kernels.jit.choose import launch_choose

    return launch_choose(logits, temperature, seeds, ends, int(purpose), random=random)


def choose_tokens_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, ends: Tensor, purpose: Purpose = Purpose.CHOICE, *, random: bool
) -> tuple[Tensor, Tensor]:
    """Do what `choose_tokens` does, in plain torch."""
    logits = logits.float()
    broken = logits.isnan()
    scores = logits
    if random:
        drawn = (temperature > 0)[:, None, None]
        divisor = temperature.where(temperature > 0, 1.0)[:, None, None]
        top = logits.masked_fill(broken, float("-inf")).amax(-1, keepdim=True)
        noise = gumbel(seeds, ends, purpose, logits.shape[-1])
        drawn_scores = torch.where(logits.isinf(), logits, (logits - top) / divisor + noise)
        scores = torch.where(drawn, drawn_scores, logits)
    ids = torch.where(broken.any(-1), broken.int().argmax(-1), scores.argmax(-1))
    return ids, logits.gather(-1, ids[..., None])[..., 0]
