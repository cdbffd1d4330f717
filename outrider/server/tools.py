"""Tool calls: how tools are told to a model, which texts may come of that, and how calls are read off the text.

The written form is that of Hermes and Qwen, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: models whose
template tells tools itself mostly use it, and models without are told to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.server.errors import invalid

if TYPE_CHECKING:
    from outrider.server.protocol import NamedTool, Tool

__all__ = ["CLOSE", "OPEN", "ToolCalls", "ToolParser", "call_grammar", "instructions", "template_messages"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# As models write calls; with blanks left free a weak model may go on with blanks for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class ToolCalls:
    """A call read off a text: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


def instructions(tools: list[Tool]) -> str:
    """Tell a model about tools whose template does not."""
    listed = "\n".join(json.dumps(tool.model_dump(exclude_none=True)) for tool in tools)
    return (
        "You may call one or more functions to help with the user's request. These are the functions, one a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "For each call write a JSON object with the function's name and its arguments, and nothing else, like this:\n"
        f'{OPEN}\n{{"name": "the function", "arguments": {{}}}}\n{CLOSE}'
    )


def call_grammar(tools: list[Tool], choice: str | NamedTool, *, parallel: bool) -> str | None:
    """Give the grammar (llguidance's Lark) of texts that a choice of tools allows; None where all are.

    Raises:
        ApiError: A tool is named that is not among them.
    """
    if choice in ("auto", "none"):
        return None
    if not isinstance(choice, str):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is not among the tools", "tool_choice")
        tools = wanted
    if not tools:
        raise invalid("tool_choice 'required' needs tools; send some", "tools")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": SPACING}
    body = json.dumps(schema)
    more = '("\\n" call)*' if parallel else ""
    return f'start: call {more}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {body}\n'


def template_messages(messages: list[dict[str, Any]], tools: list[Tool], *, told: bool) -> list[dict[str, Any]]:
    """Give messages in the form that a template takes: as they are where it tells tools itself, else as plain text."""
    if told:
        return messages
    plain = []
    for message in messages:
        calls, content = message.get("tool_calls") or [], message.get("content") or ""
        if calls:
            written = (
                json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}) for c in calls
            )
            content += "".join(f"{OPEN}\n{one}\n{CLOSE}" for one in written)
        role = message["role"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        kept = {name: message[name] for name in ("reasoning_content",) if name in message}
        plain.append({"role": role, "content": content, **kept})
    if not tools:
        return plain
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{instructions(tools)}"}, *plain[1:]]
    return [{"role": "system", "content": instructions(tools)}, *plain]


class ToolParser:
    """Reads calls off a text as it comes; what it says does not depend on how the text was cut."""

    def __init__(self) -> None:
        self._held = ""  # not settled yet: it may be, or begin, a call
        self._after_call = False  # blanks between calls are no text
        self.num_calls = 0

    def push(self, text: str, *, final: bool) -> list[str | ToolCalls]:
        """Take text in; give what is settled: text, and calls."""
        self._held += text
        found: list[str | ToolCalls] = []
        while (begin := self._held.find(OPEN)) >= 0:
            found += self._said(begin)
            end = self._held.find(CLOSE)
            if end < 0 and not final:
                return found
            call = _read(self._held[len(OPEN) : end if end >= 0 else None])
            stop = len(self._held) if end < 0 else end + len(CLOSE)
            if call is None:  # what is no call is text
                found += self._said(stop)
                continue
            self._held = self._held[stop:]
            self._after_call = True
            self.num_calls += 1
            found.append(call)
        found += self._said(len(self._held) - (0 if final else _overlap(self._held, OPEN)))
        return found

    def _said(self, end: int) -> list[str | ToolCalls]:
        text, self._held = self._held[:end], self._held[end:]
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []


def _read(text: str) -> ToolCalls | None:
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        name = call["name"]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    return ToolCalls(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """How many of the text's last characters might begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
