"""benchmarks/gpu_lossless.py without a card: a tiny run, what counts as a defect, and the gap between two tokens."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import gpu_lossless
from benchmarks.lossless_referee import Referee, gap_of
from outrider import LLM, SamplingParams
from outrider.sampling.choose import choose
from outrider.sampling.rules import Prefix, RuleTable

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu_lossless.py", "--tiny", "--out", str(out), *more])
    with pytest.raises(SystemExit) as ended:
        gpu_lossless.main()
    return int(ended.value.code or 0), json.loads(out.read_text())


def test_a_tiny_run_finds_every_text_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, record = run(monkeypatch, tmp_path / "record.json")
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


def output(ids: tuple[int, ...], reason: str) -> Any:
    return SimpleNamespace(token_ids=ids, prompt_token_ids=(7,), outputs=[SimpleNamespace(finish_reason=reason)])


def test_two_texts_that_failed_alike_are_not_the_same_text() -> None:
    same = output((1, 2), "length")
    assert gpu_lossless._parting(0, same, same) is None
    assert gpu_lossless._parting(0, output((), "error"), output((), "error")) is not None
    assert gpu_lossless._parting(0, same, output((1,), "stop")) is not None
    found = gpu_lossless._parting(0, same, output((1, 3), "length"))
    assert found is not None
    assert found["prefix"] == [7, 1]


@pytest.mark.parametrize(("mode", "gap", "verdict"), [
    ("fast", 0.2, "near-tie"), ("fast", 0.25, "near-tie"), ("fast", 0.26, "defect"),
    ("fast", None, "defect"), ("exact", 0.0, "defect"),
])  # fmt: skip
def test_only_fast_mode_may_flip_near_ties(
    mode: str, gap: float | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lossless, "Referee", lambda *_: SimpleNamespace(gap=lambda *_: gap))
    one = {"prompt": 0, "position": 1, "plain": 2, "speculative": 3, "prefix": [7, 1]}
    cell = {"mode": mode, "setting": "greedy", "divergences": [one]}
    gpu_lossless._judge(SimpleNamespace(model=None, dtype="bfloat16", device=None), [cell], 0.25)  # type: ignore[arg-type]
    assert (one["verdict"], cell["defects"]) == (verdict, verdict == "defect")


def test_prompts_differ_and_stay_the_same() -> None:
    llm: Any = SimpleNamespace(render=lambda messages: list(json.dumps(messages).encode()))
    prompts = gpu_lossless._prompts(llm, 200, room=4000)
    assert len({tuple(one) for one in prompts}) == 200
    assert prompts == gpu_lossless._prompts(llm, 200, room=4000)


# --- gaps


def test_a_greedy_gap_is_to_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0])
    assert gap_of(logits, 5, (1, 2), GREEDY, 0.25) == pytest.approx(0.1)
    assert gap_of(logits, 5, (2, 0), GREEDY, 0.25) == pytest.approx(2.0)  # a third token was to be taken


def drawn(logits: torch.Tensor, end: int, params: SamplingParams) -> int:
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params)
    prefix = Prefix(torch.zeros(1, end, dtype=torch.long), torch.tensor([[end]]))
    return int(choose(logits[None, None], table.select([0]), prefix))


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.1])
def test_what_logits_that_differ_a_little_draw_is_a_near_tie(top_p: float) -> None:
    """Each logit moves by up to an eighth, so any two by up to a quarter."""
    noise, flips, clear = torch.Generator().manual_seed(1), 0, 0
    for seed in range(400):
        params = SamplingParams(temperature=0.8, top_p=top_p, seed=seed)
        logits = torch.randn(60, generator=noise) * 2
        one, other = (drawn(logits + torch.rand(60, generator=noise) / 4 - 0.125, 9, params) for _ in range(2))
        gap = gap_of(logits, 9, (one, other), params, 0.25)
        assert gap is not None
        assert gap < 0.25
        flips += one != other
        wrong = (one + 1 + seed % 59) % 60
        far = gap_of(logits, 9, (one, wrong), params, 0.25)
        clear += far is None or far >= 0.25
    assert flips > 5
    assert clear > 300


def test_a_token_far_outside_the_nucleus_has_no_gap() -> None:
    logits = torch.tensor([9.0, 0.0, -1.0])
    assert gap_of(logits, 5, (0, 2), SamplingParams(temperature=1, top_p=0.5, seed=1), 0.25) is None


def test_the_referee_scores_the_weights_that_the_engine_had(tmp_path: Path) -> None:
    folder, _ = gpu_lossless._tiny_pair(tmp_path)
    with LLM(folder, dtype="float32", device="cpu", max_num_seqs=1, max_model_len=64) as llm:
        best, second = (
            llm.generate([[65, 66]], SamplingParams(temperature=0, max_tokens=1, logprobs=2))[0].outputs[0].logprobs
            or ()
        )[0].top.items()
    gap = Referee(folder, "float32", "cpu").gap([65, 66], (best[0], second[0]), GREEDY, 1e-3)
    assert gap is not None
    assert math.isclose(gap, best[1] - second[1], abs_tol=1e-4)
