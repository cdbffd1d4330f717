"""Is `speculation="auto"` ever slower than plain decoding, or than any fixed draft length? A grid, with a record.

    python benchmarks/no_regret.py --quick                     # tiny, in a minute: does it run?
    python benchmarks/no_regret.py --limit-seconds 3000        # this CPU: a synthetic pair, then the default model
    python benchmarks/no_regret.py --device cuda --limit-seconds 560 --skip-real

One engine serves all settings of a pair, request by request; settings take turns. The design of the cells, what counts
and what temperature does to a synthetic pair: benchmarks/README.md.
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

from benchmarks.growing import begun, filled, kept  # noqa: E402
from benchmarks.mixed_pair import MixedPair, mixed_pair  # noqa: E402
from benchmarks.regret_figures import AUTO, MIXED, PLAIN, Cell, cells, in_turn, judged, regret_table, verdicts  # noqa: E402
from benchmarks.round_watch import RoundWatch  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider import LLM

CPU: dict[str, Any] = {
    "target": "hidden=768,layers=12,heads=12,kv_heads=4,intermediate=2048,vocab=8192",
    "draft": "hidden=256,layers=3,heads=4,kv_heads=2,intermediate=768,vocab=8192",
    "rows": [1, 4, 16, 32], "tokens": [8, 64, 256, 512], "usual": 64, "prompt_tokens": 64, "turn_tokens": 128,
    "repeats": 3,
}  # fmt: skip
CARD: dict[str, Any] = CPU | {
    "target": "llama-3.1-8b", "draft": "llama-3.2-1b", "usual": 128, "prompt_tokens": 200, "turn_tokens": 128,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "target": "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "draft": "hidden=64,layers=1,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "rows": [1, 2], "tokens": [8, 16], "usual": 16, "prompt_tokens": 8, "turn_tokens": 16, "repeats": 1,
    "temperatures": [0.0, 1.0], "agreements": [0.0, 0.95], "lengths": [1, 5],
}  # fmt: skip
ALWAYS: dict[str, Any] = {
    "temperatures": [0.0, 0.7, 1.0, 1.5], "agreements": [0.0, 0.3, 0.6, 0.8, 0.95], "lengths": [1, 3, 5, 8],
}  # fmt: skip
REAL = "the default model, lookup"
REAL_GUESSES = 10
REAL_CELLS = (
    *(Cell(1, 128, 0.0, prompt) for prompt in ("code_edit", "chat")),
    *(Cell(rows, 64, 0.0, "all prompts") for rows in (4, 16)),
    Cell(1, 8, 0.0, "chat"),
    Cell(1, 128, 0.7, "chat"),
    *(Cell(rows, 8, 0.0, "all prompts") for rows in (4, 16)),
    Cell(1, 128, 1.5, "chat"),
    Cell(1, 128, 0.0, "json"),
)
TEMPERATURE = (
    "The synthetic target scores the token that follows with 40 and all others with less than 20, so that even at "
    "T=1.5 every other token has a chance of e^-13 at most: the text and the agreement are those of T=0. Temperature "
    "there costs the drawing, and changes nothing else. With the default model it changes text and agreement."
)


def main() -> None:
    options = _options()
    Run(options, Console(width=None if sys.stdout.isatty() else 200)).run()


class Run:
    """One run: its cells, and the record that grows with them."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        import torch

        self.options, self.console = options, console
        self.began, self.date = time.time(), datetime.now(UTC)
        if options.threads:
            torch.set_num_threads(options.threads)
        more: dict[str, Any] = {"temperature": TEMPERATURE, "pairs": {}, "cells": [], "skipped": []}
        self.record = begun("no_regret", self.date, options, **more)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return float(self.began + self.options.limit_seconds - time.time())

    def run(self) -> None:
        """Measure what fits into the limit; what was measured is kept, whatever happens."""
        try:
            if not self.options.skip_pair:
                self._pair()
            if not self.options.skip_real:
                self._real()
        finally:
            path = self._keep()
            for place in self.record["pairs"]:
                found = [one for one in self.record["cells"] if one["pair"] == place]
                if found:
                    self.console.print(regret_table(found))
            self.console.print(json.dumps(self.record["verdicts"], indent=1), markup=False)
            self.console.print(f"Record: {path} ({time.time() - self.began:.0f} s)", soft_wrap=True)

    # --- the pairs

    def _pair(self) -> None:
        options = self.options
        pair = mixed_pair(
            options.work, target=options.target, draft=options.draft, agreements=tuple(options.agreements),
            seed=options.seed, dtype=options.dtype, device=options.device,
        )  # fmt: skip
        design = cells(options.rows, options.tokens, options.temperatures, options.agreements, options.usual)
        length = options.prompt_tokens + max(options.tokens) + 32
        name = f"{options.target} + {options.draft}"
        llm = self._engine(name, str(pair.target), str(pair.draft), max(options.lengths), length, max(options.rows))
        texts = _pair_texts(pair, options)
        for cell in design:
            if not options.only or any(words in cell.name for words in options.only):
                self._cell(name, llm, cell, texts(cell), options.lengths)
        self._close(llm)

    def _real(self) -> None:
        from benchmarks import real_model

        try:
            setting = real_model.setting(2048)
        except SystemExit as error:
            self.record["skipped"].append({"pair": REAL, "reason": str(error)})
            return
        prompts = {prompt.name: list(prompt.token_ids) for prompt in real_model.prompts(setting, None)}
        llm = self._engine(REAL, str(setting.gguf), None, REAL_GUESSES, 1024, 16, method="ngram")
        chosen = [Cell(1, 8, 0.0, "chat")] if self.options.quick else REAL_CELLS
        for cell in chosen:
            mine = list(prompts.values()) if cell.text == "all prompts" else [prompts[str(cell.text)]]
            self._cell(REAL, llm, cell, mine, [*self.options.lengths, REAL_GUESSES])
        self._close(llm)

    def _engine(self, name: str, target: str, draft: str | None, most: int, length: int, rows: int, **more: Any) -> LLM:
        from outrider import LLM

        self.console.print(f"loading {name} ...", style="dim")
        began = time.time()
        llm = LLM(
            target, draft, most, device=self.options.device, max_model_len=length, max_num_seqs=rows,
            dtype=self.options.dtype, enable_prefix_caching=False, **more,
        )  # fmt: skip
        costs = llm.engine.speculator.costs
        feeds = {} if costs is None else dict(costs.feeds)  # as profiled: seconds of a call, and of a token
        self.record["pairs"][name] = {"start_seconds": time.time() - began, "feeds": feeds}
        self.watch = RoundWatch(llm)
        return llm

    def _close(self, llm: LLM) -> None:
        self.watch.close()
        llm.close()

    # --- a cell

    def _cell(self, name: str, llm: LLM, cell: Cell, prompts: list[list[int]], lengths: list[int]) -> None:
        """Let all settings take turns, auto first in the first turn, and put what came of it into the record."""
        settings = [AUTO, PLAIN, *(str(length) for length in lengths)]
        rates: dict[str, list[float]] = {setting: [] for setting in settings}
        rounds: dict[str, list[dict[str, list[float]]]] = {setting: [] for setting in settings}
        guesses, texts = [], {}
        began = time.time()
        apart = self.options.apart
        turn(llm, cell, prompts, PLAIN, 1, apart=apart)  # warms up, without a guess for auto to learn from
        self.watch.take()
        for number in range(self.options.repeats):
            if self.left < 5 or (number and self.left < 1.2 * (time.time() - began) / number):
                break
            for setting in in_turn(settings, number):  # auto is first in the first one
                rate, texts[setting], made = turn(llm, cell, prompts, setting, self.options.turn_tokens, apart=apart)
                rates[setting].append(rate)
                rounds[setting].append(self.watch.take())
                guesses += [made] if setting == AUTO else []
        if not rates[PLAIN]:
            self.record["skipped"].append({"pair": name, "cell": cell.name, "reason": "out of time"})
            return
        differing = sum(one != texts[PLAIN] for one in texts.values())
        more = {"pair": name, "guesses": sum(guesses) / len(guesses), "differing_texts": differing}
        self.record["cells"].append(judged(cell, rates, rounds, **more))
        told = self.record["cells"][-1]
        self.console.print(f"{cell.name}: {1 - told['regret']:.3f} of {told['best']} ({self.left:.0f} s left)")
        self._keep()

    def _keep(self) -> Path:
        """Write the record as it stands: after every cell, since a machine may be taken away in the next."""
        self.record["verdicts"] = verdicts(self.record["cells"])
        return kept(self.record, self.date, self.began, self.options)


