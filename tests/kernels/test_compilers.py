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

from outrider.kernels.compilers import compile_apart, dismiss, expect, wanted_by
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
dismiss()
assert compile_apart(wanted[:3]) == 0  # too few to start processes for
expect()
assert compile_apart(wanted[:3]) == 3  # but they stand already
assert compile_apart(wanted) == 6
dismiss()


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


COVERED = """
import os
from functools import partial
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.driver import driver

from outrider.kernels.compilers import wanted_by
from outrider.kernels.jit import attention, products, rotary, rotate_attend
from outrider.kernels.jit.compile_worker import AbsentCard
from outrider.model import device_decoder
from outrider.model.fuse import optimize
from outrider.model.load import LoadedModel
from outrider.model.runner import TorchRunner

driver.set_active(AbsentCard("cuda", 90, 32))
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
os.environ["OUTRIDER_KERNELS"] = "1"
optimize(model)
del os.environ["OUTRIDER_KERNELS"]
runner = TorchRunner(LoadedModel(model, None, "tiny", (), 4096, 256))
os.environ |= {"TRITON_INTERPRET": "1", "OUTRIDER_KERNELS": "1"}  # kernels are taken; Triton itself is not told
runner.network.device_decoder = device_decoder.DeviceDecoder(model, runner.layers, 4096)
runner._kernels = True
runner.allocate(600)
asked_for = mock.Mock()
with mock.patch.object(device_decoder, "tune", asked_for):
    with mock.patch.object(attention, "processors", lambda _: 132):
        with mock.patch.object(rotate_attend, "processors", lambda _: 132):
            runner.tune([(rows, 1) for rows in (1, 2, 4, 8, 16)], 560)
            asked = set(wanted_by(asked_for.call_args.kwargs["passes"]))
            assert len(asked) > 10, asked


            @torch.inference_mode()
            def fed(rows, width):
                positions = torch.arange(40, 40 + width).repeat(rows, 1)
                tables = torch.arange(2, 2 + rows * 35).view(rows, 35)
                runner.feed(positions * 0, positions, tables, 40 + width, None)


            for rows in (1, 3, 4, 7, 16):
                for width in (1, 2, 3, 5, 9, 16, 17, 33, 64, 65, 100, 200):
                    assert set(wanted_by([partial(fed, rows, width)])) <= asked, (rows, width)
print("covered")
"""

NAMES = """
import importlib
import sys

import triton

from outrider.kernels.jit.compile_worker import OURS, USUAL

modules = [importlib.import_module(OURS + name) for name in USUAL]
kernels = {
    f"{one.__module__}.{name}": one
    for module in modules
    for name, one in vars(module).items()
    if isinstance(one, triton.JITFunction) and one.__module__ == module.__name__
}
for name in sorted(kernels, reverse=sys.argv[1] == "backwards"):
    kernels[name] = kernels[name].cache_key
print(*sorted(kernels.items()), sep="\\n")
"""


def answer_of(script: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_no_kernel_is_left_to_be_compiled_when_a_cache_lags(tmp_path: Path) -> None:
    """Whatever a drafter must read in the middle of texts: a compilation there would hold everybody up for seconds."""
    done = answer_of(COVERED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "covered\n"), done.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_what_others_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    done = answer_of(SCRIPT, tmp_path)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_kernels_name_on_disk_does_not_depend_on_which_were_used_before(tmp_path: Path) -> None:
    """Else one process would not find what another compiled: attention was compiled twice at every first start."""
    forwards, backwards = (answer_of(NAMES, tmp_path, way) for way in ("forwards", "backwards"))
    assert forwards.stdout.count("\n") > 30, forwards.stderr
    assert forwards.stdout == backwards.stdout
