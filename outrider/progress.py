"""Progress on stderr, for people at a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq

    from outrider.sequence import Sequence

__all__ = ["counted", "tracked"]

T = TypeVar("T")


def counted(items: Seq[T], words: str) -> Iterator[T]:
    """Go through `items`, at a terminal with a progress bar."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, words, console=Console(stderr=True), transient=True)


@contextmanager
def tracked(sequences: list[Sequence], wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Show how many sequences are done and how fast tokens come; give a function to call after each step."""
    if wanted is None:
        wanted = len(sequences) > 1 and sys.stderr.isatty()
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    words = TextColumn("generating"), TextColumn("{task.fields[rate]}")
    columns = words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=len(sequences), rate="")

        def tick() -> None:
            done = sum(sequence.finished for sequence in sequences)
            tokens = sum(sequence.num_generated for sequence in sequences)
            seconds = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, rate=f"{tokens / seconds:.0f} tok/s" if seconds else "")

        yield tick
