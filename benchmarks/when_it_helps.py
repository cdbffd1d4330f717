"""When does speculation help? One line for each rule of thumb that guides repeat, measured, with a record and plots.

    python benchmarks/when_it_helps.py --quick                 # tiny, in a minute: does it run?
    python benchmarks/when_it_helps.py                         # this CPU, a quarter of an hour; a record and plots
    python benchmarks/when_it_helps.py --device cuda --only agreement tokens rows
    python benchmarks/when_it_helps.py --plot RECORD           # the plots of a record, into docs/plots

Lines: `agreement` (how often the draft must be right, and which length pays), `tokens` (how long a text must be),
`rows` (how many at a time), `size` (how large a draft may be), `temperature` (the default model, lookup and its own
int4 weights). Synthetic pairs but for the last: their agreement is chosen, so one thing varies at a time.
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
from benchmarks.help_figures import LINES, draw, line_table, point  # noqa: E402
from benchmarks.mixed_pair import mixed_pair  # noqa: E402
from benchmarks.no_regret import turn  # noqa: E402
from benchmarks.regret_figures import AUTO, PLAIN, Cell  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider import LLM

    Engine = tuple[LLM, Cell, list[list[int]]]  # with what it is asked

SIZES = [  # of drafts whose pass reads about 2, 5, 10, 20, 40 and 70 % of the target's bytes
    f"hidden={hidden},layers={layers},heads={heads},kv_heads={heads // 2},intermediate={inner}"
    for hidden, layers, heads, inner in (
        (64, 1, 4, 192), (192, 2, 4, 512), (320, 3, 4, 896), (448, 5, 8, 1280), (576, 8, 12, 1536), (768, 8, 12, 2048),
    )
]  # fmt: skip
CPU: dict[str, Any] = {
    "target": "hidden=768,layers=12,heads=12,kv_heads=4,intermediate=2048,vocab=16384",
    "draft": "hidden=256,layers=3,heads=4,kv_heads=2,intermediate=768,vocab=16384",
    "sizes": SIZES,
    "usual": 64, "prompt_tokens": 64, "repeats": 3, "rows": [1, 2, 4, 8, 16], "tokens": [4, 8, 16, 32, 64, 128],
    "prompts": ["chat", "json", "summarise_with_quotes"],
}  # fmt: skip
CARD: dict[str, Any] = CPU | {
    "target": "llama-3.1-8b", "draft": "llama-3.2-1b", "sizes": ["qwen3-0.6b", "llama-3.2-1b"], "usual": 256,
    "prompt_tokens": 200, "tokens": [8, 16, 32, 64, 128, 256],
}  # fmt: skip
QUICK: dict[str, Any] = {
    "target": "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "draft": "hidden=64,layers=1,heads=4,kv_heads=2,intermediate=128,vocab=4096",
    "sizes": ["hidden=32,layers=1,heads=4,kv_heads=2,intermediate=64"], "usual": 16, "prompt_tokens": 8, "repeats": 1,
    "rows": [1, 2], "tokens": [8, 16], "agreements": [0.3, 0.8], "lengths": [1, 5], "temperatures": [0.0, 1.0],
    "prompts": ["chat"],
}  # fmt: skip
ALWAYS: dict[str, Any] = {
    "agreements": [0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "lengths": [1, 2, 3, 5, 8], "temperatures": [0.0, 0.5, 1.0, 1.5],
}  # fmt: skip
USUAL_LENGTH = 5
USUAL_AGREEMENT, LOW_AGREEMENT = 0.8, 0.5


def main() -> None:
    options = _options()
    if options.plot is not None:
        draw(json.loads(options.plot.read_text(encoding="utf-8")), options.plots)
        return
    Run(options, Console(width=None if sys.stdout.isatty() else 160)).run()


class Run:
    """One run: its lines, and the record that grows with them."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.began, self.date = time.time(), datetime.now(UTC)
        self.record = begun("when_it_helps", self.date, options, lines={})

    def run(self) -> None:
        """Measure all lines that were asked for; what was measured is kept, whatever happens."""
        wanted = self.options.only
        try:
            if {"agreement", "tokens", "rows"} & set(wanted):
                self._pair([name for name in ("agreement", "tokens", "rows") if name in wanted])
            if "size" in wanted:
                self._sizes()
            if "temperature" in wanted:
                self._temperatures()
        finally:
            path = self._keep()
            for name, points in self.record["lines"].items():
                self.console.print(line_table(name, points))
            self.console.print(f"Record: {path} ({time.time() - self.began:.0f} s)", soft_wrap=True)
        if self.options.plots is not None:
            draw(self.record, self.options.plots)

    # --- the lines

    def _pair(self, wanted: Sequence[str]) -> None:
        """Vary agreement, length of the text and rows, with one engine."""
        options = self.options
        most = max(*options.tokens, options.usual) + 16
        pair = mixed_pair(
            options.work, target=options.target, draft=options.draft, agreements=tuple(options.agreements),
            seed=0, dtype=options.dtype, device=options.device,
        )  # fmt: skip
        llm = self._engine(str(pair.target), str(pair.draft), max(options.lengths), most, max(options.rows))
        self.record["sizes"] = _passes(options.target, options.draft)
        middle = [one for one in (LOW_AGREEMENT, USUAL_AGREEMENT) if one in options.agreements]
        cells = {
            "agreement": [(one, Cell(1, options.usual, 0.0, one), options.lengths) for one in options.agreements],
            "tokens": [(one, Cell(1, one, 0.0, at), [USUAL_LENGTH]) for at in middle for one in options.tokens],
            "rows": [(one, Cell(one, options.usual, 0.0, at), [1, 3, 5]) for at in middle for one in options.rows],
        }  # fmt: skip
        for name in wanted:
            for at, cell, lengths in cells[name]:
                prompts = pair.prompts(float(cell.text), 2 * cell.rows, options.prompt_tokens, cell.tokens + 16)
                self._point(name, at, {"": (llm, cell, prompts)}, [str(one) for one in lengths], agreement=cell.text)
        llm.close()

    def _sizes(self) -> None:
        """Vary the draft's size at one agreement."""
        from outrider.bench.pair import open_pair, write_draft, write_pair
        from outrider.bench.shapes import parse_shape

        options = self.options
        shape, work = parse_shape(options.target), options.work / "sizes"
        for place, told in enumerate(options.sizes):
            small = parse_shape(told, shape.vocab)
            how: dict[str, Any] = {
                "draft": small,
                "agreement": USUAL_AGREEMENT,
                "device": options.device,
            }
            if place == 0:
                write_pair(work, target=shape, seed=0, dtype=options.dtype, num_prompts=1, force=True, **how)
                folder = work / "draft"
            else:
                folder = write_draft(work / f"draft-{place}", target=work / "target", force=True, **how).draft
            llm = self._engine(str(work / "target"), str(folder), max(options.lengths), options.usual + 16, 1)
            prompts = open_pair(work / "target", folder).saying.prompts(2, options.prompt_tokens)
            share = _passes(options.target, told)["share"]
            lengths = [str(one) for one in options.lengths]
            self._point(
                "size", share, {"": (llm, Cell(1, options.usual, 0.0, "a stretch"), prompts)}, lengths, shape=told
            )
            llm.close()

    def _temperatures(self) -> None:
        """Vary the temperature on the default model: lookup, and its own weights in int4 as the draft."""
        from benchmarks import real_model

        options = self.options
        setting = real_model.setting(2048)
        texts = {one.name: list(one.token_ids) for one in real_model.prompts(setting, options.prompts)}
        source = str(setting.gguf)
        lookup = self._engine(source, None, 10, 1024, 1, method="ngram")
        own = self._engine(source, source, USUAL_LENGTH, 1024, 1, draft_quantization="int4")
        for name, prompt in texts.items():
            for temperature in options.temperatures:
                cell = Cell(1, options.usual, temperature, name)
                engines = {"lookup ": (lookup, cell, [prompt]), "own int4 ": (own, cell, [prompt])}
                self._point("temperature", temperature, engines, [str(USUAL_LENGTH)], prompt=name)
        lookup.close()
        own.close()

    # --- a point of a line

    def _point(
        self,
        line: str,
        at: float,
        engines: dict[str, tuple[LLM, Cell, list[list[int]]]],
        lengths: list[str],
        **more: Any,
    ) -> None:
        """Let all settings of all engines take turns; plain is the first engine's."""
        (first, cell, prompts), *_ = engines.values()
        settings = [(name + how, *engine, how) for name, engine in engines.items() for how in (AUTO, *lengths)]
        settings.append((PLAIN, first, cell, prompts, PLAIN))
        rates: dict[str, list[float]] = {name: [] for name, *_ in settings}
        accepted: dict[str, float] = {}
        for _, llm, *_ in settings:
            turn(llm, cell, prompts, PLAIN, 1)  # warms up
        for place in range(self.options.repeats):
            for name, llm, cell, prompts, how in settings[place % len(settings) :] + settings[: place % len(settings)]:
                before = llm.engine.figures.drafted, llm.engine.figures.accepted
                rate, *_ = turn(llm, cell, prompts, how, self.options.usual)
                rates[name].append(rate)
                drafted = llm.engine.figures.drafted - before[0]
                accepted[name] = (llm.engine.figures.accepted - before[1]) / drafted if drafted else float("nan")
        found = point(at, rates, accepted, **more)
        self.record["lines"].setdefault(line, []).append(found)
        best = max(found["speedup"], key=lambda name: found["speedup"][name])
        self.console.print(
            f"{line} {at:g} {more}: {best} {found['speedup'][best]:.2f} ({time.time() - self.began:.0f} s)"
        )
        self._keep()

    def _engine(self, target: str, draft: str | None, most: int, tokens: int, rows: int, **more: Any) -> LLM:
        from outrider import LLM

        length = tokens + self.options.prompt_tokens + 32
        return LLM(
            target, draft, most, device=self.options.device, dtype=self.options.dtype, max_model_len=length,
            max_num_seqs=rows, enable_prefix_caching=False, **more,
        )  # fmt: skip

    def _keep(self) -> Path:
        return kept(self.record, self.date, self.began, self.options)


