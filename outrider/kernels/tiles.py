"""How a product is cut into tiles: the choices made by hand, and the few others worth timing."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ROW_BUCKETS", "Tiles", "bucket_of", "candidates", "default_tiles", "split_evenly"]

ROW_BUCKETS = (16, 32, 64, 128)
"""Rows of x that a kernel is compiled for. Fewer rows take the time and the arithmetic of the next bucket."""

_PROCESSORS = 132  # of an H100; other cards find theirs by tuning
_MAX_SPLIT = 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """One way to cut a product.

    Attributes:
        block_n: Weight rows a program owns. From 64 on (and with four warps) Hopper's wgmma reads them from shared
            memory; quantised weights pass through registers and want fewer, or two warps.
        block_k: Inputs a step. int4: 128, the size of a group.
        split_k: Programs that share a tile's inputs.
        num_warps: Warps a program.
        num_stages: Steps in flight, and one in work.
        prefetch: Steps asked for before the kernel's inputs are ready. A power of two, or 0.
        line: Bytes a prefetch asks for: a power of two up to 128, or 0 for the bulk copy's prefetch.
        release: Steps before its end at which a program lets the next kernel start. A step takes about 1.4 us.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 2
    release: int = 3
    line: int = 64

    def fits(self, num_weight_rows: int, in_features: int) -> bool:
        """Whether every share of the split has a step to do, and there are not many times too many programs."""
        steps = -(-in_features // self.block_k)
        share = -(-steps // self.split_k)
        return (self.split_k - 1) * share < steps and (self.split_k == 1 or num_weight_rows // self.block_n <= 512)

    def num_partials(self, num_weight_rows: int, rows: int) -> int:
        """Numbers of scratch that the programs of all tiles share."""
        return self.num_tiles(num_weight_rows) * self.split_k * rows * (self.block_n + 1) if self.split_k > 1 else 0

    def num_tiles(self, num_weight_rows: int) -> int:
        """Tiles that cover the weight's rows."""
        return -(-num_weight_rows // self.block_n)


def bucket_of(num_rows: int) -> int | None:
    """The bucket for so many rows, or None where the library's product is the right one."""
    return next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), None)


def split_evenly(tiles: Tiles, num_weight_rows: int, in_features: int, programs: int) -> Tiles:
    """As many programs a tile as bring their number near `programs` and leave each four steps."""
    steps = -(-in_features // tiles.block_k)
    wanted = min(_MAX_SPLIT, programs // tiles.num_tiles(num_weight_rows), steps // 4)
    split = 1
    while split * 2 <= wanted and replace(tiles, split_k=split * 2).fits(num_weight_rows, in_features):
        split *= 2
    return replace(tiles, split_k=split)


# Measured on an H100 (benchmarks/records/gpu_products-2026-11-28-h100.json, 1 to 32 rows of an 8B and a 1B Llama): the
# first is the best of all tried on every shape but two. On the 8B's QKV it takes 13 to 19 % longer than the second, on
# the 1B's head at 32 rows 2 % longer than the best. It beats the library's product, its norm included, by 4 to 66 %.
_FEW_ROWS = Tiles(64, 128, num_stages=4, prefetch=2)
_FEW_ROWS_TOO = Tiles(64, 128, num_stages=3, prefetch=4)
_BY_HAND = {
    16: _FEW_ROWS,
    32: _FEW_ROWS,
    64: Tiles(128, 64, num_stages=3),
    128: Tiles(128, 64, num_warps=8, num_stages=3),
}
_BY_HAND_QUANTISED = {
    16: Tiles(64, 128, num_warps=2, num_stages=6),
    32: Tiles(64, 128, num_warps=2, num_stages=5),
    64: Tiles(64, 128, num_warps=8),
    128: Tiles(64, 128, num_warps=8, num_stages=3),
}
_FEW = 32  # rows up to which three programs a processor are best


def default_tiles(num_weight_rows: int, in_features: int, rows: int, quantization: str | None) -> Tiles:
    """The choice by hand for a bucket of `rows`."""
    tiles = (_BY_HAND if quantization is None else _BY_HAND_QUANTISED)[rows]
    return split_evenly(tiles, num_weight_rows, in_features, _programs(rows))


def candidates(num_weight_rows: int, in_features: int, rows: int, quantization: str | None) -> list[Tiles]:
    """What is worth timing, the default first. Each costs a second of compiling on a machine that is new to it."""
    default = default_tiles(num_weight_rows, in_features, rows, quantization)
    if quantization is not None:
        return [default]
    other = _FEW_ROWS_TOO if rows <= _FEW else Tiles(64, 64, num_stages=4)
    return [default, split_evenly(other, num_weight_rows, in_features, _programs(rows))]


def _programs(rows: int) -> int:
    return (3 if rows <= _FEW else 2) * _PROCESSORS
