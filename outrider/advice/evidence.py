"""What a loaded pair shows on prompts: agreement by place, what passes cost, where the time goes.

All of it comes from the engine's own statistics and from the measurements that its controller goes by.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.engine.cost import CHAIN, PassShape
from outrider.kernels.launch import uses_kernels

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.outputs import RequestOutput
    from outrider.sampling.params import SamplingParams

__all__ = ["Agreement", "Evidence", "Timings", "agreement_of", "examine", "usable_cores"]

WARM_UP_TOKENS = 8
LENGTHS = range(13)  # draft lengths whose rounds are priced


@dataclass(frozen=True)
class Agreement:
    """How guesses fared.

    Attributes:
        drafted: Guesses that were judged.
        by_position: How often a guess agreed whose predecessors all had, by its place in the chain.
        reached: Guesses that were reached at each place.
        early, late: The same share in the first and the second half of what was generated.
        early_count, late_count: Guesses that these are made of.
    """

    drafted: int
    by_position: tuple[float, ...]
    reached: tuple[int, ...]
    early: float = 0.0
    late: float = 0.0
    early_count: int = 0
    late_count: int = 0

    @property
    def share(self) -> float:
        """Of all guesses that were reached, those that agreed."""
        total = sum(self.reached)
        return sum(a * n for a, n in zip(self.by_position, self.reached, strict=True)) / total if total else 0.0

    def tokens(self, length: int) -> float:
        """Tokens that a round of `length` guesses gives; places beyond those seen agree as the last one did."""
        expected, chance = 1.0, 1.0
        for place in range(length):
            seen = [one for one, count in zip(self.by_position, self.reached, strict=True) if count]
            chance *= seen[min(place, len(seen) - 1)] if seen else 0.0
            expected += chance
        return expected


@dataclass(frozen=True)
class Timings:
    """What passes cost on this machine.

    Attributes:
        rounds: (rows, guesses a row) -> seconds of a round, as the engine expects them after the run.
        target_pass, draft_pass: Seconds of a round without guesses, and what each guess adds to it; None: guesses cost
            next to nothing, or could not be timed.
        round_seconds: Seconds that a round of the run took, everything included.
        models_seconds: Seconds that such a round took when the engine profiled it, alone; None: not known.
        plain_rate, drafted_rate: Tokens a second, without and with guesses.
        reading_share: Share of a text's time until its first token.
    """

    rounds: dict[tuple[int, int], float]
    target_pass: float
    draft_pass: float | None
    round_seconds: float
    models_seconds: float | None
    plain_rate: float
    drafted_rate: float
    reading_share: float


@dataclass(frozen=True)
class Evidence:
    """All that was measured.

    Attributes:
        method: What drafts.
        guesses_by_model: Whether weights make the guesses; False for lookup.
        num_tokens: Guesses a round, as configured.
        rows: Texts together.
        temperature: Of the run.
        agreement: At that temperature.
        greedy: The same at temperature 0, where that is another.
        unquantised: The same of the draft in the dtype that it was stored in, where it is quantised.
        variants: Of an EAGLE-3 head: what was changed -> agreement with it.
        mean_tokens: Tokens of a text.
        timings: See the class.
        device: "cpu" or "cuda".
        slow_paths: What does not run by the fastest way, and why.
        threads, cores: Threads that torch computes with, and cores that this process may use.
    """

    method: str
    guesses_by_model: bool
    num_tokens: int
    rows: int
    temperature: float
    agreement: Agreement
    mean_tokens: float
    timings: Timings
    device: str
    threads: int
    cores: int
    greedy: Agreement | None = None
    unquantised: Agreement | None = None
    variants: dict[str, Agreement] = field(default_factory=dict)
    slow_paths: tuple[str, ...] = ()


def examine(llm: LLM, prompts: list[Any], params: SamplingParams, timings: Timings | None = None) -> Evidence:
    """Run prompts with guesses and without, and look at what the engine counted.

    Args:
        llm: A target with a drafter.
        prompts: What `LLM.generate` takes.
        params: Temperature, length and seed.
        timings: What is known of costs; None measures it.
    """
    engine = llm.engine
    length, rows = engine.speculation.num_speculative_tokens, min(engine.config.max_num_seqs, len(prompts))
    forced = params.but(speculation=min(length, engine.longest_draft))
    _run(llm, prompts, forced.but(max_tokens=min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS)))
    alone, rounds = _round_seconds(llm, rows, length), engine.figures.rounds
    outputs, seconds = _run(llm, prompts, forced)
    rounds = engine.figures.rounds - rounds
    greedy = None
    if params.temperature > 0:
        greedy = agreement_of(_run(llm, prompts, forced.but(temperature=0.0))[0])
    stats = [one.stats for output in outputs for one in output.outputs]
    if timings is None:
        timings = _timed(llm, prompts, params, outputs, seconds, rounds, alone)
    drafter: Any = engine.drafter
    return Evidence(
        method=engine.speculation.method,
        guesses_by_model=_drafts_by_model(drafter),
        num_tokens=length,
        rows=rows,
        temperature=params.temperature,
        agreement=agreement_of(outputs),
        mean_tokens=statistics.fmean(one.tokens for one in stats),
        timings=timings,
        device=engine.runner.device.type,
        threads=torch.get_num_threads(),
        cores=usable_cores(),
        greedy=greedy,
        slow_paths=tuple(_slow_paths(llm)),
    )


def _run(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[list[RequestOutput], float]:
    """Generate for prompts that nobody has read yet; give the outputs and the seconds."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    return outputs, time.perf_counter() - began


