"""Streams of events: quiet ones, unread ones, and those whose reader leaves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from outrider.server import events
from outrider.server.events import PING, EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from outrider.server.call import Call
    from outrider.server.errors import ApiError


class Told:
    """A call, as far as a stream knows it."""

    def __init__(self) -> None:
        self.closed = 0
        self.errors: list[ApiError] = []

    def bound(self) -> None:
        pass

    def fail(self, error: ApiError) -> None:
        self.errors.append(error)

    def close(self) -> None:
        self.closed += 1


async def said(*pauses: float) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield None, {"number": number}


async def sent(stream: EventStream, *, stays: float = 60.0, blocks_at: int | None = None) -> list[bytes]:
    """Serve a stream to somebody who stays for so long, and reads no further than some body."""
    bodies: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.sleep(stays)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if "body" in message:
            bodies.append(message["body"])
            if len(bodies) - 1 == blocks_at:
                await asyncio.sleep(3600)

    await stream({"type": "http"}, receive, send)
    return bodies


def numbers(bodies: list[bytes]) -> list[int]:
    return [json.loads(body[6:])["number"] for body in bodies if body.startswith(b"data: {")]


def test_a_quiet_stream_is_kept_alive_and_a_lively_one_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_SECONDS", 0.2)
    quiet = asyncio.run(sent(EventStream(cast("Call", Told()), said(0.0, 0.9, 0.0), stall_seconds=9)))
    assert numbers(quiet) == [0, 1, 2] and quiet[-1] == b"data: [DONE]\n\n"
    assert 1 <= quiet.count(PING) <= 4 and quiet.index(PING) == 1
    lively = asyncio.run(sent(EventStream(cast("Call", Told()), said(*[0.01] * 60), stall_seconds=9)))
    assert PING not in lively and numbers(lively) == [*range(60)]


def test_a_stream_that_is_left_unread_is_ended_and_its_call_told_why() -> None:
    call = Told()
    bodies = asyncio.run(sent(EventStream(cast("Call", call), said(*[0.01] * 9), stall_seconds=0.4), blocks_at=3))
    assert len(bodies) == 4 and call.closed
    assert [(error.status, error.code) for error in call.errors] == [(408, "slow_reader")]


def test_a_stream_ends_when_its_reader_leaves() -> None:
    call = Told()
    bodies = asyncio.run(sent(EventStream(cast("Call", call), said(*[0.05] * 99), stall_seconds=9), stays=0.3))
    assert numbers(bodies) and len(bodies) < 50 and call.closed and not call.errors
