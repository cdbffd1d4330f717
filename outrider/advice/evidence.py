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

from outrider.config import MAX_DRAFT_TOKENS
from outrider.engine.cost import measured, measured_draft
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
        rounds: (rows, guesses a row) -> seconds of a round, by the model of costs.
        target_pass, draft_pass: Seconds of one token by the target, and of one guess by the draft; None: guesses cost
            next to nothing, or could not be timed.
        round_seconds: Seconds that a round of the run took, everything included.
        plain_rate, drafted_rate: Tokens a second, without and with guesses.
        reading_share: Share of a text's time until its first token.
    """

    rounds: dict[tuple[int, int], float]
    target_pass: float
    draft_pass: float | None
    round_seconds: float
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
    llm.generate(
        prompts, forced.but(max_tokens=min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS)), progress=False
    )
    rounds = engine.figures.rounds
    began = time.perf_counter()
    outputs = llm.generate(prompts, forced, progress=False)
    seconds, rounds = time.perf_counter() - began, engine.figures.rounds - rounds
    greedy = None
    if params.temperature > 0:
        greedy = agreement_of(llm.generate(prompts, forced.but(temperature=0.0), progress=False))
    stats = [one.stats for output in outputs for one in output.outputs]
    if timings is None:
        timings = _timed(llm, prompts, params, outputs, seconds, rounds)
    drafter: Any = engine.drafter
    return Evidence(
        method=engine.speculation.method,
        guesses_by_model=bool(drafter.bytes_per_slot) or hasattr(drafter, "heads") or drafter.name == "early_exit",
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
    llm: LLM, prompts: list[Any], params: SamplingParams, outputs: list[RequestOutput], seconds: float, rounds: int
) -> Timings:
    began = time.perf_counter()
    plain = llm.generate(prompts, params.but(speculation="off"), progress=False)
    plain_seconds = time.perf_counter() - began
    tokens, plain_tokens = (
        sum(one.stats.tokens for output in run for one in output.outputs) for run in (outputs, plain)
    )
    stats = [one.stats for output in outputs for one in output.outputs]
    reading = statistics.fmean(one.first_token_seconds / one.seconds if one.seconds else 0.0 for one in stats)
    first = max(one.first_token_seconds for one in stats)
    costs, target_pass, draft_pass = _priced(llm, len(prompts))
    return Timings(
        rounds=costs,
        target_pass=target_pass,
        draft_pass=draft_pass,
        round_seconds=max(0.0, seconds - first) / max(1, rounds),
        plain_rate=plain_tokens / plain_seconds,
        drafted_rate=tokens / seconds,
        reading_share=reading,
    )


@torch.inference_mode()
def _priced(llm: LLM, num_prompts: int) -> tuple[dict[tuple[int, int], float], float, float | None]:
    """Seconds of rounds by the costs that the controller goes by: measured anew, on a row that belongs to nobody."""
    engine = llm.engine
    drafter = engine.drafter
    assert drafter is not None
    most = max(1, engine.speculation.num_speculative_tokens)
    rows = min(engine.config.max_num_seqs, num_prompts)
    costs: Any = engine.graphs.costs() if engine.graphs is not None else None
    draft = measured_draft(drafter, engine.state, most)
    if costs is None:
        widest = min(rows * (most + 1) - 1, MAX_DRAFT_TOKENS)
        costs = measured(engine.runner, engine.state, max(most, widest)).noted(drafter.name, draft)
    priced = {
        (count, length): costs.round_seconds(drafter.name, count, length)
        for count in sorted({1, rows})
        for length in sorted({*LENGTHS, most})
    }
    one = dict(draft).get(1)
    return priced, priced[1, 0], one if drafter.bytes_per_slot or drafter.name == "early_exit" else None


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
