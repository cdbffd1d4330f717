"""Runs on a CPU or a card whose record grows: begun in one way, written again after every step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_machine import driver, slug, versions
from benchmarks.summary import jsonable

if TYPE_CHECKING:
    import argparse
    from datetime import datetime

__all__ = ["begun", "filled", "kept"]

RECORDS = Path(__file__).resolve().parent / "records"
WHERE_TO = ("out", "plot", "plots")  # options that say where results go, not what is measured


def filled(options: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Give every option that was left out its default, and add those that have no option."""
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)


def begun(benchmark: str, date: datetime, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Begin a record: what runs, when, with which options, on which card or machine."""
    record = {
        "benchmark": benchmark,
        "date": date.isoformat(timespec="seconds"),
        "versions": versions(),
        "options": {key: value for key, value in vars(options).items() if key not in WHERE_TO},
    }
    if options.device == "cuda":
        import torch

        return record | {"card": torch.cuda.get_device_name(0), "driver": driver()} | more
    from benchmarks.record import machine  # not on a card: it needs rich, which a bare GPU machine lacks

    return record | {"machine": machine(os.getloadavg())} | more


def kept(record: dict[str, Any], date: datetime, began: float, options: argparse.Namespace) -> Path:
    """Write a record as it stands, to where the options say or among the others."""
    record["seconds"] = time.time() - began
    where = slug(str(record.get("card") or record["machine"]["cpu"]))
    name = f"{record['benchmark']}-{date:%Y-%m-%d}-{where}{'-quick' if options.quick else ''}.json"
    path: Path = options.out or RECORDS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(record), indent=1, default=str) + "\n", encoding="utf-8")
    return path
