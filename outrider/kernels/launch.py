"""Where Triton kernels run, and how one launch follows another."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["interpreted", "overlaps", "runs_kernels", "uses_kernels"]

HOPPER = 9  # first compute capability with programmatic dependent launch


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a card: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(tensor: Tensor) -> bool:
    """Whether kernels work on tensors like this one; otherwise the torch reference does."""
    return _has_triton() and (tensor.is_cuda or interpreted())


def uses_kernels(device: torch.device) -> bool:
    """Whether models and rounds on a device are built on kernels: on a card; elsewhere only where a test says so."""
    return _has_triton() and (device.type == "cuda" or os.environ.get("OUTRIDER_KERNELS") == "1")


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it still runs (programmatic dependent launch).

    A kernel so launched reads nothing but weights, and writes nothing, before `jit.overlap.wait_for_inputs`.
    """
    return device.type == "cuda" and not interpreted() and torch.cuda.get_device_capability(device)[0] >= HOPPER
