"""A benchmark's whole report as one object: what JSON holds, and what table and page are made of."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.summary import losses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.plan import Plan
    from outrider.bench.run import Outcome
    from outrider.bench.trials import Setting

__all__ = ["failed", "machine_facts", "prompt_facts", "report_of"]

STEADY = 0.1  # by how much plain decoding may differ between engines before a reader is told


def machine_facts() -> dict[str, Any]:
    """Give what figures depend on: the processor or card, threads, versions."""
    import transformers

    from outrider import __version__

    return {
        "outrider": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - not a file to be read whole
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report_of(
    outcome: Outcome, order: Sequence[Setting], plan: Plan, model: dict[str, Any], prompts: dict[str, Any]
) -> dict[str, Any]:
    """Put everything together.

    Args:
        outcome: What was measured.
        order: All settings, in the order in which they are shown.
        plan: What was asked for.
        model: Of the target: name, dtype, device, draft, verification.
        prompts: Where they come from, how many of each kind, their tokens.
    """
    cells = outcome.cells(order)
    return {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "model": model,
        "prompts": prompts,
        "plan": {
            "methods": list(plan.methods),
            "lengths": list(plan.lengths),
            "concurrency": list(plan.concurrency),
            "temperatures": list(plan.temperatures),
            "max_tokens": plan.budget.max_tokens,
            "seed": plan.budget.seed,
            "ignore_eos": plan.budget.ignore_eos,
            "repeats": plan.repeats,
            "warmup": plan.warmup,
        },
        "memory": outcome.memory,
        "cells": cells,
        "losses": [
            {
                "title": one["cell"]["title"],
                "concurrency": one["cell"]["concurrency"],
                "temperature": one["cell"]["temperature"],
                "kind": one["kind"],
                "speedup": one["speedup"],
                "steady": one["steady"],
            }
            for one in losses(cells)
        ],
        "notes": [*outcome.notes, *_once(plan), *_unsteady(outcome, order), *_unequal(cells)],
    }


def prompt_facts(source: str, prompts: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Say what was asked."""
    lengths = [len(ids) for _, ids in prompts if ids and isinstance(ids[0], int)]  # a server is sent messages
    return {
        "source": source,
        "count": len(prompts),
        "kinds": dict(Counter(kind for kind, _ in prompts)),
        "tokens": {"least": min(lengths), "most": max(lengths)} if lengths else None,
    }


def _once(plan: Plan) -> list[str]:
    """Say what a single turn cannot tell."""
    return ["with one turn of each setting, nothing here tells gain from noise; take --repeats 3 or more"] * (
        plan.repeats == 1
    )


def _unsteady(outcome: Outcome, order: Sequence[Setting]) -> list[str]:
    """Say where plain decoding was not as fast on all engines: their rates can then not be held against each other."""
    groups: dict[tuple[int, float], list[float]] = {}
    for setting in order:
        if setting.plain and setting.engine == "outrider" and outcome.trials.get(setting):
            rates = sorted(trial.rate for trial in outcome.trials[setting])
            groups.setdefault((setting.concurrency, setting.temperature), []).append(rates[len(rates) // 2])
    widest = max((max(rates) / min(rates) - 1 for rates in groups.values() if min(rates)), default=0.0)
    if widest <= STEADY:
        return []
    told = (
        f"plain decoding differs by {widest:.0%} between engines: the machine's speed changed, or a drafter slows even "
        "plain rounds. Each speedup is over plain decoding on the same engine, by turns; tokens a second of different "
        "methods are less comparable"
    )
    return [told]


def _unequal(cells: Sequence[dict[str, Any]]) -> list[str]:
    broken = [one["title"] for one in cells if (one.get("equality") or {}).get("guaranteed")
              and one["equality"]["equal"] < one["equality"]["texts"]]  # fmt: skip
    if not broken:
        return []
    return [f"tokens differ from plain decoding where they must not: {', '.join(broken)}; please report it"]


def failed(report: dict[str, Any]) -> bool:
    """Whether nothing was measured, or tokens differ that must not."""
    measured = [one for one in report["cells"] if one["status"] == "measured"]
    unequal = [one["equality"] for one in measured if one["equality"] and one["equality"]["guaranteed"]]
    return not measured or any(one["equal"] < one["texts"] for one in unequal)
