"""Whole rounds on kernels, by Triton's interpreter: the path that a card takes, without one.

Slow per token, so models and texts are tiny; what it shows is that the pieces fit together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.engine import Engine
from outrider.model.device_decoder import DeviceDecoder
from tests.interpreter import rounds_on_kernels
from tests.tiny import byte_tokenizer, greedy, save, tiny_draft, tiny_family, tiny_target

pytest.importorskip("triton")

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with rounds_on_kernels(monkeypatch):
        yield


def texts(llm: LLM, prompts: list[list[int]], speculation: Any, num_tokens: int = 5, **settings: Any) -> list[Any]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, speculation=speculation, **settings)
    return [output.token_ids for output in llm.generate(prompts, params)]


RULES: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.02, "presence_penalty": 0.6,
    "repetition_penalty": 1.2, "logit_bias": {70: 2.0}, "min_tokens": 3, "logprobs": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 2}, RULES], ids=["greedy", "sampled", "rules"]
)
def test_rounds_on_kernels_give_the_same_text_as_torch(settings: dict[str, Any], monkeypatch: Any) -> None:
    target, prompts = tiny_target(**SIZES), [[65, 66, 67], [97, 98, 99] * 4]
    monkeypatch.delenv("OUTRIDER_KERNELS")
    with LLM(target, tokenizer=byte_tokenizer(), device="cpu") as llm:
        wanted = texts(llm, prompts, "off", **settings)
    monkeypatch.setenv("OUTRIDER_KERNELS", "1")
    with LLM(target, tiny_draft(target, "noisy"), tokenizer=byte_tokenizer(), device="cpu") as llm:
        assert texts(llm, prompts, 3, **settings) == wanted
        assert llm.engine.figures.drafted > 0


def test_the_host_may_lag_behind_kernels_too(monkeypatch: Any) -> None:
    """As a card runs: rounds on kernels, each started before the last one is read, rows of all kinds in one batch."""
    target, prompts = tiny_target(**SIZES), [[65, 66, 67], [97, 98, 99] * 4, [70]]
    params = [
        SamplingParams(max_tokens=4 + place, ignore_eos=True, speculation=3, **settings)
        for place, settings in enumerate([{"temperature": 0}, {"temperature": 1.1, "seed": 8}, RULES])
    ]
    monkeypatch.delenv("OUTRIDER_KERNELS")
    with LLM(target, tokenizer=byte_tokenizer(), device="cpu") as llm:
        plain = [one.but(speculation="off") for one in params]
        wanted = [output.token_ids for output in llm.generate(prompts, plain)]
    monkeypatch.setenv("OUTRIDER_KERNELS", "1")
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=1))
    with LLM(target, tiny_draft(target, "noisy"), tokenizer=byte_tokenizer(), device="cpu") as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == wanted
        assert llm.engine.figures.accepted > 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "qwen3"])
def test_families_on_kernels_give_the_text_that_transformers_gives(family: str) -> None:
    """Windows, soft caps and learned positions through transformers' own modules, which attend with the kernel."""
    model, prompt = tiny_family(family), [5, 9, 17, 9, 17, 33, 40, 41, 42]
    wanted = [tuple(greedy(model, prompt, 6))]
    with LLM(model, method="ngram", device="cpu") as llm:
        assert texts(llm, [prompt], 2, 6, temperature=0) == wanted


def test_a_model_that_is_loaded_runs_on_fused_kernels(tmp_path: Any, monkeypatch: Any) -> None:
    """In bf16. A CPU serves no float16, so what kernels make of that only a card can show."""
    target = tiny_target(**SIZES)
    folder = str(save(target.to(torch.bfloat16), byte_tokenizer(), tmp_path))
    seen: list[type] = []
    run = DeviceDecoder.hidden
    monkeypatch.setattr(DeviceDecoder, "hidden", lambda self, *args: seen.append(type(self)) or run(self, *args))
    with LLM(folder, device="cpu", method="ngram", dtype="bfloat16") as llm:  # not every CPU takes it by itself
        assert llm.engine.runner.dtype is torch.bfloat16
        assert llm.engine.runner.network.device_decoder is not None
        assert texts(llm, [[65, 66, 67, 65, 66, 67]], 2, temperature=0) == texts(
            llm, [[65, 66, 67, 65, 66, 67]], "off", temperature=0
        )
    assert seen


@pytest.mark.parametrize(("exit_layer", "num_layers"), [(1, 2), (2, 3)])
def test_trees_run_on_fused_kernels(tmp_path: Any, exit_layer: int, num_layers: int) -> None:
    """Own layers as the draft, a tree of their guesses, accepted paths moved: attention by ancestors in both passes."""
    folder = str(save(tiny_target(**{**SIZES, "num_hidden_layers": num_layers}), byte_tokenizer(), tmp_path))
    prompts = [[65, 66, 67], [97, 98, 99] * 2]
    how: dict[str, Any] = {"method": "early_exit", "exit_layer": exit_layer, "tree": "2x1", "dtype": "float32"}
    with LLM(folder, device="cpu", num_speculative_tokens=4, max_num_seqs=2, **how) as llm:
        assert llm.engine.runner.network.device_decoder is not None
        assert texts(llm, prompts, 4, 4, temperature=0) == texts(llm, prompts, "off", 4, temperature=0)
        assert llm.engine.figures.accepted > 0
        assert llm.engine.speculator.num_failures == 0
