"""The engine: admits requests, feeds prompts, runs rounds, and hands out what they gave.

One call of `step` is one turn of everything: feed some prompt tokens, then one round for every row that is ready. The
engine decides on the host who takes part and how far to draft; the round itself decides nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from outrider.config import MAX_DRAFT_TOKENS, EngineConfig, SpeculationConfig, Verification
from outrider.engine.round import RoundPlan, RoundResult, propose, verify
from outrider.engine.scheduler import Scheduler
from outrider.engine.speculator import Speculator
from outrider.engine.state import DeviceState
from outrider.model.kv_cache import BlockPool
from outrider.outputs import TokenLogprob
from outrider.sampling.choose import logprobs

if TYPE_CHECKING:
    from outrider.draft.drafter import Drafter
    from outrider.model.runner import Runner
    from outrider.sequence import Sequence

__all__ = ["Engine", "EngineFigures"]

logger = logging.getLogger("outrider")
LEAST_CATCH_UP = 16  # tokens a step that lagging drafts may feed: more than a step adds, so that they do catch up
PROMPT_LOGPROB_CHUNK = 64  # tokens whose logits over the whole vocabulary are held at once


class EngineFigures:
    """What the engine counted since it started."""

    def __init__(self) -> None:
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.tokens = 0
        self.propose_seconds = 0.0
        self.verify_seconds = 0.0


class Engine:
    """Runs sequences to their end over one target and any number of drafters.

    Args:
        runner: The target, its cache allocated.
        drafter: Guesses for every sequence that brings no drafter of its own; None decodes plainly.
        config: Sizes; ``config.max_model_len`` is set.
        speculation: Draft length and verification.
        num_blocks: Cache blocks, as the runners were allocated with.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None,
        config: EngineConfig,
        speculation: SpeculationConfig,
        num_blocks: int,
    ) -> None:
        assert config.max_model_len is not None
        self.runner = runner
        self.config = config
        self.speculation = speculation
        self.figures = EngineFigures()
        self._lookahead = lookahead = MAX_DRAFT_TOKENS
        if config.exact:  # every round has the same width
            self._lookahead = lookahead = speculation.num_speculative_tokens
        self.state = DeviceState(config.max_num_seqs, config.max_model_len, lookahead, runner.device)
        self.speculator = Speculator(
            runner,
            self.state,
            drafter,
            num_tokens=speculation.num_speculative_tokens,
            longest=lookahead,
            independent=speculation.verification.draws_guesses,
            adaptive=not config.exact,
        )
        self.scheduler = Scheduler(
            self.state, BlockPool(num_blocks), self.speculator.release, reserve=lookahead if config.exact else None
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Do once what would otherwise delay the first request."""
        self.speculator.prepare()

    @property
    def drafter(self) -> Drafter | None:
        """What drafts for sequences that bring no drafter of their own."""
        return self.speculator.drafter

    @property
    def longest_draft(self) -> int:
        """Guesses a round that a request may ask for at most."""
        return self._lookahead

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.speculator.meet(sequence.request.drafter)
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; nothing is computed for it any more."""
        if not sequence.finished:
            sequence.finish("abort")
            self.scheduler.retire(sequence)

    @torch.inference_mode()
    def step(self) -> None:
        """Feed prompts, then run one round."""
        self.scheduler.admit()
        self._feed_prompts()
        ready = [one for one in self.scheduler.running if one.uncached == 0]
        # Oldest first: what one row needs may send away younger ones, which then no longer run.
        ready = [one for one in ready if one.slot is not None and self.scheduler.secure(one)]
        if not ready:
            return
        plan = self._plan(ready)
        began = time.perf_counter()
        proposal, served = propose(plan, self.runner.vocab_size, self.speculator.failed)
        if not plan.fixed_width and self.runner.device.type == "cpu":
            proposal = proposal.narrowed(int(proposal.lengths.max()))
        middle = time.perf_counter()
        result = verify(plan, proposal, self.runner, self.state)
        self.speculator.tell(served, plan, result.acceptance)
        self._collect(ready, result)
        self.figures.propose_seconds += middle - began
        self.figures.verify_seconds += time.perf_counter() - middle

    def _feed_prompts(self) -> None:
        """Feed what the target's cache lacks, oldest first, one chunk's worth a step."""
        budget = self.config.prefill_chunk_size
        for sequence in self.scheduler.running:
            if budget <= 0:
                return
            if sequence.uncached > 0:
                budget -= self._feed(sequence, budget)

    def _feed(self, sequence: Sequence, budget: int) -> int:
        """Feed one chunk. Chunks end at multiples of the chunk size, so their shape depends on the prompt alone."""
        size = self.config.prefill_chunk_size
        begin = sequence.cached
        end = min(len(sequence) - 1, (begin // size + 1) * size)
        if end - begin > budget and budget < size:
            return budget  # what is left of this step's budget does not hold the chunk
        reports = sequence.request.params.prompt_logprobs is not None and begin < sequence.prompt_length - 1
        if reports:
            end = min(end, begin + PROMPT_LOGPROB_CHUNK)
        rows = self.state.gather([sequence])
        positions = torch.arange(begin, end, device=self.runner.device)[None]
        fed = (rows.tokens[:, begin:end], positions, rows.tables, end, rows.start)
        if reports:
            self._report_prompt(sequence, self.runner.forward(*fed), begin, end)
        else:
            self.runner.feed(*fed)
        sequence.cached = end
        return end - begin

    def _report_prompt(self, sequence: Sequence, logits: torch.Tensor, begin: int, end: int) -> None:
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

    def _plan(self, ready: list[Sequence]) -> RoundPlan:
        """Decide how far to draft for each row, and with which drafter."""
        wanted = self.speculator.lengths(ready, max(self.config.prefill_chunk_size, LEAST_CATCH_UP))
        for place, sequence in enumerate(ready):
            if wanted[place] and not self.scheduler.grow(sequence, len(sequence) + wanted[place]):
                wanted[place] = 0  # no room for guesses: decode plainly rather than send somebody away
        exact = self.config.exact
        num_tokens = self._lookahead if exact else max(wanted)
        rows = self.state.gather(ready, pad_to=self.config.max_num_seqs if exact else 0, room=num_tokens + 1)
        asked = [one.request.params.logprobs for one in ready if one.request.params.logprobs is not None]
        return RoundPlan(
            rows=rows,
            allowance=torch.tensor(wanted + [0] * (len(rows.slots) - len(ready)), device=self.state.device),
            num_tokens=num_tokens,
            drafting=self.speculator.shares(ready, wanted),
            verification=self.speculation.verification,
            num_logprobs=max(asked) if asked else None,
            fixed_width=exact,
        )

    def _collect(self, ready: list[Sequence], result: RoundResult) -> None:
        """Read a round back: append tokens up to each sequence's end, keep the books, let go of what is finished."""
        tokens = result.acceptance.tokens.tolist()
        accepted = result.acceptance.num_accepted.tolist()
        drafted = result.proposal.lengths.tolist()
        now = time.perf_counter()
        broken = result.broken.tolist()
        report = None if result.logprobs is None else [one.tolist() for one in result.logprobs]
        for row, sequence in enumerate(ready):
            try:
                if broken[row]:
                    raise FloatingPointError("the target's logits are not numbers (NaN)")
                kept = self._append(sequence, tokens[row], accepted[row], drafted[row], now)
                if report is not None and sequence.request.params.logprobs is not None:
                    _report(sequence, [column[row][:kept] for column in report])
                self._book(sequence, drafted[row], accepted[row], kept)
            except Exception as error:
                logger.exception("request %s failed and is ended; others go on", sequence.request.id)
                sequence.fail(f"{type(error).__name__}: {error}")
            if sequence.finished:
                self.scheduler.retire(sequence)
        self.figures.rounds += 1

    def _book(self, sequence: Sequence, drafted: int, accepted: int, kept: int) -> None:
        """Count a round. Where the text ended among the accepted guesses, those behind its end are not counted."""
        if kept <= accepted:
            drafted = accepted = kept
        sequence.ledger.record(drafted, accepted)
        sequence.cached = len(sequence) - 1
        self.speculator.learn(sequence, drafted, accepted)
        self.figures.drafted += drafted
        self.figures.accepted += accepted
        self.figures.tokens += kept

    def _append(self, sequence: Sequence, tokens: list[int], accepted: int, drafted: int, now: float) -> int:
        """Append a round's tokens until the sequence ends; give how many it took."""
        sequence.lossy |= self.speculation.verification is Verification.TYPICAL and drafted > 0
        last = "plain" if drafted == 0 else "bonus" if accepted == drafted else "recovered"
        for place, token in enumerate(tokens[: accepted + 1]):
            sequence.append(token, "accepted" if place < accepted else last, now)
            if sequence.finished:
                return place + 1
        return accepted + 1


def _report(sequence: Sequence, columns: list[list[Any]]) -> None:
    num_top = sequence.request.params.logprobs or 0
    begin = len(sequence.logprobs)
    for token, taken, ids, values in zip(sequence.output[begin:], *columns, strict=True):
        sequence.logprobs.append(TokenLogprob(token, taken, dict(zip(ids[:num_top], values[:num_top], strict=True))))
