"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.server.answers import Ledger, TokenTexts, created, new_id, streamed
from outrider.server.errors import invalid
from outrider.server.formats import format_grammar, lark_grammar
from outrider.server.sampling import sampling_params, text_of
from outrider.server.tools import ToolCalls, ToolParser, call_grammar, template_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outrider.outputs import StreamChunk
    from outrider.sampling.params import SamplingParams
    from outrider.server.call import Call
    from outrider.server.protocol import ChatRequest, Message, TemplateSwitches
    from outrider.server.service import Model, Service
    from outrider.server.settings import ServerSettings

__all__ = ["ChatAnswer", "chat_params", "plain_messages", "rendered"]


async def rendered(
    service: Service, messages: list[dict[str, Any]], tools: list[Any], switches: TemplateSwitches | None
) -> list[int]:
    """Give the prompt's ids: the chat template, then the tokenizer, which adds nothing of its own."""
    renderer = service.model.renderer
    told = template_messages(messages, tools, told=renderer.takes_tools)
    listed = [tool.model_dump(exclude_none=True) for tool in tools] if tools and renderer.takes_tools else None
    text = await renderer.render(told, listed, {} if switches is None else switches.given())
    return await service.tokenize(text, special=False)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Give messages as templates take them.

    Raises:
        ApiError: Some content is no text, or a call's arguments are no JSON.
    """
    found = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": "tool" if role == "function" else role}
        plain["content"] = text_of(message.content, f"messages.{place}.content") or message.refusal or ""
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": _arguments(call, place)}}
                for call in message.tool_calls
            ]
        found.append(plain)
    return found


def _arguments(call: Any, place: int) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(
            f"the arguments of a call in messages.{place} are no JSON", f"messages.{place}.tool_calls"
        ) from None


def chat_params(asked: ChatRequest, settings: ServerSettings) -> SamplingParams:
    """Give the sampling parameters of a chat request.

    Raises:
        ApiError: Some value is wrong; it names the field.
    """
    if asked.max_tokens not in (None, asked.max_completion_tokens) and asked.max_completion_tokens is not None:
        raise invalid("max_tokens and max_completion_tokens say different things; send one", "max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    grammar = format_grammar(asked.response_format)
    choice = asked.tool_choice or "auto"
    calls = call_grammar(asked.tools or [], choice, parallel=asked.parallel_tool_calls is not False)
    if calls is not None:
        if grammar is not None:
            raise invalid("response_format and a required tool call cannot both be had; send one", "response_format")
        grammar = lark_grammar(calls)
    return sampling_params(
        asked,
        settings,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
    )


class ChatAnswer:
    """The answer to a chat request, whole or in chunks.

    Args:
        asked: The request.
        call: What runs for it.
        model: Who answers.
    """

    def __init__(self, asked: ChatRequest, call: Call, model: Model) -> None:
        self._asked, self._call = asked, call
        self._ledger = Ledger(call, model, model.thinking)
        self._tokens = TokenTexts(model.llm.tokenizer)
        self._base: dict[str, Any] = {"id": new_id("chatcmpl"), "created": created(), "model": model.name}
        call.answer_id = self._base["id"]
        uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        self._parsers = [ToolParser() if uses_tools else None for _ in self._ledger.texts]

    async def whole(self) -> dict[str, Any]:
        """Give it in one piece, once all texts have ended."""
        async for place, chunk in self._call.chunks():
            self._ledger.take(place, chunk)
        choices = [self._choice(number) for number in range(len(self._ledger.texts))]
        return {**self._base, "object": "chat.completion", "choices": choices, "usage": self._ledger.usage()}

    def _choice(self, number: int) -> dict[str, Any]:
        text, parser = self._ledger.texts[number], self._parsers[number]
        message: dict[str, Any] = {"role": "assistant", "content": text.said, "refusal": None}
        if text.thought:
            message["reasoning_content"] = text.thought
        reason = text.finish_reason
        if parser is not None:
            parts = parser.push(text.said, final=True)
            calls = [part for part in parts if isinstance(part, ToolCalls)]
            if calls:
                said = "".join(part for part in parts if isinstance(part, str))
                message |= {"content": said or None, "tool_calls": [_written(call) for call in calls]}
                reason = "tool_calls" if reason == "stop" else reason
        logprobs = None
        if self._asked.logprobs:
            logprobs = self._tokens.chat(text.logprobs, self._asked.top_logprobs or 0)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def events(self) -> AsyncIterator[tuple[None, dict[str, Any]]]:
        """Give it in chunks."""
        base = {**self._base, "object": "chat.completion.chunk"}
        opening = [self._chunk(number, {"role": "assistant", "content": ""}) for number in range(len(self._parsers))]
        return streamed(self._call, self._ledger, self._asked.stream_options, base, opening, self._deltas)

    def _deltas(self, number: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        parser, reason = self._parsers[number], chunk.finish_reason
        news = self._ledger.texts[number].news
        deltas: list[dict[str, Any]] = [{"reasoning_content": part.text} for part in news if part.thought]
        said = "".join(part.text for part in news if not part.thought)
        if parser is None:
            deltas += [{"content": said}] if said else []
        else:
            for part in parser.push(said, final=reason is not None):
                if isinstance(part, str):
                    deltas.append({"content": part})
                else:
                    deltas.append({"tool_calls": [{"index": parser.num_calls - 1, **_written(part)}]})
            if parser.num_calls and reason == "stop":
                reason = "tool_calls"
        if chunk.logprobs and not deltas:
            deltas.append({"content": ""})
        logprobs = None
        if self._asked.logprobs and chunk.logprobs:
            logprobs = self._tokens.chat(chunk.logprobs, self._asked.top_logprobs or 0)
        made = [self._chunk(number, delta, logprobs=None if place else logprobs) for place, delta in enumerate(deltas)]
        if reason is not None:
            made.append(self._chunk(number, {}, reason=reason))
        return made

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._base, "object": "chat.completion.chunk", "choices": [choice]}


def _written(call: ToolCalls) -> dict[str, Any]:
    return {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
