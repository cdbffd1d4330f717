r"""Load on the server: throughput and waiting at 1 to 64 clients, beside the engine alone and vLLM's server.

    python benchmarks/serve_load.py --quick                 # two minutes on a CPU: does it run? Its figures mean little
    python benchmarks/serve_load.py                         # the default model on this CPU; a record
    python benchmarks/serve_load.py --pair                  # an 8B-shaped synthetic pair, on a card
    python benchmarks/serve_load.py --pair --peer-site /tmp/site --server-site /tmp/server   # and vLLM's server

A GPU machine may lack FastAPI and what it needs. Pack wheels here, for that machine's Python, and unpack them there:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 -d .peers/server \
        fastapi starlette uvicorn pydantic pydantic-core annotated-types annotated-doc typing-inspection
    for wheel in .peers/server/*.whl; do python -m zipfile -e "$wheel" /tmp/server; done

Where they lack, the same goes for typer, click, rich and shellingham (``outrider serve`` and ``python -m
outrider.server`` are the same command, and cannot start without them), for prometheus-client, and for httpx, anyio,
httpcore and h11, which this process needs, too: put them on its PYTHONPATH. What is in ``--server-site`` comes before
what the machine has. What is measured and how fairness is kept: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.gpu_machine import pair_options, slug  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.load_contestants import Contestant, Offline, Served, Workload  # noqa: E402
from benchmarks.load_figures import (  # noqa: E402
    OFFLINE,
    OURS,
    PEER,
    PLAIN,
    SPECULATIVE,
    goals,
    goals_table,
    interference_table,
    load_table,
)
from benchmarks.load_servers import our_server, peer_server, write_tokenizer  # noqa: E402
from benchmarks.stages import StagedRun  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402
from outrider.bench.saying import STRETCH  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.saying import Saying

FULL: dict[str, Any] = {
    "clients": [1, 4, 16, 64], "tokens": 64, "repeats": 3, "requests": 14, "max_num_seqs": 16, "long_prompt": 4096,
    "streams": 4,
}  # fmt: skip
PAIR: dict[str, Any] = FULL | {"tokens": 256, "requests": 8, "max_num_seqs": 64, "streams": 8}
QUICK: dict[str, Any] = FULL | {
    "clients": [1, 4], "tokens": 16, "repeats": 1, "requests": 2, "max_num_seqs": 4, "long_prompt": 600, "streams": 2,
}  # fmt: skip
READY_SECONDS = 400
CONTEXT = 200  # tokens of a pair's prompts, at least
KINDS = (PLAIN, SPECULATIVE)


def main() -> None:
    options = _options()
    Run(options, Console(width=None if sys.stdout.isatty() else 180)).run()


class Run(StagedRun):
    """One run: contestants in groups, of which those of one group take turns."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        super().__init__("serve_load", "benchmarks.round_runs", options, console, options.budget)
        self.record |= {"load_average_before": os.getloadavg(), "start_up": {}, "cells": [], "interference": []}

    def run(self) -> None:
        """Run all; whatever happens on the way, what was measured is kept."""
        workload = self._pair() if self.options.pair else self._default_model()
        try:
            for group in self._groups():
                self._group(group, workload)
        finally:
            self._close()

    # --- what is run

    def _default_model(self) -> Workload:
        from benchmarks import real_model

        setting = real_model.setting(self.options.max_model_len)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(setting.folder)
        prompts = [list(one.token_ids) for one in real_model.prompts(setting, None)]
        self.record["card"] = _cpu_slug()
        self.record["model"] = setting.folder.name

        def numbered(number: int, ids: list[int]) -> list[int]:
            return list(tokenizer(f"{number}\n", add_special_tokens=False).input_ids) + ids

        self.model = [str(setting.folder)]
        text = [token for ids in prompts for token in ids] * 40
        return Workload(
            lambda number: numbered(number, prompts[number % len(prompts)]),
            lambda number: numbered(number, text)[: self.options.long_prompt],
            self.options.tokens,
        )

    def _pair(self) -> Workload:
        options = self.options
        job = {
            "target": options.target,
            "draft": options.draft,
            "seed": options.seed,
            "agreements": [options.agreement],
        }
        job |= {"contexts": [], "num_prompts": 2}
        facts: dict[str, Any] = {}
        for line in self._stage("setup", "pair and bandwidth", job, needed=0):
            facts |= line
        if "copy" not in facts:
            raise SystemExit("the pair could not be written; see the failure above")
        target, draft = str(self.work / "target"), facts["drafts"][f"{options.agreement:g}"]
        from outrider.bench.pair import open_pair, read_facts

        for folder in (target, draft):
            write_tokenizer(folder, read_facts(folder)["shape"].vocab)
        self.record |= {name: facts[name] for name in ("card", "weights", "pair_seconds")}
        self.model = [target, "--speculative-model", draft, "--num-speculative-tokens", str(options.lookahead)]
        saying = open_pair(target, draft).saying
        short, long = (partial(_stretch, saying, length) for length in (CONTEXT, options.long_prompt))
        return Workload(short, long, options.tokens, saying)

    def _groups(self) -> list[list[Contestant]]:
        """Give who takes turns with whom: on a CPU all do, on a card each engine is there alone."""
        options = self.options
        shared = {"clients": options.clients, "max_num_seqs": options.max_num_seqs}
        length = options.max_model_len
        target, draft = self.model[0], self.model[2] if options.pair else None
        arguments = [
            *self.model, "--served-model-name", "target", "--max-num-seqs", str(options.max_num_seqs),
            "--max-model-len", str(length), "--queue-seconds", "600", "--max-waiting", "256",
        ]  # fmt: skip
        if options.threads:
            arguments += ["--threads", str(options.threads)]
        site = options.server_site
        served = Served(
            OURS, [PLAIN, SPECULATIVE], lambda: our_server(arguments, self.work / "ours.log", site=site), **shared
        )
        llm = {"model": target, "max_num_seqs": options.max_num_seqs, "max_model_len": length}
        if draft is None:
            llm |= {"method": "ngram", "num_speculative_tokens": 10}  # as the command line does by default
        else:
            llm |= {"speculative_model": draft, "num_speculative_tokens": options.lookahead}
        offline = Offline(OFFLINE, {"threads": options.threads, "llm": llm}, self.work, **shared)
        if not options.pair:
            return [[offline, served]]
        groups: list[list[Contestant]] = [[served], [offline]]
        for kind, lookahead in ((SPECULATIVE, options.lookahead), (PLAIN, 0)):
            if options.peer_site is not None:
                groups.append([Served(PEER, [kind], self._peer(kind, target, draft, lookahead), **shared)])
        return groups

    def _peer(self, kind: str, target: str, draft: str | None, lookahead: int) -> Any:
        options = self.options
        return lambda: peer_server(
            target, self.work / f"vllm-{kind}.log", site=options.peer_site, max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len, draft=draft if lookahead else None, lookahead=lookahead,
        )  # fmt: skip

    # --- how

    def _group(self, group: Sequence[Contestant], workload: Workload) -> None:
        """Let a group take turns: every number of clients, the first repeat to warm up, in an order that rotates."""
        running: list[Contestant] = []
        try:
            running += [one for one in group if self._tried(one.name, "start", partial(self._begun, one))]
            for clients in self.options.clients:
                for repeat in range(self.options.repeats + 1):
                    turns = [(one, kind) for one in running for kind in one.kinds if clients in one.clients]
                    shift = repeat % max(1, len(turns))
                    for one, kind in turns[shift:] + turns[:shift]:
                        self._cell(one, kind, clients, repeat, workload)
                self._keep()
            for served in running if self.options.long_prompt else ():
                if isinstance(served, Served):
                    for kind in served.kinds:
                        self._tried(served.name, "interference", partial(self._meet, served, kind, workload))
        finally:
            for one in group:
                one.close()
            self._keep()

    def _begun(self, one: Contestant) -> None:
        self.console.print(f"{one.name}: starting ... ({self.left:.0f} s left)", style="dim")
        seconds = one.start(min(READY_SECONDS, max(1.0, self.left)))
        self.record["start_up"].setdefault(one.name, []).append(seconds)

    def _cell(self, one: Contestant, kind: str, clients: int, repeat: int, workload: Workload) -> None:
        label = f"{one.name}, speculation {kind}, {clients} clients, repeat {repeat or 'to warm up'}"
        if self.left < 10:
            self.record["skipped"].append({"stage": label, "reason": "out of time"})
            return
        requests = max(self.options.requests, 2 * clients) if repeat else clients
        asked = workload.asked(requests, kind, clients, repeat)

        def measured() -> None:
            found = one.measured(asked, kind, clients, workload)
            if repeat:
                where = {"engine": one.name, "speculation": kind, "clients": clients, "repeat": repeat}
                self.record["cells"].append(where | found)
                self.console.print(f"{label}: {found['rate']:.1f} tokens/s", style="dim")

        self._tried(one.name, label, measured)

    def _meet(self, one: Served, kind: str, workload: Workload) -> None:
        for long in ([], workload.long(KINDS.index(kind))):
            found = asyncio.run(one.interference(workload, kind, self.options.streams, long))
            self.record["interference"].append({"engine": one.name, "speculation": kind} | found)

    def _tried(self, name: str, label: str, work: Any) -> bool:
        """Do something; where it fails it is on record, and the others go on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest is measured and this is on record
            self.record["failures"].append(
                {"stage": label, "engine": name, "error": f"{type(error).__name__}: {error}"}
            )
            self.console.print(f"{label} failed: {error}", style="yellow", markup=False)
            return False
        return True

    def _close(self) -> None:
        cells = self.record["cells"]
        self.record["goals"] = found = goals(cells, self.options.clients)
        for table in (load_table(cells), interference_table(self.record["interference"]), goals_table(found)):
            self.console.print(table)
        for one in [*self.record["skipped"], *self.record["failures"]]:
            self.console.print(f"left out or failed: {one}", style="yellow", markup=False)
        path = self._keep()
        self.console.print(f"Record: {path} ({self.record['seconds']:.0f} s)", soft_wrap=True)


def _stretch(saying: Saying, length: int, number: int) -> list[int]:
    """Give a stretch of the cycle of `length` tokens or some more: each number's begins elsewhere."""
    ends = max(1, len(saying.cycle) // STRETCH)
    steps = torch.arange(-length - number // ends, 0)
    found: list[int] = saying.cycle[(number % ends * STRETCH + steps) % len(saying.cycle)].tolist()
    return found


def _cpu_slug() -> str:
    from benchmarks.record import machine

    return slug(str(machine(os.getloadavg())["cpu"]))


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a smoke run; with --pair on a tiny pair")
    add("--pair", action="store_true", help="a synthetic pair in place of the default model")
    pair_options(parser)
    add("--agreement", type=float, default=0.8, help="of the pair's draft (0.8)")
    add("--lookahead", type=int, default=5, metavar="K", help="guesses a round, with a pair (5)")
    add("--clients", type=int, nargs="+", help="at a time (1 4 16 64)")
    add("--tokens", type=int, help="new tokens a request (64; pair: 256)")
    add("--requests", type=int, help="requests a cell at least; at least two a client (14; pair: 8)")
    add("--repeats", type=int, help="measured runs of each cell, after one that warms up (3)")
    add("--max-num-seqs", type=int, help="texts that an engine runs together (16; pair: 64)")
    add("--max-model-len", type=int, help="longest text that every engine is set up for (by the prompts)")
    add("--long-prompt", type=int, help="tokens of the prompt that arrives while streams run; 0 leaves it out (4096)")
    add("--streams", type=int, help="streams that run meanwhile (4; pair: 8)")
    add("--threads", type=int, help="CPU threads of every engine (torch's)")
    add("--peer-site", type=Path, help="a folder that vLLM and what it needs were unpacked into")
    add("--server-site", type=Path, help="a folder with what our server lacks on this machine")
    add("--budget", type=float, default=7200, help="seconds for everything; what does not fit is left out (7200)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    filled(options, QUICK if options.quick else PAIR if options.pair else FULL)
    options.target = options.target or ("tiny" if options.quick else "llama-3.1-8b")
    options.draft = options.draft or ("tiny" if options.quick else "llama-3.2-1b")
    options.tiny = options.quick
    options.max_model_len = options.max_model_len or max(2048, options.long_prompt + 512)
    options.work = options.work.expanduser().resolve() / ("tiny" if options.quick else "")
    if options.quick and options.out is None:
        options.out = options.work / "serve_load-quick.json"
    return options


if __name__ == "__main__":
    main()
