"""How the splits of an attention tile become one result."""

from __future__ import annotations

import triton.language as tl

from outrider.kernels.jit.device_function import device_function

__all__ = ["NEVER", "settle"]

NEVER = tl.constexpr(-1.0e30)  # the maximum of nothing: finite, so that no difference of two is NaN


@device_function
def _merge(
    mixes, stats, first, last, num_rows,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Add up the splits first..last of the first ROWS tile rows: (sum [ROWS], weighted values [ROWS, DV]).

    Lane c of CHUNK takes splits c, c + CHUNK and so on, in order. Splits of which a row saw nothing add zeros: more of
    them change no bit.
    """
    split, row, dim = tl.arange(0, SPLITS), tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
    live = ((split >= first) & (split <= last))[:, None] & (row < num_rows)[None, :]
    at = split[:, None] * BLOCK_M + row[None, :]
    # Other programs wrote these: read them from L2, where all meet.
    best_of = tl.load(stats + at, mask=live, other=NEVER, cache_modifier=".cg")
    total_of = tl.load(stats + SPLITS * BLOCK_M + at, mask=live, other=0.0, cache_modifier=".cg")
    best = tl.max(best_of, 0)
    total = tl.sum(total_of * tl.exp2(best_of - best[None, :]), 0)
    lane = tl.arange(0, CHUNK * ROWS)
    lane_row = lane % ROWS
    lane_best = tl.reshape(tl.broadcast_to(best[None, :], (CHUNK, ROWS)), (CHUNK * ROWS,))
    mixed = tl.zeros([CHUNK * ROWS, BLOCK_DV], tl.float32)
    for low in tl.range(first // CHUNK * CHUNK, last + 1, CHUNK, num_stages=4):
        taken = low + lane // ROWS
        kept = (taken >= first) & (taken <= last) & (lane_row < num_rows)
        place = taken * BLOCK_M + lane_row
        mix_of = tl.load(
            mixes + place[:, None] * DV + dim[None, :], mask=kept[:, None] & (dim < DV)[None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(tl.load(stats + place, mask=kept, other=NEVER, cache_modifier=".cg") - lane_best)
        mixed += mix_of * weight[:, None]
    return total, tl.sum(tl.reshape(mixed, (CHUNK, ROWS, BLOCK_DV)), 0)


@device_function
def _finish(
    out, low, num_queries, total, mixed,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Divide and write tile rows from `low` on, `out` being the KV head's; a row that saw nothing is zero."""
    member, dim = low + tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
    at = member // GROUP * (HEADS * GROUP) + member % GROUP
    share = mixed / tl.where(total > 0, total, 1.0)[:, None]
    kept = (member < num_queries * GROUP)[:, None] & (dim < DV)[None, :]
    tl.store(out + at[:, None] * DV + dim[None, :], share.to(out.dtype.element_ty), kept)


@device_function
def _leave(
    mixes, stats, split, best, total, mixed, live,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a split's share to where the merging program finds it."""
    at, dim = split * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    tl.store(stats + at, best, live)
    tl.store(stats + SPLITS * BLOCK_M + at, total, live)
    tl.store(mixes + at[:, None] * DV + dim[None, :], mixed, live[:, None] & (dim < DV)[None, :])


@device_function
def settle(
    out, mixes, stats, counters, place, tile, split, first, last, num_queries, best, total, mixed, live,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write a tile's result, or a split's share of it; the last of the splits first..last to come merges them all.

    `out` is the KV head's, and `place` the tile's number among all tiles.
    """
    if SPLITS == 1:
        _finish(out, tile * BLOCK_M, num_queries, total, mixed, BLOCK_M, HEADS, GROUP, DV, BLOCK_DV)
    elif first == last:
        _finish(out, tile * BLOCK_M, num_queries, total, mixed, BLOCK_M, HEADS, GROUP, DV, BLOCK_DV)
    else:
        mixes += place * SPLITS * BLOCK_M * DV
        stats += place * SPLITS * BLOCK_M * 2
        _leave(mixes, stats, split, best, total, mixed, live, BLOCK_M, DV, BLOCK_DV, SPLITS)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        if tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu") == last - first:
            tl.store(counters + place, 0)
            left = num_queries * GROUP - tile * BLOCK_M
            sums, blends = _merge(mixes, stats, first, last, left, BLOCK_M, BLOCK_DV, DV, SPLITS, ROWS, CHUNK)
            _finish(out, tile * BLOCK_M, num_queries, sums, blends, ROWS, HEADS, GROUP, DV, BLOCK_DV)
