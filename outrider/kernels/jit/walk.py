"""How a split of a row's places is found, and walked with a running maximum and sum.

FlashAttention, https://arxiv.org/abs/2205.14135; split over keys as in Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

import triton.language as tl

from outrider.kernels.jit.device_function import device_function
from outrider.kernels.jit.merge import NEVER
from outrider.kernels.jit.overlap import ask_ahead

__all__ = ["absorb", "ask", "borders", "nothing", "read_places", "walk"]


@device_function
def borders(
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


@device_function
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


@device_function
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


@device_function
def ask(
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


@device_function
def nothing(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Begin a walk: maximum [M], weights [M, N], summed at the end, and weighted values [M, DV]."""
    best = tl.full([BLOCK_M], NEVER, tl.float32)
    shares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return best, shares, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)


@device_function
def absorb(query, key, value, seen, best, mixed, scale, cap, CAP: tl.constexpr):
    """Attend to one more block of keys, whose hidden values are zero.

    Returns (maximum [M], what is left of earlier sums [M], the block's weights [M, N], weighted values [M, DV]), the
    last two relative to the maximum.
    """
    scores = _capped(tl.dot(query, tl.trans(key), input_precision="ieee"), scale, cap, CAP)
    scores = tl.where(seen, scores, float("-inf"))
    # A row that sees nothing here keeps its bits: the maximum stays, exp2(0) is 1, and zeros are added.
    new = tl.maximum(best, tl.max(scores, 1))
    keep = tl.exp2(best - new)
    weights = tl.exp2(scores - new[:, None])
    mixed = tl.dot(weights.to(value.dtype), value, mixed * keep[:, None], input_precision="ieee")
    return new, keep, weights, mixed


@device_function
def read_places(pool, slot, inside, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load D numbers from each slot of a pool.

    Places that nobody sees hold anything, NaN too: 0 * NaN must not enter a sum, so they become zeros.
    """
    dim = tl.arange(0, BLOCK_D)
    kept = inside[:, None]
    if BLOCK_D > D:
        kept = kept & (dim < D)[None, :]
    return tl.load(pool + slot[:, None] * stride + dim[None, :], mask=kept, other=0.0)


@device_function
def walk(
    query, keys, values, table, line, query_at, ancestors, begin, stop, lowest, end,
    key_stride, value_stride, position_stride, num_queries, window, scale, cap, best, shares, mixed,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Walk the places begin..stop from what `nothing` or an earlier walk gave, and give the like."""
    ahead = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + ahead // PAGE, mask=(ahead >= lowest) & (ahead < end), other=0)
    for low in range(begin, stop, BLOCK_N):
        place = low + tl.arange(0, BLOCK_N)
        inside = (place >= lowest) & (place < end)
        slot = block * PAGE + place % PAGE
        # A table entry is fetched one step before the keys that it points to: no load waits for another.
        ahead = place + BLOCK_N
        block = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        key = read_places(keys, slot, inside, key_stride, D, BLOCK_D).to(query.dtype)
        seen = _seen(place, query_at, ancestors, line, position_stride, num_queries, window, WINDOW, TREE)
        value = read_places(values, slot, inside, value_stride, DV, BLOCK_DV)
        seen = seen & inside[None, :]
        best, keep, weights, mixed = absorb(query, key, value, seen, best, mixed, scale, cap, CAP)
        shares = shares * keep[:, None] + weights  # summed once across the warps, not each step
    return best, shares, mixed
