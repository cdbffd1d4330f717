"""A proof: texts with and without guesses, generated, compared and judged, setting by setting."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import Verification
from outrider.errors import ConfigError
from outrider.progress import counted
from outrider.proof.distribution import PositionTest, by_position
from outrider.proof.referee import LEAST_NEAR, Noise, Referee
from outrider.proof.texts import WHOLE, Parting, Text, parting, text_of
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.llm import LLM

__all__ = [
    "Cell",
    "Plan",
    "Proof",
    "Target",
    "check_provable",
    "draws",
    "generated",
    "judged_parting",
    "proved",
    "verification_of",
]

BEYOND = 2  # tokens after the first round's guesses whose distribution is tested


@dataclass(frozen=True)
class Plan:
    """What is to be shown.

    Attributes:
        settings: For each cell the fields of `SamplingParams` that it differs in, such as ``{"temperature": 0.7}``.
        max_tokens: Of each text.
        seed: Of the first text; each further one counts up from it.
        guesses: A round, always so many: what rests shows nothing.
        samples: Texts of each cell whose distribution is tested, over all prompts.
    """

    settings: tuple[dict[str, Any], ...]
    max_tokens: int
    seed: int
    guesses: int
    samples: int

    def params(self, setting: dict[str, Any], place: int) -> SamplingParams:
        """Give the parameters of a cell's text number `place`."""
        return SamplingParams(**setting, max_tokens=self.max_tokens, seed=self.seed + place)


@dataclass(frozen=True)
class Target:
    """What was shown to be the same: the target as it was loaded.

    Attributes:
        source, revision: What it was loaded from.
        dtype, device: As it ran.
        strict: Whether any divergence is a defect: in exact mode, and in fp32 on a CPU.
        quantized: Whether its weights were quantised at load, so that no fp32 reference has them.
    """

    source: str | None
    revision: str | None
    dtype: torch.dtype
    device: torch.device
    strict: bool
    quantized: bool

    @classmethod
    def of(cls, llm: LLM, source: str | None, revision: str | None, quantization: str | None) -> Target:
        """Tell it from a loaded model."""
        dtype, device = llm.loaded.dtype, llm.loaded.device
        strict = llm.engine.config.exact or (dtype is torch.float32 and device.type == "cpu")
        return cls(source, revision, dtype, device, strict, quantization is not None)

    def referee(self) -> Referee:
        """Load the judge, once the engine has left the memory."""
        return Referee(self.source, self.dtype, self.device, self.revision)


@dataclass
class Cell:
    """One setting: its texts, and what came of comparing them.

    Attributes:
        setting: As in `Plan`.
        by_distribution: Whether texts need not be the same, but follow the same distribution.
        plain, speculative: The texts, without guesses and with them; plain ones only where they must be the same.
        drafted, accepted: Guesses.
        partings: Where texts part.
        tests: Of the distribution, position by position.
    """

    setting: dict[str, Any]
    by_distribution: bool
    plain: list[Text]
    speculative: list[Text]
    drafted: int
    accepted: int
    partings: list[Parting] = field(default_factory=list)
    tests: list[PositionTest] = field(default_factory=list)

    @property
    def defects(self) -> int:
        """What must not be: texts that part beyond rounding, texts that failed, positions of another distribution."""
        return sum(one.verdict == "defect" for one in self.partings) + sum(one.failed for one in self.tests)

    @property
    def shows_nothing(self) -> bool:
        """Whether nothing was guessed, or no position could be tested."""
        return not self.drafted or (self.by_distribution and not any(one.outcome for one in self.tests))


@dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        cells: Setting by setting.
        near: How close two tokens may be for rounding to swap them; None where nothing is granted to rounding.
        noise: What rounding was measured to do; None where it was not needed.
    """

    cells: list[Cell]
    near: float | None
    noise: Noise | None

    @property
    def defects(self) -> int:
        """In all cells."""
        return sum(cell.defects for cell in self.cells)


def verification_of(load: dict[str, Any]) -> str:
    """Say how guesses are judged by an `LLM` of these arguments."""
    config = load.get("speculative_config")
    given = config.get("verification") if isinstance(config, dict) else None
    return str(given or load.get("verification") or Verification.COUPLED)


def draws(verification: str, setting: dict[str, Any]) -> bool:
    """Whether texts of a setting are the target's in distribution alone."""
    return setting.get("temperature", 1.0) > 0 and verification in (Verification.REJECTION, Verification.BLOCK)


def check_provable(verification: str, quantization: str | None, *, exact: bool) -> None:
    """Refuse what cannot be proved, before anything is loaded.

    Raises:
        ConfigError: The message says why, and what can be.
    """
    if verification == Verification.TYPICAL:
        raise ConfigError(
            "typical verification is lossy by design: there is nothing to prove; use coupled, rejection or block"
        )
    if quantization is not None and (not exact or draws(verification, {})):
        raise ConfigError(
            f"with quantization {quantization!r} no reference in fp32 has the target's weights, so near-ties cannot be "
            "told from defects: add --exact (with coupled verification), or leave the quantization out"
        )


