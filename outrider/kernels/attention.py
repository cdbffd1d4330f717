"""Attention of fresh queries over the paged cache: chains and trees, windows, soft-caps, grouped heads.

Keys and values of the fresh tokens are in the cache before this is called. Positions alone decide what a query of a
chain sees; a tree's fresh tokens see each other by an ancestor mask. The kernel's work follows each row's real length,
read on the device, so one captured graph serves every context length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.kernels.launch import runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BLOCK_SIZE",
    "MAX_DIM",
    "MAX_TREE",
    "Tiling",
    "paged_attention",
    "power_of_2",
    "reference_attention",
    "seen_places",
    "slots_of",
    "stored_places",
]

BLOCK_SIZE = 16  # slots a block of the cache
MAX_DIM = 256  # numbers a head that one tile holds
MAX_TREE = 64  # bits of an ancestor mask
EXACT_BLOCK_M = 32  # one tile shape for all calls in exact mode: 8 queries of 4 grouped heads
PROGRAMS_PER_SM = 2
SPLITS = (16, 8, 4, 1)  # few kinds: each is compiled by itself, and as many as fit would gain little
LONG = 8192  # places from which on the most splits pay: below, programs without work cost more than they bring


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: tile rows, places a step, splits of the places, and the fewest steps a split takes."""

    block_m: int
    block_n: int
    splits: int
    min_blocks: int
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(
        cls,
        rows: int,
        heads: int,
        members: int,
        width: int,
        itemsize: int,
        fixed_length: int | None,
        processors: int,
        places: int,
        most_rows: int = 64,
    ) -> Tiling:
        """Fill the card about `PROGRAMS_PER_SM` times over.

        Programs are rounded up to a power of two for each KV head, so that all kinds are met by a few passes at start.

        Args:
            rows: Rows in the call; without effect in exact mode.
            heads: KV heads.
            members: Queries a row times heads a group; without effect in exact mode.
            width: The wider of key and value dimensions.
            itemsize: Bytes a number of the cache.
            fixed_length: See `paged_attention`.
            processors: Streaming multiprocessors of the card.
            places: What a row's table holds: the longest context there may be.
            most_rows: The most tile rows that fit; without effect in exact mode.
        """
        block_m = EXACT_BLOCK_M if fixed_length is not None else min(most_rows, max(16, power_of_2(members)))
        if itemsize > 2:
            block_m = 16  # fp32 products have no tensor cores: keep their operands in registers
        block_n = max(16, min(64, 16384 // (power_of_2(width) * itemsize)))
        programs = heads if fixed_length is not None else heads * power_of_2(rows * -(-members // block_m))
        wanted = max(1, PROGRAMS_PER_SM * processors // programs)
        allowed = SPLITS if places >= LONG else SPLITS[1:]
        splits = next((few for few in allowed if few <= 2 * wanted), 1)
        return cls(block_m, block_n, splits, 1 if block_m == 16 else 2)


def power_of_2(least: int) -> int:
    """Give the smallest one that is not below `least`."""
    return 1 << (least - 1).bit_length()


def slots_of(tables: Tensor, places: Tensor) -> Tensor:
    """Where places ``[B, T]`` of rows with these tables ``[B, blocks]`` are kept: ``[B, T]``.

    What is behind a table's end is in its last block.
    """
    block = (places // BLOCK_SIZE).clamp(max=tables.shape[1] - 1)
    return tables.gather(1, block) * BLOCK_SIZE + places % BLOCK_SIZE


def stored_places(positions: Tensor, ancestors: Tensor | None) -> Tensor:
    """Where fresh tokens at these positions ``[B, T]`` are stored: at places of those numbers, trees side by side."""
    if ancestors is None:
        return positions
    return positions[:, :1] + torch.arange(positions.shape[1], device=positions.device)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
    fixed_length: int | None = None,
) -> Tensor:
    """Softmax attention of T fresh queries a row over what the row's blocks hold.

    Place p of row b is slot ``tables[b, p // 16] * 16 + p % 16``. Places beyond what a row's last query sees may hold
    anything, NaN too. Head h reads KV head ``h // (H // Hkv)``. Calls on two CUDA streams at once are not supported:
    they share their counters.

    Args:
        query: ``[B, T, H, D]``, any strides but the last one's.
        keys: ``[slots, Hkv, D]``.
        values: ``[slots, Hkv, Dv]``.
        tables: Blocks of each row, int64 ``[B, blocks]``; places beyond them are never read.
        positions: Position of each query, int64 ``[B, T]``; in a chain they do not fall along a row.
        scale: Factor of the scores.
        window: A query sees this many positions at most, its own included.
        softcap: Scores become ``tanh(score / softcap) * softcap``.
        ancestors: For a tree of fresh tokens, int64 ``[B, T]``: bit i says that the query sees fresh token i, itself
            included. Token i is kept at place ``positions[b, 0] + i``, while its position is ``positions[b, i]``, by
            its depth; every place below ``positions[b, 0]`` is seen. T is at most 64.
        fixed_length: Exact mode: at least the longest length there may be. A query's bits then depend on its position
            and on what it sees, not on how many queries or rows share the call. In a tree they also depend on where
            its ancestors are kept.

    Returns:
        ``[B, T, H, Dv]``, contiguous, in the query's dtype. A query that sees nothing gets zeros.

    Raises:
        ValueError: The shapes do not fit together, or are more than a tile holds.
    """
    _check(query, keys, values, tables, positions, ancestors, window)
    if not runs_kernels(query):
        return reference_attention(
            query, keys, values, tables, positions,
            scale=scale, window=window, softcap=softcap, ancestors=ancestors, fixed_length=fixed_length,
        )  # fmt: skip
    from outrider.kernels.jit.attention import attend_paged

    return attend_paged(
        query, keys, values, tables, positions, page=BLOCK_SIZE,
        scale=scale, window=window, softcap=softcap, ancestors=ancestors, fixed_length=fixed_length,
    )  # fmt: skip


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    window: int | None,
) -> None:
    rows, steps, heads, dim = query.shape
    if keys.shape[2] != dim or heads % keys.shape[1] or values.shape[:2] != keys.shape[:2]:
        raise ValueError(f"queries {[*query.shape]}, keys {[*keys.shape]} and values {[*values.shape]} do not fit")
    if tables.shape[0] != rows or positions.shape != (rows, steps):
        raise ValueError(f"{rows} rows of {steps} queries, tables {[*tables.shape]}, positions {[*positions.shape]}")
    if max(dim, values.shape[2]) > MAX_DIM:
        raise ValueError(f"heads of {dim} and {values.shape[2]} numbers: at most {MAX_DIM} are supported")
    if {query.stride(3), keys.stride(2), values.stride(2), tables.stride(1)} != {1}:
        raise ValueError("the last dimension of queries, keys, values and tables must be contiguous")
    if ancestors is not None and (ancestors.shape != positions.shape or steps > MAX_TREE):
        raise ValueError(f"ancestors {[*ancestors.shape]} of {rows} trees of {steps}: at most {MAX_TREE} tokens")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} sees nothing")


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
    fixed_length: int | None = None,  # noqa: ARG001 - every query is computed over the whole table
) -> Tensor:
    """What `paged_attention` computes, in plain torch and fp32. Its cost follows the width of `tables`."""
    rows, steps, heads, _ = query.shape
    groups = keys.shape[1]
    place = torch.arange(tables.shape[1] * BLOCK_SIZE, device=query.device)
    seen = seen_places(place, positions, window, ancestors)
    visible = seen.any(1)
    slots = tables.repeat_interleave(BLOCK_SIZE, 1) * BLOCK_SIZE + place % BLOCK_SIZE
    slots = slots.where(visible, 0)
    hidden = ~visible[..., None, None]
    key = keys[slots].float().masked_fill(hidden, 0)
    value = values[slots].float().masked_fill(hidden, 0)
    folded = query.float().reshape(rows, steps, groups, heads // groups, -1)
    scores = torch.einsum("bthgd,blhd->bthgl", folded, key) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    shown = seen[:, :, None, None]
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).masked_fill(~shown, 0)
    return torch.einsum("bthgl,blhd->bthgd", weights, value).reshape(rows, steps, heads, -1).to(query.dtype)


def seen_places(place: Tensor, positions: Tensor, window: int | None, ancestors: Tensor | None) -> Tensor:
    """Which of the places ``[L]`` each query sees: bool ``[B, T, L]``."""
    query = positions[..., None]
    if ancestors is None:
        position = place.expand(len(positions), 1, -1)
        seen = position <= query
    else:
        start, steps = positions[:, :1, None], positions.shape[1]
        node = place - start
        related = ancestors[..., None] >> node.clamp(0, MAX_TREE - 1) & 1
        seen = (node < 0) | (related.bool() & (node < steps))
        fresh = positions.gather(1, node[:, 0].clamp(0, steps - 1))[:, None]
        position = torch.where((node >= 0) & (node < steps), fresh, place)
    if window is not None:
        seen = seen & (position > query - window)
    return seen
