"""What a benchmark varies, checked before anything is loaded; and in which order its settings take turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.trials import OFF, Budget, Setting
from outrider.config import MAX_DRAFT_TOKENS, Method, SpeculationConfig, methods_of
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["AUTO", "Plan", "engine_arguments", "rotated", "whole_numbers"]

AUTO = "auto"
MOST_TOGETHER = 4096
# Settings of one kind of drafter; an engine with another one is not given them.
OWN = {
    "suffix_corpus": Method.SUFFIX,
    "exit_layer": Method.EARLY_EXIT,
    "skip_layers": Method.EARLY_EXIT,
    "draft_quantization": Method.DRAFT_MODEL,
    "draft_vocab_size": Method.DRAFT_MODEL,
    "draft_vocab_corpus": Method.DRAFT_MODEL,
}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        methods: As `SpeculationConfig` knows them; "none" is always among them.
        lengths: Guesses a round; "auto" is measured beside them.
        concurrency: Texts under way at a time.
        temperatures: 0 is greedy.
        budget: Of each text.
        repeats: Turns of each setting.
        warmup: Prompts that each setting reads before the first turn; they are not counted.

    Raises:
        ConfigError: A value is out of range.
    """

    methods: tuple[str, ...]
    lengths: tuple[int, ...] = (3, 5, 8)
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    budget: Budget = field(default_factory=Budget)
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        for name, values, most in (
            ("num_speculative_tokens", self.lengths, MAX_DRAFT_TOKENS),
            ("concurrency", self.concurrency, MOST_TOGETHER),
        ):
            for value in values:
                if not 1 <= value <= most:
                    raise ConfigError(f"every value of {name} must be in [1, {most}], got {value!r}")
        for heat in self.temperatures:
            if not (math.isfinite(heat) and 0 <= heat <= 100):
                raise ConfigError(f"every value of temperature must be in [0, 100], got {heat!r}")
        if self.budget.max_tokens < 2:
            raise ConfigError(f"max_tokens must be 2 or more, got {self.budget.max_tokens!r}: one token has no speed")
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError(
                f"repeats must be 1 or more and warmup 0 or more, got repeats={self.repeats!r}, warmup={self.warmup!r}"
            )

    def settings(self, method: str, lengths: Sequence[int] | None = None) -> list[Setting]:
        """Give what is measured on an engine with this drafter: plain decoding first, then all lengths, and "auto"."""
        asked: list[int | str] = [OFF]
        if method != Method.NONE:
            asked += [*(self.lengths if lengths is None else lengths), AUTO]
        return [
            Setting("outrider", method, length, concurrency, temperature)
            for temperature in self.temperatures
            for concurrency in self.concurrency
            for length in asked
        ]


def rotated(settings: Sequence[Setting], repeats: int) -> Iterator[tuple[int, Setting]]:
    """Give every setting `repeats` turns; each round of turns begins elsewhere, so that a slow moment hits all."""
    for repeat in range(repeats):
        first = repeat * max(1, len(settings) // max(1, repeats)) % max(1, len(settings))
        yield from ((repeat, setting) for setting in [*settings[first:], *settings[:first]])


def engine_arguments(base: dict[str, Any], method: str, most: int, together: int) -> dict[str, Any]:
    """Give the arguments of `LLM` for one drafter, without what belongs to others.

    Args:
        base: All arguments that were given.
        method: What drafts.
        most: Guesses a round at most.
        together: Texts under way at a time at most.

    Raises:
        ConfigError: A setting does not fit the method.
    """
    arguments = {**base, "method": method, "num_speculative_tokens": most, "max_num_seqs": together}
    arguments |= {"speculative_config": None, "enable_prefix_caching": False}  # each setting reads the prompts
    methods = methods_of(method)
    for name, owner in OWN.items():
        if owner not in methods:
            arguments.pop(name, None)
    if not any(one.takes_model for one in methods):
        arguments["speculative_model"] = None
    if Method.NONE in methods:
        arguments["tree"] = None
    known: dict[str, Any] = {name: arguments[name] for name in ("tree", *OWN) if arguments.get(name) is not None}
    SpeculationConfig(method, arguments.get("speculative_model"), most, **known)
    return arguments


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Read "3,5,8".

    Raises:
        ConfigError: A part is not a whole number.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be whole numbers such as 3,5,8, got {text!r}") from None
