"""EAGLE heads of every published kind: read unconverted, computed as the papers say, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelLoadError, UnsupportedModelError, VocabularyMismatchError
from outrider.model.eagle_files import load_eagle
from outrider.model.load import load_model
from tests.eagle_heads import CASES, FORMATS, target, tiny_head, written
from tests.eagle_paper import as_published, features, scores
from tests.tiny import byte_tokenizer


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_published_ones(case: str, tmp_path: Path) -> None:
    loaded = load_model(target(), tokenizer=byte_tokenizer())
    head = load_eagle(written(case, tmp_path), loaded)
    head.allocate(6)
    text = list(range(50, 90))
    tiny = CASES[case][1]
    given = features(target(), tiny, text)
    tables, begin, found = torch.tensor([[2, 5, 3, 4]]), 0, []
    with torch.no_grad():
        states = target()(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    kept = head.tap.project(torch.cat([states[tap] for tap in head.tap.layers], -1))
    assert kept.shape[-1] == head.tap.width
    for end in (20, 21, 39):  # in pieces, through pages
        places = torch.arange(begin, end)[None]
        fed = torch.tensor([text[begin + 1 : end + 1]])
        found.append(head.logits(head.forward(fed, kept[:, begin:end], places, tables, end)))
        begin = end
    wanted = scores(target(), tiny, as_published(target(), tiny, given[:-1], text[1:]))
    torch.testing.assert_close(torch.cat(found, 1)[0], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("says", "taps"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, (2, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 3, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 5]}}, (0, 3, 6)),
    ],
)
def test_each_format_counts_layers_in_its_own_way(says: dict[str, Any], taps: tuple[int, ...], tmp_path: Path) -> None:
    head = load_eagle(FORMATS["eagle3"](tmp_path, tiny_head(True, says=says)), load_model(target()))
    assert head.tap.layers == taps


def test_a_copy_of_the_targets_embedding_is_kept_once(tmp_path: Path) -> None:
    table = target().get_input_embeddings().weight
    loaded = load_model(target())
    for copy, kept in ((table.clone(), True), (table + 1e-3, False)):
        head = load_eagle(FORMATS["authors"](tmp_path, tiny_head(False).but({"embedding": copy})), loaded)
        cells = [cell.cell_contents for cell in head.embed.__closure__]  # type: ignore[attr-defined]
        assert any(one is table for one in cells) == kept


# --- what is not served


def _with(**tensors: Any) -> Any:
    named = {name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}
    return lambda folder: save_file(load_file(folder / "model.safetensors") | named, folder / "model.safetensors")


def _says(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("case", "damage", "error", "words"),
    [
        ("speculators EAGLE-3", _says(speculators_model_type="peagle"), UnsupportedModelError, ["'peagle'"]),
        ("EAGLE-1", _says(model={"hidden_size": 64}), UnsupportedModelError, ["vLLM's old conversion"]),
        ("EAGLE-3 as vLLM names it", _with(mask_hidden=(1, 192)), UnsupportedModelError, ["P-EAGLE", "mask_hidden"]),
        ("EAGLE-3 as vLLM names it", _with(model__fc__weight_scale=(1,)), UnsupportedModelError, ["quantised"]),
        ("EAGLE-1", _with(layers__1__mlp__up_proj__weight=(96, 64)), UnsupportedModelError, ["more than one layer"]),
        ("EAGLE-1", _with(layers__0__self_attn__kv_a_proj=(4, 4)), UnsupportedModelError, ["MLA"]),
        ("EAGLE-1", _says(partial_rotary_factor=0.5), UnsupportedModelError, ["partial_rotary_factor 0.5"]),
        ("EAGLE-1", _with(fc2__weight=(64, 64)), UnsupportedModelError, ["fc2.weight"]),
        ("EAGLE-1", _says(num_attention_heads=8), ModelLoadError, ["[64, 64]", "8 heads of 16"]),
        ("EAGLE-1", _says(hidden_act="sigh"), ModelLoadError, ["sigh"]),
        ("EAGLE-1", _says(rope_scaling={"rope_type": "odd", "factor": 2.0}), ModelLoadError, ["config.json", "odd"]),
        ("EAGLE-1", _with(fc__weight=(64, 160)), ModelLoadError, ["96 numbers", "has 64"]),
        ("EAGLE-3, short vocabulary", _with(fc__weight=(64, 288)), ModelLoadError, ["96 numbers (of 3", "has 64"]),
        ("EAGLE-3, layers by their output", _with(fc__weight=(64, 256)), ModelLoadError, ["of 3 layers", "has 64"]),
        ("EAGLE-3, short vocabulary", _with(t2d=(2000,)), VocabularyMismatchError, ["maps 2000 ids", "has 320"]),
        ("EAGLE-3, last hidden state", _with(lm_head__weight=(128, 64)), VocabularyMismatchError, ["guesses 128 ids"]),
        ("EAGLE-1", _with(embed_tokens__weight=(100, 64)), VocabularyMismatchError, ["embeds 100 ids", "has 320"]),
    ],
)  # fmt: skip
def test_other_heads_are_refused_by_name(
    case: str, damage: Any, error: type[Exception], words: list[str], tmp_path: Path
) -> None:
    damage(written(case, tmp_path))
    with pytest.raises(error) as refused:
        load_eagle(tmp_path, load_model(target(), tokenizer=byte_tokenizer()))
    for word in words:
        assert word in str(refused.value)


def test_vocabularies_may_differ_in_their_padding(tmp_path: Path) -> None:
    loaded = load_model(target(), tokenizer=byte_tokenizer())
    for size in (288, 512):
        head = tiny_head(True).but({"head": torch.randn(size, 64)})
        made = load_eagle(FORMATS["vllm"](tmp_path / str(size), head), loaded)
        logits = made.logits(torch.randn(1, 1, 64))
        assert logits.shape == (1, 1, 320)
        assert int(logits.isfinite().sum()) == min(size, 320)
