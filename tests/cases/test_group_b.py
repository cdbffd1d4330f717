"""Group B: after every round each cache holds a prefix of the committed text, and nothing behind it is ever read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider import LLM, UnsupportedModelError
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    assert_in_sync,
    base,
    draft,
    drafter_of,
    engine,
    guessed,
    ids,
    lookup,
    opened,
    script,
    submit,
    target,
    truth,
    words,
)
from tests.tiny import hybrid_config, tiny_draft, tiny_sliding


def run_in_sync(drafter: Any, k: int, num_tokens: int, every: int = 3, kind: str | None = None) -> Any:
    """One request, checked as SYNC says after every few rounds; gives the finished sequence."""
    llm, prompt = engine(), PROMPTS[0]
    params = GREEDY.but(max_tokens=num_tokens, speculative_model=drafter, num_speculative_tokens=k)
    running = submit(llm, prompt, params)
    rounds = 0
    while not running.finished:
        llm.engine.step()
        rounds += 1
        assert running.slot is None or running.cached == len(running) - 1
        if rounds % every == 0 and running.slot is not None:
            assert_in_sync(running, llm.engine.runner, running.cached)
            if kind is not None:
                own = drafter_of(llm, drafter)
                assert_in_sync(running, own.runner, own._cached[running.slot])
    assert running.output == truth(prompt, num_tokens)
    return running


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_B01_a_draft_equal_to_the_target_is_always_right(k: int) -> None:
    """D=: acceptance is exactly 1.0 for every k, and both caches stay in step."""
    done = run_in_sync(draft("same"), k, 40, every=4, kind="same")
    assert done.stats.drafted == done.stats.accepted > 0
    assert done.stats.tokens_per_round > k * 0.9


def test_B02_rejections_do_not_push_the_draft_cache_back() -> None:
    """D~ and a proposer rejected at offsets 0..k-1 in rotation: SYNC, and acceptance does not decay."""
    rotated = run_in_sync(script([PROMPTS[0]], lambda chain: chain % 5), 5, 100)
    expected = sum((["accepted"] * (chain % 5) + ["recovered"] for chain in range(40)), [])
    assert rotated.origins[:90] == expected[:90]
    noisy = run_in_sync(draft("noisy"), 4, 100, kind="noisy")
    kept = [origin == "accepted" for origin in noisy.origins]
    assert sum(kept[50:]) >= sum(kept[:50]) * 0.7


@pytest.mark.parametrize("k", [1, 3])
def test_B03_full_acceptance_leaves_nothing_out_of_the_draft_cache(k: int) -> None:
    """D=: before every chain the draft lacks at most the two tokens that a chain feeds first; acceptance 1.0."""
    llm = engine()
    own = drafter_of(llm, draft("same"))
    params = GREEDY.but(max_tokens=60, speculative_model=draft("same"), num_speculative_tokens=k)
    running = submit(llm, PROMPTS[1], params)
    while not running.finished:
        llm.engine.step()
        if running.slot is not None:
            assert len(running) - 2 <= own._cached[running.slot] <= len(running) - 1
    assert running.stats.accepted == running.stats.drafted > 0
    assert running.output == truth(PROMPTS[1], 60)


@pytest.mark.parametrize("prompt_length", [10, 40])
def test_B06_B09_a_sliding_window_is_crossed_in_mid_draft(prompt_length: int) -> None:
    """Tswa (window 16), prompts below and beyond the window, 64 tokens at k=4 with D~ and with lookup: EQ."""
    model = tiny_sliding()
    llm = opened(model, max_model_len=160, max_num_seqs=2)
    noisy = LLM(model=tiny_draft(model, "noisy"), tokenizer=words(), max_num_seqs=1)
    prompt = list(b"The window slides over all of these many words, and on"[:prompt_length])
    plain = base([prompt], llm, max_tokens=64)
    for drafter in (noisy, lookup(1, 3)):
        assert ids(guessed([prompt], drafter, 4, llm, max_tokens=64)) == ids(plain)
    drafted = guessed([prompt], noisy, 4, llm, max_tokens=64)[0].stats
    assert 0 < drafted.accepted < drafted.drafted


@pytest.mark.parametrize("as_draft", [False, True])
def test_B10_recurrent_layers_are_refused_at_load_by_layer_type(as_draft: bool, tmp_path: Path) -> None:
    """Thyb as target or draft: refused before any weight is read, naming 'linear_attention'."""
    hybrid_config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        if as_draft:
            LLM(model=target(), tokenizer=words(), speculative_model=str(tmp_path))
        else:
            LLM(model=str(tmp_path), method="ngram")


def test_B12_what_lies_behind_a_length_is_never_attended() -> None:
    """With every slot outside the committed prefixes poisoned before each round the text is the same, in place."""
    llm = opened(target(), max_num_seqs=3, max_model_len=128)
    own = drafter_of(llm, draft("noisy"))
    params = GREEDY.but(max_tokens=40, speculative_model=draft("noisy"), num_speculative_tokens=4)
    runners = (llm.engine.runner, own.runner)
    addresses = [[tensor.data_ptr() for tensor in runner.cache.keys] for runner in runners]
    running = [submit(llm, prompt, params) for prompt in PROMPTS[:3]]
    while llm.engine.busy:
        for runner in runners:
            poison(runner, [(one, one.cached if runner is runners[0] else cached_by(own, one)) for one in running])
        llm.engine.step()
    assert [one.output for one in running] == [truth(prompt, 40) for prompt in PROMPTS[:3]]
    assert addresses == [[tensor.data_ptr() for tensor in runner.cache.keys] for runner in runners]
    assert sum(one.stats.accepted for one in running) > 0


def cached_by(drafter: Any, running: Any) -> int:
    return 0 if running.slot is None else drafter._cached.get(running.slot, 0)


def poison(runner: Any, rows: list[tuple[Any, int]]) -> None:
    """NaN everywhere but in the null block and in the first `cached` tokens of each row."""
    keep = torch.zeros(runner.cache.num_blocks * 16, dtype=torch.bool)
    keep[:16] = True
    for running, cached in rows:
        for at in range(cached if running.slot is not None else 0):
            keep[running.blocks[at // 16] * 16 + at % 16] = True
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor[~keep] = float("nan")


def test_B16_without_context_shift_the_run_stops_at_the_context() -> None:
    """Context 64, lookup, room for 200 tokens asked: ends at 64 with finish_reason 'length'."""
    llm = opened(target(), max_model_len=64, max_num_seqs=1)
    prompt = list(b"abcabcabc")
    done = guessed([prompt], lookup(1, 3), 4, llm, max_tokens=200)[0]
    assert len(prompt) + len(done.token_ids) == 64 and done.finish_reason == "length"
    assert list(done.token_ids) == truth(prompt, 64 - len(prompt))
