"""What the command line says beside the text: progress, notes and errors, all on stderr."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["byte_bar", "reported", "say", "turns", "working"]

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def say(line: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def reported(*, show_traceback: bool) -> Iterator[None]:
    """Turn what can go wrong into one clear line and an exit code; warnings and log lines likewise."""
    try:
        with _plain_warnings():
            yield
    except OutriderError as error:
        if show_traceback:
            traceback.print_exc()
        say(f"error: {error}")
        raise typer.Exit(WRONG_INPUT) from None
    except BrokenPipeError:
        raise  # nobody reads on, such as `| head`: Typer ends the program for that
    except OSError as error:  # a disk that is full, a file that went away
        if show_traceback:
            traceback.print_exc()
        say(f"error: {error}")
        raise typer.Exit(FAILED) from None
    except BaseException as error:
        # Ctrl-C may fall into the middle of a round, whose clearing up can then fail in turn.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        say("")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _plain_warnings() -> Iterator[None]:
    def show(message: Warning | str, *_: Any) -> None:
        say(f"warning: {message}")

    logger, handler = logging.getLogger("outrider"), _Stderr()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]  # what else it is told, nobody needs
            yield
    finally:
        logger.removeHandler(handler)


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info and record.exc_info[0] is not None:
            # Where it arose, but not its message, which may hold some of a prompt.
            kind, _, place = record.exc_info
            say("".join(traceback.format_tb(place)) + kind.__name__)


@contextmanager
def working(what: str, *, quiet: bool) -> Iterator[None]:
    """Show what is being done: a spinner on a terminal, else a line."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(what)):
            yield
    else:
        say(what)
        yield


@contextmanager
def byte_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show bytes done of bytes in all, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(what, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def turns(total: int, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Show what is being done and how many turns are left: a bar on a terminal, else a line where an engine changes."""
    if quiet:
        yield lambda _what, _done: None
    elif not sys.stderr.isatty():
        yield lambda what, done: None if done else say(what)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            ending = 0

            def tell(what: str, done: int) -> None:
                nonlocal ending
                bar.update(task, description=what, advance=ending)
                ending = done  # a turn is done when the next one begins

            yield tell
