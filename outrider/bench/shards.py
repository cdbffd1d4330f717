"""Safetensors files written piece by piece, by several threads, so that no file is ever held in memory.

The format: eight bytes with the header's length, the header (JSON: name, dtype, shape, where the bytes lie), the bytes.
As every place is known beforehand, pieces may come in any order.
"""

from __future__ import annotations

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

__all__ = ["INDEX", "PIECE_BYTES", "Weight", "num_bytes", "write_weights"]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # a file, at most (as transformers and the Hub have it)
PIECE_BYTES = 64 << 20
MOST_WRITERS = 8
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Weight:
    """One tensor to be written.

    Attributes:
        name: As the checkpoint calls it.
        shape: Its shape; pieces are cut along the first dimension.
        piece: Gives rows ``[start, stop)``, on any device, in the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    piece: Piece


def num_bytes(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that the tensors' values take."""
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def write_weights(
    folder: Path,
    weights: list[Weight],
    dtype: torch.dtype,
    advance: Callable[[int], None],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write all weights as one file, or as several with an index; `advance` hears of every piece's bytes."""
    shards = list(_shards(weights, dtype, shard_bytes))
    names = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    files = [_File(folder / name, shard, dtype) for name, shard in zip(names, shards, strict=True)]
    staging = threading.local()
    try:
        jobs = [(file, weight, start) for file in files for weight in file.weights for start in _starts(weight, dtype)]
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
        total = num_bytes({weight.name: weight.shape for weight in weights}, dtype)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _File:
    """One safetensors file, opened with its header written and room for all its tensors."""

    def __init__(self, path: Path, weights: list[Weight], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype
        self._places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for weight in weights:
            begin, end = end, end + num_bytes({weight.name: weight.shape}, dtype)
            header[weight.name] = {"dtype": _NAMES[dtype], "shape": weight.shape, "data_offsets": (begin, end)}
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
        place = self._origin + self._places[weight.name] + start * _row_bytes(weight, self.dtype)
        while rest:
            written = os.pwrite(self._handle, rest, place)
            rest, place = rest[written:], place + written

    def close(self) -> None:
        os.close(self._handle)


def _write_piece(
    file: _File, weight: Weight, start: int, staging: threading.local, advance: Callable[[int], None]
) -> None:
    stop = min(weight.shape[0], start + _piece_rows(weight, file.dtype))
    piece = weight.piece(start, stop).to(file.dtype)
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


def _shards(weights: list[Weight], dtype: torch.dtype, most: int) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    size = 0
    for weight in weights:
        more = num_bytes({weight.name: weight.shape}, dtype)
        if shard and size + more > most:
            yield shard
            shard, size = [], 0
        shard.append(weight)
        size += more
    yield shard


def _row_bytes(weight: Weight, dtype: torch.dtype) -> int:
    return math.prod(weight.shape[1:]) * dtype.itemsize


def _piece_rows(weight: Weight, dtype: torch.dtype) -> int:
    return max(1, PIECE_BYTES // _row_bytes(weight, dtype))


def _starts(weight: Weight, dtype: torch.dtype) -> range:
    return range(0, weight.shape[0], _piece_rows(weight, dtype))
