"""Group D: budgets and contexts are kept to the token, whatever was guessed."""

from __future__ import annotations

import logging

import pytest

from outrider import LLM, ConfigError, InvalidRequestError
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    Counted,
    base,
    draft,
    drafter_of,
    engine,
    guessed,
    idle,
    ids,
    lookup,
    opened,
    script,
    target,
    truth,
    words,
)
from tests.tiny import tiny_absolute, tiny_draft

LONG = list(
    b"A prompt that is long enough to be cut wherever a test needs its context to be almost full, and then more. " * 4
)


def test_D01_D11_the_budget_is_kept_in_ids_logprobs_and_usage() -> None:
    """All guesses right at k=4, max_tokens 1..13: exactly that many, finish_reason 'length'."""
    budgets = range(1, 14)
    params = [GREEDY.but(max_tokens=budget, logprobs=1) for budget in budgets]
    done = guessed([PROMPTS[0]] * len(budgets), script(PROMPTS[:1]), 4, params=params)
    for budget, one in zip(budgets, done, strict=True):
        assert list(one.token_ids) == truth(PROMPTS[0], budget) and one.finish_reason == "length"
        assert len(one.logprobs) == len(one.origins) == one.stats.tokens == budget
        assert one.stats.drafted == one.stats.accepted <= budget - 1


def test_D03_a_draft_never_looks_past_the_context() -> None:
    """Context 64 (learned positions: there is nothing past it), prompts of 56..63, k=5: up to the end exactly, EQ."""
    model = tiny_absolute()
    llm = opened(model, max_num_seqs=8, max_model_len=64)
    noisy = LLM(model=tiny_draft(model, "noisy"), tokenizer=words(), max_num_seqs=1)
    prompts = [LONG[:length] for length in range(56, 64)]
    plain = base(prompts, llm, max_tokens=None)
    for drafter in (noisy, lookup(1, 3)):
        done = guessed(prompts, drafter, 5, llm, max_tokens=None)
        assert ids(done) == ids(plain)
        assert [len(one.token_ids) for one in done] == list(range(8, 0, -1))
        assert {one.finish_reason for one in done} == {"length"}


def test_D04_a_lowered_max_model_len_ends_only_who_reaches_it() -> None:
    """max_model_len 96 below the model's 512, four requests of which one reaches it in mid-draft; it lives on."""
    llm = opened(target(), max_model_len=96, max_num_seqs=4)
    prompts = [LONG[:80], *PROMPTS[:3]]
    done = guessed(prompts, draft("noisy"), 5, llm, max_tokens=30)
    assert [len(one.token_ids) for one in done] == [16, 30, 30, 30]
    assert ids(done) == [truth(prompts[0], 16), *(truth(prompt, 30) for prompt in prompts[1:])]
    assert ids(guessed(PROMPTS[:1], draft("noisy"), 5, llm)) == [truth(PROMPTS[0], 40)] and idle(llm)


def test_D07_D08_a_draft_with_a_short_context_stops_for_that_sequence_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Draft context 64: a prompt of 40 drafts up to it, one of 100 never, a short one always; EQ, logged once."""
    model = tiny_draft(target(), "same")
    model.config.max_position_embeddings = 64
    short = LLM(model=model, tokenizer=words(), max_num_seqs=1)
    prompts = [LONG[:40], LONG[:100], PROMPTS[1]]
    stops = engine().engine.speculator.num_limited
    with caplog.at_level(logging.WARNING, "outrider"):
        done = guessed(prompts, short, 4, params=[GREEDY.but(max_tokens=60), GREEDY, GREEDY])
    assert ids(done) == [truth(prompts[0], 60), truth(prompts[1], 40), truth(prompts[2], 40)]
    reaching, beyond, within = (one.stats for one in done)
    assert 0 < reaching.drafted == reaching.accepted < 24 + 4 and beyond.drafted == 0
    assert within.accepted == within.drafted >= 30
    assert engine().engine.speculator.num_limited == stops + 2
    said = [record.getMessage() for record in caplog.records if "context of 64" in record.getMessage()]
    assert len(said) == 2


def test_D12_zero_one_and_invalid_budgets() -> None:
    """0: an empty text and no pass; 1: one token and no draft pass; -1: refused by name, value and range."""
    llm, own = engine(), drafter_of(engine(), draft("noisy"))
    with Counted(llm.engine.runner) as passes, Counted(own.runner) as draft_passes:
        nothing = guessed(PROMPTS[:1], draft("noisy"), 4, max_tokens=0)[0]
        assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ((), "", "length")
        assert passes.passes == draft_passes.passes == 0
        one = guessed(PROMPTS[:1], draft("noisy"), 4, max_tokens=1)[0]
        assert list(one.token_ids) == truth(PROMPTS[0], 1) and draft_passes.passes == 0
    with pytest.raises(InvalidRequestError, match=r"max_tokens must be an integer >= 0, got -1"):
        GREEDY.but(max_tokens=-1)


@pytest.mark.parametrize("excess", [0, 1, 128])
def test_D13_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(excess: int) -> None:
    """Prompt of ctx, ctx+1 and 3*ctx: refused, the engine healthy; ctx-1 gives one token."""
    llm = opened(target(), max_model_len=64, max_num_seqs=1)
    with pytest.raises(InvalidRequestError, match=f"{64 + excess} tokens.*max_model_len is 64.*shorten"):
        guessed([LONG[: 64 + excess]], draft("noisy"), 4, llm)
    done = guessed([LONG[:63]], draft("noisy"), 4, llm)[0]
    assert list(done.token_ids) == truth(LONG[:63], 1) and idle(llm)


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_D14_few_sequences_at_a_time_are_served(num_seqs: int) -> None:
    """max_num_seqs 1 and 2 with k=4 and more requests than that: EQ."""
    llm = opened(target(), max_num_seqs=num_seqs, max_model_len=128)
    assert ids(guessed(PROMPTS[:4], draft("noisy"), 4, llm, max_tokens=16)) == [truth(one, 16) for one in PROMPTS[:4]]
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer in"):
        opened(target(), max_num_seqs=0)
