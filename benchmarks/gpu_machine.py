"""What a GPU benchmark notes of its machine, and how it ends what it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["driver", "end", "has_compiled_kernels", "pair_options", "slug", "versions"]

PACKAGES = ("outrider", "torch", "triton", "transformers", "safetensors", "accelerate")


def pair_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which synthetic pair to run on, and where it is kept."""
    add = parser.add_argument
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "outrider-pair", help="for the pair; kept")
    add("--target", help="shape of the target (llama-3.1-8b); see outrider pair --help")
    add("--draft", help="shape of the draft (llama-3.2-1b)")
    add("--seed", type=int, default=0)
    add("--draft-quantization", help="passed on to LLM")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def driver() -> str | None:
    """The NVIDIA driver's version; None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def slug(name: str) -> str:
    """A card's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def has_compiled_kernels(folder: str | None) -> bool:
    """Whether kernels that Triton compiled earlier are there to be found (under `folder`, else where it looks)."""
    usual = os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")
    triton = Path(folder) / "triton" if folder else Path(usual)
    return triton.is_dir() and any(triton.iterdir())


def end(child: subprocess.Popen[Any]) -> None:
    """End what is left of a process and of those that it started, so that the card's memory is free."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
