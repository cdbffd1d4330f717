"""Every family of tiny.FAMILIES: our plain and speculative text is transformers' own `generate`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams, UnsupportedModelError
from tests.tiny import FAMILIES, hybrid_config, tiny_family

torch.set_num_threads(1)  # these models are too small to share work

NUM_TOKENS = 40
PROMPTS = {"shorter than the window": [5, 17, 40, 8], "longer than the window": [9, 33, 7, 21] * 4 + [50, 60]}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_and_speculative_text_is_transformers_own(family: str) -> None:
    """Greedy, fp32, prompts on both sides of the window, text across it: plain, lookup and a same-weights draft."""
    model = tiny_family(family)
    wanted = []
    for prompt in PROMPTS.values():
        inputs = torch.tensor([prompt])
        made = model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        wanted.append(tuple(made[0, len(prompt) :].tolist()))
    assert len(set(wanted[0])) > 5, "a text that repeats one token proves nothing"

    sizes = {"max_model_len": 96, "max_num_seqs": 2}
    prompts = list(PROMPTS.values())
    with LLM(model=model, method="ngram", prompt_lookup_min=1, prompt_lookup_max=2, **sizes) as lookup:
        plain = lookup.generate(prompts, GREEDY.but(speculation="off"))
        copied = lookup.generate(prompts, GREEDY.but(speculation=4))
        alone = [lookup.generate([prompt], GREEDY.but(speculation=4))[0] for prompt in prompts]
    with LLM(model=model, speculative_model=tiny_family(family), **sizes) as drafted:
        guessed = drafted.generate(prompts, GREEDY.but(speculation=4))
    for way, done in {"plain": plain, "lookup": copied, "lookup, alone": alone, "draft": guessed}.items():
        assert [one.token_ids for one in done] == wanted, way
    assert all(one.stats.drafted == one.stats.accepted > 0 for one in guessed)


def test_a_hybrid_is_refused_by_layer_type_before_its_weights(tmp_path: Path) -> None:
    """Linear-attention layers cannot be rolled back: the message names them, and no weight was needed to say so."""
    hybrid_config().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"qwen3_next.*'linear_attention'.*rolled back.*use a decoder-only"):
        LLM(model=str(tmp_path))


def test_exact_mode_is_refused_where_experts_make_rows_depend_on_each_other() -> None:
    with pytest.raises(UnsupportedModelError, match=r"exact=True cannot be kept for qwen3_moe"):
        LLM(tiny_family("qwen3_moe"), exact=True)
