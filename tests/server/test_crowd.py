"""Many at once, and much at once: what there is no room for costs next to nothing, and so does what is too large."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from outrider.server.admission import Admission
from outrider.server.errors import ApiError
from outrider.server.gate import LARGE_BODY, Gate
from outrider.server.metrics import Metrics
from outrider.server.protocol import ChatRequest, CompletionRequest
from outrider.server.responses import ResponsesRequest
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.unknown import unknown_fields
from tests.server.harness import metric, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

    from pydantic import BaseModel

PATH = "/v1/completions"
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


class Door:
    """A gate, and behind it an app that answers nobody until it is told to."""

    def __init__(self, running: int, **settings: Any) -> None:
        self.service = Service(ServerSettings(**settings), Metrics())
        self.admission = self.service.admission = Admission(self.service.settings, running)
        self.gate = Gate(self._app, self.service, frozenset({PATH}))
        self.let, self.seen = asyncio.Event(), list[bytes]()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((await receive())["body"])
        await self.let.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, body: bytes = b"{}", *, silent: bool = False) -> tuple[int, dict[str, Any]]:
        """Send one request through the gate; a silent one never sends its body."""
        told: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            if silent:
                await asyncio.sleep(3600)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            told.append(message)

        await self.gate({"type": "http", "method": "POST", "path": PATH, "headers": HEADERS}, receive, send)
        return told[0]["status"], json.loads(told[1]["body"] or b"{}")

    def metric(self, name: str) -> float:
        return metric(self.service.metrics.text().decode(), name)


def test_of_many_that_come_together_no_more_are_read_than_there_is_room_for() -> None:
    async def run() -> None:
        door = Door(2, max_waiting=1)
        asked = [asyncio.ensure_future(door.ask()) for _ in range(20)]
        done, under_way = await asyncio.wait(asked, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        while len(under_way) > 3:
            done, under_way = await asyncio.wait(asked, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        assert len(door.seen) == door.admission.places == 3
        assert {one.result()[0] for one in done} == {503}
        assert all(one.result()[1]["error"]["code"] == "server_overloaded" for one in done)
        door.let.set()
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert (statuses.count(200), statuses.count(503)) == (3, 17)
        assert door.admission.places == 0
        assert door.metric("outrider_rejected_requests_total") == 17
        text = door.service.metrics.text().decode()  # what no route saw is counted under its route all the same
        assert f'outrider_requests_total{{route="{PATH}",status="503"}} 17.0' in text

    asyncio.run(run())


def test_a_body_that_does_not_come_holds_no_place() -> None:
    async def run() -> None:
        door = Door(1, max_waiting=0)
        slow = asyncio.ensure_future(door.ask(silent=True))
        await asyncio.sleep(0.01)
        assert door.admission.places == 0
        door.let.set()
        assert (await door.ask())[0] == 200
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        assert door.admission.places == 0

    asyncio.run(run())


def test_a_ticket_that_wants_more_than_there_is_keeps_what_it_has() -> None:
    admission = Admission(ServerSettings(max_waiting=0, max_per_key=3), 4)
    one, other = admission.enter("a"), admission.enter("b")
    one.take(3)
    for ticket, places, code in ((one, 4, "rate_limit_exceeded"), (other, 2, "server_overloaded")):
        with pytest.raises(ApiError) as caught:
            ticket.take(places)
        assert caught.value.code == code
        assert (admission.places, one.places, other.places) == (4, 3, 1)
    one.close()
    one.close()
    assert admission.places == 1
    other.take(3)
    other.close()
    assert admission.places == 0


@pytest.mark.parametrize("size", [100, LARGE_BODY + 100])
def test_nesting_is_counted_in_large_bodies_too(size: int) -> None:
    async def run() -> None:
        door = Door(1, max_json_depth=8)
        door.let.set()
        filler = b'"' + b'[{\\"\\\\' * (size // 6) + b'"'
        for depth, status in ((8, 200), (9, 400)):
            answer = await door.ask(b"[" * (depth - 1) + b"[" + filler + b"]" + b"]" * (depth - 1))
            assert answer[0] == status
            assert status == 200 or answer[1]["error"]["code"] == "too_deep"
        assert (await door.ask(b"[" * 8 + filler[:-1]))[0] == 200  # cut off: not for the gate to say
        assert (await door.ask(b"[" * 8 + filler[:-1] + b"\\"))[0] == 200

    asyncio.run(run())


WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [-1] * 20_000}),
    (CompletionRequest, {"prompt": [1] * 20_000 + ["a"]}),
    (CompletionRequest, {"prompt": [[1]] * 20_000}),
    (CompletionRequest, {"prompt": "a", "stop": [0] * 20_000}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 20_000}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(number): "x" for number in range(20_000)}}),
    (ChatRequest, {"messages": [1] * 20_000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * 20_000}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1] * 20_000}]}),
    (ResponsesRequest, {"input": [1] * 20_000}),
    (ResponsesRequest, {"input": [{"role": "user", "content": [1] * 20_000}]}),
    (ResponsesRequest, {"input": "x", "include": [1] * 20_000}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_a_list_of_wrong_items_is_one_error_and_not_one_for_each(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 20


def test_unknown_fields_are_found_at_any_depth_and_ids_are_not_walked() -> None:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}], "stop": ["a"], "new": 2}
    )
    assert sorted(unknown_fields(asked)) == [("messages.content.odd", 1), ("new", 2)]
    ids = CompletionRequest.model_validate({"prompt": list(range(1000)), "more": 3})
    assert list(unknown_fields(ids)) == [("more", 3)]


def test_more_connections_than_are_accepted_in_a_turn_are_all_answered(tmp_path: Path) -> None:
    folder = str(save(tiny_target(), byte_tokenizer(), tmp_path))
    with serving(folder) as server:
        made = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(300)]
        for one in made:
            one.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        for one in made:
            with one:
                assert one.makefile("rb").read().startswith(b"HTTP/1.1 200 ")
