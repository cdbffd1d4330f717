"""How an engine is set up: settings grouped by what they are for, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

__all__ = [
    "DRAFT_QUANTIZATIONS",
    "MAX_DRAFT_TOKENS",
    "MAX_TREE_NODES",
    "EngineConfig",
    "Method",
    "SpeculationConfig",
    "Verification",
    "check_drafted",
    "methods_of",
]

MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 63  # with their root they fill the bits of an ancestor mask
CROSSINGS = ("off", "auto", "tokens", "text")
DRAFT_QUANTIZATIONS = ("fp8", "int8", "int4")


class Method(StrEnum):
    """Where guesses come from."""

    NONE = "none"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EARLY_EXIT = "early_exit"
    MEDUSA = "medusa"
    EAGLE = "eagle"
    MTP = "mtp"
    DFLASH = "dflash"

    @property
    def takes_model(self) -> bool:
        """Whether it drafts with weights of its own, which must be named."""
        return self in (Method.DRAFT_MODEL, Method.MEDUSA, Method.EAGLE, Method.DFLASH)


METHOD_ALIASES = {"eagle2": "eagle", "eagle3": "eagle", "prompt_lookup": "ngram", "layerskip": "early_exit"}


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


def _switch(name: str, value: object) -> None:
    """Refuse what only looks like a switch: the text "false", say, which Python takes for true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def _one_of(name: str, value: str, kind: type[StrEnum]) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(str(one)) for one in kind)
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}") from None


def methods_of(value: str) -> tuple[Method, ...]:
    """Read a method, or several joined by "+", from cheap to dear as they are named.

    Raises:
        ConfigError: There is no such method, or such a mixture.
    """
    names = [METHOD_ALIASES.get(name, name) for name in str(value).split("+")]
    methods = tuple(dict.fromkeys(_one_of("method", name, Method) for name in names))
    if len(methods) > 1 and Method.NONE in methods:
        raise ConfigError(f"method {value!r} mixes drafting with none; leave 'none' out")
    if sum(method.takes_model for method in methods) > 1:
        raise ConfigError(f"method {value!r} needs two draft models, and one can be named; use one of them")
    return methods


def check_drafted(method: str, model: object) -> None:
    """Refuse a method, or several, that a draft belongs to where none is named.

    Raises:
        ConfigError: None is, or there is no such method.
    """
    if model is None and any(one.takes_model for one in methods_of(method)):
        raise ConfigError(f"method {method!r} needs a draft: pass speculative_model=... (--speculative-model)")


