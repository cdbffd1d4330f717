"""Triton's interpreter, with the faults of version 3.6 mended; and engines that run on it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from outrider.engine.cost import unknown_costs

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["mended_interpreter", "rounds_on_kernels"]


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """It converts arrays of one number as numpy 2.4 no longer does, and multiplies the bits of bf16 numbers.

    And its products are made as a card makes them: a row's bits do not depend on where in the tile it is. numpy's
    library promises no such thing, and on some processors (without AVX-512) it is not so.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiplied(self: Any, a: Any, b: Any, added: Any, *others: Any) -> Any:
        a, b = widened(a), widened(b)
        if a.data.ndim != 2 or min(a.data.itemsize, b.data.itemsize) < 2:  # batches of tiles, and fp8
            return dot(self, a, b, added, *others)
        product = np.einsum("ij,jk->ik", a.data, b.data, dtype=added.data.dtype)
        return interpreter.TensorHandle(product + added.data, added.dtype.scalar)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang_tensor", patched)
        context.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
        yield


@contextmanager
def rounds_on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines that are made now run as on a card, but for the measuring of costs, which takes long here."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a card runs kernels in test_gpu.py")
    monkeypatch.setenv("OUTRIDER_KERNELS", "1")
    monkeypatch.setattr("outrider.engine.profile.Profiler.costs", lambda *_: unknown_costs())
    with mended_interpreter():
        yield
