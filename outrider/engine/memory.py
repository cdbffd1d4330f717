"""How much cache there can be: from a budget to blocks, and to the longest sequence that fits."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.errors import CapacityError
from outrider.model.facts import require_context
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, blocks_for

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.model.runner import TorchRunner

__all__ = [
    "CHUNKS_ON_CARD",
    "GRAPH_BYTES",
    "budget_on_card",
    "budget_on_cpu",
    "fitted",
    "free_memory",
    "pool_tokens",
    "score_bytes",
    "sized",
    "working_bytes",
]

logger = logging.getLogger("outrider")
CPU_SHARE = 0.25  # of the memory that is free, where no budget is given
SCORE_BYTES = 32  # a logit under every rule at once: fp32 scores and noise, sorted copies with their ids, masks
CHUNKS_ON_CARD = 2  # captured prompts keep a chunk's memory for themselves
GRAPH_BYTES = 1 << 29  # captured rounds: their launches, and what they keep between them


def sized(
    config: EngineConfig,
    context_length: int,
    bytes_per_slot: int,
    lookahead: int,
    device: torch.device,
    *,
    working: int = 0,
) -> tuple[EngineConfig, int]:
    """Fix ``max_model_len`` and the number of cache blocks.

    Args:
        config: What was asked for.
        context_length: Positions that the target was made for.
        bytes_per_slot: Bytes a cached token takes, in target and draft together.
        lookahead: Guesses that need room behind a full sequence.
        device: Where the cache will live.
        working: Bytes that passes and captured rounds need besides weights and cache.

    Raises:
        ConfigError: `max_model_len` is beyond the model's context.
        CapacityError: The budget does not hold one sequence of that length; the message says what would fit.
    """
    budget = _budget(config, device, working)
    made, blocks = fitted(config, context_length, bytes_per_slot, lookahead, budget)
    length, wanted = made.max_model_len, config.max_model_len or context_length
    if length != wanted:
        logger.warning("max_model_len is %d, not the model's %d: no more fits into the KV budget", length, wanted)
    return made, blocks


def fitted(
    config: EngineConfig, context_length: int, bytes_per_slot: int, lookahead: int, budget: int
) -> tuple[EngineConfig, int]:
    """Fix ``max_model_len`` and the number of cache blocks, for a budget of bytes; all else is as for `sized`."""
    require_context(config.max_model_len, context_length)
    longest = config.max_model_len or context_length
    blocks = pool_tokens(budget, bytes_per_slot) // BLOCK_SIZE
    room = lookahead if config.exact else 0  # exact mode reserves a sequence's guesses too
    fits = max(0, blocks * BLOCK_SIZE - room)
    if fits < 2:
        least = bytes_per_slot * BLOCK_SIZE * (RESERVED + blocks_for(longest + room))
        raise CapacityError(
            f"a KV budget of {budget} bytes holds no sequence at all; {least} would hold one of {longest} tokens: "
            "raise kv_cache_bytes (or gpu_memory_utilization)"
        )
    if config.max_model_len is not None and fits < longest:
        raise CapacityError(
            f"a KV budget of {budget / 2**20:.1f} MiB holds {fits} tokens at {bytes_per_slot} bytes each, "
            f"but max_model_len is {longest}; raise kv_cache_bytes (or gpu_memory_utilization), or set "
            f"max_model_len={fits} or less"
        )
    longest = min(longest, fits)
    most_useful = config.max_num_seqs * blocks_for(longest + lookahead)
    return replace(config, max_model_len=longest), min(blocks, most_useful) + RESERVED


def pool_tokens(budget: int, bytes_per_slot: int) -> int:
    """Tokens that a budget of bytes holds, in whole blocks, those that belong to nobody taken off."""
    return max(0, budget // (bytes_per_slot * BLOCK_SIZE) - RESERVED) * BLOCK_SIZE


def working_bytes(runners: list[TorchRunner], config: EngineConfig, lookahead: int) -> int:
    """Measure what passes need besides weights and cache: a chunk of a prompt, a round's scores, captured rounds.

    0 on a CPU, where memory is not shared out beforehand.
    """
    if runners[0].device.type != "cuda":
        return 0
    chunk = max(runner.activation_bytes(config.prefill_chunk_size) for runner in runners)
    return CHUNKS_ON_CARD * chunk + score_bytes(config, lookahead, runners[0].vocab_size) + GRAPH_BYTES


def score_bytes(config: EngineConfig, lookahead: int, vocab_size: int) -> int:
    """Bytes of a round's logits under every rule at once."""
    return config.max_num_seqs * (lookahead + 1) * vocab_size * SCORE_BYTES


def _budget(config: EngineConfig, device: torch.device, working: int) -> int:
    """Bytes for keys and values."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return budget_on_card(config, free, total, working)
    return budget_on_cpu(free_memory())


def budget_on_card(config: EngineConfig, free: int, total: int, working: int) -> int:
    """Bytes for keys and values on a card: what its share leaves beside all that is in use and the working memory."""
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - working)


def budget_on_cpu(free: int) -> int:
    """Bytes for keys and values beside a CPU, of `free` bytes of main memory."""
    return int(free * CPU_SHARE)


def free_memory() -> int:
    """Bytes of main memory that can be had: free, or held by caches that give way."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
