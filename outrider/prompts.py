"""Prompts as files hold them: a text to go on from or to answer, or a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.llm import LLM

__all__ = ["Prompt", "prompt_of", "read_objects", "read_text"]


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


def read_text(file: Path) -> str:
    """Read a prompt file.

    Raises:
        InvalidRequestError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the prompt file {file} cannot be read ({error})") from None


def read_objects(file: Path) -> list[tuple[str, Any]]:
    """Read a .jsonl file: where each line stands (FILE:LINE), and what it holds.

    Raises:
        InvalidRequestError: It cannot be read, or a line is not JSON.
    """
    found = []
    for number, line in enumerate(read_text(file).split("\n"), 1):  # a line separator may stand within a string
        if line.strip():
            place = f"{file}:{number}"
            try:
                found.append((place, json.loads(line)))
            except ValueError as error:
                raise InvalidRequestError(f"{place} is not JSON ({error})") from None
    return found


def prompt_of(found: Any) -> Prompt | None:
    """Read an object with "prompt" (a string) or "messages" (a list); None where it is no such thing."""
    if isinstance(found, dict):
        text, messages = found.get("prompt"), found.get("messages")
        if isinstance(text, str) and messages is None:
            return Prompt(text)
        if text is None and isinstance(messages, list) and messages:
            return Prompt(None, tuple(messages))
    return None
