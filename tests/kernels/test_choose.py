"""One launch from logits to tokens takes what `outrider.sampling.choose` takes."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.choose import choose_tokens, choose_tokens_reference, take
from outrider.sampling.choose import choose
from outrider.sampling.params import SamplingParams
from outrider.sampling.random import Purpose, gumbel
from outrider.sampling.rules import Prefix, Rules, RuleTable

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURES = (0.0, 1e-6, 0.7, 5.0)


def rules_of(*temperatures: float, **more: object) -> Rules:
    table = RuleTable(len(temperatures), DEVICE)
    for slot, temperature in enumerate(temperatures):
        table.write(slot, SamplingParams(temperature=temperature, seed=slot + 5, **more))  # type: ignore[arg-type]
    return table.select(list(range(len(temperatures))))


def prefix_of(rows: int, steps: int, begin: int = 7) -> Prefix:
    ends = begin + torch.arange(rows * steps, device=DEVICE).view(rows, steps)
    return Prefix(torch.zeros(rows, begin + rows * steps, dtype=torch.long, device=DEVICE), ends)


def noise(*shape: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def draw(logits: torch.Tensor, rules: Rules, prefix: Prefix, purpose: Purpose = Purpose.CHOICE):
    random = rules.flags.random
    return choose_tokens(logits, rules.temperature, rules.seeds, prefix.ends, purpose, random=random)


@pytest.mark.parametrize(
    ("size", "steps", "purpose"),
    [(37, 20, Purpose.CHOICE), (301, 8, Purpose.GUESS), (1100, 2, Purpose.RECOVER), (5003, 1, Purpose.CHOICE)],
)
def test_ids_are_those_of_choose(size: int, steps: int, purpose: Purpose) -> None:
    rules, prefix = rules_of(*TEMPERATURES), prefix_of(4, steps)
    logits = noise(4, steps, size, seed=size + purpose)
    ids, best = draw(logits, rules, prefix, purpose)
    assert torch.equal(ids, choose(logits, rules, prefix, purpose))
    assert torch.equal(best, logits.gather(-1, ids[..., None])[..., 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_count_as_fp32(dtype: torch.dtype) -> None:
    rules, prefix = rules_of(*TEMPERATURES), prefix_of(4, 6)
    logits = noise(4, 6, 300).to(dtype)
    ids, best = draw(logits, rules, prefix)
    assert torch.equal(ids, choose(logits.float(), rules, prefix))
    assert best.dtype == torch.float32


def test_greedy_rounds_take_the_first_of_equals() -> None:
    rules, prefix = rules_of(0.0, 0.0), prefix_of(2, 4)
    logits = noise(2, 4, 700, scale=1.0).round()
    logits[0, 0] = 0.0
    logits[0, 0, 3] = -0.0
    ids, _ = draw(logits, rules, prefix)
    assert not rules.flags.random
    assert torch.equal(ids, logits.argmax(-1))
    assert ids[0, 0] == 0


def test_equal_logits_are_drawn_from_even_at_a_tiny_temperature() -> None:
    rules, prefix = rules_of(1e-6, 1e-6, 0.0), prefix_of(3, 5)
    logits = noise(3, 5, 600, scale=1.0).round() * 1000  # many share the maximum
    ids, _ = draw(logits, rules, prefix)
    assert torch.equal(ids, choose(logits, rules, prefix))
    assert not torch.equal(ids[0], logits[0].argmax(-1))
    assert torch.equal(ids[2], logits[2].argmax(-1))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_infinite_logits_are_never_and_always_taken(temperature: float) -> None:
    rules, prefix = rules_of(temperature, temperature), prefix_of(2, 4)
    logits = noise(2, 4, 400)
    logits[0, :, :300] = float("-inf")  # all of a chunk
    logits[0, 1] = float("-inf")
    logits[1, 0, [270, 390]] = float("inf")
    ids, best = draw(logits, rules, prefix)
    assert torch.equal(ids, choose(logits, rules, prefix))
    assert ids[0, 1] == 0
    assert ids[1, 0] == 270
    assert bool((ids[0, [0, 2, 3]] >= 300).all())
    assert best[0, 1] == float("-inf")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_first_nan_is_taken_and_reported(temperature: float) -> None:
    rules, prefix = rules_of(temperature), prefix_of(1, 5)
    logits = noise(1, 5, 400)
    logits[0, 0, [299, 333]] = float("nan")
    logits[0, 1, [10, 390]] = torch.tensor([float("inf"), float("nan")], device=DEVICE)
    logits[0, 2] = float("nan")
    ids, best = draw(logits, rules, prefix)
    assert ids[0, :3].tolist() == [299, 390, 0]
    assert best.isnan().tolist() == [[True, True, True, False, False]]
    assert torch.equal(ids[:, 3:], choose(logits[:, 3:], rules, Prefix(prefix.tokens, prefix.ends[:, 3:])))
    wanted = choose_tokens_reference(logits, rules.temperature, rules.seeds, prefix.ends, random=rules.flags.random)
    assert torch.equal(ids, wanted[0])
    assert torch.equal(best.nan_to_num(7.0), wanted[1].nan_to_num(7.0))


def test_a_position_is_the_same_alone_and_among_others() -> None:
    rules, prefix = rules_of(*TEMPERATURES), prefix_of(4, 2)
    logits = noise(4, 2, 600)
    together, _ = draw(logits, rules, prefix)
    for row in range(4):
        one = slice(row, row + 1)
        for step in range(2):
            there = prefix.ends[one, step : step + 1]
            drawn = choose_tokens(
                logits[one, step : step + 1], rules.temperature[one], rules.seeds[one], there, random=True
            )
            assert drawn[0].item() == together[row, step]


def test_logits_and_ends_may_be_views() -> None:
    rules, prefix = rules_of(0.7, 0.0), prefix_of(2, 8)
    wide = noise(2, 4, 2, 640)
    logits, ends = wide[:, :, 1, :601], prefix.ends[:, ::2]
    ids, _ = choose_tokens(logits, rules.temperature, rules.seeds, ends, random=True)
    assert torch.equal(ids, choose(logits.contiguous(), rules, Prefix(prefix.tokens, ends)))


@pytest.mark.parametrize("more", [{}, {"top_k": 3}], ids=["by the kernel", "by torch"])
def test_take_follows_whatever_rules_there_are(more: dict[str, object]) -> None:
    rules, prefix = rules_of(0.7, 0.0, **more), prefix_of(2, 5)
    logits = noise(2, 5, 300)
    ids, best = take(logits, rules, prefix)
    assert torch.equal(ids, choose(logits, rules, prefix))
    assert torch.equal(best, logits.gather(-1, ids[..., None])[..., 0])
    logits[1, 2, 9] = float("nan")
    assert take(logits, rules, prefix)[1].isnan().sum() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("size", [32_000, 128_256, 151_936, 262_144])
def test_thousands_of_draws_on_a_card_are_those_of_choose(size: int) -> None:
    rules = rules_of(*TEMPERATURES)
    for turn in range(16):
        prefix = prefix_of(4, 16, begin=7 + 64 * turn)
        logits = torch.randn(4, 16, size, device=DEVICE) * 3
        ids, _ = draw(logits, rules, prefix)
        wanted = choose(logits, rules, prefix)
        divisor = rules.temperature.where(rules.temperature > 0, 1)[:, None, None]
        drawn = gumbel(rules.seeds, prefix.ends, Purpose.CHOICE, size) * (rules.temperature > 0)[:, None, None]
        scores = (logits - logits.amax(-1, keepdim=True)) / divisor + drawn
        lost = scores.gather(-1, wanted[..., None]) - scores.gather(-1, ids[..., None])
        assert float(lost.abs().max()) < 1e-5  # a near-tie may fall either way: logarithms differ in their last bit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_captured_graph_draws_again_and_again() -> None:
    rules, prefix = rules_of(*TEMPERATURES), prefix_of(4, 6)
    logits = torch.randn(4, 6, 128_256, device=DEVICE)
    draw(logits, rules, prefix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = draw(logits, rules, prefix)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert torch.equal(ids, choose(logits, rules, prefix))
