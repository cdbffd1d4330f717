"""What a search has found so far, in a file: it can be interrupted and goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["State", "key_of"]


def key_of(**parts: Any) -> str:
    """Give a name for all that a search depends on: another model, prompt or setting is another search."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


@dataclass
class State:
    """A search's findings.

    Attributes:
        path: Where they are kept.
        key: Of the search.
        prompts: Kind and token ids.
        calibrations: Records of `Calibration`, by variant.
        measured: What each candidate showed, by its title.
        failures: Reasons, by variant or candidate.
        seconds: Spent so far, over all runs.
    """

    path: Path
    key: str
    prompts: list[tuple[str, list[int]]] = field(default_factory=list)
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def opened(cls, path: Path, key: str, *, fresh: bool) -> State:
        """Read what there is of this search; of another one, or with `fresh`, nothing.

        Raises:
            ConfigError: The file is there, but is none of ours.
        """
        if fresh or not path.exists():
            return cls(path, key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] != key:
                return cls(path, key)
            prompts = [(str(kind), list(ids)) for kind, ids in found["prompts"]]
            return cls(
                path, key, prompts, found["calibrations"], found["measured"], found["failures"], found["seconds"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} does not hold a search ({type(error).__name__}); start anew with --fresh, or move it away"
            ) from None

    @property
    def begun(self) -> bool:
        """Whether anything was found yet."""
        return bool(self.calibrations or self.measured)

    def save(self) -> None:
        """Write it, whole or not at all."""
        found = {name: value for name, value in vars(self).items() if name != "path"}
        other = self.path.with_name(self.path.name + ".part")
        other.write_text(json.dumps(found), encoding="utf-8")
        os.replace(other, self.path)  # noqa: PTH105 - replaces what is there
