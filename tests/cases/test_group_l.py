"""Group L: what a row gives does not depend on who shares its rounds."""

from __future__ import annotations

import pytest

from tests.cases_support import (
    GREEDY,
    PROMPTS,
    base,
    draft,
    guessed,
    idle,
    ids,
    lookup,
    opened,
    script,
    submit,
    target,
    truth,
)


def test_L01_sixteen_staggered_requests_keep_their_own_texts() -> None:
    """Sixteen prompts, some repetitive, mixed draft lengths, arriving while others run: each EQ to its single run."""
    llm = opened(target(), max_num_seqs=8, max_model_len=128)
    prompts = [
        list(text) for text in (b"ab" * 9, b"xyz" * 7, b"no match!", b"q", b"1212121212", b"words and words and ")
    ]
    prompts += [[*prompt, 33 + at] for at, prompt in enumerate(PROMPTS)] + [[at, at + 1, at] for at in (40, 50, 60, 70)]
    running = []
    for at, prompt in enumerate(prompts):
        params = GREEDY.but(speculative_model=lookup(1, 3), num_speculative_tokens=1 + at % 6, max_tokens=10 + 2 * at)
        running.append(submit(llm, prompt, params))
        if at % 3 == 2:
            llm.engine.step()
            llm.engine.step()
    while llm.engine.busy:
        llm.engine.step()
    alone = base(prompts, params=[GREEDY.but(max_tokens=10 + 2 * at) for at in range(16)])
    assert [one.output for one in running] == ids(alone)
    single = base([prompts[4]], max_tokens=18)
    assert ids(single)[0] == running[4].output and idle(llm)


def test_L02_rows_with_and_without_guesses_share_a_round() -> None:
    """Half the rows never find a match, an odd number of rows, padded too (exact mode): EQ per row."""
    matching, distinct = [list(b"abab" * 5), list(b"xx yy xx yy ")], [list(b"abcdefg"), list(b"ABCDEFGHIJ"), [9]]
    prompts = [matching[0], distinct[0], matching[1], distinct[1], distinct[2]]
    wanted = [truth(prompt, 30) for prompt in prompts]
    assert ids(guessed(prompts, lookup(2, 4), 5, max_tokens=30)) == wanted
    padded = opened(target(), exact=True, num_speculative_tokens=3, max_num_seqs=7, max_model_len=64)
    assert ids(guessed(prompts, lookup(2, 4), 3, padded, max_tokens=20)) == [one[:20] for one in wanted]


@pytest.mark.parametrize("kind", ["off", "noisy", "lookup"])
def test_L03_prompts_of_different_lengths_do_not_pad_each_other(kind: str) -> None:
    """Prompts of 1, 5, 17 and 40 tokens in one batch: each EQ to its own run."""
    text = list(b"Different lengths of text in one batch, side by side")
    prompts = [text[:length] for length in (1, 5, 17, 40)]
    wanted = [truth(prompt, 40) for prompt in prompts]
    if kind == "off":
        assert ids(base(prompts)) == wanted
    else:
        assert ids(guessed(prompts, draft("noisy") if kind == "noisy" else lookup(1, 3), 4)) == wanted


def test_L06_acceptance_does_not_fall_with_many_sequences() -> None:
    """Sixteen requests at once with D=: acceptance 1.0 for each, as alone."""
    prompts = [[*PROMPTS[0], at + 40] for at in range(16)]
    done = guessed(prompts, draft("same"), 4, max_tokens=24)
    assert ids(done) == ids(base(prompts, max_tokens=24))
    assert all(one.stats.accepted == one.stats.drafted > 0 for one in done)


@pytest.mark.parametrize("kind", ["noisy", "scripted", "lookup"])
def test_L07_rows_leave_and_join_without_swapping_limits(kind: str) -> None:
    """Six rows of which one ends after three tokens, others joining as slots free, one near its context: EQ per row."""
    llm = opened(target(), max_num_seqs=6, max_model_len=64)
    near = list(b"This prompt is meant to end near the context's end, it is!")
    prompts = [PROMPTS[0], near, *PROMPTS[1:6], [8], [9, 9], [10]]
    budgets = [3, 200, 20, 2, 9, 30, 12, 5, 17, 33]
    drafter = {"noisy": draft("noisy"), "scripted": script(prompts, lambda chain: chain % 4), "lookup": lookup(1, 2)}[
        kind
    ]
    done = guessed(prompts, drafter, 5, llm, params=[GREEDY.but(max_tokens=budget) for budget in budgets])
    for prompt, budget, one in zip(prompts, budgets, done, strict=True):
        assert list(one.token_ids) == truth(prompt, min(budget, 64 - len(prompt)))
    assert idle(llm)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_L10_prompts_fed_in_small_pieces_give_the_same_text(chunk: int) -> None:
    """prefill_chunk_size below every prompt, drafts catching up in the same pieces: EQ, and drafting does start."""
    llm = opened(target(), prefill_chunk_size=chunk, max_num_seqs=3, max_model_len=96)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[4]]
    for drafter in (draft("noisy"), lookup(1, 3)):
        done = guessed(prompts, drafter, 4, llm, max_tokens=24)
        assert ids(done) == [truth(prompt, 24) for prompt in prompts]
    if chunk > 1:  # one token a step never catches up with a text that grows by one a step
        assert guessed(prompts, draft("same"), 4, llm)[0].stats.accepted > 10
