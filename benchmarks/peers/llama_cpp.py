"""llama.cpp on the very GGUF, through xllamacpp's in-process server: plain, and its n-gram speculation."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks.peers.contestant import Entry, Prompt, Setting
from benchmarks.peers.isolated import Isolated
from benchmarks.summary import Run

__all__ = ["PLAIN", "LlamaCpp", "entries"]

PLAIN = "llamacpp-plain"
# llama.cpp's own defaults look for 12 equal tokens and copy 48; the "short" ones are nearest to prompt lookup.
VARIANTS: dict[str, tuple[str, dict[str, int]]] = {
    "llamacpp-ngram-simple": ("NGRAM_SIMPLE", {}),
    "llamacpp-ngram-simple-short": ("NGRAM_SIMPLE", {"size_n": 3, "size_m": 10}),
    "llamacpp-ngram-map-k": ("NGRAM_MAP_K", {}),
    "llamacpp-ngram-mod": ("NGRAM_MOD", {}),
    "llamacpp-ngram-cache": ("NGRAM_CACHE", {}),
}


class LlamaCpp:
    """A server without HTTP. The prompt goes in as token ids; prompt and decode time are llama.cpp's own figures."""

    def __init__(self, setting: Setting, *, kind: str | None = None, options: dict[str, int] | None = None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(setting.gguf)
        params.n_ctx = setting.max_length
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setting.num_threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        self.said: dict[str, Any] = {"weights": setting.gguf.name, "speculation": kind, "options": options or {}}
        if kind is not None:
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
            for name, value in (options or {}).items():
                setattr(getattr(params.speculative, kind.lower()), name, value)
        self._speculates = kind is not None
        self._server: Any = xllamacpp.Server(params)

    def generate(self, prompt: Prompt, num_tokens: int) -> Run:
        """Generate in one call, no streaming: handing out pieces through Python would cost llama.cpp time."""
        request = {
            "prompt": list(prompt.token_ids),
            "n_predict": num_tokens,
            "temperature": 0,
            "repeat_penalty": 1.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "verbose": True,
        }
        began = time.perf_counter()
        answer = self._server.handle_completions(request)
        total = time.perf_counter() - began
        if not isinstance(answer, dict) or "timings" not in answer:
            raise RuntimeError(f"llama.cpp gave no timings: {str(answer)[:300]}")
        timings = answer["timings"]
        drafted = timings.get("draft_n", 0) if self._speculates else None
        accepted = timings.get("draft_n_accepted", 0) if self._speculates else None
        return Run(
            engine="",
            prompt=prompt.name,
            repeat=-1,
            prompt_tokens=timings["prompt_n"],
            tokens=timings["predicted_n"],
            first_tokens=1,  # its clock for decoding starts when the first token is there
            first_seconds=timings["prompt_ms"] / 1000,
            decode_seconds=timings["predicted_ms"] / 1000,
            total_seconds=total,
            token_ids=tuple(answer.get("__verbose", {}).get("tokens", ())),
            text=answer["choices"][0]["text"],
            drafted=drafted,
            accepted=accepted,
            rounds=timings["predicted_n"] - accepted if accepted is not None else None,
        )

    def describe(self) -> dict[str, Any]:
        """Give the weights and the kind of speculation."""
        return self.said

    def close(self) -> None:
        """Stop the server."""
        self._server = None


def entries() -> list[Entry]:
    """Give plain and every n-gram kind of this build, each in a process of its own."""
    apart = partial(Isolated, make=LlamaCpp)
    speculative = [
        Entry(name, partial(apart, kind=kind, options=options)) for name, (kind, options) in VARIANTS.items()
    ]
    return [Entry(PLAIN, apart), *speculative]