def turn(
    llm: LLM, cell: Cell, prompts: list[list[int]], setting: str, least: int, *, apart: bool = False
) -> tuple[float, list[tuple[int, ...]], float]:
    """Serve at least `least` tokens a row: tokens a second, the texts, guesses a round.

    So many requests are always under way; whenever one ends the next comes. Of mixed texts the clock stops when the
    last one has come: their end, when a few are left that go on longest, would be measured more than what lies before.
    With `apart` each has 60 to 100 percent of the tokens: those that are equally long end together as long as nobody
    guesses, and their prompts are read together, which real traffic does not do.
    """
    from outrider import SamplingParams
    from outrider.garbage import only_new_garbage

    how: Any = int(setting) if setting.isdigit() else setting
    params = SamplingParams(
        temperature=cell.temperature, seed=1, max_tokens=cell.tokens, ignore_eos=True, speculation=how
    )
    count = len(prompts) if cell.text == MIXED else cell.count(least)
    waiting = [prompts[place % len(prompts)] for place in range(count)]
    lengths = cell.lengths(count, apart=apart)
    engine, running, sequences = llm.engine, [], []
    began = time.perf_counter()
    with only_new_garbage():  # as `LLM.generate` does
        while waiting or (running and cell.to_the_end):
            while waiting and len(running) < cell.rows:
                own = params.but(max_tokens=lengths[len(sequences)])
                running += llm.intake.sequences(llm.intake.request(waiting.pop(0), own))
                sequences.append(running[-1])
                engine.add(running[-1])
            engine.step()
            running = [one for one in running if not one.finished]
    seconds = time.perf_counter() - began
    tokens = sum(one.num_generated for one in sequences)
    for one in running:
        engine.abort(one)
    engine.step()  # reads the round that is under way still, or the next setting would wait for it
    texts = [] if not cell.to_the_end else [tuple(one.output) for one in sequences]
    drafted, rounds = (sum(getattr(one.stats, name) for one in sequences) for name in ("drafted", "rounds"))
    return tokens / seconds, texts, drafted / rounds


