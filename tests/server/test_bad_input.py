"""Wrong, hostile and broken requests: each is refused by a clear error in OpenAI's form, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.server.harness import Local, local
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
JSON = {"content-type": "application/json"}
EVERY_ROUTE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))
    with LLM(folder, method="ngram", max_num_seqs=4, max_model_len=128) as llm, local(llm) as one:
        yield one


@pytest.fixture(autouse=True)
def goes_on(server: Local) -> Iterator[None]:
    """O1, O2: after whatever a test sent, nothing is left behind, and the next request is served."""
    yield
    answer = server.post("/v1/completions", TEXT)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert server.service.admission is not None
    assert (server.service.admission.places, server.service.admission.waiting_tokens) == (0, 0)
    assert not server.faults


def clean(answer: httpx.Response) -> dict[str, Any]:
    """O4: only documented codes, OpenAI's shape, and nothing of our insides."""
    assert answer.status_code in (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503, 504), answer.status_code
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for secret in ("Traceback", "/work/", "site-packages", "0x", ".py"):
        assert secret not in answer.text
    return error


def raw(server: Local, path: str, body: bytes, **headers: str) -> httpx.Response:
    sent = server.run(server.client.post(path, content=body, headers={**JSON, **headers}, timeout=60))
    assert isinstance(sent, httpx.Response)
    return sent


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "min_tokens", "logprobs", "priority"])
@pytest.mark.parametrize("value", ["5", True, 1.5, [], {}, -(2**63) - 1, 2**64, "1e400"])
def test_numbers_are_not_guessed_at(server: Local, field: str, value: Any) -> None:
    error = server.error("/v1/completions", {**TEXT, field: value})
    assert field in str(error["param"]) or field in error["message"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e400", '"1"', "true", "-3"])
def test_fractions_are_finite_numbers_in_range(server: Local, field: str, text: str) -> None:
    body = json.dumps(TEXT)[:-1] + f', "{field}": {text}' + "}"
    assert raw(server, "/v1/completions", body.encode()).status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"n": 10**9}, {"best_of": 10**9}, {"n": 9}, {"prompt": ["x"] * 9}, {"prompt": ["x"] * 10_000},
        {"logprobs": 21}, {"stop": ["a"] * 5}, {"stop": ["a" * 257]}, {"stop": [""]}, {"stop": [1]},
        {"logit_bias": {str(number): 1 for number in range(1025)}}, {"logit_bias": {"320": 1}},
        {"logit_bias": {"-1": 1}}, {"logit_bias": {str(2**63): 1}}, {"logit_bias": {"5": 101}},
        {"stop_token_ids": [320]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [2**31]}, {"stop_token_ids": [2**63]},
        {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [320]}, {"prompt": [-1]}, {"prompt": None},
        {"prompt": [1, "a"]}, {"prompt": {"a": 1}}, {"prompt": "x" * 128}, {"prompt": "x" * 127, "max_tokens": 2},
        {"max_tokens": 127}, {"max_tokens": 2**31 + 1}, {"speculation": "on"}, {"speculation": {"method": "eagle"}},
        {"speculation": {"num_speculative_tokens": 65}}, {"speculation": 3}, {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}}, {"prediction": {"type": "code", "content": "x"}},
        {"stream_options": {"include_usage": "yes"}}, {"min_tokens": 3}, {"temperature": 101}, {"top_p": 0},
        {"model": "../../etc/passwd"}, {"model": "\x00"}, {"echo": True, "stream": True, "logprobs": 1},
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused_by_name(server: Local, change: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {**TEXT, **change})
    error = clean(answer)
    assert answer.status_code in (400, 404)
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []}, {"messages": None}, {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"content": "x"}]}, {"messages": "hi"}, {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [{"type": "code"}]},
        {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"type": "function", "function": {"name": "f"}}],
         "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"top_logprobs": 3}, {"max_tokens": 2, "max_completion_tokens": 3}, {"audio": {"voice": "x"}},
        {"modalities": ["audio"]}, {"functions": [{"name": "f"}]}, {"chat_template": "{{ 1 }}"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "user", "content": "x" * 200}]},
    ],
)  # fmt: skip
def test_wrong_chats_are_refused_by_name(server: Local, change: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, **change})
    clean(answer)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stop": [1]}, "stop.0"), ({"stop": 5}, "stop"), ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.0"),
        ({"speculation": "on"}, "speculation"), ({"speculation": 3}, "speculation"),
        ({"speculation": {"num_speculative_tokens": 65}}, "speculation.num_speculative_tokens"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"), ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named_as_clients_know_it(server: Local, change: dict[str, Any], param: str) -> None:
    error = server.error("/v1/completions", {**TEXT, **change})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "change",
    [{"prompt": "\ud800"}, {"bad_words": ["\ud800"]}, {"prediction": {"type": "content", "content": "\ud800"}}],
)
def test_half_a_character_is_refused(server: Local, change: dict[str, Any]) -> None:
    answer = raw(server, "/v1/completions", json.dumps({**TEXT, **change}).encode())
    assert answer.status_code == 400
    assert "surrogate" in clean(answer)["message"]


