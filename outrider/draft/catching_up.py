"""Feeding caches that lag: which rows share a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Run", "runs"]


@dataclass(frozen=True)
class Run:
    """Rows that are fed in one pass, the shorter ones padded.

    Attributes:
        places: Which rows.
        begins: Tokens of each that are cached.
        width: Tokens a row.
    """

    places: list[int]
    begins: list[int]
    width: int

    @property
    def context(self) -> int:
        """The highest position and one, of a row that is fed in full."""
        return max(self.begins) + self.width

    def positions(self, last: int, device: torch.device) -> torch.Tensor:
        """Positions of the tokens, ``[rows, width]``, none beyond `last`."""
        steps = torch.arange(self.width, device=device)
        return (upload(self.begins, device)[:, None] + steps).clamp(max=last)


def runs(begins: Sequence[int], counts: Sequence[int], *, together: bool) -> Iterator[Run]:
    """Cut rows into runs to be fed in a pass each: every row alone, or so that padding at most doubles a run's work.

    Those that begin their texts are not mixed with those that go on: the former see nothing but each other's pass, for
    which there are faster ways.

    Args:
        begins: Tokens of each row that are cached.
        counts: Tokens to be fed.
        together: Whether rows may share a pass.
    """
    for places in _cut(begins, counts) if together else [[place] for place in range(len(counts))]:
        yield Run(places, [begins[place] for place in places], max(counts[place] for place in places))


def _cut(begins: Sequence[int], counts: Sequence[int]) -> Iterator[list[int]]:
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
