"""``POST /v1/responses``: OpenAI's newer way to ask for text, without anything that would have to be stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

from outrider.server.answers import Ledger, created, new_id
from outrider.server.errors import invalid
from outrider.server.protocol import (
    Asked,
    ChatRequest,
    ContentPart,
    Count,
    Function,
    JsonSchema,
    Many,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Strict,
    Tool,
)
from outrider.server.tools import ToolCalls, ToolParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outrider.server.call import Call
    from outrider.server.service import Model

    Event = tuple[str, dict[str, Any]]

__all__ = ["ResponseAnswer", "ResponsesRequest", "chat_request"]

PREFIXES = {"message": "msg", "reasoning": "rs"}  # of ids
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # what their text is called


class InputItem(Strict):
    """A message, a call that the model made, what came of one, or what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    format: TextFormat | None = None


class FunctionTool(Function):
    type: Literal["function"]


class NamedChoice(Strict):
    type: Literal["function"]
    name: str


class ResponsesRequest(Asked):
    """What ``POST /v1/responses`` takes."""

    input: str | Annotated[Many[InputItem], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextSettings | None = None
    tools: Annotated[Many[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: Many[str] | None = None


def chat_request(asked: ResponsesRequest) -> ChatRequest:
    """Say the same as a chat request.

    Raises:
        ApiError: It leans on something that is not kept here.
    """
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(asked, name):
            raise invalid(f"{name} is not supported: nothing is kept here; send the whole input", name)
    messages = [] if asked.instructions is None else [Message(role="system", content=asked.instructions)]
    items = [InputItem(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages += _messages(items)
    choice = asked.tool_choice
    if isinstance(choice, NamedChoice):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))  # type: ignore[assignment]
    return ChatRequest(
        model=asked.model,
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stream=asked.stream,
        response_format=_format(asked.text),
        tools=None if asked.tools is None else [_tool(tool) for tool in asked.tools],
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=asked.parallel_tool_calls,
        seed=asked.seed,
        speculation=asked.speculation,
    )


def _messages(items: list[InputItem]) -> list[Message]:
    """Give messages; a thought goes with what the model said or called next."""
    found: list[Message] = []
    thought = ""
    for place, item in enumerate(items):
        if item.type == "reasoning":
            parts = [] if item.content is None or isinstance(item.content, str) else item.content
            thought += "".join(part.text or "" for part in parts)
            continue
        message = _message(item, place)
        if thought and message.role == "assistant":
            message.reasoning_content = thought
        thought = ""
        found.append(message)
    if not found:
        raise invalid("the input holds no message; send one", "input")
    return found


def _message(item: InputItem, place: int) -> Message:
    if item.type == "function_call":
        if item.name is None:
            raise invalid("a function_call needs a name", f"input.{place}.name")
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments or "{}"}}
        return Message.model_validate({"role": "assistant", "tool_calls": [call]})
    if item.type == "function_call_output":
        return Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if item.role is None:
        raise invalid("a message needs a role", f"input.{place}.role")
    return Message(role=item.role, content=item.content)


def _tool(tool: FunctionTool) -> Tool:
    named = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return Tool(type="function", function=Function(**named))  # type: ignore[arg-type]


def _format(text: TextSettings | None) -> ResponseFormat | None:
    asked = None if text is None else text.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchema.model_validate({"name": asked.name, "schema": asked.schema_})
    )


class ResponseAnswer:
    """The answer to a responses request, whole or as its many events.

    Args:
        asked: The request.
        call: What runs for it: one text.
        model: Who answers.
    """

    def __init__(self, asked: ResponsesRequest, call: Call, model: Model) -> None:
        self._asked, self._call = asked, call
        self._ledger = Ledger(call, model, model.thinking)
        self._parser = ToolParser() if asked.tools and asked.tool_choice != "none" else None
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the output's item that text is being added to
        self._number = 0
        self._base: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": created(),
            "model": model.name,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "tool_choice": "auto" if asked.tool_choice is None else _plain(asked.tool_choice),
            "tools": [tool.model_dump(exclude_none=True) for tool in asked.tools or []],
            "text": {"format": {"type": "text"}} if asked.text is None else _plain(asked.text),
            "truncation": "disabled",
        }
        call.answer_id = self._base["id"]

    async def whole(self) -> dict[str, Any]:
        """Give it in one piece."""
        async for _ in self.events():
            pass
        return self._response()

    async def events(self) -> AsyncIterator[Event]:
        """Give every event, from response.created to response.completed."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))
        async for place, chunk in self._call.chunks():
            _, text = self._ledger.take(place, chunk)
            for thought in [part.text for part in text.news if part.thought]:
                for event in self._added(thought, "reasoning"):
                    yield event
            said = "".join(part.text for part in text.news if not part.thought)
            parts: list[str | ToolCalls] = [said] if said else []
            if self._parser is not None:
                parts = self._parser.push(said, final=chunk.finish_reason is not None)
            for part in parts:
                for event in self._added(part, "message") if isinstance(part, str) else self._called(part):
                    yield event
        for event in [*([] if self._output else self._added("", "message")), *self._closing()]:
            yield event
        name = "response.completed" if self._status() == "completed" else "response.incomplete"
        yield self._event(name, response=self._response())

    def _added(self, text: str, kind: str) -> list[Event]:
        """Add text to the item that is open, or open one: a "message", or "reasoning"."""
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events += self._closing()
            item: dict[str, Any] = {"id": new_id(PREFIXES[kind]), "type": kind, "status": "in_progress", "content": []}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            self._output.append(item)
            self._open = item
            part: dict[str, Any] = {"type": TEXTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            place = len(self._output) - 1
            events.append(self._event("response.output_item.added", output_index=place, item=dict(item)))
            events.append(self._event("response.content_part.added", part=dict(part), **self._at(item)))
            item["content"] = [part]
        self._open["content"][0]["text"] += text
        if text:
            more = {**_logprobs(kind), **self._at(self._open)}
            events.append(self._event(f"response.{TEXTS[kind]}.delta", delta=text, **more))
        return events

    def _closing(self) -> list[Event]:
        """Close the item that is open, if any."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "completed"
        text, at = item["content"][0]["text"], self._at(item)
        return [
            self._event(f"response.{TEXTS[item['type']]}.done", text=text, **_logprobs(item["type"]), **at),
            self._event("response.content_part.done", part=item["content"][0], **at),
            self._event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _called(self, call: ToolCalls) -> list[Event]:
        closing = self._closing()
        item = {
            "id": new_id("fc"), "type": "function_call", "call_id": new_id("call"), "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }  # fmt: skip
        self._output.append(item)
        place = {"output_index": len(self._output) - 1}
        where = {**place, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        done = {"arguments": call.arguments, "name": call.name}
        return [
            *closing,
            self._event("response.output_item.added", item=begun, **place),
            self._event("response.function_call_arguments.delta", delta=call.arguments, **where),
            self._event("response.function_call_arguments.done", **done, **where),
            self._event("response.output_item.done", item=item, **place),
        ]

    def _status(self) -> str:
        return "incomplete" if self._ledger.texts[0].finish_reason == "length" else "completed"

    def _response(self, status: str | None = None) -> dict[str, Any]:
        if status is not None:
            return {**self._base, "status": status, "output": [], "usage": None}
        usage = self._ledger.usage()
        status = self._status()
        return {
            **self._base,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
                "outrider": usage["outrider"],
            },
        }

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._output.index(item), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number - 1, **fields}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _plain(value: BaseModel | str) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, BaseModel) else value
