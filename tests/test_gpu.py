"""What only a card can show. Run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import copy

import pytest
import torch

from outrider import LLM, SamplingParams
from tests.tiny import byte_tokenizer, greedy, tiny_draft, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 4, "presence_penalty": 0.5, "logprobs": 2},
]


def texts(llm: LLM, speculation: object, settings: dict) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=60, ignore_eos=True, speculation=speculation, **settings)
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled", "rules"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_on_a_card_changes_no_token(settings: dict, exact: bool, method: str) -> None:
    target = tiny_target().cuda()
    draft = tiny_draft(tiny_target(), "noisy").cuda() if method == "draft_model" else None
    with LLM(target, draft, tokenizer=byte_tokenizer(), method=method, exact=exact, max_num_seqs=4) as llm:
        assert texts(llm, 5, settings) == texts(llm, "off", settings)
        assert llm.engine.figures.drafted > 0


def test_a_card_generates_what_transformers_would() -> None:
    target = tiny_target()
    wanted = [tuple(greedy(target, prompt, 60)) for prompt in PROMPTS]
    with LLM(copy.deepcopy(target).cuda(), tokenizer=byte_tokenizer(), method="ngram") as llm:
        assert texts(llm, 5, {"temperature": 0}) == wanted


@pytest.mark.parametrize(("target_device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_N01_target_and_draft_on_different_devices_work_together(target_device: str, draft_device: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, "same").to(draft_device)
    with LLM(target.to(target_device), draft, tokenizer=byte_tokenizer()) as llm:
        for settings in SETTINGS:
            assert texts(llm, 4, settings) == texts(llm, "off", settings)
        assert llm.engine.figures.accepted > 0.8 * llm.engine.figures.drafted > 0


def test_bf16_on_a_card_is_exact_in_exact_mode() -> None:
    target = tiny_target().to(device="cuda", dtype=torch.bfloat16)
    draft = tiny_draft(tiny_target(), "noisy").to(device="cuda", dtype=torch.bfloat16)
    with LLM(target, draft, tokenizer=byte_tokenizer(), exact=True, max_num_seqs=4) as llm:
        for settings in SETTINGS:
            assert texts(llm, 5, settings) == texts(llm, "off", settings)


def test_the_cache_takes_its_share_of_the_card() -> None:
    with LLM(tiny_target().cuda(), tokenizer=byte_tokenizer(), gpu_memory_utilization=0.5) as llm:
        assert llm.max_model_len == 512
