"""Generate the same texts with Outrider, transformers and llama.cpp on this CPU, in one run, and keep a record.

    python benchmarks/cpu_generate.py --quick                   # two prompts, 32 tokens: does it run?
    python benchmarks/cpu_generate.py --threads 2 --repeats 5   # a record, under benchmarks/records/

What is measured and how fairness is kept: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks import micro, real_model  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.peers import llama_cpp, ours, stock  # noqa: E402
from benchmarks.record import heading, report, written  # noqa: E402
from benchmarks.summary import Run, first_divergence  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.peers.contestant import Contestant, Entry, Prompt, Setting

QUICK = {"prompts": 2, "tokens": 32, "repeats": 1, "passes": 2}
FP32_PROMPT = "code_edit"


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 180)
    real_model.set_threads(options.threads, console)
    began, load_before = datetime.now(UTC), os.getloadavg()
    setting = real_model.setting(options.max_length)
    prompts = real_model.prompts(setting, options.prompts)
    engines, unavailable = _made(setting, options.engines, console)
    try:
        runs, failed = _measured(engines, prompts, options.tokens, options.repeats, console)
        unavailable |= failed
        passes = _passes(engines, setting, options.passes, console)
    finally:
        for engine in engines.values():
            engine.close()
    settings = {name: engine.describe() for name, engine in engines.items()}
    del engines
    gc.collect()
    equality = _equality(runs, prompts)
    if not options.skip_fp32 and any(name.startswith("outrider") for name in settings):
        equality += _fp32_equality(setting, prompts, options.tokens)
    record = {
        **heading("cpu_generate", began, load_before, setting.gguf, options),
        "prompts": {one.name: {"kind": one.kind, "tokens": len(one.token_ids)} for one in prompts},
        "engines": settings,
        "unavailable": unavailable,
    }
    report(console, record, prompts=[one.name for one in prompts], runs=runs, passes=passes, equality=equality)
    written(console, record, began, options)


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a smoke run: two prompts, 32 tokens, one repeat; its figures mean little")
    add("--engines", nargs="+", default=["*"], metavar="PATTERN", help="names or patterns, such as 'outrider-*'")
    add("--prompts", nargs="+", metavar="NAME", help="some of benchmarks/prompts/core.jsonl; by default all")
    add("--tokens", type=int, help="new tokens a run (128)")
    add("--repeats", type=int, help="measured runs of each engine on each prompt (3)")
    add("--passes", type=int, help="measured passes of each width, 0 leaves this part out (15)")
    add("--threads", type=int, help="CPU threads for every engine (what torch takes by default)")
    add("--max-length", type=int, default=2048, help="longest sequence that every engine is set up for (2048)")
    add("--skip-fp32", action="store_true", help="leave out the check that fp32 tokens are equal")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    fallbacks = QUICK if options.quick else {"tokens": 128, "repeats": 3, "passes": 15}
    filled(options, {name: fallbacks[name] for name in ("tokens", "repeats", "passes")})
    if options.quick and not options.prompts:
        options.prompts = [line["name"] for line in real_model.lines()[-QUICK["prompts"] - 1 : -1]]
    return options


# --- what is measured


def _made(setting: Setting, patterns: list[str], console: Console) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Load every engine that was asked for; one that cannot be had is noted with the reason."""
    programme: list[Entry] = [*ours.entries(), *stock.entries(), *llama_cpp.entries()]
    chosen = [entry for entry in programme if any(fnmatch(entry.name, pattern) for pattern in patterns)]
    if not chosen:
        raise SystemExit(f"no engine matches {patterns}; there are {[entry.name for entry in programme]}")
    engines: dict[str, Contestant] = {}
    unavailable: dict[str, str] = {}
    for entry in chosen:
        console.print(f"loading {entry.name} ...", style="dim")
        try:
            engines[entry.name] = entry.make(setting)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured and this is on record
            unavailable[entry.name] = _reason(error)
            console.print(f"{entry.name} unavailable: {unavailable[entry.name]}", style="yellow")
    return engines, unavailable


