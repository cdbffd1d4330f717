"""Kernels compiled in other processes: found on disk afterwards, here, without a card (but with Triton's compiler)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import json
from functools import partial

import torch
from triton.compiler.compiler import ASTSource
from triton.runtime.driver import driver

from outrider.kernels.compilers import compile_apart, wanted_by
from outrider.kernels.jit.compile_worker import AbsentCard
from outrider.kernels.jit.products import silu_mul_kernel

driver.set_active(AbsentCard("cuda", 90, 32))
both, out = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(4, 32, dtype=torch.bfloat16)
how = {"grid": (1, 1), "num_warps": 4, "launch_pdl": False}
work = [
    partial(silu_mul_kernel.warmup, both, out, 32, 64, "silu", block, False, **how) for block in (2, 4, 8, 16, 32, 64)
]
wanted = wanted_by([*work, *work, lambda: 1 / 0])  # what cannot be told is left for later
assert len(wanted) == 6, wanted
damaged = [json.dumps(json.loads(job) | {"module": "os", "name": name}) for name, job in zip("abcdef", wanted)]
assert compile_apart(damaged) == 0  # nothing but our own kernels, and a failure is told
assert compile_apart(wanted[:3]) == 0  # too few to start processes for
assert compile_apart(wanted) == 6


def missing(*_, **__):
    raise AssertionError("compiled once more")


make_ir, ASTSource.make_ir = ASTSource.make_ir, missing
assert all(one() is not None for one in work)
assert wanted_by(work) == []
try:  # the guard guards
    silu_mul_kernel.warmup(both, out, 32, 64, "silu", 128, False, **how)
except AssertionError:
    print("held")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_what_others_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
