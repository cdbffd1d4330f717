"""What a long run watches: the process, the server's counters, its answers to probes; and what oracles said."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.load_client import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.load_servers import ServerProcess

__all__ = ["Pulse", "Verdicts", "back", "counted", "group_members", "quiet", "reading", "slope"]

LIVE_SECONDS = 0.1  # O5
WITHIN = 0.02  # O6
QUIET_SECONDS = 30.0
AT_REST = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")


@dataclass
class Verdicts:
    """What the oracles said (shared names, O1 to O8: docs/reliability.md).

    Attributes:
        all: Each with the oracle, what was held against what, whether it held (None: not judged), and what was seen.
    """

    all: list[dict[str, Any]] = field(default_factory=list)

    def hold(self, oracle: str, what: str, held: bool | None, **seen: Any) -> None:
        """Note one."""
        self.all.append({"oracle": oracle, "what": what, "held": held, "seen": seen})

    @property
    def broken(self) -> list[dict[str, Any]]:
        """Those that did not hold."""
        return [one for one in self.all if one["held"] is False]


def reading(process: int) -> dict[str, int]:
    """Give bytes resident, open files and threads of a process."""
    folder = Path("/proc") / str(process)
    pages = int((folder / "statm").read_text().split()[1])
    files, threads = ((sum(1 for _ in (folder / name).iterdir())) for name in ("fd", "task"))
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "files": files, "threads": threads}


def group_members(group: int) -> list[int]:
    """Give the processes of a process group that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(its_group) == group and state != "Z":
                found.append(int(folder.name))
    return found


def counted(server: ServerProcess, name: str, **labels: str) -> float:
    """Give a metric, summed over the labels that are not named; 0 where it has not been counted yet."""
    total = 0.0
    for line in server.get("/metrics").text.splitlines():
        match = re.match(rf"outrider_{name}(?:\{{(.*)\}})? (\S+)$", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


def quiet(server: ServerProcess, verdicts: Verdicts, when: str) -> None:
    """O2: wait until nothing runs, and see that no block of the cache is held."""
    began, left = time.perf_counter(), dict.fromkeys(AT_REST, 1.0)
    while any(left.values()) and time.perf_counter() - began < QUIET_SECONDS:
        left = {name: counted(server, name) for name in AT_REST}
        time.sleep(0.1)
    verdicts.hold("O2", f"nothing is held {when}", not any(left.values()), seconds=time.perf_counter() - began, **left)


def back(before: dict[str, int], after: dict[str, int], verdicts: Verdicts, when: str) -> None:
    """O6: memory, files and threads are what they were, within 2 %; less is fine."""
    for name, was in before.items():
        room = max(WITHIN * was, 2 if name != "rss" else 0)
        verdicts.hold("O6", f"{name} {when}", after[name] <= was + room, before=was, after=after[name])


def slope(samples: Sequence[tuple[float, float]]) -> float | None:
    """Give the rise a second of (seconds, value) by least squares; None of fewer than three."""
    if len(samples) < 3:
        return None
    middle = sum(at for at, _ in samples) / len(samples)
    mean = sum(value for _, value in samples) / len(samples)
    spread = sum((at - middle) ** 2 for at, _ in samples)
    return sum((at - middle) * (value - mean) for at, value in samples) / spread if spread else None


class Pulse:
    """O5: asks /live again and again, as an orchestrator would, over a connection of its own each time.

    Args:
        port: The server's, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def judge(self, verdicts: Verdicts) -> None:
        """Say how it went."""
        slowest = percentile(self.seconds, 0.99)
        held = None if slowest is None else slowest <= LIVE_SECONDS and not self.failures
        seen = {"p99": slowest, "longest": max(self.seconds, default=None), "probes": len(self.seconds)}
        verdicts.hold("O5", f"/live within {LIVE_SECONDS} s, p99", held, **seen, failures=self.failures[:10])

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(10):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    head = f"GET /live HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\nconnection: close\r\n\r\n"
                    writer.write(head.encode())
                    line = await reader.readline()
                    writer.close()
                self.seconds.append(time.perf_counter() - began)
                if b" 200 " not in line:
                    self.failures.append(line.decode(errors="replace"))
            except (OSError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
