"""Where each microsecond of a round goes: kernels by name, the gaps between them, and what the host launches.

    python benchmarks/gpu_profile.py --rows 1 --lookahead 5      # needs the pair; writes it where it is missing
    python benchmarks/gpu_profile.py --tiny                      # on a CPU, with operators in place of kernels

Some steady rounds of one LLM under torch.profiler. Kernels inside replayed CUDA graphs count like others. Kernels may
overlap (programmatic dependent launch): "busy" is the time in which at least one ran, so shares can add up to more.
Profiling itself costs time: compare milliseconds a round with gpu_rounds.py, which does not profile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))
# Otherwise CUPTI is torn down between profiles, and graphs captured meanwhile are not seen.
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("TEARDOWN_CUPTI", "0")

from benchmarks.gpu_machine import driver, pair_options, slug, versions  # noqa: E402
from benchmarks.terminal import Console, Table  # noqa: E402

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = re.compile(r"(cuda|cu)(Graph|Kernel|LaunchKernel|LaunchCooperative|GraphLaunch|Memcpy|Memset)\w*")
GENERIC = re.compile(r"elementwise|reduce_kernel|device_kernel|index")  # what they do is in the template arguments
DOES = re.compile(r"\w*(?:Functor|Ops?|_cuda|_impl|Gemm\w*)\b")
WAITS = re.compile(r"(cuda|cu)\w*Synchronize|cudaEventQuery|cuEventQuery")
CHUNK = 512  # prompt tokens a step, as LLM has it by default


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 160)
    events, rounds, tokens, card = profiled(options)
    found = summary(events, rounds)
    show(console, found, options)
    kept = {key: value for key, value in vars(options).items() if key != "out"}
    record = {"benchmark": "gpu_profile", "date": datetime.now(UTC).isoformat(timespec="seconds"), "card": card}
    record |= {"versions": versions(), "driver": driver()}
    record |= {"options": kept, "tokens": tokens, **found}
    name = f"gpu_profile-{datetime.now(UTC):%Y-%m-%d}-{slug(card)}-rows{options.rows}-k{options.lookahead}.json"
    path = options.out or HERE / "records" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"Record: {path}", soft_wrap=True)


# --- measuring


def profiled(options: argparse.Namespace) -> tuple[list[dict[str, Any]], int, int, str]:
    """Generate, and profile `options.rounds` steps amid it: trace events, steps, tokens generated, the card's name."""
    import torch

    on_card = torch.cuda.is_available() and not options.tiny
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_card:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities):  # before any graph is captured: they are seen from then on
            torch.ones(8, device="cuda").sum().item()
    llm, prompts, params = _loaded(options)
    llm.generate(prompts, params, progress=False)  # graphs captured, kernels compiled
    profiler = torch.profiler.profile(activities=activities)
    wait = torch.cuda.synchronize if on_card else lambda: None
    window = _Window(llm.engine, profiler, skipped=options.skipped, rounds=options.rounds, wait=wait)
    outputs = llm.generate(prompts, params, progress=False)
    if not window.complete:
        raise SystemExit(f"the text ended after {window.steps} steps; give fewer --rounds")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        if options.trace is not None:
            options.trace.write_bytes(path.read_bytes())
    card = torch.cuda.get_device_name(0) if on_card else "cpu"
    return events, options.rounds, sum(len(output.token_ids) for output in outputs), card


class _Window:
    """Has the profiler run while an engine makes some steps, after as many that are not looked at."""

    def __init__(self, engine: Any, profiler: Any, *, skipped: int, rounds: int, wait: Callable[[], object]) -> None:
        self.steps, self.complete = 0, False
        self._engine, self._step, self._profiler, self._wait = engine, engine.step, profiler, wait
        self._first, self._last = skipped, skipped + rounds
        engine.step = self._watched

    def _watched(self, *arguments: Any, **more: Any) -> Any:
        if self.steps == self._first:
            self._wait()
            self._profiler.start()
        result = self._step(*arguments, **more)
        self.steps += 1
        if self.steps == self._last:
            self._wait()
            self._profiler.stop()
            self._engine.step, self.complete = self._step, True
        return result


def _loaded(options: argparse.Namespace) -> tuple[Any, list[list[int]], Any]:
    from benchmarks.round_runs import setup
    from outrider import LLM, SamplingParams

    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    told = work / "profile-setup.jsonl"
    told.write_text("", encoding="utf-8")
    job = {
        "work": str(work),
        "out": str(told),
        "target": options.target,
        "draft": options.draft,
        "seed": options.seed,
        "agreements": [options.agreement],
        "contexts": [options.context],
        "num_prompts": max(16, options.rows),
        "tiny": options.tiny,
    }
    setup(job)
    lines = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
    draft = next(line["drafts"] for line in lines if "drafts" in line)[f"{options.agreement:g}"]
    extra: dict[str, Any] = {"device": "cpu"} if options.tiny else {}
    if options.draft_quantization is not None:
        extra["draft_quantization"] = options.draft_quantization
    length = options.context + options.tokens + 32
    llm = LLM(
        str(work / "target"),
        draft,
        max(1, options.lookahead),
        max_model_len=length,
        max_num_seqs=options.rows,
        enable_prefix_caching=False,
        **extra,
    )
    prompts = json.loads((work / f"prompts-{options.context}.json").read_text(encoding="utf-8"))[: options.rows]
    params = SamplingParams(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, speculation=options.lookahead or "off"
    )
    return llm, prompts, params


