"""Is `speculation="auto"` ever slower than plain decoding or a fixed length? All cells at once, in simulated rounds.

    python benchmarks/regret_simulation.py                  # costs of an H200, from the record named by default
    python benchmarks/regret_simulation.py --apart          # texts of 60 to 100 percent of the tokens

`no_regret.py` measures lines through one point, since a card is lent by the minute. Here a clock is told what rounds
cost (by a record of such a run), guesses are right by the toss of a coin, and the controller is the real one: every
number of rows with every length and every agreement, on a CPU, in minutes. What it cannot show is what nobody told it:
stalls, the host's own work, prompts that cost otherwise. A cell that loses here is worth a card's time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.growing import begun, kept  # noqa: E402
from benchmarks.regret_figures import AUTO, MIXED, PLAIN, Cell, in_turn, judged, regret_table, verdicts  # noqa: E402
from benchmarks.round_simulation import Machine, Text, run  # noqa: E402
from benchmarks.terminal import Console  # noqa: E402
from outrider.engine.controller import Controller  # noqa: E402
from outrider.engine.cost import DRAFT_LENGTHS, Grid  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

COSTS = HERE / "records" / "no_regret-2026-11-29-h200-last-grid.json"
PROMPT = 200  # tokens
ALONE, TWO, EACH = 7.2e-3, 11.5e-3, 5.1e-3  # seconds for one prompt of so many, for two, and for each of more (by hand)
BESIDE, AT_ONCE = 2, 10  # prompts that are read beside a round, and together where nobody runs


def main() -> None:
    options, console = _options(), Console(width=None if sys.stdout.isatty() else 200)
    began, date = time.time(), datetime.now(UTC)
    costs = Costs.of_record(options.costs)
    record = begun("regret_simulation", date, options, simulated=True, costs=costs.record(), cells=[], verdicts={})
    try:
        engines: dict[tuple[int, int, int], Controller] = {}
        for cell in _cells(options):
            record["cells"].append(_judged(costs, cell, options, engines))
            told = record["cells"][-1]
            console.print(f"{cell.name}: {1 - told['regret']:.3f} of {told['best']} ({time.time() - began:.0f} s)")
    finally:
        record["verdicts"] = verdicts(record["cells"])
        path = kept(record, date, began, options)
        console.print(regret_table(record["cells"]))
        ratios = [1 - one["regret"] for one in record["cells"]]
        console.print(f"{len(ratios)} cells, on average {mean(ratios):.4f}, at worst {min(ratios):.3f}; record: {path}")


class Costs:
    """What rounds of a card take.

    Args:
        rounds: (rows, guesses) -> seconds, as captured.
        feed: Seconds until a draft has read what it lacked: of a call, and of each token.
    """

    def __init__(self, rounds: dict[tuple[int, int], float], feed: tuple[float, float]) -> None:
        self.rounds, self.feed = rounds, feed

    @classmethod
    def of_record(cls, path: Path) -> Costs:
        """Take the costs from what fixed lengths took in a record of `no_regret.py`; between these, from a line."""
        record = json.loads(path.read_text(encoding="utf-8"))
        sums: dict[tuple[int, int], list[float]] = {}
        for cell in record["cells"]:
            for setting, turns in cell["rounds"].items():
                if setting == AUTO:
                    continue
                guesses = "0" if setting == PLAIN else setting
                kinds = {f"{cell['rows']} x {guesses}", guesses}  # the latter of older records, which tell no rows
                for count, seconds, *_ in (turn[kind] for turn in turns for kind in kinds & turn.keys()):
                    found = sums.setdefault((cell["rows"], int(guesses)), [0, 0.0])
                    found[0], found[1] = found[0] + count, found[1] + seconds
        measured = Grid({key: seconds / count for key, (count, seconds) in sums.items()})
        every, most = {rows for rows, _ in sums}, max(guesses for _, guesses in sums)
        lengths = {length for length in DRAFT_LENGTHS if length < most} | {guesses for _, guesses in sums}
        rounds = {(rows, length): measured.at(rows, length) for rows in every for length in lengths}
        (pair,) = record["pairs"].values()
        call, token = pair["feeds"]["draft_model"]
        return cls(rounds, (call, token))

    def record(self) -> dict[str, Any]:
        """Give them as JSON holds them."""
        return {"rounds": [[*key, seconds] for key, seconds in sorted(self.rounds.items())], "feed": [*self.feed]}

    def machine(self) -> Machine:
        """Make a card of them."""
        reading = lambda come: ALONE if come == 1 else TWO if come == 2 else EACH * come  # noqa: E731
        call, token = self.feed
        return Machine(
            captured=self.rounds, call=call, token=token, inside=True, prompt=PROMPT, busy=reading, admits=BESIDE,
            at_once=AT_ONCE, late=True, slack=4, most=max(guesses for _, guesses in self.rounds),
        )  # fmt: skip


def _cells(options: argparse.Namespace) -> list[Cell]:
    kinds: list[float | str] = [*options.agreements, MIXED]
    return [Cell(rows, tokens, 0.0, kind) for rows in options.rows for tokens in options.tokens for kind in kinds]


def _judged(
    costs: Costs, cell: Cell, options: argparse.Namespace, engines: dict[tuple[int, int, int], Controller]
) -> dict[str, Any]:
    """Let settings take turns as `no_regret.py` does, and agreements of as many texts as long follow each other.

    So what an engine learned in the cell before misleads it at first. Larger cells have fewer seeds.
    """
    settings = [AUTO, PLAIN, *map(str, options.lengths)]
    rates: dict[str, list[float]] = {setting: [] for setting in settings}
    for seed in range(max(1, min(options.seeds, options.seeds * 1000 // (cell.rows * cell.tokens)))):
        coming = _coming(cell, options, seed)
        engine = cell.rows, cell.tokens, seed
        controller = engines.setdefault(engine, Controller(costs.machine().profile(cell.rows)))
        run(costs.machine(), coming(), cell.rows, controller, fixed=0, to_the_end=cell.to_the_end)
        for number in range(options.repeats):
            for setting in in_turn(settings, number):
                fixed = None if setting == AUTO else 0 if setting == PLAIN else int(setting)
                rate = run(costs.machine(), coming(), cell.rows, controller, fixed, to_the_end=cell.to_the_end)
                rates[setting].append(rate)
    return judged(cell, rates, pair="simulated")


def _coming(cell: Cell, options: argparse.Namespace, seed: int) -> Callable[[], list[Text]]:
    """Give a turn's texts: the same in each."""
    kinds = options.agreements if cell.text == MIXED else [float(cell.text)]
    least = cell.count(options.turn_tokens)
    count = max(least, 3 * cell.rows, 2 * len(kinds)) if cell.text == MIXED else least
    lengths = cell.lengths(count, apart=options.apart, seed=seed)

    def texts() -> list[Text]:
        return [
            Text(kinds[place % len(kinds)], length, seed=1000 * seed + place) for place, length in enumerate(lengths)
        ]

    return texts


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--costs", type=Path, default=COSTS, help=f"a record of no_regret.py ({COSTS.name})")
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="texts at a time (1 4 16 32)")
    add("--tokens", type=int, nargs="+", default=[8, 32, 128, 512], help="tokens of a text (8 32 128 512)")
    add("--agreements", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.8, 0.95], help="(0 0.3 0.6 0.8 0.95)")
    add("--lengths", type=int, nargs="+", default=[1, 3, 8], help="fixed draft lengths (1 3 8)")
    add("--apart", action="store_true", help="texts of 60 to 100 percent of the tokens, which do not end together")
    add("--turn-tokens", type=int, default=256, help="tokens a row in each turn, at least (256)")
    add("--repeats", type=int, default=3, help="turns of each setting (3)")
    add("--seeds", type=int, default=4, help="engines that each small cell is averaged over (4)")
    add("--out", type=Path, help="where to write the record (benchmarks/records/...)")
    options = parser.parse_args()
    options.device, options.quick = "cpu", False  # the record tells of this machine, and where the costs are from
    return options


if __name__ == "__main__":
    main()
