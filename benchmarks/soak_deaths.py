"""Long runs in which servers end: killed without warning, and asked to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from benchmarks.raw_client import Answer, ask
from benchmarks.soak_watch import group_members

if TYPE_CHECKING:
    from benchmarks.load_servers import ServerProcess
    from benchmarks.soak_site import Site

__all__ = ["kill", "sigterm"]

STREAMS = 64
TOKENS = 200
GONE_SECONDS = 2.0
DRAIN_SECONDS = 30.0


def kill(site: Site) -> None:
    """Kill -9 under load: children go, the port is free at once, and the next one says the same."""
    count = site.options.count or 50
    port: int | None = None
    for turn in range(count):
        site.progress(f"death {turn + 1} of {count}", turn)
        server = site.start(port)
        port = server.port
        site.record.setdefault("ready_seconds", []).append(site.ready(server))
        answers = asyncio.run(_struck(site, server, signal.SIGKILL))
        began = time.perf_counter()
        while (left := group_members(server.process.pid)) and time.perf_counter() - began < 3 * GONE_SECONDS:
            server.process.poll()
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        site.record.setdefault("gone_seconds", []).append(seconds)
        if left or seconds > GONE_SECONDS:
            site.verdicts.hold("kill", f"children of death {turn + 1} are gone", False, left=left, seconds=seconds)
        site.outcomes["broken off"] += sum(not answer.whole for answer in answers)
        server.stop()
    server = site.start(port)
    site.ready(server)
    asyncio.run(_witness(site, server))
    gone = max(site.record["gone_seconds"])
    site.verdicts.hold("kill", f"children are gone within {GONE_SECONDS} s", gone <= GONE_SECONDS, longest=gone)
    site.verdicts.hold("kill", "every server came up again on the same port", True, times=count)
    server.stop()


def sigterm(site: Site) -> None:
    """SIGTERM under 64 streams: they end whole, new ones are refused, and the process ends with 0."""
    count = site.options.count or 100
    for turn in range(count):
        site.progress(f"stop {turn + 1} of {count}", turn)
        server = site.start()
        site.ready(server)
        answers = asyncio.run(_struck(site, server, signal.SIGTERM))
        began = time.perf_counter()
        code = server.stop(DRAIN_SECONDS + 5)
        *streams, late = answers
        for number, answer in enumerate(streams):
            site.check(number, TOKENS, answer, f"a stream that SIGTERM met, turn {turn}")
        refused = late.status == 503 or late.error.startswith("ConnectionRefused")
        seen = {"turn": turn, "status": late.status, "error": late.error}
        site.verdicts.hold("drain", "a new request is refused", refused, **seen)
        left = group_members(server.process.pid)
        site.verdicts.hold("drain", "it ends with 0, and nothing is left", code == 0 and not left, code=code, left=left)
        site.record.setdefault("stop_seconds", []).append(time.perf_counter() - began)


async def _struck(site: Site, server: ServerProcess, number: signal.Signals) -> list[Answer]:
    """Send a signal to a server once streams run; give their answers, and that to a request sent right after."""
    streams = [
        asyncio.ensure_future(ask(server.port, site.body(place, TOKENS), seconds=DRAIN_SECONDS + 10))
        for place in range(STREAMS)
    ]
    await asyncio.sleep(0.7)
    server.process.send_signal(number)
    await asyncio.sleep(0.2)
    late = await ask(server.port, site.body(0, 4), seconds=20)
    return [*await asyncio.gather(*streams), late]


async def _witness(site: Site, server: ServerProcess) -> None:
    for number in range(8):
        site.check(number, TOKENS, await ask(server.port, site.body(number, TOKENS)), "after the last death")
