"""Split-KV attention over the paged cache, one launch: the last program of a tile to finish merges its splits.

A program takes one split of the places of one row, for one KV head and one tile of (query, grouped head) pairs, and
walks it with a running maximum and sum (FlashAttention, https://arxiv.org/abs/2205.14135; split over keys as in
Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The grid is fixed; how much of it works is
read from the row's positions on the device, so that a captured graph serves every length. Merging walks the splits in
order, so results do not depend on which program came last.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.attention import Tiling
from outrider.kernels.jit.merge import settle
from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.jit.walk import ask, borders, nothing, walk
from outrider.kernels.launch import overlaps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOG2E", "attend_paged", "counters_for", "merge_shape", "processors", "scratch"]

LOG2E = 1.4426950408889634
MERGED_NUMBERS = 4096  # of partial results that a merging program adds a step: 32 registers a thread
FEW_MEMBERS = 4  # tile rows of plain decoding with grouped heads: merged without the others, which are empty
SPARE_COUNTERS = 1 << 14


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "num_places",
        "window",
        "fixed_length",
        "table_stride",
        "line_stride",
        "tree_stride",
    ],
)
def _attention(
    query, keys, values, tables, positions, ancestors, out, mixes, stats, counters,
    query_stride_b, query_stride_t, query_stride_h, key_stride, key_stride_h, value_stride, value_stride_h,
    table_stride, line_stride, position_stride, tree_stride, tree_stride_t,
    num_queries, num_places, window, fixed_length, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TREE: tl.constexpr, FIXED: tl.constexpr, PAGE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)  # what follows has weights to fetch, and waits for this kernel by itself
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, tile = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    line = positions + row * line_stride
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live, step = member < num_queries * GROUP, member // GROUP
    query_head, dim = head * GROUP + member % GROUP, tl.arange(0, BLOCK_D)
    # Positions and tables stand since before this pass, old keys since before this layer: they need not wait.
    lowest, end, base, size, first, last = borders(
        line, position_stride, tile, num_queries, num_places, window, fixed_length,
        GROUP, BLOCK_M, BLOCK_N, SPLITS, MIN_BLOCKS, WINDOW, TREE, FIXED,
    )  # fmt: skip
    if (split < first) | (split > last):
        return
    begin = tl.maximum(base + split * size, lowest // BLOCK_N * BLOCK_N)
    stop = tl.where(split == SPLITS - 1, end, tl.minimum(base + split * size + size, end))
    query_at = tl.load(line + step * position_stride, mask=live, other=-1).to(tl.int32)
    ask(
        keys + head * key_stride_h, values + head * value_stride_h, tables + row * table_stride, begin, stop, lowest,
        key_stride, value_stride, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, PAGE, OVERLAP,
    )  # fmt: skip
    wait_for_inputs(OVERLAP)
    from_ = query + row * query_stride_b + step.to(tl.int64) * query_stride_t + query_head * query_stride_h
    asked = tl.load(from_[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)
    related = query_at.to(tl.int64)
    if TREE:
        related = tl.load(ancestors + row * tree_stride + step * tree_stride_t, mask=live, other=0)
    best, shares, mixed = nothing(BLOCK_M, BLOCK_N, BLOCK_DV)
    best, shares, mixed = walk(
        asked, keys + head * key_stride_h, values + head * value_stride_h, tables + row * table_stride, line,
        query_at, related, begin, stop, lowest, end, key_stride, value_stride, position_stride, num_queries, window,
        scale, cap, best, shares, mixed, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, WINDOW, CAP, TREE, PAGE,
    )  # fmt: skip
    settle(
        out + row * num_queries * (HEADS * GROUP * DV) + head * (GROUP * DV), mixes, stats, counters,
        row * tl.num_programs(1) + tl.program_id(1), tile, split, first, last, num_queries, best, tl.sum(shares, 1),
        mixed, live, HEADS, GROUP, DV, BLOCK_DV, BLOCK_M, SPLITS, ROWS, CHUNK,
    )  # fmt: skip


@cache
def processors(device: torch.device) -> int:
    """How many streaming multiprocessors the device has."""
    if device.type != "cuda":
        return 8  # the interpreter runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[torch.device, list[Tensor]] = {}


def counters_for(device: torch.device, count: int) -> Tensor:
    """Zeros that every call leaves zero, int32 ``[>= count]``: how many splits of each tile are done.

    Raises RuntimeError where more are needed while a graph is captured: memory of a graph is not zero outside it.
    """
    known = _counters.setdefault(device, [])
    if not known or known[-1].numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention needs more counters: call it once with these shapes before capturing")
        # Captured graphs hold the older ones.
        known.append(torch.zeros(max(SPARE_COUNTERS, triton.next_power_of_2(count)), dtype=torch.int32, device=device))
    return known[-1]


def scratch(tiling: Tiling, programs: int, dim_v: int, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the splits of so many tiles leave for the merging one: values, maxima and sums, and counters.

    `unused` stands for them where there is one split.
    """
    if tiling.splits == 1:
        return unused, unused, unused
    partial, device = programs * tiling.splits * tiling.block_m, unused.device
    mixes = torch.empty(partial, dim_v, dtype=torch.float32, device=device)
    stats = torch.empty(2 * partial, dtype=torch.float32, device=device)
    return mixes, stats, counters_for(device, programs)


