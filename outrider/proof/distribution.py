"""Do texts that were judged by rejection or block verification follow the target's distribution? A test by position.

These verifiers do not give the target's own sample, but one of its distribution. So each prompt is continued with many
seeds, and the draws are sorted by what came before them: of all texts that begin alike, the next tokens are draws from
one distribution, which the target's logits in fp32 tell exactly. Tokens that are expected often enough are cells of
their own, all others of a beginning share one, and Pearson's chi-square over all beginnings of one length is one test.
Given what came before, the tests of all positions are independent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.proof.chance import Outcome, judged
from outrider.proof.gap import allowed, law

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.proof.referee import Referee
    from outrider.proof.texts import Text
    from outrider.sampling.params import SamplingParams

__all__ = ["Beginning", "PositionTest", "beginnings", "cells_of", "tested"]

LEVEL = 1e-3  # chance of a false alarm, over all tests of a proof
LEAST_EXPECTED = 10.0  # draws in a cell: fewer, and the statistic's law is not yet chi-square
MOST_CELLS = 16  # of a beginning: more cells find less
AMPLITUDE = 2.0  # rounding in our passes may be so many times what it was in the referee's


@dataclass(frozen=True)
class Beginning:
    """What many texts have in common, and how they went on.

    Attributes:
        prefix: Ids, the prompt's included.
        prompt_length: How many of them are the prompt.
        following: The next token -> how many of the texts took it.
    """

    prefix: tuple[int, ...]
    prompt_length: int
    following: Counter[int] = field(default_factory=Counter)

    @property
    def draws(self) -> int:
        """Texts that begin so and go on."""
        return self.following.total()


@dataclass(frozen=True)
class PositionTest:
    """The test of one position.

    Attributes:
        position: Of the token, from 0.
        draws: Tokens that were tested.
        beginnings: Beginnings that occurred often enough to be tested.
        cells: Cells in all.
        impossible: Draws of tokens that the target never takes.
        outcome: What came; None where no beginning has two cells.
    """

    position: int
    draws: int
    beginnings: int
    cells: int
    impossible: int
    outcome: Outcome | None

    @property
    def failed(self) -> bool:
        """Whether the position's distribution is not the target's."""
        return self.impossible > 0 or (self.outcome is not None and self.outcome.failed)


def beginnings(texts: Sequence[Text], position: int) -> list[Beginning]:
    """Sort the tokens at `position` by what came before them, and leave out beginnings too rare to be tested."""
    found: dict[tuple[int, ...], Beginning] = {}
    for text in texts:
        if len(text.tokens) > position:
            prefix = (*text.prompt, *text.tokens[:position])
            one = found.setdefault(prefix, Beginning(prefix, len(text.prompt)))
            one.following[text.tokens[position]] += 1
    return [one for one in found.values() if one.draws >= 2 * LEAST_EXPECTED]


def cells_of(probs: torch.Tensor, draws: int) -> torch.Tensor:
    """Give each id ``[V]`` its cell, by its probability alone: the likeliest have one each, the last holds the rest."""
    ordered, ids = probs.sort(descending=True)
    own = int((ordered[: MOST_CELLS - 1] * draws >= LEAST_EXPECTED).sum())
    rest = float(ordered[own:].sum()) * draws
    if rest < LEAST_EXPECTED:
        own -= 1  # the rest joins the last that would have had one
    cells = torch.full((len(probs),), max(own, 0))
    cells[ids[: max(own, 0)]] = torch.arange(max(own, 0))
    return cells


def tested(
    texts: Sequence[Text], params: SamplingParams, referee: Referee, near: float, *, strict: bool, num_tests: int
) -> list[PositionTest]:
    """Test every position of some texts.

    Args:
        texts: Of some prompts, each continued with many seeds.
        params: How they were drawn.
        referee: Knows the target's distribution.
        near: How much rounding may move the distance of two logits.
        strict: The target computes in fp32: nothing is granted to rounding.
        num_tests: Tests of the whole proof: each may give a false alarm with as small a part of `LEVEL`.
    """
    longest = max((len(text.tokens) for text in texts), default=0)
    found = []
    for position in range(longest):
        sums = _Sums()
        for one in beginnings(texts, position):
            sums.add(one, params, referee, near, strict=strict)
        outcome = None
        if sums.freedom:
            outcome = judged(sums.statistic, sums.freedom, sums.draws, LEVEL / num_tests, sums.rounding)
        found.append(PositionTest(position, sums.draws, sums.groups, sums.cells, sums.impossible, outcome))
    return found


class _Sums:
    """Adds up one position's beginnings."""

    def __init__(self) -> None:
        self.statistic = self.rounding = 0.0
        self.freedom = self.draws = self.groups = self.cells = self.impossible = 0

    def add(self, one: Beginning, params: SamplingParams, referee: Referee, near: float, *, strict: bool) -> None:
        """Count one beginning's draws into cells, and what they should be."""
        where = one.prefix, params
        logits = referee.logits(one.prefix)[-1]
        probs = law(logits, *where, one.prompt_length)
        may_come = allowed(logits, *where, near, one.prompt_length)
        self.impossible += sum(count for token, count in one.following.items() if not may_come[token])
        cells = cells_of(probs, one.draws)
        size = int(cells.max()) + 1
        expected = torch.zeros(size, dtype=torch.float64).index_add_(0, cells, probs) * one.draws
        observed = torch.zeros(size, dtype=torch.float64)
        for token, count in one.following.items():
            observed[cells[token]] += count
        self.groups += 1
        if size < 2:
            return
        self.statistic += float(((observed - expected) ** 2 / expected).sum())
        if not strict:
            rough = law(referee.logits(one.prefix, rounded=True)[-1], *where, one.prompt_length)
            moved = torch.zeros(size, dtype=torch.float64).index_add_(0, cells, rough) * one.draws - expected
            self.rounding += AMPLITUDE**2 * float((moved**2 / expected).sum())
        self.freedom += size - 1
        self.draws += one.draws
        self.cells += size
