"""What every request passes before a route sees it: bounds, host, key, body. Everything is closed unless named open.

Pure ASGI: it reads the body itself, within bounds of size, time and nesting, and hands it on whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from outrider.server.errors import ApiError, ClientGoneError, draining, invalid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from outrider.server.service import Service

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["OPEN_PATHS", "Gate"]

OPEN_PATHS = ("/live", "/ready")  # without a key: probes have none, and they tell nothing
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WHILE_DRAINING = (*OPEN_PATHS, "/health", "/metrics")
LINGER_SECONDS = 1.0
LARGE_BODY = 1 << 16  # bytes; brackets of more are counted off the loop: four million of them take a third of a second
PORT = re.compile(r":\d+$")
BRACKETS = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL
)  # strings are read over: what is in them nests nothing


class Gate:
    """Lets requests through to an app.

    Args:
        app: The routes.
        service: Its settings bound requests; it says whether it drains.
        paths: What is counted under its own name even where no route saw it.
    """

    def __init__(self, app: App, service: Service, paths: frozenset[str]) -> None:
        self._app, self._service, self._settings, self._paths = app, service, service.settings, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, and pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the same head; the protocol sends no body after it
        sent, unread = _Sent(send), scope["method"] == "POST"  # no other method has a body here
        try:
            headers = self._head(scope)
            if unread:
                body = await self._body(headers, receive)
                unread = False
                receive = _replayed(body, receive)
                most = self._settings.max_json_depth
                many = len(body) > LARGE_BODY
                if await self._service.work(lambda: _nests_deeper(body, most)) if many else _nests_deeper(body, most):
                    raise invalid(f"the body nests deeper than {most}; flatten it", code="too_deep")
            with self._place(scope):
                await self._app(scope, receive, sent)
        except ApiError as error:
            rest = unread and not await _thrown_away(receive, self._settings.max_body_bytes)
            if not sent.began:
                await refuse(error, sent, close=self._service.draining or rest)
        except ClientGoneError:
            pass
        except Exception:  # noqa: BLE001 - logged and answered already; a request's fault is not the server's
            if not sent.began:
                await refuse(ApiError(500, "internal_error", "something went wrong here"), sent, close=True)
        path = scope["path"] if scope["path"] in self._paths else "unknown"
        route = getattr(scope.get("route"), "path", path)
        self._service.metrics.requests.labels(route, str(sent.status or 499)).inc()
        return None

    def _head(self, scope: Scope) -> dict[bytes, bytes]:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > self._settings.max_headers or size > self._settings.max_header_bytes:
            raise ApiError(431, "header_too_large", f"a request may have {self._settings.max_headers} headers")
        headers = dict(raw)
        self._check_host(headers)
        path = scope["path"]
        scope.setdefault("state", {})["key"] = "" if path in OPEN_PATHS else self._key(headers)
        if self._service.draining and path not in WHILE_DRAINING:
            raise draining()
        admission = self._service.admission
        if admission is not None and admission.full and path in GENERATING:
            raise self._counted(admission.refuse())  # before the body is read: refusing must cost nothing
        return headers

    def _place(self, scope: Scope) -> AbstractContextManager[object]:
        """Take a request's first place as soon as all of it has come: not sooner, since a slow sender would hold it.

        Not later either: of many that come together, the routes would read all before the first took a place.
        """
        admission = self._service.admission
        if admission is None or scope["path"] not in GENERATING:
            return nullcontext()
        try:
            ticket = scope["state"]["ticket"] = admission.enter(scope["state"]["key"])
        except ApiError as error:
            raise self._counted(error) from None
        return ticket

    def _counted(self, error: ApiError) -> ApiError:
        self._service.metrics.refused.labels(error.code).inc()
        return error

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Keep web pages out that reach this server by another name, or from another site.

        A browser always says which name it asked for; an HTTP/1.0 probe that says none is no web page.
        """
        allowed, named = self._settings.hosts, headers.get(b"host")
        if allowed and named is not None and PORT.sub("", named.decode("latin-1")).lower() not in allowed:
            raise ApiError(403, "host_not_allowed", "this server is not known by that name; see --allowed-host")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") not in self._settings.allowed_origins:
            raise ApiError(403, "origin_not_allowed", "web pages of that origin may not ask; see --allowed-origin")

    def _key(self, headers: dict[bytes, bytes]) -> str:
        """Give the name of the key that a request brings; "" where none is needed."""
        if not self._settings.api_keys:
            return ""
        kind, _, value = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(value.strip()).digest()
        found = ""
        for known, name in self._settings.api_keys.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, known):
                found = name
        if not found or kind.lower() != b"bearer":
            raise ApiError(401, "invalid_api_key", "send a valid key as 'Authorization: Bearer KEY'")
        return found

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        coded = headers.get(b"content-encoding", b"identity").lower()
        if kind != b"application/json" or coded != b"identity":
            raise ApiError(415, "unsupported_media_type", "send JSON, uncompressed, as content-type application/json")
        most, parts, size = self._settings.max_body_bytes, [], 0
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        while True:
            try:
                message = await asyncio.wait_for(receive(), self._settings.stall_seconds)
            except TimeoutError:
                raise ApiError(408, "request_timeout", "the request's body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if not message.get("more_body"):
                break
        return b"".join(parts)


class _Sent:
    """Passes an answer on and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    @property
    def began(self) -> bool:
        """Whether an answer is under way."""
        return self.status is not None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


async def refuse(error: ApiError, send: Send, *, close: bool = False) -> None:
    """Answer with an error."""
    body = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if close:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give the body once, then whatever comes after it: that the client has gone."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return waiting.pop() if waiting else await receive()

    return read


async def _thrown_away(receive: Receive, most: int) -> bool:
    """Read on what is not wanted, within bounds: a client that is still sending would not read the answer.

    Gives whether that was all of it, so that the connection can be used again.
    """
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return bool(message["type"] == "http.request")
    except TimeoutError:
        pass
    return False


def _too_large(most: int) -> ApiError:
    return ApiError(413, "body_too_large", f"a request's body may have {most} bytes")


def _nests_deeper(body: bytes, most: int) -> bool:
    """Say whether brackets nest deeper than `most`, in linear time and constant space; no further than it takes."""
    depth = 0
    for match in BRACKETS.finditer(body):
        first = match[0][0]
        if first in b"[{":
            depth += 1
            if depth > most:
                return True
        elif first in b"]}":
            depth -= 1
    return False
