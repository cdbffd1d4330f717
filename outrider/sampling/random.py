"""Counter-based randomness: every number is a pure function of (seed, absolute position, purpose, token id).

No generator holds state, so batch mates, round borders, draft lengths and preemption cannot shift a request's
randomness. The stream for one (seed, position, purpose) is SplitMix64 (Steele, Lea, Flood 2014), entered at the
token's id: ``mix(key + id * gamma)``.
"""

from __future__ import annotations

from enum import IntEnum

import torch

__all__ = ["Purpose", "gumbel", "mixed_seed", "round_seeds", "uniform"]


def _signed(value: int) -> int:
    """Read 64 bits as torch's signed integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a number is for; two purposes never share one."""

    CHOICE = 0  # the target's own choice, and under coupled verification the draft's guess at the same position
    GUESS = 1  # a guess drawn independently of the target's choice (rejection and block verification)
    ACCEPT = 2  # the coin of an acceptance test
    RECOVER = 3  # the draw from a residual distribution


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift(bits, 30)) * FIRST
    bits = (bits ^ _shift(bits, 27)) * SECOND
    return bits ^ _shift(bits, 31)


def mixed_seed(seed: int, sample: int = 0) -> int:
    """Turn a user's seed and a sample's index into the 64 bits that key its streams."""
    key = torch.tensor([_signed(seed % (1 << 64))], dtype=torch.long)
    return int(_mix(_mix(key + GAMMA) + _signed(sample * GAMMA % (1 << 64))).item())


def round_seeds(seeds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Give seeds for one round alone, by the length ``[B]`` that each row had before it.

    Where a round's outcome depends on guesses and coins behind the place at which it stopped (block verification), the
    next round must not meet the same numbers there again.
    """
    return _mix(seeds + _mix(lengths * GAMMA + GAMMA))


def _keys(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Key a stream for every position: ``[B]`` and ``[B, T]`` -> ``[B, T]``."""
    return _mix(_mix(seeds[:, None] + positions * len(Purpose) + int(purpose)) + GAMMA)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Draw one number in the open interval (0, 1) a position: ``[B]``, ``[B, T]`` -> fp32 ``[B, T]``."""
    bits = _shift(_mix(_keys(seeds, positions, purpose) + GAMMA), 41)  # 23 bits and a half: neither 0 nor 1 can come
    return (bits.float() + 0.5) * 2.0**-23


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose, tokens: torch.Tensor | int) -> torch.Tensor:
    """Draw Gumbel(0, 1) noise: for all ids below an int V -> fp32 ``[B, T, V]``, or for ids ``[B, T, M]`` alone.

    ``-log(-log(u))`` with ``u = 1 - v`` and v drawn on 32 bits: the noise that decides (the largest) comes from small
    v, where fp32 is finest.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, device=seeds.device)
    keys = _keys(seeds, positions, purpose)
    bits = _shift(_mix(keys[..., None] + (tokens + 1) * GAMMA), 32)
    v = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
