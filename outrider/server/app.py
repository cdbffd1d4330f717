"""The routes."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider import __version__
from outrider.errors import OutriderError
from outrider.server.chat import ChatAnswer, chat_params, plain_messages, rendered
from outrider.server.completions import CompletionAnswer, completion_params, prompts_of
from outrider.server.errors import ApiError, ClientGoneError, invalid, wrong_field
from outrider.server.events import EventStream, until_gone
from outrider.server.gate import Gate
from outrider.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.responses import ResponseAnswer, ResponsesRequest, chat_request
from outrider.server.sampling import checked_count, drafting_of
from outrider.server.tracing import Origin
from outrider.server.unknown import checked_fields

if TYPE_CHECKING:
    from outrider.server.call import Call
    from outrider.server.service import Service

    Answer = ChatAnswer | CompletionAnswer | ResponseAnswer

__all__ = ["make_app"]

logger = logging.getLogger("outrider")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is wrong; the message says how.",
        401: "No valid key.",
        403: "Host or origin is not allowed.",
        404: "There is no such model.",
        408: "The request did not arrive in time.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        429: "The key has its share under way.",
        431: "Too many headers.",
        500: "Generating failed.",
        503: "No room, not ready, or shutting down.",
        504: "It took too long.",
    }.items()
}


def make_app(service: Service) -> Any:
    """Give the ASGI app over a service."""
    app = FastAPI(
        title="Outrider", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json",
        redirect_slashes=False,
        # What FastAPI would trace by itself knows queries and bodies; `tracing.py` says what is told. (Releases without
        # it take the name and leave it at that.)
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )  # fmt: skip
    routes = _Routes(service)
    for path, endpoint in (("/live", routes.live), ("/ready", routes.ready), ("/health", routes.ready)):
        app.get(path, responses={503: ERRORS[503]})(endpoint)
    app.get("/metrics")(routes.metrics)
    app.get("/v1/models", responses=ERRORS)(routes.models)
    app.get("/v1/models/{name:path}", responses=ERRORS)(routes.one_model)
    app.post("/v1/chat/completions", responses=ERRORS)(routes.chat)
    app.post("/v1/completions", responses=ERRORS)(routes.completions)
    app.post("/v1/responses", responses=ERRORS)(routes.responses)
    app.post("/tokenize", responses=ERRORS)(routes.tokenize)
    app.post("/detokenize", responses=ERRORS)(routes.detokenize)
    for kind in (ApiError, OutriderError, RequestValidationError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _answered)
    gated: Any = Gate(app, service, frozenset(route.path for route in app.routes if isinstance(route, Route)))
    origins = service.settings.allowed_origins
    if origins:
        gated = CORSMiddleware(gated, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return gated


async def _answered(_: Request, error: Exception) -> Response:
    """Turn whatever was raised into an answer, which never shows more than it should.

    A coroutine, since Starlette would give a plain function a thread for each refusal, just when there is no time.
    """
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    if isinstance(error, RequestValidationError):
        error = _wrong_body(error)
    elif isinstance(error, HTTPException):
        return _not_routed(error)
    elif isinstance(error, OutriderError):
        error = invalid(str(error))
    elif not isinstance(error, ApiError):
        logger.error("a request failed", exc_info=error)
        error = ApiError(500, "internal_error", "something went wrong here; other requests are not touched")
    return JSONResponse(error.body, error.status, headers=error.headers)


def _not_routed(error: HTTPException) -> Response:
    """Say that there is no such route, or not with that method, and what there is."""
    code, message = {
        404: ("not_found", "there is no such route; the API is under /v1, without a slash at the end: /openapi.json"),
        405: ("method_not_allowed", "this route has another method; see the header `allow`"),
    }.get(error.status_code, ("invalid_request", str(error.detail)))
    answer = ApiError(error.status_code, code, message)
    return JSONResponse(answer.body, error.status_code, headers={**answer.headers, **(error.headers or {})})


def _wrong_body(error: RequestValidationError) -> ApiError:
    """Say what is wrong with a body, naming the first field at fault."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return invalid("the body is not JSON", code="invalid_json")
    if found[0]["loc"] == ("body",) and found[0]["type"] == "missing":
        return invalid("there is no body; send a JSON object", code="invalid_json")
    place, message = wrong_field([(one["loc"][1:], one["msg"]) for one in found])
    return invalid(f"{place}: {message}" if place else message, place or None)


