"""Connections: a request's head must arrive in time and within bounds, before any of our code sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Wire", "wire_with"]

LINGER_SECONDS = 0.5


class Wire(H11Protocol):
    """uvicorn's protocol, with a bound on the time that a request's head may take."""

    header_seconds = 10.0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; a new head begins with the first one after an answer."""
        if self._refused:
            return
        if self._head_timer is None and self.conn.their_state is h11.IDLE:
            self._await_head()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it, in the form of every other error."""
        too_large = self.conn.our_state is h11.IDLE and self.conn.their_state is h11.ERROR and self._overlong()
        self._refuse(431 if too_large else 400, "header_too_large" if too_large else "invalid_http", msg)

    def _overlong(self) -> bool:
        return len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.header_seconds, self._late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:  # it began to say something: say why it is cut off
            self._refuse(408, "request_timeout", "the request's head did not arrive in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        headers: list[tuple[str, Any]] = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is under way already: all that is left is to hang up
        # What still arrives is thrown away for a while: closing on unread bytes would reset the connection, and the
        # client might never read why.
        self._refused = True
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def wire_with(header_seconds: float) -> type[Wire]:
    """Give the protocol with its bound: uvicorn makes its instances itself."""
    return type("Wire", (Wire,), {"header_seconds": header_seconds})
