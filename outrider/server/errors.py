"""What goes wrong with a request, as OpenAI's clients expect to hear of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ApiError",
    "ClientGoneError",
    "draining",
    "engine_failed",
    "expired",
    "invalid",
    "not_ready",
    "overloaded",
    "wrong_field",
]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# What pydantic puts into a place where a value may be of several kinds: the kind that it tried there.
_KIND = re.compile(r"str$|(list|literal|dict)\[|[A-Z]")


class ApiError(Exception):
    """Ends one request, with this answer.

    Args:
        status: HTTP status.
        code: A stable name for programs.
        message: For people: what was wrong, and what would be right.
        param: The field at fault.
        retry_after: Seconds after which trying again makes sense.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after = param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class ClientGoneError(Exception):
    """The client went away; nobody is left to answer."""


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Refuse a request that can never be right."""
    return ApiError(400, code, message, param=param)


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """Refuse for want of room here."""
    return ApiError(503, "server_overloaded", message, retry_after=retry_after)


def draining() -> ApiError:
    """Refuse because the server is about to stop."""
    return ApiError(503, "server_draining", "the server is shutting down; try another one", retry_after=1)


def engine_failed() -> ApiError:
    """End a request because the engine has failed, and the server stops."""
    return ApiError(500, "engine_failed", "the engine failed and the server stops; try another one")


def not_ready() -> ApiError:
    """Refuse because there is no model yet."""
    return ApiError(503, "server_not_ready", "the model is still being loaded; /ready tells when", retry_after=2)


def expired(seconds: float) -> ApiError:
    """End a request that took too long."""
    return ApiError(
        504, "deadline_exceeded", f"the request was not done after {seconds:g} s; ask for fewer tokens, or stream"
    )


def wrong_field(found: Sequence[tuple[tuple[Any, ...], str]]) -> tuple[str, str]:
    """Give the first field at fault, as a client knows it, and what is wrong with it.

    A value that may be of several kinds (a string or a list) has an error for each; those that came furthest tell.

    Args:
        found: pydantic's errors: where, and what.
    """
    first = found[0][0]
    begin = next((place for place, part in enumerate(first) if _KIND.match(str(part))), len(first))
    rivals = [one for one in found if one[0][:begin] == first[:begin]] if begin < len(first) else found[:1]
    furthest = max(len(where) for where, _ in rivals)
    told = [one for one in rivals if len(one[0]) == furthest]
    path = [str(part) for place, part in enumerate(told[0][0]) if place < begin or not _KIND.match(str(part))]
    messages = list(dict.fromkeys(message for _, message in told))
    return ".".join(path), " or ".join([messages[0], *(one.removeprefix("Input should be ") for one in messages[1:])])
