"""Plain against speculative decoding on one engine: the same tokens? and how much faster?"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.bench.differences import Difference, differences, is_steady, promises_tokens, token_name
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.llm import LLM
    from outrider.outputs import RequestOutput, SpeculationStats
    from outrider.sampling.params import SamplingParams

__all__ = ["Comparison", "Run", "compare", "require_guesses", "verdict"]

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """All texts, once one way; `seconds` is the median where it ran several times."""

    outputs: tuple[RequestOutput, ...]
    seconds: float

    @property
    def stats(self) -> list[SpeculationStats]:
        """Of every text."""
        return [one.stats for output in self.outputs for one in output.outputs]

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(one.tokens for one in self.stats)

    @property
    def drafted(self) -> int:
        """Guesses that were judged."""
        return sum(one.drafted for one in self.stats)

    @property
    def acceptance_rate(self) -> float:
        """Accepted guesses by guesses."""
        return sum(one.accepted for one in self.stats) / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one pass gave a text, on average."""
        return self.tokens / max(1, sum(one.rounds for one in self.stats))

    @property
    def tokens_per_second(self) -> float:
        """From the prompt's arrival to the last text's end, reading the prompts included."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Both runs, and where their texts differ.

    Attributes:
        plain, speculative: The runs.
        differences: One a text that differs.
        comparable: Whether the same tokens may be expected at all: sampled "rejection" and "block" promise the same
            distribution, "typical" promises nothing.
        guaranteed: Whether a difference would be a fault: fp32 or exact rounds leave no near-ties to flip.
    """

    plain: Run
    speculative: Run
    differences: tuple[Difference, ...]
    comparable: bool
    guaranteed: bool

    @property
    def equal(self) -> bool:
        """Whether all tokens are the same."""
        return not self.differences

    @property
    def failed(self) -> bool:
        """Whether tokens differ that must not."""
        return not self.equal and self.guaranteed

    @property
    def speedup(self) -> float:
        """Speculative by plain tokens a second."""
        return self.speculative.tokens_per_second / max(self.plain.tokens_per_second, 1e-9)


def require_guesses(llm: LLM, params: list[SamplingParams]) -> None:
    """Refuse a comparison of plain decoding with itself.

    Raises:
        ConfigError: The engine has no drafter, or may not use it.
    """
    if llm.engine.drafter is None or any(one.draft_length == 0 for one in params):
        raise ConfigError("--compare needs guesses to compare with: leave out --method none and --speculation off")


def compare(llm: LLM, prompts: list[Any], params: list[SamplingParams], repeat: int = 1) -> Comparison:
    """Run all prompts plainly and speculatively, `repeat` times by turns, after a short warm-up of both.

    Args:
        llm: The engine; see `require_guesses`.
        prompts: What `LLM.generate` takes.
        params: One a prompt, with a seed where text is sampled.
        repeat: How often; every second time the other one goes first.
    """
    plainly = [one.but(speculation="off") for one in params]
    for each in (plainly, params):
        llm.generate(prompts, [_short(one) for one in each], progress=False)
    taken: dict[bool, list[Run]] = {True: [], False: []}
    for turn in range(repeat):
        for speculates in (False, True) if turn % 2 == 0 else (True, False):
            taken[speculates].append(_run(llm, prompts, params if speculates else plainly))
    plain, speculative = _median(taken[False]), _median(taken[True])
    comparable = promises_tokens(llm, greedy=all(one.greedy for one in params))
    found = tuple(differences(llm, plain.outputs, speculative.outputs, params if comparable else []))
    return Comparison(plain, speculative, found, comparable, comparable and is_steady(llm))


def _short(params: SamplingParams) -> SamplingParams:
    tokens = WARM_UP_TOKENS if params.max_tokens is None else min(params.max_tokens, WARM_UP_TOKENS)
    return params.but(max_tokens=tokens, min_tokens=min(params.min_tokens, tokens))


def _run(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> Run:
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    return Run(tuple(outputs), time.perf_counter() - began)


def _median(runs: Sequence[Run]) -> Run:
    return Run(runs[0].outputs, statistics.median(one.seconds for one in runs))


def verdict(comparison: Comparison, llm: LLM) -> str:
    """Say whether the tokens are equal; where not, where it began, why it may be, and what helps."""
    if comparison.equal:
        return f"equal: all {comparison.plain.tokens} tokens are the same"
    first = comparison.differences[0]
    words = [token_name(llm, token) for token in (first.plain, first.speculative)]
    where = (
        f"{len(comparison.differences)} of {len(comparison.plain.stats)} texts differ; the first (prompt "
        f"{first.prompt + 1}) at token {first.token}: plain {words[0]}, speculative {words[1]}"
    )
    if first.gap is not None:
        where += f", whose log-probabilities are {first.gap:.4f} apart"
    if not comparison.comparable:
        verification = llm.engine.speculation.verification
        return f"{where}. That is to be expected: {verification!s} verification does not promise the same tokens here."
    if comparison.guaranteed:
        return f"NOT EQUAL: {where}. This must not happen in fp32 or with --exact; please report it."
    dtype = str(llm.loaded.dtype).removeprefix("torch.")
    return (
        f"not equal: {where}. In {dtype} a pass over several tokens rounds differently from a pass over one, so where "
        "two tokens are nearly as likely either may win. Use --exact (or --dtype float32) for equal tokens."
    )
