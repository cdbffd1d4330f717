"""How far two tokens are from being the one to take, by scores that are better than those that were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.sampling.choose import distribution, shaped
from outrider.sampling.random import Purpose, gumbel, mixed_seed
from outrider.sampling.rules import Prefix, RuleTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.sampling.params import SamplingParams
    from outrider.sampling.rules import Rules

__all__ = ["Gap", "allowed", "gap_of", "laws"]

OUT = float("-inf")


class Gap(NamedTuple):
    """What stands between two tokens.

    Attributes:
        reach: How much logits must change so that either token would be taken: the larger of both, in units of a
            logit, noise of a draw included. None: one of the tokens is clearly ruled out.
        top2: How far the best two choices are apart.
    """

    reach: float | None
    top2: float


def gap_of(
    logits: torch.Tensor,
    prefix: Sequence[int],
    tokens: tuple[int, int],
    params: SamplingParams,
    near: float,
    prompt_length: int | None = None,
    sample: int = 0,
) -> Gap:
    """Tell how far two tokens are from being taken after `prefix`.

    Under top_k, top_p or min_p a token whose place at the filter's border is itself within `near` counts as inside for
    its own sake, and as outside where it stands before another.

    Args:
        logits: ``[V]``, fp32.
        prefix: Ids before the place, the prompt's included.
        tokens: The two tokens.
        params: How the texts were chosen; penalties, bias and filters count, the seed must be set for a draw.
        near: How much rounding may move the distance of two logits.
        prompt_length: How many of `prefix` are the prompt; all by default.
        sample: Which of the request's n samples the text is.
    """
    scores = _ruled(logits, prefix, params, prompt_length)
    near *= _stretch(params)
    surely = perhaps = torch.ones(len(scores), dtype=torch.bool)
    if not params.greedy:
        surely, perhaps = _inside(scores, params, near)
        seed = torch.tensor([mixed_seed(params.seed or 0, sample)])
        noise = gumbel(seed, torch.tensor([[len(prefix)]]), Purpose.CHOICE, len(scores))[0, 0]
        scores = scores + params.temperature * noise
    best, second = scores.masked_fill(~perhaps, OUT).topk(2).values.tolist()
    stretch = _stretch(params)
    if not all(bool(perhaps[token]) and scores[token] > OUT for token in tokens):
        return Gap(None, (best - second) / stretch)
    most = float(scores.masked_fill(~surely, OUT).max())
    reach = max(max(0.0, most - float(scores[token])) for token in tokens)
    return Gap(reach / stretch, (best - second) / stretch)


def allowed(
    logits: torch.Tensor, prefix: Sequence[int], params: SamplingParams, near: float, prompt_length: int
) -> torch.Tensor:
    """Say which ids ``[V]`` a draw after `prefix` can give while logits are off by no more than `near`."""
    scores = _ruled(logits, prefix, params, prompt_length)
    return _inside(scores, params, near * _stretch(params))[1] & (scores > OUT)


def laws(
    logits: torch.Tensor, prompt: Sequence[int], texts: Sequence[Sequence[int]], params: SamplingParams
) -> torch.Tensor:
    """Give the target's distribution at each place of some texts after one prompt, every rule applied.

    Args:
        logits: ``[B, T, V]``, fp32: those that place t of each text was drawn from.
        prompt: Its ids.
        texts: B lists of T ids at most.
        params: How the texts were chosen.

    Returns:
        fp64 ``[B, T, V]``; what lies beyond a text's end means nothing.
    """
    rows, width = logits.shape[:2]
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params, prompt_length=len(prompt))
    tokens = torch.tensor([[*prompt, *text, *[0] * (width - len(text))] for text in texts])
    ends = len(prompt) + torch.arange(width).expand(rows, -1)
    return distribution(logits, table.select([0] * rows), Prefix(tokens, ends)).double()


def _ruled(
    logits: torch.Tensor, prefix: Sequence[int], params: SamplingParams, prompt_length: int | None
) -> torch.Tensor:
    """Apply what can change the likeliest token: bias and penalties."""
    where, rules = _place(prefix, params, len(prefix) if prompt_length is None else prompt_length)
    return shaped(logits[None, None], rules, where)[0, 0]


def _place(prefix: Sequence[int], params: SamplingParams, prompt_length: int) -> tuple[Prefix, Rules]:
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params, prompt_length=prompt_length)
    return Prefix(torch.tensor([list(prefix)]), torch.tensor([[len(prefix)]])), table.select([0])


def _stretch(params: SamplingParams) -> float:
    """By how much a change of logits can grow on its way through the penalties."""
    return max(params.repetition_penalty, 1 / params.repetition_penalty)


def _inside(scores: torch.Tensor, params: SamplingParams, near: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which ids ``[V]`` the filters keep whatever changes by `near`, and which they may keep."""
    surely = perhaps = torch.ones(len(scores), dtype=torch.bool)
    if 0 < params.top_k < len(scores):
        falling = scores.neg().sort().values
        before = torch.searchsorted(falling, -scores - near, right=False)  # those clearly before it
        most = torch.searchsorted(falling, -scores + near, right=True) - 1  # and all that may be
        surely, perhaps = most < params.top_k, before < params.top_k
    if params.top_p < 1:
        surely = surely & _nucleus(scores.masked_fill(~surely, OUT), params, near)[0]
        perhaps = perhaps & _nucleus(scores.masked_fill(~perhaps, OUT), params, near)[1]
    if params.min_p > 0:
        floor = scores.max() + params.temperature * torch.tensor(params.min_p).log()
        surely, perhaps = surely & (scores >= floor + near), perhaps & (scores >= floor - near)
    return surely, perhaps


def _nucleus(scores: torch.Tensor, params: SamplingParams, near: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which ids ``[V]`` are inside the nucleus whatever changes by `near`, and which may be.

    An id is inside where the mass of those before it is below top_p. A change of logits by up to `near` / 2 moves the
    log-odds of a mass by up to `near` over the temperature, and swaps ids that are closer than `near`.
    """
    ordered, ids = scores.double().sort(descending=True)
    own = (ordered / params.temperature).softmax(0)
    mass = torch.cat([torch.zeros(1, dtype=torch.double), own.cumsum(0)])
    falling = -ordered
    least = mass[torch.searchsorted(falling, falling - near, right=False)]  # of those clearly before it
    most = mass[torch.searchsorted(falling, falling + near, right=True)] - own  # and of all that may be
    border, slack = torch.tensor(params.top_p).double().logit(), near / params.temperature
    surely, perhaps = torch.zeros(len(scores), dtype=torch.bool), torch.zeros(len(scores), dtype=torch.bool)
    surely[ids] = most.clamp(0, 1).logit() + slack < border
    perhaps[ids] = least.clamp(0, 1).logit() - slack < border
    return surely, perhaps
