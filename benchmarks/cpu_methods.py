"""Every way to draft that needs no trained weights, on the default model and this CPU, in one run, with a record.

    python benchmarks/cpu_methods.py --quick                   # one prompt, 16 tokens, one repeat: does it run?
    python benchmarks/cpu_methods.py --threads 2 --repeats 3   # a record, under benchmarks/records/ (half an hour)

All engines generate the same texts in turns. First once with as many guesses as they may make in every round: what is
guessed right, place by place, is a matter of method and text alone. Then, timed, as users have it: with
``speculation="auto"``, which rests where guesses do not pay. Methods that lose stand beside the others.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks import real_model  # noqa: E402
from benchmarks.growing import filled  # noqa: E402
from benchmarks.record import heading, written  # noqa: E402
from benchmarks.summary import first_divergence, geometric_mean  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.contestant import Prompt, Setting
    from outrider import LLM
    from outrider.outputs import RequestOutput

KINDS = ("chat", "code_edit", "summarise_with_quotes", "json", "translation")
QUICK = {"prompts": ["code_edit"], "tokens": 16, "repeats": 1}
PLAIN = "none"
ITSELF = object()  # stands for the target's own file


@dataclass(frozen=True)
class Way:
    """A way to draft: its name and what `LLM` is told."""

    name: str
    options: dict[str, Any]
    predicts: bool = False


OWN_INT4: dict[str, Any] = {"speculative_model": ITSELF, "draft_quantization": "int4"}
WAYS = (
    Way(PLAIN, {"method": "none"}),
    Way("ngram", {"method": "ngram", "num_speculative_tokens": 10}),
    Way("suffix", {"method": "suffix", "num_speculative_tokens": 10}),
    Way("suffix, tree", {"method": "suffix", "num_speculative_tokens": 10, "tree": "auto"}),
    Way("prediction", {"method": "none", "num_speculative_tokens": 10}, predicts=True),
    Way("early_exit", {"method": "early_exit", "num_speculative_tokens": 3}),
    Way("early_exit, skips", {"method": "early_exit", "num_speculative_tokens": 3, "skip_layers": "auto"}),
    Way("itself in int4", {"method": "draft_model", "num_speculative_tokens": 5, **OWN_INT4}),
    Way("itself in int4, tree", {"method": "draft_model", "num_speculative_tokens": 10, "tree": "auto", **OWN_INT4}),
    Way("ngram+early_exit", {"method": "ngram+early_exit", "num_speculative_tokens": 5}),
    Way("ngram+itself in int4", {"method": "ngram+draft_model", "num_speculative_tokens": 5, **OWN_INT4}),
)


@dataclass(frozen=True)
class Measured:
    """One way on one prompt.

    Attributes:
        way, prompt: Which.
        acceptance: By place, with guesses in every round: of the guesses whose predecessors were right.
        full_tokens_per_round: Tokens a pass of the target in that run.
        seconds: Decoding (from the first token to the last) of each timed turn, ``speculation="auto"``.
        tokens_per_round, drafted, accepted: Of those turns' last.
        by_drafter: Of mixtures: guesses and accepted ones of each part.
        parts_at: Where its text leaves the plain one; in bf16 a near-tie may swap, in fp32 it may not.
    """

    way: str
    prompt: str
    acceptance: tuple[float, ...]
    full_tokens_per_round: float
    seconds: list[float] = field(default_factory=list)
    tokens_per_round: float = 0.0
    drafted: int = 0
    accepted: int = 0
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    parts_at: int | None = None


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 180)
    real_model.set_threads(options.threads, console)
    began, load_before = datetime.now(UTC), os.getloadavg()
    setting = real_model.setting(2048)
    prompts = real_model.prompts(setting, options.prompts)
    engines, loads, refused = _made(setting, options, console)
    found = _measured(engines, prompts, options, console)
    for llm in engines.values():
        llm.close()
    engines.clear()
    gc.collect()
    speedups = _speedups(found)
    record = {
        **heading("cpu_methods", began, load_before, setting.gguf, options),
        "ways": {
            way.name: {key: str(value) for key, value in way.options.items() if value is not ITSELF} for way in WAYS
        },
        "load_seconds": loads,
        "refused": refused,
        "speedups": speedups,
        "measured": [asdict(one) for one in found],
    }
    for table in _tables(found, speedups, [prompt.name for prompt in prompts]):
        console.print(table)
    written(console, record, began, options)


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a smoke run; its figures mean little")
    add(
        "--ways", nargs="+", metavar="NAME", choices=[way.name for way in WAYS], help="some of them; plain is always in"
    )
    add("--prompts", nargs="+", metavar="NAME", help=f"by default {', '.join(KINDS)}")
    add("--tokens", type=int, help="new tokens a run (128)")
    add("--repeats", type=int, help="timed turns (3)")
    add("--threads", type=int, help="CPU threads (what torch takes by default)")
    add("--dtype", default="bfloat16", help="of the target; in float32 every text must be equal (%(default)s)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    fallbacks = QUICK if options.quick else {"prompts": list(KINDS), "tokens": 128, "repeats": 3}
    filled(options, fallbacks)
    return options


# --- measuring


def _made(
    setting: Setting, options: argparse.Namespace, console: Console
) -> tuple[dict[str, LLM], dict[str, float], dict[str, str]]:
    """Load every engine; one that is refused is on record with the reason."""
    from outrider import LLM
    from outrider.errors import OutriderError

    engines: dict[str, LLM] = {}
    loads: dict[str, float] = {}
    refused: dict[str, str] = {}
    for way in WAYS:
        if options.ways and way.name not in (PLAIN, *options.ways):
            continue
        console.print(f"loading {way.name} ...", style="dim")
        told = {key: str(setting.gguf) if value is ITSELF else value for key, value in way.options.items()}
        began = time.perf_counter()
        try:
            engines[way.name] = LLM(
                str(setting.gguf),
                device="cpu",
                dtype=options.dtype,
                max_model_len=setting.max_length,
                enable_prefix_caching=False,  # all ways read each prompt, however often it comes
                **told,
            )
        except OutriderError as error:
            refused[way.name] = str(error)
            console.print(f"{way.name} refused: {error}", style="yellow")
            continue
        loads[way.name] = time.perf_counter() - began
    return engines, loads, refused


def _measured(
    engines: dict[str, LLM], prompts: Sequence[Prompt], options: argparse.Namespace, console: Console
) -> list[Measured]:
    """Let all ways take turns on each prompt, in an order that rotates."""
    predictions = {line["name"]: line.get("prediction") for line in real_model.lines()}
    found: list[Measured] = []
    for prompt in prompts:
        ways = [way for way in WAYS if way.name in engines and (predictions[prompt.name] or not way.predicts)]
        told = {way.name: predictions[prompt.name] if way.predicts else None for way in ways}
        console.print(f"{prompt.name}: guesses in every round ...", style="dim")
        full = {
            way.name: _generated(engines[way.name], prompt, options.tokens, way.options, told[way.name]) for way in ways
        }
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        last: dict[str, RequestOutput] = {}
        for turn in range(options.repeats):
            console.print(f"{prompt.name}: turn {turn + 1} of {options.repeats}", style="dim")
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                output = _generated(engines[way.name], prompt, options.tokens, None, told[way.name])
                seconds[way.name].append(output.stats.seconds - output.stats.first_token_seconds)
                last[way.name] = output
        plain = last[PLAIN].token_ids
        for way in ways:
            guessed, timed = full[way.name].stats, last[way.name].stats
            found.append(
                Measured(
                    way.name, prompt.name, guessed.conditional_acceptance_by_position, guessed.tokens_per_round,
                    seconds[way.name], timed.tokens_per_round, timed.drafted, timed.accepted, timed.by_drafter,
                    first_divergence(last[way.name].token_ids, plain),
                )
            )  # fmt: skip
    return found


def _generated(
    llm: LLM, prompt: Prompt, num_tokens: int, fixed: dict[str, Any] | None, prediction: str | None
) -> RequestOutput:
    """Generate greedily: with guesses in every round where the way's options are given, else as it decides itself."""
    from outrider import SamplingParams

    how: int | str = "auto" if fixed is None else fixed.get("num_speculative_tokens", "off")
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, speculation=how, prediction=prediction
    )
    return llm.generate(prompt_token_ids=list(prompt.token_ids), sampling_params=params, progress=False)[0]