def _measured(
    engines: dict[str, Contestant], prompts: list[Prompt], num_tokens: int, repeats: int, console: Console
) -> tuple[list[Run], dict[str, str]]:
    """Let all engines take turns on each prompt, in an order that rotates; repeat 0 warms up and is not kept.

    An engine that fails once is out, on record with its reason; its earlier runs stay in.
    """
    runs: list[Run] = []
    failed: dict[str, str] = {}
    names = list(engines)
    for repeat in range(repeats + 1):
        for turn, prompt in enumerate(prompts):
            console.print(f"repeat {repeat or 'warm-up'} of {repeats}: {prompt.name}", style="dim")
            shift = (repeat * len(prompts) + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                if name in failed:
                    continue
                try:
                    run = engines[name].generate(prompt, num_tokens)
                    _check(run, prompt, num_tokens)
                except Exception as error:  # noqa: BLE001
                    failed[name] = f"failed on {prompt.name}: {_reason(error)}"
                    console.print(f"{name} {failed[name]}", style="yellow")
                    continue
                if repeat:
                    runs.append(replace(run, engine=name, repeat=repeat))
    return runs, failed


def _check(run: Run, prompt: Prompt, num_tokens: int) -> None:
    """A run that did less work than the others must not count."""
    if run.prompt_tokens != len(prompt.token_ids):
        raise RuntimeError(f"fed {run.prompt_tokens} prompt tokens in place of {len(prompt.token_ids)}")
    if run.tokens != num_tokens:
        raise RuntimeError(f"gave {run.tokens} tokens in place of {num_tokens}")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _passes(
    engines: dict[str, Contestant], setting: Setting, repeats: int, console: Console
) -> dict[str, dict[int, list[float]]]:
    llms = {
        name: engine.llm
        for name, engine in engines.items()
        if isinstance(engine, ours.Ours) and name.endswith("-plain")
    }
    with_stock = any(name.startswith("transformers") for name in engines)
    if not repeats or not (llms or with_stock):
        return {}
    console.print("passes by width ...", style="dim")
    try:
        return micro.passes(llms, setting.folder if with_stock else None, repeats)
    except Exception as error:  # noqa: BLE001 - it reaches into the engine; the runs above are kept all the same
        console.print(f"passes could not be measured: {_reason(error)}", style="yellow")
        return {}


# --- whether the tokens are the same


def _equality(runs: list[Run], prompts: list[Prompt]) -> list[dict[str, Any]]:
    pairs = [*ours.NGRAMS, *((lookup, stock.PLAIN) for lookup in stock.LOOKUPS), (ours.PLAIN, stock.PLAIN)]
    ids = {(run.engine, run.prompt): run.token_ids for run in runs if run.token_ids}
    return [
        _compared(f"{one} / {other}", prompt.name, ids[one, prompt.name], ids[other, prompt.name])
        for one, other in pairs
        for prompt in prompts
        if (one, prompt.name) in ids and (other, prompt.name) in ids
    ]


def _fp32_equality(setting: Setting, prompts: list[Prompt], num_tokens: int) -> list[dict[str, Any]]:
    """Compare our plain and our lookup in fp32, on one prompt: there they must agree to the last token."""
    prompt = next((one for one in prompts if one.name == FP32_PROMPT), prompts[-1])
    ids = []
    for lookahead in (0, 5):
        engine = ours.Ours(setting, lookahead=lookahead, dtype="float32")
        ids.append(engine.generate(prompt, num_tokens).token_ids)
        engine.close()
    return [_compared("outrider fp32 ngram5 / plain", prompt.name, ids[1], ids[0])]


def _compared(pair: str, prompt: str, one: tuple[int, ...], other: tuple[int, ...]) -> dict[str, Any]:
    return {"compared": pair, "prompt": prompt, "first_divergence": first_divergence(one, other)}


if __name__ == "__main__":
    main()
