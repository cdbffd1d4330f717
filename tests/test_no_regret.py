"""The benchmark of draft lengths: its pair of many agreements, its cells, and how it judges."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING

import pytest

from benchmarks import regret_simulation
from benchmarks.mixed_pair import mixed_guesses, mixed_pair
from benchmarks.no_regret import turn
from benchmarks.regret_figures import Cell, cells, judged, regret_table, verdicts
from outrider import LLM, SamplingParams
from outrider.bench.pair import Saying

if TYPE_CHECKING:
    from pathlib import Path


def test_a_mixed_draft_errs_in_each_region_as_often_as_it_should() -> None:
    saying = Saying.of(4096, 3)
    agreements = (0.0, 0.5, 0.95)
    guesses = mixed_guesses(saying, 3, agreements)
    assert sorted(guesses.tolist()) == list(range(4096))  # rows of a head change places
    for number, agreement in enumerate(agreements):
        tokens = saying.cycle[number * 1280 :][:1280]
        share = float((guesses[tokens] == saying.following[tokens]).float().mean())
        assert share == pytest.approx(agreement, abs=0.01)


def test_a_mixed_pair_is_written_once_and_says_what_it_should(tmp_path: Path) -> None:
    """Its text is the target's; guesses of each region are right as often as they should be; a second run finds it."""
    sizes = "hidden=64,layers=1,heads=2,kv_heads=2,intermediate=64,vocab=1024"
    how = {"target": sizes, "draft": sizes, "agreements": (0.0, 0.9), "seed": 0, "dtype": "float32", "device": "cpu"}
    pair = mixed_pair(tmp_path, **how)  # type: ignore[arg-type]
    written = (tmp_path / "mixed-draft" / "model.safetensors").stat().st_mtime_ns
    assert mixed_pair(tmp_path, **how).region == pair.region == 512  # type: ignore[arg-type]
    assert (tmp_path / "mixed-draft" / "model.safetensors").stat().st_mtime_ns == written
    with LLM(str(pair.target), str(pair.draft), device="cpu", max_model_len=160, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, speculation=4)
        for agreement in (0.0, 0.9):
            prompts = pair.prompts(agreement, 2, 8, 160)
            for prompt, output in zip(
                prompts, llm.generate(prompt_token_ids=prompts, sampling_params=params), strict=True
            ):
                assert pair.saying.mismatches(prompt, output.token_ids) == 0
                reached = sum(output.stats.reached_per_position)
                assert output.stats.accepted / reached == pytest.approx(agreement, abs=0.09)


def test_auto_is_held_against_the_best_of_all_others_and_losing_cells_are_listed() -> None:
    rates = {"auto": [9.0, 10.0, 9.5], "off": [10.0, 10.0, 10.0], "3": [8.0, 8.0, 8.0]}
    lost = judged(Cell(1, 64, 0.0, 0.3), rates)
    assert lost["best"] == "off" and lost["regret"] == pytest.approx(0.05) and lost["noise"] == 0
    won = judged(Cell(1, 64, 0.0, "mixed"), {**rates, "auto": [12.0, 12.0, 12.0], "3": [10.5, 10.5, 10.5]})
    told = verdicts([lost, won])
    assert told["never slower"]["reached"] is False
    assert [one["name"] for one in told["never slower"]["losing"]] == [Cell(1, 64, 0.0, 0.3).name]
    assert told["mixed"]["reached"] and told["mixed"]["cells"][0]["gain"] == pytest.approx(12 / 10.5 - 1)
    assert verdicts([])["never slower"]["reached"] is None and verdicts([])["mixed"]["reached"] is None
    table = regret_table([lost, won])
    assert table.title and "Tokens a second" in str(table.title)


def test_a_machine_that_is_slow_in_one_turn_is_told_from_rounds_badly_chosen() -> None:
    """Auto runs the rounds of the best length, which took 1.5 times as long in its turns; and then others."""
    quick, slow = {"1 x 3": [10, 1.0, 30, 0.1], "garbage": [1, 9.0, 0, 9.0]}, {"1 x 3": [10, 1.5, 30, 0.2]}
    plain = {"1 x 0": [30, 3.0, 30, 0.1], "1 x 0 busy": [1, 0.1, 0, 0.1], "2 x 0 busy": [1, 7.0, 0, 7.0]}
    rates = {"auto": [20.0, 20.0], "off": [10.0, 10.0], "3": [30.0, 30.0]}
    found = judged(Cell(1, 64, 0.0, 0.3), rates, {"auto": [slow] * 2, "off": [plain] * 2, "3": [quick] * 2})
    assert found["regret"] == pytest.approx(1 / 3) and found["level"] == pytest.approx(1.0)
    found = judged(Cell(1, 64, 0.0, 0.3), rates, {"auto": [plain] * 2, "off": [plain] * 2, "3": [quick] * 2})
    assert found["level"] == pytest.approx(2 / 3) and found["best"] == "3"
    (lost,) = verdicts([found])["never slower"]["losing"]
    assert lost["level"] == found["level"] and "level" in str(regret_table([found]).columns)


