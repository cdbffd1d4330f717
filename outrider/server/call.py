"""A request under way: its jobs' chunks as they come, its time, and how it ends, whichever way that is."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from outrider.server.errors import ApiError, expired

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from outrider.outputs import StreamChunk
    from outrider.server.admission import Ticket
    from outrider.server.service import Service
    from outrider.server.tracing import RequestSpan
    from outrider.server.worker import EngineWorker, Job

__all__ = ["Call"]

BYTES_PER_TOKEN = 64  # what a chunk's framing costs, at least


class Call:
    """One API request's jobs, one a prompt.

    Args:
        worker: Runs them.
        ticket: Its places, given back when it is closed.
        service: Whose it is.
        span: Tells its way, and is ended with it.

    Attributes:
        jobs: Its jobs.
        answer_id: What the client knows the answer by, once that has a name.
    """

    def __init__(self, worker: EngineWorker, ticket: Ticket, service: Service, span: RequestSpan | None = None) -> None:
        self._worker, self._ticket, self._service, self._span = worker, ticket, service, span
        self.jobs: list[Job] = []
        self.answer_id: str | None = None
        self._waiting: deque[tuple[int, StreamChunk]] = deque()
        self._news = asyncio.Event()
        self._error: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread = 0
        self._bounded = False
        self._closed = False
        self._reasons: dict[tuple[int, int], str] = {}  # of texts that ended by themselves

    def add(self, job: Job) -> None:
        """Add a job, not yet begun."""
        self.jobs.append(job)

    def receiver(self, place: int) -> Callable[[list[StreamChunk], ApiError | None], None]:
        """Give what takes the news of the job at `place`."""

        def take(chunks: list[StreamChunk], error: ApiError | None) -> None:
            self._receive(place, chunks, error)

        return take

    def start(self) -> None:
        """Hand the jobs to the engine."""
        self._service.opened(self)
        for job in self.jobs:
            self._service.metrics.prompt_tokens.inc(len(job.request.prompt_token_ids))
            self._worker.submit(job)

    def bound(self) -> None:
        """From now on what waits for the reader is bounded: it is a stream."""
        self._bounded = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(job.request.prompt_token_ids) for job in self.jobs)

    async def chunks(self, seconds: float | None = None) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Give (place of the job, chunk) until all texts have ended, within `seconds`, else the server's deadline.

        Raises:
            ApiError: It was refused, failed, or took too long.
        """
        seconds = self._service.settings.deadline_seconds if seconds is None else seconds
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.fail, expired(seconds))
        open_texts = sum(len(job.sequences) for job in self.jobs)
        while open_texts:
            while self._waiting:
                place, chunk = self._waiting.popleft()
                self._unread -= _size(chunk)
                open_texts -= chunk.finish_reason is not None
                yield place, chunk
            if not open_texts:
                return
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    def fail(self, error: ApiError) -> None:
        """End it with an error, after what it was given already."""
        if self._error is None:
            self._error = error
        self._news.set()

    def close(self) -> None:
        """End whatever of it still runs, and give its places back."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        for place, job in enumerate(self.jobs):
            if not job.done:
                self._worker.abort(job)
            for sequence in job.sequences:
                if (place, sequence.index) not in self._reasons:
                    self._service.metrics.finished(sequence.stats)
        self._ticket.close()
        self._service.closed(self)
        if self._span is not None:
            self._span.ended(self.jobs, self._reasons, self._error, self.answer_id)

    def _receive(self, place: int, chunks: list[StreamChunk], error: ApiError | None) -> None:
        if self._closed:
            return
        self._ticket.begun()
        for chunk in chunks:
            self._unread += _size(chunk)
            self._waiting.append((place, chunk))
            if chunk.finish_reason is not None and chunk.stats is not None:
                self._reasons[place, chunk.index] = chunk.finish_reason
                self._service.metrics.finished(chunk.stats)
        if error is not None:
            self.fail(error)
        elif self._bounded and self._unread > self._service.settings.max_stream_bytes:
            self._waiting.clear()  # it is late already: no use in reading all of it first
            self._worker.abort(self.jobs[place])
            self.fail(ApiError(408, "slow_reader", "the stream was not read fast enough"))
        self._news.set()


def _size(chunk: StreamChunk) -> int:
    logprobs = sum(len(one.top) + 1 for one in chunk.logprobs or ())
    return len(chunk.text) + BYTES_PER_TOKEN * (len(chunk.token_ids) + logprobs)
