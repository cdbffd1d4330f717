"""The search: calibrate every variant, rank all lengths by the cost model, measure the promising ones."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.plan import AUTO, Plan, engine_arguments
from outrider.bench.run import FAULTS, Outcome, local_prompts, measure_engine
from outrider.bench.summary import percentile
from outrider.bench.trials import OFF, Budget, Setting, measured
from outrider.llm import LLM
from outrider.tune.prediction import Calibration, Candidate, Variant, candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.questions import Question
    from outrider.tune.state import State

__all__ = ["WORTH", "Search", "Wish", "typical_error"]

PROBES = 4  # prompts that a calibration reads: acceptance is settled soon, and seconds of rounds sooner
PROMISING = 0.9  # of the best prediction: what promises less is not measured, since the model is no worse than that
WORTH = 1.03  # below this, speculation is not worth it: noise and other prompts reach as far


class _SpentError(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class Wish:
    """What to look for.

    Attributes:
        variants: What may draft.
        lengths: Guesses a round that may be.
        concurrency: Texts under way at a time; the setting is to serve all of them.
        temperature, budget: Of the texts.
        minutes: How long the search may take; one that goes on has as much again.
        most: Candidates to be measured at most.
        repeats: Turns of each.
    """

    variants: tuple[Variant, ...]
    lengths: tuple[int, ...] = (2, 3, 5, 8)
    concurrency: tuple[int, ...] = (1,)
    temperature: float = 0.0
    budget: Budget = field(default_factory=Budget)
    minutes: float = 10.0
    most: int = 6
    repeats: int = 2


@dataclass
class Search:
    """Finds the best setting, and keeps what it found in its state after every engine.

    Attributes:
        wish: What to look for.
        base: Arguments of `LLM` that all candidates share.
        questions: What to ask.
        state: What is known already.
        tell: Told what is being done.
        spent: Whether the budget ended the search before it was through.
    """

    wish: Wish
    base: dict[str, Any]
    questions: Sequence[Question]
    state: State
    tell: Callable[[str], None] = lambda _: None
    spent: bool = False
    _began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return 60 * self.wish.minutes - (time.perf_counter() - self._began)

    def run(self) -> None:
        """Search until all is measured or the budget is spent; Ctrl-C leaves what was found in the state."""
        began = time.perf_counter()
        try:
            for variant in self.wish.variants:
                self._calibrate(variant)
            for candidate in self.promising():
                self._measure(candidate)
        except _SpentError:
            self.spent = True
        finally:
            self.state.seconds += time.perf_counter() - began
            self.state.save()

    def ranked(self) -> list[Candidate]:
        """Give all candidates by what the cost model promises."""
        known = {
            variant: Calibration.of_record(self.state.calibrations[variant.title])
            for variant in self.wish.variants
            if variant.title in self.state.calibrations
        }
        return candidates(known, self.wish.lengths, self.wish.concurrency)

    def promising(self) -> list[Candidate]:
        """Give those that are worth measuring: near the best promise, and the best of every variant, at least once."""
        ranked = self.ranked()
        if not ranked:
            return []
        bar = PROMISING * ranked[0].promise
        firsts = {one.variant: one for one in reversed(ranked)}  # of each variant the best
        near = [one for one in ranked if one.promise >= bar or firsts[one.variant] is one]
        return near[: self.wish.most]

    # --- one engine

    def _calibrate(self, variant: Variant) -> None:
        """Measure one long draft against plain decoding, on a few prompts."""
        if variant.title in self.state.calibrations or variant.title in self.state.failures:
            return
        length = max(self.wish.lengths)
        llm = self._loaded(variant, length, variant.title)
        if llm is None:
            return
        with llm:
            prompts = self._prompts(llm)[:PROBES]
            trials: dict[int | str, dict[int, Any]] = {OFF: {}, length: {}}
            try:
                for together in self.wish.concurrency:
                    for asked, found in trials.items():
                        setting = Setting("outrider", variant.method, asked, together, self.wish.temperature)
                        self._still(f"calibrating {variant.title}, {together} at a time")
                        measured(llm, prompts[:1], setting, self.wish.budget)
                        found[together] = measured(llm, prompts, setting, self.wish.budget)
            except FAULTS as error:
                self.state.failures[variant.title] = f"{type(error).__name__}: {error}"
                return
        calibration = Calibration.of(trials[OFF], trials[length], length)
        self.state.calibrations[variant.title] = calibration.record()
        self.state.save()

    def _measure(self, candidate: Candidate) -> None:
        """Measure a candidate as it would run, and as the model predicts it: "auto" up to its length, and always so."""
        if candidate.title in self.state.measured or candidate.title in self.state.failures:
            return
        variant, wish = candidate.variant, self.wish
        llm = self._loaded(variant, candidate.length, candidate.title)
        if llm is None:
            return
        plan = Plan(
            (variant.method,), (candidate.length,), wish.concurrency, (wish.temperature,), wish.budget, wish.repeats
        )
        settings, outcome = plan.settings(variant.method), Outcome()
        with llm:
            measure_engine(
                llm, self._prompts(llm), settings, plan, outcome,
                lambda setting, repeat: self._still(
                    f"measuring {candidate.title}, {setting.length}, {setting.concurrency} at a time "
                    f"(turn {repeat + 1} of {wish.repeats})"
                ),
            )  # fmt: skip
        cells = outcome.cells(settings)
        broken = [cell["reason"] for cell in cells if cell["status"] == "failed"]
        if broken:
            self.state.failures[candidate.title] = broken[0]
        else:
            self.state.measured[candidate.title] = _kept(cells, candidate)
        self.state.save()

    def _loaded(self, variant: Variant, length: int, title: str) -> LLM | None:
        """Load an engine; None, and a note, where it cannot be."""
        self._still(f"loading {title}")
        gc.collect()  # an engine is a web of objects: the last one goes before the next one comes
        arguments = engine_arguments({**self.base, "tree": variant.tree}, variant.method, length, self._together)
        try:
            return LLM(**arguments)
        except FAULTS as error:
            self.state.failures[title] = f"{type(error).__name__}: {error}"
            self.state.save()
            return None

    @property
    def _together(self) -> int:
        return max(self.wish.concurrency)

    def _prompts(self, llm: LLM) -> list[tuple[str, list[int]]]:
        if not self.state.prompts:
            self.tell("answering the conversations' first turns")
            self.state.prompts, _ = local_prompts(llm, self.questions, self.wish.budget)
        return self.state.prompts

    def _still(self, what: str) -> None:
        """Go on, if there is time left."""
        if self.left <= 0:
            raise _SpentError
        self.tell(what)


def _kept(cells: Sequence[dict[str, Any]], candidate: Candidate) -> dict[str, Any]:
    """Give what a search remembers of a measured candidate, by concurrency."""
    found: dict[str, Any] = {"predicted": {}, "fixed": {}, "auto": {}, "plain": {}, "error": {}}
    for cell in cells:
        at = str(cell["concurrency"])
        if cell["plain"]:
            found["plain"][at] = cell["tokens_per_second"]["median"]
        else:
            found["auto" if cell["length"] == AUTO else "fixed"][at] = cell["speedup"]
    for together, predicted in candidate.predicted.items():
        seen = found["fixed"][str(together)]["median"]
        found["predicted"][str(together)] = predicted
        found["error"][str(together)] = predicted / seen - 1 if seen else None
    found["promise"] = statistics.geometric_mean(max(one["median"], 1e-6) for one in found["auto"].values())
    return found


def typical_error(measured_: dict[str, dict[str, Any]]) -> float | None:
    """Give the median size of the predictions' errors; None where nothing was measured."""
    sizes = [abs(one) for told in measured_.values() for one in told["error"].values() if one is not None]
    return percentile(sizes, 0.5)
