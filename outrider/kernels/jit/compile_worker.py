"""What compiles kernels beside an engine: ``python -m outrider.kernels.jit.compile_worker MOST``.

Each batch is a line with a number and so many jobs, a line each; the answers come a line each, in any order. Every job
runs in a child of this process, `MOST` at a time: what is needed is imported once.
"""

from __future__ import annotations

import contextlib
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
USUAL = "attention", "choose", "products", "rotary", "rotate_attend", "tail"


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
    """Answer "compiled" or "failed" to each job, until nobody asks any more."""
    for name in USUAL:
        importlib.import_module(OURS + name)
    most = int(sys.argv[1])
    for line in sys.stdin:
        jobs = [sys.stdin.readline() for _ in range(int(line))]
        running = 0
        for job in jobs:
            if running == most:
                _one_ends()
                running -= 1
            if not os.fork():
                _end_with(job)
            running += 1
        for _ in range(running):
            _one_ends()


def _one_ends() -> None:
    _, status = os.wait()
    sys.stdout.write("failed\n" if status else "compiled\n")
    sys.stdout.flush()


def _end_with(job: str) -> None:
    """Compile, and leave: 0 where it went well."""
    try:
        _compile(json.loads(job))
    except BaseException:  # noqa: BLE001 - whatever a compiler raises: it is met again where it is dealt with
        os._exit(1)
    os._exit(0)


def _compile(job: dict[str, Any]) -> None:
    if not str(job["module"]).startswith(OURS):
        raise ValueError(job["module"])
    driver.set_active(AbsentCard(*job["target"]))
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    assert isinstance(kernel, triton.JITFunction)
    compiled: Any = kernel.preload(job["specialization"])
    with contextlib.suppress(Exception):  # where it is built in another way, or for another card: at the first launch
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)  # compiles some lines of C, which takes half a second


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
