"""How far two tokens are from being the one to take: the same weights in fp32, by transformers, beside our engine.

A gap taken from the bf16 logits that were computed would be a multiple of bf16's own step, which is 0.125 for logits
from 16 on and 0.25 from 32 on: one step would already look like a defect.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from outrider.model.checkpoint import default_model_source, locate
from outrider.model.gguf import converted_folder
from outrider.sampling.random import Purpose, gumbel, mixed_seed

if TYPE_CHECKING:
    from outrider import SamplingParams

__all__ = ["Referee", "gap_of", "rounding_noise"]

RIVALS = 20  # likeliest tokens whose distance to the first is compared


class Referee:
    """The target in fp32, of the weights that the engine had (those of `dtype`)."""

    def __init__(self, source: str | None, dtype: str, device: str | None) -> None:
        self._model = _loaded(source, dtype, device).float()
        self._device = self._model.device

    @torch.inference_mode()
    def gap(self, prefix: list[int], tokens: tuple[int, int], params: SamplingParams, near: float) -> float | None:
        """See `gap_of`, for the token after `prefix`."""
        logits = self._model(torch.tensor([prefix], device=self._device), use_cache=False).logits[0, -1]
        return gap_of(logits.float().cpu(), len(prefix), tokens, params, near)


def _loaded(source: str | None, dtype: str, device: str | None) -> Any:
    """The weights in `dtype`, as transformers runs them."""
    from transformers import AutoModelForCausalLM

    checkpoint = locate(source or default_model_source())
    stored: torch.dtype = getattr(torch, dtype)
    folder = converted_folder(checkpoint.path, stored) if checkpoint.kind == "gguf" else checkpoint.path
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what closed engines held
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=stored)
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


@torch.inference_mode()
def rounding_noise(source: str | None, dtype: str, device: str | None, prompts: list[list[int]]) -> dict[str, float]:
    """Tell by how much rounding in `dtype` moves the distance between the likeliest token and each of its rivals.

    Over every position of the prompts, in units of a logit: median, 99th percentile and maximum.
    """
    rounded = _loaded(source, dtype, device)
    whole = copy.deepcopy(rounded).float()
    moved = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=whole.device)
        expected, ids = whole(tokens, use_cache=False).logits[0].topk(RIVALS, -1)
        got = rounded(tokens, use_cache=False).logits[0].float().gather(-1, ids)
        moved.append(((got - got[:, :1]) - (expected - expected[:, :1])).abs()[:, 1:].flatten().cpu())
    every = torch.cat(moved)
    sample = every[:: max(1, len(every) // 1_000_000)]  # quantile takes no more
    return {
        "positions": len(every) // (RIVALS - 1),
        "median": float(sample.median()),
        "p99": float(sample.quantile(0.99)),
        "max": float(every.max()),
    }


def gap_of(
    logits: torch.Tensor, end: int, tokens: tuple[int, int], params: SamplingParams, near: float
) -> float | None:
    """Tell how much the logits ``[V]``, fp32, must change so that either token would be taken: the larger of both.

    In units of a logit, noise of a draw included. Under top_p a token whose place at the nucleus's border is itself
    within `near` counts as inside for its own sake, and as outside where it stands before another. None: one of the
    tokens is clearly outside.
    """
    if params.temperature == 0:
        best = float(logits.max())
        return max(best - float(logits[token]) for token in tokens)
    seed = torch.tensor([mixed_seed(params.seed or 0)])
    noise = gumbel(seed, torch.tensor([[end]]), Purpose.CHOICE, len(logits))[0, 0]
    scores = logits + params.temperature * noise
    surely, perhaps = _nucleus(logits, params, near)
    if not all(bool(perhaps[token]) for token in tokens):
        return None
    best = float(scores.masked_fill(~surely, float("-inf")).max())
    return max(max(0.0, best - float(scores[token])) for token in tokens)


def _nucleus(logits: torch.Tensor, params: SamplingParams, near: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which ids ``[V]`` are inside the nucleus whatever changes by `near`, and which may be.

    An id is inside where the mass of those before it is below top_p. A change of logits by up to `near` / 2 moves the
    log-odds of a mass by up to `near` over the temperature, and swaps ids that are closer than `near`.
    """
    everything = torch.ones(len(logits), dtype=torch.bool)
    if params.top_p >= 1:
        return everything, everything
    ordered, ids = logits.double().sort(descending=True)
    own = (ordered / params.temperature).softmax(0)
    mass = torch.cat([torch.zeros(1, dtype=torch.double), own.cumsum(0)])
    falling = -ordered
    least = mass[torch.searchsorted(falling, falling - near, right=False)]  # of those clearly before it
    most = mass[torch.searchsorted(falling, falling + near, right=True)] - own  # and of all that may be
    border, slack = torch.tensor(params.top_p).double().logit(), near / params.temperature
    surely, perhaps = torch.zeros_like(everything), torch.zeros_like(everything)
    surely[ids] = most.clamp(min=0).logit() + slack < border
    perhaps[ids] = least.logit() - slack < border
    return surely, perhaps
