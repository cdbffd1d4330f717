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
from outrider.kernels.jit.merge import NEVER, finish, leave, merge
from outrider.kernels.jit.overlap import ask_ahead, release_dependents, wait_for_inputs
from outrider.kernels.launch import overlaps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend_paged", "counters_for"]

LOG2E = 1.4426950408889634
MERGED_NUMBERS = 4096  # of partial results that a merging program adds a step: 32 registers a thread
FEW_MEMBERS = 4  # tile rows of plain decoding with grouped heads: merged without the others, which are empty
SPARE_COUNTERS = 1 << 14


@triton.jit
def _borders(
    line, stride, tile, num_queries, num_places, window, fixed_length,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """What the tile sees: its lowest place, one past its highest, and how that is split.

    Returns (lowest, end, base, size, first, last): split s covers places base + s * size onwards; first and last are
    the splits with anything to do, never none of them.
    """
    if TREE:
        earliest = tl.load(line).to(tl.int32)
        end = earliest + num_queries
    else:
        earliest = tl.load(line + (tile * BLOCK_M // GROUP) * stride).to(tl.int32)
        newest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
        end = tl.load(line + newest * stride).to(tl.int32) + 1
    end = tl.minimum(end, num_places)
    lowest = tl.full((), 0, tl.int32)
    if WINDOW:
        lowest = tl.maximum(earliest - window + 1, 0)
    begin = lowest // BLOCK_N * BLOCK_N
    if FIXED:
        base, span = tl.full((), 0, tl.int32), fixed_length
    else:
        base, span = begin, end - begin
    size = BLOCK_N * tl.maximum((span + BLOCK_N * SPLITS - 1) // (BLOCK_N * SPLITS), MIN_BLOCKS)
    first = tl.minimum((begin - base) // size, SPLITS - 1)
    last = tl.minimum((tl.maximum(end, 1) - 1 - base) // size, SPLITS - 1)
    return lowest, end, base, size, first, tl.maximum(first, last)


@triton.jit
def _seen(
    place, query_at, ancestors, line, stride, num_queries, window, WINDOW: tl.constexpr, TREE: tl.constexpr
):  # fmt: skip
    """Which of the places [N] each tile row [M] sees, by position and by tree."""
    if TREE:
        start = tl.load(line).to(tl.int32)
        node = place - start
        # A shift by less than 0 or more than 63 has no meaning, hence the bounds.
        bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
        related = ((ancestors[:, None] >> bit[None, :]) & 1) != 0
        seen = (node < 0)[None, :] | (related & (node < num_queries)[None, :])
        position = place
        if WINDOW:
            fresh = (node >= 0) & (node < num_queries)
            position = tl.load(line + node * stride, mask=fresh, other=0).to(tl.int32)
            position = tl.where(fresh, position, place)
    else:
        position = place
        seen = position[None, :] <= query_at[:, None]
    if WINDOW:
        seen = seen & (position[None, :] > (query_at - window)[:, None])
    return seen


@triton.jit
def _capped(scores, scale, cap, CAP: tl.constexpr):
    """Scaled, soft-capped scores in units of log 2; without a cap `scale` has the unit in it, with one it is / cap.

    tanh(x) = 1 - 2 / (1 + exp(2 x)); beyond 2^64 nothing changes.
    """
    if CAP:
        power = tl.minimum(tl.maximum(scores * scale, -64.0), 64.0)
        scores = (1.0 - 2.0 / (1.0 + tl.exp2(power))) * cap
    else:
        scores = scores * scale
    return scores


@triton.jit
def _ask(
    keys, values, table, begin, stop, lowest, key_stride, value_stride,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Let a split's first keys and values come into L2 while the query is still computed."""
    if OVERLAP:
        place = begin + tl.arange(0, BLOCK_N)
        inside = (place >= lowest) & (place < stop)
        slot = tl.load(table + place // PAGE, mask=inside, other=0) * PAGE + place % PAGE
        ask_ahead(keys + slot * key_stride, inside, D, BLOCK_D, OVERLAP)
        ask_ahead(values + slot * value_stride, inside, DV, BLOCK_DV, OVERLAP)


@triton.jit
def _walk(
    query, keys, values, table, line, query_at, ancestors, begin, stop, lowest, end,
    key_stride, value_stride, position_stride, num_queries, window, scale, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One split: (maximum [M], sum [M], weighted values [M, DV]), the last two relative to the maximum."""
    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    best = tl.full([BLOCK_M], NEVER, tl.float32)
    shares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed at the end: once across the warps, not each step
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    ahead = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + ahead // PAGE, mask=(ahead >= lowest) & (ahead < end), other=0)
    for low in range(begin, stop, BLOCK_N):
        place = low + tl.arange(0, BLOCK_N)
        # Places that nobody sees hold anything, NaN too: 0 * NaN must not enter a sum.
        inside = (place >= lowest) & (place < end)
        slot = block * PAGE + place % PAGE
        # A table entry is fetched one step before the keys that it points to: no load waits for another.
        ahead = place + BLOCK_N
        block = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        kept = inside[:, None]
        if BLOCK_D > D:
            kept = kept & (dim < D)[None, :]
        key = tl.load(keys + slot[:, None] * key_stride + dim[None, :], mask=kept, other=0.0).to(query.dtype)
        scores = _capped(tl.dot(query, tl.trans(key), input_precision="ieee"), scale, cap, CAP)
        seen = _seen(place, query_at, ancestors, line, position_stride, num_queries, window, WINDOW, TREE)
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        # A row that sees nothing here keeps its bits: the maximum stays, exp2(0) is 1, and zeros are added.
        new = tl.maximum(best, tl.max(scores, 1))
        keep = tl.exp2(best - new)
        weights = tl.exp2(scores - new[:, None])
        kept_v = inside[:, None]
        if BLOCK_DV > DV:
            kept_v = kept_v & (dim_v < DV)[None, :]
        value = tl.load(values + slot[:, None] * value_stride + dim_v[None, :], mask=kept_v, other=0.0)
        shares = shares * keep[:, None] + weights
        mixed = tl.dot(weights.to(value.dtype), value, mixed * keep[:, None], input_precision="ieee")
        best = new
    return best, tl.sum(shares, 1), mixed


@triton.jit(
    do_not_specialize=["num_queries", "num_places", "window", "fixed_length", "table_stride", "line_stride"],
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
    lowest, end, base, size, first, last = _borders(
        line, position_stride, tile, num_queries, num_places, window, fixed_length,
        GROUP, BLOCK_M, BLOCK_N, SPLITS, MIN_BLOCKS, WINDOW, TREE, FIXED,
    )  # fmt: skip
    if (split < first) | (split > last):
        return
    begin = tl.maximum(base + split * size, lowest // BLOCK_N * BLOCK_N)
    stop = tl.where(split == SPLITS - 1, end, tl.minimum(base + split * size + size, end))
    query_at = tl.load(line + step * position_stride, mask=live, other=-1).to(tl.int32)
    _ask(
        keys + head * key_stride_h, values + head * value_stride_h, tables + row * table_stride, begin, stop, lowest,
        key_stride, value_stride, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, PAGE, OVERLAP,
    )  # fmt: skip
    wait_for_inputs(OVERLAP)
    from_ = query + row * query_stride_b + step.to(tl.int64) * query_stride_t + query_head * query_stride_h
    asked = tl.load(from_[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0)
    related = query_at.to(tl.int64)
    if TREE:
        related = tl.load(ancestors + row * tree_stride + step * tree_stride_t, mask=live, other=0)
    best, total, mixed = _walk(
        asked, keys + head * key_stride_h, values + head * value_stride_h, tables + row * table_stride, line,
        query_at, related, begin, stop, lowest, end, key_stride, value_stride, position_stride, num_queries, window,
        scale, cap, BLOCK_M, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, WINDOW, CAP, TREE, PAGE,
    )  # fmt: skip
    out += row * num_queries * (HEADS * GROUP * DV) + head * (GROUP * DV)
    if SPLITS == 1:
        finish(out, tile * BLOCK_M, num_queries, total, mixed, BLOCK_M, HEADS, GROUP, DV, BLOCK_DV)
    elif first == last:
        finish(out, tile * BLOCK_M, num_queries, total, mixed, BLOCK_M, HEADS, GROUP, DV, BLOCK_DV)
    else:
        place = row * tl.num_programs(1) + tl.program_id(1)
        mixes += place * SPLITS * BLOCK_M * DV
        stats += place * SPLITS * BLOCK_M * 2
        leave(mixes, stats, split, best, total, mixed, live, BLOCK_M, DV, BLOCK_DV, SPLITS)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        if tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu") == last - first:
            tl.store(counters + place, 0)
            left = num_queries * GROUP - tile * BLOCK_M
            sums, blends = merge(mixes, stats, first, last, left, BLOCK_M, BLOCK_DV, DV, SPLITS, ROWS, CHUNK)
            finish(out, tile * BLOCK_M, num_queries, sums, blends, ROWS, HEADS, GROUP, DV, BLOCK_DV)


@cache
def _processors(device: torch.device) -> int:
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
        tiling = Tiling.choose(rows, heads, members, width, size, fixed_length, _processors(device))
    tiles = -(-num_queries * group // tiling.block_m)
    programs = rows * heads * tiles
    mixes = stats = counters = out  # not touched where there is one split
    if tiling.splits > 1:
        partial = programs * tiling.splits * tiling.block_m
        mixes = torch.empty(partial, dim_v, dtype=torch.float32, device=device)
        stats = torch.empty(2 * partial, dtype=torch.float32, device=device)
        counters = counters_for(device, programs)
    # Bits follow the shape of the merge: in exact mode it is one for all calls.
    block_dv = max(16, triton.next_power_of_2(dim_v))
    merged = tiling.block_m
    if fixed_length is None:
        merged = FEW_MEMBERS if num_queries * group <= FEW_MEMBERS else merged
    chunk = min(tiling.splits, max(1, MERGED_NUMBERS // (merged * block_dv)))
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
