"""What an engine holds in memory, counted on the tensors that are there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outrider.model.kv_cache import BLOCK_SIZE, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.llm import LLM

__all__ = ["engine_memory", "forget_peak", "peak_bytes"]

HOLDERS = ("outrider.model", "outrider.draft", "outrider.kernels")  # whose objects hold weights
_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def engine_memory(llm: LLM) -> dict[str, int]:
    """Give bytes of the target's weights, of what drafts, and of the cache (of all that may use it).

    What several share counts once, and as the target's.
    """
    engine = llm.engine
    seen: set[int] = set()
    target = _held([llm.loaded.model, engine.runner], seen)
    draft = _held([engine.drafter], seen)
    cache: KVCache = llm.engine.runner.cache  # type: ignore[attr-defined]  # an LLM's runner is torch's
    slots = cache.num_blocks * BLOCK_SIZE
    per_slot = engine.runner.bytes_per_slot + (0 if engine.drafter is None else engine.drafter.bytes_per_slot)
    return {"weights": target, "draft_weights": draft, "kv_cache": slots * per_slot}


def _held(roots: list[Any], seen: set[int]) -> int:
    """Add up the storages that are reached from `roots` and were not seen yet; caches are no weights."""
    total, waiting, met = 0, list(roots), set()
    while waiting:
        one = waiting.pop()
        if id(one) in met or isinstance(one, KVCache):
            continue
        met.add(id(one))
        if isinstance(one, torch.Tensor):
            total += _bytes(one, seen)
        else:
            waiting += _parts(one)
    return total


def _bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    try:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # oneDNN's packed weights have no storage to look at
        key, size = id(tensor), tensor.numel() * tensor.element_size()
    if key in seen:
        return 0
    seen.add(key)
    return size


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, nn.Module):
        yield from one.parameters(recurse=False)
        yield from one.buffers(recurse=False)
        yield from one.children()
        yield from (value for value in vars(one).values() if isinstance(value, torch.Tensor))
    elif isinstance(one, list | tuple):
        yield from one
    elif isinstance(one, dict):
        yield from one.values()
    elif type(one).__module__.startswith(HOLDERS) and "cache" not in type(one).__module__:
        yield from getattr(one, "__dict__", {}).values()
        yield from (getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))


def forget_peak(device: torch.device) -> None:
    """Begin to look for a new peak, where the system lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _FORGET.write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> int | None:
    """Give the most that was held since `forget_peak`: by torch on a card, by the whole process elsewhere.

    None where the system does not tell.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return None
