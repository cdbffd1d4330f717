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
        call.bound()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send events until there are no more, or nobody who reads them."""
        gone = asyncio.ensure_future(_disconnect(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sending):
                task.cancel()
            self._call.close()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send_all(self, send: Send) -> None:
        async def write(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(self._stall):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = self._done
        try:
            async for name, event in _with_pings(self._events):
                await write(PING if event is None else framed(name, event))
        except ApiError as error:
            last = framed("error", error.body) + self._done
        except TimeoutError:
            logger.info("a stream was left unread and is ended")
            self._call.fail(ApiError(408, "slow_reader", "the stream was not read in time"))
            raise asyncio.CancelledError from None
        except Exception:
            logger.exception("a stream failed")
            failed = ApiError(500, "internal_error", "the stream failed")
            self._call.fail(failed)
            last = framed("error", failed.body) + self._done
        await write(last, more=False)


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


async def _with_pings(
    events: AsyncIterator[tuple[str | None, dict[str, Any]]],
) -> AsyncIterator[tuple[str | None, dict[str, Any] | None]]:
    """Give events as they come, and None where none came for a while."""
    following = aiter(events)
    pending: asyncio.Future[tuple[str | None, dict[str, Any]]] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(following))
            done, _ = await asyncio.wait((pending,), timeout=PING_SECONDS)
            if not done:
                yield None, None
                continue
            finished, pending = pending, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
