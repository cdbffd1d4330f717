"""From trials to figures: medians with their spread, waiting, acceptance, and what is lost."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.bench.trials import Reply, Setting, Trial

__all__ = ["failed_cell", "losses", "measured_cell", "percentile", "spread_of"]

QUANTILES = 20  # steps of a distribution that reports keep


def percentile(values: Sequence[float], share: float) -> float | None:
    """Give the smallest value that `share` of all do not exceed; None of none."""
    known = sorted(values)
    return known[max(0, math.ceil(share * len(known)) - 1)] if known else None


def spread_of(values: Sequence[float]) -> dict[str, float] | None:
    """Give median, least and most; None of none."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def failed_cell(setting: Setting, reason: str) -> dict[str, Any]:
    """Give the entry of a setting that could not be measured."""
    return {**_name(setting), "status": "failed", "reason": reason}


def measured_cell(
    setting: Setting, trials: Sequence[Trial], plain: Sequence[Trial], equality: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Give the entry of a setting.

    Args:
        setting: What was measured.
        trials: Its turns, one at least.
        plain: The turns of plain decoding on the same engine, or none.
        equality: What came of comparing the tokens with those of plain decoding.
    """
    replies = [reply for trial in trials for reply in trial.replies]
    before = {trial.repeat: trial.rate for trial in plain}
    ratios = [trial.rate / before[trial.repeat] for trial in trials if before.get(trial.repeat)]
    ends = [reply.seconds for reply in replies]
    gaps = [gap for reply in replies for gap in reply.gaps]
    return {
        **_name(setting),
        "status": "measured",
        "repeats": len(trials),
        "texts": len(trials[0].replies),
        "tokens": trials[0].tokens,
        "seconds": spread_of([trial.seconds for trial in trials]),
        "tokens_per_second": spread_of([trial.rate for trial in trials]),
        "speedup": None if setting.plain else spread_of(ratios),
        "first_token": _waiting([reply.first_seconds for reply in replies if reply.first_seconds is not None]),
        "between_deliveries": _waiting(gaps),
        "per_token": _waiting([reply.token_seconds for reply in replies if reply.token_seconds is not None]),
        "end_to_end": _waiting(ends),
        **_acceptance(replies),
        "time": _parts(trials),
        "equality": equality,
        "kinds": _kinds(trials, plain, speculates=not setting.plain),
        "quantiles": {"end_to_end": _quantiles(ends), "between_deliveries": _quantiles(gaps)},
    }


def _name(setting: Setting) -> dict[str, Any]:
    return {
        "engine": setting.engine,
        "method": setting.method,
        "length": setting.length,
        "concurrency": setting.concurrency,
        "temperature": setting.temperature,
        "title": setting.title,
        "plain": setting.plain,
    }


def _waiting(values: Sequence[float]) -> dict[str, float | None]:
    """Give seconds at the middle and at the slow end."""
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def _quantiles(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    known = sorted(values)
    return [known[round(step / QUANTILES * (len(known) - 1))] for step in range(QUANTILES + 1)]


def _acceptance(replies: Iterable[Reply]) -> dict[str, Any]:
    """Add up what the engine counted; nothing is said of engines that do not count."""
    stats = [reply.stats for reply in replies if reply.stats is not None]
    drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    rounds, tokens = sum(one.rounds for one in stats), sum(one.tokens for one in stats)
    there, reached, right = (
        _added(getattr(one, name) for one in stats)
        for name in ("drafted_per_position", "reached_per_position", "accepted_per_position")
    )
    return {
        "drafted": drafted if stats else None,
        "accepted": accepted if stats else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "rejection_rate": 1 - accepted / drafted if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "drafted_by_position": there,
        "acceptance_by_position": [one / all_ if all_ else 0.0 for one, all_ in zip(right, there, strict=True)],
        "conditional_acceptance_by_position": [
            one / all_ if all_ else 0.0 for one, all_ in zip(right, reached or [0] * len(right), strict=True)
        ],
    }


def _added(columns: Iterable[tuple[int, ...]]) -> list[int]:
    total: Counter[int] = Counter()
    for column in columns:
        total.update(dict(enumerate(column)))
    return [total[place] for place in range(len(total))]


def _parts(trials: Sequence[Trial]) -> dict[str, float] | None:
    """Give the shares of drafting, verifying and the rest in all seconds."""
    known = [(trial.parts, trial.seconds) for trial in trials if trial.parts is not None]
    seconds = sum(taken for _, taken in known)
    if not seconds:
        return None
    draft, verify = (sum(parts[place] for parts, _ in known) / seconds for place in (0, 1))
    return {"draft": draft, "verify": verify, "other": max(0.0, 1 - draft - verify)}


def _kinds(trials: Sequence[Trial], plain: Sequence[Trial], *, speculates: bool) -> dict[str, dict[str, Any]]:
    """Give each kind's tokens a second of one text, and its speedup over plain."""
    ours, theirs = _rates(trials), _rates(plain)
    return {
        kind: {
            "tokens_per_second": rate,
            "speedup": rate / theirs[kind] if speculates and theirs.get(kind) else None,
        }
        for kind, rate in ours.items()
    }


def _rates(trials: Sequence[Trial]) -> dict[str, float]:
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for trial in trials:
        for reply in trial.replies:
            tokens[reply.kind] += reply.tokens
            seconds[reply.kind] = seconds.get(reply.kind, 0.0) + reply.seconds
    return {kind: tokens[kind] / taken for kind, taken in seconds.items() if taken}


def losses(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every setting, and every kind of prompt under one, that was slower than plain; the worst first."""
    found = []
    for cell in cells:
        if cell["status"] != "measured" or cell["plain"]:
            continue
        whole = cell["speedup"]
        if whole is not None and whole["median"] < 1:
            found.append({"cell": cell, "kind": None, "speedup": whole["median"], "steady": whole["max"] < 1})
        for kind, told in cell["kinds"].items() if len(cell["kinds"]) > 1 else ():
            if told["speedup"] is not None and told["speedup"] < 1:
                found.append({"cell": cell, "kind": kind, "speedup": told["speedup"], "steady": None})
    return sorted(found, key=lambda one: float(one["speedup"]))
