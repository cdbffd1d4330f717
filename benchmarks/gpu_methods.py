"""What a round of each way to draft costs on a GPU: trees, heads and mixtures beside plain decoding and the floor.

    python benchmarks/gpu_methods.py                                  # all ways, 1 and 8 rows; a record
    python benchmarks/gpu_methods.py --ways plain 'eagle3 tree' --rows 8
    python benchmarks/gpu_methods.py --tiny                           # on a CPU, in a minute: does it run?

Shapes are real, weights synthetic: a pair whose text is known, an EAGLE-3 head and Medusa heads of random numbers. So
milliseconds a round are to be read, and how rounds are started; of random heads no guess is right. Each way works
alone, in a process of its own. What is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.gpu_machine import pair_options  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.method_figures import PLAIN, WAYS, Way, cell_of, draft_vocab, methods_table, round_bytes  # noqa: E402
from benchmarks.stages import StagedRun  # noqa: E402
from benchmarks.summary import first_divergence  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402

TINY: dict[str, Any] = {
    "target": "hidden=64,layers=6,heads=4,kv_heads=2,intermediate=128,vocab=512", "draft": "tiny", "rows": [1, 2],
    "context": 40, "tokens": 12, "rounds": 3, "repeats": 2,
    "ways": [PLAIN, "eagle3 tree", "medusa tree", "early_exit", "ngram+draft_model"],  # one of each kind
}  # fmt: skip
FULL: dict[str, Any] = {
    "target": "llama-3.1-8b", "draft": "llama-3.2-1b", "rows": [1, 8], "context": 200, "tokens": 64, "rounds": 20,
    "repeats": 5, "ways": [way.name for way in WAYS],
}  # fmt: skip
LEAST_SECONDS = 30  # a way is not begun with less time left


def main() -> None:
    options = _options()
    Run(options, Console(width=None if sys.stdout.isatty() else 200)).run()


class Run(StagedRun):
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        from outrider.bench.shapes import parse_shape

        super().__init__("gpu_methods", "benchmarks.method_runs", options, console, options.limit_seconds)
        self.target = parse_shape(options.target)
        self.draft = parse_shape(options.draft, self.target.vocab)
        self.ways = [way for way in WAYS if way.name in options.ways]
        self.record |= {"ways": [], "cells": []}
        self._plain: list[list[int]] | None = None  # its texts

    def run(self) -> None:
        """Measure all ways; whatever happens on the way, what was measured is kept."""
        try:
            self._setup()
            for way in self.ways:
                self._way(way)
        finally:
            self._close()

    def _setup(self) -> None:
        options = self.options
        job = {name: getattr(options, name) for name in ("target", "draft", "seed")}
        job |= {
            "contexts": [options.context],
            "agreements": [options.agreement],
            "num_prompts": max(options.rows),
            "draft_vocab": draft_vocab(self.target),
            "heads": sorted({way.model for way in self.ways if way.model is not None and way.random}),
        }
        facts: dict[str, Any] = {}
        head_seconds = {}
        for line in self._stage("setup", "weights and bandwidth", job, needed=0):
            facts |= line
            if "head" in line:
                head_seconds[line["head"]] = line["head_seconds"]
        if "copy" not in facts:
            raise SystemExit("the pair could not be written; see the failure above")
        self.record |= {name: facts[name] for name in ("card", "copy", "pair_seconds")}
        self.record["head_seconds"] = head_seconds
        self.folders = {"draft": str(facts["drafts"][f"{options.agreement:g}"])}
        self.folders |= {name: str(self.work / name) for name in head_seconds}
        self.console.print(f"{facts['card']}: copies at {facts['copy']['gb_per_second']:.0f} GB/s")
        self._keep()

    def _way(self, way: Way) -> None:
        """Run one way; its failure is on record, and the others go on."""
        options = self.options
        if way.model is not None and way.model not in self.folders:
            self.record["failures"].append({"stage": way.name, "exit": None, "log": f"{way.model} was not written"})
            return
        told = way.options(self.target)
        if options.draft_quantization is not None and way.model == "draft":
            told["draft_quantization"] = options.draft_quantization
        job = {name: getattr(options, name) for name in ("rows", "context", "tokens", "rounds", "repeats")}
        job |= {"options": told, "model": self.folders.get(way.model or ""), "guesses": way.guesses}
        job |= {"deepest": way.deepest}
        lines = self._stage("way", way.name, job, needed=0 if options.tiny else LEAST_SECONDS)
        if lines:
            self._take(way, lines, told)
        self._keep()

    def _take(self, way: Way, lines: list[dict[str, Any]], told: dict[str, Any]) -> None:
        """Put what a way's process told into the record, its texts held against the plain ones."""
        read = round_bytes(way, self.target, self.draft)
        known: dict[str, Any] = {"way": way.name, "options": told, "bytes": read}
        for line in lines:
            if "cell" in line:
                rate = 1e9 * self.record["copy"]["gb_per_second"]
                self.record["cells"].append(cell_of(way, line["cell"], read["all"], rate))
            elif "skipped" in line:
                self.record["skipped"].append({"stage": way.name, "rows": line["skipped"], "reason": line["reason"]})
            elif "texts" in line:
                known |= self._compared(way, line["texts"])
            else:
                known |= line
        self.record["ways"].append(known)

    def _compared(self, way: Way, texts: list[list[int]]) -> dict[str, Any]:
        """Where each text leaves the plain one, and how many of its tokens are not what the target is known to say."""
        from outrider.bench.pair import open_pair

        saying = open_pair(self.work / "target", self.folders["draft"]).saying
        starts = json.loads((self.work / f"prompts-{self.options.context}.json").read_text(encoding="utf-8"))
        wrong = sum(saying.mismatches(start, ids) for start, ids in zip(starts, texts, strict=False))
        found = {"tokens": sum(map(len, texts)), "mismatches": wrong}
        if way.name == PLAIN:
            self._plain = texts
        if self._plain is None:
            return found
        return found | {"parts_at": [first_divergence(*pair) for pair in zip(texts, self._plain, strict=True)]}

    def _close(self) -> None:
        cells = self.record["cells"]
        if cells:
            rate = 1e9 * self.record["copy"]["gb_per_second"]
            self.console.print(methods_table(self.record["ways"], cells, rate))
        for one in self.record["ways"]:
            if one.get("mismatches"):
                words = f"{one['way']}: {one['mismatches']} of {one['tokens']} tokens are not the known text's"
                self.console.print(words, style="red")
            for line in one.get("warnings", []):
                self.console.print(f"{one['way']} warned: {line}", style="yellow", markup=False)
        self._told()


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="tiny models on the CPU: a smoke run; its figures mean nothing")
    pair_options(parser)
    add("--ways", nargs="+", metavar="WAY", choices=[way.name for way in WAYS],
        help=f"some of: {', '.join(way.name for way in WAYS)} (all; with --tiny one of each kind)")  # fmt: skip
    add("--rows", type=int, nargs="+", help="requests at a time (1 8)")
    add("--agreement", type=float, default=0.8, help="of the draft model (0.8)")
    add("--context", type=int, help="prompt tokens (200); published EAGLE-3 heads reach 2048")
    add("--tokens", type=int, help="tokens a row that are compared with the plain text (64)")
    add("--rounds", type=int, help="rounds of a timed stretch (20)")
    add("--repeats", type=int, help="timed stretches of each cell, after one that warms up (5)")
    add("--limit-seconds", type=float, default=570, help="for everything; what does not fit is left out (570)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    filled(options, TINY if options.tiny else FULL)
    options.work = options.work.expanduser().resolve()
    if options.tiny:
        options.work /= "tiny-methods"
    return options


if __name__ == "__main__":
    main()
