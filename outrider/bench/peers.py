"""transformers' `generate` under the same prompts: plain, with prompt lookup, and with the draft as its assistant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outrider.bench.plan import AUTO, rotated
from outrider.bench.run import FAULTS
from outrider.bench.trials import OFF, Reply, Setting, Trial
from outrider.config import Method
from outrider.outputs import SpeculationStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from outrider.bench.plan import Plan
    from outrider.bench.run import Outcome
    from outrider.model.stock import StockModel

__all__ = ["measure_transformers", "transformers_settings"]

THEIRS = (Method.NGRAM, Method.DRAFT_MODEL)  # what transformers has an equivalent of


def transformers_settings(plan: Plan) -> list[Setting]:
    """Give what transformers can be asked for, in the plan's order: one text at a time is all that it speculates on."""
    found = []
    for temperature in plan.temperatures:
        found.append(Setting("transformers", str(Method.NONE), OFF, 1, temperature))
        for method in (one for one in plan.methods if one in THEIRS):
            lengths: list[int | str] = [*plan.lengths]
            lengths += [AUTO] if method == Method.DRAFT_MODEL else []
            found += [Setting("transformers", method, length, 1, temperature) for length in lengths]
    return found


def measure_transformers(
    source: str | None,
    draft: str | None,
    place: tuple[torch.dtype, torch.device],
    prompts: Sequence[tuple[str, Any]],
    plan: Plan,
    outcome: Outcome,
    tell: Callable[[str, int], None] = lambda _what, _turns: None,
) -> None:
    """Measure all of `transformers_settings` by turns; a setting that fails is kept with its reason.

    Args:
        source, draft: As `LLM` takes them.
        place: dtype and device of our engines.
        prompts: Kind and token ids.
        plan, outcome, tell: As of `LocalBench`.
    """
    from outrider.model.stock import StockModel

    settings = transformers_settings(plan)
    tell("loading transformers", 0)
    try:
        model = StockModel(source, draft, dtype=place[0], device=place[1])
    except FAULTS as error:
        outcome.fail(settings, f"{type(error).__name__}: {error}")
        return
    for setting in settings if plan.warmup else ():
        _turn(model, prompts[:1], setting, plan, outcome, None)
    for repeat, setting in rotated(settings, plan.repeats):
        if setting not in outcome.failures:
            where = f"one at a time, temperature {setting.temperature:g}"
            tell(f"{setting.title}, {where} (turn {repeat + 1} of {plan.repeats})", 1)
            _turn(model, prompts, setting, plan, outcome, repeat)
    outcome.notes.append(
        "transformers runs one text at a time, and after our engines, not in turns with them: its speedups are over "
        "its own plain decoding"
    )


def _turn(
    model: StockModel,
    prompts: Sequence[tuple[str, Any]],
    setting: Setting,
    plan: Plan,
    outcome: Outcome,
    repeat: int | None,
) -> None:
    began = time.perf_counter()
    try:
        replies = tuple(_text(model, kind, ids, setting, plan, place) for place, (kind, ids) in enumerate(prompts))
    except (*FAULTS, ValueError, TypeError) as error:
        outcome.fail([setting], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    if repeat is not None:
        trial = Trial(setting, repeat, time.perf_counter() - began, replies)
        outcome.trials.setdefault(setting, []).append(trial)


def _text(model: StockModel, kind: str, ids: list[int], setting: Setting, plan: Plan, place: int) -> Reply:
    speculation: dict[str, int] = {}
    length = 0 if isinstance(setting.length, str) else setting.length
    if not setting.plain:
        speculation["lookup" if setting.method == Method.NGRAM else "assisted"] = length
    budget = plan.budget
    how: dict[str, Any] = {"seed": budget.seed + place, "ignore_eos": budget.ignore_eos, **speculation}
    text = model.generate(ids, budget.max_tokens, temperature=setting.temperature, **how)
    gaps = tuple(later - earlier for earlier, later in zip(text.times, text.times[1:], strict=False))
    first = text.times[0] - text.began if text.times else None
    stats = SpeculationStats(rounds=text.rounds, tokens=len(text.token_ids))  # it tells no guesses
    return Reply(kind, len(text.token_ids), text.seconds, first, gaps, stats)
