"""Feeding prompts: whatever of a sequence the target's cache lacks, in chunks, before it can take part in rounds."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_DRAFT_TOKENS
from outrider.draft.catching_up import Run
from outrider.engine.choice import Traffic
from outrider.outputs import TokenLogprob
from outrider.sampling.choose import logprobs

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.engine.scheduler import Scheduler
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["PromptFeeder"]

NARROW = MAX_DRAFT_TOKENS + 1  # tokens a row that pass for a round's: kernels then let rows begin anywhere
LEAST_CHUNK = 64  # tokens of a prompt that are worth a pass of their own
CROWDED = 0.7  # of the rounds lately: where prompts are read beside more of them, texts wait for prompts
SOON = 32  # rounds within which prompts are read that count as coming
PROMPT_LOGPROB_CHUNK = 64  # tokens whose logits over the whole vocabulary are held at once


class PromptFeeder:
    """Feeds sequences to the target, one chunk's worth of tokens a step.

    The most important go first, and among equals those that lack least: a short prompt does not wait for a long one.
    Every second step begins with whoever came first, so that a long prompt is read, too, however many short ones come.

    A quarter of a chunk is read at a time while others decode: they wait for it, and a smaller pass costs little more.

    On a card, short prompts that arrive together share a pass: it costs as much as one of them alone. Of those that
    begin alike one is fed first, and the others take over what it has computed. In exact mode
    each is fed by itself, in chunks whose borders depend on the prompt alone.
    """

    def __init__(self, runner: Runner, state: DeviceState, config: EngineConfig, scheduler: Scheduler) -> None:
        self._runner, self._state, self._scheduler = runner, state, scheduler
        self._oldest_first = False
        self._fed = False  # in this step
        self._crowded = 0.0  # share of the rounds lately beside which prompts were read
        self._size = self._longest = self._shorter = config.prefill_chunk_size
        if not config.exact:
            self._shorter = min(self._longest, max(self._longest // 4, LEAST_CHUNK))
        self._together = runner.device.type == "cuda" and not config.exact

    def feed(self, running: list[Sequence]) -> None:
        """Feed one step's worth of what the target's cache lacks: less where somebody waits for the round after it."""
        waited_for = any(sequence.uncached == 0 for sequence in running)
        self._size = self._shorter if waited_for else self._longest
        budget = self._size
        lacking = self._in_turn([sequence for sequence in running if sequence.uncached > 0])
        self._fed = bool(lacking)
        if self._together:
            budget -= self._feed_together(self._fresh(lacking), budget)
            for sequence in lacking:
                self._scheduler.reuse(sequence)
            rests = [one for one in lacking if one.cached and 0 < one.uncached <= NARROW and not _reports(one)]
            budget -= self._feed_together(rests, budget)
        for sequence in lacking:
            if budget <= 0:
                return
            self._scheduler.reuse(sequence)
            if sequence.uncached > 0:
                budget -= self._feed(sequence, budget)
                if sequence.finished:  # a fault of its own
                    self._scheduler.retire(sequence)
                else:
                    self._scheduler.share(sequence)

    def traffic(self) -> Traffic:
        """Tell what is read beside rounds; asked for once before each.

        Where prompts are read beside nearly all rounds, a row whose text ends sooner stands idle until the next one's
        prompt has its turn. That somebody waits is no sign of it: if all keep pace nobody does, and where there is no
        room left nobody's prompt is read.
        """
        running = self._scheduler.running
        fresh = [max(1, one.prompt_length - one.reused) for one in running]
        each = [1 / (self._shorter // n) if n <= self._shorter else n / self._shorter for n in fresh]
        rounds = sum(each) * (1 - 1 / len(each))
        self._crowded += (self._fed - self._crowded) / (rounds + 1)
        lacking = accumulate(sorted(one.uncached for one in running if one.uncached > 0))
        coming = sum(tokens <= SOON * self._shorter for tokens in lacking)
        return Traffic(rounds if self._crowded > CROWDED else 0.0, coming)

    def _in_turn(self, lacking: list[Sequence]) -> list[Sequence]:
        """Put those that lack something in the order in which they are fed in this step."""
        lacking.sort(key=lambda one: (one.priority, one.uncached, one.number))
        self._oldest_first = len(lacking) > 1 and not self._oldest_first
        if self._oldest_first:
            oldest = min(lacking, key=lambda one: one.number)
            lacking.remove(oldest)
            lacking.insert(0, oldest)
        return lacking

    def _fresh(self, lacking: list[Sequence]) -> list[Sequence]:
        """Pick those of which nothing is cached yet, and one of those that could share what it computes."""
        fresh: list[Sequence] = []
        beginnings: set[bytes] = set()
        for sequence in lacking:
            beginning = self._scheduler.beginning(sequence)
            if not sequence.cached and not _reports(sequence) and beginning not in beginnings:
                fresh.append(sequence)
                beginnings |= set() if beginning is None else {beginning}
        return fresh

    def _feed_together(self, wanted: list[Sequence], budget: int) -> int:
        """Feed all that some sequences lack in one pass, the shorter ones padded; give what that took of the budget.

        What a shorter row is fed beyond its text is not counted as cached, and so fed again before it is read.
        """
        group: list[Sequence] = []
        for sequence in wanted:
            longest = max(one.uncached for one in [*group, sequence])
            if longest * (len(group) + 1) > budget:
                break
            group.append(sequence)
        if len(group) < 2:
            return 0
        longest, rows = max(one.uncached for one in group), self._state.gather(group)
        run = Run([*range(len(group))], [one.cached for one in group], longest)
        positions = run.positions(self._state.tokens.shape[1] - 1, self._runner.device)
        tokens = rows.tokens.gather(1, positions.clamp(max=rows.tokens.shape[1] - 1))
        self._runner.feed(tokens, positions, rows.tables, run.context, None)
        for sequence in group:
            sequence.cached = len(sequence) - 1
            self._scheduler.share(sequence)
        return longest * len(group)

    def _feed(self, sequence: Sequence, budget: int) -> int:
        """Feed one chunk. Chunks end at multiples of their size: in exact mode shapes depend on the prompt alone."""
        size, begin = self._size, sequence.cached
        end = min(len(sequence) - 1, (begin // size + 1) * size)
        if end - begin > budget and budget < size:
            return budget  # what is left of this step's budget does not hold the chunk
        reports = _reports(sequence) and begin < sequence.prompt_length - 1
        if reports:
            end = min(end, begin + PROMPT_LOGPROB_CHUNK)
        rows = self._state.gather([sequence])
        positions = torch.arange(begin, end, device=self._runner.device)[None]
        fed = (rows.tokens[:, begin:end], positions, rows.tables, end, rows.start)
        if reports:
            self._report(sequence, self._runner.forward(*fed), begin, end)
        else:
            self._runner.feed(*fed)
        sequence.cached = end
        return end - begin

    def _report(self, sequence: Sequence, logits: torch.Tensor, begin: int, end: int) -> None:
        """Note the log-probabilities of the prompt tokens after `begin`, once (not again after a preemption)."""
        known = len(sequence.prompt_logprobs) - 1
        following = sequence.request.prompt_token_ids[begin + 1 : end + 1]
        if known > begin or not following:
            return
        taken = torch.tensor([following], device=logits.device)
        if bool(logits[:, : len(following)].isnan().any()):
            sequence.fail("FloatingPointError: the target's logits are not numbers (NaN)")
            return
        report = logprobs(logits[:, : len(following)], taken, sequence.request.params.prompt_logprobs or 0)
        for at, token in enumerate(following):
            top = dict(zip(report.top_ids[0, at].tolist(), report.top[0, at].tolist(), strict=True))
            sequence.prompt_logprobs.append(TokenLogprob(token, float(report.taken[0, at]), top))


def _reports(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None
