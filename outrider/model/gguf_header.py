"""Read a GGUF's metadata and tensor table, and say what is wrong with a broken file before anything slow starts."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelLoadError
from outrider.model.checkpoint import first_line

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GGUFHeader", "GGUFTensor", "read_header", "write_outline"]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONG = 1024  # values: settings that differ by layer have fewer


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's entry: `shape` innermost first, `offset` from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    quant_type: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """A GGUF file's metadata and tensor table; no weights."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_start: int

    @property
    def architecture(self) -> str:
        """The model family, in llama.cpp's spelling."""
        return str(self.metadata.get("general.architecture", "unknown"))

    def of_model(self, key: str) -> Any:
        """The metadata value `<architecture>.<key>`, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


class _Cursor:
    """Reads little-endian values out of a mapped file; running past the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if self.at + size > len(self.data):
            raise struct.error("a string runs past the end of the file")
        text = self.data[self.at : self.at + size].decode("utf-8", errors="replace")
        self.at += size
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise struct.error(f"unknown metadata type {kind}")
            return self.scalar(_SCALARS[kind])
        item, size = self.scalar("I"), self.scalar("Q")
        if size > len(self.data):
            raise struct.error(f"an array of {size} items runs past the end of the file")
        if item in _SCALARS:
            values = struct.unpack_from(f"<{size}{_SCALARS[item]}", self.data, self.at)
            self.at += struct.calcsize(f"<{size}{_SCALARS[item]}")
            return list(values)
        return [self.value(item) for _ in range(size)]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a GGUF's header against the file's length.

    Raises: ModelLoadError naming the file and the cause (wrong magic, truncated, unknown quantisation, one of several
    parts).
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelLoadError(
                    f"{path} is not a GGUF file (it does not start with 'GGUF'); check or download it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parse(data)
                size = len(data)
    except (struct.error, ValueError, MemoryError) as error:
        raise ModelLoadError(
            f"{path} has a broken GGUF header ({first_line(error)}); it is truncated or corrupt: download it again"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({first_line(error)}); check its permissions") from error
    parts = header.metadata.get("split.count", 0)
    if parts > 1:
        raise ModelLoadError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` and give the result"
        )
    _check_tensors(path, header, size)
    return header


def write_outline(path: Path, header: GGUFHeader, outline: Path) -> None:
    """Write a GGUF of the same settings and tensor table, without long lists (tokens, merges) and without weights.

    Whoever asks only for the model's config reads it in no time, where 150 thousand tokens take ten seconds. In place
    of the weights is a hole of their size.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        cursor.at = len(_MAGIC)
        version, num_tensors, num_values = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
        kept = []
        for _ in range(num_values):
            begin = cursor.at
            cursor.string()
            value = cursor.value(cursor.scalar("I"))
            if not isinstance(value, list) or len(value) <= _LONG:
                kept.append(data[begin : cursor.at])
        begin = cursor.at
        for _ in range(num_tensors):
            cursor.string()
            rank = cursor.scalar("I")
            cursor.at += 8 * rank + 12  # sizes, kind and offset
        table, weights = data[begin : cursor.at], len(data) - header.data_start
    start = b"".join([_MAGIC, struct.pack("<IQQ", version, num_tensors, len(kept)), *kept, table])
    alignment = int(header.metadata.get("general.alignment", 32))
    with outline.open("wb") as made:
        made.write(start)
        made.truncate(-(-len(start) // alignment) * alignment + weights)


def _parse(data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    cursor.at = len(_MAGIC)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise struct.error(f"GGUF version {version}; only 2 and 3 are read")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = []
    for _ in range(num_tensors):
        name, rank = cursor.string(), cursor.scalar("I")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))
        tensors.append(GGUFTensor(name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = int(metadata.get("general.alignment", 32))
    return GGUFHeader(metadata, tuple(tensors), -(-cursor.at // alignment) * alignment)


def _check_tensors(path: Path, header: GGUFHeader, size: int) -> None:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelLoadError(f"reading {path} needs the package gguf; run `pip install gguf accelerate`") from error
    if not header.tensors:
        raise ModelLoadError(f"{path} holds no tensors (a vocabulary only?); give a file with weights")
    for tensor in header.tensors:
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.quant_type)]
        except (ValueError, KeyError) as error:
            raise ModelLoadError(
                f"{path}: tensor {tensor.name} has quantisation type {tensor.quant_type}, which this gguf package "
                f"does not know; use a Q4_K_M, Q8_0 or F16 file of the model"
            ) from error
        end = header.data_start + tensor.offset + math.prod(tensor.shape) // block * block_bytes
        if end > size:
            raise ModelLoadError(
                f"{path} is truncated: tensor {tensor.name} ends at byte {end} of {size}; download it again"
            )
