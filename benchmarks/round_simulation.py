"""Rounds that nobody computes: a clock that is told what rounds cost, and guesses that are right by the toss of a coin.

It runs the controller alone, for as long as one likes, in no time: what it gains and loses is then a matter of its
decisions, not of this machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.draft.catching_up import runs
from outrider.engine.choice import Party, RoundTimes, Wish
from outrider.engine.controller import Controller
from outrider.engine.cost import CHAIN, Grid, RoundCosts
from outrider.engine.prefill import CROWDED
from outrider.kernels.attention import power_of_2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Machine", "Text", "run"]


class Text(SimpleNamespace):
    """A sequence, as far as the controller looks at it."""

    __hash__ = object.__hash__

    def __init__(self, agreement: float | Callable[[int], float], tokens: int, seed: int = 0) -> None:
        super().__init__(
            limit=tokens, num_generated=0, request=SimpleNamespace(params=SimpleNamespace(temperature=0.0))
        )
        chance = agreement if callable(agreement) else lambda _: agreement
        coin = random.Random(seed)
        self.right = [coin.random() < chance(place) for place in range(tokens + 1)]  # whether each token can be guessed
        self.cached = 0  # by the draft
        self.guessed: list[int] = []  # at which lengths there were guesses

    def __len__(self) -> int:
        return self.num_generated

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return self.num_generated >= self.limit

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        return "length" if self.finished else None

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass
class Machine:
    """What rounds really cost.

    Attributes:
        plain: Seconds of a plain round by rows.
        wide: More for each guess that is verified, by rows.
        draft: Seconds a guess; 0 rows share it all the same.
        call, token: Seconds until a draft has read what it lacks: of a call, and of each token.
        inside: Whether drafting is part of the pass.
        makes: Chance that there is any guess.
        prompt: Tokens of a text before its first.
        admits: Prompts that are read beside a round.
        busy: Seconds for the prompt of a text that comes, in which the host also sends what the draft is to read; or
            for so many prompts that are read together.
        at_once: Prompts that are read together while nobody runs.
        late: Whether the controller is told of a round when the next one was begun.
        captured: Seconds of a round by rows and guesses, drafting included, as measured; in place of all of the above.
        slack: Tokens that a draft reads along with its first guess.
        noise: Deviation of the logarithm of each round's time.
    """

    plain: Callable[[int], float] = lambda _: 1.0
    wide: Callable[[int], float] = lambda _: 0.02
    draft: float = 0.15
    call: float = 0.0
    token: float = 0.0
    inside: bool = False
    makes: float = 1.0
    prompt: int = 33
    admits: int = 1000
    busy: float | Callable[[int], float] = 0.0
    at_once: int = 1000
    late: bool = False
    captured: dict[tuple[int, int], float] | None = None
    slack: int = 2
    noise: float = 0.0
    slow: Callable[[int], float] = lambda _: 1.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    most: int = 8
    num_rounds: int = 0

    def profile(self, num_rows: int, error: Callable[[int, int], float] = lambda *_: 1.0) -> RoundCosts:
        """What is measured at start; `error` distorts it."""
        if self.captured is not None:
            plain = {key: seconds for key, seconds in self.captured.items() if not key[1]}
            whole = {key: seconds for key, seconds in self.captured.items() if key[1]}
            grids = {CHAIN: Grid(plain, stepped=True), "draft": Grid(whole, stepped=True)}
            return RoundCosts(grids, feeds={"draft": (self.call, self.token)})
        lengths = [length for length in (0, 1, 2, 3, 5, 8, 12, 16) if length <= self.most]
        rows = [count for count in (1, 2, 4, 8, 16, 32) if count <= num_rows]
        passes = {(b, k): (self.plain(b) + k * self.wide(b)) * error(b, k) for b in rows for k in lengths}
        drafts = {(b, k): k * self.draft * error(b, k) for b in rows for k in lengths if k}
        if self.inside:
            whole = {key: seconds + drafts[key] for key, seconds in passes.items() if key[1]}
            plain = {key: seconds for key, seconds in passes.items() if not key[1]}
            grids = {CHAIN: Grid(plain, stepped=True), "draft": Grid(whole, stepped=True)}
            return RoundCosts(grids, feeds={"draft": (self.call, self.token)})
        feeds = {"draft": (self.call, self.token)}
        return RoundCosts({CHAIN: Grid(passes)}, drafts={"draft": Grid(drafts)}, feeds=feeds)

    def feeding(self, lacking: Sequence[int]) -> float:
        """Seconds until a draft has read what rows lack; on a card together, padded, of a power of two of rows."""
        together = list(runs([0] * len(lacking), lacking, together=self.inside))
        tokens = sum(one.width * power_of_2(len(one.places)) for one in together)
        return self.call * len(together) + self.token * tokens

    def reading(self, come: int) -> float:
        """Seconds for the prompts of those who come."""
        return self.busy(come) if callable(self.busy) else come * self.busy

    def ceiling(self, running: list[Text], rows: int) -> float:
        """Tokens a round beyond which texts wait for the next one's prompt."""
        return sum(one.limit for one in running) / len(running) / ((rows - 1 or 0.01) / self.admits)

    def round(self, rows: list[Text], wanted: list[int]) -> tuple[list[tuple[int, int]], float, float, int]:
        """Play one: (guesses made, accepted) of each row, seconds of drafting and of the pass, and its width."""
        self.num_rounds += 1
        outcome = []
        for row, length in zip(rows, wanted, strict=True):
            made = length if self.random.random() < self.makes else 0
            right = 0
            while right < made and row.right[row.num_generated + right]:
                right += 1
            outcome.append((made, right))
        width = max(wanted) if self.inside else max(made for made, _ in outcome)
        if self.inside and width:
            width = min(one for one in (1, 2, 3, 5, 8, 12, 16) if one >= width)
        slow = self.slow(self.num_rounds) * self.random.lognormvariate(0, self.noise)
        if self.captured is not None:
            shape = min(key for key in self.captured if key[0] >= len(rows) and key[1] >= width)
            return outcome, 0.0, slow * self.captured[shape], width
        passing = slow * (self.plain(len(rows)) + width * self.wide(len(rows)))
        drafting = slow * max(wanted) * self.draft
        return (
            outcome,
            (0.0 if self.inside else drafting),
            passing + (drafting if self.inside and width else 0.0),
            width,
        )


