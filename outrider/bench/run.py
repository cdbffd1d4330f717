"""Runs a benchmark's engines one after another, and keeps what was measured and what failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.differences import differences, is_steady, promises_tokens, token_name
from outrider.bench.memory import engine_memory, forget_peak, peak_bytes
from outrider.bench.plan import rotated
from outrider.bench.questions import conversations
from outrider.bench.summary import failed_cell, measured_cell
from outrider.bench.trials import OFF, Setting, Trial, measured, params_of
from outrider.config import Method
from outrider.errors import InvalidRequestError, OutriderError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.plan import Plan
    from outrider.bench.questions import Question
    from outrider.bench.trials import Budget
    from outrider.llm import LLM
    from outrider.prompts import Prompt

    Advance = Callable[[Setting, int], None]

__all__ = ["Outcome", "compared", "local_prompts", "measure_engine"]

FAULTS = (OutriderError, RuntimeError, MemoryError)  # what a setting may end with; torch's are RuntimeErrors


@dataclass
class Outcome:
    """What was measured, and what failed why, in the order of the settings.

    Attributes:
        trials: Turns by setting.
        failures: Reasons by setting.
        equality: How the tokens compare with those of plain decoding, by setting.
        memory: Bytes by engine.
        notes: What a reader has to know.
    """

    trials: dict[Setting, list[Trial]] = field(default_factory=dict)
    failures: dict[Setting, str] = field(default_factory=dict)
    equality: dict[Setting, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, dict[str, int | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fail(self, settings: Sequence[Setting], reason: str) -> None:
        """Note that these could not be measured; what was measured of them before does not count."""
        for setting in settings:
            self.trials.pop(setting, None)
            self.failures[setting] = reason

    def cells(self, order: Sequence[Setting]) -> list[dict[str, Any]]:
        """Give an entry for each setting that was measured or failed."""
        found = []
        for setting in order:
            if setting in self.failures:
                found.append(failed_cell(setting, self.failures[setting]))
            elif self.trials.get(setting):
                plain = self.trials.get(plain_of(setting), [])
                found.append(measured_cell(setting, self.trials[setting], plain, self.equality.get(setting)))
        return found


def plain_of(setting: Setting) -> Setting:
    """Give plain decoding on the same engine, otherwise alike."""
    # transformers has one engine for all its methods, we have one for each.
    method = Method.NONE if setting.engine == "transformers" else setting.method
    return Setting(setting.engine, str(method), OFF, setting.concurrency, setting.temperature)


def local_prompts(llm: LLM, questions: Sequence[Question], budget: Budget) -> tuple[list[tuple[str, Any]], list[str]]:
    """Give kind and token ids of every turn of the questions; later turns follow the model's own plain answers.

    Returns:
        The prompts, and notes about those that are left out.

    Raises:
        InvalidRequestError: None of them fits into the context.
    """
    plainly = SamplingParams(temperature=0, max_tokens=budget.max_tokens, speculation="off")

    def answer(prompts: list[Prompt]) -> list[str]:
        asked = [one.prepared(llm, chat=None, system=None) for one in prompts]
        return [output.text for output in llm.generate(asked, plainly, progress=False)]

    cases = conversations(questions, answer, templated=bool(getattr(llm.tokenizer, "chat_template", None)))
    prompts, long = [], []
    for case in cases:
        ids = llm.intake.request(case.prompt.prepared(llm, chat=None, system=None), plainly).prompt_token_ids
        if len(ids) + budget.max_tokens > llm.max_model_len:
            long.append(case.name)
        else:
            prompts.append((case.kind, list(ids)))
    if not prompts:
        raise InvalidRequestError(
            f"no prompt fits: with {budget.max_tokens} tokens to generate, all exceed the context of "
            f"{llm.max_model_len}; lower max_tokens, raise max_model_len, or take shorter prompts"
        )
    left = f"{len(long)} of {len(cases)} prompts are too long for the context and are left out: {', '.join(long[:9])}"
    return prompts, [left] if long else []


def measure_engine(
    llm: LLM,
    prompts: Sequence[tuple[str, Any]],
    settings: Sequence[Setting],
    plan: Plan,
    outcome: Outcome,
    advance: Advance = lambda _setting, _repeat: None,
) -> None:
    """Measure all settings of one engine by turns, and compare their tokens with those of plain decoding.

    Args:
        llm: The engine.
        prompts: From `local_prompts`.
        settings: Those of `plan` that this engine can be asked for.
        plan: Repeats, warm-up, and what each text may take.
        outcome: Where results go, as they come.
        advance: Told before each turn.
    """
    forget_peak(llm.loaded.device)
    short = [prompts[place % len(prompts)] for place in range(plan.warmup)]
    for setting in settings if short else ():
        _turn(llm, short, setting, plan, outcome, keep=False, repeat=0)
    for repeat, setting in rotated(settings, plan.repeats):
        if setting not in outcome.failures:
            advance(setting, repeat)
            _turn(llm, prompts, setting, plan, outcome, keep=True, repeat=repeat)
    for setting in settings:
        plain = plain_of(setting)
        if not setting.plain and outcome.trials.get(setting) and outcome.trials.get(plain):
            ours, theirs = outcome.trials[plain][0], outcome.trials[setting][0]
            outcome.equality[setting] = compared(llm, ours, theirs, plan.budget)
    outcome.memory[settings[0].method] = {**engine_memory(llm), "peak": peak_bytes(llm.loaded.device)}


def _turn(
    llm: LLM, prompts: Sequence[tuple[str, Any]], setting: Setting, plan: Plan, outcome: Outcome, **how: Any
) -> None:
    try:
        trial = measured(llm, prompts, setting, plan.budget, how["repeat"])
    except FAULTS as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        outcome.fail([setting], f"{type(error).__name__}: {error}")
        return
    if trial.errors:
        outcome.fail([setting], f"{len(trial.errors)} of {len(trial.replies)} texts failed: {trial.errors[0]}")
    elif how["keep"]:
        outcome.trials.setdefault(setting, []).append(trial)


def compared(llm: LLM, plain: Trial, speculative: Trial, budget: Budget) -> dict[str, Any]:
    """Say whether two trials gave the same tokens, whether they had to, and where they first part."""
    setting = speculative.setting
    expected = promises_tokens(llm, greedy=setting.temperature == 0)
    pairs = [
        (one.output, other.output)
        for one, other in zip(plain.replies, speculative.replies, strict=True)
        if one.output is not None and other.output is not None
    ]
    params = [params_of(setting, budget, place) for place in range(len(pairs))] if expected else []
    found = differences(llm, [one for one, _ in pairs], [other for _, other in pairs], params)
    told: dict[str, Any] = {
        "texts": len(pairs),
        "equal": len(pairs) - len(found),
        "expected": expected,
        "guaranteed": expected and is_steady(llm),
    }
    if found:
        words = [token_name(llm, token) for token in (found[0].plain, found[0].speculative)]
        told["first"] = {**asdict(found[0]), "words": words}
    return told