def _passes(target: str, draft: str) -> dict[str, float]:
    """Bytes that a pass of each reads, embeddings left out, and the draft's by the target's."""
    import math

    from outrider.bench.shapes import parse_shape

    shape = parse_shape(target)
    each = [
        sum(math.prod(sizes) for name, sizes in one.tensors().items() if name != "model.embed_tokens.weight")
        for one in (shape, parse_shape(draft, shape.vocab))
    ]
    return {"target": 2 * each[0], "draft": 2 * each[1], "share": each[1] / each[0]}


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny models and few points; its figures mean nothing")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--only", nargs="+", choices=LINES, default=list(LINES), help="some of the lines")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "outrider-helps", help="for the pairs; kept")
    add("--target", help="shape of the target")
    add("--draft", help="shape of the draft (CPU: a tenth of the target)")
    add("--dtype", default="bfloat16", help="float32 where a CPU knows no other (bfloat16)")
    add("--usual", type=int, help="tokens of a text where another thing varies (CPU: 64, CUDA: 256)")
    add("--repeats", type=int, help="turns of each setting (3)")
    add("--plot", type=Path, metavar="RECORD", help="measure nothing, draw what a record holds")
    add("--plots", type=Path, help="a folder for plots, as SVG (with --plot: docs/plots)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    usual = ALWAYS | (CARD if options.device == "cuda" else CPU)
    filled(options, usual | (QUICK if options.quick else {}))
    if options.plot is not None and options.plots is None:
        options.plots = HERE.parent / "docs" / "plots"
    options.work = options.work.expanduser().resolve() / ("quick" if options.quick else "")
    options.work.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
