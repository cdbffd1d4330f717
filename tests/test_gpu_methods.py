"""benchmarks/gpu_methods.py without a card: bytes of a round, what a cell says, a tiny run with a way that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_methods, method_runs
from benchmarks.method_figures import WAYS, Way, cell_of, round_bytes
from outrider.bench.shapes import SHAPES

TARGET, DRAFT = SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]
BY_NAME = {way.name: way for way in WAYS}
HIDDEN, VOCAB = 4096, 128256


def read(name: str) -> dict[str, int]:
    return round_bytes(BY_NAME[name], TARGET, DRAFT)


# --- figures


def test_every_round_reads_the_target_once() -> None:
    assert {read(name)["target"] for name in BY_NAME} == {15_009_849_344}
    assert read("plain")["all"] == 15_009_849_344


def test_a_chain_reads_its_draft_once_a_guess_and_a_tree_once_a_level() -> None:
    assert (read("draft_model")["passes"], read("draft_model tree")["passes"]) == (5, 6)
    assert (read("eagle3")["passes"], read("eagle3 tree")["passes"]) == (5, 6)
    assert read("draft_model")["all"] == 15_009_849_344 + 5 * 2_471_628_800
    assert read("ngram+draft_model") == read("draft_model")


def test_heads_read_what_their_round_needs() -> None:
    eagle = read("eagle3")
    assert eagle["once"] == 2 * 3 * HIDDEN * HIDDEN  # joins the three hidden states
    assert eagle["a_pass"] > 2 * 32000 * HIDDEN
    assert eagle["all"] == eagle["target"] + eagle["once"] + 5 * eagle["a_pass"]
    medusa = read("medusa tree")
    assert medusa["a_pass"] == 2 * 4 * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN)  # its tree is four deep
    quarter = read("early_exit")["a_pass"] - 2 * (VOCAB * HIDDEN + HIDDEN)
    assert quarter == pytest.approx((15_009_849_344 - 2 * (VOCAB * HIDDEN + HIDDEN)) / 4)


def stretch(seconds: float, **more: Any) -> dict[str, Any]:
    counts = {"rounds": 10, "tokens": 40, "drafted": 100, "accepted": 20, "replays": 10, "host_seconds": 0.0}
    return counts | {"seconds": seconds} | more


def cell(way: Way, *stretches: dict[str, Any]) -> dict[str, Any]:
    return cell_of(way, {"rows": 2, "stretches": [stretch(99.0), *stretches]}, 3_000_000_000, 3e12)


def test_the_median_stretch_counts_and_the_first_does_not() -> None:
    found = cell(BY_NAME["draft_model"], stretch(0.02), stretch(0.05), stretch(0.03))
    assert found["ms_a_round"] == pytest.approx(3)
    assert found["rounds_per_second"] == pytest.approx(1000 / 3)
    assert found["floor_ms"] == pytest.approx(1)
    assert found["share_of_floor"] == pytest.approx(1 / 3)
    assert found["tokens_per_second"] == pytest.approx(1200)
    assert (found["tokens_a_round"], found["guesses_a_round"], found["accepted"]) == (2, 5, 0.2)


def test_random_heads_have_no_tokens_a_second() -> None:
    assert cell(BY_NAME["eagle3"], stretch(0.02))["tokens_per_second"] is None
    assert cell(BY_NAME["early_exit"], stretch(0.02))["tokens_per_second"] is not None


@pytest.mark.parametrize(
    ("more", "runs"),
    [
        ({}, "one graph"),
        ({"host_seconds": 0.1}, "guesses eager, then one graph"),
        ({"replays": 4}, "partly eager"),
        ({"replays": 0, "host_seconds": 0.1}, "eager"),
    ],
)
def test_how_rounds_were_started_is_said(more: dict[str, Any], runs: str) -> None:
    assert cell(BY_NAME["draft_model"], stretch(0.02, **more))["runs"] == runs


# --- a tiny run


def test_a_tiny_run_measures_every_way_but_the_one_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stages run in this process, all but the one that fails."""
    out = tmp_path / "record.json"
    arguments = ["--tiny", "--work", str(tmp_path), "--out", str(out), "--limit-seconds", "300", "--repeats", "1"]
    arguments += ["--ways", *BY_NAME]
    monkeypatch.setattr(sys, "argv", ["gpu_methods.py", *arguments])
    real = gpu_methods.Run._process

    def process(run: Any, stage: str, label: str, command: list[str], out: Path, *more: Any) -> list[dict[str, Any]]:
        if label == "medusa tree":
            script = "print('no such head'); import sys; sys.exit(3)"
            return real(run, stage, label, [sys.executable, "-c", script], out, *more)
        out.write_text("")
        {"setup": method_runs.setup, "way": method_runs.way}[stage](json.loads(Path(command[-1]).read_text()))
        return [json.loads(line) for line in out.read_text().splitlines()]

    monkeypatch.setattr(gpu_methods.Run, "_process", process)
    gpu_methods.main()
    record = json.loads(out.read_text())
    assert [(one["stage"], one["exit"]) for one in record["failures"]] == [("medusa tree", 3)]
    assert "no such head" in record["failures"][0]["log"]
    assert record["skipped"] == []
    ways = {way["way"]: way for way in record["ways"]}
    assert set(ways) == set(BY_NAME) - {"medusa tree"}
    for way in ways.values():
        assert (way["mismatches"], way["drafter_failures"], way["warnings"]) == (0, 0, [])
        assert way["parts_at"] == [None, None]
        assert way["start_up"]["load"] > 0
    assert [(one["way"], one["rows"]) for one in record["cells"]] == [(name, rows) for name in ways for rows in (1, 2)]
    for one in record["cells"]:
        assert all(part["rounds"] == 3 for part in one["stretches"])
        assert one["guesses_a_round"] > 0 or one["way"] == "plain"
    full = [one for one in record["cells"] if one["way"] == "early_exit"]  # which agrees with its target here
    assert all((one["guesses_a_round"], one["tokens_a_round"]) == (5, 6) for one in full)


def test_what_no_longer_fits_is_left_out_and_on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    arguments = ["--tiny", "--work", str(tmp_path), "--out", str(out), "--limit-seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu_methods.py", *arguments])
    with pytest.raises(SystemExit, match="pair could not be written"):
        gpu_methods.main()
    assert "out of time" in json.loads(out.read_text())["skipped"][0]["reason"]


def test_a_way_that_is_cut_tells_why(tmp_path: Path) -> None:
    """The limit passes after the start: its texts are kept, its cells are left out."""
    job: dict[str, Any] = {"work": str(tmp_path), "out": str(tmp_path / "out"), "tiny": True, "seed": 0}
    job |= {"target": gpu_methods.TINY["target"], "draft": "tiny", "agreements": [0.8], "contexts": [20]}
    job |= {"num_prompts": 1, "heads": [], "draft_vocab": 1}
    method_runs.setup(job)
    job |= {"began": 0.0, "deadline": 0.0, "context": 20, "rows": [1], "tokens": 4, "rounds": 2, "repeats": 1}
    job |= {"guesses": 0, "deepest": 0, "model": None, "options": {"method": "none"}}
    method_runs.way(job)
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["reason"] for line in lines if "skipped" in line] == ["TimeoutError: out of time"]
    assert [len(line["texts"][0]) for line in lines if "texts" in line] == [4]
