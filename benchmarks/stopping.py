"""Does it pay to stop a chain where the draft is not sure? A real pair on this machine, with a record.

    python benchmarks/stopping.py TARGET DRAFT --quick
    python benchmarks/stopping.py TARGET DRAFT --guesses 8 --threads 2    # a quarter of an hour for 1.5B and 0.5B

TARGET and DRAFT are whatever `LLM` takes: Hub ids, folders, GGUF files; any pair of one vocabulary. A synthetic pair is
of no use here: its draft is sure of all its guesses. Settings take turns on one engine: plain decoding, each fixed
length, ``speculation="auto"``, and with "auto" whose chains are as long as asked ("auto, no stops").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.growing import begun, filled, kept  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider import LLM

PLAIN, AUTO, WHOLE = "off", "auto", "auto, no stops"
USUAL: dict[str, Any] = {"guesses": 8, "lengths": [1, 2, 3, 4, 6, 8], "tokens": 96, "repeats": 2, "prompts": 6}
QUICK: dict[str, Any] = {"guesses": 4, "lengths": [2], "tokens": 12, "repeats": 1, "prompts": 1}


def main() -> None:
    options = _options()
    console, date, began = Console(width=None if sys.stdout.isatty() else 200), datetime.now(UTC), time.time()
    import torch

    from outrider import LLM
    from outrider.bench.questions import BUILTIN, read_questions, spread

    if options.threads:
        torch.set_num_threads(options.threads)
    record = begun("stopping", date, options, rates={}, stats={})
    with LLM(options.target, options.draft, options.guesses, device=options.device, max_num_seqs=1) as llm:
        prompts = [one.first for one in spread(read_questions(BUILTIN), options.prompts)]
        settings = [PLAIN, *map(str, options.lengths), AUTO, WHOLE]
        texts: dict[str, list[tuple[int, ...]]] = {}
        for number in range(options.repeats + 1):  # the first turn warms up, and lets the controller learn
            for setting in settings[number % len(settings) :] + settings[: number % len(settings)]:
                rate, texts[setting], stats = turn(llm, prompts, setting, options)
                if number:
                    record["rates"].setdefault(setting, []).append(rate)
                    record["stats"][setting] = stats
            console.print(f"turn {number} of {options.repeats}: {time.time() - began:.0f} s")
        record["differing_texts"] = sum(one != texts[PLAIN] for one in texts.values())
        record["certainty"] = certainty(llm)
    record["summary"] = summary(record["rates"])
    console.print(json.dumps(record["summary"], indent=1), markup=False)
    console.print(f"Record: {kept(record, date, began, options)} ({time.time() - began:.0f} s)", soft_wrap=True)


def turn(
    llm: LLM, prompts: list[Any], setting: str, options: argparse.Namespace
) -> tuple[float, list[tuple[int, ...]], dict[str, int]]:
    """Serve every prompt alone: tokens a second (without prompts' passes), the texts, what was guessed."""
    from outrider import SamplingParams

    how: Any = int(setting) if setting.isdigit() else setting.removesuffix(", no stops")
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, speculation=how)
    done = []
    with whole_chains(llm) if setting == WHOLE else contextlib.nullcontext():
        for prompt in prompts:
            done += llm.generate(prompt.prepared(llm, chat=None, system=None), params)
    stats = [one.stats for one in done]
    tokens = sum(one.tokens - 1 for one in stats)
    seconds = sum(one.seconds - (one.first_token_seconds or 0.0) for one in stats)
    counts = {name: sum(getattr(one, name) for one in stats) for name in ("rounds", "drafted", "accepted", "tokens")}
    return tokens / seconds, [one.token_ids for one in done], counts


@contextlib.contextmanager
def whole_chains(llm: LLM) -> Iterator[None]:
    """Let chains be as long as asked."""
    drafter: Any = llm.engine.drafter
    drafter.propose = lambda rows, num_tokens: type(drafter).propose(drafter, replace(rows, least=0.0), num_tokens)
    try:
        yield
    finally:
        del drafter.propose


def certainty(llm: LLM) -> list[dict[str, float]]:
    """Give how often guesses were right, by how sure the draft was of them, as it was counted (the past fades)."""
    from outrider.draft.confidence import EDGES

    counts = getattr(llm.engine.drafter, "_confidence")._counts[False]  # noqa: SLF001, B009 - to report on it
    edges = (0.0, *EDGES, 1.0)
    return [
        {"from": low, "to": high, "guesses": float(made), "right": float(right / made) if made else 0.0}
        for low, high, made, right in zip(edges, edges[1:], counts.made, counts.right, strict=False)
    ]


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Give medians, and what the two kinds of auto are worth beside plain decoding and the best fixed length."""
    speeds = {setting: median(values) for setting, values in rates.items()}
    best = max((one for one in speeds if one.isdigit()), key=lambda one: speeds[one])
    over = {one: {"off": speeds[one] / speeds[PLAIN], "best": speeds[one] / speeds[best]} for one in (AUTO, WHOLE)}
    return {
        "tokens_per_second": speeds,
        "best_fixed_length": best,
        "auto_over": over[AUTO],
        "no_stops_over": over[WHOLE],
    }


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target")
    add("draft")
    add("--quick", action="store_true", help="one prompt, few tokens; its figures mean nothing")
    add("--device", default="cpu", choices=("cpu",), help="chains are captured whole on a card, and do not stop")
    add("--guesses", type=int, help="a round, at most (8)")
    add("--lengths", type=int, nargs="+", help="fixed lengths beside it (1 2 3 4 6 8)")
    add("--prompts", type=int, help="of the built-in ones, in all kinds (6)")
    add("--tokens", type=int, help="of each text at most (96)")
    add("--temperature", type=float, default=0.0)
    add("--repeats", type=int, help="turns that count (2)")
    add("--threads", type=int, help="CPU threads (what torch takes by default)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    filled(options, QUICK if options.quick else USUAL)
    return options


if __name__ == "__main__":
    main()
