"""A proof record: all that it takes to check a proof again, in one JSON file with a digest over itself.

The digest shows that a record was changed by accident or by hand, not who wrote it: whoever changes one can make a new
digest. What cannot be made up is what `replay` looks at: the weights must have the recorded hashes, and generating
again must give the recorded tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from outrider import __version__
from outrider.errors import ConfigError, InvalidRequestError
from outrider.proof.prove import Cell, Plan, draws, verification_of
from outrider.proof.texts import Text

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.proof.prove import Proof, Target
    from outrider.proof.texts import Parting

__all__ = ["Machine", "Record", "here", "read_record", "summary", "without_text", "written"]

FORMAT, VERSION = "outrider proof record", 1
MOST_BYTES = 1 << 28
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
LARGEST_ID = 1 << 31
COMPARED = ("tokens", "distributions")


@dataclass(frozen=True)
class Machine:
    """What arithmetic depends on besides the weights."""

    outrider: str
    torch: str
    transformers: str
    python: str
    device: str
    dtype: str
    threads: int

    def differences(self, other: Machine) -> list[str]:
        """Name what is another here, as "torch 2.12 (recorded) and 2.13"."""
        pairs = [(name, value, getattr(other, name)) for name, value in asdict(self).items()]
        return [f"{name} {mine} (recorded) and {theirs} (here)" for name, mine, theirs in pairs if mine != theirs]


def here(target: Target) -> Machine:
    """Tell what this is."""
    card = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
    return Machine(
        __version__,
        torch.__version__,
        metadata.version("transformers"),
        platform.python_version(),
        card,
        str(target.dtype).removeprefix("torch."),
        torch.get_num_threads(),
    )


@dataclass(frozen=True)
class Record:
    """A record that was read.

    Attributes:
        load: The arguments for `LLM`.
        weights: Hashes, as `hashed` gives them.
        machine: Where it was made.
        plan: What was shown.
        prompts: Ids of each prompt.
        cells: The texts, setting by setting.
    """

    load: dict[str, Any]
    weights: dict[str, dict[str, dict[str, Any]]]
    machine: Machine
    plan: Plan
    prompts: list[list[int]]
    cells: list[Cell]


# --- writing


def summary(proof: Proof) -> dict[str, Any]:
    """Give what was found, without texts."""
    return {
        "verdict": "defect" if proof.defects else "proven as far as tested",
        "near": proof.near,
        "noise": None if proof.noise is None else proof.noise._asdict(),
        "cells": [_findings(cell) for cell in proof.cells],
    }


def _findings(cell: Cell) -> dict[str, Any]:
    return {
        "setting": cell.setting,
        "compared": COMPARED[cell.by_distribution],
        "texts": len(cell.speculative),
        "drafted": cell.drafted,
        "accepted": cell.accepted,
        "defects": cell.defects,
        "partings": [{name: value for name, value in asdict(one).items() if name != "prefix"} for one in cell.partings],
        "tests": [asdict(one) | {"failed": one.failed} for one in cell.tests],
    }


def without_text(one: Parting) -> dict[str, Any]:
    """Give where two texts part, without what precedes it."""
    return {name: value for name, value in asdict(one).items() if name != "prefix"}


def written(
    path: Path,
    proof: Proof,
    *,
    load: dict[str, Any],
    weights: dict[str, Any],
    machine: Machine,
    plan: Plan,
    prompts: list[list[int]],
) -> None:
    """Write a record, whole or not at all.

    Raises:
        ConfigError: The file cannot be written.
    """
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine),
        "load": load,
        "weights": weights,
        "plan": asdict(plan),
        "prompts": prompts,
        "found": summary(proof),
        "texts": [
            {"plain": [_ids(one) for one in cell.plain], "speculative": [_ids(one) for one in cell.speculative]}
            for cell in proof.cells
        ],
    }
    record["digest"] = _digest(record)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(json.dumps(record) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"--record {path} cannot be written ({type(error).__name__}); check the path") from None


def _ids(text: Text) -> dict[str, Any]:
    return {"token_ids": list(text.tokens), "finish_reason": text.finish_reason}


def _digest(record: dict[str, Any]) -> str:
    """Hash all of a record but its digest."""
    rest = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading


def read_record(path: Path) -> Record:
    """Read a record, and check all of it.

    Raises:
        ConfigError: It cannot be read, is no record, or was changed since it was written; the message says what is
            wrong with it.
    """
    found = _Reader(str(path), _parsed(path))
    if found.get("format", str) != FORMAT:
        raise found.wrong("format", f"must be {FORMAT!r}")
    if found.get("version", int) != VERSION:
        raise found.wrong("version", f"must be {VERSION}; it was written by another release")
    if found.get("digest", str) != _digest(found.value):
        raise ConfigError(
            f"{path}: the digest is not that of its content, so it was changed after it was written; make a new record"
        )
    plan = _plan(found.inside("plan"))
    prompts = [found.ids(ids, "prompts", least=1) for ids in found.get("prompts", list)]
    if not prompts:
        raise found.wrong("prompts", "must hold one at least")
    machine = found.inside("machine")
    kinds = {name: int if name == "threads" else str for name in Machine.__dataclass_fields__}
    return Record(
        load=found.inside("load").scalars(),
        weights=_weights(found.inside("weights")),
        machine=Machine(**{name: machine.get(name, kind) for name, kind in kinds.items()}),
        plan=plan,
        prompts=prompts,
        cells=_cells(found, plan, prompts),
    )


def _parsed(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES} bytes: it is no proof record")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no proof record: it is not JSON ({type(error).__name__})") from None


class _Reader:
    """An object in a record, whose values are looked at before they are used."""

    def __init__(self, where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is no proof record, or a damaged one: an object is expected there")
        self.where, self.value = where, value

    def wrong(self, name: str, how: str) -> ConfigError:
        return ConfigError(f"{self.where} is no proof record, or a damaged one: {name!r} {how}")

    def get(self, name: str, kind: type) -> Any:
        value = self.value.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, f"must be a {kind.__name__}, and is {type(value).__name__}")
        return value

    def count(self, name: str, low: int, high: int = LARGEST_ID) -> int:
        value: int = self.get(name, int)
        if not low <= value <= high:
            raise self.wrong(name, f"must be in [{low}, {high}], and is {value}")
        return value

    def inside(self, name: str) -> _Reader:
        return _Reader(f"{self.where}: {name}", self.value.get(name))

    def ids(self, value: Any, name: str, *, least: int = 0) -> list[int]:
        whole = isinstance(value, list) and len(value) >= least
        if not whole or not all(type(one) is int and 0 <= one < LARGEST_ID for one in value):
            raise self.wrong(name, "must hold lists of token ids")
        return list(value)

    def scalars(self) -> dict[str, Any]:
        """Give all of it, where nothing but values and lists of them (and one object of settings) is inside."""
        for name, value in self.value.items():
            if isinstance(value, dict) and name == "speculative_config":
                _Reader(f"{self.where}: {name}", value).scalars()
            elif not isinstance(value, str | int | float | None):
                raise self.wrong(name, "must be a plain value")
        return dict(self.value)


def _plan(found: _Reader) -> Plan:
    settings = found.get("settings", list)
    if not settings:
        raise found.wrong("settings", "must hold one at least")
    for setting in settings:
        if not isinstance(setting, dict) or set(setting) - set(SETTINGS):
            raise found.wrong("settings", f"must hold objects with some of {', '.join(SETTINGS)}")
    seed = found.get("seed", int)
    plan = Plan(
        tuple(settings), found.count("max_tokens", 1), seed, found.count("guesses", 1, 64), found.count("samples", 0)
    )
    try:
        for setting in plan.settings:
            plan.params(setting, plan.samples)
    except InvalidRequestError as error:
        raise found.wrong("settings", f"cannot be used: {error}") from None
    return plan


def _weights(found: _Reader) -> dict[str, Any]:
    if "target" not in found.value:
        raise found.wrong("target", "is missing")
    for role in found.value:
        files = found.inside(role)
        for name in files.value:
            entry = files.inside(name)
            entry.get("bytes", int)
            entry.get("sha256", str)
    return dict(found.value)


def _cells(found: _Reader, plan: Plan, prompts: list[list[int]]) -> list[Cell]:
    texts, told = found.get("texts", list), found.inside("found").get("cells", list)
    if not len(texts) == len(told) == len(plan.settings):
        raise found.wrong("texts", f"must have an entry for each of {len(plan.settings)} settings")
    cells = []
    for place, setting in enumerate(plan.settings):
        both = _Reader(f"{found.where}: texts[{place}]", texts[place])
        by_distribution = draws(verification_of(found.inside("load").value), setting)
        claimed = _Reader(f"{found.where}: cells[{place}]", told[place])
        if claimed.get("compared", str) != COMPARED[by_distribution]:
            raise claimed.wrong("compared", f"must be {COMPARED[by_distribution]!r} by the record's own settings")
        plain, speculative = (_texts(both, name, prompts) for name in ("plain", "speculative"))
        wanted = (0, plan.samples) if by_distribution else (len(prompts), len(prompts))
        if (len(plain), len(speculative)) != wanted:
            raise both.wrong("plain", f"and 'speculative' must hold {wanted[0]} and {wanted[1]} texts")
        cells.append(Cell(setting, by_distribution, plain, speculative, drafted=0, accepted=0))
    return cells


def _texts(found: _Reader, name: str, prompts: list[list[int]]) -> list[Text]:
    made = []
    for place, entry in enumerate(found.get(name, list)):
        one = _Reader(f"{found.where}: {name}[{place}]", entry)
        ids = one.ids(one.value.get("token_ids"), "token_ids")
        made.append(Text(tuple(prompts[place % len(prompts)]), tuple(ids), one.get("finish_reason", str)))
    return made
