"""Structured output and tools as OpenAI's client and LangChain ask for them, against a real server process."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.harness import Running, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "tiny"
CHAT: list[Any] = [{"role": "user", "content": "Tell me about a person."}]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ann", "Bob"]
    adult: bool


class Weather(BaseModel):
    """Look the weather up."""

    city: Literal["Oslo", "Rome"]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather),
    {"type": "function", "function": {"name": "wait", "parameters": {
        "type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"],
        "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target = tiny_target(max_position_embeddings=4096)
    folder = str(save(target, byte_tokenizer(), tmp_path_factory.mktemp("target")))
    with serving(folder, "--speculative-model", folder, "--served-model-name", NAME, "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0, timeout=60) as one:
        yield one


def asked(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "temperature": 0, "max_tokens": 200, "messages": CHAT, **more}


def test_a_pydantic_model_is_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(response_format=Person, **asked())
    with client.chat.completions.stream(response_format=Person, **asked()) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, Person)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert whole.choices[0].finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(response_format=Person, **asked(max_tokens=5))


def test_responses_parse_a_pydantic_model(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": NAME, "input": "Who?", "temperature": 0, "max_output_tokens": 200}
    whole = client.responses.parse(text_format=Person, **request)
    with client.responses.stream(text_format=Person, **request) as stream:
        final = stream.get_final_response()
    assert isinstance(whole.output_parsed, Person)
    assert final.output_parsed == whole.output_parsed
    assert whole.status == final.status == "completed"


def test_json_of_any_shape_is_json(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(response_format={"type": "json_object"}, **asked(max_tokens=60)).choices[0]
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_required_tools_are_called_whole_and_streamed(client: openai.OpenAI) -> None:
    request = asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name in ("Weather", "wait")
    with client.chat.completions.stream(**request) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, event.arguments) for event in events] == [(call.function.name, call.function.arguments)]
    assert final.finish_reason == "tool_calls"


def test_a_named_tool_is_called_and_its_arguments_parsed(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "Weather"}}
    request = asked(tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False)
    message = client.chat.completions.parse(**request).choices[0].message
    assert message.tool_calls is not None
    found = message.tool_calls[0]
    assert isinstance(found.function.parsed_arguments, Weather)
    # What it says is then answered, and the conversation goes on.
    calls = [
        {"id": found.id, "type": "function", "function": {"name": "Weather", "arguments": found.function.arguments}}
    ]
    answered = {"role": "tool", "tool_call_id": found.id, "content": "rain"}
    told = [*CHAT, {"role": "assistant", "content": None, "tool_calls": calls}, answered]
    after = client.chat.completions.create(**asked(messages=told, max_tokens=8, tools=TOOLS))
    assert after.usage is not None and after.usage.completion_tokens == 8


def test_responses_call_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOLS[1]["function"]}
    whole = client.responses.create(
        model=NAME, input="When?", tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_output_tokens=200,
    )  # fmt: skip
    (item,) = whole.output
    assert item.type == "function_call" and item.name == "wait"
    assert json.loads(item.arguments)["days"] in (1, 2)
    later = client.responses.create(
        model=NAME, temperature=0, max_output_tokens=8, tools=[tool],
        input=[{"role": "user", "content": "When?"}, item.to_dict(),  # type: ignore[list-item]
               {"type": "function_call_output", "call_id": item.call_id, "output": "done"}],
    )  # fmt: skip
    assert later.usage is not None and later.usage.output_tokens == 8


def test_a_schema_that_is_none_is_refused(client: openai.OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(response_format=wrong, **asked())
    assert caught.value.param == "response_format"
    broken: Any = {"type": "function", "function": {"name": "x", "parameters": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(tools=[broken], tool_choice="required", **asked())
    assert tools.value.param == "tools"
    unknown: Any = {"type": "function", "function": {"name": "nobody"}}
    with pytest.raises(openai.BadRequestError) as missing:
        client.chat.completions.create(tools=TOOLS, tool_choice=unknown, **asked())
    assert missing.value.param == "tool_choice"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_structured_output(server: Running, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    arguments: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": "any", "max_retries": 0}
    chat = ChatOpenAI(model=NAME, temperature=0, max_tokens=200, **arguments)
    assert isinstance(chat.with_structured_output(Person, method=method, strict=True).invoke("Who?"), Person)

    async def later() -> Any:
        async with openai.DefaultAsyncHttpxClient() as http:  # LangChain's own is never closed
            one = ChatOpenAI(model=NAME, temperature=0, max_tokens=200, http_async_client=http, **arguments)
            return await one.with_structured_output(Person, method=method, strict=True).ainvoke("Who?")

    assert isinstance(asyncio.run(later()), Person)


def test_langchain_binds_tools(server: Running) -> None:
    from langchain_openai import ChatOpenAI

    arguments: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": "any", "max_retries": 0}
    chat = ChatOpenAI(model=NAME, temperature=0, max_tokens=200, **arguments)
    bound = chat.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False, strict=True)
    answer = bound.invoke("How is it?")
    gathered: Any = None
    for piece in bound.stream("How is it?"):
        gathered = piece if gathered is None else gathered + piece
    assert [(call["name"], set(call["args"])) for call in answer.tool_calls] == [("Weather", {"city"})]
    assert [call["args"] for call in gathered.tool_calls] == [call["args"] for call in answer.tool_calls]
