"""Checkpoints that are quantised already: expanded where transformers can, else refused by name with the remedy."""

from __future__ import annotations

import importlib.util
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import UnsupportedModelError
from outrider.model import quantised
from outrider.model.fuse import describe, optimize
from outrider.model.load import load_model
from outrider.model.quantised import SCHEMES, plan_quantised
from tests.tiny import save, tiny_target

if TYPE_CHECKING:
    from pathlib import Path

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BLOCK = 32
STD = 0.1  # weights less wide than usual: rounding is not blown up on the way to the logits
PROMPT = torch.arange(40, 60)[None]


def plain_model(dtype: torch.dtype = torch.float32) -> Any:
    """What the quantised checkpoints here were made of."""
    return tiny_target(std=STD).to(dtype)  # type: ignore[arg-type]


def write_fp8(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """T, its linear layers but the head in fp8 with a scale for each block of 32 x 32, as DeepSeek ships it."""
    save(plain_model(dtype), None, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    state(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})
    return folder


def state(folder: Path, quantization: dict[str, Any] | None) -> None:
    """Set or remove what the config says of the quantisation."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": quantization}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refusal(method: str, device: torch.device = CUDA, **settings: Any) -> str:
    config = tiny_target().config
    config.quantization_config = {"quant_method": method, **settings}
    with pytest.raises(UnsupportedModelError) as caught:
        plan_quantised(config, ("BF16",), "some/model", device)
    return str(caught.value)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: importlib.util.find_spec("json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_load_expanded_on_a_cpu(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(write_fp8(tmp_path / "fp8", dtype), dtype=dtype, device="cpu")
    assert "quantised with 'fp8'" in caplog.text and "GiB" in caplog.text
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert {type(one) for name, one in loaded.model.named_modules() if name.endswith("_proj")} == {torch.nn.Linear}
    assert loaded.vocab_size == 320
    plain = plain_model(dtype)
    for name, weight in plain.named_parameters():
        error = (loaded.model.get_parameter(name) - weight).float().norm() / weight.float().norm()
        assert 0 < error < 0.04 if "_proj" in name else error == 0, name
    theirs, ours = plain(PROMPT).logits.float(), loaded.model(PROMPT).logits.float()
    assert (theirs - ours).norm() < 0.1 * theirs.norm()


def test_an_expanded_model_is_fused_like_any_other(tmp_path: Path) -> None:
    model: Any = load_model(write_fp8(tmp_path / "fp8"), device="cpu").model
    before = model(PROMPT).logits
    optimize(model)
    assert describe(model).counts["SharedProduct"] == 2
    torch.testing.assert_close(model(PROMPT).logits, before, rtol=1e-3, atol=1e-2)


def test_layers_left_out_of_the_quantisation_are_read_as_they_are(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    plain = plain_model()
    spared = "model.layers.0.self_attn.q_proj"
    del tensors[f"{spared}.weight_scale_inv"]
    tensors[f"{spared}.weight"] = plain.get_submodule(spared).weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    state(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": [spared]})
    loaded: Any = load_model(folder, device="cpu").model
    assert torch.equal(loaded.get_submodule(spared).weight, plain.get_submodule(spared).weight)


def test_fp8_weights_without_a_word_in_the_config_are_not_taken_for_numbers(tmp_path: Path) -> None:
    folder = write_fp8(tmp_path / "fp8")
    state(folder, None)
    with pytest.raises(UnsupportedModelError, match=r"F8_E4M3 weights.*quantization_config"):
        load_model(folder, device="cpu")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("method", [name for name, scheme in SCHEMES.items() if scheme.libraries])
def test_a_scheme_without_its_library_is_refused_with_what_to_install(method: str) -> None:
    message = refusal(method, load_in_8bit="8bit" in method, load_in_4bit="4bit" in method)
    assert f"some/model is quantised with {method!r}" in message and "plain checkpoint" in message
    assert all(f"{pip!r}" in message for pip in SCHEMES[method].libraries.values()) and "pip install" in message


@pytest.mark.parametrize("method", [name for name, scheme in SCHEMES.items() if scheme.dequantises == "never"])
def test_on_a_cpu_what_cannot_be_expanded_is_refused(method: str) -> None:
    message = refusal(method, CPU, load_in_8bit="8bit" in method, load_in_4bit="4bit" in method)
    assert f"quantised with {method!r}" in message and "plain checkpoint" in message


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("method", ["nvfp4", "metal", "gguf"])
def test_a_scheme_that_never_loads_says_why(method: str) -> None:
    message = refusal(method)
    assert f"quantised with {method!r}" in message and SCHEMES[method].refused in message


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_an_unknown_scheme_is_refused_by_name_with_those_that_load(device: torch.device) -> None:
    message = refusal("modelopt", device)
    assert "'modelopt'" in message and "fp8" in message and "nvfp4" not in message
    assert "'None'" in refusal(None, device)  # type: ignore[arg-type]


@pytest.mark.usefixtures("everything_installed")
def test_what_transformers_itself_cannot_load_here_is_refused_with_its_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("a card may satisfy it")
    message = refusal("vptq")
    assert "'vptq'" in message and "transformers cannot load here" in message and "Error" in message


def test_old_bitsandbytes_configs_name_no_method() -> None:
    message = refusal(None, load_in_8bit=True)  # type: ignore[arg-type]
    assert "'bitsandbytes_8bit'" in message


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("method", "settings"), [("fp8", {"weight_block_size": [128, 128]}), ("mxfp4", {})])
def test_without_kernels_a_card_gets_plain_weights(method: str, settings: dict[str, Any]) -> None:
    config = tiny_target().config
    config.quantization_config = {"quant_method": method, **settings}
    assert plan_quantised(config, ("F8_E4M3",), "some/model", CUDA) == method
    assert config.quantization_config["dequantize"] is True


def test_every_scheme_of_transformers_has_its_line() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    unknown = set(AUTO_QUANTIZER_MAPPING) - set(SCHEMES)
    if unknown:
        logging.getLogger(__name__).warning("schemes that Outrider refuses as unknown: %s", ", ".join(sorted(unknown)))
    assert set(SCHEMES) <= set(AUTO_QUANTIZER_MAPPING)


def test_a_refusal_comes_before_any_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fp8(tmp_path / "fp8")
    state(folder, {"quant_method": "from_the_future"})

    def read(*given: object, **named: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("outrider.model.load._read_weights", read)
    with pytest.raises(UnsupportedModelError, match="'from_the_future'"):
        load_model(folder, device="cpu")


# Modules that are quantised already stay as they are


def fp8_linear() -> torch.nn.Module:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    make: Any = FP8Linear  # untyped
    module: torch.nn.Module = make(64, 64, block_size=(BLOCK, BLOCK))
    return module


class Scaled(torch.Tensor):
    """Stands for the weights of torchao: a tensor of another class in an ordinary linear layer."""


def subclassed() -> torch.nn.Module:
    linear = torch.nn.Linear(64, 64, bias=False)
    linear.weight = torch.nn.Parameter(torch.zeros(64, 64).as_subclass(Scaled), requires_grad=False)
    return linear


def coded() -> torch.nn.Module:
    linear = torch.nn.Linear(64, 64, bias=False)
    linear.weight = torch.nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), requires_grad=False)
    return linear


def patched() -> torch.nn.Module:
    linear = torch.nn.Linear(64, 64, bias=False)
    linear.forward = lambda x: x  # type: ignore[method-assign, assignment]  # as compressed-tensors does it
    return linear


@pytest.mark.parametrize("make", [fp8_linear, subclassed, coded, patched])
def test_a_quantised_layer_is_neither_fused_nor_packed(make: Any) -> None:
    model: Any = tiny_target()
    attention = model.model.layers[0].self_attn
    attention.q_proj = quantised_layer = make()
    key = attention.k_proj.weight
    optimize(model)
    assert attention.q_proj is quantised_layer
    assert attention.k_proj(torch.eye(64)).shape == (64, 32)
    assert torch.allclose(attention.k_proj(torch.eye(64)).t(), key, atol=1e-5), "its sibling is packed alone"
    assert describe(model).counts["SharedProduct"] == 1
