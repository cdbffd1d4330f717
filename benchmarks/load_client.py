"""Clients of an OpenAI-compatible server, the same for every engine: streams over loopback, as a reader sees them.

Tokens are counted from the usage that the server tells at the end, never from chunks: a round gives several at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Reply", "closed_loop", "connected", "figures", "percentile", "streamed"]

TIMEOUT = httpx.Timeout(600, connect=60)


@dataclass
class Reply:
    """One request's answer.

    Attributes:
        status: Of HTTP; 0 where the connection broke.
        began: When it was sent, on the clock of `time.perf_counter`.
        chunks: When each piece of text came, on the same clock.
        seconds: From sending it to the end of the answer.
        tokens: As the server's usage tells; None where it told none.
        text: All of it.
        usage: What the server told.
        error: What it said instead of a text.
    """

    status: int = 0
    began: float = 0.0
    chunks: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int | None = None
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def fine(self) -> bool:
        """Whether it is a whole text."""
        return self.status == 200 and not self.error and self.tokens is not None

    @property
    def first(self) -> float | None:
        """Seconds to the first piece of text."""
        return self.chunks[0] - self.began if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text: what a reader waits."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first piece."""
        if not self.fine or not self.chunks or (self.tokens or 0) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / ((self.tokens or 0) - 1)


def connected(url: str, clients: int) -> httpx.AsyncClient:
    """Give a client with room for so many connections, all to one server."""
    limits = httpx.Limits(max_connections=clients + 4, max_keepalive_connections=clients + 4)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)


async def streamed(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    path: str = "/v1/completions",
    on_chunk: Callable[[Reply], None] | None = None,
) -> Reply:
    """Ask for a stream and read it to its end.

    Args:
        client: From `connected`.
        body: The request; that it is a stream, and with usage, is added here.
        path: Where to.
        on_chunk: Told of every piece as it comes.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    reply = Reply(began=time.perf_counter())
    try:
        async with client.stream("POST", path, json=asked) as answer:
            reply.status = answer.status_code
            if answer.status_code != 200:
                reply.error = (await answer.aread()).decode(errors="replace")[:500]
            else:
                await _read(answer, reply, on_chunk)
    except httpx.HTTPError as error:
        reply.error = reply.error or f"{type(error).__name__}: {error}"
    reply.seconds = time.perf_counter() - reply.began
    return reply


async def _read(answer: httpx.Response, reply: Reply, on_chunk: Callable[[Reply], None] | None) -> None:
    rest, ended = b"", False
    async for piece in answer.aiter_raw():
        *blocks, rest = (rest + piece).split(b"\n\n")
        now = time.perf_counter()
        for block in blocks:
            _, found, data = block.rpartition(b"data: ")
            if data == b"[DONE]":
                ended = True
            elif found:
                _take(json.loads(data), reply, now)
        if on_chunk is not None and reply.chunks:
            on_chunk(reply)
    if not ended and not reply.error:
        reply.error = "the stream broke off"


def _take(event: dict[str, Any], reply: Reply, now: float) -> None:
    if "error" in event:
        reply.error = json.dumps(event["error"])[:500]
    if event.get("usage"):
        reply.usage = event["usage"]
        reply.tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or []:
        if choice.get("text"):
            reply.text += choice["text"]
            reply.chunks.append(now)


async def closed_loop(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[Reply], float]:
    """Let so many clients ask until all bodies are answered, each asking anew as soon as it has its answer.

    Returns:
        The replies in the order of the bodies, and the seconds from the first request to the last answer.
    """
    replies: list[Reply] = [Reply() for _ in bodies]
    waiting = list(enumerate(bodies))[::-1]

    async with connected(url, clients) as client:

        async def one() -> None:
            while waiting:
                place, body = waiting.pop()
                replies[place] = await streamed(client, body)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(min(clients, len(bodies)))))
        return replies, time.perf_counter() - began


def percentile(values: Sequence[float], share: float) -> float | None:
    """Give the smallest value that `share` of all do not exceed; None of none."""
    known = sorted(values)
    return known[max(0, math.ceil(share * len(known)) - 1)] if known else None


def figures(replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    """Give what a cell of a load run is worth: throughput, and waiting as medians and 99th percentiles, in seconds."""
    fine = [reply for reply in replies if reply.fine]
    columns = {
        "first_token": [reply.first for reply in fine if reply.first is not None],
        "gap": [gap for reply in fine for gap in reply.gaps],
        "per_token": [reply.per_token for reply in fine if reply.per_token is not None],
        "end_to_end": [reply.seconds for reply in fine],
    }
    tokens = sum(reply.tokens or 0 for reply in fine)
    spoken = [reply.usage.get("outrider") or {} for reply in fine]
    return {
        "requests": len(replies),
        "failed": [reply.error for reply in replies if not reply.fine],
        "tokens": tokens,
        "seconds": seconds,
        "rate": tokens / seconds if seconds else None,
        "rounds": sum(one.get("rounds", 0) for one in spoken),
        "drafted": sum(one.get("drafted", 0) for one in spoken),
        "accepted": sum(one.get("accepted", 0) for one in spoken),
        **{f"{name}_p50": percentile(values, 0.5) for name, values in columns.items()},
        **{f"{name}_p99": percentile(values, 0.99) for name, values in columns.items()},
    }
