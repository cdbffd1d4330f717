"""Checking a stored proof again: the same weights, the same settings, and then the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError
from outrider.proof.prove import judged_parting
from outrider.proof.referee import LEAST_NEAR
from outrider.proof.texts import Parting, parting

if TYPE_CHECKING:
    from outrider.proof.prove import Cell, Plan, Proof, Target
    from outrider.proof.record import Record
    from outrider.proof.referee import Referee
    from outrider.proof.texts import Text

__all__ = ["Recall", "check_weights", "recalled"]


@dataclass(frozen=True)
class Recall:
    """One run of one setting, beside what the record has of it.

    Attributes:
        setting: As in `Plan`.
        run: "plain" or "speculative".
        texts: How many there are.
        partings: Where texts are others than the recorded ones (there "plain" is what was recorded, "speculative" what
            came now).
    """

    setting: dict[str, Any]
    run: str
    texts: int
    partings: list[Parting]

    @property
    def defects(self) -> int:
        """Texts that are others, and must not be."""
        return sum(one.verdict == "defect" for one in self.partings)


def check_weights(recorded: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse weights that are not those of the record.

    Raises:
        ConfigError: It names the first file that is missing, new or another.
    """
    for role in sorted(recorded.keys() | found.keys()):
        ours, theirs = found.get(role, {}), recorded.get(role, {})
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                where = "here" if name in ours else "in the record"
                raise ConfigError(f"the {role}'s file {name} is only {where}: these are not the recorded weights")
            if ours[name] != theirs[name]:
                raise ConfigError(
                    f"the {role}'s file {name} is another one: SHA-256 {ours[name]['sha256'][:16]}... here, "
                    f"{theirs[name]['sha256'][:16]}... in the record; give the recorded weights"
                )


def recalled(record: Record, proof: Proof, target: Target, *, same_machine: bool) -> list[Recall]:
    """Compare what was generated now with what was recorded.

    On the machine and with the versions of the record, where nothing is granted to rounding, any difference is a
    defect. Elsewhere rounding is granted what was measured. Texts whose distribution alone is promised are compared
    too, but only in the first case is another one a defect.
    """
    strict = same_machine and target.strict
    near = LEAST_NEAR if proof.near is None else proof.near
    found, referee = [], None
    for before, now in zip(record.cells, proof.cells, strict=True):
        for run in ("plain", "speculative"):
            partings = _partings(before, now, run) if strict or not now.by_distribution else []
            by_scores = not (now.by_distribution or target.quantized)
            if partings and by_scores and referee is None:
                referee = target.referee()
            judge = referee if by_scores else None
            judged = [_judged(record.plan, now, run, one, judge, near, strict=strict) for one in partings]
            found.append(Recall(now.setting, run, len(getattr(now, run)), judged))
    return found


def _judged(
    plan: Plan, cell: Cell, run: str, one: Parting, referee: Referee | None, near: float, *, strict: bool
) -> Parting:
    texts: list[Text] = getattr(cell, run)
    params = plan.params(cell.setting, one.prompt)
    return judged_parting(one, params, len(texts[one.prompt].prompt), referee, near, strict=strict)


def _partings(before: Cell, now: Cell, run: str) -> list[Parting]:
    pairs: list[tuple[Text, Text]] = list(zip(getattr(before, run), getattr(now, run), strict=True))
    return [one for place, pair in enumerate(pairs) if (one := parting(place, *pair)) is not None]
