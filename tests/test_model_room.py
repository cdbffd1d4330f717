"""Weights that do not fit on the device are refused before they are read, with the numbers and what would fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from outrider.errors import CapacityError, ModelLoadError
from outrider.model import load, room
from outrider.model.checkpoint import StoredTensor, stored_tensors
from outrider.model.load import load_model
from outrider.model.room import capacity_errors, dense_bytes, stored_bytes
from tests.tiny import save, tiny_family, tiny_target

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_target(), None, tmp_path_factory.mktemp("models") / "tiny-llama")


def size(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_headers_tell_what_the_weights_will_take(folder: Path, dtype: torch.dtype) -> None:
    assert stored_bytes(stored_tensors(folder), dtype) == size(tiny_target(), dtype)


def test_codes_keep_their_size_whatever_the_dtype() -> None:
    codes, norm = StoredTensor("q.weight", "F8_E4M3", 64, 64), StoredTensor("norm.weight", "BF16", 8, 16)
    assert stored_bytes([codes, norm], torch.float32) == 64 + 32


def test_only_the_half_that_is_loaded_counts() -> None:
    text, vision = (StoredTensor(name, "BF16", 8, 16) for name in ("language_model.model.x", "vision_tower.x"))
    assert stored_bytes([text, vision], torch.bfloat16, {r"^language_model\.model\.": "model."}) == 16


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_memory_is_counted(tied: bool) -> None:
    model = tiny_target(tie_word_embeddings=tied)
    assert dense_bytes(type(model), model.config, torch.bfloat16) == size(model, torch.bfloat16)
    gemma = tiny_family("gemma3_text", tie_word_embeddings=tied)
    assert dense_bytes(type(gemma), gemma.config, torch.float32) == size(gemma)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*given: object, **named: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(load, "_read_weights", read)
    monkeypatch.setattr(room, "free_bytes", lambda device: size(tiny_target()) - 1)
    with pytest.raises(CapacityError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "tiny-llama take" in message and "GiB in float32" in message and "GiB free" in message
    assert "dtype='bfloat16'" in message and "smaller model" in message and "quantised" in message


def test_half_precision_is_offered_only_where_it_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 1000)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(CapacityError) as caught:
            load_model(folder, dtype=dtype)
        assert "half precision" not in str(caught.value)


def test_weights_that_just_fit_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: size(tiny_target()))
    assert load_model(folder).vocab_size == 320


def test_a_cpu_is_not_asked() -> None:
    assert room.free_bytes(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_a_card_tells_what_is_free() -> None:
    free = room.free_bytes(torch.device("cuda"))
    assert free is not None and 0 < free <= torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_running_out_on_the_way_is_a_capacity_error(
    wrapped: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*given: object, **named: object) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nA long story")
        except torch.OutOfMemoryError as error:
            if wrapped:
                raise RuntimeError("some conversion failed") from error
            raise

    monkeypatch.setattr(type(tiny_target()), "from_pretrained", run_out)
    with pytest.raises(CapacityError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "Tried to allocate 2.00 GiB" in message and "tiny-llama" in message and "smaller model" in message
    assert "long story" not in message


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ModelLoadError), capacity_errors("m", torch.float32, CPU):
        raise ModelLoadError("a missing file")