def generated(llm: LLM, prompts: list[list[int]], plan: Plan, *, progress: bool | None = None) -> list[Cell]:
    """Generate all texts of a plan.

    Raises:
        ConfigError: Nothing drafts, so there is nothing to compare.
    """
    if llm.engine.drafter is None or not plan.guesses:
        raise ConfigError(
            "there is nothing to verify without guesses: name a draft or a method, and 1 speculative token or more"
        )
    verification = llm.engine.speculation.verification
    return [
        _drawn(llm, prompts, plan, setting, progress)
        if draws(verification, setting)
        else _both_ways(llm, prompts, plan, setting, progress)
        for setting in plan.settings
    ]


def _both_ways(llm: LLM, prompts: list[list[int]], plan: Plan, setting: dict[str, Any], progress: bool | None) -> Cell:
    params = [plan.params(setting, place) for place in range(len(prompts))]
    plain = _texts(llm, prompts, [one.but(speculation="off") for one in params], progress)
    guessed = _texts(llm, prompts, [one.but(speculation=plan.guesses) for one in params], progress)
    return Cell(setting, False, plain.texts, guessed.texts, guessed.drafted, guessed.accepted)


def _drawn(llm: LLM, prompts: list[list[int]], plan: Plan, setting: dict[str, Any], progress: bool | None) -> Cell:
    """Continue each prompt with many seeds, as far as one round with all its guesses accepted reaches, and on."""
    short = replace(plan, max_tokens=min(plan.max_tokens, plan.guesses + BEYOND))
    many = [prompts[place % len(prompts)] for place in range(plan.samples)]
    params = [short.params(setting, place).but(speculation=plan.guesses) for place in range(plan.samples)]
    guessed = _texts(llm, many, params, progress)
    return Cell(setting, True, [], guessed.texts, guessed.drafted, guessed.accepted)


@dataclass(frozen=True)
class _Texts:
    texts: list[Text]
    drafted: int
    accepted: int


def _texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], progress: bool | None) -> _Texts:
    """Generate, and start from nothing that an earlier run computed."""
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, progress=progress)
    stats = [one.stats for one in outputs]
    return _Texts(
        [text_of(one) for one in outputs], sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    )


def proved(cells: list[Cell], plan: Plan, target: Target) -> Proof:
    """Compare and judge what was generated; the engine should have left the memory by now.

    Where rounding is granted anything, what it does is measured first, over all prompts and what plain decoding made
    of them.
    """
    judge = _Judge(plan, target)
    grants = not target.strict or (target.dtype is not torch.float32 and any(one.by_distribution for one in cells))
    if grants:
        judge.noise = judge.referee.noise(counted(_sample(cells), "measuring what rounding does"))
    num_tests = sum(plan.guesses + BEYOND for cell in cells if cell.by_distribution)
    for cell in cells:
        if cell.by_distribution:
            judge.test(cell, num_tests)
        else:
            judge.compare(cell)
    return Proof(cells, judge.near if grants else None, judge.noise)


class _Judge:
    """Judges cells; loads the referee when there is something to be judged."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self._plan, self._target = plan, target
        self._referee: Referee | None = None
        self.noise: Noise | None = None

    @property
    def referee(self) -> Referee:
        if self._referee is None:
            self._referee = self._target.referee()
        return self._referee

    @property
    def near(self) -> float:
        return LEAST_NEAR if self.noise is None else self.noise.near

    def compare(self, cell: Cell) -> None:
        """Find where texts part that must be the same."""
        pairs = zip(cell.plain, cell.speculative, strict=True)
        parted = [one for place, pair in enumerate(pairs) if (one := parting(place, *pair)) is not None]
        for one in counted(parted, "judging"):
            params = self._plan.params(cell.setting, one.prompt)
            referee = None if self._target.quantized else self.referee
            length = len(cell.plain[one.prompt].prompt)
            cell.partings.append(judged_parting(one, params, length, referee, self.near, strict=self._target.strict))

    def test(self, cell: Cell, num_tests: int) -> None:
        """Test a distribution; a text that failed is a defect besides."""
        for place, one in enumerate(cell.speculative):
            if one.finish_reason not in WHOLE:
                cell.partings.append(Parting(place, len(one.tokens), None, None, (None, one.finish_reason)))
        params, exact = self._plan.params(cell.setting, 0), self._target.dtype is torch.float32
        cell.tests = by_position(cell.speculative, params, self.referee, self.near, strict=exact, num_tests=num_tests)


def _sample(cells: Sequence[Cell]) -> list[tuple[int, ...]]:
    """Give the texts that rounding is measured on."""
    found = [one for cell in cells for one in cell.plain] or list(
        {one.prompt: one for cell in cells for one in cell.speculative}.values()
    )
    return list(dict.fromkeys((*one.prompt, *one.tokens) for one in found))


def judged_parting(
    one: Parting,
    params: SamplingParams,
    prompt_length: int,
    referee: Referee | None,
    near: float,
    *,
    strict: bool,
) -> Parting:
    """Add gap and verdict: a near-tie is one that rounding may decide, where anything is granted to rounding."""
    if referee is None or one.plain is None or one.speculative is None or not one.prefix:
        return replace(one, verdict="defect")
    reach, top2 = referee.gap(one.prefix, (one.plain, one.speculative), params, near, prompt_length)
    tie = not strict and reach is not None and reach <= near
    return replace(one, gap=reach, top2=top2, verdict="near-tie" if tie else "defect")