def test_other_methods_are_answered_by_what_there_is(server: Local) -> None:
    for path in ("/live", "/v1/models", "/metrics"):
        head = server.run(server.client.head(path))
        assert head.status_code == 200  # as for GET; the protocol leaves the body out
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            answer = server.run(server.client.request(method, path))
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
            clean(answer)
    for method in ("GET", "HEAD", "PUT"):
        answer = server.run(server.client.request(method, "/v1/completions"))
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "/openapi.json" in clean(server.get("/v1/completions/"))["message"]
    empty = raw(server, "/v1/completions", b"")
    assert (empty.status_code, clean(empty)["code"]) == (400, "invalid_json")


def test_a_null_means_the_default(server: Local) -> None:
    names = ("temperature", "top_p", "n", "seed", "stop", "logit_bias", "stream", "speculation", "response_format")
    assert server.post("/v1/completions", {**TEXT, **dict.fromkeys(names)}).status_code == 200
    empty = {"messages": [{"role": "user", "content": None}], "max_tokens": 1}
    assert server.post("/v1/chat/completions", empty).status_code == 200


@pytest.mark.parametrize("path", EVERY_ROUTE)
def test_bodies_that_are_no_json_are_refused(server: Local, path: str) -> None:
    whole = json.dumps({**TEXT, "messages": CHAT["messages"], "input": "x", "tokens": [1]}).encode()
    hostile = [
        b"", b"{", b"null", b"[]", b"5", b'"x"', b"\x00", b"\xff\xfe" + whole, b"\xef\xbb\xbf{", whole[:-5],
        whole.replace(b"hi", b"\xff"), b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b"{'prompt': 'x'}", b'{"prompt": 1' + b"0" * 5000 + b"}", b'{"prompt": "\\ud800"}', b"<xml/>",
    ]  # fmt: skip
    for body in hostile:
        answer = raw(server, path, body)
        clean(answer)
        assert answer.status_code == 400, body[:40]


def test_random_damage_to_a_body_never_hurts(server: Local) -> None:
    """A few hundred of the thousands that scripts/fuzz_requests sends."""
    draw = random.Random(0)
    whole = json.dumps({**TEXT, "stop": ["zz"], "logit_bias": {"5": 1.5}, "stream_options": {"include_usage": True}})
    for _ in range(300):
        body = bytearray(whole.encode())
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(body))
            kind = draw.randrange(4)
            if kind == 0:
                body[place] = draw.randrange(256)
            elif kind == 1:
                del body[place : place + draw.randint(1, 9)]
            elif kind == 2:
                body[place:place] = draw.choice(
                    [b"\x00", b"null", b"1e400", b"[[", b'"', b"\xed\xa0\x80", b"-0", b"{}"]
                )
            else:
                body = body[:place] or bytearray(b"{")
        answer = raw(server, "/v1/completions", bytes(body))
        if answer.status_code != 200:
            clean(answer)
            assert answer.status_code == 400, bytes(body)