def _pair_texts(pair: MixedPair, options: argparse.Namespace) -> Callable[[Cell], list[list[int]]]:
    """Give the prompts of a cell; of the mixed ones all agreements take turns."""

    def texts(cell: Cell) -> list[list[int]]:
        each = {
            agreement: pair.prompts(agreement, 2 * max(options.rows), options.prompt_tokens, cell.tokens + 16)
            for agreement in options.agreements
        }
        if cell.text != MIXED:
            return each[float(cell.text)]
        count = len(each) if cell.rows == 1 else 3 * cell.rows
        number = len(each[options.agreements[0]])
        return [each[options.agreements[place % len(each)]][place % number] for place in range(count)]

    return texts


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny models and few cells; its figures mean nothing")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "outrider-mixed", help="for the pair; kept")
    add("--target", help="shape of the target (CPU: 88 million parameters; CUDA: llama-3.1-8b)")
    add("--draft", help="shape of the draft (CPU: a tenth of it; CUDA: llama-3.2-1b)")
    add("--dtype", default="bfloat16")
    add("--seed", type=int, default=0)
    add("--rows", type=int, nargs="+", help="requests at a time (1 4 16 32)")
    add("--tokens", type=int, nargs="+", help="new tokens of a request (8 64 256 512)")
    add("--usual", type=int, help="tokens where another thing varies (CPU: 64, CUDA: 128)")
    add("--temperatures", type=float, nargs="+", help="(0 0.7 1 1.5)")
    add("--agreements", type=float, nargs="+", help="(0 0.3 0.6 0.8 0.95)")
    add("--lengths", type=int, nargs="+", help="fixed draft lengths (1 3 5 8)")
    add("--prompt-tokens", type=int, help="(CPU: 64, CUDA: 200)")
    add("--turn-tokens", type=int, help="tokens a row that a turn makes at least: short texts in several calls")
    add("--apart", action="store_true", help="texts of 60 to 100 percent of the tokens, which do not end together")
    add("--repeats", type=int, help="turns of each setting (3)")
    add("--threads", type=int, help="CPU threads (what torch takes by default)")
    add("--limit-seconds", type=float, default=3000, help="cells that no longer fit are left out (3000)")
    add("--only", nargs="+", metavar="WORDS", help="cells whose name holds any of these, as mixed or '4 x 128'")
    add("--skip-real", action="store_true", help="the synthetic pair alone")
    add("--skip-pair", action="store_true", help="the default model alone")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    usual = ALWAYS | (CARD if options.device == "cuda" else CPU)
    filled(options, usual | (QUICK if options.quick else {}))
    options.work = options.work.expanduser().resolve() / ("quick" if options.quick else "")
    options.work.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