def run(
    machine: Machine,
    texts: list[Text],
    rows: int,
    controller: Controller | None = None,
    fixed: int | None = None,
    *,
    to_the_end: bool = True,
) -> float:
    """Generate all texts, at most `rows` at a time, by a controller or with a fixed length; give tokens a second.

    With both the length is fixed, and the controller is told how it went. If not `to_the_end`, until the last one has
    come.
    """
    waiting, running, seconds, tokens = list(texts), [], 0.0, 0
    held = 0  # places of texts that have ended, as the host does not know yet
    untold: list[Callable[[], None]] = []
    crowded = 0.0  # share of the rounds lately in which texts came
    while waiting or (running and to_the_end):
        come = min(len(waiting), rows - len(running) - held, machine.admits if running else machine.at_once)
        running += [waiting.pop(0) for _ in range(come)]
        crowded += (bool(come) - crowded) / ((rows - 1) / machine.admits + 1)
        party = Party(
            "draft",
            len(running),
            machine.most,
            inside=machine.inside,
            narrows=not machine.inside,
            ceiling=machine.ceiling(running, rows) if crowded > CROWDED else math.inf,
            coming=min(rows - len(running), len(waiting)),
        )
        mosts = [max(0, min(machine.most, one.limit - one.num_generated - 1)) for one in running]
        lags = [max(0, one.num_generated + machine.prompt - one.cached) for one in running]
        lags = [lag if lag > machine.slack else 0 for lag in lags]
        wanted, probe = [min(fixed or 0, most) for most in mosts], False
        if controller is not None and fixed is None:
            wanted, probe = _chosen(controller, party, running, mosts, lags)
        fed = tuple(lag for length, lag in zip(wanted, lags, strict=True) if length > 0 and lag)
        feeding = machine.feeding(fed)
        outcome, drafting, passing, width = machine.round(running, wanted)
        seconds += drafting + passing + feeding + (machine.reading(come) if come else 0.0)
        given, learned = _taken(machine, running, wanted, outcome)
        tokens += given
        if controller is not None:
            whole, apart = drafting + passing, not machine.inside
            if not apart:  # it runs on the card, and the host does not wait for it
                whole, feeding = whole + feeding, 0.0
            asked_for = width, max(wanted), sum(length > 0 for length in wanted), given
            clean = not (come and machine.busy)
            times = RoundTimes(whole, drafting, feeding, *asked_for, clean, fed=fed, apart=apart)
            untold.append(partial(_tell, controller, learned, party, probe, times))
            if len(untold) > machine.late:
                untold.pop(0)()
        running, held = _left(machine, [(one, length) for one, length, *_ in learned], rows, bool(waiting))
    for told in untold:
        told()
    return tokens / seconds


