"""Group N: pairs of different devices, dtypes and configs work, or are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from tests.cases_support import GREEDY, PROMPTS, base, guessed, ids, opened, target, truth, words
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("target_device", "draft_device"),
    [("cpu", "cpu"), pytest.param("cuda:0", "cpu", marks=CUDA), pytest.param("cpu", "cuda:0", marks=CUDA)],
)
def test_N01_target_and_draft_on_different_devices(target_device: str, draft_device: str, tmp_path: Path) -> None:
    """EQ with EOS and min_tokens at work, wherever the two stand."""
    one = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    other = save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), tmp_path / "draft")
    llm = LLM(
        model=str(one),
        speculative_model=str(other),
        device=target_device,
        draft_device=draft_device,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=2,
    )
    params = GREEDY.but(ignore_eos=False, min_tokens=6, stop_token_ids=truth(PROMPTS[0], 12)[3:4])
    plain = llm.generate(PROMPTS[:2], params.but(speculation="off"))
    done = llm.generate(PROMPTS[:2], params.but(speculation=4))
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert done[0].stats.drafted > 0


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_N03_target_and_draft_in_different_dtypes(target_dtype: str, draft_dtype: str, tmp_path: Path) -> None:
    """fp32 target with bf16 draft: EQ, greedy and sampled; bf16 with fp32: EQ in exact mode."""
    one = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    other = save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), tmp_path / "draft")
    llm = LLM(
        model=str(one),
        speculative_model=str(other),
        dtype=target_dtype,
        draft_dtype=draft_dtype,
        device="cpu",
        exact=target_dtype == "bfloat16",
        num_speculative_tokens=3,
        max_model_len=96,
        max_num_seqs=2,
    )
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)):
        plain = llm.generate(PROMPTS[:2], params.but(speculation="off"))
        done = llm.generate(PROMPTS[:2], params.but(speculation=3))
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
        assert done[0].stats.accepted > 0


def test_N03_a_loaded_draft_of_another_dtype_is_taken_as_it_is() -> None:
    """A bf16 transformers model drafts for an fp32 one without being cast: EQ."""
    drafting = tiny_draft(target(), "noisy").to(torch.bfloat16)
    llm = LLM(model=target(), tokenizer=words(), speculative_model=drafting, max_model_len=96, max_num_seqs=2)
    done = llm.generate(PROMPTS[:2], GREEDY.but(speculation=4))
    assert [list(one.token_ids) for one in done] == [truth(prompt, 40) for prompt in PROMPTS[:2]]
    assert drafting.dtype == torch.bfloat16 and done[0].stats.accepted > 0


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_N05_use_cache_false_in_a_config_does_not_matter(whose: str) -> None:
    """The engine keeps its own cache whatever the training run left in the config: EQ."""
    one, other = tiny_target(), tiny_draft(tiny_target(), "noisy")
    (one if whose == "target" else other).config.use_cache = False
    llm = opened(one, max_model_len=96, max_num_seqs=2)
    done = guessed(PROMPTS[:2], LLM(model=other, tokenizer=words(), max_num_seqs=1), 4, llm)
    assert ids(done) == ids(base(PROMPTS[:2], llm)) == [truth(prompt, 40) for prompt in PROMPTS[:2]]
    assert done[0].stats.drafted > 0
