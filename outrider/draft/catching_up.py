"""Feeding caches that lag: which rows share a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["runs"]


def runs(begins: Sequence[int], counts: Sequence[int], *, together: bool) -> Iterator[list[int]]:
    """Cut rows into runs to be fed in a pass each: every row alone, or so that padding at most doubles a run's work.

    Those that begin their texts are not mixed with those that go on: the former see nothing but each other's pass, for
    which there are faster ways.

    Args:
        begins: Tokens of each row that are cached.
        counts: Tokens to be fed.
        together: Whether rows may share a pass.
    """
    if not together:
        yield from ([place] for place in range(len(counts)))
        return
    for begun in (False, True):
        run: list[int] = []
        for place in sorted((one for one, begin in enumerate(begins) if (begin > 0) == begun), key=counts.__getitem__):
            wider = [*run, place]
            if counts[place] * len(wider) > 2 * sum(counts[one] for one in wider):
                yield run
                wider = [place]
            run = wider
        if run:
            yield run
