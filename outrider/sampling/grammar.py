"""What a text must look like: a value that names a language, checked for size and shape when it is made.

Nothing is compiled here; that needs a tokenizer and a library, see `engine/grammar_compiler.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MAX_GRAMMAR_BYTES", "MAX_GRAMMAR_DEPTH", "Grammar"]

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_REPEATS = 4096  # repetitions in regular expressions: they compile in the square of their number
MAX_LINES = 1024  # of a Lark grammar, a rule each: rules that name each other compile in more
KINDS = ("json_schema", "regex", "choice", "lark")
REPEAT = re.compile(r"[?*+]|\{\d|\\u00(?:2[ab]|3f|7b)", re.IGNORECASE)  # JSON within Lark may write them as \u003f
MAX_GRAMMAR_DEPTH = 64  # brackets within brackets: parsers of grammars call themselves for each
CLOSERS = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Grammar:
    """The texts that a request may give: made by one of the constructors, equal where kind and text are.

    Attributes:
        kind: "json_schema", "regex", "choice" or "lark".
        text: The schema, the pattern, the strings as a JSON list, or the grammar.

    Raises:
        InvalidRequestError: It is not a string, too long, too deeply nested, or no JSON.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"a grammar is one of {', '.join(KINDS)}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidRequestError(f"a grammar's {self.kind} must be a string, got {self.text!r:.100}")
        if not self.text:
            raise InvalidRequestError(f"a grammar's {self.kind} must not be empty: it would allow no text")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"a grammar's {self.kind} holds half a character ({error.reason})") from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"a grammar's {self.kind} may have {MAX_GRAMMAR_BYTES} bytes, but this one has {size}; shorten it"
            )
        if _depth(self.text, strings=self.kind in ("json_schema", "choice")) > MAX_GRAMMAR_DEPTH:
            raise InvalidRequestError(
                f"a grammar's {self.kind} may hold {MAX_GRAMMAR_DEPTH} brackets within each other, but this one "
                "holds more; make it flatter"
            )
        if self.kind == "json_schema":
            _check_schema(self.text)
        elif self.kind == "choice":
            _check_choice(self.text)
        else:
            _check_repeats((self.text,))
        if self.kind == "lark" and self.text.count("\n") > MAX_LINES:
            raise InvalidRequestError(f"a Lark grammar may have {MAX_LINES} lines, but this one has more; cut it")

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Self:
        """JSON by a schema, given as a dict or as JSON text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"a JSON schema must be an object, got {schema!r:.100}")
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise InvalidRequestError(
                f"a JSON schema may be nested {MAX_GRAMMAR_DEPTH} deep, but this one is far deeper; make it flatter"
            ) from None
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the JSON schema is not JSON: {error}") from None
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that match the whole of a regular expression; no look-around, no back-references."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Self:
        """One of some strings."""
        listed = [options] if isinstance(options, str) else list(options)
        if not all(isinstance(one, str) for one in listed):
            raise InvalidRequestError(f"a choice needs strings, got {listed!r:.100}")
        return cls("choice", json.dumps(listed, ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Self:
        """Texts by a context-free grammar in llguidance's variant of Lark; it begins at the rule `start`."""
        return cls("lark", text)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"a JSON schema must be an object, got {text[:100]}")
    _check_repeats(_patterns(schema))


def _check_repeats(patterns: Iterable[str]) -> None:
    count = sum(len(REPEAT.findall(one)) for one in patterns)
    if count > MAX_REPEATS:
        raise InvalidRequestError(
            f"a grammar's patterns may hold {MAX_REPEATS} repetitions (? * + {{n}}), but these hold {count}; cut them"
        )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _patterns(schema: object) -> Iterator[str]:
    """Every regular expression of a schema, wherever it stands."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(one.values())
            pattern, named = one.get("pattern"), one.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern
            if isinstance(named, dict):
                yield from named
        elif isinstance(one, list):
            waiting.extend(one)


def _check_choice(text: str) -> None:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"a choice is a JSON list of strings: {error}") from None
    if not isinstance(options, list) or not options or not all(isinstance(one, str) and one for one in options):
        raise InvalidRequestError(f"a choice needs a list of strings that are not empty, got {text[:100]}")


def _depth(text: str, *, strings: bool) -> int:
    """How many brackets stand open at once, as far as it matters; with `strings`, those in double quotes do not count.

    A closing bracket closes whatever was opened within: "[(]" is a class of one character, not two levels.
    """
    opened: list[str] = []
    deepest, escaped, quoted = 0, False, False
    for one in text:
        if escaped:
            escaped = False
        elif one == "\\":
            escaped = True
        elif strings and one == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif one in "([{":
            opened.append(one)
            deepest = max(deepest, len(opened))
            if deepest > MAX_GRAMMAR_DEPTH:
                break
        elif one in CLOSERS and CLOSERS[one] in opened:
            while opened.pop() != CLOSERS[one]:
                pass
    return deepest