def agreement_of(outputs: list[RequestOutput]) -> Agreement:
    """Add up what all texts' statistics say of their guesses."""
    stats = [one.stats for output in outputs for one in output.outputs]
    width = max((len(one.reached_per_position) for one in stats), default=0)
    reached, accepted = [0] * width, [0] * width
    for one in stats:
        for place, (came, right) in enumerate(zip(one.reached_per_position, one.accepted_per_position, strict=True)):
            reached[place] += came
            accepted[place] += right
    shares = tuple(right / came if came else 0.0 for right, came in zip(accepted, reached, strict=True))
    halves = _halves(outputs)
    drafted = sum(one.drafted for one in stats)
    return Agreement(drafted, shares, tuple(reached), *halves)


def _halves(outputs: list[RequestOutput]) -> tuple[float, float, int, int]:
    """Agreement before and after the middle of each text.

    An accepted token agreed, one that was recovered stands where a guess did not; others say nothing.
    """
    early: list[bool] = []
    late: list[bool] = []
    for one in (text for output in outputs for text in output.outputs):
        for place, origin in enumerate(one.origins):
            if origin in ("accepted", "recovered"):
                (early if 2 * place < len(one.origins) else late).append(origin == "accepted")
    return _mean(early), _mean(late), len(early), len(late)


def _mean(values: list[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


# --- time


def _timed(
    llm: LLM,
    prompts: list[Any],
    params: SamplingParams,
    outputs: list[RequestOutput],
    seconds: float,
    rounds: int,
    alone: float | None,
) -> Timings:
    plain, plain_seconds = _run(llm, prompts, params.but(speculation="off"))
    tokens, plain_tokens = (
        sum(one.stats.tokens for output in run for one in output.outputs) for run in (outputs, plain)
    )
    stats = [one.stats for output in outputs for one in output.outputs]
    most = llm.engine.speculation.num_speculative_tokens
    rows = min(llm.engine.config.max_num_seqs, len(prompts))
    priced = {
        (count, length): taken
        for count in sorted({1, rows})
        for length in sorted({*LENGTHS, most})
        if (taken := _round_seconds(llm, count, length)) is not None
    }
    costly = _drafts_by_model(llm.engine.drafter) and bool(priced)
    guess = (priced[1, most] - priced[1, 0]) / most if costly else None
    return Timings(
        rounds=priced,
        target_pass=priced.get((1, 0), 0.0),
        draft_pass=guess,
        round_seconds=max(0.0, seconds - max(one.first_token_seconds for one in stats)) / max(1, rounds),
        models_seconds=alone,
        plain_rate=plain_tokens / plain_seconds,
        drafted_rate=tokens / seconds,
        reading_share=statistics.fmean(one.first_token_seconds / one.seconds if one.seconds else 0.0 for one in stats),
    )


def _round_seconds(llm: LLM, num_rows: int, num_tokens: int) -> float | None:
    """Seconds of a round, as the engine expects them now; None where it measured nothing."""
    costs, drafter = llm.engine.speculator.costs, llm.engine.drafter
    if costs is None or drafter is None or not costs.knows(drafter.name):
        return None
    kind = drafter.name if num_tokens and drafter.name in costs.passes else CHAIN
    passed = costs.pass_seconds(PassShape(num_rows, num_tokens, kind))
    return passed + costs.draft_seconds(drafter.name, num_rows, num_tokens)


def _drafts_by_model(drafter: Any) -> bool:
    """Whether weights make the guesses: Medusa heads and the target's own layers keep no cache of theirs."""
    return bool(drafter.bytes_per_slot) or hasattr(drafter, "heads") or drafter.name == "early_exit"


def _slow_paths(llm: LLM) -> list[str]:
    """What does not run as fast as this machine could."""
    found = []
    runner: Any = llm.engine.runner
    kind = llm.loaded.model.config.model_type
    if runner.device.type == "cuda":
        if llm.engine.graphs is None:
            found.append("rounds are not captured as CUDA graphs")
        if not uses_kernels(runner.device):
            found.append("no Triton kernels run here: is triton installed?")
        elif runner.network.device_decoder is None:
            found.append(f"{kind} does not run on Outrider's kernels: its structure is another")
    elif runner.network.decoder is None:
        found.append(f"{kind} runs by transformers' own modules: its structure is another")
    return found
