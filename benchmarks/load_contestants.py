"""Who takes part in a load run: servers, ours or a peer's, and our engine without one, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.gpu_machine import end
from benchmarks.load_client import closed_loop, connected, figures, percentile, streamed
from benchmarks.load_servers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.load_client import Reply
    from benchmarks.load_servers import ServerProcess
    from outrider.bench.saying import Saying

__all__ = ["Contestant", "Offline", "Served", "Workload"]

STREAM_TOKENS = 4  # times as many in a stream that a long prompt interrupts
SEEN = 8  # pieces that each such stream has shown before the prompt is sent


@dataclass(frozen=True)
class Workload:
    """What is asked.

    Attributes:
        short, long: Make the prompt of a number, token ids: no two begin alike, so that no engine finds one in a cache.
            The long ones arrive while streams run.
        tokens: New tokens a request.
        saying: What a synthetic target says; None of a real one.
    """

    short: Callable[[int], list[int]]
    long: Callable[[int], list[int]]
    tokens: int
    saying: Saying | None = None
    _firsts: dict[tuple[Any, ...], int] = field(default_factory=lambda: {(): 0})

    def asked(self, requests: int, *cell: Any) -> list[list[int]]:
        """Give a cell's prompts: the same for every engine, and of no other cell."""
        if cell not in self._firsts:
            self._firsts[cell] = self._firsts[()]
            self._firsts[()] += requests
        return [self.short(self._firsts[cell] + place) for place in range(requests)]

    def wrong(self, prompts: Sequence[list[int]], replies: Sequence[Reply]) -> int | None:
        """Count tokens that a synthetic target would not have said."""
        if self.saying is None:
            return None
        said = [[int(word[1:]) for word in reply.text.split()] for reply in replies]
        return sum(self.saying.mismatches(prompt, ids) for prompt, ids in zip(prompts, said, strict=True) if ids)


class Contestant(Protocol):
    """An engine that can be measured.

    Attributes:
        name: The engine's.
        kinds: Of speculation: "off", "auto".
        clients: At how many clients it can be measured.
    """

    name: str
    kinds: list[str]
    clients: list[int]

    def start(self, seconds: float) -> float:
        """Get ready within so many seconds; give how many it took."""

    def measured(self, asked: list[list[int]], kind: str, clients: int, workload: Workload) -> dict[str, Any]:
        """Answer all prompts."""

    def close(self) -> None:
        """End it."""


class Served:
    """A server. Ours is told by each request whether to speculate; a peer's is one way or the other.

    Args:
        name, kinds, clients: See `Contestant`.
        started: Starts its process.
        max_num_seqs: Texts that it runs together.
    """

    def __init__(
        self,
        name: str,
        kinds: list[str],
        started: Callable[[], ServerProcess],
        *,
        clients: list[int],
        max_num_seqs: int,
    ) -> None:
        self.name, self.kinds, self.clients = name, kinds, clients
        self._started, self._max_num_seqs = started, max_num_seqs
        self._server: ServerProcess | None = None

    def start(self, seconds: float) -> float:
        """Start it and wait."""
        self._server = self._started()
        return self._server.wait_until_ready(seconds)

    def close(self) -> None:
        """Stop it."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def url(self) -> str:
        """Where it is."""
        assert self._server is not None
        return self._server.url

    def body(self, prompt: list[int], kind: str, tokens: int) -> dict[str, Any]:
        """Give a request: greedy, of so many tokens exactly."""
        body = {"model": "target", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return body | {"speculation": kind} if len(self.kinds) > 1 else body

    def measured(self, asked: list[list[int]], kind: str, clients: int, workload: Workload) -> dict[str, Any]:
        """Let so many clients ask."""
        bodies = [self.body(prompt, kind, workload.tokens) for prompt in asked]
        replies, seconds = asyncio.run(closed_loop(self.url, bodies, clients))
        return figures(replies, seconds) | _checked(replies, workload, asked)

    async def interference(self, workload: Workload, kind: str, streams: int, long: list[int]) -> dict[str, Any]:
        """Let streams run, send a long prompt once all of them do (empty: none), and see how they fare."""
        prompts = workload.asked(streams, "interference", kind, bool(long))
        seen: set[int] = set()
        all_run = asyncio.Event()

        def noted(reply: Reply) -> None:
            if len(reply.chunks) >= SEEN:
                seen.add(id(reply))
            if len(seen) == streams:
                all_run.set()

        async with connected(self.url, streams + 1) as client:
            bodies = [self.body(prompt, kind, STREAM_TOKENS * workload.tokens) for prompt in prompts]
            running = [asyncio.ensure_future(streamed(client, body, on_chunk=noted)) for body in bodies]
            done = asyncio.gather(*running)
            started = asyncio.ensure_future(all_run.wait())
            await asyncio.wait((started, done), return_when=asyncio.FIRST_COMPLETED)
            began, first = time.perf_counter(), None
            if long:
                first = (await streamed(client, self.body(long, kind, 1))).first
            replies = await done
        gaps = [
            later - earlier
            for reply in replies
            for earlier, later in zip(reply.chunks, reply.chunks[1:], strict=False)
            if later >= began
        ]
        return {
            "streams": streams, "prompt": len(long), "gap_p50": percentile(gaps, 0.5),
            "gap_p99": percentile(gaps, 0.99), "longest": max(gaps, default=None), "gaps": len(gaps),
            "first_token": first, "failed": [reply.error for reply in replies if not reply.fine],
        }  # fmt: skip


def _checked(replies: Sequence[Reply], workload: Workload, asked: list[list[int]]) -> dict[str, Any]:
    """Say where a server did less than it should, which would make it look fast."""
    short = sum(reply.fine and reply.tokens != workload.tokens for reply in replies)
    prompts = [reply.usage.get("prompt_tokens") for reply in replies]
    fed = sum(reply.fine and told != len(ids) for reply, told, ids in zip(replies, prompts, asked, strict=True))
    return {"short": short, "fed_wrongly": fed, "wrong_tokens": workload.wrong(asked, replies)}


class Offline:
    """`LLM.generate` in a process of its own, at one client (one prompt after another) and at `max_num_seqs` or more.

    Args:
        name, clients: See `Contestant`.
        job: What benchmarks/load_offline.py is told.
        work: A folder for files.
        max_num_seqs: Texts that it runs together.
    """

    kinds = ["off", "auto"]  # noqa: RUF012 - part of the protocol

    def __init__(self, name: str, job: dict[str, Any], work: Path, *, clients: list[int], max_num_seqs: int) -> None:
        self.name, self._job, self._work = name, job, work
        self.clients = [many for many in clients if many == 1 or many >= max_num_seqs]
        self._process: subprocess.Popen[str] | None = None

    def start(self, seconds: float) -> float:
        """Load the model."""
        began, path = time.perf_counter(), self._work / "offline.json"
        path.write_text(json.dumps(self._job), encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with (self._work / "offline.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.load_offline", str(path)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,
            )  # fmt: skip
        self._answer(seconds)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def measured(self, asked: list[list[int]], kind: str, clients: int, workload: Workload) -> dict[str, Any]:
        """Generate for all prompts: at once, or one after another where there is one client."""
        assert self._process is not None
        assert self._process.stdin is not None
        told = {"prompts": asked, "tokens": workload.tokens, "speculation": kind, "together": clients > 1}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return {"requests": len(asked), "failed": [], "rate": found["tokens"] / found["seconds"]} | found

    def _answer(self, seconds: float | None = None) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise RuntimeError(f"the engine was not ready after {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            log = (self._work / "offline.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the engine ended:\n{log[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