# --- what a trace tells


def summary(events: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Add up a trace: work by kernel, gaps by the kernels around them, launches and waits by call, all a round.

    `events` are those of a Chrome trace, times in microseconds. Without device work, outermost operators stand in.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    work = sorted((one for one in spans if one.get("cat") in DEVICE_WORK), key=lambda one: one["ts"])
    if not work:
        work = _outermost([one for one in spans if one.get("cat") == "cpu_op"])
    groups: defaultdict[str, list[float]] = defaultdict(list)
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    busy = 0.0
    end, last = (work[0]["ts"], "") if work else (0.0, "")
    for one in work:
        name, begin, stop = short(one["name"]), one["ts"], one["ts"] + one["dur"]
        groups[name].append(one["dur"])
        if begin > end:
            gaps[f"{last} -> {name}"].append(begin - end)
        busy += max(0.0, stop - max(begin, end))
        if stop >= end:
            end, last = stop, name
    span = end - work[0]["ts"] if work else 0.0
    calls: defaultdict[str, int] = defaultdict(int)
    waits: defaultdict[str, int] = defaultdict(int)
    for one in spans:
        if one.get("cat") in ("cuda_runtime", "cuda_driver"):
            for pattern, found in ((WAITS, waits), (LAUNCHES, calls)):
                if pattern.match(one["name"]):
                    found[one["name"]] += 1
                    break
    return {
        "rounds": rounds,
        "us_a_round": span / rounds,
        "busy_us_a_round": busy / rounds,
        "idle_us_a_round": (span - busy) / rounds,
        "kernels_a_round": len(work) / rounds,
        "kernels": _table(groups, rounds, span),
        "gaps": _table(gaps, rounds, span),
        "launches_a_round": {name: count / rounds for name, count in sorted(calls.items())},
        "waits_a_round": {name: count / rounds for name, count in sorted(waits.items())},
    }


def short(name: str) -> str:
    """Give a kernel's name without its return type, namespaces, template arguments and parameters."""
    depth, kept = 0, []
    for character in name.removeprefix("void ").replace("(anonymous namespace)::", ""):
        depth += character == "<"
        if not depth:
            if character == "(":
                break
            kept.append(character)
        depth -= character == ">"
    base = "".join(kept).split("::")[-1].strip() or name
    does = list(dict.fromkeys(DOES.findall(name))) if GENERIC.search(base) else []
    return f"{base} ({', '.join(does[:2])})" if does else base


def _table(groups: dict[str, list[float]], rounds: int, span: float) -> list[dict[str, Any]]:
    rows = [
        {
            "name": name,
            "count_a_round": len(all_us) / rounds,
            "mean_us": sum(all_us) / len(all_us),
            "us_a_round": sum(all_us) / rounds,
            "share": sum(all_us) / span if span else 0.0,
        }
        for name, all_us in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us_a_round"])


def _outermost(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out operators that ran inside others of their thread."""
    kept: list[dict[str, Any]] = []
    ends: dict[Any, float] = {}
    for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        if one["ts"] >= ends.get(one.get("tid"), float("-inf")):
            kept.append(one)
            ends[one.get("tid")] = one["ts"] + one["dur"]
    return kept


def show(console: Console, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print what `summary` found."""
    console.print(
        f"{options.rows} rows, K={options.lookahead}, context {options.context}: {found['us_a_round']:.0f} us a round, "
        f"busy {found['busy_us_a_round']:.0f}, idle {found['idle_us_a_round']:.0f}, "
        f"{found['kernels_a_round']:.1f} kernels"
    )
    for key, title, most in (("kernels", "Kernels", options.top), ("gaps", "Gaps (nothing runs)", 12)):
        table = Table(title=f"{title}, a round", title_justify="left")
        table.add_column("name", overflow="fold")
        for name in ("count", "mean us", "us", "share"):
            table.add_column(name, justify="right")
        for row in found[key][:most]:
            figures = (f"{row['count_a_round']:.2f}", f"{row['mean_us']:.2f}", f"{row['us_a_round']:.1f}")
            table.add_row(row["name"], *figures, f"{row['share']:.1%}")
        console.print(table)
    for key in ("launches", "waits"):
        told = ", ".join(f"{name} {count:.2f}" for name, count in found[f"{key}_a_round"].items())
        console.print(f"{key} a round: {told or 'none seen'}")


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="tiny models on the CPU: a smoke run")
    pair_options(parser)
    add("--rows", type=int, default=1)
    add("--lookahead", type=int, default=5, metavar="K", help="guesses a round, 0 for plain (5)")
    add("--agreement", type=float, default=0.8)
    add("--context", type=int, default=200, help="prompt tokens (200)")
    add("--rounds", type=int, default=20, help="rounds to profile (20)")
    add("--top", type=int, default=40, help="kernels to print (40); the record has all")
    add("--trace", type=Path, help="also keep the whole trace, for Perfetto")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    options.target = options.target or ("tiny" if options.tiny else "llama-3.1-8b")
    options.draft = options.draft or ("tiny" if options.tiny else "llama-3.2-1b")
    options.work = options.work.expanduser().resolve() / ("tiny" if options.tiny else "")
    # Every prompt is in the cache by then, and no text ends before the window does, even if all guesses agree.
    options.skipped = 8 + options.rows * (1 + options.context // CHUNK)
    options.tokens = (options.skipped + options.rounds + 8) * (options.lookahead + 1)
    return options


if __name__ == "__main__":
    main()
