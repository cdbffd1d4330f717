"""What kernels call: functions whose part in the kernels' names on disk is known from the start.

Triton names a compiled kernel by its source, by all that it calls, and by the global constants of both. But it takes
over a callee's constants only if the callee was named before (`DependenciesFinder._update_hash`, Triton 3.6 and 3.7).
A kernel's name would depend on which kernels its process has used, and what others compiled would not be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["device_function"]


def device_function(function: Callable[..., Any]) -> Any:
    """Decorate what kernels call, in place of `triton.jit`: it is named at once, before any kernel can be."""
    made: Any = triton.jit(function)
    if isinstance(made, triton.JITFunction):  # not under the interpreter
        made.cache_key  # noqa: B018 - worked out once, when it is first asked for
    return made
