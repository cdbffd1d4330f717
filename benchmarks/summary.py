"""From raw timings to medians, ratios and goals: pure functions, no engine, no clock.

Nothing is dropped on the way: every run of every engine goes in, and a goal that is missed, or that could not be
measured, is reported as such.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "GOALS",
    "Goal",
    "Run",
    "Spread",
    "best_of",
    "cells",
    "first_divergence",
    "geometric_mean",
    "jsonable",
    "judged",
    "paired_ratios",
    "speculation",
    "spread",
]

PLAIN_GOAL = 1.6
LOOKUP_GOAL = 1.5
NEVER_BELOW = 0.95
WIDE_PASS_GOAL = 1.25
WIDE, NARROW = 6, 1
GOALS = {
    "plain": f"plain / transformers plain, geometric mean over prompts >= {PLAIN_GOAL}",
    "lookup": f"ngram / best transformers lookup of each prompt, geometric mean over prompts >= {LOOKUP_GOAL}",
    "never slower": f"ngram / own plain, worst prompt >= {NEVER_BELOW}",
    "wide pass": f"pass of {WIDE} positions / pass of {NARROW} <= {WIDE_PASS_GOAL}",
}


@dataclass(frozen=True)
class Run:
    """One generation by one engine.

    Attributes:
        engine, prompt, repeat: Which.
        prompt_tokens: Tokens fed.
        tokens: Tokens generated; `first_tokens` of them came together with the first one.
        first_seconds: From the call to the first token.
        decode_seconds: From the first token to the last.
        total_seconds: From the call to the return, by the clock outside.
        token_ids: What was generated, where the engine tells.
        text: The same as text, where it tells that.
        drafted, accepted, rounds: Of speculation, where the engine tells.
    """

    engine: str
    prompt: str
    repeat: int
    prompt_tokens: int
    tokens: int
    first_tokens: int
    first_seconds: float
    decode_seconds: float
    total_seconds: float
    token_ids: tuple[int, ...] = ()
    text: str = ""
    drafted: int | None = None
    accepted: int | None = None
    rounds: int | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first ones; what came with the first token is not counted."""
        return (self.tokens - self.first_tokens) / self.decode_seconds if self.decode_seconds > 0 else math.nan

    @property
    def total_rate(self) -> float:
        """Tokens a second from call to return, prompt included."""
        return self.tokens / self.total_seconds


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some repeats."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Give median, lowest and highest; all are NaN where any value is, or where there is none."""
    known = list(values)
    if not known or any(math.isnan(value) for value in known):
        return Spread(math.nan, math.nan, math.nan)
    return Spread(median(known), min(known), max(known))


def cells(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, Spread]]:
    """Give for each (engine, prompt) the spread of decode rate, total rate and time to the first token."""
    columns: dict[str, Callable[[Run], float]] = {
        "decode": lambda run: run.decode_rate,
        "total": lambda run: run.total_rate,
        "first": lambda run: run.first_seconds,
    }
    groups = _grouped(runs)
    return {key: {name: spread(map(value, group)) for name, value in columns.items()} for key, group in groups.items()}


def _grouped(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.engine, run.prompt), []).append(run)
    return groups


def paired_ratios(runs: Sequence[Run], over: str, under: str) -> dict[str, Spread]:
    """Give for each prompt how many times as fast `over` decodes as `under`.

    Runs of one repeat stand side by side in time, so they are compared with each other: what slows the machine for a
    while slows both. A prompt that either did not run is left out here, and thereby makes a goal unmeasured.
    """
    at = {(run.engine, run.prompt, run.repeat): run for run in runs}
    ratios: dict[str, list[float]] = {}
    for run in runs:
        other = at.get((under, run.prompt, run.repeat))
        if run.engine == over and other is not None:
            ratios.setdefault(run.prompt, []).append(run.decode_rate / other.decode_rate)
    return {prompt: spread(values) for prompt, values in ratios.items()}


