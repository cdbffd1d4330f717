"""Do the weights fit on the device? Asked before the first is read, for a failed load can take minutes to fail."""

from __future__ import annotations

import copy
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import CapacityError
from outrider.model.checkpoint import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from outrider.model.checkpoint import StoredTensor

__all__ = ["capacity_errors", "dense_bytes", "free_bytes", "require_room", "stored_bytes"]

_FLOATS = ("F64", "F32", "F16", "BF16")  # what is cast to the dtype of the model; codes keep their size
_GIB = 2**30


def stored_bytes(tensors: Iterable[StoredTensor], dtype: torch.dtype, keys: Mapping[str, str] | None = None) -> int:
    """Bytes that a checkpoint's tensors take once loaded.

    Args:
        tensors: The headers' entries.
        dtype: What floating tensors are cast to.
        keys: Patterns of the names that are loaded, where only a part is (see `TEXT_HALF_KEYS`); None means all.
    """
    total = 0
    for tensor in tensors:
        if keys is not None and not any(re.search(pattern, tensor.name) for pattern in keys):
            continue
        total += tensor.count * dtype.itemsize if tensor.dtype in _FLOATS else tensor.num_bytes
    return total


def dense_bytes(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a model of this config with plain weights, counted on one that has shapes and no memory."""
    config = copy.deepcopy(config)
    make: Any = model_class  # untyped
    with torch.device("meta"):
        model = make(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not embedding.weight:
        count -= head.weight.numel()
    return int(count * dtype.itemsize)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a card, torch's own reserve included; None off the card (a CPU can swap)."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def require_room(needed: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that do not fit.

    Args:
        needed: Bytes of the weights once loaded.
        name: The checkpoint's.
        dtype: That of the weights.
        device: Where they go.

    Raises:
        CapacityError: With both numbers, and what would fit.
    """
    free = free_bytes(device)
    if free is None or needed <= free:
        return
    kind = str(dtype).removeprefix("torch.")
    raise CapacityError(
        f"the weights of {name} take {needed / _GIB:.1f} GiB in {kind}, but {device} has {free / _GIB:.1f} GiB free; "
        f"{_remedies(dtype, needed, free)}"
    )


@contextmanager
def capacity_errors(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Turn a device's out-of-memory, also where a library wrapped it, into a `CapacityError` with the remedies."""
    try:
        yield
    except Exception as error:
        cause = _out_of_memory(error)
        if cause is None:
            raise
        raise CapacityError(
            f"{device} ran out of memory while {name} was loaded ({first_line(cause)}); {_remedies(dtype)}"
        ) from error


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _remedies(dtype: torch.dtype, needed: int = 0, free: int = 0) -> str:
    halved = ["load in half precision (dtype='bfloat16')"] if dtype is torch.float32 and needed <= 2 * free else []
    ways = [*halved, "use a smaller model", "a checkpoint quantised to fp8 or 4 bits", "end other programs on the card"]
    return ", ".join(ways) + ", or device='cpu'"
