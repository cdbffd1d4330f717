"""Outrider, plain and with lookup, in bf16 and quantised."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import Entry, Prompt, Setting
from benchmarks.summary import Run

if TYPE_CHECKING:
    from outrider.llm import LLM

__all__ = ["NGRAMS", "PLAIN", "Ours", "entries"]

PLAIN = "outrider-plain"
LENGTHS = (5, 10)
QUANTIZATIONS = ("int8", "int4")
NGRAMS = [  # with the plain engine that each is held against
    *((f"outrider-ngram{length}", PLAIN) for length in LENGTHS),
    *((f"outrider-{kind}-ngram5", f"outrider-{kind}-plain") for kind in QUANTIZATIONS),
]


class Ours:
    """Outrider as a user gets it: `LLM(...)` and `generate`, with ``speculation="auto"`` or "off"."""

    def __init__(
        self, setting: Setting, *, lookahead: int = 0, quantization: str | None = None, dtype: str = "bfloat16"
    ) -> None:
        from outrider import LLM

        self.lookahead = lookahead
        self.llm: LLM = LLM(
            str(setting.gguf),
            method="ngram" if lookahead else "none",
            num_speculative_tokens=max(lookahead, 1),
            dtype=dtype,
            device="cpu",
            quantization=quantization,
            max_model_len=setting.max_length,
            enable_prefix_caching=False,  # the same prompts come again and again, and are read each time
        )
        self._said = {"dtype": dtype, "quantization": quantization, "num_speculative_tokens": lookahead}

    def generate(self, prompt: Prompt, num_tokens: int) -> Run:
        """Generate through the public interface; the times are those of the request's own books."""
        from outrider import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, speculation="auto" if self.lookahead else "off"
        )
        began = time.perf_counter()
        output = self.llm.generate(prompt_token_ids=list(prompt.token_ids), sampling_params=params, progress=False)[0]
        total = time.perf_counter() - began
        done, stats = output.outputs[0], output.stats
        # A first round with guesses gives several tokens at once: accepted ones, and the target's own after them.
        first = next((place for place, origin in enumerate(done.origins) if origin != "accepted"), 0) + 1
        return Run(
            engine="",
            prompt=prompt.name,
            repeat=-1,
            prompt_tokens=len(prompt.token_ids),
            tokens=len(done.token_ids),
            first_tokens=first,
            first_seconds=stats.first_token_seconds,
            decode_seconds=stats.seconds - stats.first_token_seconds,
            total_seconds=total,
            token_ids=done.token_ids,
            text=done.text,
            drafted=stats.drafted if self.lookahead else None,
            accepted=stats.accepted if self.lookahead else None,
            rounds=stats.rounds if self.lookahead else None,
        )

    def describe(self) -> dict[str, Any]:
        """Give dtype, quantisation and draft length."""
        return self._said

    def close(self) -> None:
        """Drop the caches."""
        self.llm.close()


def entries() -> list[Entry]:
    """Give all of ours: plain first."""
    found = [Entry(PLAIN, Ours)]
    found += [Entry(f"outrider-ngram{length}", partial(Ours, lookahead=length)) for length in LENGTHS]
    for kind in QUANTIZATIONS:
        found.append(Entry(f"outrider-{kind}-plain", partial(Ours, quantization=kind)))
        found.append(Entry(f"outrider-{kind}-ngram5", partial(Ours, quantization=kind, lookahead=5)))
    return found
