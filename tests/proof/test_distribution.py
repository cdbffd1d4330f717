"""The test of a distribution: it keeps its level where all is right, and has the power that it states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.proof.chance import critical_value, exceeds, judged, smallest_distance
from outrider.proof.distribution import LEAST_EXPECTED, MOST_CELLS, by_position, cells_of
from outrider.proof.gap import laws
from outrider.proof.texts import Text

PARAMS = SamplingParams(temperature=1, seed=0)
VOCAB = 50


# --- chi-square


def test_tails_are_those_of_tables() -> None:
    assert exceeds(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    assert exceeds(18.307038, 10) == pytest.approx(0.05, abs=1e-6)
    assert critical_value(4, 0.001) == pytest.approx(18.466827, abs=1e-4)
    # Noncentral: of one degree it is a shifted normal's square.
    shift, bound = 2.5, 6.0
    normal = torch.distributions.Normal(0.0, 1.0)
    inside = normal.cdf(torch.tensor(math.sqrt(bound) - shift)) - normal.cdf(torch.tensor(-math.sqrt(bound) - shift))
    assert exceeds(bound, 1, shift**2) == pytest.approx(1 - float(inside), abs=1e-5)
    assert exceeds(5000.0, 20, 4900.0) == pytest.approx(0.28, abs=0.05)


def test_rounding_makes_a_test_more_patient() -> None:
    strict, patient = judged(40.0, 10, 1000, 1e-3), judged(40.0, 10, 1000, 1e-3, rounding=10.0)
    assert strict.failed
    assert not patient.failed
    assert patient.smallest > strict.smallest


def test_more_draws_find_less() -> None:
    distances = [smallest_distance(10, draws, 1e-3) for draws in (100, 10_000, 1_000_000)]
    assert distances[0] / distances[1] == pytest.approx(10, rel=0.01)
    assert distances[1] / distances[2] == pytest.approx(10, rel=0.01)
    assert smallest_distance(10, 1, 1e-3) == 1.0


@pytest.mark.parametrize("shape", ["halves", "one cell", "two cells"])
def test_the_stated_distance_is_found(shape: str) -> None:
    """Whatever a difference of that distance looks like; the even split is the hardest to find."""
    draws, level, cells = 2000, 1e-3, 10
    probs = torch.full((cells,), 1 / cells, dtype=torch.float64)
    distance = smallest_distance(cells - 1, draws, level)
    change = {
        "halves": torch.tensor([1.0, -1.0] * 5) / 5,
        "one cell": torch.tensor([1.0, *[-1 / 9] * 9]),
        "two cells": torch.tensor([1.0, -1.0, *[0.0] * 8]),
    }[shape]
    other = probs + distance * change.double()
    drawn = torch.multinomial(other.clamp(min=0).expand(200, -1), draws, replacement=True, generator=seeded(5))
    counts = torch.stack([row.bincount(minlength=cells) for row in drawn]).double()
    statistics = ((counts - draws * probs) ** 2 / (draws * probs)).sum(1)
    found = sum(judged(float(one), cells - 1, draws, level).failed for one in statistics)
    assert found / 200 > (0.9 if shape == "halves" else 0.94)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- cells


def test_cells_hold_enough_and_are_chosen_without_the_draws() -> None:
    for seed in range(20):
        probs = (torch.randn(VOCAB, generator=seeded(seed)) * 3).softmax(0).double()
        for draws in (20, 100, 10_000):
            cells = cells_of(probs, draws)
            size = int(cells.max()) + 1
            expected = torch.zeros(size, dtype=torch.float64).index_add(0, cells, probs) * draws
            assert size <= MOST_CELLS
            assert float(expected.min()) >= LEAST_EXPECTED


# --- whole tests, with texts drawn from a table


class Table:
    """A referee whose model is a table: the logits depend on the last token and on how many came before."""

    def __init__(self, seed: int = 1, spread: float = 1.5) -> None:
        self._logits = torch.randn(8, VOCAB, VOCAB, generator=seeded(seed)) * spread

    def logits(self, tokens: Any, *, rounded: bool = False) -> torch.Tensor:
        return self._logits[torch.arange(len(tokens)) % 8, torch.tensor(list(tokens))]

    def after(self, prompt: Any, texts: Any, *, rounded: bool = False) -> torch.Tensor:
        width = max(map(len, texts))
        rows = []
        for one in texts:
            padded = [*prompt, *one, *[0] * (width - len(one))]
            rows.append(self.logits(padded)[len(prompt) - 1 : -1])
        return torch.stack(rows)


def draw(table: Table, count: int, seed: int, bias: float = 0.0, length: int = 4) -> list[Text]:
    """Draw texts; a `bias` of the mass goes from where it belongs to the likeliest token."""
    noise, texts = seeded(seed), []
    for place in range(count):
        prompt = ((7, 3), (1, 2, 5))[place % 2]
        tokens: list[int] = []
        for _ in range(length):
            probs = table.logits([*prompt, *tokens])[-1].softmax(0)
            probs = (1 - bias) * probs + bias * torch.nn.functional.one_hot(probs.argmax(), VOCAB)
            tokens.append(int(torch.multinomial(probs, 1, generator=noise)))
        texts.append(Text(prompt, tuple(tokens), "length"))
    return texts


def run(texts: list[Text], table: Table) -> list[Any]:
    referee: Any = table
    return by_position(texts, PARAMS, referee, 1e-3, strict=True, num_tests=4)


def test_true_draws_pass_and_p_values_are_spread() -> None:
    table = Table()
    outcomes = [one.outcome for seed in range(4) for one in run(draw(table, 250, seed), table)]
    chances = [one.p_value for one in outcomes if one is not None]
    assert len(chances) == 16
    assert not any(one.failed for one in outcomes if one is not None)
    assert 0.3 < sum(chances) / len(chances) < 0.7
    assert sum(one < 0.1 for one in chances) <= 6


def test_a_bias_is_found_at_every_position() -> None:
    table = Table()
    found = run(draw(table, 500, 1, bias=0.25), table)
    assert [one.failed for one in found] == [True] * 4
    assert all(one.outcome.smallest < 0.25 for one in found)


def test_what_the_target_never_takes_is_found_at_once() -> None:
    table = Table()
    params = SamplingParams(temperature=1, top_k=3, seed=0)
    referee: Any = table
    worst = int(table.logits([7, 3])[-1].argmin())
    best = int(table.logits([7, 3])[-1].argmax())
    texts = [Text((7, 3), (best,), "length")] * 5 + [Text((7, 3), (worst,), "length")]
    [found] = by_position(texts, params, referee, 1e-3, strict=True, num_tests=1)
    assert found.impossible == 1
    assert found.failed


def test_a_law_is_what_the_rules_leave() -> None:
    logits = torch.randn(2, 3, VOCAB, generator=seeded(3))
    params = SamplingParams(temperature=0.5, top_k=4, repetition_penalty=1.5, seed=0)
    found = laws(logits, (1, 2), [(4, 5, 6), (7,)], params)
    assert found.shape == (2, 3, VOCAB)
    assert torch.allclose(found.sum(-1), torch.ones(2, 3).double())
    assert ((found > 0).sum(-1) == 4).all()
    own = logits[0, 1].clone()
    for seen in (1, 2, 4):
        own[seen] = own[seen] / 1.5 if own[seen] > 0 else own[seen] * 1.5
    kept = own.topk(4)
    assert torch.allclose(found[0, 1][kept.indices], (kept.values / 0.5).softmax(0).double(), atol=1e-6)
