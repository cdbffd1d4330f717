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


# Two programs a processor, each small enough (73 KB) that one of the next kernel finds room beside them and asks for
# its weights early. 64 KB in flight a processor; memory at full speed needs about 25.
_WIDE = Tiles(128, 64, num_stages=4, prefetch=4)
_TALL = Tiles(64, 128, num_stages=3, prefetch=4)
_ENOUGH = 192  # tiles of _WIDE from which it keeps the card busy unsplit

_BY_HAND = {
    16: _TALL,
    32: _TALL,
    64: Tiles(128, 64, num_stages=3),
    128: Tiles(128, 64, num_warps=8, num_stages=3),
}
_BY_HAND_QUANTISED = {
    16: Tiles(32, 128, num_stages=6, prefetch=4),
    32: Tiles(32, 128, num_stages=5, prefetch=4),
    64: Tiles(64, 128, num_warps=8),
    128: Tiles(64, 128, num_warps=8, num_stages=3),
}


def default_tiles(num_weight_rows: int, in_features: int, rows: int, quantization: str | None) -> Tiles:
    """The choice by hand for a bucket of `rows`."""
    tiles = (_BY_HAND if quantization is None else _BY_HAND_QUANTISED)[rows]
    if tiles is _TALL and _WIDE.num_tiles(num_weight_rows) >= _ENOUGH:
        tiles = _WIDE
    programs = 2 * _PROCESSORS if tiles.block_n > 32 else 4 * _PROCESSORS
    return split_evenly(tiles, num_weight_rows, in_features, programs)


def candidates(num_weight_rows: int, in_features: int, rows: int, quantization: str | None) -> list[Tiles]:
    """The default and up to three others that win on some shapes; the default first."""
    default = default_tiles(num_weight_rows, in_features, rows, quantization)
    programs = 2 * _PROCESSORS
    if quantization == "int4":
        others = [Tiles(64, 128, num_warps=2, num_stages=6), Tiles(16, 128, num_warps=2, num_stages=6)]
    elif quantization is not None:
        others = [Tiles(32, 256), Tiles(64, 128, num_warps=2, num_stages=6)]
    elif rows <= 32:
        others = [_TALL, _WIDE, Tiles(64, 128, num_stages=4), Tiles(32, 128, num_stages=5, prefetch=4)]
        programs = 3 * _PROCESSORS
    else:
        others = [Tiles(64, 64, num_stages=4), Tiles(128, 128, num_warps=8, num_stages=3)]
    found = [default, *(split_evenly(tiles, num_weight_rows, in_features, programs) for tiles in others)]
    return list(dict.fromkeys(found))[:4]
