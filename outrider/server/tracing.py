"""A span a request for OpenTelemetry, where somebody asked for it: figures and names, never a prompt, text or key.

Attributes are those of OpenTelemetry's conventions for generative AI where there is one (``gen_ai.*``), else
``outrider.*``. Spans end on the event loop into the SDK's bounded queue and are sent by a thread of its own, so a
collector that is slow or gone costs spans, not requests.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from outrider import __version__
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from starlette.datastructures import Headers

    from outrider.sampling.params import SamplingParams
    from outrider.server.errors import ApiError
    from outrider.server.worker import Job

__all__ = ["ENDPOINT_VARIABLES", "Origin", "RequestSpan", "Tracing", "traces_to"]

logger = logging.getLogger("outrider")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
PATH = "/v1/traces"
CLOSE_SECONDS = 2.0  # for the last spans, when the server ends
GONE = "client_gone"
SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")
LARGEST = 1 << 63  # OTLP's integers are below; a larger one (a seed may be) would cost its whole batch


def traces_to(endpoint: str | None) -> Tracing | None:
    """Give what sends spans; None where nobody asked for any.

    Args:
        endpoint: Where to, as a URL; without a path, the usual one. None leaves it to OpenTelemetry's variables. What
            is wrong with those is a warning: they are often set for all programs of a machine.

    Raises:
        ConfigError: The library is missing, or the endpoint is none it can send to.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or (endpoint is None and os.environ.get("OTEL_TRACES_EXPORTER") == "none"):
        return None
    if endpoint is not None:
        return _tracing("--otlp-traces-endpoint", endpoint, given=True)
    for name in ENDPOINT_VARIABLES:
        if os.environ.get(name):
            try:
                return _tracing(name, os.environ[name], given=False)
            except ConfigError as error:
                logger.warning("no traces are sent: %s", error)
                return None
    return None


def _tracing(source: str, endpoint: str, *, given: bool) -> Tracing:
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{source} must be an http:// or https:// URL, got {endpoint!r}")
    protocol = next((os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)), PROTOCOL)
    if not given and protocol != PROTOCOL:
        raise ConfigError(f"{source} is to be reached by {protocol!r}, and this server speaks {PROTOCOL} alone")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # Where the variables name it, the SDK reads them itself: it knows which of them wants the path added.
        if not given:
            return Tracing(OTLPSpanExporter())
        return Tracing(OTLPSpanExporter(url._replace(path=PATH).geturl() if url.path in ("", "/") else endpoint))
    except ImportError as error:
        raise ConfigError(
            f"{source} needs packages that are not installed ({error.name}): pip install 'outrider[otel]'"
        ) from None
    except ValueError as error:  # a bound in OTEL_BSP_* that is none
        raise ConfigError(f"OpenTelemetry's settings in the environment do not work: {error}") from None


class Origin(NamedTuple):
    """Where a request comes from.

    Attributes:
        operation: "chat" or "text_completion".
        stream: Whether it is answered as a stream.
        headers: Its headers, among which there may be ``traceparent``.
    """

    operation: str
    stream: bool
    headers: Headers


class Tracing:
    """Makes spans and sends them.

    Args:
        exporter: Sends a batch of spans; called in a thread of its own.

    Raises:
        ImportError: OpenTelemetry's SDK is not installed.
        ValueError: A bound of its queue (OTEL_BSP_*) is none.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Retries of a collector that is gone are no news; that spans are lost in the end is.
        told = logging.getLogger("opentelemetry.exporter")
        if told.level == logging.NOTSET:
            told.setLevel(logging.ERROR)
        own = Resource.create({"service.name": "outrider", "service.version": __version__})
        # The process has other things to do at its end than to wait for a collector: `close` bounds that.
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, origin: Origin, model: str, params: SamplingParams) -> RequestSpan:
        """Begin a request's span, as a part of the trace that the request names."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Any] = {
            "gen_ai.operation.name": origin.operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.stream": origin.stream,
            "gen_ai.output.type": "text" if params.grammar is None or params.grammar.kind != "json_schema" else "json",
        }
        for name in SETTINGS:
            if (value := getattr(params, name)) is not None and abs(value) < LARGEST:
                attributes[f"gen_ai.request.{name}"] = value
        if params.n > 1:
            attributes["gen_ai.request.choice.count"] = params.n
        parents = origin.headers.getlist("traceparent")
        carrier = {"traceparent": parents[0]} if len(parents) == 1 else {}
        if states := origin.headers.getlist("tracestate"):
            carrier["tracestate"] = ",".join(states)
        # An empty context, not the thread's own: what else runs here is no parent of a request.
        context = self._propagator.extract(carrier, Context())
        name = f"{origin.operation} {model}"
        return RequestSpan(self._tracer.start_span(name, context, SpanKind.SERVER, attributes))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left, within some time; after that it is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="outrider-traces", daemon=True)
        closing.start()
        closing.join(seconds)


class RequestSpan:
    """One request's span.

    Args:
        span: Begun.
    """

    def __init__(self, span: Span) -> None:
        self._span = span

    def refused(self, error: BaseException | None) -> None:
        """End it before any text was begun."""
        self._fail(error)
        self._span.end()

    def ended(
        self,
        jobs: Sequence[Job],
        reasons: Mapping[tuple[int, int], str],
        error: ApiError | None,
        answer_id: str | None,
    ) -> None:
        """End it with what came of its texts.

        Args:
            jobs: Its jobs, which may still be running where nobody waits any more.
            reasons: Why texts ended, by (place of the job, number of the sample); the others had to be given up.
            error: What ended it, if anything did.
            answer_id: What the client knows the answer by.
        """
        texts = [(place, one) for place, job in enumerate(jobs) for one in job.sequences]
        ends = [reasons.get((place, one.index)) for place, one in texts]
        stats = [one.stats for _, one in texts]
        # A prompt counts once, however many texts it has.
        cached = sum(job.sequences[0].stats.cached_tokens for job in jobs)
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(len(job.request.prompt_token_ids) for job in jobs),
            "gen_ai.usage.output_tokens": sum(one.tokens for one in stats),
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.response.finish_reasons": [reason or "abort" for reason in ends],
            "outrider.rounds": sum(one.rounds for one in stats),
            "outrider.drafted": sum(one.drafted for one in stats),
            "outrider.accepted": sum(one.accepted for one in stats),
        }
        if answer_id is not None:
            found["gen_ai.response.id"] = answer_id
        begun = [job.queue_seconds for job in jobs if job.queue_seconds is not None]
        if begun:
            found["outrider.queue_seconds"] = max(begun)
        first = [one.first_token_seconds for one in stats if one.tokens]
        if first:
            found["outrider.first_token_seconds"] = min(first)
        self._span.set_attributes(found)
        if error is not None or None in ends:
            self._fail(error)
        elif "error" in ends:
            self._tell("generation_failed", ours=True)
        self._span.end()

    def _fail(self, error: BaseException | None) -> None:
        from outrider.server.errors import ApiError

        if isinstance(error, ApiError):
            self._tell(error.code, ours=error.status >= 500)
        elif isinstance(error, Exception):
            self._tell("internal_error", ours=True)
        else:  # its task was cancelled, or it was given up without a word
            self._tell(GONE, ours=False)

    def _tell(self, code: str, *, ours: bool) -> None:
        """Name an error, and say whether it is the server's; its message may hold what is nobody's business."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", code)
        if ours:
            self._span.set_status(StatusCode.ERROR)
