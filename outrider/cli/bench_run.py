"""Measuring by turns, with a bar, whatever it is that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cli.console import turns

if TYPE_CHECKING:
    from outrider.bench.local import LocalBench
    from outrider.bench.remote import RemoteBench

__all__ = ["measured"]


def measured(run: LocalBench | RemoteBench, repeats: int, *, quiet: bool) -> bool:
    """Run all turns of all settings; say whether Ctrl-C ended them, which keeps what was measured until then."""
    with turns(len(run.settings) * repeats, quiet=quiet) as run.tell:
        try:
            run.measure()
        except KeyboardInterrupt:
            if not run.outcome.trials:
                raise
            run.outcome.notes.append("interrupted: this is what was measured until then")
            return True
    return False
