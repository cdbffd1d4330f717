"""From a fused query-key-value product to what attention reads: rotated queries, and keys and values in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.kernels.attention import slots_of
from outrider.kernels.launch import runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotate_and_store", "rotate_and_store_reference"]


def rotate_and_store(
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
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norm and rotate queries and keys (Su et al. 2021, 2104.09864), and write keys and values into the cache.

    The first R numbers of a head rotate by halves, ``(a, b) -> (a cos - b sin, b cos + a sin)``; the rest pass. All
    in fp32, rounded once. Of several tokens that name one slot, any may end there.

    Args:
        qkv: ``[B*T, (H + 2*Hkv) * D]``: query heads, then key heads, then value heads, of size D all.
        tables: Blocks of each row, int64 ``[B, blocks]``, of 16 slots each.
        places: Where each token is stored, int64 ``[B, T]``: in slot ``tables[b, p // 16] * 16 + p % 16``; behind the
            table's end, in its last block.
        positions: What each token's angle is, int64 ``[B, T]``; behind the tables' end, the last one's.
        cos: fp32 ``[P, R/2]``, contiguous.
        sin: The same.
        keys: ``[slots, Hkv, D]``, written in place.
        values: The same, and laid out alike.
        num_heads: H.
        query_norm: Weight ``[D]`` of an RMSNorm over each query head before it rotates (Qwen3).
        key_norm: The same for key heads.
        eps: The norms' epsilon.

    Returns:
        Rotated queries, ``[B, T, H, D]``, contiguous, of qkv's dtype.
    """
    if runs_kernels(qkv):
        from outrider.kernels.jit.rotary import launch_rotate

        run = launch_rotate
    else:
        run = rotate_and_store_reference
    return run(
        qkv,
        tables,
        places,
        positions,
        cos,
        sin,
        keys,
        values,
        num_heads=num_heads,
        query_norm=query_norm,
        key_norm=key_norm,
        eps=eps,
    )


def rotate_and_store_reference(
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
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Do what `rotate_and_store` does, in plain torch."""
    num_kv_heads, dim = keys.shape[1:]
    heads = qkv.reshape(*places.shape, -1, dim).float()
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 2)
    angle = positions.clamp(max=cos.shape[0] - 1)
    c, s = cos[angle][:, :, None], sin[angle][:, :, None]  # the same for all heads
    query = _rotated(_normed(query, query_norm, eps), c, s)
    key = _rotated(_normed(key, key_norm, eps), c, s)
    slots = slots_of(tables, places).flatten()
    keys[slots] = key.flatten(0, 1).to(keys.dtype)
    values[slots] = value.flatten(0, 1).to(values.dtype)
    return query.to(qkv.dtype)


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    low, high, rest = torch.split(heads, [size, size, heads.shape[-1] - 2 * size], -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
