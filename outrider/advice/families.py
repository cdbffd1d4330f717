"""Drafts that are known for well-known targets: a table with a source for each line, see drafts.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

__all__ = ["Candidate", "candidates", "known_families"]

_SUFFIXES = r"([-.](gguf|awq|gptq|fp8|bf16|f16|int[48]|i?q\d(-\w+)*|w\d\w*|bnb|4bit|8bit|hf|dynamic|unsloth))*"


@dataclass(frozen=True)
class Candidate:
    """A draft for a target.

    Attributes:
        id: Of the Hub repository.
        kind: "draft_model", "eagle" or "medusa".
        source: The page that names it for this target, or its family.
        note: What to know of it; often empty.
    """

    id: str
    kind: str
    source: str
    note: str = ""


def candidates(name: str) -> list[Candidate]:
    """Give the drafts known for a target of this name: a Hub id, a folder's or a GGUF's; none where it is not known.

    Quantised versions and other people's copies have the name of what they were made of, and an addition.
    """
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    found: list[Candidate] = []
    for family in _table():
        if re.fullmatch(rf"(.*-)?({family['targets']}){_SUFFIXES}", plain):
            found += [Candidate(**draft) for draft in family["drafts"]]
    return found


def known_families() -> list[tuple[str, list[Candidate]]]:
    """Every line of the table: the family's name, and its drafts."""
    return [(family["family"], [Candidate(**draft) for draft in family["drafts"]]) for family in _table()]


@lru_cache(1)
def _table() -> list[dict[str, Any]]:
    text = files("outrider.advice").joinpath("drafts.json").read_text(encoding="utf-8")
    table: list[dict[str, Any]] = json.loads(text)["families"]
    return table
