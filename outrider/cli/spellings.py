"""llama.cpp's spellings, so that its command lines work here unchanged.

`-md` is a short option of two letters, which click would read as `-m d`: it is replaced before click looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typing import Any

__all__ = ["LlamaSpellings", "plain_spelling"]

SPELLINGS = {
    "-md": "--speculative-model",
    "--model-draft": "--speculative-model",
    "--draft": "--num-speculative-tokens",
    "--draft-max": "--num-speculative-tokens",
    "--draft-n": "--num-speculative-tokens",
    "--spec-draft-n-max": "--num-speculative-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--temp": "--temperature",
    "-s": "--seed",
    "--repeat-penalty": "--repetition-penalty",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-t": "--threads",
}
TAKE_TEXT = (
    "-p",
    "--prompt",
    "-sys",
    "--system",
    "--system-prompt",
    "--stop",
    "--bad-word",
    "--regex",
    "--json-schema",
)


def plain_spelling(arguments: list[str]) -> list[str]:
    """Put our names in place of llama.cpp's; what follows ``--`` or is an option's text stays as it is."""
    plain: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return plain + arguments[place:]
        is_text = place > 0 and arguments[place - 1] in TAKE_TEXT
        name, equals, value = argument.partition("=")
        plain.append(argument if is_text or name not in SPELLINGS else SPELLINGS[name] + equals + value)
    return plain


class LlamaSpellings(TyperCommand):
    """A command that reads llama.cpp's spellings too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after putting them into our spelling."""
        return super().parse_args(ctx, plain_spelling(args))
