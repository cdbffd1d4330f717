"""Spans of requests: what they tell, what they never do, and that a collector's trouble is its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from outrider import LLM
from outrider.errors import ConfigError
from outrider.server.tracing import Tracing, traces_to
from tests.answering import answering
from tests.server.harness import Local, local, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.sdk.trace import ReadableSpan

SECRET = "swordfish"
PROMPT = f"one two {SECRET} one two"
PARENT = "00-0123456789abcdef0123456789abcdef-fedcba9876543210-01"
QUEUE = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
TEXT = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


class Kept(SpanExporter):
    """Keeps spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.came = threading.Condition()

    def export(self, spans: Any) -> SpanExportResult:
        with self.came:
            self.spans += spans
            self.came.notify_all()
        return SpanExportResult.SUCCESS

    def take(self, count: int = 1) -> list[ReadableSpan]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.spans) >= count, 20), "no span came"
            taken, self.spans = self.spans, []
        assert len(taken) == count
        return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def server(folder: str, kept: Kept) -> Iterator[Local]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing = Tracing(kept)
    with LLM(folder, folder, max_num_seqs=4) as llm, local(llm, tracing, deadline_seconds=20) as one:
        yield one
    tracing.close()


def test_a_span_tells_what_usage_tells(server: Local, kept: Kept) -> None:
    body = {**CHAT, "seed": 7, "speculation": {"num_speculative_tokens": 3}}
    answer = server.post("/v1/chat/completions", body, headers={"authorization": f"Bearer {SECRET}"}).json()
    (span,) = kept.take()
    told, usage = dict(span.attributes or {}), answer["usage"]
    assert span.name == f"chat {answer['model']}"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    queue, first = told.pop("outrider.queue_seconds"), told.pop("outrider.first_token_seconds")
    assert span.end_time is not None and span.start_time is not None
    for seconds in (queue, first):
        assert 0 <= seconds <= (span.end_time - span.start_time) / 1e9
    assert usage["outrider"]["drafted"] > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": answer["model"],
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.stream": False,
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.response.finish_reasons": ("length",),
        "outrider.rounds": usage["outrider"]["rounds"],
        "outrider.drafted": usage["outrider"]["drafted"],
        "outrider.accepted": usage["outrider"]["accepted"],
    }
    shown = span.to_json()
    assert SECRET not in shown
    assert answer["choices"][0]["message"]["content"] not in shown


