"""A request and the sequences that answer it, as the host sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.outputs import (
    Completion,
    RequestOutput,
    SpeculationStats,
    StreamChunk,
    TokenLogprob,
    TokenOrigin,
)

if TYPE_CHECKING:
    from outrider.sampling.params import SamplingParams

__all__ = ["Ledger", "Request", "Sequence", "output_of"]


@dataclass(frozen=True)
class Request:
    """What one caller asked for, checked and ready to run.

    Attributes:
        id: Names the request in outputs and errors.
        prompt: Its text, where it came as text.
        prompt_token_ids: Its ids, at least one.
        params: How to sample; the seed is set.
        end_ids: Ids that end the text: end-of-sequence (unless ignored) and the request's own.
        own_stop_ids: Those of them that the request named.
        bad_words: Token sequences not to be completed.
        grammar: What its text must follow, compiled.
        drafter: A drafter for this request alone.
        scope: Whose it is, such as an API key's name: drafters share texts within a scope alone.
    """

    id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    own_stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Any = None
    drafter: Any = None
    scope: str = ""
    arrival: float = field(default_factory=time.perf_counter)


class Ledger:
    """Counts one sequence's rounds and guesses."""

    def __init__(self) -> None:
        self.rounds = 0
        self.drafted: list[int] = []  # by position, as are the other two
        self.reached: list[int] = []
        self.accepted: list[int] = []
        self.by_part: dict[str, tuple[int, int]] = {}

    def record_parts(self, names: tuple[str, ...], counts: list[tuple[int, int]]) -> None:
        """Book what each part of a mixture guessed in a round, and how much of it was accepted."""
        for name, (made, right) in zip(names, counts, strict=True):
            before = self.by_part.get(name, (0, 0))
            self.by_part[name] = before[0] + made, before[1] + right

    def record(self, drafted: int, accepted: int) -> None:
        """Book one round."""
        self.rounds += 1
        for column in (self.drafted, self.reached, self.accepted):
            column.extend([0] * (drafted - len(column)))
        for position in range(drafted):
            self.drafted[position] += 1
            self.reached[position] += position <= accepted
            self.accepted[position] += position < accepted


