"""Is text the same with and without speculation? A real model on this machine, and near-ties told from defects.

    python benchmarks/gpu_lossless.py                         # the default model, 200 prompts, lookup with 8 guesses
    python benchmarks/gpu_lossless.py --model m.gguf --draft d   # another model, and a draft model besides
    python benchmarks/gpu_lossless.py --tiny                  # a tiny model made on the spot, on the CPU: does it run?

First, what rounding alone does: over all prompts, by how much the distance of two likely tokens differs between
transformers in this dtype and in fp32, same weights, nothing of ours running. The largest difference is the bound.
Then each prompt is continued plainly and with guesses, greedily and sampled with fixed seeds, in both modes.
Where two texts part, a referee (`outrider/proof/`) runs the same weights in fp32 over what both have in common, and
tells how far each of the two tokens is from being the one to take: within the bound it is a near-tie, which fast mode
allows. All else is a defect, and in exact mode every divergence is; so is a text that failed, and a cell in which
nothing was guessed shows nothing. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from benchmarks.gpu_machine import driver, slug, versions  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.terminal import Console, Table  # noqa: E402
from outrider import LLM, ConfigError, SamplingParams  # noqa: E402
from outrider.proof.prompts import varied  # noqa: E402
from outrider.proof.prove import judged_parting  # noqa: E402
from outrider.proof.record import without_text  # noqa: E402
from outrider.proof.referee import Noise, Referee  # noqa: E402
from outrider.proof.texts import Parting, parting, text_of  # noqa: E402

GUESSES = 8
DTYPES = ("bfloat16", "float16", "float32")
TINY = {"prompts": 4, "tokens": 12, "dtype": "float32", "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
}


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            options.model, options.draft = _tiny_pair(Path(folder))
        sys.exit(0 if _run(options, console) else 1)


def _run(options: argparse.Namespace, console: Console) -> bool:
    """Compare, judge, print and keep; say whether there is no defect."""
    began = time.perf_counter()
    noise = _noise(options)
    console.print(f"Rounding moves two tokens' distance by up to {noise.max:.3f}: nearer ones are near-ties.")
    cells: list[dict[str, Any]] = []
    for mode in ("fast", "exact"):
        for drafter in ["ngram", *(["draft_model"] if options.draft else [])]:
            cells += _compared(options, mode, drafter)
    _judge(options, cells, noise.near)
    console.print(_table(cells))
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    record = {
        "benchmark": "gpu_lossless",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card,
        "driver": driver(),
        "versions": versions(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "near": noise.near,
        "noise": noise._asdict(),
        "seconds": time.perf_counter() - began,
        "cells": cells,
    }
    out = options.out or HERE / "records" / f"gpu_lossless-{record['date'][:10]}-{slug(card)}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"Record: {out}", soft_wrap=True)
    return not any(cell["defects"] or not cell["drafted"] for cell in cells)


def _table(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="Plain and speculative text")
    words = ("mode", "drafter", "setting")
    for name in (*words, "prompts", "tokens", "parted", "near-ties", "defects", "accepted"):
        table.add_column(name, justify="left" if name in words else "right")
    for cell in cells:
        parted, defects = len(cell["divergences"]), cell["defects"]
        share = f"{cell['accepted'] / cell['drafted']:.0%}" if cell["drafted"] else "[red]no guess[/red]"
        told = f"[red]{defects}[/red]" if defects else "0"
        counts = (str(cell["prompts"]), str(cell["tokens"]), str(parted), str(parted - defects), told)
        table.add_row(*(cell[word] for word in words), *counts, share)
    return table


def _compared(options: argparse.Namespace, mode: str, drafter: str) -> list[dict[str, Any]]:
    """One engine: every setting, plain and with guesses."""
    draft = options.draft if drafter == "draft_model" else None
    with LLM(
        options.model,
        draft,
        GUESSES,
        method=drafter,
        exact=mode == "exact",
        dtype=options.dtype,
        device=options.device,
        max_model_len=_room(options),
        max_num_seqs=8,
    ) as llm:
        prompts = _prompts(llm, options.prompts, room=llm.max_model_len - options.tokens)
        return [_cell(llm, prompts, mode, drafter, name, options.tokens) for name in SETTINGS]


def _cell(llm: LLM, prompts: list[list[int]], mode: str, drafter: str, name: str, num_tokens: int) -> dict[str, Any]:
    params = [
        SamplingParams(max_tokens=num_tokens, seed=place, speculation="off", **SETTINGS[name])
        for place in range(len(prompts))
    ]
    plain = llm.generate(prompts, params, progress=False)
    guessed = llm.generate(prompts, [one.but(speculation=GUESSES) for one in params], progress=False)
    pairs = enumerate(zip(map(text_of, plain), map(text_of, guessed), strict=True))
    parted = [parting(place, *pair) for place, pair in pairs]
    return {
        "mode": mode,
        "drafter": drafter,
        "setting": name,
        "prompts": len(prompts),
        "tokens": sum(len(one.token_ids) for one in plain),
        "drafted": sum(one.stats.drafted for one in guessed),
        "accepted": sum(one.stats.accepted for one in guessed),
        "divergences": [one for one in parted if one is not None],
    }


def _noise(options: argparse.Namespace) -> Noise:
    """Measure rounding on the prompts themselves, before anything is compared that it will judge."""
    with LLM(options.model, method="none", device="cpu", max_model_len=_room(options), max_num_seqs=1) as llm:
        prompts = _prompts(llm, options.prompts, room=llm.max_model_len - options.tokens)
    return Referee(options.model, options.dtype, options.device).noise(prompts)


def _room(options: argparse.Namespace) -> int:
    return 512 if options.tiny else 2048


def _judge(options: argparse.Namespace, cells: list[dict[str, Any]], near: float) -> None:
    """Add gap and verdict to each divergence, now that the engines have left the memory."""
    parted = any(cell["divergences"] for cell in cells)
    referee = Referee(options.model, options.dtype, options.device) if parted else None
    for cell in cells:
        found = [_judged(cell, one, referee, near) for one in cell["divergences"]]
        cell["divergences"] = [without_text(one) for one in found]
        cell["defects"] = sum(one.verdict == "defect" for one in found)


def _judged(cell: dict[str, Any], one: Parting, referee: Referee | None, near: float) -> Parting:
    params = SamplingParams(seed=one.prompt, **SETTINGS[cell["setting"]])
    return judged_parting(one, params, len(one.prefix) - one.position, referee, near, strict=cell["mode"] == "exact")


def _prompts(llm: LLM, count: int, room: int) -> list[list[int]]:
    """The benchmark's conversations, their last message cut at several places and with several questions after it."""
    lines = (HERE / "prompts" / "core.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    try:
        return [llm.render(one)[-room:] for one in varied(talks, count)]
    except ConfigError as error:
        raise SystemExit(f"--prompts {count}: {error}") from None


def _tiny_pair(folder: Path) -> tuple[str, str]:
    from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

    target = tiny_target()
    models = {"target": target, "draft": tiny_draft(target, "noisy")}
    target_folder, draft_folder = (save(model, byte_tokenizer(), folder / name) for name, model in models.items())
    return str(target_folder), str(draft_folder)


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hub id, folder or GGUF file (the default model)")
    add("--draft", help="a draft model to try besides lookup")
    add("--tiny", action="store_true", help="a smoke run: a tiny model and draft, on the CPU in fp32")
    add("--prompts", type=int, help="how many (200)")
    add("--tokens", type=int, help="new tokens a prompt (64)")
    add("--dtype", choices=DTYPES, help="of weights and cache (bfloat16)")
    add("--device", help="cuda or cpu; by default a card where there is one")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    fallbacks = TINY if options.tiny else {"prompts": 200, "tokens": 64, "dtype": "bfloat16"}
    filled(options, fallbacks)
    return options


if __name__ == "__main__":
    main()
