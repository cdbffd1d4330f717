"""One setting measured once: so many texts under way at a time, and when each of their tokens came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.sampling.params import SamplingParams
from outrider.sequence import output_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.llm import LLM
    from outrider.outputs import RequestOutput, SpeculationStats
    from outrider.sequence import Request, Sequence

__all__ = ["OFF", "Budget", "Reply", "Setting", "Trial", "measured", "params_of"]

OFF = "off"  # the draft length of plain decoding


@dataclass(frozen=True)
class Setting:
    """What is varied.

    Attributes:
        engine: "outrider", "server" or "transformers".
        method: Where guesses come from; "none" for an engine without a drafter.
        length: Guesses a round, "auto", or "off" for plain decoding on the same engine.
        concurrency: Texts under way at a time.
        temperature: 0 is greedy.
    """

    engine: str
    method: str
    length: int | str
    concurrency: int
    temperature: float

    @property
    def plain(self) -> bool:
        """Whether it decodes without guesses."""
        return self.length == OFF

    @property
    def title(self) -> str:
        """Its name for people, without what all rows of a table share."""
        told = self.method if self.method == "none" else f"{self.method} {self.length}"
        if self.engine != "transformers":
            return told
        return f"transformers {'plain' if self.plain else told}"


@dataclass(frozen=True)
class Budget:
    """How much each text may take, and from which seed texts are drawn."""

    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class Reply:
    """One text.

    Attributes:
        kind: Of its question.
        tokens: How many.
        seconds, first_seconds: From the request to the last and to the first token; None where none came.
        gaps: Seconds between deliveries; a round's tokens are one delivery, as a reader sees them.
        stats: What the engine counted; None of others' engines.
        output: What Outrider gave; None of others.
        text: Of a server, which tells no token ids.
        error: Why there is no whole text.
    """

    kind: str
    tokens: int
    seconds: float
    first_seconds: float | None
    gaps: tuple[float, ...]
    stats: SpeculationStats | None = None
    output: RequestOutput | None = None
    text: str | None = None
    error: str | None = None

    @property
    def token_seconds(self) -> float | None:
        """Seconds a token after the first delivery; None where there was only one."""
        if self.first_seconds is None or self.tokens < 2 or not self.gaps:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


@dataclass(frozen=True)
class Trial:
    """A setting, once over all prompts.

    Attributes:
        seconds: From the first request to the last token.
        parts: Seconds that drafting, verifying and all steps took, where the engine can tell them apart.
    """

    setting: Setting
    repeat: int
    seconds: float
    replies: tuple[Reply, ...]
    parts: tuple[float, float, float] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(one.tokens for one in self.replies)

    @property
    def rate(self) -> float:
        """Tokens a second, reading the prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> list[str]:
        """Of texts that failed."""
        return [one.error for one in self.replies if one.error is not None]


def params_of(setting: Setting, budget: Budget, place: int) -> SamplingParams:
    """Give the parameters of the prompt at `place`: the same seed under every setting."""
    return SamplingParams(
        temperature=setting.temperature,
        max_tokens=budget.max_tokens,
        seed=budget.seed + place,
        ignore_eos=budget.ignore_eos,
        speculation=setting.length,  # type: ignore[arg-type]  # checked there
    )


@dataclass
class _Running:
    """A text under way, and when how many of its tokens had come."""

    place: int
    request: Request
    sequence: Sequence
    given: int = 0
    times: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Note what is new."""
        if self.sequence.num_generated > self.given:
            self.given = self.sequence.num_generated
            self.times.append(time.perf_counter())

    def reply(self, kind: str) -> Reply:
        """Give what came of it."""
        output, stats = output_of(self.request, [self.sequence]), self.sequence.stats
        gaps = tuple(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))
        first = stats.first_token_seconds if self.times else None
        return Reply(kind, stats.tokens, stats.seconds, first, gaps, stats, output, error=self.sequence.error)


def measured(llm: LLM, prompts: Seq[tuple[str, Any]], setting: Setting, budget: Budget, repeat: int = 0) -> Trial:
    """Run all prompts, `setting.concurrency` of them at a time, each next one as soon as one has ended.

    Args:
        llm: The engine; it does nothing else meanwhile.
        prompts: Kind and prompt, as `LLM.generate` takes it.
        setting: What to measure.
        budget: Tokens and seeds.
        repeat: Which turn it is.
    """
    engine, figures = llm.engine, llm.engine.figures
    before = figures.propose_seconds, figures.verify_seconds, figures.step_seconds
    running: list[_Running] = []
    replies: dict[int, Reply] = {}
    following = 0
    began = time.perf_counter()
    try:
        while following < len(prompts) or running:
            while following < len(prompts) and len(running) < setting.concurrency:
                request = llm.intake.request(prompts[following][1], params_of(setting, budget, following))
                (sequence,) = llm.intake.sequences(request)
                if not sequence.finished:
                    engine.add(sequence)
                running.append(_Running(following, request, sequence))
                following += 1
            engine.step()
            for one in running:
                one.look()
            for one in [one for one in running if one.sequence.finished]:
                running.remove(one)
                replies[one.place] = one.reply(prompts[one.place][0])
    finally:
        for one in running:
            engine.abort(one.sequence)
    seconds = time.perf_counter() - began
    after = figures.propose_seconds, figures.verify_seconds, figures.step_seconds
    draft, verify, step = (later - earlier for earlier, later in zip(before, after, strict=True))
    # On a card captured rounds are one piece: nobody can say what of them was drafting.
    parts = (draft, verify, step) if verify and llm.loaded.device.type == "cpu" else None
    return Trial(setting, repeat, seconds, tuple(replies[place] for place in sorted(replies)), parts)
