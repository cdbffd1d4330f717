"""Tool calls: read off texts however these are cut, told to models, and written in messages."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from outrider.server.errors import ApiError
from outrider.server.protocol import NamedTool, Tool
from outrider.server.tools import ToolCalls, ToolParser, call_grammar, instructions, template_messages

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>'
TEXTS = [
    "just text", "", CALL, f"Let me see. {CALL}", CALL + "\n" + OTHER, f"{CALL} and {OTHER} done", CALL[:-3], CALL[:20],
    "a < b and <tool> and <tool_call", "<tool_call>no json</tool_call> after", "<tool_call>{}</tool_call>",
    f"<tool_call><tool_call>{CALL}", '<tool_call>{"name": 5}</tool_call>', f"{OTHER}\n\n{OTHER}\n", "</tool_call>",
    f"<tool_call>{'[' * 5000}</tool_call>{CALL}",
]  # fmt: skip


def read(pieces: list[str]) -> list[str | ToolCalls]:
    """What a parser says of pieces, neighbouring texts joined."""
    parser = ToolParser()
    found: list[str | ToolCalls] = []
    for place, piece in enumerate([*pieces, ""]):
        for part in parser.push(piece, final=place == len(pieces)):
            if isinstance(part, str) and found and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
    assert parser.num_calls == sum(isinstance(part, ToolCalls) for part in found)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_K07_what_is_read_does_not_depend_on_how_a_text_is_cut(text: str) -> None:
    whole = read([text])
    draw = random.Random(0)
    assert read(list(text)) == whole
    for size in (2, 3, 7, 11, 12):
        assert read([text[at : at + size] for at in range(0, len(text), size)]) == whole
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_calls_are_read_and_what_is_none_stays_text() -> None:
    weather = ToolCalls("weather", '{"city": "Köln", "days": 3}')
    time = ToolCalls("time", "{}")
    assert read([CALL]) == [weather]
    assert read([f"Let me see. {CALL}"]) == ["Let me see. ", weather]
    assert read([CALL + "\n" + OTHER]) == [weather, time]
    assert read([f"{CALL} and {OTHER} done"]) == [weather, "and ", time, "done"]
    assert read([CALL.removesuffix("</tool_call>")]) == [weather]  # the model stopped before the very end
    assert read(["a < b and <tool_call"]) == ["a < b and <tool_call"]
    assert read(["<tool_call>no json</tool_call> after"]) == ["<tool_call>no json</tool_call> after"]


def tool(name: str, **parameters: Any) -> Tool:
    function = {
        "name": name,
        "description": f"Does {name}.",
        "parameters": {"type": "object", "properties": parameters},
    }
    return Tool.model_validate({"type": "function", "function": function})


def test_models_whose_template_knows_no_tools_are_told_in_words() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"c": 1}}}],
        },
        {"role": "tool", "content": "sunny"},
    ]
    told = template_messages(messages, [tool("weather")], told=False)
    assert [one["role"] for one in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.")
    assert '"name": "weather"' in told[0]["content"]
    assert told[2]["reasoning_content"] == "Hm."
    assert read([told[2]["content"]]) == [ToolCalls("weather", '{"c": 1}')]
    assert told[3]["content"] == "<tool_response>\nsunny\n</tool_response>"
    assert template_messages(messages, [tool("weather")], told=True) is messages
    alone = template_messages(messages[1:2], [tool("weather")], told=False)
    assert alone[0] == {"role": "system", "content": instructions([tool("weather")])}


def test_choices_of_tools() -> None:
    tools = [tool("weather"), tool("time")]
    assert call_grammar(tools, "auto", parallel=True) is None
    assert call_grammar(tools, "none", parallel=True) is None
    named = NamedTool.model_validate({"type": "function", "function": {"name": "time"}})
    only = call_grammar(tools, named, parallel=False)
    assert only is not None
    assert "weather" not in only
    schema = json.loads(only.split("%json ")[1])
    assert schema["properties"]["name"] == {"const": "time"}
    both = call_grammar(tools, "required", parallel=True)
    assert both is not None
    assert "anyOf" in both
    with pytest.raises(ApiError, match="'nothing'"):
        call_grammar(
            tools, NamedTool.model_validate({"type": "function", "function": {"name": "nothing"}}), parallel=True
        )
