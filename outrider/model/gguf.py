"""Read GGUF files by turning them, once, into a cached safetensors folder.

transformers can load a GGUF but takes some 20 s for a small model and, from 5.24, may keep the weights packed. So the
first load unpacks to plain tensors under `${OUTRIDER_CACHE:-~/.cache/outrider}/gguf/`, keyed by the file's content and
the dtype; later loads are ordinary safetensors loads. A header reader of our own names what is wrong with a broken
file before the slow part, and supplies what transformers drops, such as rope scaling.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import shutil
import struct
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelLoadError
from outrider.model.checkpoint import first_line, locate
from outrider.model.gguf_header import read_header, write_outline
from outrider.model.gguf_tokenizer import repair_tokenizer
from outrider.model.quiet import quiet_transformers
from outrider.model.support import causal_text_class, check_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from outrider.model.gguf_header import GGUFHeader

__all__ = ["converted_folder", "gguf_config"]

logger = logging.getLogger(__name__)

_FORMAT = "1"  # raise it when a conversion comes out differently: older cached ones are then made again
_FORMAT_FILE = "outrider_conversion.txt"


def converted_folder(path: Path, dtype: torch.dtype, progress: Callable[[str], None] | None = None) -> Path:
    """The safetensors folder of a GGUF in `dtype`, made on first use and cached by content.

    `progress` is called with one line before the slow part; without it a status goes to stderr.
    Raises: ModelLoadError naming the file and the cause; UnsupportedModelError by architecture.
    """
    root = Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser() / "gguf"
    folder = root / f"{_content_key(path)}-{str(dtype).removeprefix('torch.')}"
    if _is_good(folder):
        return folder
    header = read_header(path)
    work, final = _work_folder(root, folder)
    try:
        with _status(f"Converting {path.name} to safetensors, once (about 20 s for a small model) ...", progress):
            _convert(path, header, dtype, work)
        return _publish(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _is_good(folder: Path) -> bool:
    """Whether a cached conversion is there and whole; one that is not is removed."""
    if not folder.is_dir():
        return False
    try:
        if (folder / _FORMAT_FILE).read_text() == _FORMAT and locate(folder).kind == "safetensors":
            return True
        logger.warning("the cached conversion %s was made by another version; converting again", folder)
    except (OSError, ModelLoadError) as error:
        logger.warning("the cached conversion %s is damaged (%s); converting again", folder, first_line(error))
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _content_key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ModelLoadError(
            f"{path} cannot be read ({first_line(error)}); check the path and its permissions"
        ) from error


def _work_folder(root: Path, folder: Path) -> tuple[Path, Path | None]:
    """A folder to write into, and where it goes when whole; None where the cache is not writable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root)), folder
    except OSError as error:
        logger.warning(
            "%s is not writable (%s): the converted GGUF is kept only while this process runs; "
            "set OUTRIDER_CACHE to a writable folder to keep it",
            root,
            first_line(error),
        )
        work = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
        atexit.register(shutil.rmtree, work, ignore_errors=True)
        return work, None


def _publish(work: Path, final: Path | None) -> Path:
    if final is None:
        return work
    work.chmod(0o755)  # mkdtemp's 0700 would lock other users out of a shared cache
    for file in work.iterdir():
        file.chmod(0o644)
    try:
        work.replace(final)
    except OSError:  # another process converted the same file meanwhile; its result is as good
        if not (final / "config.json").is_file():
            raise
        shutil.rmtree(work, ignore_errors=True)
    return final


def _status(text: str, progress: Callable[[str], None] | None) -> AbstractContextManager[Any]:
    if progress is not None:
        progress(text)
        return nullcontext()
    try:
        from rich.console import Console
        from rich.markup import escape
    except ImportError:
        logger.warning(text)
        return nullcontext()
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        return nullcontext()
    return console.status(escape(text))


