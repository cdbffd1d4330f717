"""Options that say what a text must look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from outrider.errors import InvalidRequestError
from outrider.sampling.grammar import Grammar

__all__ = ["GrammarOptions"]

GRAMMAR = "Form of the text"


@dataclass(frozen=True)
class GrammarOptions:
    """What the text must look like; needs the extra `server`."""

    json_schema: Annotated[
        str | None,
        Option(metavar="FILE|TEXT", help="The text is JSON by this schema: a file, or {...}.", rich_help_panel=GRAMMAR),
    ] = None
    regex: Annotated[
        str | None,
        Option(metavar="PATTERN", help="The text matches this pattern as a whole.", rich_help_panel=GRAMMAR),
    ] = None

    def grammar(self) -> Grammar | None:
        """Give what was asked for; None where nothing was.

        Raises:
            InvalidRequestError: Both were given, or what was given is none.
        """
        if self.json_schema is not None and self.regex is not None:
            raise InvalidRequestError("--json-schema and --regex both say what the text looks like; give one")
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.json_schema is None:
            return None
        if self.json_schema.lstrip().startswith("{"):
            return Grammar.json_schema(self.json_schema)
        try:
            return Grammar.json_schema(Path(self.json_schema).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"--json-schema {self.json_schema!r} cannot be read: {error}") from None
