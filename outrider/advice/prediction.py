"""How much speculation can bring, from bytes and bandwidth alone: nothing here is measured.

A pass costs what it reads or what it computes, whichever takes longer. That leaves out what a host adds, what starting
kernels costs and how far a real kernel stays behind the datasheet; these hit a small draft harder than a large target,
so real speedups are lower more often than higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "Drafting",
    "Machine",
    "PassLoad",
    "best_length",
    "expected_tokens",
    "pass_seconds",
    "predicted_speedup",
    "round_seconds",
    "speedup",
]


@dataclass(frozen=True)
class Machine:
    """What computes.

    Attributes:
        bandwidth: Bytes a second that it reads from memory.
        compute: Floating-point operations a second, of dense products; None: not known, so never the limit.
    """

    bandwidth: float
    compute: float | None = None


@dataclass(frozen=True)
class PassLoad:
    """What one pass of a model reads and computes.

    Attributes:
        weights: Bytes of weights that every pass reads: all but the input embedding and experts.
        kv: Bytes of keys and values that each row's context holds.
        parameters: Numbers that each token is multiplied by.
        experts: Bytes of all experts, where there are any.
        expert_share: Share of the experts that one token visits.
    """

    weights: float
    kv: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    expert_share: float = 1.0

    def bytes_read(self, rows: int, tokens: int) -> float:
        """Bytes of a pass over `rows` rows of `tokens` tokens; experts are read where any of them goes."""
        visited = 1 - (1 - self.expert_share) ** (rows * tokens) if self.experts else 0.0
        return self.weights + self.experts * visited + self.kv * rows


@dataclass(frozen=True)
class Drafting:
    """What drafts: its pass, and whether one pass makes all guesses of a round (Medusa, a block drafter).

    `load` None: guesses cost next to nothing (lookup).
    """

    load: PassLoad | None
    at_once: bool = False

    def passes(self, num_tokens: int) -> int:
        """Passes that `num_tokens` guesses take."""
        if self.load is None or num_tokens == 0:
            return 0
        return 1 if self.at_once else num_tokens


def expected_tokens(agreement: float, num_tokens: int) -> float:
    """Tokens that a round of `num_tokens` guesses gives on average: E(k) = 1 + a + a^2 + ... + a^k.

    Each guess agrees with the chance `agreement`, whatever came before it; a round ends with a token of the target's
    own. Source: Leviathan, Kalman and Matias, 2211.17192, equation 1: (1 - a^(k+1)) / (1 - a).

    Args:
        agreement: 0 to 1.
        num_tokens: Guesses a round, k >= 0.
    """
    return math.fsum(agreement**place for place in range(num_tokens + 1))


def speedup(tokens: float, plain: float, verify: float, draft: float) -> float:
    """Tokens a second against plain decoding.

    Args:
        tokens: That a round gives, such as `expected_tokens`.
        plain: Seconds of a pass over one token a row.
        verify: Seconds of a pass over the guesses and one token more.
        draft: Seconds of drafting them.
    """
    return tokens * plain / (verify + draft)


def pass_seconds(load: PassLoad, rows: int, tokens: int, machine: Machine) -> float:
    """Seconds of a pass over `rows` rows of `tokens` tokens each: the slower of reading and computing."""
    reading = load.bytes_read(rows, tokens) / machine.bandwidth
    if machine.compute is None:
        return reading
    return max(reading, 2 * load.parameters * rows * tokens / machine.compute)


def round_seconds(target: PassLoad, drafting: Drafting, rows: int, num_tokens: int, machine: Machine) -> float:
    """Seconds of a round: (draft bytes x k + target bytes) / bandwidth, or what the arithmetic takes."""
    verify = pass_seconds(target, rows, num_tokens + 1, machine)
    return verify + _draft_seconds(drafting, rows, num_tokens, machine)


def predicted_speedup(
    agreement: float, target: PassLoad, drafting: Drafting, rows: int, num_tokens: int, machine: Machine
) -> float:
    """Speedup over plain decoding of rounds with `num_tokens` guesses for each of `rows` rows.

    Every row speculates alike; a guess agrees with the chance `agreement`.
    """
    plain, verify = (pass_seconds(target, rows, width, machine) for width in (1, num_tokens + 1))
    draft = _draft_seconds(drafting, rows, num_tokens, machine)
    return speedup(expected_tokens(agreement, num_tokens), plain, verify, draft)


def best_length(
    agreement: float, target: PassLoad, drafting: Drafting, rows: int, machine: Machine, most: int = 8
) -> tuple[int, float]:
    """The draft length of 0 to `most` with the highest predicted speedup, and that speedup; 0 where none pays."""
    found = [
        (predicted_speedup(agreement, target, drafting, rows, length, machine), -length) for length in range(most + 1)
    ]
    best, negative = max(found)
    return -negative, best


def _draft_seconds(drafting: Drafting, rows: int, num_tokens: int, machine: Machine) -> float:
    if drafting.load is None:
        return 0.0
    width = num_tokens if drafting.at_once else 1
    return drafting.passes(num_tokens) * pass_seconds(drafting.load, rows, width, machine)
