"""HTTP/1.1 over bare sockets: for clients that misbehave, and where a full client's own work would be in the way."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

__all__ = ["Answer", "Cut", "ask"]

Cut = tuple[int, Literal["fin", "rst"]]  # after how many events (-1: before the answer), and how


@dataclass
class Answer:
    """What came back.

    Attributes:
        status: Of HTTP; 0 where none came.
        body: The body as far as it came, its framing removed.
        first, seconds: From the start to the first event of a text, and to the end.
        whole: Whether the answer ended as HTTP says it should.
        cut: Whether this client hung up.
        error: What went wrong with the connection.
    """

    status: int = 0
    body: bytes = b""
    first: float | None = None
    seconds: float = 0.0
    whole: bool = False
    cut: bool = False
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @cached_property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The whole events of a stream, without the mark at its end; of an answer in one piece, that alone."""
        if not self.body.startswith((b"data:", b"event:", b":")):
            return [self.json] if isinstance(self.json, dict) else []
        *blocks, _ = self.body.decode(errors="replace").split("\n\n")
        data = [line[6:] for block in blocks for line in block.splitlines() if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not."""
        return "".join(choice.get("text") or "" for one in self.events for choice in one.get("choices") or [])

    @property
    def endings(self) -> int:
        """How many events end the text: a reason to finish, or an error. One is right."""
        found = self.events
        reasons = sum(bool(choice.get("finish_reason")) for one in found for choice in one.get("choices") or [])
        return reasons + sum("error" in one for one in found)

    @property
    def usage(self) -> dict[str, Any]:
        """What the server counted; empty where it told nothing."""
        told = [one["usage"] for one in self.events if one.get("usage")]
        return dict(told[-1]) if told else {}


async def ask(
    port: int,
    body: dict[str, Any] | bytes,
    *,
    path: str = "/v1/completions",
    cut: Cut | None = None,
    seconds: float = 120,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request on a connection of its own, and read the answer, or hang up on the way.

    Args:
        port: On loopback.
        body: Sent as JSON, or as it is.
        path: Where to.
        cut: When and how to hang up.
        seconds: How long all of it may take.
        headers: In place of those that would be sent, or beside them.
    """
    answer, began = Answer(), time.perf_counter()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"host": f"127.0.0.1:{port}", "content-type": "application/json", "content-length": str(len(data))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**sent, "connection": "close", **(headers or {})}.items())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            await writer.drain()
            if cut is None or cut[0] >= 0:
                await _read(reader, answer, began, cut)
            answer.cut = cut is not None and not answer.whole
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - began
    if writer is not None:
        if answer.cut and cut is not None and cut[1] == "rst":
            endpoint = writer.get_extra_info("socket")
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, began: float, cut: Cut | None) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    answer.status = int(head[0].split(" ")[1])
    answer.headers = {
        name.lower(): value.strip() for name, colon, value in (line.partition(":") for line in head[1:]) if colon
    }
    if "content-length" in answer.headers:
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
        answer.whole = True
        return
    raw, hung_up, ended = bytearray(), cut is not None and not cut[0], False
    while not (hung_up or ended) and (piece := await reader.read(1 << 16)):
        raw += piece
        hung_up = cut is not None and raw.count(b"\n\n") >= cut[0]
        if answer.first is None and b'"text":' in raw:
            answer.first = time.perf_counter() - began
        ended = raw.endswith(b"0\r\n\r\n") and _unchunked(bytes(raw))[1]  # a text may hold the same
    answer.body, ended = _unchunked(bytes(raw))
    answer.whole = ended and not hung_up
    if not (ended or hung_up):
        answer.error = "the answer broke off"


def _unchunked(raw: bytes) -> tuple[bytes, bool]:
    """Take the framing of chunks away, once for the whole answer; gives also whether its end was there."""
    parts: list[bytes] = []
    at = 0
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line], 16)
        if not size:
            return b"".join(parts), raw[line:] == b"\r\n\r\n"
        parts.append(raw[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(parts), False
