"""Checkpoints that are quantised already: which load here, which are turned into plain weights, which are refused.

Decided by name before any weight is read. transformers reads the schemes, most of them through a library of the
scheme's authors. What it does not know it would load as if it were plain, codes without their scales; so everything
unknown is an error here. Where transformers can dequantise while it loads, that is done on a CPU, which has no kernels
for codes, and on a card where the stored form brings nothing: the model is then an ordinary one, with fused layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import UnsupportedModelError
from outrider.model.checkpoint import first_line

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from transformers import PreTrainedConfig

__all__ = ["SCHEMES", "Scheme", "plan_quantised"]

_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # as safetensors spells them; weights only, never buffers
_PLAIN = "use the plain checkpoint"


@dataclass(frozen=True)
class Scheme:
    """What a quantisation scheme needs.

    Args:
        libraries: What to import -> what pip calls it.
        dequantises: Whether transformers can make plain weights of it at load: "never"; "without kernels" (where its
            kernels cannot run, else it stays as stored); "always" (Outrider does not run it as stored).
        refused: Why it never loads; empty where it does.
    """

    libraries: dict[str, str]
    dequantises: Literal["never", "without kernels", "always"] = "never"
    refused: str = ""


_GPTQ = {"gptqmodel": "gptqmodel", "optimum": "optimum"}
SCHEMES = {
    "fp8": Scheme({}, "without kernels"),
    "mxfp8": Scheme({}, "without kernels"),
    "mxfp4": Scheme({}, "always"),
    # As stored, it would be decompressed in the first step, after the cache has been sized: no smaller, only later.
    "compressed-tensors": Scheme({"compressed_tensors": "compressed-tensors"}, "always"),
    "fbgemm_fp8": Scheme({"fbgemm_gpu": "fbgemm-gpu-genai"}),
    "bitsandbytes_4bit": Scheme({"bitsandbytes": "bitsandbytes"}),
    "bitsandbytes_8bit": Scheme({"bitsandbytes": "bitsandbytes"}),
    "gptq": Scheme(_GPTQ),
    "awq": Scheme({"gptqmodel": "gptqmodel"}),
    "auto-round": Scheme({"auto_round": "auto-round"}),
    "torchao": Scheme({"torchao": "torchao"}),
    "hqq": Scheme({"hqq": "hqq"}),
    "quanto": Scheme({"optimum.quanto": "optimum-quanto"}),
    "quark": Scheme({"quark": "amd-quark"}),
    "eetq": Scheme({"kernels": "kernels"}),
    "higgs": Scheme({"flute": "flute-kernel", "fast_hadamard_transform": "fast_hadamard_transform"}),
    "aqlm": Scheme({"aqlm": "aqlm[gpu]"}),
    "vptq": Scheme({"vptq": "vptq"}),
    "spqr": Scheme({"spqr_quant": "spqr_quant[gpu]"}),
    "bitnet": Scheme({}),
    "fp_quant": Scheme({"fp_quant": "fp_quant"}),
    "fouroversix": Scheme({"fouroversix": "fouroversix"}),
    "sinq": Scheme({"sinq": "sinq"}),
    "gemma": Scheme({}),
    "nvfp4": Scheme({}, refused="transformers quantises to it at load, but does not read checkpoints of it"),
    "metal": Scheme({}, refused="it is made for Apple's GPUs"),
    "gguf": Scheme({}, refused="it belongs to .gguf files; name the file itself"),
}


def plan_quantised(config: PreTrainedConfig, stored: Collection[str], name: str, device: torch.device) -> str | None:
    """Decide how a checkpoint's quantisation is handled, and put that into `config`.

    Args:
        config: The config to load with. Where weights are to be dequantised, its `quantization_config` is told so.
        stored: Every dtype that occurs in the checkpoint, as safetensors spells them.
        name: What to call the checkpoint in messages.
        device: Where it will run.

    Returns:
        The scheme's name where the weights will be dequantised at load; None where they load as stored.

    Raises:
        UnsupportedModelError: The scheme cannot be loaded here; the message says why, and what to do.
    """
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        hidden = sorted(set(_CODES) & set(stored))
        if hidden:  # transformers would take the codes for numbers, and drop their scales
            raise UnsupportedModelError(
                f"{name} holds {hidden[0]} weights, but its config.json has no quantization_config that says how to "
                f"read them; {_PLAIN} or one saved by transformers"
            )
        return None
    settings: dict[str, Any] = dict(given if isinstance(given, dict) else given.to_dict())
    method = _method(settings)
    scheme = _scheme(method, name)
    missing = [pip for module, pip in scheme.libraries.items() if not _installed(module)]
    if device.type == "cpu" and scheme.dequantises == "never":
        raise UnsupportedModelError(
            f"{name} is quantised with {method!r}, whose kernels need a GPU; here {_PLAIN} or a GGUF"
        )
    if missing:
        raise UnsupportedModelError(
            f"{name} is quantised with {method!r}, which needs {' and '.join(missing)}: "
            f"pip install {' '.join(map(repr, missing))}, or {_PLAIN}"
        )
    if scheme.dequantises != "never":
        settings["dequantize"] = scheme.dequantises == "always" or device.type == "cpu" or not _has_fp8_kernels()
    dequantises = _ask_transformers(settings, method, name, device)
    settings |= {"dequantize": True} if dequantises else {}
    config.quantization_config = settings
    return method if dequantises else None


def _method(settings: dict[str, Any]) -> str:
    """The scheme's name; bitsandbytes has two, and old checkpoints of it do not name it."""
    method = settings.get("quant_method")
    if method == "bitsandbytes" or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes_4bit" if settings.get("load_in_4bit") else "bitsandbytes_8bit"
    return str(getattr(method, "value", method))


def _scheme(method: str, name: str) -> Scheme:
    import transformers
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    scheme = SCHEMES.get(method)
    if scheme is None or method not in AUTO_QUANTIZER_MAPPING:
        raise UnsupportedModelError(
            f"{name} is quantised with {method!r}, which transformers {transformers.__version__} or Outrider does not "
            f"know; {_PLAIN}, or one quantised with {', '.join(one for one in SCHEMES if not SCHEMES[one].refused)}"
        )
    if scheme.refused:
        raise UnsupportedModelError(f"{name} is quantised with {method!r}: {scheme.refused}; {_PLAIN}")
    return scheme


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a submodule's parent
        return False


def _has_fp8_kernels() -> bool:
    """Whether transformers can fetch the kernels that its fp8 layers call: a library, and then a download."""
    if not _installed("kernels"):
        return False
    from transformers.integrations import finegrained_fp8

    try:
        finegrained_fp8.load_finegrained_fp8_kernel()
    except Exception:  # noqa: BLE001 - wrong version, offline, no build for this torch: any reason will do
        return False
    return True


def _ask_transformers(settings: dict[str, Any], method: str, name: str, device: torch.device) -> bool:
    """Let transformers check versions and the card as it will when it loads; gives whether it will dequantise.

    Raises: UnsupportedModelError with its reason.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    from outrider.model.quiet import quiet_transformers

    ask: Any = AutoHfQuantizer  # untyped
    try:
        with quiet_transformers():
            quantizer = ask.from_config(dict(settings), pre_quantized=True)
            quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} is quantised with {method!r}, which transformers cannot load here ({first_line(error)}); {_PLAIN}"
        ) from error
    return bool(getattr(quantizer.quantization_config, "dequantize", False))