class Sequence:
    """One text in the making: its tokens, its blocks, and how it came along.

    Attributes:
        request: What it answers.
        index: Which of the request's n samples.
        tokens: Prompt and output.
        slot: Its row in the device state; None while it waits.
        blocks: Cache blocks it owns.
        cached: Tokens that the target's cache holds.
        limit: Length at which it must end.
        ahead: Tokens that a round under way will add at most; 0 where none is.
        constraint: Where it stands in its grammar; None without one.
        shared: Tokens, in whole blocks, that others were let know of.
        number: Its place in the order of arrival.
        reused: Tokens of the prompt that the cache held already.
        returned: Whether it was sent away to make room, and its tokens are fed for a second time.
    """

    def __init__(self, request: Request, index: int, limit: int, detokenizer: Any, constraint: Any = None) -> None:
        self.request = request
        self.index = index
        self.limit = limit
        self.detokenizer = detokenizer
        self.constraint = constraint
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.cached = 0
        self.ahead = 0
        self.shared = 0
        self.number = 0
        self.reused = 0
        self.returned = False
        self.ledger = Ledger()
        self.origins: list[TokenOrigin] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.lossy = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> list[int]:
        """Generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def uncached(self) -> int:
        """Tokens to feed before the next round: all that are not cached, but for the last, which a round feeds."""
        return len(self.tokens) - 1 - self.cached

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt must be fed for the sake of a report on it."""
        return self.request.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    @property
    def priority(self) -> int:
        """How important it is; lower is more."""
        return self.request.params.priority

    @property
    def reach(self) -> int:
        """Tokens at most, once the round under way is done."""
        return min(len(self.tokens) + self.ahead, self.limit)

    @property
    def may_end(self) -> bool:
        """Whether the round under way may make it as long as it may be."""
        return self.ahead > 0 and self.reach >= self.limit

    @property
    def surely_ends(self) -> bool:
        """Whether the round under way does so in any case: a plain one."""
        return self.ahead == 1 and self.may_end

    @property
    def settled(self) -> int:
        """Tokens that it surely has on the device now: a plain round under way adds exactly one."""
        return len(self.tokens) + (self.ahead == 1)

    def append(self, token: int, origin: TokenOrigin, now: float) -> None:
        """Take in one committed token, and end the sequence where it must end."""
        self.tokens.append(token)
        self.origins.append(origin)
        if self.first_token_at is None:
            self.first_token_at = now
        watch = self.num_generated > self.request.params.min_tokens
        is_end = token in self.request.end_ids and watch
        stop = self.detokenizer.push(token, watch=watch)
        if is_end and stop is None:
            self.finish("stop", token if token in self.request.own_stop_ids else None, now)
        elif stop is not None:
            self.finish("stop", stop, now)
        elif self._completes_grammar(token):
            self.finish("stop", None, now)
        elif len(self.tokens) >= self.limit:
            self.finish("length", None, now)

    def _completes_grammar(self, token: int) -> bool:
        """Go on in the grammar, if there is one; say whether the text is over."""
        if self.constraint is None:
            return False
        self.constraint.advance(token)
        return bool(self.constraint.over)

    def finish(self, reason: str, stop_reason: str | int | None = None, now: float | None = None) -> None:
        """End the sequence."""
        if reason != "stop" or not isinstance(stop_reason, str):
            stop = self.detokenizer.finish()
            if stop is not None and reason != "abort":
                reason, stop_reason = "stop", stop
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.finished_at = time.perf_counter() if now is None else now

    def ended_at_limit(self) -> bool:
        """End a sequence that has no room for another token (max_tokens 0); say whether it was one."""
        if not self.finished and len(self.tokens) >= self.limit:
            self.finish("length")
        return self.finished

    def fail(self, error: str) -> None:
        """End the sequence for a fault of its own; the text so far stands."""
        self.finish_reason, self.error = "error", error
        self.finished_at = time.perf_counter()

    @property
    def stats(self) -> SpeculationStats:
        """The figures so far."""
        now = self.finished_at or time.perf_counter()
        ledger, arrival = self.ledger, self.request.arrival
        return SpeculationStats(
            rounds=ledger.rounds,
            drafted=sum(ledger.drafted),
            accepted=sum(ledger.accepted),
            drafted_per_position=tuple(ledger.drafted),
            reached_per_position=tuple(ledger.reached),
            accepted_per_position=tuple(ledger.accepted),
            tokens=self.num_generated,
            seconds=now - arrival,
            first_token_seconds=(self.first_token_at or now) - arrival,
            lossy=self.lossy,
            by_drafter=dict(ledger.by_part),
            cached_tokens=self.reused,
        )

    def completion(self) -> Completion:
        """Give the text as it stands."""
        return Completion(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
            origins=tuple(self.origins),
            stats=self.stats,
            error=self.error,
        )

    def chunk(self, given: int) -> StreamChunk:
        """Give what is new after the first `given` tokens; text in it is settled."""
        text = self.detokenizer.take(final=self.finished)
        return StreamChunk(
            index=self.index,
            text=text,
            token_ids=tuple(self.tokens[self.prompt_length + given :]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs[given:]) if self.request.params.logprobs is not None else None,
            origins=tuple(self.origins[given:]),
            stats=self.stats if self.finished else None,
            error=self.error,
            text_ends=self.detokenizer.ends(given, text),
        )


def output_of(request: Request, sequences: list[Sequence]) -> RequestOutput:
    """Give a request's output from its n sequences."""
    reports = request.params.prompt_logprobs is not None
    return RequestOutput(
        request.id,
        request.prompt,
        request.prompt_token_ids,
        tuple(sequence.completion() for sequence in sequences),
        tuple(sequences[0].prompt_logprobs) if reports else None,
    )
