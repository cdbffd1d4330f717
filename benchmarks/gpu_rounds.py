"""Speed of a round on a GPU: Outrider, vLLM and transformers on one synthetic pair, in one run, beside the floor.

    python benchmarks/gpu_rounds.py                              # ours and transformers; a record under records/
    python benchmarks/gpu_rounds.py --peer-site /tmp/site        # vLLM, unpacked there, in the same run
    python benchmarks/gpu_rounds.py --tiny                       # on a CPU, in seconds: does it run?

Every engine works alone, in a process of its own. What is measured and how fairness is kept: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.gpu_figures import (  # noqa: E402
    AGREEMENT,
    OURS,
    PEER,
    PLAIN_DRAFT,
    STOCK,
    cell_of,
    floor_rate,
    goals,
    goals_table,
    rounds_table,
    start_table,
)
from benchmarks.gpu_machine import has_compiled_kernels, pair_options  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.stages import StagedRun  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402

TINY: dict[str, Any] = {
    "target": "tiny", "draft": "tiny", "rows": [1, 2], "lookahead": [0, 3], "agreements": [0.8, 0.5],
    "contexts": [50, 300], "long_rows": [1, 2], "long_lookahead": [0, 3], "tokens": 32, "stock_tokens": 8, "repeats": 1,
}  # fmt: skip
FULL: dict[str, Any] = {
    "target": "llama-3.1-8b", "draft": "llama-3.2-1b", "rows": [1, 4, 16], "lookahead": [0, 5, 3, 8],
    "agreements": [0.8, 0.6, 0.9], "contexts": [200, 8000], "long_rows": [1, 4], "long_lookahead": [0, 5],
    "tokens": 256, "stock_tokens": 64, "repeats": 3,
}  # fmt: skip
PEER_LOOKAHEAD = (0, 5, 3)
ENGINES = (OURS, PEER, STOCK)
LEAST_SECONDS = {OURS: 30, PEER: 90, STOCK: 30}  # a stage is not begun with less time left


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 200)
    Run(options, console).run()


class Run(StagedRun):
    """One run of the benchmark: its stages, and the record that grows with them."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        super().__init__("gpu_rounds", "benchmarks.round_runs", options, console, options.budget)
        self.lead = AGREEMENT if AGREEMENT in options.agreements else options.agreements[0]
        self.saying: Any = None
        self.facts: dict[str, Any] = {}  # what the setup told
        self.fresh = tempfile.mkdtemp(prefix="outrider-cold-") if options.cold else None
        if self.fresh is not None:
            self.environment["TRITON_CACHE_DIR"] = f"{self.fresh}/triton"
            self.environment["TORCHINDUCTOR_CACHE_DIR"] = f"{self.fresh}/inductor"
        self.record |= {"start_up": [], "cells": []}

    def run(self) -> None:
        """Run all stages; whatever happens on the way, what was measured is kept."""
        try:
            self._setup()
            first, *others = self.options.contexts
            self._ours(self.lead, first)
            for kind in self.options.also_drafts:
                self._ours(self.lead, first, kind)
            if self.options.peer_site is not None:
                for lookahead in PEER_LOOKAHEAD[:2]:
                    self._peer(lookahead)
            for context in others:
                self._ours(self.lead, context)
            for agreement in self.options.agreements:
                if agreement != self.lead:
                    self._ours(agreement, first)
            if not self.options.skip_transformers:
                self._stock()
            if self.options.peer_site is not None:
                self._peer(PEER_LOOKAHEAD[2])
        finally:
            self._close()

    # --- stages

    def _setup(self) -> None:
        options = self.options
        job = {name: getattr(options, name) for name in ("target", "draft", "seed", "contexts")} | {
            "num_prompts": max(options.rows),
            "agreements": [self.lead, *options.agreements],
        }
        for line in self._stage("setup", "pair and bandwidth", job, needed=0):
            self.facts |= line
        if "copy" not in self.facts:
            raise SystemExit("the pair could not be written; see the failure above")
        from outrider.bench.pair import open_pair

        self.saying = open_pair(self.work / "target", self._draft(self.lead)).saying
        self.record |= {name: self.facts[name] for name in ("card", "copy", "weights", "pair_seconds")}
        self.console.print(f"{self.facts['card']}: copies at {self.facts['copy']['gb_per_second']:.0f} GB/s")

    def _ours(self, agreement: float, context: int, quantization: str | None = None) -> None:
        """Run our cells of one agreement and context; beside the lead and with a quantised draft, those that draft.

        Each context has an engine as long as it needs: how attention is cut follows the longest text there may be.
        """
        if OURS not in self.options.engines:
            return
        kind = quantization or self.options.draft_quantization
        whole = agreement == self.lead and quantization is None
        cells = [cell for cell in self._cells(context) if whole or cell[1]]
        if not cells:
            return
        job = {
            "agreement": agreement,
            "draft_folder": self._draft(agreement),
            "cells": cells,
            "tokens": self.options.tokens,
            "draft_quantization": kind,
            "repeats": self.options.repeats,
        }
        cold = not has_compiled_kernels(self.fresh)
        label = f"agreement {agreement:g}" + (f", {kind} draft" if kind else "")
        label += f", {context} tokens" if context != self.options.contexts[0] else ""
        lines = self._stage("ours", f"{OURS}, {label}", job, needed=LEAST_SECONDS[OURS])
        self._take(OURS, lines, setting=label, cold=cold, draft=kind or PLAIN_DRAFT)

    def _peer(self, lookahead: int) -> None:
        if PEER not in self.options.engines or (lookahead and lookahead not in self.options.lookahead):
            return
        out = self.work / "vllm.jsonl"
        prompts = [str(self.work / f"prompts-{context}.json") for context in self.options.peer_contexts]
        command = [sys.executable, "-P", str(HERE / "vllm_speed.py"), str(self.work / "target"), "--out", str(out)]
        command += ["--tokens", str(self.options.tokens), "--repeats", str(self.options.repeats)]
        command += ["--began", str(time.time())]
        command += ["--prompts", *prompts, "--rows", *map(str, self.options.rows)]
        if lookahead:
            command += ["--draft", self._draft(self.lead), "--lookahead", str(lookahead)]
        label = f"K={lookahead}" if lookahead else "plain"
        environment = {"PYTHONPATH": str(self.options.peer_site)}
        lines = self._process(PEER, f"{PEER}, {label}", command, out, environment, LEAST_SECONDS[PEER])
        self._take(PEER, lines, setting=label, lookahead=lookahead, agreement=self.lead)

    def _stock(self) -> None:
        if STOCK not in self.options.engines:
            return
        job = {
            "agreement": self.lead,
            "draft_folder": self._draft(self.lead),
            "lookaheads": [0, *[lookahead for lookahead in self.options.lookahead if lookahead][:1]],
            "context": self.options.contexts[0],
            "tokens": self.options.stock_tokens,
            "repeats": self.options.repeats,
        }
        self._take(STOCK, self._stage("transformers", STOCK, job, needed=LEAST_SECONDS[STOCK]), setting="")

    def _cells(self, context: int) -> list[tuple[int, int, int]]:
        """List rows, guesses and context of ours, the most telling first; of long contexts a few."""
        options = self.options
        rows, lookahead = options.rows, options.lookahead
        if context != options.contexts[0]:
            rows = [one for one in rows if one in options.long_rows]
            lookahead = [one for one in lookahead if one in options.long_lookahead]
        return [(num_rows, length, context) for length in lookahead for num_rows in rows]

    def _draft(self, agreement: float) -> str:
        return str(self.facts["drafts"][f"{agreement:g}"])

    # --- what they told

    def _take(
        self, engine: str, lines: list[dict[str, Any]], *, setting: str, cold: bool | None = None, **known: Any
    ) -> None:
        """Put what a process told into the record, its texts judged."""
        for line in lines:
            if "version" in line:
                self.record["versions"][engine] = line["version"]
            if "start_up" in line:
                spent = line["start_up"]
                total = {"all": sum(value for name, value in spent.items() if name != "all")}
                told = {"engine": engine, "setting": setting} | ({} if cold is None else {"cold": cold})
                self.record["start_up"].append(told | total | spent)
            if "cell" in line:
                raw = {"draft": PLAIN_DRAFT} | known | line["cell"]
                starts = json.loads((self.work / f"prompts-{raw['context']}.json").read_text(encoding="utf-8"))
                texts = enumerate(raw["token_ids"])
                wrong = sum(self.saying.mismatches(starts[place % len(starts)], ids) for place, ids in texts)
                self.record["cells"].append(cell_of(engine, raw, wrong))
            if "skipped" in line:
                self.record["skipped"].append({"stage": f"{engine} {setting}"} | line)
            if "peak_bytes" in line:
                self.record.setdefault("peak_bytes", {})[setting] = line["peak_bytes"]
        self._keep()

    # --- the end

    def _close(self) -> None:
        cells, weights = self.record["cells"], self.record.get("weights")
        if weights is not None:
            rate = 1e9 * self.record["copy"]["gb_per_second"]
            for cell in cells:
                cell["floor"] = floor_rate(cell, weights, rate)
                cell["floor_with_cache"] = floor_rate(cell, weights, rate, with_cache=True)
                cell["share_of_floor"] = cell["rate"] / cell["floor"]
            self.record["goals"] = [] if self.options.tiny else goals(cells, self.record["start_up"])
            self.console.print(rounds_table(cells, weights, rate))
            self.console.print(start_table(self.record["start_up"]))
            if self.record["goals"]:
                self.console.print(goals_table(self.record["goals"]))
        for one in cells:
            if one["mismatches"]:
                told = ", ".join(f"{name} {one[name]}" for name in ("rows", "lookahead", "context", "mismatches"))
                self.console.print(f"wrong tokens: {one['engine']}, {told} of {one['tokens']}", style="red")
        self._told()


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="tiny models on the CPU: a smoke run; its figures mean nothing")
    pair_options(parser)
    add("--rows", type=int, nargs="+", help="requests at a time (1 4 16)")
    add("--lookahead", type=int, nargs="+", metavar="K", help="guesses a round, 0 for plain (0 5 3 8)")
    add("--agreements", type=float, nargs="+", help="of the draft (0.8 0.6 0.9); plain runs beside the first alone")
    add("--contexts", type=int, nargs="+", help="prompt tokens (200 8000); all but the first with fewer cells")
    add("--peer-contexts", type=int, nargs="+", help="those of them that vLLM runs too (the first)")
    add("--tokens", type=int, help="new tokens a request (256)")
    add("--stock-tokens", type=int, help="the same for transformers, which is slow (64)")
    add("--repeats", type=int, help="measured runs of each cell, after one that warms up (3)")
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--skip-transformers", action="store_true")
    add("--peer-site", type=Path, help="a folder that vLLM and what it needs were unpacked into")
    add("--also-drafts", nargs="*", default=["int4"], metavar="KIND", help="ours with such weights in the draft (int4)")
    add("--cold", action="store_true", help="begin with empty compile caches")
    add("--budget", type=float, default=575, help="seconds for everything; what does not fit is left out (575)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    filled(options, TINY if options.tiny else FULL)
    if options.tiny:  # a CPU: as good as any
        options.also_drafts = []
    options.peer_contexts = options.peer_contexts or options.contexts[:1]
    options.work = options.work.expanduser().resolve()
    if options.tiny:
        options.work /= "tiny"
    return options


if __name__ == "__main__":
    main()
