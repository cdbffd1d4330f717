"""Safetensors files written piece by piece, by several threads, so that no file is ever held in memory.

The format: eight bytes with the header's length, the header (JSON: name, dtype, shape, where the bytes lie), the bytes.
As every place is known beforehand, pieces may come in any order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Piece = Callable[[int, int], torch.Tensor]

__all__ = ["INDEX", "PIECE_BYTES", "SHARD_BYTES", "Weight", "normal", "num_bytes", "write_weights"]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # a file, at most (as transformers and the Hub have it)
PIECE_BYTES = 64 << 20
MOST_WRITERS = 8
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Weight:
    """One tensor to be written.

    Attributes:
        name: As the checkpoint calls it.
        shape: Its shape; pieces are cut along the first dimension.
        dtype: As it is stored.
        piece: Gives rows ``[start, stop)``, on any device; they are cast to `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    piece: Piece

    @property
    def num_bytes(self) -> int:
        """Bytes that its values take."""
        return num_bytes({self.name: self.shape}, self.dtype)

    @property
    def row_bytes(self) -> int:
        """The same of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def piece_rows(self) -> int:
        """Rows that a piece has."""
        return max(1, PIECE_BYTES // self.row_bytes)


def num_bytes(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that the tensors' values take."""
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def normal(key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Draw standard normal numbers; each key has a seed of its own, so the order of drawing does not matter."""
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    draws = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=draws)


def write_weights(
    folder: Path,
    weights: list[Weight],
    advance: Callable[[int], None],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write all weights as one file, or as several with an index; `advance` hears of every piece's bytes."""
    shards = list(_shards(weights, shard_bytes))
    names = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    files = [_File(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    staging = threading.local()
    try:
        jobs = [(file, weight, start) for file in files for weight in file.weights for start in _starts(weight)]
        with ThreadPoolExecutor(max(1, min(MOST_WRITERS, os.cpu_count() or 1))) as pool:
            running = [pool.submit(_write_piece, *job, staging, advance) for job in jobs]
            try:
                for one in running:
                    one.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        for file in files:
            file.close()
    if len(shards) > 1:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(weight.num_bytes for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _File:
    """One safetensors file, opened with its header written and room for all its tensors."""

    def __init__(self, path: Path, weights: list[Weight]) -> None:
        self.weights = weights
        self._places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in weights:
            begin, end = end, end + weight.num_bytes
            header[weight.name] = {"dtype": _NAMES[weight.dtype], "shape": weight.shape, "data_offsets": (begin, end)}
            self._places[weight.name] = begin
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)  # so that tensors lie aligned where the file is mapped
        self._origin = 8 + len(text)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._handle, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._handle, self._origin + end)

    def write(self, weight: Weight, start: int, piece: torch.Tensor) -> None:
        """Put rows from `start` on, in host memory, where they belong."""
        values: Any = piece.contiguous().view(-1).view(torch.uint8).numpy()
        rest = memoryview(values)
        place = self._origin + self._places[weight.name] + start * weight.row_bytes
        while rest:
            written = os.pwrite(self._handle, rest, place)
            rest, place = rest[written:], place + written

    def close(self) -> None:
        os.close(self._handle)


def _write_piece(
    file: _File, weight: Weight, start: int, staging: threading.local, advance: Callable[[int], None]
) -> None:
    stop = min(weight.shape[0], start + weight.piece_rows)
    piece = weight.piece(start, stop).to(weight.dtype)
    if piece.is_cuda:
        piece = _staged(piece, staging)
    file.write(weight, start, piece)
    advance(piece.nbytes)


def _staged(piece: torch.Tensor, staging: threading.local) -> torch.Tensor:
    """Copy to this thread's page-locked buffer, which the card reaches several times as fast as other memory."""
    buffer: torch.Tensor | None = getattr(staging, "buffer", None)
    if buffer is None or buffer.nbytes < piece.nbytes:
        buffer = staging.buffer = torch.empty(max(PIECE_BYTES, piece.nbytes), dtype=torch.uint8, pin_memory=True)
    host = buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
    host.copy_(piece)
    return host


def _shards(weights: list[Weight], most: int) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    size = 0
    for weight in weights:
        if shard and size + weight.num_bytes > most:
            yield shard
            shard, size = [], 0
        shard.append(weight)
        size += weight.num_bytes
    yield shard


def _starts(weight: Weight) -> range:
    return range(0, weight.shape[0], weight.piece_rows)
