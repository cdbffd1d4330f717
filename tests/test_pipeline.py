"""The host may lag a round behind the device: rounds start before the last one is read, and no token changes.

On a card that is how it always runs; here the engine is told to, so that its book-keeping is tested everywhere.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM, SamplingParams
from outrider.draft.catching_up import runs
from outrider.engine.cost import Grid
from outrider.engine.engine import Engine
from outrider.engine.flight import Flight
from outrider.engine.round_clock import RoundClock
from tests.scripted import generate_staggered, generate_together
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target
from tests.ways import WAYS, source_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 4, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0, "min_tokens": 30, "repetition_penalty": 1.3},
]


@functools.cache
def target() -> Any:
    return tiny_target()


def pair() -> tuple[Any, Any]:
    return target(), tiny_draft(target(), "noisy")


def engine(depth: int, method: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    """An engine whose host lags `depth` rounds behind."""
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=depth))
    draft = pair()[1] if method == "draft_model" else None
    return LLM(target(), draft, tokenizer=byte_tokenizer(), method=method, device="cpu", **settings)


def jobs(method: str = "ngram", num_tokens: int = 40) -> list[tuple[list[int], SamplingParams]]:
    guesses: Any = "off" if method == "none" else 5
    return [
        (prompt, SamplingParams(max_tokens=num_tokens + 3 * place, speculation=guesses, **settings))
        for place, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
    ]


def short_ones(guesses: Any) -> list[tuple[list[int], SamplingParams]]:
    """Texts that begin alike and end soon, each at another length."""
    how = {"temperature": 0.9, "speculation": guesses}
    params = [SamplingParams(max_tokens=3 + 5 * at % 13, seed=at, **how) for at in range(12)]
    return [([*range(60, 100), 65 + at], one) for at, one in enumerate(params)]


def tokens(made: list[list[Any]]) -> list[list[int]]:
    return [sequence.output for group in made for sequence in group]


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("depth", [1, 2])
def test_reading_rounds_late_changes_no_token(method: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(0, method, monkeypatch) as llm:
        wanted = tokens(generate_together(llm, jobs(method)))
    with engine(depth, method, monkeypatch) as llm:
        assert tokens(generate_together(llm, jobs(method))) == wanted
        assert tokens(generate_staggered(llm, jobs(method))) == wanted
        assert not llm.engine._flights
        assert llm.engine.figures.drafted > 0 or method == "none"


@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.filterwarnings("ignore:verification='typical' is lossy")
def test_other_verifiers_decide_the_same_however_late_rounds_are_read(
    verification: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed draft lengths, so that rounds are the same ones: all but the last, whose length knows the text's end."""
    made = []
    for depth in (0, 1):
        with engine(depth, method, monkeypatch, verification=verification) as llm:
            made.append(tokens(generate_together(llm, jobs(method))))
            assert llm.engine.figures.drafted > 0
    for plain, late in zip(*made, strict=True):
        assert len(plain) == len(late)
        assert plain[:-6] == late[:-6]


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_preemption_waits_for_the_round_under_way(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for about two of the four texts: some are sent away and come back, and nothing is lost."""
    with engine(0, method, monkeypatch) as llm:
        wanted = tokens(generate_together(llm, jobs(method, 60)))
        per_block = 16 * llm.engine.runner.bytes_per_slot * (1 if method == "none" else 2)
    with engine(1, method, monkeypatch, kv_cache_bytes=14 * per_block, max_model_len=112) as llm:
        assert tokens(generate_together(llm, jobs(method, 60))) == wanted
        assert llm.engine.scheduler.num_preemptions > 0


def test_a_stop_found_late_ends_the_text_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(0, "ngram", monkeypatch) as llm:
        whole = tokens(generate_together(llm, jobs()))
        stop = [one[17] for one in whole[:3]]  # the fourth may not stop so early
    given = [(prompt, params.but(stop_token_ids=[end])) for (prompt, params), end in zip(jobs(), stop, strict=False)]
    with engine(1, "ngram", monkeypatch) as llm:
        for text, all_of_it, end in zip(tokens(generate_together(llm, given)), whole[:3], stop, strict=True):
            assert text[-1] == end or len(text) == len(all_of_it)
            assert text == all_of_it[: len(text)]


def test_aborting_with_a_round_under_way_leaves_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(0, "draft_model", monkeypatch) as llm:
        wanted = tokens(generate_together(llm, jobs()))
    with engine(1, "draft_model", monkeypatch, max_num_seqs=3) as llm:
        made = [llm.intake.sequences(llm.intake.request(prompt, params))[0] for prompt, params in jobs()]
        for sequence in made:
            llm.engine.add(sequence)
        for _ in range(4):
            llm.engine.step()
        llm.engine.abort(made[0])  # its slot goes to the fourth, which waited
        while llm.engine.busy:
            llm.engine.step()
        assert [one.output for one in made[1:]] == wanted[1:]
        assert made[0].finish_reason == "abort"
        assert made[0].output == wanted[0][: len(made[0].output)]


def test_no_round_is_wasted_on_a_text_that_ended_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(1, "none", monkeypatch) as llm:
        generate_together(llm, [([65, 66], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))])
        assert llm.engine.figures.rounds == 20


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_a_text_that_ends_by_its_length_holds_up_no_other(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round of the others starts before the last one is read; on a card it would stand idle until then."""
    with engine(1, method, monkeypatch) as llm:
        under_way, launch = [], llm.engine._launch

        def watched(ready: Any, **how: Any) -> Any:
            under_way.append((len(ready), len(llm.engine._flights)))
            return launch(ready, **how)

        monkeypatch.setattr(llm.engine, "_launch", watched)
        guesses: Any = "off" if method == "none" else 3
        lengths = (5, 9, 14, 60)
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, speculation=guesses) for n in lengths]
        made = tokens(generate_together(llm, [(PROMPTS[1], one) for one in params]))
        assert [len(one) for one in made] == [*lengths]
        assert all(flights for rows, flights in under_way[1:] if rows > 1)
        if method == "none":
            assert len(under_way) == lengths[-1]


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_texts_that_are_over_in_a_round_that_goes_on_leave_room_to_the_next(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows and blocks go to others, which begin alike, while the round they still stand in is under way."""
    made, wished = [], short_ones("off" if method == "none" else 4)
    for depth in (0, 1, 2):
        with engine(depth, method, monkeypatch, max_num_seqs=3) as llm:
            made.append([tokens(how(llm, wished)) for how in (generate_together, generate_staggered)])
            assert llm.engine.scheduler.cache_usage == 0
    assert made[0] == made[1] == made[2]
    assert made[0][0] == made[0][1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_round_is_told_to_have_given_tokens_behind_a_texts_end(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row that was over, and of guesses that went too far: a trial would be held to have gained by them."""
    with engine(depth, "draft_model", monkeypatch, max_num_seqs=3) as llm:
        told, timed = [], llm.engine.speculator.timed

        def watched(decision: Any, times: Any) -> None:
            told.append(times.tokens)
            timed(decision, times)

        monkeypatch.setattr(llm.engine.speculator, "timed", watched)
        made = tokens(generate_together(llm, short_ones(4)))
        assert sum(told) == sum(map(len, made)) == llm.engine.figures.tokens


@pytest.mark.parametrize("name", list(WAYS))
def test_whoever_drafts_texts_that_end_soon_are_the_same_however_late_rounds_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(0, "none", monkeypatch, max_num_seqs=3) as llm:
        wanted = tokens(generate_together(llm, short_ones("off")))
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=1))
    folders = [str(save(one, byte_tokenizer(), tmp_path / str(at))) for at, one in enumerate(pair())]
    how = {"dtype": "float32", "device": "cpu", "max_num_seqs": 3, **WAYS[name]}
    with LLM(folders[0], source_of(name, folders[1], tmp_path), **how) as llm:
        for serve in (generate_together, generate_staggered):
            assert tokens(serve(llm, short_ones(4))) == wanted
        assert llm.engine.figures.drafted > 0
        assert llm.engine.speculator.num_failures == 0