def merge_shape(tiling: Tiling, members: int, block_dv: int) -> tuple[int, int]:
    """Give the tile rows that are merged, where there are so many members, and the splits that are added at a time."""
    merged = FEW_MEMBERS if members <= FEW_MEMBERS else tiling.block_m
    return merged, min(tiling.splits, max(1, MERGED_NUMBERS // (merged * block_dv)))


def attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    *,
    page: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    ancestors: Tensor | None,
    fixed_length: int | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Launch the kernel: see `outrider.kernels.attention.paged_attention`; `page` is the slots a block."""
    rows, num_queries, query_heads, dim = query.shape
    heads, dim_v = keys.shape[1], values.shape[2]
    group, device = query_heads // heads, query.device
    out = torch.empty(rows, num_queries, query_heads, dim_v, dtype=query.dtype, device=device)
    if tiling is None:
        size = max(query.element_size(), keys.element_size())
        members, width = num_queries * group, max(dim, dim_v)
        tiling = Tiling.choose(
            rows, heads, members, width, size, fixed_length, processors(device), tables.shape[1] * page
        )
    tiles = -(-num_queries * group // tiling.block_m)
    programs = rows * heads * tiles
    mixes, stats, counters = scratch(tiling, programs, dim_v, out)
    block_dv = max(16, triton.next_power_of_2(dim_v))
    # Bits follow the shape of the merge: in exact mode it is one for all calls.
    merged, chunk = merge_shape(tiling, num_queries * group if fixed_length is None else tiling.block_m, block_dv)
    tree = positions if ancestors is None else ancestors
    overlap = overlaps(device)
    _attention[tiling.splits, heads * tiles, rows](
        query, keys, values, tables, positions, tree, out, mixes, stats, counters,
        query.stride(0), query.stride(1), query.stride(2), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), tables.stride(0), positions.stride(0), positions.stride(1), tree.stride(0), tree.stride(1),
        num_queries, tables.shape[1] * page, window or 0, fixed_length or 0,
        scale * LOG2E if softcap is None else 2 * scale * LOG2E / softcap, (softcap or 0.0) * LOG2E,
        HEADS=heads, GROUP=group, D=dim, DV=dim_v, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_DV=block_dv, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        SPLITS=tiling.splits, MIN_BLOCKS=tiling.min_blocks, ROWS=merged, CHUNK=chunk, WINDOW=window is not None,
        CAP=softcap is not None, TREE=ancestors is not None, FIXED=fixed_length is not None, PAGE=page,
        OVERLAP=overlap, num_warps=tiling.num_warps, num_stages=tiling.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return out
