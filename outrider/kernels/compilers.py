"""A process whose children compile kernels: half of a compilation is Python, and threads of one process take turns.

What they compile lies in Triton's cache on disk afterwards, where this process finds it in milliseconds. They need no
card. Whatever goes wrong with them costs time alone: what is missing is compiled here, when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["compile_apart", "dismiss", "expect", "wanted_by"]

logger = logging.getLogger(__name__)

MOST_PROCESSES = 16
LEAST_JOBS = 6  # the process starts in some seconds: fewer kernels are compiled here as fast
LONGEST = 120.0  # seconds, after which it is ended, whatever it does


def wanted_by(work: Sequence[Callable[[], object]]) -> list[str]:
    """Say which kernels calls would compile, each once, as `compile_worker` reads it; none of these is compiled or run.

    The calls go on without what those kernels would have computed: nothing in them may be looked up by it. What was
    compiled in this process already is not wanted.
    """
    wanted: dict[str, None] = {}
    with _noting(wanted):
        for one in work:
            try:
                one()
            except Exception as error:  # noqa: BLE001 - it will be met again, where it is dealt with
                logger.debug("what a kernel needs cannot be told: %s", error)
    return list(wanted)


@contextlib.contextmanager
def _noting(wanted: dict[str, None]) -> Iterator[None]:
    """Note every compilation, in place of doing it and of the launch that it was for."""
    from triton import knobs
    from triton.runtime.driver import driver

    target: Any = driver.active.get_current_target()

    def note(**asked: Any) -> bool:
        kernel = asked["fn"]
        job = {
            "target": [target.backend, target.arch, target.warp_size],
            "module": kernel.module,
            "name": kernel.name,
            "specialization": asked["compile"]["specialization_data"],
        }
        wanted[json.dumps(job)] = None
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def expect() -> None:
    """Start the process for kernels to come; it gets ready while others work."""
    with _lock:
        _beside.start()


def compile_apart(wanted: Sequence[str]) -> int:
    """Compile in other processes; give how many kernels now lie in the cache on disk for it."""
    with _lock:
        return _beside.compile(wanted)


def dismiss() -> None:
    """End the process: nothing is left to compile."""
    with _lock:
        _beside.end()


class _Beside:
    """The process, from when it is expected until it is dismissed, or `LONGEST` has passed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Start it, where it does not stand."""
        if self._process is not None or not hasattr(os, "fork"):
            return
        most = max(1, min(os.cpu_count() or 1, MOST_PROCESSES))
        command = [sys.executable, "-m", "outrider.kernels.jit.compile_worker", str(most)]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same modules as here, however found
        more |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not pass on to children
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, **more}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            logger.debug("kernels cannot be compiled in other processes: %s", error)
            return
        self._timer = threading.Timer(LONGEST, _kill, [self._process])
        self._timer.daemon = True
        self._timer.start()

    def compile(self, wanted: Sequence[str]) -> int:
        """Compile all that is wanted; give how much of it was."""
        if len(wanted) >= LEAST_JOBS:
            self.start()
        if self._process is None or not wanted:
            return 0
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        done = 0
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            self._process.stdin.write("\n".join([str(len(wanted)), *wanted, ""]))
            self._process.stdin.flush()
            for _ in wanted:
                if not (answer := self._process.stdout.readline()):
                    break
                done += answer == "compiled\n"
        return done

    def end(self) -> None:
        """End it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            _kill(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._process = self._timer = None


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its children, too
    process.wait()


_beside = _Beside()
_lock = threading.Lock()
