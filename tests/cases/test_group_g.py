"""Group G: a seed fixes the text, whoever shares the engine and however guesses are made."""

from __future__ import annotations

from outrider import SamplingParams
from tests.cases_support import GREEDY, PROMPTS, base, draft, engine, guessed, ids, lookup, opened, target, truth

SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)


def test_G01_the_same_seed_gives_the_same_text_also_after_a_restart() -> None:
    """seed=7 at T=1, twice on one engine and once on a fresh one: identical; another seed is another text."""
    first, second = (guessed(PROMPTS[:2], draft("noisy"), 4, params=[SEEDED] * 2) for _ in range(2))
    fresh = guessed(PROMPTS[:2], draft("noisy"), 4, opened(target(), max_num_seqs=2), params=[SEEDED] * 2)
    assert ids(first) == ids(second) == ids(fresh)
    assert ids(base(PROMPTS[:2], params=[SEEDED.but(seed=8)] * 2)) != ids(first)


def test_G02_seeded_unseeded_and_greedy_rows_do_not_touch_each_other() -> None:
    """Seeds 1, 2, None, None, 3 and one T=0 in one batch: greedy EQ, seeded rows as alone, unseeded ones all differ."""
    seeds = [1, 2, None, None, 3]
    params = [SEEDED.but(seed=seed) for seed in seeds] + [GREEDY.but(max_tokens=30)]
    prompt = PROMPTS[2]
    for drafter in (draft("noisy"), lookup(1, 3)):
        done = ids(guessed([prompt] * 6, drafter, 4, params=params))
        assert done[5] == truth(prompt, 30)
        for row in (0, 1, 4):
            assert done[row] == ids(base([prompt], params=[params[row]]))[0]
        assert len({tuple(one) for one in done}) == 6
        assert all(0 <= token < 320 for one in done for token in one)  # padding ids too may be drawn, now and then


def test_G04_the_engine_s_history_does_not_reach_a_seeded_text() -> None:
    """seed=7 alone, after ten others, in a batch of four, with k=2 and k=5: all the same ids."""
    prompt = PROMPTS[0]
    alone = ids(base([prompt], opened(target(), max_num_seqs=1), params=[SEEDED]))[0]
    base(PROMPTS * 2, params=[SEEDED.but(seed=None, max_tokens=3)] * 12)
    assert ids(base([prompt], params=[SEEDED]))[0] == alone
    others = [SEEDED.but(seed=1), SEEDED.but(seed=None), GREEDY]
    assert ids(guessed([prompt, *PROMPTS[1:4]], draft("noisy"), 3, params=[SEEDED, *others]))[0] == alone
    for k in (2, 5):
        assert ids(guessed([prompt], draft("noisy"), k, engine(), params=[SEEDED]))[0] == alone
