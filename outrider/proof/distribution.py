"""Do texts that were judged by rejection or block verification follow the target's distribution? A test by position.

These verifiers do not give the target's own sample, but one of its distribution. So each prompt is continued with many
seeds, and every token is held against the distribution that the target's logits in fp32 give after all that precedes it
in its text. Each draw falls into a cell whose chance is known:

- Of a beginning that many texts share, the likeliest next tokens have a cell each, all others one together, and
  Pearson's statistic compares the counts.
- All other draws of a position are sorted by how likely the token was among all that could have come there: the
  likeliest, the second, and so on, in a few classes. Each draw has chances of its own; observed and expected counts
  differ by a sum of independent differences, whose covariance is known, so its squared length in units of that is
  chi-square too.

Both together are one test for each position of the text. Given what came before, the tests are independent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.progress import counted
from outrider.proof.chance import Outcome, judged
from outrider.proof.gap import allowed, laws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outrider.proof.referee import Referee
    from outrider.proof.texts import Text
    from outrider.sampling.params import SamplingParams

    Ids = tuple[int, ...]

__all__ = ["PositionTest", "by_position", "cells_of"]

LEVEL = 1e-3  # chance of a false alarm, over all tests of a proof
LEAST_EXPECTED = 10.0  # draws in a cell, or their variance: with fewer the statistic is not yet chi-square
MOST_CELLS = 16  # of a beginning: more cells find less
CLASSES = (1, 2, 3, 4, 6, 10, 20, 60)  # the ranks with which classes end; the last class has no end
AMPLITUDE = 2.0  # rounding in our passes may be so many times what it was in the referee's
BATCH = 32  # texts that the referee reads together


@dataclass(frozen=True)
class PositionTest:
    """The test of one position.

    Attributes:
        position: Of the token, from 0.
        draws: Tokens that were tested.
        cells: Cells in all.
        impossible: Draws of tokens that the target never takes.
        outcome: What came; None where the target leaves nothing to chance.
    """

    position: int
    draws: int
    cells: int
    impossible: int
    outcome: Outcome | None

    @property
    def failed(self) -> bool:
        """Whether the position's distribution is not the target's."""
        return self.impossible > 0 or (self.outcome is not None and self.outcome.failed)


def by_position(
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
    sums = [_Sums(texts, position) for position in range(longest)]
    alike = Counter((text.prompt, text.tokens) for text in texts)
    for prompt, some in counted(_batches(alike), "testing the distribution"):
        exact = laws(referee.after(prompt, some), prompt, some, params)
        rough = exact if strict else laws(referee.after(prompt, some, rounded=True), prompt, some, params)
        for row, tokens in enumerate(some):
            for place, token in enumerate(tokens):
                draw = _Draw((*prompt, *tokens[:place]), token, alike[prompt, tokens])
                sums[place].add(draw, exact[row, place], rough[row, place])
    return [one.test(one.impossible(params, referee, near), LEVEL / num_tests) for one in sums]


def _batches(alike: Iterable[tuple[Ids, Ids]]) -> list[tuple[Ids, list[Ids]]]:
    """Bring texts together that the referee can read together: those of one prompt, so many at once."""
    ways: dict[Ids, list[Ids]] = {}
    for prompt, tokens in alike:
        if tokens:
            ways.setdefault(prompt, []).append(tokens)
    return [(prompt, all_[at : at + BATCH]) for prompt, all_ in ways.items() for at in range(0, len(all_), BATCH)]


@dataclass(frozen=True)
class _Draw:
    """A token that `count` texts took after `prefix`."""

    prefix: tuple[int, ...]
    token: int
    count: int


class _Sums:
    """Adds up the draws of one position.

    Args:
        texts: All texts.
        position: The position.
    """

    def __init__(self, texts: Sequence[Text], position: int) -> None:
        self.position = position
        self.following: dict[tuple[int, ...], Counter[int]] = {}  # what came after each beginning
        for text in texts:
            if len(text.tokens) > position:
                prefix = (*text.prompt, *text.tokens[:position])
                self.following.setdefault(prefix, Counter())[text.tokens[position]] += 1
        self.statistic = self.rounding = 0.0
        self.draws = self.freedom = self.cells = 0
        self._own: dict[tuple[int, ...], bool] = {}  # beginnings seen by now, and whether they have cells of their own
        self._suspects: list[_Draw] = []
        self._classed = 0  # draws that are sorted by rank
        size = len(CLASSES) + 1
        self._surplus = torch.zeros(size, dtype=torch.float64)  # observed less expected
        self._shift = torch.zeros(size, dtype=torch.float64)  # what rounding adds to the expected
        self._covariance = torch.zeros(size, size, dtype=torch.float64)

    def add(self, draw: _Draw, probs: torch.Tensor, rough: torch.Tensor) -> None:
        """Count a draw; `probs` and `rough` ``[V]`` are what it was drawn from, in fp32 and in the target's dtype."""
        if probs[draw.token] == 0:
            self._suspects.append(draw)
        if draw.prefix not in self._own:
            self._own[draw.prefix] = self._add_beginning(self.following[draw.prefix], probs, rough)
        if self._own[draw.prefix]:
            return
        self._classed += draw.count
        ordered, ids = probs.sort(descending=True)
        chances = _classes(ordered)
        rank = int((ids == draw.token).nonzero())
        self._surplus -= draw.count * chances
        self._surplus[sum(rank >= end for end in CLASSES)] += draw.count
        self._shift += draw.count * (_classes(rough[ids]) - chances)
        self._covariance += draw.count * (chances.diag() - chances.outer(chances))

    def _add_beginning(self, following: Counter[int], probs: torch.Tensor, rough: torch.Tensor) -> bool:
        """Count all draws after a beginning; False where they are too few, or too sure, to have cells of their own."""
        draws = following.total()
        if draws < 2 * LEAST_EXPECTED:
            return False
        cells = cells_of(probs, draws)
        size = int(cells.max()) + 1
        if size < 2:
            return False
        empty = torch.zeros(size, dtype=torch.float64)
        expected, moved = (empty.index_add(0, cells, one) * draws for one in (probs, rough))
        ids, counts = zip(*following.items(), strict=True)
        observed = empty.index_add(0, cells[torch.tensor(ids)], torch.tensor(counts, dtype=torch.float64))
        self.statistic += float(((observed - expected) ** 2 / expected).sum())
        self.rounding += float(((moved - expected) ** 2 / expected).sum())
        self.freedom += size - 1
        self.draws += draws
        self.cells += size
        return True

    def impossible(self, params: SamplingParams, referee: Referee, near: float) -> int:
        """Count draws of what the target never takes, whatever rounding does."""
        found = 0
        for draw in self._suspects:
            length = len(draw.prefix) - self.position
            logits = referee.logits(draw.prefix)[-1]
            found += draw.count * (not allowed(logits, draw.prefix, params, near, length)[draw.token])
        return found

    def test(self, impossible: int, level: float) -> PositionTest:
        """Judge what was added up."""
        variances, directions = torch.linalg.eigh(self._covariance)
        kept = variances >= LEAST_EXPECTED
        if kept.any():
            along, shifted = (directions.T[kept] @ one for one in (self._surplus, self._shift))
            self.statistic += float((along**2 / variances[kept]).sum())
            self.rounding += float((shifted**2 / variances[kept]).sum())
            self.freedom += int(kept.sum())
            self.draws += self._classed
            self.cells += int(kept.sum()) + 1
        outcome = None
        if self.freedom:
            outcome = judged(self.statistic, self.freedom, self.draws, level, AMPLITUDE**2 * self.rounding)
        return PositionTest(self.position, self.draws, self.cells, impossible, outcome)


def cells_of(probs: torch.Tensor, draws: int) -> torch.Tensor:
    """Give each id ``[V]`` its cell, by its probability alone: the likeliest have one each, the last holds the rest."""
    ordered, ids = probs.sort(descending=True)
    own = int((ordered[: MOST_CELLS - 1] * draws >= LEAST_EXPECTED).sum())
    if float(ordered[own:].sum()) * draws < LEAST_EXPECTED:
        own -= 1  # the rest joins the last that would have had one
    own = max(own, 0)
    cells = torch.full((len(probs),), own)
    cells[ids[:own]] = torch.arange(own)
    return cells


def _classes(ordered: torch.Tensor) -> torch.Tensor:
    """Add up probabilities ``[V]``, in order of rank, by classes."""
    return torch.stack([ordered[begin:end].sum() for begin, end in _borders(len(ordered))])


def _borders(size: int) -> Iterator[tuple[int, int]]:
    yield from zip((0, *CLASSES), (*CLASSES, size), strict=True)
