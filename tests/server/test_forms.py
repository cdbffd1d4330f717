"""Forms that a client asks for: `response_format` and required tools, over the engine's grammars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM, Grammar, SamplingParams
from tests.server.harness import Local, local
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = [{"role": "user", "content": "Say something."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
    "required": ["colour", "ok"],
    "additionalProperties": False,
}
NO_BLANKS = {str(ord(blank)): -100 for blank in "\t\n\r "}  # a random model would write them for ever
COMMON = {"messages": CHAT, "temperature": 0, "max_tokens": 90, "logit_bias": NO_BLANKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(max_position_embeddings=1024), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[LLM]:
    """The oracle: an engine of its own, without speculation."""
    with LLM(folder, method="none") as one:
        yield one


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, folder, max_num_seqs=4) as one:
        yield one


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Local]:
    with local(llm) as one:
        yield one


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_J01_an_answer_has_the_form_asked_for_and_is_the_librarys(server: Local, plain: LLM) -> None:
    """json_schema, with guesses: valid JSON, equal to plain decoding; the server lives."""
    answer = server.post("/v1/chat/completions", {**COMMON, "response_format": form(SCHEMA)})
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    made = json.loads(choice["message"]["content"])
    assert set(made) == {"colour", "ok"} and made["colour"] in ("red", "green") and isinstance(made["ok"], bool)
    assert choice["finish_reason"] == "stop"
    bias = {int(token): float(value) for token, value in NO_BLANKS.items()}
    params = SamplingParams(temperature=0, max_tokens=90, logit_bias=bias, grammar=Grammar.json_schema(SCHEMA))
    assert choice["message"]["content"] == plain.chat(CHAT, params)[0].text
    assert server.post("/v1/chat/completions", {**COMMON, "max_tokens": 2}).status_code == 200


def test_J01_json_mode_writes_an_object(server: Local) -> None:
    body = {**COMMON, "response_format": {"type": "json_object"}, "max_tokens": 16}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


def test_a_required_tool_is_called_with_arguments_of_its_form(server: Local) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
    answer = server.post("/v1/chat/completions", {**COMMON, "tools": [tool], "tool_choice": "required"}).json()
    assert "choices" in answer, answer
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "paint"
    assert json.loads(call["arguments"])["colour"] in ("red", "green")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nosuch"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"pattern": "a?" * 20_000},
        {"items": {"type": "array", "minimum": "five"}, "enum": []},
    ],
)
def test_a_schema_that_cannot_be_followed_is_that_requests_400(server: Local, schema: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {**COMMON, "response_format": form(schema)})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {**COMMON, "max_tokens": 2}).status_code == 200