@dataclass(frozen=True)
class SpeculationConfig:
    """What drafts, how far, and how guesses are judged.

    Args:
        method: "none", "ngram", "suffix", "draft_model", "early_exit", "medusa", "eagle", "mtp" or "dflash"; or
            several joined by "+", the cheapest first, such as "ngram+draft_model".
        model: The draft: a Hub id, folder, GGUF file, transformers model or `LLM`; for heads their folder or Hub id.
        num_speculative_tokens: Guesses a round at most, 0 to 64; of trees all nodes count, 63 at most.
        verification: "coupled", "rejection", "block" or (lossy) "typical".
        tree: Guess trees: "auto" lets the method choose their shape; "4x2x1" has 4 guesses first, 2 after each of
            them, 1 after each of those; None guesses chains. A mixture joins its parts' guesses in one tree.
        cross_vocabulary: Let a draft model guess whose tokenizer is another: by the tokens that both know ("tokens"),
            by text ("text"), or whichever suits ("auto"). "off" takes such a pair for a mistake.
        prompt_lookup_max: Longest run of tokens that lookup matches.
        prompt_lookup_min: Shortest one.
        suffix_corpus: A text or .jsonl file in which suffix lookup finds guesses too.
        suffix_sharing: Let suffix lookup find guesses in what earlier requests of the same scope (API key) were given.
        exit_layer: early_exit: draft with so many first layers; None searches for the best number.
        skip_layers: early_exit: draft with all layers but these; "auto" searches for them.
        allow_failure: Go on without a draft (with a warning) where it cannot be loaded.
        draft_quantization: Weights of the draft model in "fp8", "int8" or "int4". This and the next two change how
            fast guesses come and how often they are right, never the text.
        draft_vocab_size: How many token ids the draft may guess: the most frequent ones, for a smaller head.
        draft_vocab_corpus: A text or .jsonl file that tells which are frequent; None goes by the tokenizer's order.

    Attributes:
        methods: The methods that `method` names, in order.
    """

    method: str = Method.NONE
    model: Any = None
    num_speculative_tokens: int = 5
    verification: Verification = Verification.COUPLED
    tree: str | None = None
    cross_vocabulary: str = "off"
    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 1
    suffix_corpus: str | Path | None = None
    suffix_sharing: bool = False
    exit_layer: int | None = None
    skip_layers: str | tuple[int, ...] | None = None
    allow_failure: bool = False
    draft_quantization: str | None = None
    draft_vocab_size: int | None = None
    draft_vocab_corpus: str | Path | None = None

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that `method` names, in order."""
        return methods_of(self.method)

    @property
    def drafts_with_model(self) -> bool:
        """Whether a draft model of its own is among the methods."""
        return Method.DRAFT_MODEL in self.methods

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", "+".join(methods_of(self.method)))
        object.__setattr__(self, "verification", _one_of("verification", self.verification, Verification))
        _whole("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFT_TOKENS)
        _switch("suffix_sharing", self.suffix_sharing)
        _switch("allow_failure", self.allow_failure)
        _whole("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _whole("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        self._check_model()
        self._check_draft()
        self._check_own_settings()
        self._check_tree()

    def _check_model(self) -> None:
        """Check that a draft is named where one is needed, and nowhere else."""
        if isinstance(self.model, str) and not self.model.strip():
            raise ConfigError("speculative_model is empty; give a Hub id, a folder or a .gguf file, or leave it out")
        check_drafted(self.method, self.model)
        wanted = [str(method) for method in self.methods if method.takes_model]
        heads = [name for name in wanted if name != Method.DRAFT_MODEL]
        if heads and not isinstance(self.model, str | Path):
            raise ConfigError(
                f"method {heads[0]!r} takes the folder or Hub id of a head, got {type(self.model).__name__}; "
                "a model drafts with method='draft_model'"
            )
        if not wanted and self.model is not None:
            raise ConfigError(
                f"method {self.method!r} takes no draft model, got {self.model!r}; "
                "leave speculative_model out or use method='draft_model'"
            )

    def _check_own_settings(self) -> None:
        """Check settings that belong to one method."""
        owners = {"suffix_corpus": Method.SUFFIX, "suffix_sharing": Method.SUFFIX}
        owners |= {"exit_layer": Method.EARLY_EXIT, "skip_layers": Method.EARLY_EXIT}
        for name, method in owners.items():
            if getattr(self, name) not in (None, False) and method not in self.methods:
                raise ConfigError(f"{name}={getattr(self, name)!r} is for method {str(method)!r}, not {self.method!r}")
        if self.exit_layer is not None:
            _whole("exit_layer", self.exit_layer, 1)
        if self.skip_layers is not None:
            if self.exit_layer is not None:
                raise ConfigError("exit_layer and skip_layers are two ways to choose the same layers; pass one of them")
            object.__setattr__(self, "skip_layers", _layers(self.skip_layers))
        if self.suffix_corpus is not None:
            object.__setattr__(self, "suffix_corpus", _file("suffix_corpus", self.suffix_corpus))

    def _check_tree(self) -> None:
        if self.tree is None:
            return
        tree = str(self.tree).lower()
        if tree != "auto" and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", tree):
            raise ConfigError(f"tree must be 'auto' or branches a level such as '4x2x1', got {self.tree!r}")
        object.__setattr__(self, "tree", tree)
        if self.num_speculative_tokens > MAX_TREE_NODES:
            raise ConfigError(
                f"a tree holds at most {MAX_TREE_NODES} guesses, got num_speculative_tokens="
                f"{self.num_speculative_tokens}; lower it"
            )
        if tree != "auto" and len(self.methods) > 1:
            raise ConfigError(f"a mixture's tree is made of its parts' guesses: use tree='auto', not {self.tree!r}")

    @property
    def branches(self) -> tuple[int, ...]:
        """Guesses after each node, level by level; empty where the method chooses."""
        return () if self.tree in (None, "auto") else tuple(map(int, str(self.tree).split("x")))

    def _check_draft(self) -> None:
        """Check what only a draft model can be given."""
        given = {
            "draft_quantization": self.draft_quantization,
            "draft_vocab_size": self.draft_vocab_size,
            "draft_vocab_corpus": self.draft_vocab_corpus,
        }
        for name, value in given.items():
            if value is not None and not self.drafts_with_model:
                raise ConfigError(
                    f"{name}={value!r} is for a draft model, and method {self.method!r} has none; "
                    "pass speculative_model=... or leave it out"
                )
        if self.cross_vocabulary not in CROSSINGS:
            allowed = ", ".join(map(repr, CROSSINGS))
            raise ConfigError(f"cross_vocabulary must be one of {allowed}, got {self.cross_vocabulary!r}")
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
        object.__setattr__(self, "draft_vocab_corpus", _file("draft_vocab_corpus", self.draft_vocab_corpus))


def _file(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be the path of a file, got {value!r}")
    path = Path(value).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name} {path} is not a file; check the path")
    return path


def _layers(value: Any) -> str | tuple[int, ...]:
    """Read layers to skip: "auto", "3,5" or a list of numbers."""
    if value == "auto":
        return "auto"
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(sorted({int(part) for part in parts}))
    except (TypeError, ValueError):
        raise ConfigError(f"skip_layers must be 'auto' or layer numbers such as '3,5', got {value!r}") from None


@dataclass(frozen=True)
class EngineConfig:
    """What the engine may use.

    Args:
        max_model_len: Longest sequence, prompt and output together; None takes what model and memory allow.
        max_num_seqs: Sequences decoded together.
        gpu_memory_utilization: Share of a CUDA card's memory to use in all, (0, 1].
        kv_cache_bytes: Memory for keys and values; None: on CUDA what the share above leaves, on a CPU up to a
            quarter of the free memory.
        prefill_chunk_size: Prompt tokens fed between two rounds; a quarter of it, but not below 64, while others decode
            (in exact mode always all of it).
        exact: Rounds of one fixed shape, so that speculation cannot change even the last bit.
        seed: Fixes the seeds of requests that bring none.
        prefix_caching: Keep the cache of texts that ended, and let requests that begin in the same way start from it.
        share_prefixes: Let requests of different scopes (API keys) share too. Off, so that nobody can find out by
            the time of a first token what somebody else asked.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    prefill_chunk_size: int = 512
    exact: bool = False
    seed: int | None = None
    prefix_caching: bool = True
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2)
        _whole("max_num_seqs", self.max_num_seqs, 1, 4096)
        _whole("prefill_chunk_size", self.prefill_chunk_size, 1)
        for name in ("exact", "prefix_caching", "share_prefixes"):
            _switch(name, getattr(self, name))
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.kv_cache_bytes is not None:
            _whole("kv_cache_bytes", self.kv_cache_bytes, 1)
        if not isinstance(self.gpu_memory_utilization, int | float) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