def _convert(path: Path, header: GGUFHeader, dtype: torch.dtype, work: Path) -> None:
    try:
        with quiet_transformers():
            model, tokenizer = _load(path, header, dtype)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        (work / _FORMAT_FILE).write_text(_FORMAT)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            f"could not convert {path} ({first_line(error)}); is there room in {work.parent}? OUTRIDER_CACHE moves it"
        ) from error
    except Exception as error:  # whatever transformers raises for a family or quantisation it cannot read
        raise ModelLoadError(
            f"could not convert {path}, a GGUF of architecture {header.architecture!r} ({first_line(error)}); "
            f"use the model's safetensors instead"
        ) from error


def _load(path: Path, header: GGUFHeader, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer, GgufConfig

    place = _place(path)
    config = gguf_config(path, header)
    _, model_class = causal_text_class(config, path.name)
    loaded: Any = model_class.from_pretrained(
        **place,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),  # else 5.24 keeps weights packed where it has kernels
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"]:
        raise ModelLoadError(
            f"{path} lacks the weights {', '.join(sorted(info['missing_keys'])[:4])}; download it again"
        )
    # A model read from a GGUF is marked as quantised, and save_pretrained refuses it until the marks are gone.
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(**place)
    repair_tokenizer(header.metadata, tokenizer)
    return model, tokenizer


def gguf_config(path: Path, header: GGUFHeader) -> PreTrainedConfig:
    """The config of the model in a GGUF; no weight is read for it.

    Raises: UnsupportedModelError by architecture; whatever transformers raises for a family it cannot read.
    """
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as place, quiet_transformers():
        outline = Path(place) / path.name
        write_outline(path, header, outline)
        config, model_class = causal_text_class(AutoConfig.from_pretrained(**_place(outline)), path.name)
    config.name_or_path = str(path.parent)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if tokens and header.of_model("vocab_size") is None:  # then it is for the tokens to say
        config.vocab_size = len(tokens)
    check_config(config, model_class, path.name)
    _restore_rope(path, header, config)
    return config


def _place(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _restore_rope(path: Path, header: GGUFHeader, config: PreTrainedConfig) -> None:
    """Put back the rope scaling that transformers drops from a GGUF: without it long prompts turn to noise."""
    kind, factor = header.of_model("rope.scaling.type"), header.of_model("rope.scaling.factor")
    if "gpt-oss" not in header.architecture and kind in ("linear", "yarn") and factor and factor != 1.0:
        rope = {"rope_type": kind, "factor": float(factor)}
        original = header.of_model("rope.scaling.original_context_length")
        if kind == "yarn" and original:
            rope["original_max_position_embeddings"] = int(original)
        config.rope_parameters = {**(config.rope_parameters or {}), **rope}
    elif kind not in (None, "none", "linear", "yarn"):
        raise ModelLoadError(f"{path} scales its rope by {kind!r}, which is lost in conversion; use the safetensors")
    factors = next((tensor for tensor in header.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        return
    with path.open("rb") as file:
        file.seek(header.data_start + factors.offset)
        given = struct.unpack(f"<{factors.shape[0]}f", file.read(4 * factors.shape[0]))
    theta = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
    scale = max(given)
    if any(abs(a - b) > 1e-3 * b for a, b in zip(given, _llama3_factors(len(given), theta, scale), strict=True)):
        raise ModelLoadError(
            f"{path} carries rope frequencies of its own, which are lost in conversion; use the safetensors"
        )
    llama3 = {"rope_type": "llama3", "factor": scale, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters = {"rope_theta": theta, **llama3, "original_max_position_embeddings": 8192}


def _llama3_factors(num: int, theta: float, scale: float) -> list[float]:
    """Llama 3's divisor of each rope frequency, as llama.cpp stores it (low 1, high 4, original length 8192)."""
    factors = []
    for index in range(num):
        turns = 8192 / (2 * math.pi * theta ** (index / num))
        smooth = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / scale + smooth))
    return factors
