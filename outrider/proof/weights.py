"""Which files a model's weights come from, and their hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.config import Method
from outrider.errors import ModelLoadError
from outrider.model.checkpoint import default_model_source, locate, weight_files
from outrider.model.head_files import head_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.config import SpeculationConfig

    Advance = Callable[[int, int], None]

__all__ = ["Files", "hashed", "model_files"]

PIECE = 1 << 24  # bytes read at once
HEADS = (Method.MEDUSA, Method.EAGLE, Method.DFLASH)
Files = dict[str, dict[str, Path]]  # "target" or "draft" -> a file's name -> where it lies


def model_files(source: str | None, revision: str | None, speculation: SpeculationConfig) -> Files:
    """Find the files of target and draft: weights, and the config beside them.

    Raises:
        ModelLoadError: A model is missing or broken.
    """
    target = weight_files(locate(source or default_model_source(), revision))
    found = {"target": target}
    if speculation.model is not None:
        if any(method in HEADS for method in speculation.methods):
            folder = head_folder(speculation.model)
            found["draft"] = sorted(folder.glob("*.safetensors"))
        else:
            found["draft"] = weight_files(locate(speculation.model))
    return {role: _named(paths) for role, paths in found.items()}


def _named(paths: list[Path]) -> dict[str, Path]:
    config = paths[0].with_name("config.json") if paths else None
    beside = [config] if config is not None and paths[0].suffix == ".safetensors" and config.is_file() else []
    return {path.name: path for path in [*paths, *beside]}


def hashed(files: Files, advance: Advance | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Hash files: role -> name -> their bytes and SHA-256; `advance` is told bytes done and bytes in all.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    total = sum(path.stat().st_size for paths in files.values() for path in paths.values())
    done, found = 0, dict[str, dict[str, dict[str, Any]]]()
    for role, paths in files.items():
        found[role] = {}
        for name, path in paths.items():
            digest, size = hashlib.sha256(), 0
            try:
                with path.open("rb") as file:
                    while piece := file.read(PIECE):
                        digest.update(piece)
                        size += len(piece)
                        if advance is not None:
                            advance(done + size, total)
            except OSError as error:
                raise ModelLoadError(f"{path} cannot be read ({type(error).__name__}); check it") from None
            done += size
            found[role][name] = {"bytes": size, "sha256": digest.hexdigest()}
    return found
