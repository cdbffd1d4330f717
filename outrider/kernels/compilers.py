"""Processes that compile kernels: half of a compilation is Python, which in threads of one process takes turns.

What they compile lies in Triton's cache on disk afterwards, where this process finds it in milliseconds. They need no
card. Whatever goes wrong with them costs time alone: what is missing is compiled here, when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["compile_apart", "dismiss", "expect", "wanted_by"]

logger = logging.getLogger(__name__)

MOST_PROCESSES = 16  # each holds a quarter of a GiB, mostly torch, until it is dismissed
JOBS_EACH = 3  # a process starts in about two seconds: fewer kernels are compiled here as fast
LONGEST = 120.0  # seconds, after which processes are ended, whatever they do


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


def expect(num_jobs: int) -> None:
    """Start processes for so many kernels to come; they get ready while others work."""
    with _lock:
        _pool.start(num_jobs)


def compile_apart(wanted: Sequence[str]) -> int:
    """Compile in other processes; give how many kernels now lie in the cache on disk for it."""
    with _lock:
        return _pool.compile(wanted)


def dismiss() -> None:
    """End the processes: nothing is left to compile."""
    with _lock:
        _pool.end()


class _Pool:
    """Processes that compile, from when some are expected until they are dismissed, or `LONGEST` has passed."""

    def __init__(self) -> None:
        self._workers: list[subprocess.Popen[str]] = []
        self._timer: threading.Timer | None = None

    def start(self, num_jobs: int) -> None:
        """Start as many as are worth their start; those that stand stay."""
        count = min(num_jobs // JOBS_EACH, os.cpu_count() or 1, MOST_PROCESSES)
        if self._workers or count < 2:
            return
        self._timer = threading.Timer(LONGEST, self._kill, [self._workers])
        self._timer.daemon = True
        self._timer.start()
        try:
            for _ in range(count):
                self._workers.append(_started())
        except OSError as error:
            logger.debug("kernels cannot be compiled in other processes: %s", error)
            self.end()

    def compile(self, wanted: Sequence[str]) -> int:
        """Compile all that is wanted; give how much of it was."""
        self.start(len(wanted))
        if not self._workers or not wanted:
            return 0
        jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        for job in wanted:
            jobs.put(job)
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return sum(pool.map(lambda worker: _served(worker, jobs), self._workers))

    def end(self) -> None:
        """End all."""
        if self._timer is not None:
            self._timer.cancel()
        self._kill(self._workers)
        self._workers = []

    @staticmethod
    def _kill(workers: list[subprocess.Popen[str]]) -> None:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


_pool = _Pool()
_lock = threading.Lock()


def _started() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "outrider.kernels.jit.compile_worker"]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same modules as here, however found
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **paths},
    )  # fmt: skip


def _served(worker: subprocess.Popen[str], jobs: queue.SimpleQueue[str]) -> int:
    """Hand one process job after job, until none is left or it is gone."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    done = 0
    with contextlib.suppress(OSError, ValueError):  # ended meanwhile
        while not jobs.empty():
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                break
            worker.stdin.write(job + "\n")
            worker.stdin.flush()
            if not (answer := worker.stdout.readline()):
                break
            done += answer == "compiled\n"
    return done