def _chosen(
    controller: Controller, party: Party, running: list[Text], mosts: list[int], lags: list[int]
) -> tuple[list[int], bool]:
    open_to = [place for place, most in enumerate(mosts) if most > 0]
    wishes: Any = [Wish(running[place], mosts[place], lags[place], controller.length.tokens) for place in open_to]  # type: ignore[arg-type]
    choice = controller.choose(party, wishes)
    wanted = [0] * len(running)
    for place, length in zip(open_to, choice.lengths, strict=True):
        wanted[place] = length
    return wanted, choice.probe


def _taken(
    machine: Machine, running: list[Text], wanted: list[int], outcome: list[tuple[int, int]]
) -> tuple[int, list[tuple[Text, int, int, int]]]:
    """Let texts take in a round: how many tokens they took, and what is learned of each."""
    given, learned = 0, []
    for one, length, (made, right) in zip(running, wanted, outcome, strict=True):
        if one.num_generated >= one.limit:
            continue
        one.num_generated += right + 1
        given += right + 1
        if length:
            one.guessed.append(one.num_generated - right - 1)
            one.cached = one.num_generated + machine.prompt
        learned.append((one, length, made, right))
    return given, learned


def _left(machine: Machine, played: list[tuple[Text, int]], rows: int, waiting: bool) -> tuple[list[Text], int]:
    """Say which of the texts of a round, by their guesses, are in the next, and how many places stand idle beside them.

    On a card the host sees a round later that a text has ended, unless all have and nobody comes: it waits then. Its
    place stands idle till then, in the next round if it guessed.
    """
    on = [one for one, _ in played if not one.finished]
    if not machine.inside or not (on or (waiting and len(played) < rows)):
        return on, 0
    left = [one for one, length in played if length or not one.finished]
    return left, len(played) - len(left)


def _tell(
    controller: Controller, learned: list[tuple[Text, int, int, int]], party: Party, probe: bool, times: RoundTimes
) -> None:
    for one, length, made, right in learned:
        controller.learn(one, "draft", length, made, right, tree=False)  # type: ignore[arg-type]
    controller.took(party, probe, times)


def compared(
    machine: Callable[[], Machine], texts: Callable[[], list[Text]], rows: int, **how: Any
) -> dict[str, float]:
    """Give auto's speed over that of plain decoding and of each fixed length."""
    one = machine()
    auto = run(one, texts(), rows, Controller(how.get("costs") or one.profile(rows)))
    return {str(length): auto / run(machine(), texts(), rows, fixed=length) for length in (0, 1, 3, 5, 8)}
