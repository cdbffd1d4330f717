"""The benchmark's arithmetic on made-up timings: medians, paired ratios, goals, and that we can lose."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.summary import (
    Goal,
    Run,
    best_of,
    cells,
    first_divergence,
    geometric_mean,
    judged,
    paired_ratios,
    speculation,
    spread,
)

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts" / "core.jsonl"
KINDS = {"prose", "code", "json", "code_edit", "summarise_with_quotes", "chat", "translation"}


def run(engine, rate, prompt="a", repeat=1, *, tokens=101, first_tokens=1, **more):
    """A run that decodes at `rate` tokens a second after half a second for the prompt."""
    seconds = (tokens - first_tokens) / rate
    return Run(engine, prompt, repeat, 10, tokens, first_tokens, 0.5, seconds, 0.5 + seconds, **more)


def goals(plain, ngram, stock, lookup, passes=None, prompts=("a",)):
    """Judge one run of each engine a prompt; the rates are given by prompt."""
    rates = {"ours": plain, "ours-ngram": ngram, "stock": stock, "stock-lookup": lookup}
    runs = [
        run(engine, rate, prompt) for engine, each in rates.items() for prompt, rate in zip(prompts, each, strict=True)
    ]
    found = judged(
        runs,
        prompts=prompts,
        plain="ours",
        ngrams=[("ours-ngram", "ours")],
        peer_plain="stock",
        peer_lookups=["stock-lookup"],
        passes=passes,
    )
    return {goal.name.split(" (")[0]: goal for goal in found}


def test_decoding_is_counted_from_after_the_first_tokens():
    one = run("ours", 50, tokens=101, first_tokens=1)
    assert one.decode_rate == pytest.approx(50)
    assert one.total_rate == pytest.approx(101 / 2.5)
    # Six tokens that came at once with the first are no decoding speed.
    assert run("ours", 50, tokens=101, first_tokens=6).decode_rate == pytest.approx(50)


def test_a_cell_shows_median_lowest_and_highest():
    row = cells([run("ours", rate, repeat=repeat) for repeat, rate in enumerate((30, 10, 20))])["ours", "a"]
    assert (row["decode"].median, row["decode"].low, row["decode"].high) == pytest.approx((20, 10, 30))
    assert row["first"].median == 0.5


def test_a_run_that_could_not_be_timed_is_not_hidden_by_the_others():
    assert math.isnan(spread([1.0, math.nan, 3.0]).median)
    assert math.isnan(spread([]).median)


def test_ratios_compare_runs_of_the_same_repeat():
    # The machine is half as fast in repeat 2, for both: the ratio does not notice.
    runs = [
        run("ours", 60, repeat=1),
        run("ours", 30, repeat=2),
        run("stock", 20, repeat=1),
        run("stock", 10, repeat=2),
    ]
    ratio = paired_ratios(runs, "ours", "stock")["a"]
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((3, 3, 3))
    assert paired_ratios(runs, "ours", "absent") == {}


def test_the_best_peer_is_chosen_for_each_prompt():
    runs = [run("five", 10, "a"), run("ten", 20, "a"), run("five", 30, "b"), run("ten", 20, "b")]
    assert [best_of(runs, ["five", "ten"], prompt) for prompt in "abc"] == ["ten", "five", None]


def test_ratios_are_averaged_as_ratios():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1)
    assert math.isnan(geometric_mean([]))


def test_all_goals_can_be_reached():
    found = goals([32], [60], [20], [40], passes={1: 0.020, 6: 0.025})
    assert {name: goal.reached for name, goal in found.items()} == dict.fromkeys(
        ("plain", "lookup", "never slower", "wide pass"), True
    )


def test_all_goals_can_be_missed():
    found = goals([31], [29], [20], [40], passes={1: 0.020, 6: 0.026})
    assert not any(goal.reached for goal in found.values())
    assert all(goal.reached is False for goal in found.values())
    assert found["never slower"].value == pytest.approx(29 / 31)


def test_one_slow_prompt_loses_the_goal_of_never_being_slower():
    found = goals([40, 40], [400, 37], [20, 20], [20, 20], prompts=("a", "b"))
    assert found["never slower"].reached is False
    assert found["never slower"].by_prompt == pytest.approx({"a": 10, "b": 0.925})
    assert found["lookup"].reached is True


def test_what_was_not_measured_is_not_reached():
    found = goals([32], [60], [20], [40], passes=None)
    assert found["wide pass"].reached is None
    # A prompt that an engine failed on makes the whole goal unmeasured.
    found = judged(
        [run("ours", 40), run("stock", 20)],
        prompts=["a", "b"],
        plain="ours",
        ngrams=[],
        peer_plain="stock",
        peer_lookups=[],
        passes=None,
    )
    assert found[0].reached is None
    assert found[0].by_prompt == {"a": pytest.approx(2)}


def test_a_goal_goes_into_the_record_with_its_verdict():
    record = Goal("plain", "...", 1.6, at_least=True, value=1.2).record()
    assert record["reached"] is False
    assert json.loads(json.dumps(record))["value"] == 1.2


def test_speculation_is_summed_over_repeats():
    runs = [run("ours", 10, repeat=1, drafted=100, accepted=50, rounds=51), run("stock", 10)]
    figures = speculation([*runs, run("ours", 10, repeat=2, drafted=0, accepted=0, rounds=101)])
    assert list(figures) == [("ours", "a")]
    assert figures["ours", "a"] == pytest.approx({"drafted": 50, "acceptance": 0.5, "tokens_per_round": 202 / 152})


@pytest.mark.parametrize(
    ("one", "other", "place"), [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "", None)]
)
def test_the_first_divergence_is_found(one, other, place):
    assert first_divergence(one, other) == place


def test_the_prompts_are_one_of_each_kind():
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert {line["kind"] for line in lines} == KINDS
    assert len(lines) == len(KINDS)
    assert all(line["messages"][-1]["role"] == "user" for line in lines)