def best_of(runs: Sequence[Run], engines: Sequence[str], prompt: str) -> str | None:
    """Name the engine among `engines` with the highest median decode rate on a prompt."""
    table = cells([run for run in runs if run.prompt == prompt and run.engine in engines])
    known = {engine: row["decode"].median for (engine, _), row in table.items()}
    return max(known, key=lambda engine: known[engine], default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """Give the mean of ratios; NaN of none."""
    known = list(values)
    return math.exp(math.fsum(map(math.log, known)) / len(known)) if known else math.nan


def speculation(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, float]]:
    """Give guesses a run, acceptance and tokens a round of each (engine, prompt) that speculates; NaN where untold."""
    result = {}
    for key, group in _grouped(run for run in runs if run.rounds is not None).items():
        told = all(run.drafted is not None for run in group)
        drafted, accepted = (sum(getattr(run, name) or 0 for run in group) for name in ("drafted", "accepted"))
        rounds = sum(run.rounds or 0 for run in group)
        result[key] = {
            "drafted": drafted / len(group) if told else math.nan,
            "acceptance": accepted / drafted if drafted else math.nan,
            "tokens_per_round": sum(run.tokens for run in group) / rounds if rounds else math.nan,
        }
    return result


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Give the first place where two outputs differ; None where they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


@dataclass(frozen=True)
class Goal:
    """A ratio that was promised, and whether it was reached; None where it could not be measured."""

    name: str
    meaning: str
    bound: float
    at_least: bool
    value: float | None
    by_prompt: dict[str, float] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """Whether the value keeps the bound."""
        if self.value is None or math.isnan(self.value):
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def record(self) -> dict[str, Any]:
        """Give all of it for JSON."""
        return {**asdict(self), "reached": self.reached}


def judged(
    runs: Sequence[Run],
    *,
    prompts: Sequence[str],
    plain: str,
    ngrams: Sequence[tuple[str, str]],
    peer_plain: str,
    peer_lookups: Sequence[str],
    passes: dict[int, float] | None,
) -> list[Goal]:
    """Hold the measured ratios against the goals.

    Args:
        runs: All runs.
        prompts: All prompts; a goal over prompts counts as measured only when every one of them was.
        plain: Our plain engine.
        ngrams: Our engines with lookup, each with the plain engine it is held against.
        peer_plain: transformers without lookup.
        peer_lookups: transformers with lookup; each prompt's fastest counts.
        passes: Our pass, width -> seconds.
    """
    goals = [_goal("plain", "plain", PLAIN_GOAL, prompts, _medians(paired_ratios(runs, plain, peer_plain)))]
    for ngram, own_plain in ngrams:
        if own_plain == plain:
            against = {prompt: best_of(runs, peer_lookups, prompt) for prompt in prompts}
            pairs = {prompt: _medians(paired_ratios(runs, ngram, peer)) for prompt, peer in against.items() if peer}
            ratios = {prompt: found[prompt] for prompt, found in pairs.items() if prompt in found}
            goals.append(_goal("lookup", f"lookup ({ngram})", LOOKUP_GOAL, prompts, ratios))
        ratios = _medians(paired_ratios(runs, ngram, own_plain))
        goals.append(_goal("never slower", f"never slower ({ngram})", NEVER_BELOW, prompts, ratios))
    value = passes[WIDE] / passes[NARROW] if passes and {WIDE, NARROW} <= passes.keys() else None
    goals.append(Goal("wide pass", GOALS["wide pass"], WIDE_PASS_GOAL, at_least=False, value=value))
    return goals


def _medians(ratios: dict[str, Spread]) -> dict[str, float]:
    return {prompt: ratio.median for prompt, ratio in ratios.items()}


def _worst(values: Iterable[float]) -> float:
    known = list(values)
    return math.nan if any(math.isnan(value) for value in known) else min(known)


def _goal(kind: str, name: str, bound: float, prompts: Sequence[str], ratios: dict[str, float]) -> Goal:
    """Judge a ratio over prompts: by the worst where nothing may be slower, else by the mean."""
    complete = bool(prompts) and set(prompts) <= ratios.keys()
    combine = _worst if kind == "never slower" else geometric_mean
    value = combine(ratios[prompt] for prompt in prompts) if complete else None
    return Goal(name, GOALS[kind], bound, at_least=True, value=value, by_prompt=ratios)


def jsonable(value: Any) -> Any:
    """JSON has no NaN and no keys but strings."""
    if isinstance(value, Spread):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