def test_all_cells_of_a_pair_are_one_workload_for_one_length() -> None:
    """A length that is best somewhere is not best everywhere: 1 row at 10 or 20, 2 rows at 30 or 24 tokens a second."""
    alone = judged(Cell(1, 64, 0.0, 0.9), {"auto": [20.0], "off": [10.0], "3": [20.0]}, pair="a")
    two = judged(Cell(2, 64, 0.0, 0.0), {"auto": [30.0], "off": [30.0], "3": [24.0]}, pair="a")
    other = judged(Cell(1, 64, 0.0, 0.0), {"auto": [9.0], "off": [10.0]}, pair="b")
    told = verdicts([alone, two, other])["workload"]
    first, second = told["pairs"]
    assert first["cells"] == 2 and first["best"] == "3" and not told["reached"]
    assert first["rates"]["off"] == pytest.approx(3 / (1 / 10 + 2 / 30))
    assert first["gain"] == pytest.approx((1 / 20 + 2 / 24) / (1 / 20 + 2 / 30) - 1)
    assert second["gain"] == pytest.approx(-0.1)


def test_the_cells_hold_every_number_of_rows_length_temperature_and_agreement() -> None:
    found = cells([1, 4, 16, 32], [8, 64, 256, 512], [0.0, 0.7, 1.0, 1.5], [0.0, 0.3, 0.6, 0.8, 0.95], 64)
    assert len(found) == len(set(found)) < 50
    for name, values in (
        ("rows", {1, 4, 16, 32}),
        ("tokens", {8, 64, 256, 512}),
        ("temperature", {0.0, 0.7, 1.0, 1.5}),
        ("text", {0.0, 0.3, 0.6, 0.8, 0.95, "mixed"}),
    ):
        assert {getattr(cell, name) for cell in found} == values


def test_texts_that_end_apart_are_as_long_with_every_setting(tmp_path: Path) -> None:
    sizes = "hidden=64,layers=1,heads=2,kv_heads=2,intermediate=64,vocab=1024"
    how = {"target": sizes, "draft": sizes, "agreements": (0.9,), "seed": 0, "dtype": "float32", "device": "cpu"}
    pair = mixed_pair(tmp_path, **how)  # type: ignore[arg-type]
    with LLM(str(pair.target), str(pair.draft), device="cpu", max_model_len=160, max_num_seqs=2) as llm:
        cell, prompts = Cell(2, 20, 0.0, 0.9), pair.prompts(0.9, 4, 8, 40)
        made = [turn(llm, cell, prompts, setting, 40, apart=True)[1] for setting in ("off", "auto", "3")]
        assert made[0] == made[1] == made[2]
        lengths = [len(one) for one in made[0]]
        assert len(set(lengths)) > 1 and all(12 <= length <= 20 for length in lengths)
        assert {len(one) for one in turn(llm, cell, prompts, "off", 40)[1]} == {20}


def test_simulated_cells_take_their_costs_from_a_record_and_are_judged_as_measured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells_of = [
        {"rows": rows, "rounds": {"off": [{kind[0]: [10, took * 10, 0, 0]}], "2": [{kind[1]: [5, took * 10, 0, 0]}]}}
        for rows, took, kind in ((1, 0.004, ("0", "2")), (2, 0.005, ("2 x 0", "2 x 2")))
    ]
    record = {"cells": cells_of, "pairs": {"a pair": {"feeds": {"draft_model": [0.001, 0.00001]}}}}
    (tmp_path / "costs.json").write_text(json.dumps(record), encoding="utf-8")
    costs = regret_simulation.Costs.of_record(tmp_path / "costs.json")
    assert costs.rounds == {
        (1, 0): pytest.approx(0.004), (1, 1): pytest.approx(0.006), (1, 2): pytest.approx(0.008),
        (2, 0): pytest.approx(0.005), (2, 1): pytest.approx(0.0075), (2, 2): pytest.approx(0.010),
    }  # fmt: skip
    out = tmp_path / "record.json"
    chosen = ["--rows", "1", "2", "--tokens", "16", "--agreements", "0", "0.9", "--lengths", "2", "--seeds", "1"]
    monkeypatch.setattr(
        "sys.argv", ["", "--costs", str(tmp_path / "costs.json"), *chosen, "--apart", "--out", str(out)]
    )
    regret_simulation.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["simulated"] and len(found["cells"]) == 6
    assert all(set(one["rates"]) == {"auto", "off", "2"} and len(one["rates"]["auto"]) == 3 for one in found["cells"])
    never, always = (one for one in found["cells"] if one["rows"] == 1 and one["text"] != "mixed")
    assert never["best"] == "off" and always["best"] == "2"
    assert median(never["rates"]["off"]) == pytest.approx(16 / (16 * 0.004 + 0.0067), rel=0.2)  # rounds and a prompt
