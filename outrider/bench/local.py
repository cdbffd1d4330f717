"""A benchmark of engines in this process, one after another: only one holds its weights and cache at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.peers import measure_transformers, transformers_settings
from outrider.bench.run import FAULTS, Outcome, local_prompts, measure_engine
from outrider.config import Method
from outrider.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.bench.plan import Plan
    from outrider.bench.questions import Question
    from outrider.bench.trials import Setting

    Tell = Callable[[str, int], None]

__all__ = ["Job", "LocalBench", "model_facts"]


@dataclass(frozen=True)
class Job:
    """One engine, and what is measured on it.

    Attributes:
        arguments: Of `LLM`.
    """

    method: str
    settings: tuple[Setting, ...]
    arguments: dict[str, Any]


@dataclass
class LocalBench:
    """Measures jobs, and keeps what came of them, also where it is interrupted.

    Attributes:
        jobs: The first one also answers the conversations' earlier turns.
        questions: What to ask.
        plan: How often, and how much.
        tell: Told what is being done, and how many turns that ends.
        outcome: What was measured.
        prompts: Kind and token ids of what was asked.
        facts: Of the target.
        peers: Other engines to measure after ours: "transformers".
    """

    jobs: Sequence[Job]
    questions: Sequence[Question]
    plan: Plan
    tell: Tell = lambda _what, _turns: None
    outcome: Outcome = field(default_factory=Outcome)
    prompts: list[tuple[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    peers: Sequence[str] = ()
    _place: tuple[torch.dtype, torch.device] | None = None

    @property
    def settings(self) -> list[Setting]:
        """All that is measured, in the order in which reports show it."""
        theirs = transformers_settings(self.plan) if "transformers" in self.peers else []
        return [*(setting for job in self.jobs for setting in job.settings), *theirs]

    def measure(self) -> None:
        """Load and measure one engine after another; one that cannot be loaded fails with its settings.

        Raises:
            OutriderError: Not even the first one, which has no drafter, can be loaded.
        """
        for number, job in enumerate(self.jobs):
            self.tell(f"loading {job.method}" if number else "loading the target", 0)
            try:
                llm = LLM(**job.arguments)
            except FAULTS as error:
                if not number:
                    raise
                self.outcome.fail(job.settings, f"{type(error).__name__}: {error}")
                self.tell(f"{job.method} could not be loaded", len(job.settings) * self.plan.repeats)
                continue
            with llm:
                self._measure(llm, job)
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if "transformers" in self.peers and self._place is not None:
            drafts = [one.arguments["speculative_model"] for one in self.jobs if one.method == Method.DRAFT_MODEL]
            source, draft = self.jobs[0].arguments.get("model"), drafts[0] if drafts else None
            measure_transformers(source, draft, self._place, self.prompts, self.plan, self.outcome, self.tell)

    def _measure(self, llm: LLM, job: Job) -> None:
        if not self.prompts:
            self.tell("answering the conversations' first turns", 0)
            self.prompts, notes = local_prompts(llm, self.questions, self.plan.budget)
            self.outcome.notes += notes
            self.facts, self._place = model_facts(llm), (llm.loaded.dtype, llm.loaded.device)
        if job.arguments.get("speculative_model") is not None:
            self.facts["speculative_model"] = str(job.arguments["speculative_model"])
        self.tell(f"warming up {job.method}", 0)
        measure_engine(llm, self.prompts, job.settings, self.plan, self.outcome, self._advance)

    def _advance(self, setting: Setting, repeat: int) -> None:
        what = f"{setting.title}, {setting.concurrency} at a time, temperature {setting.temperature:g}"
        self.tell(f"{what} (turn {repeat + 1} of {self.plan.repeats})", 1)


def model_facts(llm: LLM) -> dict[str, Any]:
    """Say what was measured."""
    speculation, config = llm.engine.speculation, llm.engine.config
    return {
        "name": llm.loaded.name,
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "device": str(llm.loaded.device),
        "verification": str(speculation.verification),
        "exact": config.exact,
        "max_model_len": llm.max_model_len,
    }
