"""What shape a text must have: from OpenAI's `response_format` to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import InvalidRequestError
from outrider.sampling.grammar import Grammar
from outrider.server.errors import invalid

if TYPE_CHECKING:
    from outrider.server.protocol import ResponseFormat

__all__ = ["format_grammar", "lark_grammar"]


def format_grammar(asked: ResponseFormat | None) -> Grammar | None:
    """Give the grammar of a response format; None where any text will do.

    Raises:
        ApiError: The schema is missing, no schema, too large or nested too deep.
    """
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.json_schema is None:
        raise invalid("response_format of type json_schema needs json_schema", "response_format.json_schema")
    where, schema = "response_format.json_schema.schema", asked.json_schema.schema_
    if not isinstance(schema, dict):
        raise invalid("the schema must be a JSON object", where)
    try:
        return Grammar.json_schema(schema)
    except InvalidRequestError as error:
        raise invalid(str(error), where) from None


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
