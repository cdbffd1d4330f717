"""Triton's interpreter, with two faults of version 3.6 mended for as long as a test module runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["mended_interpreter"]


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """It converts arrays of one number as numpy 2.4 no longer does, and multiplies the bits of bf16 numbers."""
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

    def multiplied(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang_tensor", patched)
        context.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
        yield
