"""Asks a server's /live ten times a second, in a process of its own: the load's client is too busy to time anything.

    python benchmarks/live_probe.py PORT

Ends when its standard input does, and then writes one JSON object: seconds of the answers, and what else came.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

PAUSE_SECONDS = 0.1


def main() -> None:
    port = int(sys.argv[1])
    seconds: list[float] = []
    failures: list[str] = []
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        began = time.perf_counter()
        try:
            told = _asked(port)
        except OSError as error:
            failures.append(f"{type(error).__name__}: {error}")
            continue
        seconds.append(time.perf_counter() - began)
        if b" 200 " not in told:
            failures.append(told.decode(errors="replace"))
    print(json.dumps({"seconds": seconds, "failures": failures}))


def _asked(port: int) -> bytes:
    """Give the first line of the answer, asked for on a new connection, as an orchestrator would."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"GET /live HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode())
        return connection.makefile("rb").readline()


if __name__ == "__main__":
    main()
