"""What a user names, read as far as configs and headers go: no weight is loaded, and none is fetched from the Hub."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.advice.words import Words, words_of_gguf, words_of_tokenizer
from outrider.errors import ModelLoadError
from outrider.model.blueprint import read_config
from outrider.model.checkpoint import (
    StoredTensor,
    check_source,
    default_model_source,
    download,
    first_line,
    headers_of,
    locate,
    names_repository,
    stored_tensors,
)
from outrider.model.gguf import gguf_config
from outrider.model.gguf_header import read_header
from outrider.model.head_files import head_config, head_folder
from outrider.model.load import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from outrider.bench.shapes import Shape

__all__ = ["HeadSource", "ModelSource", "head_source", "hub_tensors", "model_source", "shape_source"]

_WORDS_AND_CONFIGS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_NO_GGUF_HEADER = "the plan reads a GGUF's header from disk: download the file and give its path"
_SHAPE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelSource:
    """A model, as its config and its headers describe it.

    Attributes:
        name: The checkpoint's.
        config: As transformers understands it.
        tensors: What the headers of the weights say; empty where they are not at hand (a GGUF, a lone config).
        words: Its vocabulary; None where it has none.
        notes: What was taken for granted.
        file_bytes: Of a GGUF's weights, which have no headers of that kind.
    """

    name: str
    config: PreTrainedConfig
    tensors: tuple[StoredTensor, ...] = ()
    words: Words | None = None
    notes: tuple[str, ...] = ()
    file_bytes: int = 0

    @property
    def stored_dtype(self) -> str | None:
        """What the weights are stored in, where that is not for config and headers to say."""
        return "gguf" if self.file_bytes else None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights as they are stored; 0 where that is not known."""
        return self.file_bytes or sum(one.num_bytes for one in self.tensors)


@dataclass(frozen=True)
class HeadSource:
    """A trained head: its name, its config and the shapes of its tensors."""

    name: str
    config: dict[str, Any]
    tensors: tuple[StoredTensor, ...]


def model_source(source: str | Path | None, revision: str | None = None) -> ModelSource:
    """Describe a folder, a GGUF file or a Hub id, by the loader's own rules.

    Raises:
        ModelLoadError: It is missing, broken, or what is needed is not at hand.
        UnsupportedModelError: transformers does not know its kind.
    """
    text = default_model_source() if source is None or source == "default" else str(source)
    check_source(text if source is None else source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _of_folder(path, path.resolve().name)
    repo, _, file = text.partition(":")
    if path.exists() or isinstance(source, Path) or not names_repository(repo):
        return _of_gguf(locate(source if isinstance(source, Path) else text).path)
    if file:
        return _of_gguf(_cached(repo, file, revision))
    return _on_hub(repo, revision)


def shape_source(shape: Shape, name: str, dtype: str = "bfloat16") -> ModelSource:
    """Describe a model of a published shape, of which nothing is on disk."""
    import transformers

    settings = shape.config(dtype)
    config = transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    size = {"float32": 4}.get(dtype, 2)
    tensors = tuple(
        StoredTensor(tensor, _SHAPE_DTYPES[dtype], math.prod(one), math.prod(one) * size, one)
        for tensor, one in shape.tensors().items()
    )
    return ModelSource(name, config, tensors)


def head_source(source: str | Path, revision: str | None = None) -> HeadSource:
    """Describe a head in a folder or on the Hub.

    Raises:
        ModelLoadError: There is none, or its files are broken.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() or isinstance(source, Path):
        folder = head_folder(source)
        tensors = _headers(folder)
    else:
        tensors = hub_tensors(str(source), revision)
    config = head_config(source)
    if config is None:
        raise ModelLoadError(f"{source} has no config.json, so what kind of head it is is not known; check the path")
    if not tensors:
        raise ModelLoadError(f"the headers of {source} cannot be read; give a local folder with .safetensors files")
    return HeadSource(str(source), config, tensors)


def hub_tensors(repo: str, revision: str | None) -> tuple[StoredTensor, ...]:
    """What the headers of a Hub repository's safetensors say: a few kilobytes are fetched of each file.

    Nothing where they cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().get_safetensors_metadata(repo, revision=revision)
    except Exception:  # noqa: BLE001 - offline, gated, no such files: the config has to do
        return ()
    return tuple(
        StoredTensor(
            name, str(one.dtype), math.prod(one.shape), one.data_offsets[1] - one.data_offsets[0], tuple(one.shape)
        )
        for file in found.files_metadata.values()
        for name, one in file.tensors.items()
    )


def _of_folder(folder: Path, name: str) -> ModelSource:
    alone = (folder / "config.json").is_file() and not any(folder.glob("*.safetensors*"))
    if alone and not any(folder.glob("*.gguf")):
        note = f"{name}: no weights in the folder; sizes are counted from the config"
        return ModelSource(name, read_config(folder, name), (), _words(folder, name), (note,))
    checkpoint = locate(folder)
    if checkpoint.kind == "gguf":
        return _of_gguf(checkpoint.path)
    return ModelSource(name, read_config(folder, name), tuple(stored_tensors(folder)), _words(folder, name))


def _of_gguf(path: Path) -> ModelSource:
    header = read_header(path)
    try:
        config = gguf_config(path, header)
    except ModelLoadError:
        raise
    except (ValueError, KeyError, NotImplementedError) as error:  # what transformers raises for a family it lacks
        raise ModelLoadError(
            f"{path} is a GGUF of architecture {header.architecture!r}, which cannot be read ({first_line(error)}); "
            "use the model's safetensors instead"
        ) from error
    size = path.stat().st_size - header.data_start
    return ModelSource(path.stem, config, (), words_of_gguf(header.metadata), file_bytes=size)


def _on_hub(repo: str, revision: str | None) -> ModelSource:
    folder = download(repo, revision, _WORDS_AND_CONFIGS)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{repo} has no config.json on the Hub; if it holds a GGUF, {_NO_GGUF_HEADER}")
    tensors = hub_tensors(repo, revision)
    notes: tuple[str, ...] = ()
    if not tensors:
        notes = (f"{repo}: the headers of its weights could not be read; sizes are counted from the config",)
    return ModelSource(repo, read_config(folder, repo), tensors, _words(folder, repo), notes)


def _cached(repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision)
    if not isinstance(found, str):
        raise ModelLoadError(f"{repo}:{file} is not in the local Hub cache; {_NO_GGUF_HEADER}")
    return Path(found)


def _words(folder: Path, name: str) -> Words | None:
    tokenizer = read_tokenizer(folder, name)
    return None if tokenizer is None else words_of_tokenizer(tokenizer)


def _headers(folder: Path) -> tuple[StoredTensor, ...]:
    return tuple(headers_of(sorted(folder.glob("*.safetensors"))))
