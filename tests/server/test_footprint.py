"""What a server holds does not grow with what it saw: bytes and collections are counted, in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from outrider.server.footprint import STORES
from tests.server.harness import ROOT

# The server's own `serve`, with a loader that counts and then gives up. `mallinfo2` counts bytes in use, not pages, and
# this process has one arena, so nothing but what was asked for and not given back can make it grow.
SCRIPT = """
import ctypes, gc, json, sys
from collections import deque

import torch

from outrider.errors import ConfigError
from outrider.model.quantize import pack
from outrider.server.binding import bound
from outrider.server.footprint import settle
from outrider.server.run import serve
from outrider.server.settings import ServerSettings

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Heap
library.mallopt(-8, 1)  # M_ARENA_MAX: only what is of the main arena is counted

def products():
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = pack(torch.randn(96, 64, dtype=dtype), None)
        if layer is None:
            continue
        rows = torch.randn(512, 64, dtype=dtype)
        heap = []
        for first in (2, 102, 202):
            for length in range(first, first + 100):
                layer(rows[:length])
            heap.append(library.mallinfo2().uordblks)
        found[str(dtype)] = heap
    return found

def collections():
    settle()
    held, before = deque(maxlen=3000), gc.get_stats()[2]["collections"]
    for _ in range(100_000):  # each is a circle, and old by the time it is let go
        circle = []
        circle.append(circle)
        held.append(circle)
    circles = sum(type(one) is list for one in gc.get_objects())
    return {"full": gc.get_stats()[2]["collections"] - before, "circles": circles}

def load():
    with torch.inference_mode():
        told.update(heap=products(), **collections())
    raise ConfigError("enough")

torch.set_num_threads(1)
told = {}
code = serve(bound("127.0.0.1", 0), ServerSettings(port=0), load, lambda line: None)
print(json.dumps({"code": code, **told}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is counted by glibc's mallinfo2")
def test_memory_does_not_grow_with_shapes_and_old_garbage_is_collected() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in STORES}
    environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(
        (sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert not ran.returncode, ran.stderr
    told = json.loads(ran.stdout)
    assert told["code"] == 2
    for dtype, (_, second, third) in told["heap"].items():
        assert third - second < 4 << 20, f"{dtype}: a hundred new shapes took {third - second} bytes"
    assert told["full"] > 0
    assert told["circles"] < 50_000


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.server.footprint import bound_native_stores

    for name in STORES:
        monkeypatch.setenv(name, "")  # so that whatever is set here is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    bound_native_stores()
    assert {name: os.environ[name] for name in STORES} == {**STORES, "LRU_CACHE_CAPACITY": "7"}
