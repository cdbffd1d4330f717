"""Group E: every logits rule holds at every position of a chain, with that position's own prefix."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from outrider import Grammar, SamplingParams
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    Scripted,
    base,
    chi_square_p,
    draft,
    engine,
    guessed,
    ids,
    lookup,
    model_drafter,
    sampled,
    shaped_distribution,
    tables,
    truth,
)

PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": -2.0},
    {},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.5},
]


def test_E01_penalties_act_under_speculation_as_without_it() -> None:
    """Frequency -2, 0, 2, presence 2, repetition 1.5 over 40 greedy tokens: each EQ, and they differ as BASE's do."""
    params = [GREEDY.but(**one) for one in PENALTIES]
    prompts = [PROMPTS[3]] * len(params)
    plain = ids(base(prompts, params=params))
    for drafter in (draft("noisy"), lookup(1, 3)):
        assert ids(guessed(prompts, drafter, 5, params=params)) == plain
    assert len({tuple(one) for one in plain}) >= 4, "the penalties must bite for this case to say anything"


def test_E02_every_token_of_an_accepted_run_counts_for_the_penalty() -> None:
    """All guesses right at k=6 under frequency_penalty 1.5: EQ, and all of them were accepted."""
    params = [GREEDY.but(frequency_penalty=1.5)] * 3
    plain = base(PROMPTS[:3], params=params)
    drafter = Scripted([[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, plain, strict=False)])
    done = guessed(PROMPTS[:3], drafter, 6, params=params)
    assert ids(done) == ids(plain)
    assert all(one.stats.accepted == one.stats.drafted >= 30 for one in done)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_E02_min_tokens_counts_tokens_not_rounds(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """min_tokens=12 with EOS wanted at the third token: never before the 13th, then at once, for every k."""
    prompt = PROMPTS[0]
    wanted = truth(prompt, 3)[2]
    monkeypatch.setattr(engine().intake, "_eos_token_ids", (wanted,))
    # A bias makes EOS the target's wish everywhere, so the first allowed place must take it.
    params = [GREEDY.but(ignore_eos=False, min_tokens=12, logit_bias={wanted: 100.0})]
    plain = base([prompt], params=params)[0]
    assert len(plain.token_ids) == 13 and plain.token_ids.index(wanted) == 12 and plain.finish_reason == "stop"
    for drafter in (Scripted([[*prompt, *plain.token_ids]]), draft("noisy")):
        assert ids(guessed([prompt], drafter, k, params=params)) == ids([plain])


SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "temperature": {"temperature": 1.6},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.3},
    "seed": {"seed": 99},
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, 256, 3))},
    "stop": {"stop": ["e", "a", " "], "temperature": 2.0},
    "stop_token_ids": {"stop_token_ids": list(range(0, 256, 5))},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": [chr(c) for c in range(64, 100)]},
    "ignore_eos": {"ignore_eos": False},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {101: 8.0, 32: -100.0}},
    "bad_words": {"bad_words": [chr(c) for c in range(33, 80)]},
    "logprobs": {"logprobs": 2},
    "grammar": {"grammar": Grammar.regex("[a-z]+( [a-z]+)*")},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "priority": {"priority": 3},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {257: 100.0}},
}
OF_SPECULATION = {"speculation", "speculative_model", "num_speculative_tokens", "prediction"}


def test_E04_no_sampling_field_is_dropped_under_speculation() -> None:
    """Each field alone, sampled and seeded, with D~ and with lookup: text, ids and reasons as without speculation."""
    assert set(FIELDS) | OF_SPECULATION == {one.name for one in fields(SamplingParams)}
    params = [SAMPLED.but(**one) for one in FIELDS.values()]
    prompts = [PROMPTS[2]] * len(params)
    llm = engine()

    def seen(changes: dict[str, Any]) -> list[Any]:
        outputs = llm.generate(prompts, [one.but(**changes) for one in params])
        return [
            [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
            for output in outputs
        ]

    plain = seen({"speculation": "off"})
    for drafter in (draft("noisy"), lookup(1, 3)):
        assert seen({"speculative_model": drafter, "num_speculative_tokens": 4}) == plain
    unchanged = llm.generate([PROMPTS[2]], SAMPLED)[0]
    silent = {
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "priority",
    }  # see E01
    for name, done in zip(FIELDS, plain, strict=True):
        assert name in silent or len(done) > 1 or done[0][0] != unchanged.token_ids, f"{name} had no effect at all"


def test_E06_a_banned_id_never_comes_and_min_p_holds_at_every_position() -> None:
    """logit_bias -100 on the greedy ids at T=0: never seen, EQ; min_p=0.3 at T=1: CHI."""
    banned = dict.fromkeys(truth(PROMPTS[0], 5), -100.0)
    plain = base([PROMPTS[0]], logit_bias=banned)[0]
    done = guessed([PROMPTS[0]], draft("noisy"), 4, logit_bias=banned)[0]
    assert done.token_ids == plain.token_ids and not set(done.token_ids) & set(banned)
    table, other = tables(2)
    for verification in ("coupled", "rejection"):
        tokens, _ = sampled(table, model_drafter(other), verification, SamplingParams(min_p=0.3))
        assert chi_square_p(tokens, shaped_distribution(table, min_p=0.3)) > 1e-3


def test_E08_lookup_cannot_bring_in_forbidden_words() -> None:
    """bad_words stand in the repeated span of the prompt, NG(1,3,5): never in the output, EQ, figures sane."""
    prompt = list(b"xyxyxyxyxyxyxy")
    free = truth(prompt, 40)
    letters = [chr(one) for one in dict.fromkeys(free) if 33 <= one < 127][:3]
    words = ["xy", *letters]
    plain = base([prompt], bad_words=words)[0]
    done = guessed([prompt], lookup(1, 3), 5, bad_words=words)[0]
    assert done.token_ids == plain.token_ids and not set(done.token_ids) & {ord(one) for one in letters}
    assert list(done.token_ids) != free and 0 <= done.stats.accepted <= done.stats.drafted
    assert b"xy" not in bytes(token for token in (*prompt[-1:], *done.token_ids) if token < 256)


def test_E09_rules_of_one_row_stay_with_that_row() -> None:
    """Four rows, one with presence_penalty, one with logit_bias, two plain, each with its own acceptance: EQ alone."""
    params = [GREEDY.but(presence_penalty=2.0), GREEDY.but(logit_bias={101: 9.0}), GREEDY, GREEDY.but(max_tokens=25)]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[5]]
    alone = [ids(base([one], params=[rules]))[0] for one, rules in zip(prompts, params, strict=True)]
    for drafter in (draft("noisy"), lookup(1, 2)):
        assert ids(guessed(prompts, drafter, 5, params=params)) == alone
