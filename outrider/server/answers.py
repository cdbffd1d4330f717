"""What all answers have in common: usage, log-probabilities, reasons to finish, ids."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.server.errors import ApiError
from outrider.server.reasoning import Part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from outrider.outputs import SpeculationStats, StreamChunk, TokenLogprob
    from outrider.server.call import Call
    from outrider.server.protocol import StreamOptions
    from outrider.server.reasoning import Reader, Thinking
    from outrider.server.service import Model

__all__ = ["Ledger", "Text", "TokenTexts", "created", "new_id", "streamed"]


def new_id(kind: str) -> str:
    """Name an answer."""
    return f"{kind}-{secrets.token_hex(12)}"


def created() -> int:
    """Give the time as the API has it: seconds."""
    return int(time.time())


@dataclass
class Text:
    """One text as far as it has come.

    Attributes:
        reader: Tells what is thought from what is said; None where all is said.
        thought, said: What it is, without markers.
        news: What the last chunk added to it.
    """

    reader: Reader | None = None
    thought: str = ""
    said: str = ""
    news: list[Part] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: SpeculationStats | None = None

    def take(self, chunk: StreamChunk) -> None:
        """Add a chunk's text."""
        self.news = [Part(chunk.text, thought=False)] if chunk.text else []
        if self.reader is not None:
            self.news = self.reader.push(chunk)
        for part in self.news:
            if part.thought:
                self.thought += part.text
            else:
                self.said += part.text


class Ledger:
    """Takes in a call's chunks, and tells usage.

    Args:
        call: The call; the texts of its jobs are numbered through.
        model: Whose method the usage names.
        thinking: How thoughts are told from the rest, in conversations.
    """

    def __init__(self, call: Call, model: Model, thinking: Thinking | None = None) -> None:
        self._call, self._method = call, model.method
        self._n = len(call.jobs[0].sequences)
        self.texts = [
            Text(None if thinking is None else thinking.reader(job.request)) for job in call.jobs for _ in job.sequences
        ]

    def take(self, place: int, chunk: StreamChunk) -> tuple[int, Text]:
        """Add a chunk of the job at `place`; give the number of its text.

        Raises:
            ApiError: The text failed.
        """
        number = place * self._n + chunk.index
        text = self.texts[number]
        text.take(chunk)
        text.num_tokens += len(chunk.token_ids)
        text.token_ids.extend(chunk.token_ids)
        text.logprobs.extend(chunk.logprobs or ())
        text.finish_reason, text.stats = chunk.finish_reason, chunk.stats or text.stats
        if chunk.finish_reason in ("error", "abort"):
            # What exactly went wrong stands in the log; it may hold what is nobody's business outside.
            raise ApiError(500, "generation_failed", "generating this text failed; other requests are not touched")
        return number, text

    @property
    def completion_tokens(self) -> int:
        """Tokens of all texts so far."""
        return sum(text.num_tokens for text in self.texts)

    def usage(self) -> dict[str, Any]:
        """Give tokens, and what speculation did for them."""
        prompt, completion = self._call.prompt_tokens, self.completion_tokens
        stats = [text.stats for text in self.texts if text.stats is not None]
        drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
        rounds = sum(one.rounds for one in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(text.reader.num_tokens for text in self.texts if text.reader is not None),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "outrider": {
                "method": self._method,
                "rounds": rounds,
                "drafted": drafted,
                "accepted": accepted,
                "tokens_per_round": round(completion / rounds, 3) if rounds else None,
                "drafted_per_position": _added([one.drafted_per_position for one in stats]),
                "accepted_per_position": _added([one.accepted_per_position for one in stats]),
            },
        }

    def _cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held: a prompt counts once, however many texts it has."""
        first = self.texts[:: self._n]
        return sum(text.stats.cached_tokens for text in first if text.stats is not None)


async def streamed(
    call: Call,
    ledger: Ledger,
    options: StreamOptions | None,
    base: dict[str, Any],
    opening: Iterable[dict[str, Any]],
    added: Callable[[int, StreamChunk], Iterable[dict[str, Any]]],
) -> AsyncIterator[tuple[None, dict[str, Any]]]:
    """Give an answer in chunks, with usage as the client wants it.

    Args:
        call, ledger: What runs, and who counts.
        options: What the client said of streams.
        base: What every chunk has.
        opening: Chunks that come before all text.
        added: Gives the chunks for what was added to a text, by its number.
    """
    counting = options is not None and bool(options.include_usage)
    running = options is not None and bool(options.continuous_usage_stats)
    for event in opening:
        yield None, {**event, "usage": None} if counting else event
    async for place, chunk in call.chunks():
        number, _ = ledger.take(place, chunk)
        for event in added(number, chunk):
            if counting or running:
                event["usage"] = ledger.usage() if running else None
            yield None, event
    if counting:
        yield None, {**base, "choices": [], "usage": ledger.usage()}


def _added(columns: list[tuple[int, ...]]) -> list[int]:
    """Add counts by position, however many each has."""
    return [
        sum(column[place] for column in columns if place < len(column))
        for place in range(max(map(len, columns), default=0))
    ]


class TokenTexts:
    """Says what a token is as text and bytes, for log-probabilities.

    Args:
        tokenizer: The target's; None shows ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Give a token's text; half a character shows as U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def chat(self, entries: list[TokenLogprob] | tuple[TokenLogprob, ...], num_top: int) -> dict[str, Any]:
        """Give log-probabilities as chat completions have them."""
        content = []
        for entry in entries:
            top = sorted(entry.top.items(), key=lambda pair: -pair[1])[:num_top]
            content.append(
                {**self._entry(entry.token_id, entry.logprob), "top_logprobs": [self._entry(*pair) for pair in top]}
            )
        return {"content": content, "refusal": None}

    def completion(
        self, entries: list[TokenLogprob] | tuple[TokenLogprob, ...], num_top: int, offset: int
    ) -> dict[str, Any]:
        """Give log-probabilities as completions have them: parallel lists. `offset` is where the text begins."""
        tokens = [self.text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops: list[dict[str, float]] = []
        for entry in entries:
            best = sorted(entry.top.items(), key=lambda pair: -pair[1])[:num_top]
            tops.append({self.text(token): _finite(value) for token, value in [*best, (entry.token_id, entry.logprob)]})
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if num_top else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", errors="replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what cannot come."""
    return max(logprob, -9999.0)
