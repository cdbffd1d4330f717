"""Groups P, Q and R: draft lengths that change, figures that add up, and slots that come free."""

from __future__ import annotations

import math
import time

import pytest

from outrider import LLM, SamplingParams
from outrider.config import SpeculationConfig
from outrider.engine.choice import Choice, Party, TextLength, Wish
from outrider.engine.controller import Controller
from outrider.engine.cost import CHAIN, Grid, RoundCosts
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
    submit,
    target,
    truth,
    words,
)
from tests.tiny import tiny_draft


def costs() -> RoundCosts:
    """A draft model at a twentieth of its target."""
    passes = Grid({(1, 0): 1.0, (1, 1): 1.05, (1, 5): 1.2})
    return RoundCosts({CHAIN: passes}, drafts={"draft_model": Grid({(1, 1): 0.05, (1, 5): 0.25})})


LONG = list(b"A prompt of some length, so that the cache is short of blocks for more than two of its kind at a time. ")

# --- P


def paired(**settings: object) -> LLM:
    return LLM(
        model=target(),
        tokenizer=words(),
        speculative_model=tiny_draft(target(), "noisy"),
        **{"max_model_len": 160, "max_num_seqs": 4, **settings},
    )


def trace(llm: LLM, prompt: list[int]) -> list[tuple[int, int]]:
    """What each round of one adaptive request did: its length after it, guesses so far."""
    running = submit(llm, prompt, GREEDY.but(max_tokens=60))
    steps = []
    while not running.finished:
        llm.engine.step()
        steps.append((len(running), running.stats.drafted))
    return steps


def test_P01_what_one_request_saw_is_known_lent_and_fades() -> None:
    """Run A (hard to guess), then B: config untouched, B's text EQ, and lengths become those of a fresh engine.

    What persists is the engine's own record of its drafter, by design: when B has come a few times more, both draft
    nearly alike. (What A showed of third guesses stands until third guesses are asked for again.)
    """
    fresh, used = paired(), paired()
    for llm in (fresh, used):
        llm.engine.speculator._controller = Untimed(costs())
    before = used.engine.speculation
    assert isinstance(before, SpeculationConfig)
    trace(used, PROMPTS[0])
    comings = [[trace(llm, PROMPTS[2])[-1] for llm in (used, fresh)] for _ in range(4)]
    assert {length for coming in comings for length, _ in coming} == {118}
    apart = [abs(one[1] - other[1]) for one, other in comings]
    assert apart[-1] < min(apart[0], 15), apart
    assert used.engine.speculation == before and before.num_speculative_tokens == 5


class Untimed(Controller):
    """One whose costs stay as they are, whatever the clock says."""

    def took(self, *_: object) -> None:
        pass


