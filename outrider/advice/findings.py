"""What a doctor says: a named fault, the numbers that show it, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Finding", "Severity", "by_harm"]


class Severity(StrEnum):
    """How much a fault matters: the first two cost speed, the last is worth knowing."""

    SEVERE = "severe"
    MODERATE = "moderate"
    SLIGHT = "slight"


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        code: Its name, the same in every version.
        severity: How much it matters.
        what: The fault in one sentence.
        remedy: What to do.
        evidence: Numbers that show it, by name.
        harm: Share of the speed, or of the guesses, that it costs, 0 to 1, as far as it can be told.
    """

    code: str
    severity: Severity
    what: str
    remedy: str
    evidence: dict[str, float | int | str] = field(default_factory=dict)
    harm: float = 0.0

    @property
    def harmful(self) -> bool:
        """Whether it costs speed."""
        return self.severity is not Severity.SLIGHT


def by_harm(findings: list[Finding]) -> list[Finding]:
    """The worst first; of several with one name, only the worst."""
    order = list(Severity)
    ranked = sorted(findings, key=lambda one: (order.index(one.severity), -one.harm, one.code))
    return list({one.code: one for one in reversed(ranked)}.values())[::-1]
