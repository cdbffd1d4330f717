"""The cost model: what a draft length gains, from one long draft's acceptance and the seconds of its rounds."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.trials import Trial

__all__ = ["Calibration", "Candidate", "Variant", "candidates"]


@dataclass(frozen=True)
class Variant:
    """What drafts, and whether it guesses trees."""

    method: str
    tree: str | None = None

    @property
    def title(self) -> str:
        """For people."""
        return self.method if self.tree is None else f"{self.method} tree"


@dataclass(frozen=True)
class Candidate:
    """A setting that may turn out best.

    Attributes:
        predicted: Times as fast as plain, by concurrency.
    """

    variant: Variant
    length: int
    predicted: dict[int, float]

    @property
    def title(self) -> str:
        """For people, and as a key of what was measured."""
        return f"{self.variant.title} {self.length}"

    @property
    def promise(self) -> float:
        """What it is ranked by: over all concurrencies, the geometric mean."""
        return statistics.geometric_mean(self.predicted.values())


@dataclass(frozen=True)
class Calibration:
    """What one variant's longest draft showed.

    Attributes:
        length: Guesses a round.
        gains: Guesses accepted at each place, a round: with all before them accepted, as a chain's are.
        plain_seconds, seconds: Of a round, without guesses and with `length` of them, by concurrency.
    """

    length: int
    gains: tuple[float, ...]
    plain_seconds: dict[int, float]
    seconds: dict[int, float]

    @classmethod
    def of(cls, plain: dict[int, Trial], drafted: dict[int, Trial], length: int) -> Calibration:
        """Take it from a trial of each kind at each concurrency."""
        stats = [reply.stats for trial in drafted.values() for reply in trial.replies if reply.stats is not None]
        rounds = max(1, sum(one.rounds for one in stats))
        accepted = [0] * length
        for one in stats:
            for place, count in enumerate(one.accepted_per_position[:length]):
                accepted[place] += count
        return cls(
            length,
            tuple(count / rounds for count in accepted),
            {together: _round_seconds(trial) for together, trial in plain.items()},
            {together: _round_seconds(trial) for together, trial in drafted.items()},
        )

    def speedup(self, length: int, together: int) -> float:
        """Predict ``E(k) / (r(k) / r(0))``: ``E(k) = 1 + a_1 + ... + a_k`` tokens a round, r(k) its seconds.

        a_j is the chance that the first j guesses all agree. Between no guesses and the longest draft, seconds are
        taken to grow evenly: a guess costs its drafting and its share of a wider pass.
        """
        tokens = 1 + sum(self.gains[:length])
        plain, whole = self.plain_seconds[together], self.seconds[together]
        seconds = plain + (whole - plain) * min(1.0, length / self.length)
        return tokens * plain / seconds if seconds > 0 else 1.0

    def record(self) -> dict[str, Any]:
        """Give it as JSON has it."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Calibration:
        """Read it back."""
        tables = [{int(key): value for key, value in record[name].items()} for name in ("plain_seconds", "seconds")]
        return cls(record["length"], tuple(record["gains"]), *tables)


def _round_seconds(trial: Trial) -> float:
    """Give the seconds of a round after a text's first one, on average."""
    known = [one for one in trial.replies if one.stats is not None and one.first_seconds is not None]
    rounds = sum(one.stats.rounds - 1 for one in known if one.stats is not None)
    seconds = sum(one.seconds - (one.first_seconds or 0.0) for one in known)
    return seconds / rounds if rounds else 0.0


def candidates(
    found: dict[Variant, Calibration], lengths: Sequence[int], concurrency: Sequence[int]
) -> list[Candidate]:
    """Give all settings that are worth a thought, the most promising first."""
    made = []
    for variant, calibration in found.items():
        asked = (
            [calibration.length] if variant.tree is not None else [one for one in lengths if one <= calibration.length]
        )
        for length in asked:
            predicted = {together: calibration.speedup(length, together) for together in concurrency}
            made.append(Candidate(variant, length, predicted))
    return sorted(made, key=lambda one: one.promise, reverse=True)
