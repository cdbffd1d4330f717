"""Synthetic heads: published formats and sizes, read by the loaders that read trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from outrider import LLM, ConfigError, SamplingParams
from outrider.bench.heads import eagle3_tensors, medusa_tensors, write_eagle3, write_medusa
from outrider.bench.pair import write_pair
from outrider.bench.shapes import SHAPES, parse_shape
from outrider.bench.shards import num_bytes

SHAPE = parse_shape("hidden=64,layers=6,heads=4,kv_heads=2,intermediate=96,vocab=300")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder, target=SHAPE, draft="tiny", device="cpu", num_prompts=1, prompt_length=20).target


@pytest.mark.parametrize("tree", [None, "auto"])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_engine_drafts_with_a_written_head(kind: str, tree: str | None, target: Path, tmp_path: Path) -> None:
    if kind == "eagle":
        write_eagle3(tmp_path, SHAPE, draft_vocab=100)
    else:
        write_medusa(tmp_path, SHAPE, num_heads=3)
    prompt = json.loads((target / "prompt_ids.json").read_text())[0]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1}
    with LLM(str(target), str(tmp_path), 3, tree=tree, **settings) as llm:
        assert llm.engine.speculation.method == kind  # told by the config alone
        texts = [llm.generate(prompt, greedy.but(speculation=how), progress=False)[0] for how in ("off", 3)]
        assert llm.engine.speculator.num_failures == 0
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].stats.drafted >= 11  # in every round but the last, which has no room for a guess


def test_an_eagle_heads_ids_are_spread_over_the_targets(tmp_path: Path) -> None:
    write_eagle3(tmp_path, SHAPE, draft_vocab=100)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        distances, known = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert torch.equal(distances + torch.arange(100), known.nonzero()[:, 0])
    assert known.sum() == 100


def test_weights_follow_the_seed_and_replace_what_was_there(tmp_path: Path) -> None:
    kept = [
        (write_medusa(tmp_path, SHAPE, seed=seed) / "medusa_lm_head.safetensors").read_bytes() for seed in (1, 2, 1)
    ]
    assert kept[0] == kept[2] != kept[1]


def test_named_shapes_give_heads_of_the_published_sizes() -> None:
    target = SHAPES["llama-3.1-8b"]
    head, heads = eagle3_tensors(target), medusa_tensors(target)
    assert num_bytes(head, torch.bfloat16) / 2e6 == pytest.approx(425, abs=1)  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    assert heads["4.1.weight"] == (128256, 4096)
    assert len(heads) == 15


def test_heads_that_do_not_go_with_a_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab must be in \[1, 300\].*got 301"):
        write_eagle3(tmp_path / "a", SHAPE, draft_vocab=301)
    with pytest.raises(ConfigError, match="this one has 2"):
        write_eagle3(tmp_path / "a", SHAPES["tiny"], draft_vocab=100)
    assert not (tmp_path / "a").exists()