# --- what came of it


def _speedups(found: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Give for each way and prompt how many times as fast as plain: turns side by side in time, their median."""
    plain = {one.prompt: one.seconds for one in found if one.way == PLAIN}
    speedups: dict[str, dict[str, float]] = {}
    for one in found:
        ratios = [slow / quick for slow, quick in zip(plain[one.prompt], one.seconds, strict=True)]
        speedups.setdefault(one.way, {})[one.prompt] = median(ratios)
    return speedups


def _tables(found: Sequence[Measured], speedups: dict[str, dict[str, float]], prompts: Sequence[str]) -> list[Table]:
    """Show speedup, tokens a round and acceptance by place."""
    shown = {
        "Times as fast as plain (median of turns, speculation auto)": {
            (way, prompt): f"{ratio:.2f}" for way, row in speedups.items() for prompt, ratio in row.items()
        },
        "Tokens a round: auto / guesses in every round": {
            (one.way, one.prompt): f"{one.tokens_per_round:.2f} / {one.full_tokens_per_round:.2f}" for one in found
        },
        "Guesses accepted by place, of those reached, in percent": {
            (one.way, one.prompt): " ".join(f"{100 * share:.0f}" for share in one.acceptance[:5]) or "-"
            for one in found
        },
    }
    tables = []
    for title, cells in shown.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("way", no_wrap=True)
        for prompt in prompts:
            table.add_column(prompt, justify="right")
        if cells and title.startswith("Times"):
            table.add_column("mean", justify="right")
        for way, ratios in speedups.items():
            row = [cells.get((way, prompt), "") for prompt in prompts]
            mean = [f"{geometric_mean(ratios.values()):.2f}"] if title.startswith("Times") else []
            table.add_row(way, *row, *mean)
        tables.append(table)
    return tables


if __name__ == "__main__":
    main()
