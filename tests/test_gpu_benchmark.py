"""The GPU benchmarks without a GPU: floors and goals on made-up figures, traces added up, and a tiny run of each."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_profile, gpu_prompts, gpu_rounds, round_runs
from benchmarks.gpu_figures import (
    OURS,
    PEER,
    STOCK,
    best,
    cell_of,
    find,
    floor_rate,
    goals,
    rounds_table,
    tokens_a_round,
)
from benchmarks.gpu_profile import short, summary
from benchmarks.terminal import Console, PlainConsole, PlainTable

WEIGHTS = {"target": {"read": 15_000_000_000, "token": 131072}, "draft": {"read": 2_470_000_000, "token": 32768}}
FAKE_VLLM = """
__version__ = "0.0-fake"

class SamplingParams:
    def __init__(self, **settings):
        self.max_tokens = settings["max_tokens"]

class LLM:
    def __init__(self, model, **settings):
        assert "outrider" not in __import__("sys").modules
        self.shift = "speculative_config" in settings

    def generate(self, batch, params, use_tqdm):
        from types import SimpleNamespace as N
        ids = tuple(range(params.max_tokens))
        return [N(outputs=[N(token_ids=ids)]) for _ in batch]
"""


def cell(engine: str, rate: float, rows: int = 1, lookahead: int = 0, agreement: float = 0.8, **more: Any) -> Any:
    """A cell of 256 tokens a row at `rate` tokens a second in all."""
    raw = {"rows": rows, "lookahead": lookahead, "agreement": agreement, "context": 200, "draft": "bf16"}
    raw |= {"seconds": [9.0, *[256 * rows / rate] * 3], "token_ids": [[0] * 256] * rows}
    raw |= {"rounds": [{"ms": 1.0, "tokens": 2.0}] * 4}
    return cell_of(engine, raw | more, 0)


# --- figures


def test_a_chain_is_expected_to_give_a_geometric_sum() -> None:
    assert tokens_a_round(0.8, 5) == pytest.approx(3.689, abs=1e-3)
    assert tokens_a_round(0.8, 0) == 1
    assert tokens_a_round(1.0, 5) == 6


def test_the_floor_reads_the_target_once_and_the_draft_once_a_guess() -> None:
    assert floor_rate(cell(OURS, 1), WEIGHTS, 3e12) == pytest.approx(200)
    assert floor_rate(cell(OURS, 1, rows=4), WEIGHTS, 3e12) == pytest.approx(800)
    speculative = floor_rate(cell(OURS, 1, lookahead=5), WEIGHTS, 3e12)
    assert speculative == pytest.approx(3.68928 * 3e12 / (15e9 + 5 * 2.47e9))
    deep = cell(OURS, 1, context=8000)
    assert floor_rate(deep, WEIGHTS, 3e12, with_cache=True) == pytest.approx(3e12 / (15e9 + 8000 * 131072))


def test_the_first_run_warms_up_and_does_not_count() -> None:
    one = cell_of(OURS, {"seconds": [50.0, 2.0, 1.0, 4.0], "token_ids": [[1, 2], [3, 4]]}, 3)
    assert one["rates"] == [2.0, 4.0, 1.0]
    assert one["rate"] == 2.0
    assert one["mismatches"] == 3
    assert one["seconds"][0] == 50.0
    assert "token_ids" not in one


def test_plain_cells_are_found_whatever_the_agreement() -> None:
    cells = [cell(OURS, 170), cell(OURS, 300, lookahead=5), cell(OURS, 200, lookahead=5, agreement=0.6)]
    assert find(cells, OURS, rows=1, lookahead=0, agreement=0.6) is cells[0]
    assert find(cells, OURS, rows=1, lookahead=5, agreement=0.6) is cells[2]
    assert find(cells, PEER, rows=1) is None
    assert best(cells, OURS, rows=1) is cells[1]


def test_goals_can_be_missed_and_may_not_have_been_measured() -> None:
    cells = [cell(OURS, 180), cell(OURS, 330, lookahead=5), cell(PEER, 200, lookahead=5), cell(PEER, 230, lookahead=3)]
    cells.append({**cell(OURS, 350, lookahead=5), "draft": "int4"})
    start = [{"engine": OURS, "cold": True, "all": 45.0}, {"engine": OURS, "cold": False, "all": 12.0}]
    found = {one["goal"]: one["reached"] for one in goals(cells, start)}
    assert found["1 row, plain, tok/s"] is True
    assert found["1 row, K=5, bf16 draft, tok/s"] is False
    assert found["1 row, K=5, int4 draft, tok/s"] is True
    assert found["1 row, K=5, bf16 draft, by vLLM's best speculative"] is False  # 330 by 230, not by 200
    assert found["16 rows, best, tok/s"] is None
    assert found["start to first token, cold, s"] is False
    assert found["start to first token, warm cache, s"] is True


def test_the_table_keeps_the_cells_that_lose() -> None:
    cells = [cell(OURS, 100), cell(PEER, 150), cell(STOCK, 30)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rounds_table(cells, WEIGHTS, 3e12))
    text = console.export_text()
    assert "150.0" in text
    assert "0.67" in text
    assert "50%" in text


def test_without_rich_tables_are_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = PlainTable(title="Speeds", title_justify="left")
    table.add_column("engine")
    table.add_column("tok/s", justify="right")
    table.add_row("[bold]ours[/bold]", "[red]9[/red]")
    PlainConsole(width=20).print(table, style="dim")
    assert capsys.readouterr().out == "Speeds\nengine  tok/s\nours        9\n"


# --- traces


def kernel(name: str, begin: float, us: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": us, "tid": 1}


def test_a_trace_is_added_up_with_overlap_and_gaps() -> None:
    events = [
        kernel("void foo<int, 3>(float*)", 0, 10),
        kernel("bar", 8, 4),  # starts before foo ends
        kernel("bar", 20, 10),
        kernel("cudaGraphLaunch", 0, 3, "cuda_runtime"),
        kernel("cudaStreamSynchronize", 5, 3, "cuda_runtime"),
        kernel("aten::add", 0, 99, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = summary(events, 2)
    assert found["us_a_round"] == 15
    assert found["busy_us_a_round"] == 11
    assert found["idle_us_a_round"] == 4
    assert found["kernels_a_round"] == 1.5
    assert [(row["name"], row["us_a_round"]) for row in found["kernels"]] == [("bar", 7), ("foo", 5)]
    assert [(row["name"], row["mean_us"]) for row in found["gaps"]] == [("bar -> bar", 8)]
    assert found["launches_a_round"] == {"cudaGraphLaunch": 0.5}
    assert found["waits_a_round"] == {"cudaStreamSynchronize": 0.5}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::(anonymous namespace)::norm<float, 4>(int, X<3>)", "norm"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, A<1> >(int)",
            "vectorized_elementwise_kernel (FillFunctor)",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("_paged_attention_kernel", "_paged_attention_kernel"),
    ],
)
def test_kernels_are_named_for_reading(name: str, expected: str) -> None:
    assert short(name) == expected


# --- tiny runs


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def test_a_tiny_run_measures_every_engine(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stages run in this process, all but vLLM's (a stand-in, whose text is wrong)."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "vllm.py").write_text(FAKE_VLLM)
    out = tmp_path / "record.json"
    arguments = f"--tiny --work {work} --out {out} --peer-site {site} --rows 1 2 --lookahead 0 3 --contexts 20 40"
    monkeypatch.setattr(sys, "argv", ["gpu_rounds.py", *arguments.split(), "--tokens", "8", "--budget", "300"])
    real = gpu_rounds.Run._process

    def process(run: Any, stage: str, label: str, command: list[str], out: Path, *more: Any) -> list[dict[str, Any]]:
        if stage == PEER:
            return real(run, stage, label, command, out, *more)
        out.write_text("")
        stages = {"setup": round_runs.setup, "ours": round_runs.ours, "transformers": round_runs.stock}
        stages[stage](json.loads(Path(command[-1]).read_text()))
        return [json.loads(line) for line in out.read_text().splitlines()]

    monkeypatch.setattr(gpu_rounds.Run, "_process", process)
    gpu_rounds.main()
    record = json.loads(out.read_text())
    assert record["failures"] == []
    cells = record["cells"]
    ours = [(one["rows"], one["lookahead"], one["context"], one["agreement"]) for one in cells if one["engine"] == OURS]
    plain = [(rows, 0, context, 0.8) for context in (20, 40) for rows in (1, 2)]
    guessing = [(rows, 3, *rest) for rest in ((20, 0.8), (40, 0.8), (20, 0.5)) for rows in (1, 2)]
    assert sorted(ours) == sorted(plain + guessing)
    assert all(one["mismatches"] == 0 for one in cells if one["engine"] != PEER)
    assert all(one["mismatches"] > 6 * one["rows"] for one in cells if one["engine"] == PEER)
    assert {one["lookahead"] for one in cells if one["engine"] == PEER} == {0, 3}
    assert [one["lookahead"] for one in cells if one["engine"] == STOCK] == [0, 3]
    assert record["versions"]["vllm"] == "0.0-fake"
    assert all({"floor", "share_of_floor", "rates", "seconds"} <= set(one) for one in cells)
    assert {one["engine"] for one in record["start_up"]} == {OURS, PEER, STOCK}


def test_a_stage_that_fails_or_does_not_fit_is_on_record(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_rounds.py", "--tiny", "--work", str(work)])
    run = gpu_rounds.Run(gpu_rounds._options(), Console(quiet=True))
    script = "print('broken'); import sys; sys.exit(3)"
    lines = run._process("bad", "bad", [sys.executable, "-c", script], work / "bad.jsonl", {}, 0)
    assert lines == []
    assert (run.record["failures"][0]["exit"], run.record["failures"][0]["log"].strip()) == (3, "broken")
    assert run._process("late", "late", [], work / "late.jsonl", {}, 10_000) == []
    assert "out of time" in run.record["skipped"][0]["reason"]


def test_a_tiny_profile_adds_up_rounds(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    arguments = f"--tiny --work {work} --out {out} --lookahead 2 --rounds 3 --context 20"
    monkeypatch.setattr(sys, "argv", ["gpu_profile.py", *arguments.split()])
    gpu_profile.main()
    record = json.loads(out.read_text())
    assert record["rounds"] == 3
    assert record["us_a_round"] > record["busy_us_a_round"] > 0
    assert record["kernels"][0]["share"] > 0


def test_first_tokens_are_timed_at_lengths_that_are_new_and_met_again(
    work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "prompts.json"
    monkeypatch.setattr(sys, "argv", ["gpu_prompts.py", "--quick", "--work", str(work), "--out", str(out)])
    gpu_prompts.main()
    cells = json.loads(out.read_text())["cells"]
    told = [(one["engine"], one["length"], one["seen"]) for one in cells]
    lengths = {length for _, length, _ in told}
    assert sorted(told) == sorted(itertools.product((OURS, STOCK), lengths, (False, True))) and len(lengths) == 2
    assert all(one["seconds"] > 0 for one in cells)
