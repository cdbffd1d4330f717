"""What to generate from: an argument, a file, or stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.llm import LLM

__all__ = ["Prompt", "read_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A text to go on from or to answer, or a conversation."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def shown(self) -> str | list[dict[str, Any]]:
        """As it was given."""
        return self.text if self.text is not None else list(self.messages)

    def prepared(self, llm: LLM, *, chat: bool | None, system: str | None) -> str | list[int]:
        """Give what `LLM.generate` takes: the text itself, or the ids of the conversation it begins.

        Args:
            llm: Whose chat template to use.
            chat: Whether a text is a user's message; None: where the model has a template.
            system: Goes before a user's message.
        """
        templated = bool(getattr(llm.tokenizer, "chat_template", None)) if chat is None else chat
        if self.text is not None and not templated:
            if system is not None:
                raise InvalidRequestError("--system needs a chat template; leave --raw out, or use an instruct model")
            return self.text
        messages = list(self.messages) or [{"role": "user", "content": self.text}]
        return llm.render(([{"role": "system", "content": system}] if system is not None else []) + messages)


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
        return _lines(file) if file.suffix == ".jsonl" else [Prompt(_cut(_read(file)))]
    if text is not None and text != "-":
        return [Prompt(text)]
    if not given and sys.stdin.isatty():
        raise InvalidRequestError('there is no prompt: outrider generate "Write a haiku", -f FILE, or pipe one in')
    piped = _cut(sys.stdin.read())
    if not piped:
        raise InvalidRequestError('there is no prompt: stdin is empty; outrider generate "Write a haiku", or -f FILE')
    return [Prompt(piped)]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt file {file} cannot be read ({error})") from None


def _cut(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _lines(file: Path) -> list[Prompt]:
    prompts = [
        _line(f"{file}:{number}", line) for number, line in enumerate(_read(file).splitlines(), 1) if line.strip()
    ]
    if not prompts:
        raise InvalidRequestError(f'{file} holds no prompts: put an object with "prompt" or "messages" on each line')
    return prompts


def _line(place: str, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"{place} is not JSON ({error})") from None
    if isinstance(found, dict):
        text, messages = found.get("prompt"), found.get("messages")
        if isinstance(text, str) and messages is None:
            return Prompt(text)
        if text is None and isinstance(messages, list) and messages:
            return Prompt(None, tuple(messages))
    raise InvalidRequestError(f'{place} must be an object with "prompt" (a string) or "messages" (a list)')
