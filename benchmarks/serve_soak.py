"""Long runs of the server, one mode at a time: what it is put through, what was seen, and which oracles held.

    python benchmarks/serve_soak.py disconnects              # 10 000 streams cut at a random token, by FIN or RST
    python benchmarks/serve_soak.py soak --seconds 28800     # 70 % load for eight hours
    python benchmarks/serve_soak.py burst                    # 1000 connections in a second, 50 times
    python benchmarks/serve_soak.py overload --seconds 600   # 4 and 16 times capacity, ten minutes each
    python benchmarks/serve_soak.py kill                     # kill -9 under load, restart on the same port, 50 times
    python benchmarks/serve_soak.py sigterm                  # SIGTERM under 64 streams, 100 times
    python benchmarks/serve_soak.py fuzz --count 100000      # damaged requests

The server is a real process with a tiny synthetic pair, whose text is known, so every text that is read to its end is
checked. A record is written under benchmarks/records/, whatever happens; the exit code is 1 where an oracle failed.
What each oracle says: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.gpu_machine import slug, versions  # noqa: E402
from benchmarks.record import machine  # noqa: E402
from benchmarks.soak_deaths import kill, sigterm  # noqa: E402
from benchmarks.soak_fuzz import fuzz  # noqa: E402
from benchmarks.soak_modes import burst, disconnects, overload, soak  # noqa: E402
from benchmarks.soak_site import Site  # noqa: E402
from benchmarks.terminal import Console, Table  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODES: dict[str, Callable[[Site], None]] = {
    "disconnects": disconnects, "soak": soak, "burst": burst, "overload": overload, "kill": kill, "sigterm": sigterm,
    "fuzz": fuzz,
}  # fmt: skip


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 180)
    _many_files()
    began, date, load = time.perf_counter(), datetime.now(UTC), os.getloadavg()
    site = Site(options, console)
    failure = ""
    try:
        MODES[options.mode](site)
    except Exception as error:  # noqa: BLE001 - what was seen until then is kept, and the exit code tells
        failure = f"{type(error).__name__}: {error}"
        console.print(f"the run broke off: {failure}", style="red", markup=False)
    record: dict[str, Any] = {
        "benchmark": "serve_soak",
        "mode": options.mode,
        "date": date.isoformat(timespec="seconds"),
        "machine": machine(load),
        "versions": versions(),
        "options": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "seconds": time.perf_counter() - began,
        "failure": failure,
        **site.finished(),
    }
    path = (
        options.out
        or HERE / "records" / f"serve_soak-{options.mode}-{date:%Y-%m-%d}-{slug(record['machine']['cpu'])}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(_table(record["verdicts"]))
    console.print(f"outcomes: {dict(site.outcomes)}; texts checked: {site.texts}", markup=False)
    console.print(f"Record: {path} ({record['seconds']:.0f} s)", soft_wrap=True)
    sys.exit(bool(failure) or not record["held"])


def _many_files() -> None:
    """Let this process, and those that it starts, have as many connections as the system allows."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _table(verdicts: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Oracles", title_justify="left", title_style="bold")
    for name in ("oracle", "what", "held", "seen"):
        table.add_column(name)
    for one in sorted(verdicts, key=lambda one: one["held"] is not False)[:60]:
        held = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "not judged"}[one["held"]]
        table.add_row(one["oracle"], one["what"], held, json.dumps(one["seen"], default=str)[:100].replace("[", "("))
    return table


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mode", choices=list(MODES))
    add("--count", type=int, help="streams, bursts, deaths or cases (by the mode: see above)")
    add("--seconds", type=float, default=120, help="of soak, and of each stage of overload (120)")
    add("--connections", type=int, default=1000, help="of a burst (1000)")
    add("--max-num-seqs", type=int, default=16, help="texts that the server runs together (16)")
    add("--threads", type=int, default=1, help="the server's CPU threads (1)")
    add("--seed", type=int, default=0, help="of everything random here (0)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "outrider-soak", help="for the pair; kept")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    options.work = options.work.expanduser().resolve()
    return options


if __name__ == "__main__":
    main()
