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

__all__ = ["compile_apart", "wanted_by"]

logger = logging.getLogger(__name__)

MOST_PROCESSES = 16  # each holds a quarter of a GiB, mostly torch, until its work is done
JOBS_EACH = 3  # a process starts in about two seconds: fewer kernels are compiled here as fast
LONGEST = 120.0  # seconds, after which those that are left are given up


def wanted_by(work: Sequence[Callable[[], object]]) -> list[str]:
    """Say what calls that compile would compile, each once, as `compile_worker` reads it; nothing is compiled.

    The calls must compile by ``kernel.warmup``. What was compiled in this process already is not wanted.
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
    """Note every compilation ahead of its first launch, in place of doing it."""
    from triton import knobs
    from triton.runtime.driver import driver

    target: Any = driver.active.get_current_target()

    def note(**asked: Any) -> bool:
        if not asked["is_manual_warmup"]:  # a launch, elsewhere: it needs its kernel now
            return False
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


def compile_apart(wanted: Sequence[str]) -> int:
    """Compile in other processes; give how many kernels now lie in the cache on disk for it."""
    count = min(len(wanted) // JOBS_EACH, os.cpu_count() or 1, MOST_PROCESSES)
    if count < 2:
        return 0
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    for job in wanted:
        jobs.put(job)
    workers: list[subprocess.Popen[str]] = []
    timer = threading.Timer(LONGEST, _end, [workers])
    timer.start()
    try:
        workers += [_started() for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            return sum(pool.map(lambda worker: _served(worker, jobs), workers))
    except OSError as error:
        logger.debug("kernels cannot be compiled in other processes: %s", error)
        return 0
    finally:
        timer.cancel()
        _end(workers)


def _end(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()


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
    with contextlib.suppress(OSError), worker.stdin, worker.stdout:
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
