"""The thread that owns the engine: it takes jobs in, steps, and hands what came of it to the event loop.

Nothing else touches the engine once it runs. Whatever a request does wrong ends that request; an exception that leaves
`Engine.step` is a fault of the engine: every job is told, and the process ends, since nobody knows what still holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.server.errors import engine_failed, overloaded

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from outrider.engine.engine import Engine
    from outrider.outputs import StreamChunk
    from outrider.sequence import Request, Sequence
    from outrider.server.errors import ApiError
    from outrider.server.metrics import Metrics
    from outrider.server.recheck import Rechecks
    from outrider.server.settings import ServerSettings

__all__ = ["EngineWorker", "Job"]

logger = logging.getLogger("outrider")
IDLE_SECONDS = 0.2  # between two signs of life of an idle engine


@dataclass(eq=False)
class Job:
    """One prompt and its n texts.

    Attributes:
        request, sequences: What is run.
        deliver: Called on the event loop with what is new: chunks, or the error that ended it.
        given: Tokens handed out of each text.
        ended: Whether a text's last chunk was handed out.
        queue_seconds: How long it waited for a place in the engine; None until it got one.
    """

    request: Request
    sequences: list[Sequence]
    deliver: Callable[[list[StreamChunk], ApiError | None], None]
    given: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    queue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.given = [0] * len(self.sequences)
        self.ended = [False] * len(self.sequences)

    @property
    def done(self) -> bool:
        """Whether all its texts ended and were handed out."""
        return all(self.ended)

    def news(self, *, single: bool) -> list[StreamChunk]:
        """Give what came since the last call."""
        found: list[StreamChunk] = []
        for place, sequence in enumerate(self.sequences):
            if self.ended[place] or not (sequence.finished or sequence.num_generated > self.given[place]):
                continue
            chunk = sequence.chunk(self.given[place])
            self.given[place] += len(chunk.token_ids)
            self.ended[place] = chunk.finish_reason is not None
            found += chunk.singles() if single else [chunk]
        return found


class EngineWorker(threading.Thread):
    """Runs the engine until it is told to stop, or until the engine fails.

    Args:
        engine: The engine; from now on this thread's own.
        loop: Where results go.
        settings: Bounds on waiting; how streams are cut.
        metrics: What is counted.
        on_fault: Called on the event loop when the engine has failed, after every job was told.
        rechecks: Takes in what was handed out, and runs while nothing else does.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        settings: ServerSettings,
        metrics: Metrics,
        on_fault: Callable[[BaseException], None],
        rechecks: Rechecks,
    ) -> None:
        super().__init__(name="outrider-engine", daemon=True)
        self.engine = engine
        self._loop, self._settings, self._metrics, self._on_fault = loop, settings, metrics, on_fault
        self._inbox: deque[tuple[Job, bool]] = deque()  # a job, and whether it is to end
        self._jobs: dict[Job, None] = {}
        self._wake = threading.Event()
        self._stopping = self._draining = False
        self._rechecks = rechecks
        self._told_at = 0.0
        self.beat = time.monotonic()

    def submit(self, job: Job) -> None:
        """Queue a job; from any thread."""
        self._put(job, ends=False)

    def abort(self, job: Job) -> None:
        """End a job, about which nobody wants to hear any more; from any thread."""
        self._put(job, ends=True)

    def stop(self) -> None:
        """Leave the loop soon; from any thread."""
        self._stopping = True
        self._wake.set()

    def drain(self) -> None:
        """Do nothing any more that nobody waits for; from any thread."""
        self._draining = True
        self._wake.set()

    @property
    def silent_seconds(self) -> float:
        """How long ago the engine last showed signs of life."""
        return time.monotonic() - self.beat

    def run(self) -> None:
        """Step while there is work."""
        try:
            while not self._stopping:
                self._wake.clear()
                if self._draining:
                    self._rechecks.close()
                self._take_in()
                if self.engine.busy:
                    self._step()
                    self._expire()
                    self._publish()
                    self._rechecks.look()
                else:
                    self._publish()  # what ended without a step
                    self._rechecks.look()
                    self._observe()
                    if not self._rechecks.begin():
                        self._wake.wait(IDLE_SECONDS)
                self.beat = time.monotonic()
        except BaseException as fault:
            logger.exception("the engine failed; every request is ended")
            self._fail(fault)

    def _put(self, job: Job, *, ends: bool) -> None:
        self._inbox.append((job, ends))
        self._wake.set()

    def _take_in(self) -> None:
        while self._inbox:
            job, ends = self._inbox.popleft()
            if ends:
                for sequence in job.sequences:
                    self.engine.abort(sequence)
                self._jobs.pop(job, None)
            else:
                self._rechecks.give_up()
                self._jobs[job] = None
                for sequence in job.sequences:
                    if not sequence.finished:
                        self.engine.add(sequence)

    def _step(self) -> None:
        """Take one step. Where memory runs out it is tried again, and then again without the youngest text.

        Sending that one back to the queue would not help: the cache's memory is taken at start, and what ran out is the
        room to compute in.
        """
        failures = 0
        while self.engine.busy:
            try:
                return self.engine.step()
            except (torch.OutOfMemoryError, MemoryError):
                failures += 1
                self._metrics.out_of_memory.inc()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            if failures > 1:
                logger.warning("memory ran out in a step again; the youngest text is ended")
                self.engine.relieve()
        return None

    def _expire(self) -> None:
        """Refuse what has waited too long to be begun."""
        now = time.perf_counter()
        for job in list(self._jobs):
            if job.queue_seconds is None:
                if any(one.slot is not None or one.finished for one in job.sequences):
                    job.queue_seconds = max(0.0, now - job.request.arrival)
                    self._metrics.queued(job.queue_seconds)
                    self._send([(job, [], None)])
                elif now - job.request.arrival > self._settings.queue_seconds:
                    for sequence in job.sequences:
                        self.engine.abort(sequence)
                    del self._jobs[job]
                    late = overloaded(f"no place was free within {self._settings.queue_seconds:g} s; try again later")
                    self._send([(job, [], late)])

    def _publish(self) -> None:
        """Hand out what is new."""
        found: list[tuple[Job, list[StreamChunk], ApiError | None]] = []
        for job in list(self._jobs):
            chunks = job.news(single=self._settings.single_tokens)
            if chunks:
                found.append((job, chunks, None))
            if job.done:
                del self._jobs[job]
                self._rechecks.offer(job.sequences)
        if found:
            self._send(found)
        now = time.monotonic()
        if now - self._told_at > IDLE_SECONDS:
            self._told_at = now
            self._observe()

    def _observe(self) -> None:
        self._metrics.observe(self.engine, unasked=self._rechecks.active)

    def _fail(self, fault: BaseException) -> None:
        error = engine_failed()
        jobs = [*self._jobs, *(job for job, ends in self._inbox if not ends)]
        self._jobs.clear()
        self._send([(job, [], error) for job in jobs])
        self._loop.call_soon_threadsafe(self._on_fault, fault)

    def _send(self, found: list[tuple[Job, list[StreamChunk], ApiError | None]]) -> None:
        def deliver() -> None:
            for job, chunks, error in found:
                job.deliver(chunks, error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)