def test_every_way_to_ask_has_one_span_and_the_trace_goes_on(server: Local, kept: Kept) -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**TEXT, "prompt": [PROMPT, "three"], "n": 2, "seed": 2**64 - 1}),
        ("/v1/completions", {**TEXT, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "response_format": {"type": "json_object"}}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 3}),
    ]
    spans = []
    for path, body in asked:
        assert server.post(path, body, headers=headers).status_code == 200
        spans += kept.take()
    for span in spans:
        assert span.context is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" == PARENT[3:35]
        assert f"{span.parent.span_id:016x}" == PARENT[36:52]
        assert span.context.trace_state.get("vendor") == "1"
    several, streamed, shaped, response = (dict(span.attributes or {}) for span in spans)
    assert several["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert several["gen_ai.request.choice.count"] == 2
    assert "gen_ai.request.seed" not in several  # more than OTLP can say: the batch would be lost
    assert streamed["gen_ai.request.stream"] is True
    assert streamed["gen_ai.operation.name"] == several["gen_ai.operation.name"] == "text_completion"
    assert shaped["gen_ai.output.type"] == "json"
    assert response["gen_ai.operation.name"] == "chat"
    assert response["gen_ai.response.id"].startswith("resp")
    assert len({one["gen_ai.response.id"] for one in (several, streamed, shaped, response)}) == 4
    # What is no trace begins a new one.
    for parents in ("00-zz-1-01", "", PARENT.replace("0123", "0000")[:40]):
        server.post("/v1/completions", TEXT, headers={"traceparent": parents})
        assert kept.take()[0].parent is None
    # What is not to be recorded is not.
    server.post("/v1/completions", TEXT, headers={"traceparent": PARENT[:-1] + "0"})
    server.post("/v1/completions", TEXT)
    assert kept.take()[0].parent is None


def test_refusals_and_ends_before_time_are_told_by_name(server: Local, kept: Kept) -> None:
    server.error("/v1/completions", {**TEXT, "prompt": [1, 2, 3], "max_tokens": 10_000})
    (late,) = kept.take()
    assert (late.attributes or {})["error.type"] == "context_length_exceeded"
    assert late.status.status_code is StatusCode.UNSET  # the client's error, not ours
    server.error("/v1/completions", {**TEXT, "top_p": 7})  # never let in: no span, only counted

    async def left() -> None:
        body = {**TEXT, "max_tokens": 400, "ignore_eos": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await server.client.post("/v1/completions", json=body)

    server.run(left())
    (gone,) = kept.take()
    told = gone.attributes or {}
    assert told["error.type"] == "client_gone"
    assert told["gen_ai.response.finish_reasons"] == ("abort",)
    assert 0 < int(str(told["gen_ai.usage.output_tokens"])) < 400
    service = server.service
    slow = {**TEXT, "max_tokens": 400, "ignore_eos": True}
    object.__setattr__(service.settings, "deadline_seconds", 0.05)
    try:
        assert server.error("/v1/completions", slow, 504)["code"] == "deadline_exceeded"
    finally:
        object.__setattr__(service.settings, "deadline_seconds", 20.0)
    (expired,) = kept.take()
    assert (expired.attributes or {})["error.type"] == "deadline_exceeded"
    assert expired.status.status_code is StatusCode.ERROR
    assert expired.status.description is None


# --- a collector over HTTP, in good health and in bad


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP in."""

    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    bodies: list[tuple[str, bytes]] = []
    with answering(type("Own", (Collector,), {"bodies": bodies})) as url:
        yield url, bodies


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, Callable[[], bool]]]:
    """A collector that takes connections and never answers; and whether anybody called."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield f"http://127.0.0.1:{made.getsockname()[1]}", lambda: bool(select.select([made], [], [], 10)[0])


def spans_in(body: bytes) -> list[Any]:
    found = ExportTraceServiceRequest.FromString(body)
    return [span for one in found.resource_spans for scope in one.scope_spans for span in scope.spans]


def test_spans_arrive_and_the_last_ones_at_the_end(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collecting() as (url, bodies):
        tracing = traces_to(url)
        assert tracing is not None
        with monkeypatch.context() as patch:
            patch.setattr(server.service, "_tracing", tracing)
            for _ in range(3):
                assert server.post("/v1/completions", TEXT, headers={"traceparent": PARENT}).status_code == 200
        tracing.close(seconds=20)  # well before the queue's own 5 s
        assert {path for path, _ in bodies} == {"/v1/traces"}
        spans = [span for _, body in bodies for span in spans_in(body)]
        assert len(spans) == 3
        assert {span.trace_id.hex() for span in spans} == {PARENT[3:35]}
        assert not [body for _, body in bodies if SECRET.encode() in body]
        resource = ExportTraceServiceRequest.FromString(bodies[0][1]).resource_spans[0].resource
        assert {one.key: one.value.string_value for one in resource.attributes}["service.name"] == "mine"


class Stuck(Kept):
    """A collector that answers nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.free = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.called.set()
        assert self.free.wait(60)
        return super().export(spans)


def test_a_collector_that_hangs_costs_spans_alone(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    with monkeypatch.context() as patch:
        for name, value in QUEUE.items():
            patch.setenv(name, value)
        tracing = Tracing(stuck)
        patch.setattr(server.service, "_tracing", tracing)
        for _ in range(12):
            assert server.post("/v1/completions", TEXT).status_code == 200
        assert stuck.called.wait(20)
    tracing.close(seconds=0.1)  # comes back, though nothing was sent
    assert not stuck.spans
    stuck.free.set()
    with stuck.came:
        assert stuck.came.wait_for(lambda: len(stuck.spans) >= 5, 20)
        assert len(stuck.spans) <= 6, "more than one batch under way and a full queue"


@pytest.mark.skipif(not os.environ.get("OUTRIDER_SLOW_TESTS"), reason="starting a process takes 12 s")
def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(folder: str) -> None:
    with silent() as (url, called):
        options = ("--otlp-traces-endpoint", url)
        with serving(folder, *options, **QUEUE) as running:
            with httpx.Client(base_url=running.url, timeout=10) as client:
                texts = {client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] for _ in range(12)}
            assert len(texts) == 1
            assert running.idle()
            assert called()
            before = time.monotonic()
            assert running.stop() == 0
            assert time.monotonic() - before < 10  # the SDK itself would wait for half a minute


def test_nobody_asked_and_what_is_wrong_with_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert traces_to(None) is None
    for wrong in ("collector:4317", "grpc://collector:4317", "http://", "http://host:port", ""):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an http"):
            traces_to(wrong)
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
        with pytest.raises(ConfigError, match="environment"):
            traces_to("http://127.0.0.1:9/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    found = traces_to(None)
    assert found is not None
    found.close()
    for name, value in (
        ("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "nowhere"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert traces_to(None) is None, name


def test_a_library_that_is_missing_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from outrider.cli import main

    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr("sys.argv", ["outrider", "serve", "no-such-model", "--otlp-traces-endpoint", "http://c:4318"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "pip install 'outrider[otel]'" in " ".join(capsys.readouterr().err.split())
    # In the environment it may be meant for others: no traces, and the server runs.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert traces_to(None) is None
    assert "outrider[otel]" in caplog.text
