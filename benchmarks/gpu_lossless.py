"""Is text the same with and without speculation? A real model on this machine, and near-ties told from defects.

    python benchmarks/gpu_lossless.py                         # the default model, 200 prompts, lookup with 8 guesses
    python benchmarks/gpu_lossless.py --model m.gguf --draft d   # another model, and a draft model besides
    python benchmarks/gpu_lossless.py --prompts 4 --tokens 16 --device cpu --dtype float32

Each prompt is continued plainly and with guesses, greedily and sampled with fixed seeds, in fast and in exact mode.
Where two texts part, both tokens' scores there (log-probability over temperature, plus the noise of a draw) are
compared: in half precision a row computed in another width may differ in its last bits, so a gap below NEAR is a
near-tie, which fast mode allows. A larger one, or any in exact mode, is a defect: the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu_machine import slug, versions
from benchmarks.terminal import Console, Table
from outrider import LLM, SamplingParams
from outrider.sampling.random import Purpose, gumbel, mixed_seed

if TYPE_CHECKING:
    from outrider.outputs import RequestOutput

HERE = Path(__file__).parent
GUESSES = 8
NEAR = 0.25  # of a score: some steps of bf16 at the size of a logit
REPORTED = 20  # likeliest tokens whose scores are kept: a near-tie is among them
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
}


def main() -> None:
    options = _options()
    console = Console()
    table = Table(title="Plain and speculative text")
    for name in ("mode", "drafter", "setting", "prompts", "tokens", "parted", "near-ties", "defects", "accepted"):
        table.add_column(name, justify="left" if name in ("mode", "drafter", "setting") else "right")
    cells: list[dict[str, Any]] = []
    for mode in ("fast", "exact"):
        for drafter in ["ngram", *(["draft_model"] if options.draft else [])]:
            cells += _compared(options, mode, drafter)
    for cell in cells:
        parted = cell["divergences"]
        defects = sum(one["verdict"] == "defect" for one in parted)
        counts = (cell["prompts"], cell["tokens"], len(parted), len(parted) - defects, defects)
        share = f"{cell['accepted'] / max(cell['drafted'], 1):.0%}"
        table.add_row(cell["mode"], cell["drafter"], cell["setting"], *map(str, counts), share)
    console.print(table)
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    record = {
        "benchmark": "gpu_lossless",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card,
        "versions": versions(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "near": NEAR,
        "cells": cells,
    }
    out = options.out or HERE / "records" / f"gpu_lossless-{record['date'][:10]}-{slug(card)}.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"Record: {out}")
    sys.exit(any(one["verdict"] == "defect" for cell in cells for one in cell["divergences"]))


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
        max_model_len=2048,
        max_num_seqs=8,
    ) as llm:
        prompts = _prompts(llm, options.prompts)
        return [_cell(llm, prompts, mode, drafter, name, options.tokens) for name in SETTINGS]


def _cell(llm: LLM, prompts: list[list[int]], mode: str, drafter: str, name: str, num_tokens: int) -> dict[str, Any]:
    params = [
        SamplingParams(max_tokens=num_tokens, seed=place, logprobs=REPORTED, speculation="off", **SETTINGS[name])
        for place in range(len(prompts))
    ]
    plain = llm.generate(prompts, params, progress=False)
    guessed = llm.generate(prompts, [one.but(speculation=GUESSES) for one in params], progress=False)
    pairs = zip(plain, guessed, params, strict=True)
    parted = [_parting(place, *pair, mode) for place, pair in enumerate(pairs)]
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


def _parting(
    place: int, plain: RequestOutput, guessed: RequestOutput, params: SamplingParams, mode: str
) -> dict[str, Any] | None:
    """Where two texts part, and how close the two tokens were; None where they do not."""
    mine, theirs = plain.token_ids, guessed.token_ids
    if mine == theirs:
        return None
    at = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if at is None:  # one goes on where the other ends: not a matter of scores
        return {"prompt": place, "position": min(len(mine), len(theirs)), "verdict": "defect"}
    report = plain.outputs[0].logprobs
    assert report is not None
    scores = {**report[at].top, report[at].token_id: report[at].logprob}
    first, second = mine[at], theirs[at]
    gap = None
    if second in scores:
        gap = abs(_score(scores, first, at, plain, params) - _score(scores, second, at, plain, params))
    near = gap is not None and gap < NEAR and mode == "fast"
    found = {"prompt": place, "position": at, "plain": first, "speculative": second, "gap": gap}
    return {**found, "verdict": "near-tie" if near else "defect"}


def _score(scores: dict[int, float], token: int, at: int, plain: RequestOutput, params: SamplingParams) -> float:
    """What the choice compared: the log-probability, over temperature and with the draw's noise where there is one."""
    if params.temperature == 0:
        return scores[token]
    seed = torch.tensor([mixed_seed(params.seed or 0)])
    end = torch.tensor([[len(plain.prompt_token_ids) + at]])
    noise = gumbel(seed, end, Purpose.CHOICE, torch.tensor([[[token]]]))
    return scores[token] / params.temperature + float(noise)


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    """The benchmark's conversations, and the same cut off at other places until there are enough."""
    lines = (HERE / "prompts" / "core.jsonl").read_text(encoding="utf-8").splitlines()
    whole = [llm.render(json.loads(line)["messages"]) for line in lines]
    whole = [ids[: llm.max_model_len // 2] for ids in whole]
    return [
        ids[: max(8, len(ids) - 5 * (place // len(whole)))]
        for place, ids in ((place, whole[place % len(whole)]) for place in range(count))
    ]


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hub id, folder or GGUF file (the default model)")
    add("--draft", help="a draft model to try besides lookup")
    add("--prompts", type=int, default=200)
    add("--tokens", type=int, default=64, help="new tokens a prompt (64)")
    add("--dtype", default="bfloat16")
    add("--device", help="cuda or cpu; by default a card where there is one")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
