"""How an engine is set up: settings grouped by what they are for, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

__all__ = ["DRAFT_QUANTIZATIONS", "MAX_DRAFT_TOKENS", "EngineConfig", "Method", "SpeculationConfig", "Verification"]

MAX_DRAFT_TOKENS = 64
DRAFT_QUANTIZATIONS = ("fp8", "int8", "int4")


class Method(StrEnum):
    """Where guesses come from."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


class Verification(StrEnum):
    """How guesses are judged; all but TYPICAL leave the target's distribution untouched."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"

    @property
    def draws_guesses(self) -> bool:
        """Whether guesses are drawn independently and q is needed."""
        return self in (Verification.REJECTION, Verification.BLOCK)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def _one_of(name: str, value: str, kind: type[StrEnum]) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(str(one)) for one in kind)
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}") from None


@dataclass(frozen=True)
class SpeculationConfig:
    """What drafts, how far, and how guesses are judged.

    Args:
        method: "none", "ngram" or "draft_model".
        model: The draft: a Hub id, folder, GGUF file, transformers model or `LLM`.
        num_speculative_tokens: Guesses a round at most, 0 to 64.
        verification: "coupled", "rejection", "block" or (lossy) "typical".
        prompt_lookup_max: Longest run of tokens that lookup matches.
        prompt_lookup_min: Shortest one.
        allow_failure: Go on without a draft (with a warning) where it cannot be loaded.
        draft_quantization: Weights of the draft model in "fp8", "int8" or "int4". This and the next two change how
            fast guesses come and how often they are right, never the text.
        draft_vocab_size: How many token ids the draft may guess: the most frequent ones, for a smaller head.
        draft_vocab_corpus: A text or .jsonl file that tells which are frequent; None goes by the tokenizer's order.
    """

    method: Method = Method.NONE
    model: Any = None
    num_speculative_tokens: int = 5
    verification: Verification = Verification.COUPLED
    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 1
    allow_failure: bool = False
    draft_quantization: str | None = None
    draft_vocab_size: int | None = None
    draft_vocab_corpus: str | Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _one_of("method", self.method, Method))
        object.__setattr__(self, "verification", _one_of("verification", self.verification, Verification))
        _whole("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        _whole("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _whole("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if self.method is Method.DRAFT_MODEL and self.model is None:
            raise ConfigError("method 'draft_model' needs a draft: pass speculative_model=...")
        if self.method is not Method.DRAFT_MODEL and self.model is not None:
            raise ConfigError(
                f"method {str(self.method)!r} takes no draft model, got {self.model!r}; "
                "leave speculative_model out or use method='draft_model'"
            )
        self._check_draft()

    def _check_draft(self) -> None:
        """Check what only a draft model can be given."""
        given = {
            "draft_quantization": self.draft_quantization,
            "draft_vocab_size": self.draft_vocab_size,
            "draft_vocab_corpus": self.draft_vocab_corpus,
        }
        for name, value in given.items():
            if value is not None and self.method is not Method.DRAFT_MODEL:
                raise ConfigError(
                    f"{name}={value!r} is for a draft model, and method {str(self.method)!r} has none; "
                    "pass speculative_model=... or leave it out"
                )
        if self.draft_quantization is not None and self.draft_quantization not in DRAFT_QUANTIZATIONS:
            allowed = ", ".join(map(repr, DRAFT_QUANTIZATIONS))
            raise ConfigError(f"draft_quantization must be one of {allowed} or None, got {self.draft_quantization!r}")
        if self.draft_vocab_size is not None:
            _whole("draft_vocab_size", self.draft_vocab_size, 1)
        if self.draft_vocab_corpus is None:
            return
        if self.draft_vocab_size is None:
            raise ConfigError(
                f"draft_vocab_corpus={str(self.draft_vocab_corpus)!r} tells which tokens to keep, but not how many; "
                "pass draft_vocab_size too"
            )
        if not isinstance(self.draft_vocab_corpus, str | Path):
            raise ConfigError(f"draft_vocab_corpus must be the path of a file, got {self.draft_vocab_corpus!r}")
        object.__setattr__(self, "draft_vocab_corpus", Path(self.draft_vocab_corpus).expanduser())
        if not Path(self.draft_vocab_corpus).is_file():
            raise ConfigError(f"draft_vocab_corpus {self.draft_vocab_corpus} is not a file; check the path")


@dataclass(frozen=True)
class EngineConfig:
    """What the engine may use.

    Args:
        max_model_len: Longest sequence, prompt and output together; None takes what model and memory allow.
        max_num_seqs: Sequences decoded together.
        gpu_memory_utilization: Share of a CUDA card's memory to use in all, (0, 1].
        kv_cache_bytes: Memory for keys and values; None: on CUDA what the share above leaves, on a CPU up to a
            quarter of the free memory.
        prefill_chunk_size: Prompt tokens fed between two rounds.
        exact: Rounds of one fixed shape, so that speculation cannot change even the last bit.
        seed: Fixes the seeds of requests that bring none.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    prefill_chunk_size: int = 512
    exact: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2)
        _whole("max_num_seqs", self.max_num_seqs, 1, 4096)
        _whole("prefill_chunk_size", self.prefill_chunk_size, 1)
        if self.kv_cache_bytes is not None:
            _whole("kv_cache_bytes", self.kv_cache_bytes, 1)
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
