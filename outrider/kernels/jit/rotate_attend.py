"""Rotation, the cache write and split-KV attention of a round's few fresh tokens, in one launch.

Splits walk the places before the fresh tokens, as in `outrider.kernels.jit.attention`. One program more (the last
split's own, where there is one split alone or none is left) takes the fresh tokens straight from the fused product: it
turns their keys, writes keys and values into the cache, and attends to them. Nobody reads in the cache what this launch
writes there, so no program waits for another but to merge.

What stands since before the pass (old keys and values, tables, positions) is read while the product still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.attention import BLOCK_SIZE, Tiling
from outrider.kernels.jit.attention import LOG2E, merge_shape, processors, scratch
from outrider.kernels.jit.device_function import device_function
from outrider.kernels.jit.merge import settle
from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.jit.rotary import angles, norm_weights, read_heads, turned, write_heads
from outrider.kernels.jit.walk import absorb, ask, borders, nothing, read_places, walk
from outrider.kernels.launch import overlaps
from outrider.kernels.rotate_attend import MAX_FRESH

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_rotate_attend", "rotate_attend_kernel"]

NUMBERS = 4096  # of a tile of queries: each thread of four warps holds 32, twice, with their angles
FRESH = tl.constexpr(MAX_FRESH)
PAGE = tl.constexpr(BLOCK_SIZE)


@device_function
def _part(
    line, split, tile, num_places, window, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What a split walks of the old places, from where to where, and which split takes the fresh tokens.

    Returns (lowest, end, begin, stop, last); the lowest and the end are those of all splits, 0 to `last`.
    """
    # The old places are all that a tree of no tokens sees.
    lowest, end, base, size, _, old = borders(
        line, 1, tile, 0, num_places, window, 0, GROUP, BLOCK_M, BLOCK_N, SPLITS, MIN_BLOCKS, WINDOW, True, False
    )
    # One split alone takes them too: the others need not be merged then.
    last = tl.where(old > 0, tl.minimum(old + 1, SPLITS - 1), 0)
    begin = base + split * size
    return lowest, end, begin, tl.minimum(begin + size, end), last


