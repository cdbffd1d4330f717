"""The cost of one pass by the number of positions fed, at a context of about 200 tokens: ours and transformers'."""

from __future__ import annotations

import time
from inspect import signature
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.stock import stock_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outrider.llm import LLM

__all__ = ["CONTEXT", "WIDTHS", "medians", "passes"]

WIDTHS = (1, 2, 4, 6, 8, 16)
CONTEXT = 200


def passes(llms: dict[str, LLM], folder: Path | None, repeats: int) -> dict[str, dict[int, list[float]]]:
    """Time passes in turn, all engines and widths once in each repeat; the first repeat warms up and is dropped.

    Args:
        llms: Our engines by name.
        folder: The stock model's; None leaves it out.
        repeats: Measured repeats.

    Returns:
        Engine -> width -> seconds of each repeat.
    """
    calls = {name: _our_pass(llm) for name, llm in llms.items()}
    if folder is not None:
        calls["transformers"] = _stock_pass(folder)
    found: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in calls}
    for repeat in range(repeats + 1):
        for width in WIDTHS:
            for name, call in calls.items():
                began = time.perf_counter()
                call(width)
                if repeat:
                    found[name][width].append(time.perf_counter() - began)
                elif width == WIDTHS[0]:
                    call(width)
    return found


def medians(timings: dict[int, list[float]]) -> dict[int, float]:
    """Give the median of each width."""
    return {width: median(values) for width, values in timings.items()}


def _text(vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, vocab_size - 100, (CONTEXT,), generator=generator).tolist()


def _our_pass(llm: LLM) -> Callable[[int], Any]:
    """Feed the context as the engine would, then give a function that runs its target over further positions.

    The runner is called as a round calls it, with the row's own cache blocks; nothing is committed in between.
    """
    from outrider import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, speculation="off")
    text = _text(llm.engine.runner.vocab_size)
    stream = llm.stream(text, params)
    next(stream)
    engine = llm.engine
    sequence = engine.scheduler.running[0]
    room = max(WIDTHS)
    if not engine.scheduler.grow(sequence, len(sequence) + room):
        raise RuntimeError("no cache left for the measurement")
    rows = engine.state.gather([sequence], room=room)

    def call(width: int, _keep: Any = stream) -> Any:
        positions = rows.lengths[:, None] - 1 + torch.arange(width)
        tokens = rows.tokens[:, :width]
        return engine.runner.forward(tokens, positions, rows.tables, rows.host_lengths[0] + width - 1, rows.start)

    return call


def _stock_pass(folder: Path) -> Callable[[int], Any]:
    from transformers import DynamicCache

    model = stock_model(folder)
    ids = torch.tensor([_text(model.config.vocab_size)])
    cache = DynamicCache(config=model.config)
    # transformers renamed the keyword in 5.24.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, **{name: cache})

    def call(width: int) -> Any:
        with torch.inference_mode():
            logits = model(input_ids=ids[:, :width], use_cache=True, **{name: cache}).logits.float()
            cache.crop(-width)
            return logits

    return call
