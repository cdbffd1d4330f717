"""The short way through models of the usual structure: taken only where it gives the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.model.attention import borrow, give_back
from outrider.model.decoder import decoder_for
from outrider.model.fuse import RMSNorm, optimize
from outrider.model.runner import TorchRunner
from tests.tiny import FAMILIES, byte_tokenizer, greedy, save, tiny_family

USUAL = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
OTHERS = ("gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox", "gpt2", "opt")
PROMPTS = ([7], [5, 9, 5, 9, 5], list(range(3, 33)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_says_the_same_whichever_way_it_goes(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    wanted = [tuple(greedy(model, list(prompt), 40)) for prompt in PROMPTS]
    folder = save(model, byte_tokenizer(), tmp_path / family)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), method="ngram", dtype="float32") as llm:
        assert isinstance(llm.engine.runner, TorchRunner)
        assert llm.engine.runner.network.decoder is not None or family not in USUAL
        for speculation in ("off", 5):
            outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params.but(speculation=speculation))
            assert [output.token_ids for output in outputs] == wanted


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_go_through_transformers(family: str) -> None:
    model = tiny_family(family)
    optimize(model)
    borrow(model)
    try:
        assert decoder_for(model) is None
    finally:
        give_back(model)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_that_does_more_than_it_shows_is_found_out(family: str) -> None:
    """The same modules, but the embeddings are scaled on their way: structure alone would not tell."""
    model = tiny_family(family)
    optimize(model)
    base = model.base_model
    right = base.forward
    base.forward = lambda *given, **named: _scaled(right(*given, **named))
    borrow(model)
    try:
        assert decoder_for(model) is None
    finally:
        give_back(model)


def _scaled(output: object) -> object:
    output.last_hidden_state = 3 * output.last_hidden_state  # type: ignore[attr-defined]
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_small_norm_is_the_large_norm(dtype: torch.dtype) -> None:
    """Few rows go through LayerNorm of (x, -x), many through rms_norm: the same to rounding, row by row."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2000, 96, generator=generator) * 5).to(dtype)
    norm = RMSNorm(torch.rand(96, generator=generator).to(dtype), 1e-5)
    many = norm(x)
    for rows in (1, 2, 6):
        few = norm(x[:rows])
        assert torch.equal(few[0], norm(x[:1])[0])
        torch.testing.assert_close(few, many[:rows], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