@device_function
def _fresh_places(line, table, mine, num_queries, num_places, TREE: tl.constexpr):
    """Where the fresh tokens [FRESH] are: (position, slot, which there are, which of them may be seen).

    Of a chain's tokens that share a place, as clamped positions do, the last one counts.
    """
    token = tl.arange(0, FRESH)
    there = (token < num_queries) & mine
    position = tl.load(line + token, mask=there, other=0)
    if TREE:
        place = tl.load(line) + token
    else:
        place = position
        after = tl.load(line + token + 1, mask=there & (token + 1 < num_queries), other=-1)
        there = there & (after != place)
    block = tl.minimum(place // PAGE, num_places // PAGE - 1)
    slot = tl.load(table + block, mask=there, other=0) * PAGE + place % PAGE
    return position, slot, there, there & (place < num_places)


@device_function
def _first(
    keys, values, table, begin, stop, lowest, stride, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Read a split's first block, (keys, values, which there are), and let the next one come into L2."""
    place = begin + tl.arange(0, BLOCK_N)
    inside = (place >= lowest) & (place < stop)
    slot = tl.load(table + place // PAGE, mask=inside, other=0) * PAGE + place % PAGE
    key = read_places(keys, slot, inside, stride, DIM, BLOCK_D)
    value = read_places(values, slot, inside, stride, DIM, BLOCK_D)
    ask(
        keys, values, table, begin + BLOCK_N, stop, lowest, stride, stride, BLOCK_N, DIM, DIM, BLOCK_D, BLOCK_D, PAGE,
        OVERLAP,
    )  # fmt: skip
    return key, value, inside


@device_function
def _turn(norm, cos, sin, position, num_angles, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr):
    """Load what turns heads at these positions: the norm's weights and the angles."""
    row = tl.minimum(tl.maximum(position, 0), num_angles - 1)
    return norm_weights(norm, DIM, ROTARY, BLOCK_D), angles(cos, sin, row, ROTARY, BLOCK_D)


@device_function
def _take_fresh(
    query, key, value, keys, values, slot, stored, counts, position, key_norm, cos, sin, num_angles, eps, stride,
    query_at, ancestors, window, scale, cap, best, mixed,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Turn, store and attend to the fresh tokens, before all others: what `nothing` gives, with them in it."""
    weights, angle = _turn(key_norm, cos, sin, position, num_angles, DIM, BLOCK_D, ROTARY)
    key = turned(key, weights, angle, eps, DIM, key_norm is not None).to(keys.dtype.element_ty)
    value = value.to(values.dtype.element_ty)
    write_heads(key, keys + slot * stride, stored, DIM)
    write_heads(value, values + slot * stride, stored, DIM)
    if TREE:
        seen = ((ancestors[:, None] >> tl.arange(0, FRESH).to(tl.int64)[None, :]) & 1) != 0
    else:
        seen = position[None, :] <= query_at[:, None]
    if WINDOW:
        seen = seen & (position[None, :] > (query_at - window)[:, None])
    seen, value = seen & counts[None, :], tl.where(counts[:, None], value, 0.0)
    best, _, shares, mixed = absorb(query, key.to(query.dtype), value, seen, best, mixed, scale, cap, CAP)
    # Only the sum of a row's weights matters.
    shares = tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, tl.sum(shares, 1)[:, None], 0.0)
    return best, shares, mixed


@device_function
def _take_first(
    query, key, value, query_at, live, begin, inside, window, scale, cap, best, shares, mixed,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to what `_first` has read: all of it is before every query."""
    seen = inside[None, :] & live[:, None]
    if WINDOW:
        seen = seen & ((begin + tl.arange(0, BLOCK_N))[None, :] > (query_at - window)[:, None])
    best, keep, weights, mixed = absorb(query, key.to(query.dtype), value, seen, best, mixed, scale, cap, CAP)
    return best, shares * keep[:, None] + weights, mixed


@triton.jit(
    do_not_specialize=["num_queries", "num_places", "window", "table_stride", "line_stride", "tree_stride"],
)
def rotate_attend_kernel(
    qkv, keys, values, tables, positions, ancestors, cos, sin, query_norm, key_norm, out, mixes, stats, counters,
    qkv_row, pool_slot, pool_head, table_stride, line_stride, tree_stride, num_queries, num_places, num_angles, window,
    scale, cap, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take one split of one row, for one KV head and one tile of (query, grouped head) pairs."""
    release_dependents(OVERLAP)
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, tile = tl.program_id(1) % HEADS, tl.program_id(1) // HEADS
    line, table = positions + row * line_stride, tables + row * table_stride
    keys, values = keys + head * pool_head, values + head * pool_head
    lowest, end, begin, stop, last = _part(
        line, split, tile, num_places, window, GROUP, BLOCK_M, BLOCK_N, SPLITS, MIN_BLOCKS, WINDOW
    )
    if split > last:
        return
    mine = split == last
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live, step = member < num_queries * GROUP, member // GROUP
    query_at = tl.load(line + step, mask=live, other=-1).to(tl.int32)
    related = tl.load(ancestors + row * tree_stride + step, mask=live & mine, other=0) if TREE else query_at
    position, slot, there, counts = _fresh_places(line, table, mine, num_queries, num_places, TREE)
    weights, angle = _turn(query_norm, cos, sin, query_at, num_angles, DIM, BLOCK_D, ROTARY)
    key, value, inside = _first(keys, values, table, begin, stop, lowest, pool_slot, BLOCK_N, DIM, BLOCK_D, OVERLAP)
    wait_for_inputs(OVERLAP)
    qkv += row * num_queries * qkv_row
    source = qkv + step.to(tl.int64) * qkv_row + (head * GROUP + member % GROUP) * DIM
    query = read_heads(source, live, DIM, ROTARY, BLOCK_D)
    # Asked for together with the queries, where there are any to take.
    fresh, source = tl.arange(0, FRESH).to(tl.int64), qkv + (HEADS * GROUP + head) * DIM
    fresh_key = read_heads(source + fresh * qkv_row, there, DIM, ROTARY, BLOCK_D)
    fresh_value = read_places(source + HEADS * DIM, fresh, there, qkv_row, DIM, BLOCK_D)
    query = turned(query, weights, angle, eps, DIM, query_norm is not None).to(qkv.dtype.element_ty)
    best, shares, mixed = nothing(BLOCK_M, BLOCK_N, BLOCK_D)
    if mine:
        best, shares, mixed = _take_fresh(
            query, fresh_key, fresh_value, keys, values, slot, there & (tile == 0), counts, position, key_norm, cos,
            sin, num_angles, eps, pool_slot, query_at, related, window, scale, cap, best, mixed,
            BLOCK_N, DIM, BLOCK_D, ROTARY, WINDOW, CAP, TREE,
        )  # fmt: skip
    if begin < stop:
        best, shares, mixed = _take_first(
            query, key, value, query_at, live, begin, inside, window, scale, cap, best, shares, mixed, BLOCK_N, WINDOW,
            CAP,
        )  # fmt: skip
    if begin + BLOCK_N < stop:  # not nested: that costs registers
        best, shares, mixed = walk(
            query, keys, values, table, line, query_at, query_at, begin + BLOCK_N, stop, lowest, end, pool_slot,
            pool_slot, 1, 0, window, scale, cap, best, shares, mixed, BLOCK_N, DIM, DIM, BLOCK_D, BLOCK_D, WINDOW, CAP,
            False, PAGE,
        )  # fmt: skip
    settle(
        out + row * num_queries * (HEADS * GROUP * DIM) + head * (GROUP * DIM), mixes, stats, counters,
        row * tl.num_programs(1) + tl.program_id(1), tile, split, 0, last, num_queries, best, tl.sum(shares, 1),
        mixed, live, HEADS, GROUP, DIM, BLOCK_D, BLOCK_M, SPLITS, ROWS, CHUNK,
    )  # fmt: skip


def launch_rotate_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int | None,
    softcap: float | None,
    ancestors: Tensor | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Launch the kernel: see `outrider.kernels.rotate_attend.rotate_and_attend`."""
    (rows, steps), (_, heads, dim) = positions.shape, keys.shape
    tree = positions if ancestors is None else ancestors
    assert keys.stride() == values.stride(), "the pools of keys and values must be laid out alike"
    assert steps == 1 or positions.stride(1) == tree.stride(1) == 1, "steps must lie side by side"
    group, device = num_heads // heads, qkv.device
    out = torch.empty(rows, steps, num_heads, dim, dtype=qkv.dtype, device=device)
    block_d = max(16, triton.next_power_of_2(dim))
    if tiling is None:
        size, most = max(qkv.element_size(), keys.element_size()), max(16, NUMBERS // block_d)
        places = tables.shape[1] * BLOCK_SIZE
        tiling = Tiling.choose(rows, heads, steps * group, dim, size, None, processors(device), places, most)
    tiles = -(-steps * group // tiling.block_m)
    mixes, stats, counters = scratch(tiling, rows * heads * tiles, dim, out)
    merged, chunk = merge_shape(tiling, steps * group, block_d)
    overlap = overlaps(device)
    grid = tiling.splits, heads * tiles, rows
    rotate_attend_kernel[grid](
        qkv, keys, values, tables, positions, tree, cos, sin, query_norm, key_norm, out, mixes, stats, counters,
        qkv.stride(0), *keys.stride()[:2], tables.stride(0), positions.stride(0), tree.stride(0), steps,
        tables.shape[1] * BLOCK_SIZE, cos.shape[0], window or 0,
        scale * LOG2E if softcap is None else 2 * scale * LOG2E / softcap, (softcap or 0.0) * LOG2E, eps,
        HEADS=heads, GROUP=group, DIM=dim, BLOCK_D=block_d, ROTARY=2 * cos.shape[1], BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, SPLITS=tiling.splits, MIN_BLOCKS=tiling.min_blocks, ROWS=merged, CHUNK=chunk,
        WINDOW=window is not None, CAP=softcap is not None, TREE=ancestors is not None, OVERLAP=overlap,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return out
