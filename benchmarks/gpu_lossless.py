"""Is text the same with and without speculation? A real model on this machine, and near-ties told from defects.

    python benchmarks/gpu_lossless.py                         # the default model, 200 prompts, lookup with 8 guesses
    python benchmarks/gpu_lossless.py --model m.gguf --draft d   # another model, and a draft model besides
    python benchmarks/gpu_lossless.py --tiny                  # a tiny model made on the spot, on the CPU: does it run?

First, what rounding alone does: over all prompts, by how much the distance of two likely tokens differs between
transformers in this dtype and in fp32, same weights, nothing of ours running. The largest difference is the bound.
Then each prompt is continued plainly and with guesses, greedily and sampled with fixed seeds, in both modes.
Where two texts part, `lossless_referee.py` runs the same weights in fp32 over what both have in common, and tells how
far each of the two tokens is from being the one to take: within the bound it is a near-tie, which fast mode allows. All
else is a defect, and in exact mode every divergence is; so is a text that failed, and a cell in which nothing was
guessed shows nothing. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from benchmarks.gpu_machine import driver, slug, versions  # noqa: E402
from benchmarks.lossless_referee import Referee, rounding_noise  # noqa: E402
from benchmarks.terminal import Console, Table  # noqa: E402
from outrider import LLM, SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from outrider.outputs import RequestOutput

GUESSES = 8
DTYPES = ("bfloat16", "float16", "float32")
LEAST_NEAR = 1e-3  # of a logit: fp32 differs by the order of its sums alone
TINY = {"prompts": 4, "tokens": 12, "dtype": "float32", "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
}
CUTS = (1.0, 0.85, 0.7, 0.55, 0.4)  # shares of a conversation's last message
QUESTIONS = (
    "",
    "Answer in one short paragraph.",
    "Give three points.",
    "Explain this to a child.",
    "First repeat the most important part word for word.",
    "What is missing here?",
    "Say the same in other words.",
)


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
    near = max(LEAST_NEAR, noise["max"])
    console.print(f"Rounding moves two tokens' distance by up to {noise['max']:.3f}: nearer ones are near-ties.")
    cells: list[dict[str, Any]] = []
    for mode in ("fast", "exact"):
        for drafter in ["ngram", *(["draft_model"] if options.draft else [])]:
            cells += _compared(options, mode, drafter)
    _judge(options, cells, near)
    console.print(_table(cells))
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    record = {
        "benchmark": "gpu_lossless",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card,
        "driver": driver(),
        "versions": versions(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "near": near,
        "noise": noise,
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
    parted = [_parting(place, *pair) for place, pair in enumerate(zip(plain, guessed, strict=True))]
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


def _parting(place: int, plain: RequestOutput, guessed: RequestOutput) -> dict[str, Any] | None:
    """Where two texts part, with what precedes that place in both; None where they do not."""
    mine, theirs = plain.token_ids, guessed.token_ids
    reasons = [one.outputs[0].finish_reason for one in (plain, guessed)]
    at = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is not None:
        prefix = [*plain.prompt_token_ids, *mine[:at]]
        return {"prompt": place, "position": at, "plain": mine[at], "speculative": theirs[at], "prefix": prefix}
    if len(mine) == len(theirs) and reasons[0] == reasons[1] in ("stop", "length"):
        return None
    # One goes on where the other ends, or one failed: not a matter of scores.
    return {"prompt": place, "position": min(len(mine), len(theirs)), "finish_reasons": reasons}


def _noise(options: argparse.Namespace) -> dict[str, float]:
    """Measure rounding on the prompts themselves, before anything is compared that it will judge."""
    with LLM(options.model, method="none", device="cpu", max_model_len=_room(options), max_num_seqs=1) as llm:
        prompts = _prompts(llm, options.prompts, room=llm.max_model_len - options.tokens)
    return rounding_noise(options.model, options.dtype, options.device, prompts)


def _room(options: argparse.Namespace) -> int:
    return 512 if options.tiny else 2048


def _judge(options: argparse.Namespace, cells: list[dict[str, Any]], near: float) -> None:
    """Add gap and verdict to each divergence, now that the engines have left the memory."""
    parted = [(cell, one) for cell in cells for one in cell["divergences"]]
    referee = Referee(options.model, options.dtype, options.device) if parted else None
    for cell, one in parted:
        gap, prefix = None, one.pop("prefix", None)
        if referee is not None and prefix is not None:
            params = SamplingParams(seed=one["prompt"], **SETTINGS[cell["setting"]])
            gap = referee.gap(prefix, (one["plain"], one["speculative"]), params, near)
        one["gap"] = gap
        one["verdict"] = "near-tie" if gap is not None and gap <= near and cell["mode"] == "fast" else "defect"
    for cell in cells:
        cell["defects"] = sum(one["verdict"] == "defect" for one in cell["divergences"])


def _prompts(llm: LLM, count: int, room: int) -> list[list[int]]:
    """The benchmark's conversations, their last message cut at several places and with several questions after it."""
    lines = (HERE / "prompts" / "core.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    most = len(CUTS) * len(QUESTIONS) * len(talks)
    if count > most:
        raise SystemExit(f"--prompts {count}: there are {most} at most")
    prompts = []
    for place in range(count):
        variant, talk = divmod(place, len(talks))
        question, cut = divmod(variant, len(CUTS))
        *before, last = talks[talk]
        text = last["content"][: int(len(last["content"]) * CUTS[cut])] + "\n\n" + QUESTIONS[question]
        prompts.append(llm.render([*before, {**last, "content": text.strip()}])[-room:])
    return prompts


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
    for name, value in fallbacks.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    main()
