"""Heads as users name them: a folder is enough, the kind is told by its config; trees and mixtures go with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, ModelLoadError
from tests import test_dflash, test_medusa, test_mtp
from tests.heads import write_head
from tests.tiny import byte_tokenizer, save, tiny_target

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
SETTINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.3}]


def medusa_folder(root: Path) -> Path:
    config = {"medusa_num_heads": test_medusa.HEADS, "medusa_num_layers": test_medusa.LAYERS}
    return write_head(root / "medusa", config, test_medusa.authors_tensors(), test_medusa.FILE)


def checked(llm: LLM, name: str) -> None:
    """No token changes, and something was guessed by the drafter that was meant."""
    assert llm.engine.drafter is not None
    assert llm.engine.drafter.name == name
    for one in SETTINGS:
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=4, **one)
        wanted = [output.token_ids for output in llm.generate(PROMPTS, params.but(speculation="off"))]
        for length in (2, 9):
            outputs = llm.generate(PROMPTS, params.but(speculation=length))
            assert [output.token_ids for output in outputs] == wanted
    assert llm.engine.figures.drafted > 0
    assert llm.engine.speculator.num_failures == 0


@pytest.mark.parametrize("tree", [None, "auto", "3x2"])
def test_medusa_heads_are_known_by_their_config(tree: str | None, tmp_path: Path) -> None:
    target = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    folder = str(medusa_folder(tmp_path))
    with LLM(
        str(target), folder, tree=tree, num_speculative_tokens=9, dtype="float32", device="cpu", max_num_seqs=4
    ) as llm:
        checked(llm, "medusa")


def test_heads_mix_with_lookup(tmp_path: Path) -> None:
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    folder = str(medusa_folder(tmp_path))
    for tree in (None, "auto"):
        with LLM(tiny_target(), folder, 9, method="ngram+medusa", tree=tree, **common) as llm:
            checked(llm, "ngram+medusa")


@pytest.mark.parametrize("tree", [None, "auto", "2x2x1"])
def test_a_models_own_mtp_module_needs_no_name(tree: str | None, tmp_path: Path) -> None:
    model, names, weights = test_mtp.of_kind("mimo")
    folder = test_mtp.write(tmp_path / "target", model, names, weights)
    with LLM(
        str(folder), method="mtp", tree=tree, num_speculative_tokens=7, dtype="float32", device="cpu", max_num_seqs=4
    ) as llm:
        checked(llm, "mtp")


def test_a_model_without_an_mtp_module_is_refused_by_name(tmp_path: Path) -> None:
    target = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    with pytest.raises(ModelLoadError, match="MTP"):
        LLM(str(target), method="mtp", dtype="float32", device="cpu")


@pytest.mark.parametrize("tree", [None, "auto"])
def test_block_drafters_are_known_by_their_config(tree: str | None, tmp_path: Path) -> None:
    model = test_dflash.target_model()
    folder = write_head(tmp_path / "block", test_dflash.DFLASH, test_dflash.tensors(), "model.safetensors")
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    with LLM(model, str(folder), tree=tree, num_speculative_tokens=9, **common) as llm:
        checked(llm, "dflash")


def test_trees_and_exact_mode_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        LLM(tiny_target(), str(medusa_folder(tmp_path)), method="medusa", tree="auto", exact=True)
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    with LLM(tiny_target(), str(medusa_folder(tmp_path)), method="medusa", exact=True, **common) as llm:
        checked_chain = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        plain = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation="off"))
        assert [one.token_ids for one in checked_chain] == [one.token_ids for one in plain]


def test_a_head_for_another_target_can_be_done_without(tmp_path: Path) -> None:
    """M08: an error by default, a warning where that is allowed."""
    folder = str(medusa_folder(tmp_path))
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu"}
    other = tiny_target(hidden_size=32)
    with pytest.raises(ModelLoadError, match="64"):
        LLM(other, folder, method="medusa", **common)
    with pytest.warns(UserWarning, match="no speculation"):
        llm = LLM(other, folder, method="medusa", allow_failure=True, **common)
    assert llm.engine.drafter is None
    assert llm.generate([[65]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids
    llm.close()
