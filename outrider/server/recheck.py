"""Checking a share of live texts again: rerun without speculation while nothing else runs, and compared token by token.

All of it happens in the engine's thread and in memory. Whatever goes wrong here costs a check, never a request; a
request that arrives ends the check that runs, at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outrider.config import Verification
from outrider.proof.gap import gap_of
from outrider.proof.referee import LEAST_NEAR
from outrider.proof.texts import WHOLE, first_difference
from outrider.sampling.params import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.engine.engine import Engine
    from outrider.sequence import Request, Sequence
    from outrider.server.metrics import Metrics
    from outrider.server.settings import ServerSettings

__all__ = ["Rechecks"]

logger = logging.getLogger("outrider")
SCOPE = "\0recheck"  # no key's name: a check starts from nothing that the text itself left in the cache
LAST = 2**31 - 1  # the priority of what may wait


@dataclass(frozen=True)
class _Told:
    """A text that a client was given: its request without a drafter, which sample, its tokens and its end."""

    request: Request
    index: int
    tokens: tuple[int, ...]
    finish_reason: str | None

    @property
    def weight(self) -> int:
        """Tokens that are kept."""
        return len(self.request.prompt_token_ids) + len(self.tokens)


@dataclass(frozen=True)
class _Running:
    """A check under way; `place` is set where only the scores at that place are still asked for."""

    told: _Told
    sequence: Sequence
    place: int | None = None


class Rechecks:
    """Texts that wait to be checked, and the one that is.

    Args:
        engine: Runs them.
        sequences: Makes a request's sequences.
        settings: The share, and bounds on what waits.
        metrics: Counts what comes of it.

    Attributes:
        accepting: Whether texts are taken in: not before the server's own trial is over, nor once it stops.
    """

    def __init__(
        self,
        engine: Engine,
        sequences: Callable[[Request], list[Sequence]],
        settings: ServerSettings,
        metrics: Metrics,
    ) -> None:
        self._engine, self._sequences, self._settings, self._metrics = engine, sequences, settings, metrics
        self._waiting: deque[_Told] = deque()
        self._weight = 0
        self._running: _Running | None = None
        self.accepting = False

    @property
    def active(self) -> int:
        """How many of the texts that the engine runs are checks."""
        return int(self._running is not None and self._running.sequence.slot is not None)

    def offer(self, sequences: list[Sequence]) -> None:
        """Take in the share that is wanted of texts that were handed out."""
        for sequence in sequences:
            if not self.accepting or not _chosen(sequence, self._settings.verify_rate):
                continue
            reason = self._why_not(sequence)
            if reason is not None:
                self._metrics.verify_skipped.labels(reason).inc()
                continue
            request = replace(sequence.request, drafter=None, scope=SCOPE)
            self._wait(_Told(request, sequence.index, tuple(sequence.output), sequence.finish_reason))

    def begin(self) -> bool:
        """Start the next check, now that nothing else runs; say whether there is one."""
        while self._waiting and self._running is None:
            told = self._waiting.popleft()
            self._weight -= told.weight
            params = told.request.params.but(speculation="off", priority=LAST, logprobs=None, prompt_logprobs=None)
            try:
                again = replace(told.request, params=params, arrival=time.perf_counter())
                self._run(_Running(told, self._sequences(again)[told.index]))
            except Exception as error:  # noqa: BLE001 - a check's fault ends the check alone
                self._drop("failed", type(error).__name__)
        return self._running is not None

    def look(self) -> None:
        """See whether the check that runs has ended, and what came of it."""
        running = self._running
        if running is None or not running.sequence.finished:
            return
        self._running = None
        try:
            if running.place is None:
                self._compare(running)
            else:
                _log(running.told, running.place, _gap(running))
        except Exception as error:  # noqa: BLE001 - as above
            self._drop("failed", type(error).__name__)

    def give_up(self) -> None:
        """Make room at once: a request has come. The check waits again, behind the others."""
        running, self._running = self._running, None
        if running is None:
            return
        self._engine.abort(running.sequence)
        if running.place is None:
            self._wait(running.told)
        else:
            _log(running.told, running.place, None)  # it was counted already

    def close(self) -> None:
        """Drop all of them: the server is about to stop."""
        self.accepting = False
        self.give_up()
        while self._waiting:
            self._waiting.popleft()
            self._drop("draining")
        self._weight = 0

    def _why_not(self, sequence: Sequence) -> str | None:
        if self._engine.speculation.verification is not Verification.COUPLED:
            return "verification"
        if sequence.finish_reason not in WHOLE:
            return "unfinished"
        if not any(sequence.ledger.drafted):
            return "no_guesses"
        return None

    def _wait(self, told: _Told) -> None:
        settings = self._settings
        if not self.accepting:
            self._drop("draining")
        elif len(self._waiting) >= settings.max_verify_texts or self._weight + told.weight > settings.max_verify_tokens:
            self._drop("no_room")
        else:
            self._waiting.append(told)
            self._weight += told.weight

    def _drop(self, reason: str, error: str | None = None) -> None:
        self._metrics.verify_dropped.labels(reason).inc()
        if error is not None:
            logger.warning("a text could not be checked again (%s)", error)

    def _run(self, running: _Running) -> None:
        if not running.sequence.finished:  # one of no tokens is
            self._engine.add(running.sequence)
        self._running = running

    def _compare(self, running: _Running) -> None:
        told, again = running.told, running.sequence
        if again.finish_reason not in WHOLE:
            self._drop("failed")
            return
        place = first_difference(told.tokens, again.output)
        if place is None and told.finish_reason == again.finish_reason:
            self._metrics.verified.inc()
            return
        self._metrics.mismatched.inc()
        if place is None or place >= min(len(told.tokens), len(again.output)) or _ruled(told.request):
            _log(told, len(told.tokens) if place is None else place, None)
            return
        self._probe(running, place)

    def _probe(self, running: _Running, place: int) -> None:
        """Ask for the scores at the place where texts part."""
        told = running.told
        prefix = (*told.request.prompt_token_ids, *told.tokens[:place])
        params = running.sequence.request.params.but(
            n=1, max_tokens=1, min_tokens=0, stop=(), logprobs=MAX_LOGPROBS, prompt_logprobs=None
        )
        request = running.sequence.request
        asked = replace(request, prompt=None, prompt_token_ids=prefix, params=params, end_ids=frozenset())
        try:
            [sequence] = self._sequences(asked)
        except Exception:
            _log(told, place, None)
            raise
        # What differs is kept: the token that the check gave stands in `again`, the client's in `told`.
        self._run(_Running(replace(told, tokens=(told.tokens[place], running.sequence.output[place])), sequence, place))


def _chosen(sequence: Sequence, rate: float) -> bool:
    """Choose by a hash of the text's name, so that neither its content nor its time matter."""
    name = f"{sequence.request.id}/{sequence.index}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < rate * 2**64


