"""Rotary embedding, query and key norm, and the cache write, in one pass over what the fused product gave.

A program takes a few heads of one token, all of one kind. A head is loaded twice, the second time with the halves
swapped that rotate into each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.attention import BLOCK_SIZE
from outrider.kernels.jit.device_function import device_function
from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.launch import overlaps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["angles", "launch_rotate", "norm_weights", "read_heads", "rotate_kernel", "turned", "write_heads"]

NUMBERS = 512  # a program: of two bytes each, that is two 16-byte loads for every thread of one warp
BLOCK = tl.constexpr(BLOCK_SIZE)


@device_function
def norm_weights(norm, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a norm's weight, as `read_heads` loads heads. It never changes: the kernels before need not be done."""
    dim = tl.arange(0, BLOCK_D)
    plain = tl.full((BLOCK_D,), 1.0, tl.float32)
    swapped = plain
    if norm is not None:
        plain = tl.load(norm + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        swapped = tl.load(norm + (dim + ROTARY // 2) % ROTARY, mask=dim < ROTARY, other=0.0).to(tl.float32)
    return plain, swapped


@device_function
def angles(cos, sin, row, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of the tables, for whole heads: what does not turn gets 1 and 0. They never change, either."""
    dim = tl.zeros((row.shape[0], 1), tl.int32) + tl.arange(0, BLOCK_D)[None, :]
    at = row[:, None] * (ROTARY // 2) + dim % (ROTARY // 2)
    c = tl.load(cos + at, mask=dim < ROTARY, other=1.0)
    s = tl.load(sin + at, mask=dim < ROTARY, other=0.0)
    return c, tl.where(dim < ROTARY // 2, -s, s)


@device_function
def read_heads(source, there, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the heads at these addresses, as they are and with the rotating halves swapped.

    So no number has to go from one thread to another when they turn.
    """
    dim = tl.zeros((source.shape[0], 1), tl.int32) + tl.arange(0, BLOCK_D)[None, :]
    plain = tl.load(source[:, None] + dim, mask=there[:, None] & (dim < DIM), other=0.0)
    swapped = source[:, None] + (dim + ROTARY // 2) % ROTARY
    return plain, tl.load(swapped, mask=there[:, None] & (dim < ROTARY), other=0.0)


@device_function
def turned(heads, weights, angle, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotate what `read_heads` gave: fp32."""
    plain, swapped = heads[0].to(tl.float32), heads[1].to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(plain * plain, 1) / DIM + eps)[:, None]
        plain, swapped = plain * scale * weights[0][None, :], swapped * scale * weights[1][None, :]
    return plain * angle[0] + swapped * angle[1]


@device_function
def write_heads(heads, out, there, DIM: tl.constexpr):
    """Store heads at these addresses."""
    dim = tl.arange(0, heads.shape[1])[None, :]
    tl.store(out[:, None] + dim, heads.to(out.dtype.element_ty), mask=there[:, None] & (dim < DIM))


@device_function
def _slot(table, place, num_blocks):
    """Find where a token is stored; behind the table's end, in its last block."""
    return tl.load(table + tl.minimum(place // BLOCK, num_blocks - 1)) * BLOCK + place % BLOCK


@triton.jit(do_not_specialize=["num_steps", "num_blocks", "table_row", "place_row", "position_row"])
def rotate_kernel(
    qkv, tables, places, positions, cos, sin, keys, values, query_norm, key_norm, queries, eps,
    num_steps, num_blocks, num_angles, qkv_row, table_row, place_row, position_row, pool_slot, pool_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr,
    GROUP: tl.constexpr, OVERLAP: tl.constexpr,
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
        weights = norm_weights(query_norm, DIM, ROTARY, BLOCK_D)
        at = tl.minimum(tl.load(positions + row * position_row + step), num_angles - 1)
        angle = angles(cos, sin, at + tl.zeros_like(head), ROTARY, BLOCK_D)
        wait_for_inputs(OVERLAP)
        heads = read_heads(qkv + head * DIM, head < HEADS, DIM, ROTARY, BLOCK_D)
        heads = turned(heads, weights, angle, eps, DIM, query_norm is not None)
        write_heads(heads, queries + token * (HEADS * DIM) + head * DIM, head < HEADS, DIM)
    elif group < value_begin:
        weights = norm_weights(key_norm, DIM, ROTARY, BLOCK_D)
        at = tl.minimum(tl.load(positions + row * position_row + step), num_angles - 1)
        angle = angles(cos, sin, at + tl.zeros_like(head), ROTARY, BLOCK_D)
        slot = _slot(tables + row * table_row, tl.load(places + row * place_row + step), num_blocks)
        wait_for_inputs(OVERLAP)
        heads = read_heads(qkv + HEADS * DIM + head * DIM, head < KV_HEADS, DIM, ROTARY, BLOCK_D)
        heads = turned(heads, weights, angle, eps, DIM, key_norm is not None)
        write_heads(heads, keys + slot * pool_slot + head * pool_head, head < KV_HEADS, DIM)
    else:
        slot = _slot(tables + row * table_row, tl.load(places + row * place_row + step), num_blocks)
        wait_for_inputs(OVERLAP)
        dim, there = tl.arange(0, BLOCK_D)[None, :], (head < KV_HEADS)[:, None]
        source = qkv + (HEADS + KV_HEADS) * DIM + head[:, None] * DIM + dim
        plain = tl.load(source, mask=there & (dim < DIM), other=0.0)
        write_heads(plain, values + slot * pool_slot + head * pool_head, head < KV_HEADS, DIM)


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
        BLOCK_D=triton.next_power_of_2(dim),
        ROTARY=2 * cos.shape[1],
        GROUP=group,
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return queries
