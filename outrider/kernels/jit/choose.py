"""One launch from logits to tokens: every program settles a chunk of the vocabulary, the last one settles the position.

A candidate is 64 bits, its score in the high half (as an integer that orders like the float) and its id in the low
half (so that a lower id is larger): one integer maximum gives the winner, lowest id first. Each chunk shifts by its
own maximum, which no tiny temperature can overflow; the last program then scores the chunks' winners again, shifted by
the maximum of all. The chunk depends on the vocabulary alone, so a position's bits do not depend on how many there are.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from outrider.kernels.jit.device_function import device_function
from outrider.kernels.jit.overlap import release_dependents, wait_for_inputs
from outrider.kernels.launch import overlaps
from outrider.sampling import random

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_POSITIONS", "chunk_of", "launch_choose"]

MAX_POSITIONS = 1 << 16  # positions in one launch: each has a counter
PROGRAMS = 128  # a position's chunks, about: enough to fill a card with one position

GAMMA = tl.constexpr(random.GAMMA % (1 << 64))
FIRST = tl.constexpr(random.FIRST % (1 << 64))
SECOND = tl.constexpr(random.SECOND % (1 << 64))
PURPOSES = tl.constexpr(len(random.Purpose))
LARGEST_V = tl.constexpr(1 - 2.0**-24)
LAST_ID = tl.constexpr(0x7FFFFFFF)
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)  # above infinity


@device_function
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * FIRST
    bits = (bits ^ (bits >> 27)) * SECOND
    return bits ^ (bits >> 31)


@device_function
def _gumbel(key, ids):
    """`outrider.sampling.random.gumbel`: log1p by Kahan's way, since ``1 - v`` loses what a small v says."""
    bits = _mix(key + (ids.to(tl.uint64) + 1) * GAMMA) >> 32
    v = (bits.to(tl.uint32).to(tl.float32) + 0.5) * (2.0**-32)
    v = tl.minimum(v, LARGEST_V)
    rest = 1.0 - v
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, v, tl.log(rest) * tl.div_rn(v, lost))
    return -tl.log(exponential)


@device_function
def _scores(values, top, temperature, key, ids):
    """Score drawn candidates; a value that is infinite needs no noise, and none may make it NaN."""
    infinite = tl.abs(values) == float("inf")
    shifted = tl.where(infinite, 0.0, values) - top
    return tl.where(infinite, values, tl.div_rn(shifted, temperature) + _gumbel(key, ids))


@device_function
def _is_nan(x):
    return x != x  # noqa: PLR0124 - Triton has no other


@device_function
def _packed(score, ids):
    """Order candidates as integers: NaN first, then by score, then by id; -0 equals 0."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(_is_nan(score), NOT_A_NUMBER, bits)
    return (bits.to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@device_function
def _numbers_maximum(values):
    return tl.max(tl.where(_is_nan(values), float("-inf"), values), 0)


@device_function
def _settled(
    candidates, maxima, logits, position, num_chunks, temperature, key, CHUNKS: tl.constexpr, RANDOM: tl.constexpr
):
    """Find the best of the chunks' candidates; what other programs wrote is read past the first cache."""
    chunks = tl.arange(0, CHUNKS)
    there, slots = chunks < num_chunks, position * CHUNKS + chunks
    packed = tl.load(candidates + slots, mask=there, other=-(2**63), volatile=True)
    if RANDOM:
        if temperature > 0:
            ids = (packed & LAST_ID).to(tl.int32) ^ LAST_ID
            values = tl.load(logits + ids, mask=there, other=float("-inf")).to(tl.float32)
            top = tl.max(tl.load(maxima + slots, mask=there, other=float("-inf"), volatile=True), 0)
            packed = tl.where(there, _packed(_scores(values, top, temperature, key, ids), ids), packed)
    return tl.max(packed, 0)


@triton.jit(do_not_specialize=["num_steps", "ends_row", "ends_step"])
def choose_kernel(
    logits,
    temperatures,
    seeds,
    ends,
    candidates,
    maxima,
    counters,
    out_ids,
    out_best,
    num_steps,
    size,
    logits_row,
    logits_step,
    ends_row,
    ends_step,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PURPOSE: tl.constexpr,
    RANDOM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Settle a chunk of one position; done last, settle the position."""
    release_dependents(OVERLAP)
    wait_for_inputs(OVERLAP)
    position, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, step = position // num_steps, position % num_steps
    logits += row.to(tl.int64) * logits_row + step.to(tl.int64) * logits_step
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    score, temperature, key = values, 0.0, tl.full((), 0, tl.uint64)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        end = tl.load(ends + row * ends_row + step * ends_step).to(tl.uint64)
        key = tl.load(seeds + row).to(tl.uint64) + end * PURPOSES + PURPOSE
        key = _mix(_mix(key) + GAMMA)
        if temperature > 0:
            top = _numbers_maximum(values)
            tl.store(maxima + position * CHUNKS + chunk, top)
            score = _scores(values, top, temperature, key, ids)
    best = tl.max(_packed(score, ids), 0)
    tl.store(candidates + position * CHUNKS + chunk, best)
    tl.debug_barrier()
    if tl.atomic_add(counters + position, 1, sem="acq_rel") == num_chunks - 1:
        winner = _settled(candidates, maxima, logits, position, num_chunks, temperature, key, CHUNKS, RANDOM)
        taken = (winner & LAST_ID).to(tl.int32) ^ LAST_ID
        tl.store(out_ids + position, taken.to(tl.int64))
        tl.store(out_best + position, tl.load(logits + taken).to(tl.float32))
        tl.store(counters + position, 0)


@cache
def _counters(device: torch.device) -> Tensor:
    """Make the counters of a device once: each launch leaves them at zero. Launches share them, so one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("choose_tokens must run once on a device before a CUDA graph captures it")
    return torch.zeros(MAX_POSITIONS, dtype=torch.int32, device=device)


def chunk_of(size: int) -> int:
    """How many ids one program looks at, by the vocabulary's size alone."""
    chunk: int = triton.next_power_of_2(-(-size // PROGRAMS))
    return min(max(chunk, 256), 2048)


def launch_choose(
    logits: Tensor, temperature: Tensor, seeds: Tensor, ends: Tensor, purpose: int, *, random: bool
) -> tuple[Tensor, Tensor]:
    """Launch `choose_kernel`: see `outrider.kernels.choose.choose_tokens`."""
    rows, steps, size = logits.shape
    device, positions, chunk = logits.device, rows * steps, chunk_of(size)
    assert positions <= MAX_POSITIONS, "too many positions for one launch"
    num_chunks = -(-size // chunk)
    chunks = triton.next_power_of_2(num_chunks)
    ids = torch.empty(rows, steps, dtype=torch.long, device=device)
    best = torch.empty(rows, steps, dtype=torch.float32, device=device)
    overlap = overlaps(device)
    choose_kernel[(positions, num_chunks)](
        logits,
        temperature.contiguous(),
        seeds.contiguous(),
        ends,
        torch.empty(positions * chunks, dtype=torch.long, device=device),
        torch.empty(positions * chunks, dtype=torch.float32, device=device),
        _counters(device),
        ids,
        best,
        steps,
        size,
        *logits.stride()[:2],
        *ends.stride(),
        CHUNK=chunk,
        CHUNKS=chunks,
        PURPOSE=purpose,
        RANDOM=random,
        OVERLAP=overlap,
        num_warps=chunk // (128 if random else 256),  # noise takes long: more warps hide it
        launch_pdl=overlap,
    )
    return ids, best
