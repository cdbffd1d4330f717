"""What a compiling process runs: ``python -m outrider.kernels.jit.compile_worker``, a job a line, an answer each."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

__all__ = ["AbsentCard", "main"]

OURS = "outrider.kernels.jit."  # no other module is imported for a job


class AbsentCard:
    """A driver that knows for what to compile, and nothing else: no context, no memory on the card.

    Args:
        backend, arch, warp_size: As `GPUTarget` has them.
    """

    def __init__(self, backend: str, arch: Any, warp_size: int) -> None:
        self.target = GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Only one is known."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Nothing is launched."""
        return 0


def main() -> None:
    """Answer "compiled" or "failed" to each job, until there are no more."""
    for line in sys.stdin:
        try:
            _compile(json.loads(line))
            answer = "compiled"
        except Exception:  # noqa: BLE001 - whatever a compiler raises: it is met again where it is dealt with
            answer = "failed"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _compile(job: dict[str, Any]) -> None:
    if not str(job["module"]).startswith(OURS):
        raise ValueError(job["module"])
    driver.set_active(AbsentCard(*job["target"]))
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    assert isinstance(kernel, triton.JITFunction)
    kernel.preload(job["specialization"])


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
