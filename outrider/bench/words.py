"""Figures as people read them, in the terminal and on the page."""

from __future__ import annotations

from typing import Any

__all__ = [
    "amount",
    "conditions",
    "counted",
    "memory_words",
    "milliseconds",
    "parting",
    "share",
    "times",
    "times_range",
]


def conditions(temperature: float, concurrency: int) -> str:
    """Say what the rows of a table share."""
    drawn = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{concurrency} at a time, {drawn}" if concurrency > 1 else f"one at a time, {drawn}"


def counted(count: int, thing: str) -> str:
    """Give a number of things."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def parting(cell: dict[str, Any], dtype: str | None) -> str | None:
    """Say where a setting's texts part from plain decoding's, and what that means; None where they do not."""
    told = cell.get("equality")
    if told is None or told["equal"] == told["texts"]:
        return None
    line = f"{cell['title']}: {told['texts'] - told['equal']} of {counted(told['texts'], 'text')} part from plain"
    first = told.get("first")
    if first is not None:
        line += f"; the first (prompt {first['prompt'] + 1}) at token {first['token']}: plain {first['words'][0]}, "
        line += f"speculative {first['words'][1]}"
        if first["gap"] is not None:
            line += f", log-probabilities {first['gap']:.4f} apart"
    if told["guaranteed"]:
        return f"NOT EQUAL: {line}. This must not happen in fp32 or with --exact; please report it."
    if told["expected"]:
        return f"{line}. In {dtype} near-ties may fall either way; --exact rules that out."
    return f"{line}. Equal tokens are not promised here."


def times(spread: dict[str, float] | None) -> str:
    """Give a speedup's median."""
    return "-" if spread is None else f"{spread['median']:.2f}x"


def times_range(spread: dict[str, float] | None) -> str:
    """Give a speedup's least and most."""
    return "-" if spread is None else f"{spread['min']:.2f} to {spread['max']:.2f}"


def share(value: float | None) -> str:
    """Give a rate in per cent."""
    return "-" if value is None else f"{value:.0%}"


def milliseconds(seconds: float | None) -> str:
    """Give a time, from one second on in seconds."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def amount(count: int | None) -> str:
    """Give a number of bytes."""
    if count is None:
        return "not known"
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def memory_words(told: dict[str, Any]) -> str:
    """Say what an engine holds."""
    parts = [f"weights {amount(told['weights'])}"]
    parts += [f"draft {amount(told['draft_weights'])}"] if told["draft_weights"] else []
    parts.append(f"cache {amount(told['kv_cache'])}")
    parts += [f"peak {amount(told['peak'])}"] if told["peak"] else []
    return ", ".join(parts)
