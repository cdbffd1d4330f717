"""The files of a trained head (Medusa, a block drafter, MTP): its config, and tensors read by name and checked.

A head is no model by itself, so none of transformers' loaders knows it. Only safetensors are read; what is missing, of
another shape or in a pickle is an error that says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelLoadError
from outrider.model.checkpoint import download, first_line, hub_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["HeadFiles", "head_config", "head_folder"]

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt")
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "w = torch.load('{pickle}', map_location='cpu', weights_only=True); "
    "s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, '{target}')\""
)


def head_folder(source: str | Path, revision: str | None = None) -> Path:
    """Give the folder of a head: a local one, or the local snapshot of a Hub repository.

    Raises:
        ModelLoadError: There is neither, or the repository holds pickles alone.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or path.exists() or str(source).count("/") > 1 or str(source).startswith((".", "~")):
        raise ModelLoadError(f"no head at {source}: give the folder that holds its config.json, or a Hub id")
    folder = download(str(source), revision, ["*.json", "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        _refuse_pickles(str(source), [Path(name) for name in hub_files(str(source), revision, folder)])
    return folder


def head_config(source: object) -> dict[str, Any] | None:
    """What the config.json of a local folder says, or of a Hub repository; None for whatever else names a model."""
    if not isinstance(source, str | Path) or Path(source).is_file():
        return None
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if str(source).count("/") != 1 or str(source).startswith((".", "~", "/")):
            return None
        folder = download(str(source), None, ["config.json"])
    return _config(folder) if (folder / "config.json").is_file() else None


class HeadFiles:
    """A folder's config, and its tensors, each read when it is asked for.

    Args:
        folder: Where they lie.
        names: Files of weights, the first that exists is read; none named: `model.safetensors` or its shards.

    Attributes:
        config: What config.json says.
        shapes: Every stored tensor's shape, by its name.

    Raises:
        ModelLoadError: A file is missing, broken, or in a format that is not read.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        self.folder = folder
        self.config = _config(folder)
        self._owners: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self._weights((*names, "model.safetensors")):
            for name, shape in _header(path).items():
                self._owners[name], self.shapes[name] = path, shape

    def number(self, *keys: str, default: int | None = None) -> int:
        """Read a whole number from the config, under the first of the keys that is there.

        Raises:
            ModelLoadError: There is none, or it is not a whole number.
        """
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool):
            problem = "has no" if value is None else f"has {value!r} as"
            raise ModelLoadError(f"{self.folder}: config.json {problem} {' or '.join(keys)}; it must be a whole number")
        return value

    def tensor(self, name: str, shape: Sequence[int | None] = ()) -> Tensor:
        """Read a tensor, on the CPU, in the dtype that it is stored in.

        Args:
            name: Its stored name.
            shape: What it must have, None for any size; empty for any shape.

        Raises:
            ModelLoadError: It is not there, or of another shape.
        """
        from safetensors import safe_open

        found = self.shapes.get(name)
        if found is None:
            raise ModelLoadError(
                f"{self.folder} lacks the tensor {name}; the head is incomplete or of another format: download it again"
            )
        wanted = tuple(shape)
        fits = len(found) == len(wanted) and all(size in (None, is_) for size, is_ in zip(wanted, found, strict=True))
        if wanted and not fits:
            raise ModelLoadError(
                f"{self.folder}: {name} has the shape {list(found)}, but {_shown(wanted)} is needed; the head was made "
                "for another target, or its config.json is another head's"
            )
        with safe_open(str(self._owners[name]), framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def _weights(self, names: Sequence[str]) -> list[Path]:
        single = next((self.folder / name for name in names if (self.folder / name).is_file()), None)
        if single is not None:
            return [single]
        index = self.folder / _INDEX
        if index.is_file():
            return _shards(index)
        _refuse_pickles(str(self.folder), list(self.folder.iterdir()), names[0])
        raise ModelLoadError(f"{self.folder} holds no {' or '.join(names)}; check the path or download it again")


def _refuse_pickles(where: str, files: Sequence[Path], wanted: str | None = None) -> None:
    """Raise where there are weights in a format that is not read; `wanted` is the file to be made of them."""
    pickles = sorted(path for path in files if any(path.match(pattern) for pattern in _PICKLES))
    if pickles:
        target = pickles[0].with_name(wanted) if wanted else pickles[0].with_suffix(".safetensors")
        command = _CONVERT.format(pickle=pickles[0], target=target)
        raise ModelLoadError(
            f"{where} holds {pickles[0].name}, a pickle, which can run code and is not read; if you trust it, convert "
            f"it once, in a local folder: {command}"
        )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{folder} has no config.json; check the path or download it again") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a valid config ({first_line(error)}); download it again") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a valid config (no object at its top); download it again")
    return config


def _shards(index: Path) -> list[Path]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is not a valid index ({first_line(error)}); download it again") from error
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise ModelLoadError(f"{index} lists {absent[0]}, which is not there; download the missing files")
    return [index.parent / shard for shard in shards]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{path} is not a whole safetensors file ({first_line(error)}); truncated or corrupt: download it again"
        ) from error


def _shown(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
