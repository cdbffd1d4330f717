"""What shape a text must have: from OpenAI's `response_format` to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import InvalidRequestError
from outrider.sampling.grammar import Grammar
from outrider.server.errors import invalid

if TYPE_CHECKING:
    from outrider.server.protocol import JsonSchema, ResponseFormat

__all__ = ["format_grammar", "lark_grammar", "schema_grammar"]


def format_grammar(asked: ResponseFormat | None) -> Grammar | None:
    """Give the grammar of a response format; None where any text will do.

    Raises:
        ApiError: The schema is missing or no schema.
    """
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.json_schema is None:
        raise invalid("response_format of type json_schema needs json_schema", "response_format.json_schema")
    return schema_grammar(asked.json_schema, "response_format.json_schema")


def schema_grammar(asked: JsonSchema, where: str) -> Grammar:
    """Give the grammar of a named schema.

    Raises:
        ApiError: It is missing, too large or nested too deep.
    """
    if not isinstance(asked.schema_, dict):
        raise invalid("the schema must be a JSON object", f"{where}.schema")
    try:
        return Grammar.json_schema(asked.schema_)
    except InvalidRequestError as error:
        raise invalid(str(error), f"{where}.schema") from None


def lark_grammar(text: str | None) -> Grammar | None:
    """Give the grammar of tool calls.

    Raises:
        ApiError: The tools' schemas are too large or nested too deep.
    """
    if text is None:
        return None
    try:
        return Grammar.lark(text)
    except InvalidRequestError as error:
        raise invalid(f"the tools' parameters: {error}", "tools") from None
