"""Rotary embedding, query and key norm, and the cache write, in one pass over what the fused product gave.

A program takes a few heads of one token, all of one kind. A head is held as the two halves that rotate into each other
and the rest that does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.attention import BLOCK_SIZE
from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.launch import overlaps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["launch_rotate", "rotate_kernel"]

NUMBERS = 512  # a program: of two bytes each, that is two 16-byte loads for every thread of one warp
BLOCK = tl.constexpr(BLOCK_SIZE)


@triton.jit
def _weights(norm, DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """Load a norm's weight, as a head is held. It never changes, so the kernels before need not be done."""
    half, rest = tl.arange(0, HALF), ROTARY + tl.arange(0, REST)
    low = tl.full((HALF,), 1.0, tl.float32)
    high = low
    still = tl.full((REST,), 1.0, tl.float32)
    if norm is not None:
        low = tl.load(norm + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
        high = tl.load(norm + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
        still = tl.load(norm + rest, mask=rest < DIM, other=0.0).to(tl.float32)
    return low, high, still


@triton.jit
def _read(source, head, count, DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """Load some heads of the `count` at `source`: both halves and the rest, fp32."""
    half, rest = tl.arange(0, HALF)[None, :], ROTARY + tl.arange(0, REST)[None, :]
    there, source = (head < count)[:, None], source + (head * DIM)[:, None]
    in_half = there & (half < ROTARY // 2)
    low = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(source + ROTARY // 2 + half, mask=in_half, other=0.0).to(tl.float32)
    still = tl.zeros((head.shape[0], REST), tl.float32)
    if DIM > ROTARY:
        still = tl.load(source + rest, mask=there & (rest < DIM), other=0.0).to(tl.float32)
    return low, high, still


@triton.jit
def _turned(heads, weights, angle, cos, sin, eps, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate heads, by row `angle` of the tables, read in the halves' own layout: nothing is exchanged."""
    low, high, still = heads
    half = tl.zeros((low.shape[0], 1), tl.int32) + tl.arange(0, low.shape[1])[None, :]
    c = tl.load(cos + angle * (ROTARY // 2) + half, mask=half < ROTARY // 2, other=0.0)
    s = tl.load(sin + angle * (ROTARY // 2) + half, mask=half < ROTARY // 2, other=0.0)
    if NORM:
        squares = tl.sum(low * low + high * high, 1) + tl.sum(still * still, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low, high = low * scale * weights[0][None, :], high * scale * weights[1][None, :]
        still = still * scale * weights[2][None, :]
    return low * c - high * s, high * c + low * s, still


@triton.jit
def _write(heads, out, out_head, head, count, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Store what `_read` has loaded, where heads are `out_head` apart."""
    low, high, still = heads
    half, rest = tl.arange(0, low.shape[1])[None, :], ROTARY + tl.arange(0, still.shape[1])[None, :]
    there = (head < count)[:, None]
    kind = out.dtype.element_ty
    in_half = there & (half < ROTARY // 2)
    out += (head * out_head)[:, None]
    tl.store(out + half, low.to(kind), mask=in_half)
    tl.store(out + ROTARY // 2 + half, high.to(kind), mask=in_half)
    if DIM > ROTARY:
        tl.store(out + rest, still.to(kind), mask=there & (rest < DIM))


@triton.jit
def _slot(table, place, num_blocks):
    """Find where a token is stored; behind the table's end, in its last block."""
    return tl.load(table + tl.minimum(place // BLOCK, num_blocks - 1)) * BLOCK + place % BLOCK


@triton.jit
def rotate_kernel(
    qkv, tables, places, positions, cos, sin, keys, values, query_norm, key_norm, queries, eps,
    num_steps, num_blocks, num_angles, qkv_row, table_row, place_row, position_row, pool_slot, pool_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take a group of one token's heads: query heads first, then key heads, then value heads.

    Positions and tables stand since before the product whose output this reads began, so they need not wait.
    """
    release_dependents(OVERLAP)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, step = token // num_steps, token % num_steps
    key_begin: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    value_begin: tl.constexpr = key_begin + (KV_HEADS + GROUP - 1) // GROUP
    begin = tl.where(group < key_begin, 0, tl.where(group < value_begin, key_begin, value_begin))
    head, qkv = (group - begin) * GROUP + tl.arange(0, GROUP), qkv + token * qkv_row
    if group < key_begin:
        weights = _weights(query_norm, DIM, ROTARY, HALF, REST)
        angle = tl.minimum(tl.load(positions + row * position_row + step), num_angles - 1)
        wait_for_inputs(OVERLAP)
        heads = _read(qkv, head, HEADS, DIM, ROTARY, HALF, REST)
        heads = _turned(heads, weights, angle, cos, sin, eps, DIM, ROTARY, query_norm is not None)
        _write(heads, queries + token * (HEADS * DIM), DIM, head, HEADS, DIM, ROTARY)
    elif group < value_begin:
        weights = _weights(key_norm, DIM, ROTARY, HALF, REST)
        angle = tl.minimum(tl.load(positions + row * position_row + step), num_angles - 1)
        slot = _slot(tables + row * table_row, tl.load(places + row * place_row + step), num_blocks)
        wait_for_inputs(OVERLAP)
        heads = _read(qkv + HEADS * DIM, head, KV_HEADS, DIM, ROTARY, HALF, REST)
        heads = _turned(heads, weights, angle, cos, sin, eps, DIM, ROTARY, key_norm is not None)
        _write(heads, keys + slot * pool_slot, pool_head, head, KV_HEADS, DIM, ROTARY)
    else:
        slot = _slot(tables + row * table_row, tl.load(places + row * place_row + step), num_blocks)
        wait_for_inputs(OVERLAP)
        heads = _read(qkv + (HEADS + KV_HEADS) * DIM, head, KV_HEADS, DIM, ROTARY, HALF, REST)
        _write(heads, values + slot * pool_slot, pool_head, head, KV_HEADS, DIM, ROTARY)


def launch_rotate(
    qkv: Tensor,
    tables: Tensor,
    places: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Launch `rotate_kernel`: see `outrider.kernels.rotary.rotate_and_store`."""
    (rows, steps), (_, kv_heads, dim) = places.shape, keys.shape
    assert keys.stride() == values.stride(), "the pools of keys and values must be laid out alike"
    assert steps == 1 or places.stride(1) == positions.stride(1) == 1, "steps must lie side by side"
    rotary = 2 * cos.shape[1]
    group = min(max(NUMBERS // triton.next_power_of_2(dim), 1), 8)  # heads a program
    queries = torch.empty(rows, steps, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    overlap = overlaps(qkv.device)
    groups = triton.cdiv(num_heads, group) + 2 * triton.cdiv(kv_heads, group)
    rotate_kernel[(rows * steps, groups)](
        qkv,
        tables,
        places,
        positions,
        cos,
        sin,
        keys,
        values,
        query_norm,
        key_norm,
        queries,
        eps,
        steps,
        tables.shape[1],
        cos.shape[0],
        qkv.stride(0),
        tables.stride(0),
        places.stride(0),
        positions.stride(0),
        *keys.stride()[:2],
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTARY=rotary,
        HALF=triton.next_power_of_2(rotary // 2),
        REST=triton.next_power_of_2(max(dim - rotary, 1)),
        GROUP=group,
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return queries
