"""Fields that nobody here knows, and fields that are known and cannot be served: neither is dropped in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from outrider.server.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["checked_fields", "unknown_fields"]

# What would change the answer, were it served: to ignore it would be to answer another question.
REFUSED = {
    "audio": "this server makes text only",
    "chat_template": "templates come with the model; requests may not bring one",
    "chat_template_kwargs": "requests can tell the template of a chat enable_thinking or thinking, and nothing else",
    "functions": "it is the old form of `tools`; use that",
    "function_call": "it is the old form of `tool_choice`; use that",
    "modalities": "this server makes text only",
    "logits_processors": "requests may not bring code",
    "prompt_embeds": "prompts are text or token ids",
    "reasoning_effort": "the models served here do not know it",
    "suffix": "filling in between is not served",
    "use_beam_search": "beam search is not served",
    "web_search_options": "this server fetches nothing",
}
# Of those, values that say what is done anyway. Nothing, an empty list and false do, too, but for what they switch on,
# and for what lies within a field that is served in part.
ALLOWED = {"modalities": ["text"], "reasoning_effort": "none"}
ON_BY_BEING_THERE = ("audio", "web_search_options")


def checked_fields(request: BaseModel, *, strict: bool) -> list[str]:
    """Give the names of unknown fields of a request, which are ignored.

    Raises:
        ApiError: One of them may not be ignored, or `strict` and there is one.
    """
    found = []
    for path, value in unknown_fields(request):
        field = path.partition(".")[0]
        why = REFUSED.get(field)
        if value is None:
            continue  # null is how clients write what they do not say
        if why is None:
            found.append(path)
        elif (value or path != field or field in ON_BY_BEING_THERE) and value != ALLOWED.get(path):
            raise invalid(f"{path} is not supported: {why}", field, "unsupported_parameter")
    if strict and found:
        raise invalid(f"unknown fields: {', '.join(found[:10])}; leave them out", found[0], "unknown_parameter")
    return found


def unknown_fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Name every field of a request, at any depth, that no model here has, with its value."""
    if isinstance(value, BaseModel):
        for name, given in (value.model_extra or {}).items():
            yield f"{path}{name}", given
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list) and not (value and isinstance(value[0], int | str)):
        for one in value:  # not a million ids one by one: lists of ids and of strings hold nothing else
            yield from unknown_fields(one, path)
