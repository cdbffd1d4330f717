"""The judge of near-ties: gaps between two tokens, by every kind of rule, and what rounding does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.proof.gap import allowed, gap_of
from outrider.proof.prove import judged_parting
from outrider.proof.referee import LEAST_NEAR, Referee
from outrider.proof.texts import Parting, Text, first_difference, parting
from outrider.sampling.choose import choose
from outrider.sampling.rules import Prefix, RuleTable
from tests.tiny import byte_tokenizer, save, tiny_target

GREEDY = SamplingParams(temperature=0)
PREFIX = (3, 5, 3, 8, 1, 40, 41, 42, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


# --- partings


def text(ids: tuple[int, ...], reason: str | None) -> Text:
    return Text((7,), ids, reason)


def test_two_texts_that_failed_alike_are_not_the_same_text() -> None:
    same = text((1, 2), "length")
    assert parting(0, same, same) is None
    failed = parting(0, text((), "error"), text((), "error"))
    assert failed is not None
    assert failed.verdict == "defect"
    shorter = parting(0, same, text((1,), "stop"))
    assert shorter is not None
    assert (shorter.position, shorter.plain, shorter.speculative, shorter.prefix) == (1, 2, None, ())
    found = parting(0, same, text((1, 3), "length"))
    assert found is not None
    assert (found.position, found.plain, found.speculative, found.prefix) == (1, 2, 3, (7, 1))
    assert parting(0, same, text((1, 2), "stop")) is not None


def test_the_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


@pytest.mark.parametrize(("strict", "gap", "verdict"), [
    (False, 0.2, "near-tie"), (False, 0.25, "near-tie"), (False, 0.26, "defect"),
    (False, None, "defect"), (True, 0.0, "defect"),
])  # fmt: skip
def test_only_where_rounding_is_granted_something_may_near_ties_flip(
    strict: bool, gap: float | None, verdict: str
) -> None:
    class Says:
        def gap(self, *_: object) -> tuple[float | None, float]:
            return gap, 0.1

    referee: Any = Says()
    one = Parting(0, 1, 2, 3, ("length", "length"), (7, 1))
    found = judged_parting(one, GREEDY, 1, referee, 0.25, strict=strict)
    assert (found.gap, found.top2, found.verdict) == (gap, 0.1, verdict)


# --- gaps


def test_a_greedy_gap_is_to_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0])
    found = gap_of(logits, PREFIX, (1, 2), GREEDY, 0.25)
    assert found.reach == pytest.approx(0.1)
    assert found.top2 == pytest.approx(0.1)
    assert gap_of(logits, PREFIX, (2, 0), GREEDY, 0.25).reach == pytest.approx(2.0)  # a third was to be taken


def drawn(logits: torch.Tensor, params: SamplingParams) -> int:
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params, prompt_length=4)
    prefix = Prefix(torch.tensor([PREFIX]), torch.tensor([[len(PREFIX)]]))
    return int(choose(logits[None, None], table.select([0]), prefix))


RULES: list[dict[str, Any]] = [
    {}, {"top_p": 0.95}, {"top_p": 0.5}, {"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.7},
    {"repetition_penalty": 1.3}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {3: 4.0}},
    {"repetition_penalty": 0.8, "top_p": 0.8, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_logits_that_differ_a_little_take_is_a_near_tie(rules: dict[str, Any]) -> None:
    """Each logit moves by up to a quarter, so any two by up to a half."""
    noise, flips, clear = torch.Generator().manual_seed(1), 0, 0
    for seed in range(120):
        params = SamplingParams(temperature=0.0 if seed % 4 == 0 else 0.8, seed=seed, **rules)
        logits = torch.randn(60, generator=noise) * 2
        one, other = (drawn(logits + torch.rand(60, generator=noise) / 2 - 0.25, params) for _ in range(2))
        gap = gap_of(logits, PREFIX, (one, other), params, 0.5, 4).reach
        assert gap is not None
        assert gap < 0.5
        assert params.greedy or allowed(logits, PREFIX, params, 0.5, 4)[one]
        flips += one != other
        if seed < 60:
            wrong = (one + 1 + seed % 59) % 60
            far = gap_of(logits, PREFIX, (one, wrong), params, 0.5, 4).reach
            clear += far is None or far >= 0.5
    assert flips > 2
    assert clear > 45


def test_a_token_far_outside_the_nucleus_has_no_gap() -> None:
    logits = torch.tensor([9.0, 0.0, -1.0])
    for rules in ({"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.5}):
        params = SamplingParams(temperature=1, seed=1, **rules)
        assert gap_of(logits, PREFIX, (0, 2), params, 0.25).reach is None
        assert allowed(logits, PREFIX, params, 0.25, 4).tolist() == [True, False, False]


# --- the referee itself


def test_the_referee_scores_the_weights_that_the_engine_had(folder: str) -> None:
    with LLM(folder, dtype="float32", device="cpu", max_num_seqs=1, max_model_len=64) as llm:
        report = llm.generate([[65, 66]], SamplingParams(temperature=0, max_tokens=1, logprobs=2))[0].outputs[0]
    assert report.logprobs is not None
    best, second = report.logprobs[0].top.items()
    gap = Referee(folder, "float32", "cpu").gap([65, 66], (best[0], second[0]), GREEDY, 1e-3)
    assert gap.reach is not None
    assert math.isclose(gap.reach, best[1] - second[1], abs_tol=1e-4)


def test_rounding_is_measured_against_fp32(folder: str) -> None:
    texts = [list(range(60, 100)), list(range(100, 120))]
    exact, rough = (Referee(folder, dtype, "cpu") for dtype in ("float32", "bfloat16"))
    assert exact.noise(texts) == (60, 0, 0, 0)
    assert exact.noise(texts).near == LEAST_NEAR
    noise = rough.noise(texts)
    assert noise.positions == 60
    assert 0 < noise.median < noise.p99 <= noise.max == noise.near
    assert torch.equal(rough.logits(texts[0]), rough._whole(torch.tensor(texts[:1])).logits[0])
    assert rough._whole.dtype is torch.float32


def test_texts_after_one_prompt_are_read_together_as_alone(folder: str) -> None:
    referee = Referee(folder, "float32", "cpu")
    for prompt in ((65,), (65, 66, 67, 68)):
        texts = [(70, 71, 72), (73,), (74, 75)]
        together = referee.after(prompt, texts)
        assert together.shape[:2] == (3, 3)
        for row, one in enumerate(texts):
            alone = referee.logits([*prompt, *one])[len(prompt) - 1 : -1]
            assert torch.allclose(together[row, : len(one)], alone, atol=1e-4)
