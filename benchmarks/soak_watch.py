"""What a long run watches: the process, the server's counters, its answers to probes; and what oracles said."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.load_client import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.load_servers import ServerProcess

__all__ = ["Pulse", "Verdicts", "back", "counted", "cpu_seconds", "group_members", "quiet", "reading", "slope"]

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


def cpu_seconds(process: int) -> float:
    """Give the processor time that a process has used, all its threads together."""
    fields = (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    """O5: asks /live again and again while a run goes on.

    Args:
        port: The server's, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._found: dict[str, list[Any]] = {"seconds": [], "failures": []}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        command = (sys.executable, str(Path(__file__).parent / "live_probe.py"), str(self._port))
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        told, _nothing = await self._process.communicate(b"")
        self._found = json.loads(told or '{"seconds": [], "failures": ["the probe ended"]}')

    def judge(self, verdicts: Verdicts) -> None:
        """Say how it went."""
        seconds, failures = self._found["seconds"], self._found["failures"]
        slowest = percentile(seconds, 0.99)
        held = None if slowest is None else slowest <= LIVE_SECONDS and not failures
        seen = {"p99": slowest, "longest": max(seconds, default=None), "probes": len(seconds)}
        verdicts.hold("O5", f"/live within {LIVE_SECONDS} s, p99", held, **seen, failures=failures[:10])
