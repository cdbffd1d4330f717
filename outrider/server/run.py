"""A server's life: bind, load, serve, drain, end, and the exit code that says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.errors import OutriderError
from outrider.server.app import make_app
from outrider.server.binding import BACKLOG
from outrider.server.errors import draining, engine_failed
from outrider.server.footprint import bound_native_stores, settle
from outrider.server.metrics import Metrics
from outrider.server.service import Service
from outrider.server.wire import wire_with

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from outrider.llm import LLM
    from outrider.server.settings import ServerSettings
    from outrider.server.tracing import Tracing

__all__ = ["ENGINE_FAILED", "serve"]

logger = logging.getLogger("outrider")
ENGINE_FAILED = 70  # the exit code when the engine failed: EX_SOFTWARE
LAST_WORDS_SECONDS = 1.0  # for error events to reach their clients before the process ends
WATCH_SECONDS = 0.5
ACCEPTED = 32  # connections a turn of the loop: those that came first are answered before all that wait are taken in


def serve(
    taken: socket.socket,
    settings: ServerSettings,
    load: Callable[[], LLM],
    announce: Callable[[str], None],
    tracing: Tracing | None = None,
) -> int:
    """Serve until a signal or a fault; give the exit code.

    Args:
        taken: Where to listen.
        settings: How to serve.
        load: Loads the model; called in a thread, while probes are answered.
        announce: Says a line to whoever started the server.
        tracing: Where spans of requests go; closed at the end.
    """
    bound_native_stores()
    service = Service(settings, Metrics(), tracing)
    try:
        return asyncio.run(_Life(service, taken, load, announce).run())
    finally:
        if tracing is not None:
            tracing.close()


class _Server(uvicorn.Server):
    """uvicorn without its handling of signals, which ours replaces; of connections that wait, some are taken a turn."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. How many may wait is said again here: the event loop takes it for how many to accept at a time."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    """One run of a server."""

    def __init__(
        self, service: Service, taken: socket.socket, load: Callable[[], LLM], announce: Callable[[str], None]
    ) -> None:
        self._service, self._socket, self._load, self._announce = service, taken, load, announce
        settings = service.settings
        config = uvicorn.Config(
            make_app(service), http=wire_with(settings.header_seconds), ws="none", lifespan="off", log_level="warning",
            access_log=False, server_header=False, date_header=True, timeout_graceful_shutdown=5, backlog=ACCEPTED,
            h11_max_incomplete_event_size=settings.max_header_bytes + 16384,
        )  # fmt: skip
        self._server = _Server(config)
        self._code = 0
        self._signals = 0
        self._llm: LLM | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Run it to its end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        self._begin(self._started())
        self._begin(self._watched())
        try:
            await serving
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self._service.close()
        return self._code

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _started(self) -> None:
        """Load the model while the port answers that it is not ready."""
        try:
            self._llm = llm = await _in_daemon(self._load)
            if self._service.draining:
                return
            settle()
            await self._service.start(llm, self._failed)
        except Exception as error:
            expected = isinstance(error, OutriderError | OSError)
            if expected:
                self._announce(f"error: {error}")
            else:
                logger.error("the model could not be loaded", exc_info=error)
                self._announce(f"error: the model could not be loaded: {type(error).__name__}: {error}")
            self._end(2 if expected else 1)
            return
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        model = self._service.model
        self._announce(f"serving {model.name} on http://{shown}:{port} (drafting: {model.method})")

    async def _watched(self) -> None:
        """End a process whose engine hangs: nobody gets an answer from it any more."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not self._service.alive and self._service.fault is None:
                logger.critical("the engine shows no signs of life; these are its threads")
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._failed(TimeoutError("the engine hangs"))

    def _failed(self, fault: BaseException) -> None:
        """After the engine's fault: unready at once, tell those who wait, then end."""
        if self._service.fault is not None:
            return
        self._service.fault = fault
        self._service.fail_all(engine_failed())
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._end, ENGINE_FAILED)

    def _signalled(self) -> None:
        """Drain on the first signal, stop on the second."""
        self._signals += 1
        if self._signals > 1:
            self._service.fail_all(draining())
            self._server.force_exit = True
            self._end(0)
            return
        self._service.drain()
        self._announce("draining: no new requests are taken; a second signal stops at once")
        self._begin(self._drained())

    async def _drained(self) -> None:
        if not await self._service.drained(self._service.settings.drain_seconds):
            self._service.fail_all(draining())
            await self._service.drained(LAST_WORDS_SECONDS)
        self._end(0)

    def _end(self, code: int) -> None:
        self._code = self._code or code
        self._server.should_exit = True


async def _in_daemon(work: Callable[[], Any]) -> Any:
    """Run something in a thread that does not keep the process alive: a load cannot be interrupted."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            tell(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
            tell(done.set_exception, error)

    threading.Thread(target=run, name="outrider-load", daemon=True).start()
    return await done