def _ruled(request: Request) -> bool:
    """Whether more than scores and filters decided: a gap would say nothing then."""
    return request.grammar is not None or bool(request.bad_words) or request.params.min_tokens > 0


def _gap(running: _Running) -> float | None:
    """Tell how much logits must change so that either token would be taken; None where neither tells."""
    report = running.sequence.logprobs
    if not report:
        return None
    known = {**report[0].top, report[0].token_id: report[0].logprob}
    client, check = running.told.tokens
    if client not in known or check not in known:
        return None
    scores = torch.full((max(known) + 1,), float("-inf"))
    scores[torch.tensor(list(known))] = torch.tensor(list(known.values()))
    params = running.told.request.params
    length = len(running.told.request.prompt_token_ids)
    prefix = running.sequence.request.prompt_token_ids
    return gap_of(scores, prefix, (client, check), params, LEAST_NEAR, length, running.told.index).reach


def _log(told: _Told, place: int, gap: float | None) -> None:
    """Say where a text was another one without speculation: numbers alone, nothing of the text."""
    told_gap = "not known" if gap is None else f"{gap:.4f} of a logit"
    logger.warning(
        "request %s: without speculation token %d is another one, gap %s (beyond rounding it is a defect: see "
        "docs/proof.md)",
        told.request.id, place, told_gap,
    )  # fmt: skip
