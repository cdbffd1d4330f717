"""Answers: JSON in one piece, or a stream of server-sent events, both ended the moment the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from outrider.server.errors import ApiError, ClientGoneError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from starlette.types import Receive, Scope, Send

    from outrider.server.call import Call

__all__ = ["EventStream", "until_gone"]

T = TypeVar("T")
logger = logging.getLogger("outrider")
PING_SECONDS = 15.0  # between comments on a quiet stream, so that proxies do not take it for dead
PING = b": ping\n\n"
LOOKS = 4  # at a stream, in the time after which something is to be done


class EventStream(Response):
    """Server-sent events of one call, which it closes.

    Args:
        call: The call.
        events: Objects to send, each as one event's data; with a name where the API names events.
        stall_seconds: How long the client may leave the stream unread.
        done: What ends a stream that went well.
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncIterator[tuple[str | None, dict[str, Any]]],
        *,
        stall_seconds: float,
        done: bytes = b"data: [DONE]\n\n",
        headers: dict[str, str] | None = None,
    ) -> None:
        quiet = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**(headers or {}), **quiet})
        del self.headers["content-length"]
        self._call, self._events, self._stall, self._done = call, events, stall_seconds, done
        self._writes_since: float | None = None  # when a write began that has not ended
        self._wrote_at = 0.0
        call.bound()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send events until there are no more, or nobody who reads them."""
        gone = asyncio.ensure_future(_disconnect(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        watching = asyncio.ensure_future(self._watch(send, sending))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sending, watching):
                task.cancel()
            self._call.close()
            await asyncio.gather(watching, return_exceptions=True)  # a ping to nobody is no fault
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send_all(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time

        async def write(body: bytes, *, more: bool = True) -> None:
            self._writes_since = clock()
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._writes_since, self._wrote_at = None, clock()

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = self._done
        try:
            async for name, event in self._events:
                await write(framed(name, event))
        except ApiError as error:
            last = framed("error", error.body) + self._done
        except Exception:
            logger.exception("a stream failed")
            failed = ApiError(500, "internal_error", "the stream failed")
            self._call.fail(failed)
            last = framed("error", failed.body) + self._done
        await write(last, more=False)

    async def _watch(self, send: Send, sending: asyncio.Task[None]) -> None:
        """Keep a quiet stream alive, and end one that is left unread; no event pays for a timer of its own."""
        clock = asyncio.get_running_loop().time
        self._wrote_at = clock()
        while True:
            await asyncio.sleep(min(PING_SECONDS, self._stall) / LOOKS)
            if self._writes_since is not None and clock() - self._writes_since >= self._stall:
                logger.info("a stream was left unread and is ended")
                self._call.fail(ApiError(408, "slow_reader", "the stream was not read in time"))
                sending.cancel()
                return
            if self._writes_since is None and clock() - self._wrote_at >= PING_SECONDS:
                self._wrote_at = clock()
                await send({"type": "http.response.body", "body": PING, "more_body": True})


def framed(name: str | None, event: dict[str, Any]) -> bytes:
    """Write one event."""
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode("utf-8", errors="replace")


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Wait for work while the client is there.

    Raises:
        ClientGoneError: It went away.
    """
    gone = asyncio.ensure_future(_disconnect(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
