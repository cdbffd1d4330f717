"""From a fused query-key-value product to attention's result, for the few fresh tokens of a round, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.kernels.attention import MAX_DIM, reference_attention, stored_places
from outrider.kernels.launch import runs_kernels
from outrider.kernels.rotary import rotate_and_store_reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_FRESH", "rotate_and_attend", "rotate_and_attend_reference"]

MAX_FRESH = 16  # fresh tokens a row: one block of keys beside those in the cache


def rotate_and_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Do what `rotate_and_store` and then `paged_attention` do, for at most `MAX_FRESH` tokens a row.

    Fresh tokens are read from `qkv`, rounded as the cache rounds them, and places before ``positions[b, 0]`` from the
    cache. The latter, positions, tables and ancestors may be read before the kernel ahead has ended: all must stand
    since before the pass.

    Args:
        qkv: ``[B*T, (H + 2*Hkv) * D]``: query heads, then key heads, then value heads, of size D all.
        keys: ``[slots, Hkv, D]``; the fresh tokens' are written in place.
        values: The same, and laid out alike.
        tables: Blocks of each row, int64 ``[B, blocks]``; see `rotate_and_store` and `paged_attention`.
        positions: Of each token, int64 ``[B, T]``, not negative. In a chain each is one above the one before, or the
            same: of tokens of one place the last one counts.
        cos: fp32 ``[P, R/2]``, contiguous: the angles of each position.
        sin: The same.
        num_heads: H.
        query_norm: Weight ``[D]`` of an RMSNorm over each query head before it rotates (Qwen3).
        key_norm: The same for key heads.
        eps: The norms' epsilon.
        scale: Factor of the scores.
        window: A query sees this many positions at most, its own included.
        softcap: Scores become ``tanh(score / softcap) * softcap``.
        ancestors: For a tree of fresh tokens, int64 ``[B, T]``, as in `paged_attention`: token i is stored at place
            ``positions[b, 0] + i`` and turned by ``positions[b, i]``.

    Returns:
        ``[B, T, H, D]``, contiguous, of qkv's dtype.

    Raises:
        ValueError: The shapes do not fit together, or are more than the kernel takes.
    """
    _check(qkv, keys, values, tables, positions, num_heads, window, ancestors)
    how: dict[str, Any] = {"num_heads": num_heads, "query_norm": query_norm, "key_norm": key_norm, "eps": eps}
    how |= {"scale": scale, "window": window, "softcap": softcap, "ancestors": ancestors}
    if not runs_kernels(qkv):
        return rotate_and_attend_reference(qkv, keys, values, tables, positions, cos, sin, **how)
    from outrider.kernels.jit.rotate_attend import launch_rotate_attend

    return launch_rotate_attend(qkv, keys, values, tables, positions, cos, sin, **how)


def rotate_and_attend_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Do what `rotate_and_attend` does, in plain torch."""
    query = rotate_and_store_reference(
        qkv, tables, stored_places(positions, ancestors), positions, cos, sin, keys, values,
        num_heads=num_heads, query_norm=query_norm, key_norm=key_norm, eps=eps,
    )  # fmt: skip
    return reference_attention(
        query, keys, values, tables, positions, scale=scale, window=window, softcap=softcap, ancestors=ancestors
    )


def _check(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    num_heads: int,
    window: int | None,
    ancestors: Tensor | None,
) -> None:
    (rows, steps), (_, heads, dim) = positions.shape, keys.shape
    if values.shape != keys.shape or num_heads % heads or qkv.shape != (rows * steps, (num_heads + 2 * heads) * dim):
        raise ValueError(
            f"{rows} rows of {steps} tokens and {num_heads} heads: qkv {[*qkv.shape]}, "
            f"keys {[*keys.shape]} and values {[*values.shape]} do not fit"
        )
    if steps > MAX_FRESH or dim > MAX_DIM:
        raise ValueError(f"{steps} tokens and heads of {dim} numbers: at most {MAX_FRESH} and {MAX_DIM} are supported")
    if tables.shape[0] != rows or (ancestors is not None and ancestors.shape != positions.shape):
        raise ValueError(f"{rows} rows of {steps} tokens: tables or ancestors do not fit")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} sees nothing")
