"""The judge of near-ties: the same weights in fp32, as transformers runs them, beside our engine.

A gap taken from the bf16 logits that were computed would be a multiple of bf16's own step, which is 0.125 for logits
from 16 on and 0.25 from 32 on: one step would already look like a defect. So what rounding does is measured first, by
transformers in the engine's dtype against fp32, nothing of ours running; and a gap is taken from the fp32 logits.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outrider.model.load import load_model
from outrider.model.reference import logits_after, logits_of
from outrider.proof.gap import Gap, gap_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.sampling.params import SamplingParams

__all__ = ["LEAST_NEAR", "Noise", "Referee"]

LEAST_NEAR = 1e-3  # of a logit: fp32 differs by the order of its sums alone
RIVALS = 20  # likeliest tokens whose distance to the first is compared
MOST_MOVES = 1_000_000  # torch's quantile takes no more


class Noise(NamedTuple):
    """By how much rounding moved the distance between the likeliest token and each rival, in units of a logit."""

    positions: int
    median: float
    p99: float
    max: float

    @property
    def near(self) -> float:
        """How close two tokens may be for rounding to swap them."""
        return max(LEAST_NEAR, self.max)


class Referee:
    """The target in fp32, of the weights that the engine had (those of `dtype`), and as it is in `dtype`.

    Args:
        source: What the engine's target was loaded from; None for the default model.
        dtype: The engine's.
        device: Where to compute.
        revision: Of the Hub repository.

    Raises:
        ModelLoadError: The model is missing or broken.
        CapacityError: The device has no room for it.
    """

    def __init__(
        self,
        source: str | None,
        dtype: torch.dtype | str,
        device: torch.device | str | None,
        revision: str | None = None,
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what closed engines held
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._rounded: Any = load_model(source, dtype=dtype, device=where, revision=revision).model
        self._whole: Any = self._rounded
        if self._rounded.dtype is not torch.float32:
            self._whole = copy.deepcopy(self._rounded)
            self._whole.float()

    def logits(self, tokens: Sequence[int], *, rounded: bool = False) -> torch.Tensor:
        """Give the logits after every token, computed in fp32 or in the engine's dtype: fp32 ``[T, V]`` on the CPU."""
        return logits_of(self._rounded if rounded else self._whole, tokens)

    def after(self, prompt: Sequence[int], texts: Sequence[Sequence[int]], *, rounded: bool = False) -> torch.Tensor:
        """Give the logits that each token of some texts after one prompt was chosen from: ``[B, T, V]``, likewise."""
        return logits_after(self._rounded if rounded else self._whole, prompt, texts)

    def gap(
        self,
        prefix: Sequence[int],
        tokens: tuple[int, int],
        params: SamplingParams,
        near: float,
        prompt_length: int | None = None,
    ) -> Gap:
        """See `gap_of`, for the token after `prefix`."""
        return gap_of(self.logits(prefix)[-1], prefix, tokens, params, near, prompt_length)

    def noise(self, texts: Iterable[Sequence[int]]) -> Noise:
        """Measure rounding over every position of some texts, one at least."""
        moved, positions = [], 0
        for text in texts:
            expected, ids = _likeliest(self.logits(text))
            got = self.logits(text, rounded=True).gather(-1, ids)
            moved.append(((got - got[:, :1]) - (expected - expected[:, :1])).abs()[:, 1:].flatten())
            positions += len(text)
        every = torch.cat(moved)
        sample = every[:: max(1, len(every) // MOST_MOVES)]
        return Noise(positions, float(sample.median()), float(sample.quantile(0.99)), float(every.max()))


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = logits.topk(min(RIVALS, logits.shape[-1]), -1)
    return found.values, found.indices
