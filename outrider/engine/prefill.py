"""Feeding prompts: whatever of a sequence the target's cache lacks, in chunks, before it can take part in rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.outputs import TokenLogprob
from outrider.sampling.choose import logprobs

if TYPE_CHECKING:
    from outrider.config import EngineConfig
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["PromptFeeder"]

PROMPT_LOGPROB_CHUNK = 64  # tokens whose logits over the whole vocabulary are held at once


class PromptFeeder:
    """Feeds sequences to the target, oldest first, one chunk's worth of tokens a step.

    On a card, short prompts that arrive together share a pass: it costs as much as one of them alone. In exact mode
    each is fed by itself, in chunks whose borders depend on the prompt alone.
    """

    def __init__(self, runner: Runner, state: DeviceState, config: EngineConfig) -> None:
        self._runner, self._state = runner, state
        self._size = config.prefill_chunk_size
        self._together = runner.device.type == "cuda" and not config.exact

    def feed(self, running: list[Sequence]) -> None:
        """Feed one step's worth of what the target's cache lacks."""
        budget = self._size
        lacking = [sequence for sequence in running if sequence.uncached > 0]
        if self._together:
            budget -= self._feed_together(lacking)
        for sequence in lacking:
            if budget <= 0:
                return
            if sequence.uncached > 0:
                budget -= self._feed(sequence, budget)

    def _feed_together(self, lacking: list[Sequence]) -> int:
        """Feed whole prompts in one pass, the shorter ones padded; give what that took of the budget.

        What a shorter row is fed beyond its prompt is not counted as cached, and so fed again before it is read.
        """
        group: list[Sequence] = []
        for sequence in lacking:
            if sequence.cached or _reports(sequence):
                continue
            longest = max(one.uncached for one in [*group, sequence])
            if longest * (len(group) + 1) > self._size:
                break
            group.append(sequence)
        if len(group) < 2:
            return 0
        longest = max(one.uncached for one in group)
        rows = self._state.gather(group)
        positions = torch.arange(longest, device=self._runner.device).expand(len(group), -1)
        self._runner.feed(rows.tokens[:, :longest], positions, rows.tables, longest, None)
        for sequence in group:
            sequence.cached = len(sequence) - 1
        return longest * len(group)

    def _feed(self, sequence: Sequence, budget: int) -> int:
        """Feed one chunk. Chunks end at multiples of the chunk size, so their shape depends on the prompt alone."""
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
        report = logprobs(logits[:, : len(following)], taken, sequence.request.params.prompt_logprobs or 0)
        for at, token in enumerate(following):
            top = dict(zip(report.top_ids[0, at].tolist(), report.top[0, at].tolist(), strict=True))
            sequence.prompt_logprobs.append(TokenLogprob(token, float(report.taken[0, at]), top))


def _reports(sequence: Sequence) -> bool:
    return sequence.request.params.prompt_logprobs is not None