def test_a_captured_round_costs_what_the_next_larger_one_took() -> None:
    grid = Grid({(1, 0): 5.0, (1, 3): 8.0, (4, 0): 6.0, (4, 3): 9.0}, stepped=True)
    assert grid.at(1, 0) == 5.0
    assert grid.at(1, 2) == 8.0
    assert grid.at(3, 1) == 9.0
    assert grid.at(4, 7) == pytest.approx(13.0)  # beyond what was timed: on along the last stretch


def test_drafts_that_lag_far_and_near_are_not_padded_into_one_pass() -> None:
    """One long prompt beside rows that lack a token or two: padded together they would be a pass of sixteen prompts."""

    def cut(*counts: int, begins: tuple[int, ...] = (), together: bool = True) -> list[list[int]]:
        return [run.places for run in runs(begins or (0,) * len(counts), counts, together=together)]

    assert cut(200, 200, 190) == [[2, 0, 1]]
    assert cut(1900, 1, 2, 1, 1, 2) == [[1, 3, 4, 2, 5], [0]]
    assert cut(1, 1, 1900, 1800, 2) == [[0, 1, 4], [3, 2]]
    assert cut(7) == [[0]]
    assert cut(5, 5, together=False) == [[0], [1]]
    assert cut(200, 190, 210, begins=(0, 40, 0)) == [[0, 2], [1]]  # some begin their texts, one goes on
    assert cut(200, 190, begins=(9, 40)) == [[1, 0]]
    for counts in ((3, 9, 1, 500, 2), (1, 1, 1), (64, 1, 64)):
        assert sorted(place for run in cut(*counts) for place in run) == list(range(len(counts)))
        assert all(
            max(counts[one] for one in run) * len(run) <= 2 * sum(counts[one] for one in run) for run in cut(*counts)
        )


@pytest.mark.parametrize(
    ("waits", "begins", "arrives", "seconds"),
    [(False, [0, 3, 8], [4, 9, 13], [4, 5, 4]), (True, [0, 4, 11], [4, 9, 15], [4, 7, 4])],
)
def test_a_round_ends_when_its_results_are_there(
    waits: bool, begins: list[int], arrives: list[int], seconds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host does with them, it does while the next round runs, unless it waits for each.

    Counted in, a round with guesses after a plain one was held for five percent longer, and a plain one after it for
    five percent shorter, so that a card ran too many plain rounds.
    """
    now = 0.0
    monkeypatch.setattr("outrider.engine.round_clock.time", SimpleNamespace(perf_counter=lambda: now))
    clock, told = RoundClock(apart=waits), []
    decision: Any = SimpleNamespace(feeding=0.0, fed=())
    for began, arrived, wanted in zip(begins, arrives, [0, 1, 0], strict=True):
        now = arrived + 2.0 * wanted  # what the host does with guesses
        flight = Flight([], [wanted], [], SimpleNamespace(), decision, began=began, clean=True)  # type: ignore[arg-type]
        told.append(clock.read(flight, wanted, 1, arrived=arrived).seconds)
    assert told == seconds
