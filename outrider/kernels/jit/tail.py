"""Acceptance and commit of coupled verification: one small program a row, nothing handed back between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.launch import overlaps

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accept_kernel", "launch_accept"]


@triton.jit(do_not_specialize=["idle", "width", "choice_row", "best_row", "guesses_row", "tokens_row"])
def accept_kernel(
    choice,
    best,
    guesses,
    guess_lengths,
    index,
    tokens,
    lengths,
    limits,
    packed,
    idle,
    width,
    choice_row,
    best_row,
    guesses_row,
    tokens_row,
    GUESSES: tl.constexpr,
    PLACES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Judge one row, append what it commits, pack what is reported."""
    release_dependents(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    fed = place < GUESSES + 1
    slot, num_guesses = tl.load(index + row), tl.load(guess_lengths + row)
    chosen = tl.load(choice + row * choice_row + place, mask=fed, other=0)
    guess = tl.load(guesses + row * guesses_row + place, mask=place < GUESSES, other=0)
    logit = tl.load(best + row * best_row + place, mask=fed, other=0.0)
    length, limit = tl.load(lengths + slot), tl.load(limits + slot)
    agrees = (guess == chosen) & (place < num_guesses) & (place < GUESSES)
    accepted = tl.min(tl.where(agrees, PLACES, place), 0)  # the first place without a guess that agrees
    room = tl.where(slot == idle, 0, tl.maximum(tl.minimum(limit, width) - length, 0))
    num_committed = tl.minimum(room, accepted + 1)
    committed = place < num_committed
    broken = tl.max((committed & (logit != logit)).to(tl.int32), 0)  # noqa: PLR0124 - only a NaN is not itself
    tl.store(tokens + slot * tokens_row + length + place, chosen, mask=committed)
    if slot != idle:  # whose length several rows may read
        tl.store(lengths + slot, length + num_committed)
    packed += row * (GUESSES + 4)
    tl.store(packed + place, chosen, mask=fed)
    tl.store(packed + GUESSES + 1, accepted.to(tl.int64))
    tl.store(packed + GUESSES + 2, num_guesses)
    tl.store(packed + GUESSES + 3, broken.to(tl.int64))


def launch_accept(
    choice: Tensor,
    best: Tensor,
    guesses: Tensor,
    guess_lengths: Tensor,
    index: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    limits: Tensor,
) -> Tensor:
    """Launch `accept_kernel`: see `outrider.kernels.tail.accept_and_commit`."""
    rows, num_guesses = guesses.shape
    packed = torch.empty(rows, num_guesses + 4, dtype=torch.long, device=choice.device)
    overlap = overlaps(choice.device)
    accept_kernel[(rows,)](
        choice,
        best,
        guesses if num_guesses else choice,  # an empty tensor has no address
        guess_lengths,
        index,
        tokens,
        lengths,
        limits,
        packed,
        tokens.shape[0] - 1,
        tokens.shape[1],
        choice.stride(0),
        best.stride(0),
        guesses.stride(0),
        tokens.stride(0),
        GUESSES=num_guesses,
        PLACES=triton.next_power_of_2(num_guesses + 1),
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return packed
