"""A benchmark run in stages, each a process of its own: within a time limit, with a record that grows stage by stage.

So memory is free again after each, a stage that fails costs itself alone, and a run that is cut loses nothing measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_machine import driver, end, slug, versions

if TYPE_CHECKING:
    import argparse

    from benchmarks.terminal import Console

__all__ = ["StagedRun"]

HERE = Path(__file__).resolve().parent


class StagedRun:
    """One run of a benchmark.

    Args:
        name: The benchmark's.
        module: Its stages, run as ``python -m MODULE STAGE JOB.json``; a stage appends a JSON line to job["out"] for
            everything it has measured.
        options: `work` (a folder for files), `out` (the record's path or None) and `tiny` are read; all are recorded.
        console: Where progress is told.
        limit: Seconds for everything.

    Attributes:
        record: What is known so far; `skipped` has stages that did not fit, `failures` those that failed.
        environment: Variables that every stage gets besides its own.
    """

    def __init__(self, name: str, module: str, options: argparse.Namespace, console: Console, limit: float) -> None:
        self.options, self.console = options, console
        self.began, self.date = time.time(), datetime.now(UTC)
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment: dict[str, str] = {}
        self._module, self._limit = module, limit
        self.record: dict[str, Any] = {
            "benchmark": name,
            "date": self.date.isoformat(timespec="seconds"),
            "versions": versions(),
            "driver": driver(),
            "options": {key: value for key, value in vars(options).items() if key != "out"},
            "skipped": [],
            "failures": [],
        }

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.began + self._limit - time.time()

    def _stage(self, stage: str, label: str, job: dict[str, Any], *, needed: float) -> list[dict[str, Any]]:
        """Run a stage of ours where `needed` seconds are left; give the lines it wrote."""
        out, path = self.work / f"{stage}.jsonl", self.work / f"{stage}.json"
        job |= {"work": str(self.work), "out": str(out), "tiny": self.options.tiny}
        job |= {"deadline": self.began + self._limit - 5, "began": time.time()}
        path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", self._module, stage, str(path)]
        ours = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        return self._process(stage, label, command, out, self.environment | {"PYTHONPATH": ours}, needed)

    def _process(
        self, stage: str, label: str, command: list[str], out: Path, environment: dict[str, str], needed: float
    ) -> list[dict[str, Any]]:
        """Run one process to its end, or until the limit; give the lines it wrote."""
        if self.left < needed:
            self.console.print(f"{label}: left out, {self.left:.0f} s are too few", style="yellow")
            self.record["skipped"].append({"stage": label, "reason": f"out of time ({self.left:.0f} s left)"})
            return []
        self.console.print(f"{label} ... ({self.left:.0f} s left)", style="dim")
        out.write_text("", encoding="utf-8")
        log, began = self.work / f"{stage}.log", time.time()
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                cwd=self.work,  # not here: a peer must not find our package
                start_new_session=True,
            )
            try:
                code: int | str = child.wait(timeout=max(1.0, self.left))
            except subprocess.TimeoutExpired:
                code = "out of time"
            finally:
                end(child)
        if code != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            self.record["failures"].append({"stage": label, "exit": code, "log": tail})
            self.console.print(f"{label} failed ({code}):\n{tail}", style="yellow", markup=False)
        self.console.print(f"{label}: {time.time() - began:.1f} s", style="dim")
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def _told(self) -> None:
        """Say what was left out and where the record lies: the last thing that a run does."""
        for one in self.record["skipped"]:
            self.console.print(f"left out: {one}", style="yellow", markup=False)
        path = self._keep()
        self.console.print(f"Record: {path} ({self.record['seconds']:.0f} s)", soft_wrap=True)

    def _keep(self) -> Path:
        """Write the record as it stands: after every stage, since a machine may be taken away in the next."""
        self.record["seconds"] = time.time() - self.began
        card, name = slug(str(self.record.get("card", "none"))), self.record["benchmark"]
        path: Path = self.options.out or HERE / "records" / f"{name}-{self.date:%Y-%m-%d}-{card}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record, indent=1, default=str) + "\n", encoding="utf-8")
        return path
