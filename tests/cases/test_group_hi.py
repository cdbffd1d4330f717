"""Groups H and I: log-probabilities are the target's own, and n samples are n requests."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from tests.cases_support import GREEDY, PROMPTS, base, draft, engine, guessed, ids, lookup, opened, target, truth


@cache
def free_target() -> Any:
    model = copy.deepcopy(target())
    model.set_attn_implementation("eager")
    return model


def teacher_forced(prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities ``[output, V]`` by one pass of transformers' own model over the whole text."""
    with torch.inference_mode():
        logits = free_target()(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["noisy", "lookup"])
def test_H01_logprobs_are_the_target_s_teacher_forced_ones(kind: str, temperature: float) -> None:
    """logprobs=3 at T=0 and 1, D~ and NG: within 1e-4 of BASE and of a teacher-forced pass, the chosen included."""
    drafter = draft("noisy") if kind == "noisy" else lookup(1, 3)
    params = [GREEDY.but(temperature=temperature, seed=4, logprobs=3, max_tokens=30)] * 2
    prompts = [PROMPTS[0], list(b"abcabcabcabc")]
    plain, done = base(prompts, params=params), guessed(prompts, drafter, 4, params=params)
    assert ids(plain) == ids(done)
    for prompt, one, other in zip(prompts, done, plain, strict=True):
        oracle = teacher_forced(prompt, list(one.token_ids))
        assert len(one.logprobs) == 30
        for at, (entry, same) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            assert entry.token_id == one.token_ids[at]
            assert entry.logprob == pytest.approx(float(oracle[at, entry.token_id]), abs=1e-4)
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
            best = oracle[at].topk(3)
            assert list(entry.top) == best.indices.tolist()
            assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_H03_asking_for_logprobs_does_not_switch_speculation_off() -> None:
    """The draft counters are the same with and without logprobs."""
    with_them = guessed(PROMPTS[:2], draft("noisy"), 4, logprobs=2)
    without = guessed(PROMPTS[:2], draft("noisy"), 4)
    assert [(one.stats.drafted, one.stats.accepted) for one in with_them] == [
        (one.stats.drafted, one.stats.accepted) for one in without
    ]
    assert all(one.stats.drafted > 0 for one in with_them)


@pytest.mark.parametrize("chunk", [512, 7])
def test_H06_prompt_logprobs_go_with_any_drafter(chunk: int) -> None:
    """prompt_logprobs=2 with D~ and NG, whole and chunked prefill: teacher-forced values, the text EQ."""
    llm = opened(target(), prefill_chunk_size=chunk, max_model_len=128, max_num_seqs=3)
    prompt = PROMPTS[0]
    oracle = teacher_forced(prompt[:1], prompt[1:])
    for drafter in (draft("noisy"), lookup(1, 3)):
        params = GREEDY.but(prompt_logprobs=2, max_tokens=8, speculative_model=drafter, num_speculative_tokens=3)
        done, neighbour = llm.generate([prompt, [5]], [params, params])
        assert list(done.token_ids) == truth(prompt, 8)
        assert done.prompt_logprobs[0] is None and len(done.prompt_logprobs) == len(prompt)
        for at, entry in enumerate(done.prompt_logprobs[1:]):
            assert entry.token_id == prompt[at + 1]
            assert entry.logprob == pytest.approx(float(oracle[at, entry.token_id]), abs=1e-4)
            assert list(entry.top) == oracle[at].topk(2).indices.tolist()
        assert neighbour.prompt_logprobs == (None,)


THREE = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=20, ignore_eos=True)


def check_samples(n: int) -> None:
    llm = opened(target(), max_num_seqs=5, max_model_len=128)
    how = {"speculative_model": draft("noisy"), "num_speculative_tokens": 3}
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    params = [GREEDY.but(**how), THREE.but(n=n, **how), GREEDY.but(**how)]
    first, several, last = llm.generate(prompts, params)
    assert [one.index for one in several.outputs] == list(range(n))
    assert len({one.token_ids for one in several.outputs}) == n
    assert sum(one.stats.tokens for one in several.outputs) == 20 * n
    assert list(first.token_ids) == truth(prompts[0], 40) and list(last.token_ids) == truth(prompts[2], 40)
    assert first.stats.drafted > 0 and last.stats.drafted > 0
    plain = llm.generate([PROMPTS[0]], [THREE.but(n=n, speculation="off")])[0]
    assert [one.token_ids for one in plain.outputs] == [one.token_ids for one in several.outputs]


def test_I01_two_samples_beside_two_plain_requests() -> None:
    """n=2 at T=1 beside two greedy requests: right indices, usage adds up, the neighbours still speculate."""
    check_samples(2)


def test_I01_three_samples_beside_two_plain_requests() -> None:
    """The same with n=3."""
    check_samples(3)


def test_I01_n_samples_keep_the_engine_whole() -> None:
    """After n=2 everything is free again and the next request is served."""
    llm = engine()
    llm.generate([PROMPTS[0]], THREE.but(n=2, max_tokens=4))
    assert not llm.engine.busy and ids(base([PROMPTS[0]], llm)) == [truth(PROMPTS[0], 40)]
