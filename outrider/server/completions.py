"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.server.answers import Ledger, TokenTexts, created, new_id, streamed
from outrider.server.errors import invalid
from outrider.server.formats import format_grammar
from outrider.server.sampling import sampling_params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outrider.outputs import StreamChunk, TokenLogprob
    from outrider.sampling.params import SamplingParams
    from outrider.server.call import Call
    from outrider.server.protocol import CompletionRequest
    from outrider.server.service import Model
    from outrider.server.settings import ServerSettings

__all__ = ["CompletionAnswer", "completion_params", "prompts_of"]

DEFAULT_TOKENS = 16  # OpenAI's


def prompts_of(asked: CompletionRequest) -> list[str | list[int]]:
    """Give a request's prompts.

    Raises:
        ApiError: There is none.
    """
    given: Any = asked.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("the prompt is empty; send text or token ids", "prompt")
    if all(isinstance(one, int) for one in given):
        return [given]
    return list(given)


def completion_params(asked: CompletionRequest, settings: ServerSettings) -> SamplingParams:
    """Give the sampling parameters of a completion request.

    Raises:
        ApiError: Some value is wrong; it names the field.
    """
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise invalid("best_of other than n is not served; leave it out", "best_of", "unsupported_parameter")
    if asked.echo and asked.stream and asked.logprobs is not None:
        raise invalid("echo with logprobs is not served as a stream; leave one of the three out", "echo")
    return sampling_params(
        asked,
        settings,
        max_tokens=DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
        grammar=format_grammar(asked.response_format),
    )


class CompletionAnswer:
    """The answer to a completion request, whole or in chunks.

    Args:
        asked: The request.
        call: What runs for it.
        model: Who answers.
    """

    def __init__(self, asked: CompletionRequest, call: Call, model: Model) -> None:
        self._asked, self._call = asked, call
        self._ledger = Ledger(call, model)
        self._tokens = TokenTexts(model.llm.tokenizer)
        self._base: dict[str, Any] = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": created(),
            "model": model.name,
        }
        call.answer_id = self._base["id"]
        self._lengths = [0] * len(self._ledger.texts)  # characters handed out

    async def whole(self) -> dict[str, Any]:
        """Give it in one piece, once all texts have ended."""
        async for place, chunk in self._call.chunks():
            self._ledger.take(place, chunk)
        choices = [self._choice(number) for number in range(len(self._ledger.texts))]
        return {**self._base, "choices": choices, "usage": self._ledger.usage()}

    def _choice(self, number: int) -> dict[str, Any]:
        text = self._ledger.texts[number]
        entries, before = list(text.logprobs), self._echoed(number)
        logprobs = None
        if self._asked.logprobs is not None:
            logprobs = self._tokens.completion(entries, self._asked.logprobs, len(before))
            if self._asked.echo:
                logprobs = _joined(self._prompt_logprobs(number), logprobs)
        return {
            "index": number,
            "text": before + text.said,
            "logprobs": logprobs,
            "finish_reason": text.finish_reason,
        }

    def _echoed(self, number: int) -> str:
        if not self._asked.echo:
            return ""
        request = self._job(number).request
        if request.prompt is not None:
            return str(request.prompt)
        return "".join(self._tokens.text(token) for token in request.prompt_token_ids)

    def _prompt_logprobs(self, number: int) -> dict[str, Any]:
        job = self._job(number)
        known: list[TokenLogprob] = [one for one in job.sequences[0].prompt_logprobs if one is not None]
        first = self._tokens.text(job.request.prompt_token_ids[0])
        found = self._tokens.completion(known, self._asked.logprobs or 0, len(first))
        tops = found["top_logprobs"]
        begin = {  # nothing precedes the first token, so it has no probability
            "tokens": [first],
            "token_logprobs": [None],
            "top_logprobs": None if tops is None else [None],
            "text_offset": [0],
        }
        return _joined(begin, found)

    def _job(self, number: int) -> Any:
        return self._call.jobs[number // len(self._call.jobs[0].sequences)]

    def events(self) -> AsyncIterator[tuple[None, dict[str, Any]]]:
        """Give it in chunks."""
        numbers = range(len(self._ledger.texts)) if self._asked.echo else ()
        opening = [self._chunk(number, self._echoed(number), None, None) for number in numbers]
        return streamed(self._call, self._ledger, self._asked.stream_options, self._base, opening, self._added)

    def _added(self, number: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        if not (chunk.text or chunk.logprobs or chunk.finish_reason):
            return []
        logprobs = None
        if self._asked.logprobs is not None:
            entries = chunk.logprobs or ()
            logprobs = self._tokens.completion(entries, self._asked.logprobs, self._lengths[number])
        self._lengths[number] += len(chunk.text)
        return [self._chunk(number, chunk.text, logprobs, chunk.finish_reason)]

    def _chunk(self, number: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._base, "choices": [choice]}


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Append lists to lists; what is missing in either stays missing."""
    return {name: None if one[name] is None or other[name] is None else one[name] + other[name] for name in one}
