"""transformers' own `generate`, plain and with prompt lookup, on the same weights in bf16."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.contestant import Entry, Prompt, Setting
from benchmarks.summary import Run
from outrider.model.stock import Clock

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOOKUPS", "PLAIN", "Stock", "entries", "stock_model"]

PLAIN = "transformers-plain"
LENGTHS = (5, 10)
LOOKUPS = [f"transformers-lookup{length}" for length in LENGTHS]

_models: dict[str, Any] = {}


def stock_model(folder: Path) -> Any:
    """Load the model as transformers would by default (SDPA attention), once for all settings."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    if str(folder) not in _models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        model.generation_config = GenerationConfig(pad_token_id=0)  # no end-of-sequence: every run has full length
        _models[str(folder)] = model
    return _models[str(folder)]


class Stock:
    """`model.generate`, greedy, one prompt at a time."""

    def __init__(self, setting: Setting, *, lookup: int | None = None) -> None:
        self.model = stock_model(setting.folder)
        self.lookup = lookup

    @torch.inference_mode()
    def generate(self, prompt: Prompt, num_tokens: int) -> Run:
        """Generate, with a streamer as the clock."""
        extra = {} if self.lookup is None else {"prompt_lookup_num_tokens": self.lookup}
        ids = torch.tensor([prompt.token_ids])
        clock = Clock()
        began = time.perf_counter()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            streamer=clock,
            **extra,
        )
        total = time.perf_counter() - began
        new = tuple(output[0, len(prompt.token_ids) :].tolist())
        return Run(
            engine="",
            prompt=prompt.name,
            repeat=-1,
            prompt_tokens=len(prompt.token_ids),
            tokens=len(new),
            first_tokens=clock.counts[1],
            first_seconds=clock.times[1] - began,
            decode_seconds=clock.times[-1] - clock.times[1],
            total_seconds=total,
            token_ids=new,
            rounds=len(clock.counts) - 1 if self.lookup is not None else None,
        )

    def describe(self) -> dict[str, Any]:
        """Give dtype, attention and draft length."""
        return {
            "dtype": "bfloat16",
            "attention": self.model.config._attn_implementation,  # noqa: SLF001
            "prompt_lookup_num_tokens": self.lookup,
        }

    def close(self) -> None:
        """Drop the shared model."""
        _models.clear()


def entries() -> list[Entry]:
    """Give plain and lookup."""
    lookups = [Entry(name, partial(Stock, lookup=length)) for name, length in zip(LOOKUPS, LENGTHS, strict=True)]
    return [Entry(PLAIN, Stock), *lookups]
