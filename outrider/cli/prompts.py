"""What to generate from: an argument, a file, or stdin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError
from outrider.prompts import Prompt, prompt_of, read_objects, read_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_prompts"]


def read_prompts(argument: str | None, option: str | None, file: Path | None) -> list[Prompt]:
    """Read from the one place that was given; from stdin for "-", and where something is piped in.

    A .jsonl file holds an object a line, with "prompt" or "messages"; any other file is one prompt. One line break at
    a text's end is no part of it.

    Raises:
        InvalidRequestError: There is no prompt, more than one source, or a file that cannot be read.
    """
    given = [source for source in (argument, option, file) if source is not None]
    if len(given) > 1:
        raise InvalidRequestError("give the prompt once: as PROMPT, with -p, or with -f")
    text = argument if argument is not None else option
    if file is not None and str(file) != "-":
        return _lines(file) if file.suffix == ".jsonl" else [_whole(file)]
    if text is not None and text != "-":
        return [Prompt(text)]
    if not given and sys.stdin.isatty():
        raise InvalidRequestError('there is no prompt: outrider generate "Write a haiku", -f FILE, or pipe one in')
    try:
        piped = _cut(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"stdin is not {error.encoding} text ({error}); convert it, or use -f FILE") from None
    if not piped:
        raise InvalidRequestError('there is no prompt: stdin is empty; outrider generate "Write a haiku", or -f FILE')
    return [Prompt(piped)]


def _cut(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _whole(file: Path) -> Prompt:
    text = _cut(read_text(file))
    if not text:
        raise InvalidRequestError(f"the prompt file {file} is empty; write a prompt into it")
    return Prompt(text)


def _lines(file: Path) -> list[Prompt]:
    prompts = [_line(place, found) for place, found in read_objects(file)]
    if not prompts:
        raise InvalidRequestError(f'{file} holds no prompts: put an object with "prompt" or "messages" on each line')
    return prompts


def _line(place: str, found: Any) -> Prompt:
    prompt = prompt_of(found)
    if prompt is None:
        raise InvalidRequestError(f'{place} must be an object with "prompt" (a string) or "messages" (one or more)')
    return prompt