class Schedule:
    """A controller that follows a timetable."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths, self.asked = lengths, []
        self.costs, self.length = costs(), TextLength()

    def choose(self, party: Party, wishes: list[Wish]) -> Choice:
        self.asked.append(min(wishes[0].most, self._lengths[len(self.asked) % len(self._lengths)]))
        return Choice([self.asked[-1]])

    def learn(self, *_: object, tree: bool) -> None:
        pass

    def took(self, *_: object) -> None:
        pass


def test_P02_the_draft_length_may_change_in_every_round() -> None:
    """k goes 7, 5, 3, 0, 7 within one run: EQ, and each round proposes what was asked for."""
    llm = paired(num_speculative_tokens=7)
    llm.engine.speculator._controller = schedule = Schedule([7, 5, 3, 0, 7])  # type: ignore[assignment]
    own = llm.engine.speculator.drafter
    widths: list[int] = []
    propose = own.propose
    own.propose = lambda rows, k: (widths.append(k), propose(rows, k))[1]  # type: ignore[method-assign, union-attr]
    done = llm.generate([PROMPTS[0]], GREEDY)[0]
    assert list(done.token_ids) == truth(PROMPTS[0], 40)
    assert widths == [one for one in schedule.asked if one] and {7, 5, 3} <= set(widths)


@pytest.mark.parametrize("kind", ["noisy", "scripted", "lookup"])
def test_P02_rows_of_one_batch_may_draft_7_5_3_and_0(kind: str) -> None:
    """Per-request lengths 7, 5, 3, 0 in one batch: EQ per row, no row proposes more than its own."""
    prompts = PROMPTS[:4]
    drafter = {"noisy": draft("noisy"), "scripted": script(prompts), "lookup": lookup(1, 2)}[kind]
    params = [GREEDY.but(speculation=k, speculative_model=drafter) for k in (7, 5, 3, 0)]
    done = [one.outputs[0] for one in engine().generate(prompts, params)]
    assert ids(done) == [truth(prompt, 40) for prompt in prompts]
    assert all(len(one.stats.drafted_per_position) <= k for one, k in zip(done, (7, 5, 3, 0), strict=True))


def test_P05_with_speculation_off_the_draft_does_nothing() -> None:
    """speculation 'off' and 0: not one pass of the draft, one of the target a token (and one for the prompt)."""
    llm = engine()
    own = drafter_of(llm, draft("noisy"))
    for off in ("off", 0):
        with Counted(own.runner) as draft_passes, Counted(llm.engine.runner) as passes:
            done = llm.generate([PROMPTS[0]], GREEDY.but(speculation=off, speculative_model=draft("noisy")))[0]
        assert list(done.token_ids) == truth(PROMPTS[0], 40)
        assert (draft_passes.passes, passes.passes) == (0, 41)


# --- Q


@pytest.mark.parametrize("right", [0, 1, 4])
def test_Q01_the_rate_is_accepted_by_proposed(right: int) -> None:
    """Chains of four with 0, 1 or all right: exactly accepted/proposed, the bonus not counted; 0 if none is right."""
    budget, left = 15, 15
    proposed = accepted = 0
    while left:
        chain = min(4, left - 1)
        proposed, accepted, left = proposed + chain, accepted + min(right, chain), left - min(right, chain) - 1
    stats = guessed([PROMPTS[0]], script(PROMPTS[:1], lambda chain: right), 4, max_tokens=budget)[0].stats
    assert (stats.drafted, stats.accepted) == (proposed, accepted)
    assert stats.acceptance_rate == accepted / proposed


def test_Q03_no_drafts_is_no_division_by_zero() -> None:
    """Figures before any draft and of a run without a match: 0, never an error or NaN."""
    llm = opened(target(), max_num_seqs=1, max_model_len=64)
    running = submit(llm, [7], GREEDY)
    before = running.stats
    llm.engine.abort(running)
    after = guessed([list(b"abcdefg")], lookup(40, 50), 4, llm, max_tokens=4)[0].stats
    for stats in (before, after):
        figures = (
            stats.acceptance_rate,
            stats.tokens_per_round,
            *stats.acceptance_by_position,
            *stats.conditional_acceptance_by_position,
        )
        assert all(math.isfinite(one) for one in figures) and stats.acceptance_rate == 0


def test_Q04_short_last_rounds_count_what_was_proposed() -> None:
    """max_tokens=5 at k=4, all right, and 7: proposals counted as made, not as configured."""
    for budget, proposed in ((5, 4), (7, 4 + 1), (1, 0)):
        stats = guessed([PROMPTS[0]], script(PROMPTS[:1]), 4, max_tokens=budget)[0].stats
        assert (stats.drafted, stats.accepted) == (proposed, proposed)


def test_Q05_acceptance_by_position_comes_in_both_definitions() -> None:
    """First guess always right, second half the time, third half of those: 1, .5, .25 and 1, .5, .5."""
    pattern = [3, 1, 2, 1]  # right guesses a chain of three
    prompt = PROMPTS[0]
    done = guessed([prompt], script([prompt], lambda chain: pattern[chain % 4], longest=3), 3, max_tokens=8 * 11 + 4)[0]
    chains = 8 * 4
    stats = done.stats
    assert stats.drafted_per_position[:3] >= (chains,) * 3
    assert stats.acceptance_by_position == pytest.approx((1, 0.5, 0.25), abs=0.03)
    assert stats.conditional_acceptance_by_position == pytest.approx((1, 0.5, 0.5), abs=0.03)


def test_Q08_generated_tokens_are_tokens_not_steps() -> None:
    """All accepted at k=4, 100 tokens: the request's and the engine's counters say 100."""
    figures = engine().engine.figures
    tokens, rounds = figures.tokens, figures.rounds
    stats = guessed([PROMPTS[0]], script(PROMPTS[:1]), 4, max_tokens=100)[0].stats
    assert stats.tokens == figures.tokens - tokens == 100
    assert stats.rounds == figures.rounds - rounds == 20 and stats.tokens_per_round == 5


# --- R


@pytest.mark.parametrize("kind", ["noisy", "lookup", "off"])
def test_R01_a_stream_left_early_gives_everything_back(kind: str) -> None:
    """Twelve streams closed after up to three chunks, two at a time: slots and blocks free at once, the next EQ."""
    llm = opened(target(), max_num_seqs=2, max_model_len=96)
    how = {
        "noisy": {"speculative_model": draft("noisy"), "num_speculative_tokens": 3},
        "lookup": {"speculative_model": lookup(1, 3), "num_speculative_tokens": 3},
        "off": {"speculation": "off"},
    }[kind]
    for attempt in range(6):
        streams = [llm.stream(prompt, GREEDY.but(**how)) for prompt in PROMPTS[:2]]
        for stream in streams:
            for _ in range(1 + attempt % 3):
                next(stream)
        began = time.perf_counter()
        for stream in streams:
            stream.close()
        assert idle(llm) and time.perf_counter() - began < 1
    with Counted(llm.engine.runner) as passes:
        llm.engine.step()
    assert passes.passes == 0
    done = llm.generate(PROMPTS[:2], GREEDY.but(**how))
    assert [list(one.token_ids) for one in done] == [truth(prompt, 40) for prompt in PROMPTS[:2]]


def test_R01_a_stream_that_was_never_read_gives_everything_back() -> None:
    """Closed (or dropped) before its first chunk: nothing is left in the engine."""
    llm = opened(target(), max_num_seqs=1, max_model_len=96)
    stream = llm.stream(PROMPTS[0], GREEDY)
    stream.close()
    del stream
    assert idle(llm)


def test_R03_a_stream_left_while_its_prompt_is_fed() -> None:
    """A long prompt in small chunks, aborted before its first token; the next request at once: EQ."""
    llm = opened(target(), max_num_seqs=1, max_model_len=200, prefill_chunk_size=8)
    how = {"speculative_model": draft("noisy"), "num_speculative_tokens": 3}
    running = submit(llm, LONG, GREEDY.but(**how))
    llm.engine.step()
    assert 0 < running.cached < len(LONG) - 1
    llm.engine.abort(running)
    assert idle(llm) and running.finish_reason == "abort"
    done = llm.generate([PROMPTS[0]], GREEDY.but(**how))[0]
    assert list(done.token_ids) == truth(PROMPTS[0], 40)


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("noisy", 0),
        ("noisy", 1),
        ("noisy", 3),
        ("noisy", 5),
        ("lookup", 3),
        ("lookup", 5),
        ("scripted", 1),
        ("scripted", 5),
    ],
)
def test_R04_preempted_requests_end_with_their_own_text(kind: str, k: int) -> None:
    """A KV budget for two of four requests: preemptions happen, every text EQ (greedy and seeded), tokens once each."""
    llm = opened(target(), kv_cache_bytes=(2 + 9) * 16 * 512, max_num_seqs=4, max_model_len=112)
    prompts = [LONG[:length] for length in (20, 25, 17, 30)]
    drafter = {"noisy": draft("noisy"), "scripted": script(prompts, lambda chain: chain % 4), "lookup": lookup(1, 2)}[
        kind
    ]
    seeded = SamplingParams(temperature=0.9, seed=6, max_tokens=40, ignore_eos=True)
    params = [GREEDY, seeded, GREEDY, GREEDY.but(presence_penalty=1.0)]
    done = [
        one.outputs[0]
        for one in llm.generate(prompts, [one.but(speculation=k, speculative_model=drafter) for one in params])
    ]
    assert llm.engine.scheduler.num_preemptions > 0
    alone = base(prompts, params=params)
    assert ids(done) == ids(alone) and [one.text for one in done] == [one.text for one in alone]
    assert all(len(one.origins) == one.stats.tokens == 40 for one in done) and idle(llm)


def test_R11_every_stream_ends_with_a_reason() -> None:
    """Forty streams with mixed stops at k=6, four open at a time: each ends, with a finish_reason."""
    llm = opened(target(), max_num_seqs=4, max_model_len=96)
    text = truth(PROMPTS[0], 40)
    for group in range(10):
        streams = [
            llm.stream(
                PROMPTS[0],
                GREEDY.but(
                    stop_token_ids=[text[(group + at) % 20]],
                    max_tokens=5 + at,
                    speculative_model=script(PROMPTS[:1]),
                    num_speculative_tokens=6,
                ),
            )
            for at in range(4)
        ]
        lasts = [list(stream)[-1] for stream in streams]
        assert all(one.finish_reason in ("stop", "length") and one.stats is not None for one in lasts)
    assert idle(llm)