class _Routes:
    """What each route does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self) -> JSONResponse:
        """Whether the process should be left alone."""
        alive = self._service.alive
        return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 503)

    async def ready(self) -> JSONResponse:
        """Whether requests may be sent."""
        why = self._service.why_not_ready()
        if why is not None:
            return JSONResponse({"status": why}, 503, headers={"retry-after": "2"})
        return JSONResponse({"status": "degraded" if self._service.degraded else "ready"})

    async def metrics(self) -> Response:
        """Everything that is counted, for Prometheus."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [self._described()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        """The same, by name."""
        self._check_model(name)
        return self._described()

    def _described(self) -> dict[str, Any]:
        model = self._service.model
        engine = model.llm.engine
        return {
            "id": model.name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "outrider",
            "max_model_len": model.llm.max_model_len,
            "speculation": {
                "method": model.method,
                "num_speculative_tokens": engine.speculation.num_speculative_tokens,
                "verification": str(engine.speculation.verification),
            },
        }

    async def chat(self, request: Request, asked: Annotated[ChatRequest, Body()]) -> Response:
        """Answer a conversation."""
        service, ignored = self._service, self._checked(asked)
        call = await self._chat_call(request, asked)
        return await self._answer(request, call, ChatAnswer(asked, call, service.model), asked.stream, ignored)

    async def completions(self, request: Request, asked: Annotated[CompletionRequest, Body()]) -> Response:
        """Go on from prompts."""
        service, ignored = self._service, self._checked(asked)
        prompts = prompts_of(asked)
        checked_count(asked, service.settings, len(prompts))
        params = completion_params(asked, service.settings)
        method = drafting_of(asked, service.model.method)

        async def given() -> list[str | list[int]]:
            return prompts

        origin = Origin("text_completion", bool(asked.stream), request.headers)
        call = await service.call(
            given, params, request.state.ticket, method=method, num_prompts=len(prompts), origin=origin
        )
        return await self._answer(request, call, CompletionAnswer(asked, call, service.model), asked.stream, ignored)

    async def responses(self, request: Request, asked: Annotated[ResponsesRequest, Body()]) -> Response:
        """Answer a conversation, the newer way."""
        service, ignored = self._service, checked_fields(asked, strict=self._service.settings.strict)
        self._check_model(asked.model)
        call = await self._chat_call(request, chat_request(asked))
        return await self._answer(request, call, ResponseAnswer(asked, call, service.model), asked.stream, ignored)

    async def tokenize(self, asked: Annotated[TokenizeRequest, Body()]) -> dict[str, Any]:
        """Give the ids of a prompt or of a conversation."""
        service = self._service
        checked_fields(asked, strict=service.settings.strict)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if asked.messages is not None:
            ids = await rendered(service, plain_messages(asked.messages), asked.tools or [], asked.chat_template_kwargs)
        else:
            ids = await service.tokenize(asked.prompt or "", special=asked.add_special_tokens)
        return {"count": len(ids), "tokens": ids, "max_model_len": service.model.llm.max_model_len}

    async def detokenize(self, asked: Annotated[DetokenizeRequest, Body()]) -> dict[str, Any]:
        """Give the text of ids."""
        service = self._service
        checked_fields(asked, strict=service.settings.strict)
        self._check_model(asked.model)
        return {"prompt": await service.detokenize(asked.tokens)}

    async def _chat_call(self, request: Request, asked: ChatRequest) -> Call:
        service = self._service
        params = chat_params(asked, service.settings)
        messages = plain_messages(asked.messages)
        method = drafting_of(asked, service.model.method)

        async def given() -> list[str | list[int]]:
            return [await rendered(service, messages, asked.tools or [], asked.chat_template_kwargs)]

        origin = Origin("chat", bool(asked.stream), request.headers)
        return await service.call(given, params, request.state.ticket, method=method, origin=origin)

    def _checked(self, asked: ChatRequest | CompletionRequest) -> list[str]:
        ignored = checked_fields(asked, strict=self._service.settings.strict)
        self._check_model(asked.model)
        checked_count(asked, self._service.settings)
        return ignored

    def _check_model(self, name: str | None) -> None:
        served = self._service.model.name
        if name is not None and name != served:
            raise ApiError(404, "model_not_found", f"there is no model of that name; this server has {served!r}")

    async def _answer(
        self, request: Request, call: Call, answer: Answer, stream: bool | None, ignored: list[str]
    ) -> Response:
        headers = {"x-outrider-ignored-fields": _shown(ignored)} if ignored else {}
        if stream:
            done = b"" if isinstance(answer, ResponseAnswer) else b"data: [DONE]\n\n"
            stall = self._service.settings.stall_seconds
            return EventStream(call, answer.events(), stall_seconds=stall, done=done, headers=headers)
        try:
            return JSONResponse(await until_gone(request.receive, answer.whole()), headers=headers)
        finally:
            call.close()


def _shown(names: list[str]) -> str:
    """Write names of fields so that they may stand in a header."""
    return json.dumps(names[:20])[:1000]
