"""Group M: what target and draft may differ in, and what they may not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, ModelLoadError, SamplingParams, VocabularyMismatchError
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    base,
    chi_square_p,
    guessed,
    ids,
    model_drafter,
    opened,
    sampled,
    shaped_distribution,
    tables,
    target,
    truth,
    words,
)
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

SAMPLED = SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T and D~ as checkpoint folders."""
    root = tmp_path_factory.mktemp("pairs")
    save(tiny_target(), byte_tokenizer(), root / "target")
    save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), root / "draft")
    return root


@pytest.mark.parametrize(("target_size", "draft_size"), [(320, 288), (288, 320)])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_M01_padding_may_differ_either_way(target_size: int, draft_size: int, verification: str) -> None:
    """A target that speaks its padding beside a smaller or larger draft: accepted, no foreign id proposed, EQ."""
    model = tiny_draft(tiny_target(speaks_padding=True), "same", vocab_size=target_size)
    other = LLM(model=tiny_draft(model, "noisy", vocab_size=draft_size), tokenizer=words(), max_num_seqs=1)
    llm = opened(model, verification=verification, max_model_len=128, max_num_seqs=8)
    proposed: list[int] = []
    drafter = llm._drafter_for(other)
    propose = drafter.propose
    drafter.propose = lambda rows, k: noted(propose(rows, k), proposed)  # type: ignore[method-assign]
    plain, done = base(PROMPTS, llm), guessed(PROMPTS, other, 4, llm)
    assert ids(done) == ids(plain) and max(proposed) < 288
    if target_size == 320:
        assert any(token >= 288 for one in ids(plain) for token in one), "the target must speak its padding here"
    assert sum(one.stats.accepted for one in done) > 0
    if verification == "coupled":
        params = [SAMPLED] * 2
        assert ids(guessed(PROMPTS[:2], other, 4, llm, params=params)) == ids(base(PROMPTS[:2], llm, params=params))


def noted(proposal: Any, tokens: list[int]) -> Any:
    tokens += proposal.tokens.flatten().tolist()
    return proposal


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize(("size", "draft_size"), [(6, 4), (4, 6)])
def test_M01_the_distribution_holds_with_different_vocabularies(size: int, draft_size: int, verification: str) -> None:
    """CHI with a draft that knows fewer or more ids than the target."""
    table, _ = tables(8, size)
    _, other = tables(8, max(size, draft_size))
    other = other[:, :draft_size]
    tokens, _ = sampled(table, model_drafter(other, size), verification, SamplingParams())
    assert chi_square_p(tokens, shaped_distribution(table)) > 1e-3


def swapped(tokenizer: Any, one: str, other: str, folder: Path) -> Any:
    """The tokenizer with two ids exchanged."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def test_M02_different_vocabularies_are_refused_at_load(tmp_path: Path) -> None:
    """A draft with two strings exchanged, same size: refused naming the first differing id, both ways of giving it."""
    strange = swapped(byte_tokenizer(), "A", "Z", tmp_path)
    other = LLM(model=tiny_draft(target(), "noisy"), tokenizer=strange, max_num_seqs=1)
    with pytest.raises(VocabularyMismatchError, match=r"token id 65 is 'A' to the target and 'Z' to the draft"):
        LLM(model=target(), tokenizer=words(), speculative_model=other)
    with pytest.raises(VocabularyMismatchError, match="token id 65"):
        guessed(PROMPTS[:1], other, 4, opened(target(), max_num_seqs=1))


@pytest.mark.parametrize("trouble", ["missing", "corrupt", "incompatible"])
def test_M08_a_draft_that_does_not_load_is_an_error_at_start(trouble: str, folders: Path, tmp_path: Path) -> None:
    """An error by default; with allow_failure a warning, and plain decoding that says so in its figures."""
    path = tmp_path / "draft"
    if trouble != "missing":
        shutil.copytree(folders / "draft", path)
    if trouble == "corrupt":
        (path / "model.safetensors").write_bytes(b"\0" * 100)
    if trouble == "incompatible":
        swapped(byte_tokenizer(), "A", "Z", path)
    setting: dict[str, Any] = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    common: dict[str, Any] = {"model": target(), "tokenizer": words(), "max_num_seqs": 1, "max_model_len": 128}
    with pytest.raises(ModelLoadError):
        LLM(**common, speculative_config=setting)
    with pytest.warns(UserWarning, match="no speculation: the draft could not be used"):
        llm = LLM(**common, speculative_config=setting | {"allow_failure": True})
    done = llm.generate([PROMPTS[0]], GREEDY)[0]
    assert list(done.token_ids) == truth(PROMPTS[0], 40) and done.stats.drafted == 0


def test_M10_nothing_in_the_draft_s_folder_reaches_the_text(folders: Path, tmp_path: Path) -> None:
    """Draft folder with another chat template, BOS habits and generation settings: prompt ids, text, end as without."""
    path = Path(shutil.copytree(folders / "draft", tmp_path / "draft"))
    settings = {
        "temperature": 0.1,
        "repetition_penalty": 5.0,
        "max_length": 20,
        "eos_token_id": list(range(256)),
        "do_sample": True,
        "top_k": 1,
        "suppress_tokens": list(range(100, 200)),
        "forced_bos_token_id": 65,
    }
    (path / "generation_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(
        "{{ 'DRAFT ' }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    config = json.loads((path / "config.json").read_text()) | {"eos_token_id": 65, "bos_token_id": 66}
    (path / "config.json").write_text(json.dumps(config))
    common: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 200}
    alone = LLM(model=str(folders / "target"), **common)
    pair = LLM(model=str(folders / "target"), speculative_model=str(path), num_speculative_tokens=4, **common)
    messages = [{"role": "user", "content": "Hello there"}]
    for params in (GREEDY.but(ignore_eos=False), SAMPLED.but(ignore_eos=False, max_tokens=40)):
        plain, done = alone.chat(messages, params)[0], pair.chat(messages, params.but(speculation=4))[0]
        assert done.prompt_token_ids == plain.prompt_token_ids
        assert (done.token_ids, done.outputs[0].finish_reason) == (plain.token_ids, plain.outputs[0].finish_reason)
        assert done.stats.drafted > 0
    assert pair.generate("Hi", GREEDY)[0].prompt_token_ids == (72, 105)


def test_M10_torch_s_global_generator_is_left_alone() -> None:
    """Sampling neither reads nor moves torch's own random state."""
    base(PROMPTS[:1], max_tokens=1)  # making the models does draw
    state = torch.get_rng_state()
    base(PROMPTS[:1], params=[SAMPLED.but(max_tokens=3)])
    assert torch.get_rng_state().equal(state)
