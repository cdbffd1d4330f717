"""Shapes of text over HTTP: JSON, schemas, required tools, each together with speculation and equal to plain text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM, Grammar, SamplingParams
from tests.server.harness import Local, local
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = [{"role": "user", "content": "Tell me about a person."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {field: {"enum": ["x", "y"]}}, "required": [field],
        "additionalProperties": False}}}
    for name, field in (("alpha", "one"), ("beta", "two"))
]  # fmt: skip
HOW: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}]


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    target = tiny_target(max_position_embeddings=2048)
    draft = LLM(target, tokenizer=byte_tokenizer())
    with (
        LLM(tiny_target(max_position_embeddings=2048), draft, tokenizer=byte_tokenizer(), max_num_seqs=4) as llm,
        local(llm) as one,
    ):
        yield one


def both(server: Local, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which is the same with guesses and without (O8), and streamed."""
    four = {"num_speculative_tokens": 4}
    path = "/v1/chat/completions"
    plain, guessed = server.together(path, [{**body, "speculation": "off"}, {**body, "speculation": four}])
    assert plain.status_code == guessed.status_code == 200, plain.text + guessed.text
    choice: dict[str, Any] = guessed.json()["choices"][0]
    assert without_ids(plain.json()["choices"][0]) == without_ids(choice)
    assert guessed.json()["usage"]["outrider"]["drafted"] > 0
    events = server.events(path, {**body, "speculation": four})
    content = "".join(one["choices"][0]["delta"].get("content") or "" for one in events)
    assert content == (choice["message"]["content"] or "")
    calls = [call for one in events for call in one["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        call["function"] for call in choice["message"].get("tool_calls", [])
    ]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name != "id"}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("how", HOW)
def test_J01_a_schema_is_kept_to_with_guesses_and_without(server: Local, how: dict[str, Any]) -> None:
    choice = both(server, {"messages": CHAT, "response_format": FORMAT, "max_tokens": 120, **how})
    found = json.loads(choice["message"]["content"])
    assert set(found) == {"name", "age"}
    assert found["name"] in ("Ann", "Bob")
    assert 0 <= found["age"] <= 99
    assert choice["finish_reason"] == "stop"


def test_J01_the_text_is_the_librarys(server: Local) -> None:
    body = {"messages": CHAT, "response_format": FORMAT, "max_tokens": 120, **HOW[1]}
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    params = SamplingParams(max_tokens=120, grammar=Grammar.json_schema(SCHEMA), **HOW[1])
    with LLM(tiny_target(max_position_embeddings=2048), tokenizer=byte_tokenizer(), method="none") as plain:
        assert plain.chat(CHAT, params)[0].text == content


@pytest.mark.parametrize("how", HOW)
def test_J01_an_object_is_an_object(server: Local, how: dict[str, Any]) -> None:
    body = {"messages": CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60, **how}
    choice = both(server, body)
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "beta"}}])
def test_required_tools_are_called(server: Local, how: dict[str, Any], wanted: Any) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": wanted, "parallel_tool_calls": False, "max_tokens": 150}
    choice = both(server, {**body, **how})
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    arguments = json.loads(call["function"]["arguments"])
    expected = {"alpha": "one", "beta": "two"}[call["function"]["name"]]
    assert arguments in ({expected: "x"}, {expected: "y"})
    if wanted != "required":
        assert call["function"]["name"] == "beta"


def test_tools_left_to_the_model_change_no_text_of_others(server: Local) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 16, "temperature": 0}
    choice = both(server, body)
    assert "tool_calls" not in choice["message"]
    none = server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json()["choices"][0]
    assert none["message"]["content"] == choice["message"]["content"]


def test_completions_and_responses_have_shapes_too(server: Local) -> None:
    body = {"prompt": "x", "max_tokens": 120, "temperature": 0, "response_format": FORMAT}
    assert set(json.loads(server.post("/v1/completions", body).json()["choices"][0]["text"])) == {"name", "age"}
    asked = {"input": "x", "max_output_tokens": 120, "temperature": 0}
    text = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    answer = server.post("/v1/responses", {**asked, "text": text}).json()
    assert set(json.loads(answer["output"][0]["content"][0]["text"])) == {"name", "age"}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    called = server.post("/v1/responses", {**asked, "tools": tools, "tool_choice": "required"}).json()
    assert {one["type"] for one in called["output"]} == {"function_call"}
    stream = server.post("/v1/responses", {**asked, "tools": tools, "tool_choice": "required", "stream": True}).text
    assert "event: response.function_call_arguments.done" in stream


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}, {"type": 5},
        {"enum": []}, {"properties": []}, {"$ref": "#"}, {"pattern": "a?" * 20_000},
    ],
)  # fmt: skip
def test_bad_schemas_end_their_request_alone(server: Local, schema: dict[str, Any]) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": CHAT, "max_tokens": 20, "temperature": 0}
    answers = server.together("/v1/chat/completions", [body, {**body, "response_format": wrong}, body])
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    assert len(answers[1].json()["error"]["message"]) < 2000
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    error = server.error("/v1/chat/completions", {**body, "tools": tools, "tool_choice": "required"})
    assert "0x" not in error["message"]


def test_a_shape_and_a_required_call_cannot_both_be(server: Local) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}
    assert server.error("/v1/chat/completions", body)["param"] == "response_format"


def test_many_schemas_do_not_pile_up(server: Local) -> None:
    """Advisory 16: each is another; what is kept of them is bounded."""
    for number in range(40):
        schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"}}}
        body = {"prompt": "x", "max_tokens": 1, "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}  # fmt: skip
        assert server.post("/v1/completions", body).status_code == 200
    assert server.service.admission is not None
    assert server.service.admission.places == 0
