"""The end of a round on a device: judge the guesses, append what is taken, and pack what the host wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.kernels.launch import runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accept_and_commit", "accept_and_commit_reference", "pack_and_commit"]


def accept_and_commit(
    choice: Tensor,
    best: Tensor,
    guesses: Tensor,
    guess_lengths: Tensor,
    index: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor,
) -> Tensor:
    """Keep guesses while they equal the choice, and append the choice as far as they do and one token more.

    A row commits ``clamp(limit - length, 0, accepted + 1)`` tokens: never beyond its limit, nor the buffer. The last
    slot is the idle one, which pads a pass: it commits nothing, and any number of rows may name it; no two rows may
    name another slot.

    Args:
        choice: What the target takes at each place, int64 ``[B, K+1]``.
        best: Its logits, fp32 ``[B, K+1]``; NaN marks logits that are broken.
        guesses: int64 ``[B, K]``; K may be 0.
        guess_lengths: Guesses that count, int64 ``[B]``, at most K.
        index: Each row's slot, int64 ``[B]``.
        tokens: int64 ``[S, W]``, written in place.
        lengths: int64 ``[S]``, written in place.
        limits: The length at which each slot is full, int64 ``[S]``.

    Returns:
        int64 ``[B, K+4]``: the choice (K+1 ids), guesses accepted (whatever the limit), guesses that counted, and 1
        where a committed token's logit is NaN.
    """
    if not runs_kernels(choice):
        return accept_and_commit_reference(choice, best, guesses, guess_lengths, index, tokens, lengths, limits)
    from outrider.kernels.jit.tail import launch_accept

    return launch_accept(choice, best, guesses, guess_lengths, index, tokens, lengths, limits)


def accept_and_commit_reference(
    choice: Tensor,
    best: Tensor,
    guesses: Tensor,
    guess_lengths: Tensor,
    index: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor,
) -> Tensor:
    """Do what `accept_and_commit` does, in plain torch."""
    place = torch.arange(choice.shape[1], device=choice.device)
    agrees = (guesses == choice[:, :-1]) & (place[:-1] < guess_lengths[:, None])
    accepted = agrees.long().cumprod(1).sum(1)
    committed = place < _num_committed(accepted, index, tokens, lengths, limits)[:, None]
    broken = (best.isnan() & committed).any(1)
    return pack_and_commit(choice, accepted, guess_lengths, broken, index, tokens, lengths, limits)


def pack_and_commit(
    chosen: Tensor,
    accepted: Tensor,
    guess_lengths: Tensor,
    broken: Tensor,
    index: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor,
) -> Tensor:
    """Append what some verifier accepted, and pack it as `accept_and_commit` does; torch alone, graphs can hold it.

    Args:
        chosen: int64 ``[B, K+1]``, of which row b commits its first ``accepted[b] + 1``, as far as its limit allows.
        accepted: int64 ``[B]``.
        guess_lengths: int64 ``[B]``.
        broken: Rows whose tokens come from logits that are not numbers, bool or int64 ``[B]``.
        index, tokens, lengths, limits: See `accept_and_commit`.
    """
    slots, width = tokens.shape
    num_committed = _num_committed(accepted, index, tokens, lengths, limits)
    place = torch.arange(chosen.shape[1], device=chosen.device)
    committed = place < num_committed[:, None]
    # A graph has no masked write: what is not committed writes the idle slot's last token onto itself.
    idle = tokens[slots - 1, width - 1].clone()
    row = index[:, None].where(committed, slots - 1)
    column = (lengths[index][:, None] + place).where(committed, width - 1)
    tokens[row, column] = chosen.where(committed, idle)
    lengths.index_add_(0, index, num_committed)
    return torch.cat([chosen, torch.stack([accepted, guess_lengths, broken.long()], 1)], 1)


def _num_committed(accepted: Tensor, index: Tensor, tokens: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """How many tokens each row appends, ``[B]``."""
    slots, width = tokens.shape
    room = (limits.clamp(max=width) - lengths)[index].clamp(min=0)
    return torch.minimum(room, accepted + 1).masked_fill(index == slots - 1, 0)
