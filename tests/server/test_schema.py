"""Schemathesis on the server's own OpenAPI document: valid and invalid data, and what must hold of every answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from outrider import LLM
from tests.server.harness import Local, local
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENTED = {200, 400, 403, 404, 405, 413, 415, 431, 500, 503, 504}
EXAMPLES = 20  # of each operation and mode; more by hand


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    how: dict[str, Any] = {"method": "ngram", "max_num_seqs": 4, "max_model_len": 64}
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), **how) as llm, local(llm) as one:
        yield one


OPERATIONS = [
    ("GET", "/live"), ("GET", "/ready"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/v1/responses"), ("POST", "/tokenize"), ("POST", "/detokenize"),
]  # fmt: skip


@pytest.fixture(scope="module")
def described(server: Local) -> Any:
    return schemathesis.openapi.from_dict(server.get("/openapi.json").json())


def test_every_route_is_described(described: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in described.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_operation_stands_whatever_it_is_sent(
    server: Local, described: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = described[path][method]
    quiet = [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=quiet, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        stands(server, case)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a route without anything to get wrong
        assert method == "GET"


def stands(server: Local, case: Any) -> None:
    sent: dict[str, Any] = case.as_transport_kwargs(base_url="http://test")
    try:
        request = server.client.build_request(**translated(sent))
    except (TypeError, ValueError, httpx.InvalidURL):
        return  # no HTTP client can send it
    answer = server.run(server.client.send(request))
    assert answer.status_code in DOCUMENTED, (answer.status_code, answer.text)
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400 and "error" in answer.text:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.service.admission is not None
    assert server.service.admission.places == 0
    assert not server.faults


def translated(sent: dict[str, Any]) -> dict[str, Any]:
    """From requests' words to httpx's."""
    known = {name: value for name, value in sent.items() if name in ("method", "url", "headers", "params", "json")}
    if isinstance(sent.get("data"), bytes | str):
        known["content"] = sent["data"]
    return known
