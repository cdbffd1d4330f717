"""benchmarks/gpu_lossless.py without a card: a tiny run, and what counts as a defect (gaps: tests/proof)."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu_lossless
from outrider import LLM
from outrider.proof.texts import Parting

if TYPE_CHECKING:
    from pathlib import Path


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu_lossless.py", "--tiny", "--out", str(out), *more])
    with pytest.raises(SystemExit) as ended:
        gpu_lossless.main()
    return int(ended.value.code or 0), json.loads(out.read_text())


def test_a_tiny_run_finds_every_text_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, record = run(monkeypatch, tmp_path / "record.json", "--prompts", "2", "--tokens", "6")
    assert code == 0
    assert len(record["cells"]) == 12  # two modes, two drafters, three settings
    assert all(cell["drafted"] and cell["tokens"] and not cell["divergences"] for cell in record["cells"])


def test_a_token_that_speculation_changes_is_a_defect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = LLM.generate

    def spoilt(llm: LLM, prompts: Any, params: Any, **more: Any) -> Any:
        if params[0].speculation != "off":  # far from any tie
            params = [one.but(logit_bias={65: 100}) for one in params]
        return real(llm, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", spoilt)
    code, record = run(monkeypatch, tmp_path / "record.json", "--prompts", "2", "--tokens", "4")
    assert code == 1
    parted = [one for cell in record["cells"] for one in cell["divergences"]]
    assert parted
    assert {one["verdict"] for one in parted} == {"defect"}
    assert all(one["gap"] is None or one["gap"] > 0.1 for one in parted)  # None: outside the nucleus
    assert not any("prefix" in one for one in parted)


@pytest.mark.parametrize(("mode", "gap", "verdict"), [
    ("fast", 0.2, "near-tie"), ("fast", 0.25, "near-tie"), ("fast", 0.26, "defect"),
    ("fast", None, "defect"), ("exact", 0.0, "defect"),
])  # fmt: skip
def test_only_fast_mode_may_flip_near_ties(
    mode: str, gap: float | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lossless, "Referee", lambda *_: SimpleNamespace(gap=lambda *_: (gap, 0.1)))
    one = Parting(0, 1, 2, 3, ("length", "length"), (7, 1))
    cell: dict[str, Any] = {"mode": mode, "setting": "greedy", "divergences": [one]}
    gpu_lossless._judge(SimpleNamespace(model=None, dtype="bfloat16", device=None), [cell], 0.25)  # type: ignore[arg-type]
    assert (cell["divergences"][0]["verdict"], cell["defects"]) == (verdict, verdict == "defect")
    assert "prefix" not in cell["divergences"][0]


def test_prompts_differ_and_stay_the_same() -> None:
    llm: Any = SimpleNamespace(render=lambda messages: list(json.dumps(messages).encode()))
    prompts = gpu_lossless._prompts(llm, 200, room=4000)
    assert len({tuple(one) for one in prompts}) == 200
    assert prompts == gpu_lossless._prompts(llm, 200, room=4000)
