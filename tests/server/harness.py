"""Servers for tests: a real process on loopback, and the same app in this process without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

from outrider.server.app import make_app
from outrider.server.metrics import Metrics
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from outrider import LLM
    from outrider.server.tracing import Tracing

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0
STOP_SECONDS = 20.0


@dataclass
class Running:
    """A server process."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def metric(self, name: str) -> float:
        return metric(self.get("/metrics").text, name)

    def idle(self, seconds: float = 10.0, **more: Any) -> bool:
        """Whether all is quiet, and no block of the cache is held (waiting some time for it)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = self.get("/metrics", **more).text
            names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
            if not any(metric(text, f"outrider_{name}") for name in names):
                return True
            time.sleep(0.1)
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; gives the exit code. All lines are there afterwards."""
        self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS)
        time.sleep(0.1)
        return code


def metric(text: str, name: str) -> float:
    """The value of a metric without labels; the sum over all labels where it has some."""
    found = [line for line in text.splitlines() if re.match(rf"{name}(\{{| )", line)]
    assert found, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextlib.contextmanager
def serving(*arguments: str, ready: bool = True, first: str = "", **environment: str) -> Iterator[Running]:
    """Start ``outrider serve``, wait until it is ready, and see to it that it ends.

    `first` is code that the process runs before it begins: to plant a fault.
    """
    begun = f"{first}\nfrom outrider.cli import main\nmain()"
    command = [sys.executable, "-c", begun, "serve", "--port", "0", "--threads", "1", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths, **environment}
    )
    running = Running(process, 0)
    reader: threading.Thread | None = None
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        match = re.search(r":(\d+)/ready", first)
        assert match, first + process.stderr.read()
        running.port = int(match[1])
        reader = threading.Thread(target=_drain, args=(running,), daemon=True)
        reader.start()
        if ready:
            wait_until_ready(running)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if reader is not None:
            reader.join(5)
        if process.stderr is not None:
            process.stderr.close()


def wait_until_ready(running: Running) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert running.process.poll() is None, running.lines
        with contextlib.suppress(httpx.TransportError):
            if running.get("/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(running.lines)


def _drain(running: Running) -> None:
    assert running.process.stderr is not None
    running.lines.extend(running.process.stderr)


class Local:
    """The app in this process, on an event loop of its own; one that is shared by a module's tests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service, client: httpx.AsyncClient) -> None:
        self.service, self.faults = service, list[BaseException]()
        self._loop, self.client = loop, client

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(90)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return cast("httpx.Response", self.run(self.client.get(path, timeout=60, **more)))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return cast("httpx.Response", self.run(self.client.post(path, json=body, timeout=60, **more)))

    def together(self, path: str, bodies: list[Any], **more: Any) -> list[httpx.Response]:
        """Several requests at once."""

        async def all_of_them() -> list[httpx.Response]:
            calls = (self.client.post(path, json=body, timeout=60, **more) for body in bodies)
            return list(await asyncio.gather(*calls))

        return cast("list[httpx.Response]", self.run(all_of_them()))

    def error(self, path: str, body: Any, status: int = 400, **more: Any) -> dict[str, Any]:
        """The error that a request is refused with."""
        answer = self.post(path, body, **more)
        assert answer.status_code == status, (answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    def events(self, path: str, body: Any, **more: Any) -> list[dict[str, Any]]:
        """What a stream sends, as objects; the mark at its end must be there."""
        answer = self.post(path, {**body, "stream": True}, **more)
        assert answer.status_code == 200, answer.text
        return parsed_events(answer.text)

    def metric(self, name: str) -> float:
        return metric(self.get("/metrics").text, name)


def parsed_events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    data = [line.removeprefix("data: ") for block in blocks for line in block.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


@contextlib.contextmanager
def local(llm: LLM, tracing: Tracing | None = None, **settings: Any) -> Iterator[Local]:
    """Serve a loaded model in this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    service = Service(ServerSettings(**{"allowed_hosts": ("test",), **settings}), Metrics(), tracing)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://test")
    server = Local(loop, service, client)
    try:
        server.run(service.start(llm, server.faults.append))
        yield server
    finally:
        server.run(client.aclose())
        server.run(service.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