def test_kinds_and_codings_of_bodies(server: Local) -> None:
    body = json.dumps(TEXT).encode()
    for headers in (
        {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"},
        {"content-encoding": "gzip"}, {"content-type": "application/x-www-form-urlencoded"},
    ):  # fmt: skip
        assert raw(server, "/v1/completions", body, **headers).status_code == 415
    assert (
        raw(server, "/v1/completions", body, **{"content-type": "application/json; charset=utf-8"}).status_code == 200
    )
    assert raw(server, "/v1/completions", b" " * ((4 << 20) + 1)).status_code == 413


def test_a_body_without_end_is_cut_off(server: Local) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 65536

    sent = server.run(server.client.post("/v1/completions", content=endless(), headers=JSON, timeout=60))
    assert sent.status_code == 413


def test_strings_may_hold_brackets(server: Local) -> None:
    nested = {"prompt": '[[[[{{{{"\\' * 10, "max_tokens": 1}
    assert server.post("/v1/completions", nested).status_code == 200


def test_too_many_headers_and_foreign_hosts(server: Local) -> None:
    many = {f"x-{number}": "1" for number in range(101)}
    assert server.get("/live", headers=many).status_code == 431
    assert server.get("/live", headers={"x-large": "a" * 33_000}).status_code == 431
    for host in ("evil.example", "evil.example:80", "test.evil.example", ""):
        assert server.get("/v1/models", headers={"host": host}).status_code == 403
    for method in ("GET", "POST", "DELETE", "PUT", "OPTIONS"):
        asked = server.client.request(method, "/v1/models", headers={"origin": "http://evil.example"})
        assert server.run(asked).status_code == 403
    assert server.get("/v1/models", headers={"host": "TEST:1234"}).status_code == 200
    unnamed = server.client.build_request("GET", "/v1/models")
    del unnamed.headers["host"]  # as an HTTP/1.0 probe may: no browser does
    assert server.run(server.client.send(unnamed)).status_code == 200


def test_there_are_no_other_routes(server: Local) -> None:
    for path in (
        "/", "/docs", "/redoc", "/v1", "/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/shutdown", "/slots",
        "/v1/files", "/invocations", "/pause", "/collective_rpc", "/v1/completions/", "//v1/models", "/V1/models",
        "/%76%31/../metrics/", "/v1/embeddings", "/api/jobs",
    ):  # fmt: skip
        assert server.get(path).status_code in (404, 405), path
        assert server.post(path, {}).status_code in (404, 405), path


def test_long_texts_of_one_kind_take_linear_time(server: Local) -> None:
    """Nothing backtracks: what is hostile to a regular expression is refused or served like any text."""
    for text in ("\n" * 200_000, "<" * 200_000, "a" * 200_000 + "X", "<tool_call>" * 20_000, "\\" * 200_000):
        for path, body in (
            ("/v1/completions", {**TEXT, "prompt": text}),
            ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {**TEXT, "model": text}),
            ("/v1/completions", {**TEXT, "stop": [text]}),
        ):
            assert server.post(path, body).status_code in (400, 404)


def test_mixed_good_and_bad_requests_do_not_touch_each_other(server: Local) -> None:
    good = {"prompt": "one two three one two", "max_tokens": 16, "temperature": 0}
    bodies = [good, {**good, "n": 99}, {**good, "prompt": [319, 9999]}, good, {**good, "temperature": "x"}, good]
    answers = server.together("/v1/completions", bodies)
    assert [answer.status_code for answer in answers] == [200, 400, 400, 200, 400, 200]
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1


def test_refusals_take_no_threads(server: Local) -> None:
    """A thread for each of them would be a burst of threads just when there is no room."""
    answers = server.together("/v1/completions", [{**TEXT, "n": 99}] * 64)
    assert {answer.status_code for answer in answers} == {400}
    assert not [one.name for one in threading.enumerate() if one.name.startswith("AnyIO")]


def test_a_template_that_never_ends_costs_its_own_request_alone(tmp_path: Any) -> None:
    """Advisories 6 to 8: loops, huge strings, ways into Python."""
    for template, status in (
        ("{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}", 500),
        ("{{ 'x' * 100000000000 }}", 400),
        ("{{ ('x' * 100000000) }}", 500),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 400),
        ("{% include '/etc/passwd' %}", 400),
        ("{{ raise_exception('no such role') }}", 400),
        ("{{ messages", 400),
    ):  # fmt: skip
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        with LLM(tiny_target(), tokenizer=tokenizer, max_model_len=128) as llm, local(llm) as server:
            answer, other = server.run(
                _both(server.client.post("/v1/chat/completions", json=CHAT, timeout=60),
                      server.client.post("/v1/completions", json=TEXT, timeout=60))
            )  # fmt: skip
            assert (answer.status_code, other.status_code) == (status, 200), (template, answer.text)
            clean(answer)


async def _both(*requests: Any) -> list[Any]:
    return list(await asyncio.gather(*requests))


def test_a_model_without_a_template_or_a_tokenizer_says_so() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with LLM(tiny_target(), tokenizer=tokenizer) as llm, local(llm) as server:
        assert server.error("/v1/chat/completions", CHAT)["code"] == "no_chat_template"
    with LLM(tiny_target()) as llm, local(llm) as server:
        assert "tokenizer" in server.error("/v1/completions", TEXT)["message"]
        assert server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}).status_code == 200
        assert llm.generate(prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1))
