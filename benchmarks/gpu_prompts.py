"""How long until the first token, of prompts of lengths never seen before and seen before? Beside transformers.

    python benchmarks/gpu_prompts.py                 # on a card: a synthetic 8B target; transformers in the same run
    python benchmarks/gpu_prompts.py --quick         # tiny, on whatever there is: does it run?

Whoever serves meets a new length with nearly every prompt. What is made for a length when it is first met, as plans,
tunings or captured passes, is waited for then; a benchmark with prompts of one length never shows it. Each length comes
with a text of its own each time, so nothing is found in a prefix cache.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.growing import begun, filled, kept  # noqa: E402
from benchmarks.round_runs import facts_of  # noqa: E402
from benchmarks.terminal import Console, Table  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

CARD: dict[str, Any] = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "shortest": 20, "longest": 3000, "count": 12}
QUICK: dict[str, Any] = {
    "target": "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "draft": "hidden=64,layers=1,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "shortest": 5, "longest": 60, "count": 2,
}  # fmt: skip


def main() -> None:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 160)
    began, date = time.time(), datetime.now(UTC)
    record = begun("gpu_prompts", date, options, cells=[])
    target = _pair(options)
    lengths = sorted(random.Random(options.seed).sample(range(options.shortest, options.longest + 1), options.count))
    for engine in options.engines:
        record["cells"] += _measured(engine, target, lengths, options)
        kept(record, date, began, options)
    console.print(prompts_table(record["cells"]))
    console.print(f"Record: {kept(record, date, began, options)}", soft_wrap=True)


def prompts_table(cells: list[dict[str, Any]]) -> Table:
    """Lay out milliseconds by engine and length, when a length came first and when it came again."""
    table = Table(title="Milliseconds until the first token", title_justify="left")
    for name in ("engine", "tokens of the prompt", "first", "again"):
        table.add_column(name, justify="right")
    for engine in dict.fromkeys(one["engine"] for one in cells):
        mine = {(one["length"], one["seen"]): one["seconds"] for one in cells if one["engine"] == engine}
        for length in sorted({length for length, _ in mine}):
            table.add_row(engine, str(length), *(f"{1e3 * mine[length, seen]:.1f}" for seen in (False, True)))
        medians = (f"{1e3 * median(mine[key] for key in mine if key[1] is seen):.1f}" for seen in (False, True))
        table.add_row(engine, "median", *medians)
    return table


def _measured(engine: str, target: Path, lengths: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Open an engine, time all lengths and then all of them again; its memory is free again afterwards."""
    first_token = ENGINES[engine](target, options)
    return [
        {"engine": engine, "length": length, "seen": bool(turn), "seconds": first_token(_prompt(length, turn))}
        for turn in range(2)
        for length in random.Random(turn).sample(lengths, len(lengths))
    ]


def _pair(options: argparse.Namespace) -> Path:
    from outrider.bench.pair import write_pair
    from outrider.bench.shapes import parse_shape

    target: Path = options.work / "target"
    if facts_of(target).get("shape") != parse_shape(options.target):
        write_pair(options.work, target=options.target, draft=options.draft, num_prompts=1, force=True)
    return target


def _prompt(length: int, turn: int) -> list[int]:
    draws = random.Random(length * 2 + turn)
    return [draws.randrange(10, 4000) for _ in range(length)]


def _ours(target: Path, options: argparse.Namespace) -> Callable[[list[int]], float]:
    from outrider import LLM, SamplingParams

    llm = LLM(str(target), method="none", device=options.device, max_model_len=options.longest + 32, max_num_seqs=4)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def first_token(prompt: list[int]) -> float:
        began = time.perf_counter()
        llm.generate([prompt], params, progress=False)
        return time.perf_counter() - began

    first_token(_prompt(options.shortest, 2))  # each engine is warmed up by one prompt
    return first_token


def _stock(target: Path, options: argparse.Namespace) -> Callable[[list[int]], float]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    model = model.to(options.device).eval()

    def first_token(prompt: list[int]) -> float:
        began = time.perf_counter()
        ids = torch.tensor([prompt], device=options.device)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False).tolist()
        return time.perf_counter() - began

    first_token(_prompt(options.shortest, 2))
    return first_token


ENGINES = {"outrider": _ours, "transformers": _stock}


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model and few lengths; its figures mean nothing")
    add("--device", choices=("cpu", "cuda"), help="(a card where there is one)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "outrider-pair", help="for the pair; kept")
    add("--target", help="shape of the target (llama-3.1-8b)")
    add("--draft", help="shape of the draft that is written beside it (llama-3.2-1b)")
    add("--seed", type=int, default=0, help="of the lengths")
    add("--shortest", type=int, help="(20)")
    add("--longest", type=int, help="(3000)")
    add("--count", type=int, help="lengths (12)")
    add("--engines", nargs="+", choices=ENGINES, default=[*ENGINES], help="(all)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    filled(options, CARD | (QUICK if options.quick else {}))
    options.work = options.work.expanduser().resolve() / ("quick" if options.quick else "")
    return options


if __name__ == "__main__":
    main()
