"""Feeding caches that lag: which rows share a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["runs"]


def runs(counts: tuple[int, ...], *, together: bool) -> Iterator[slice]:
    """Cut rows into runs to be fed in a pass each: every row alone, or so that padding at most doubles a run's work."""
    begin = 0
    for end in range(1, len(counts) + 1):
        run = counts[begin : end + 1]
        if end == len(counts) or not together or max(run) * len(run) > 2 * sum(run):
            yield slice(begin, end)
            begin = end
