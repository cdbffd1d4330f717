"""What an engine counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.prefix_cache import PrefixCache

__all__ = ["EngineFigures"]


class EngineFigures:
    """What the engine counted since it started.

    Args:
        prefixes: Counts what was looked for and found in the cache; None where nothing is.
    """

    def __init__(self, prefixes: PrefixCache | None = None) -> None:
        self._prefixes = prefixes
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.tokens = 0
        self.step_seconds = 0.0
        self.propose_seconds = 0.0
        self.verify_seconds = 0.0

    @property
    def prefix_queries(self) -> int:
        """Tokens of sequences that were let in and might have started from what the cache held."""
        return 0 if self._prefixes is None else self._prefixes.queries

    @property
    def prefix_hits(self) -> int:
        """Tokens of them that the cache held."""
        return 0 if self._prefixes is None else self._prefixes.hits
