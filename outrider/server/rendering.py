"""From a conversation to the prompt's text, by the target's chat template, in a process that may be killed."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import suppress
from typing import Any

from outrider.server.errors import ApiError, invalid

__all__ = ["Renderer", "template_of"]

logger = logging.getLogger("outrider")
RENDER_SECONDS = 2.0
START_SECONDS = 60.0
MAX_TEXT = 1 << 20  # characters a conversation may be rendered to beyond what its messages hold


def template_of(tokenizer: Any) -> str | None:
    """Give a tokenizer's chat template; of several, the default one."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


class Renderer:
    """Renders conversations, one at a time; a template that takes too long costs its own request alone.

    Args:
        template: Jinja, as the checkpoint has it; None where it has none.
        variables: What else it may read: special tokens.
    """

    def __init__(self, template: str | None, variables: dict[str, str]) -> None:
        self._template, self._variables = template, variables
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    @property
    def takes_tools(self) -> bool:
        """Whether the template itself says how tools are told."""
        return self._template is not None and "tools" in self._template

    async def start(self) -> None:
        """Start the process ahead of the first conversation."""
        if self._template is not None:
            async with self._lock:
                await self._running()

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, switches: dict[str, bool]
    ) -> str:
        """Give the prompt's text, ready for the answer.

        Args:
            messages, tools: As the template takes them.
            switches: What a request turned on and off.

        Raises:
            ApiError: There is no template, it refuses these messages or knows no such switch (400), or it does not come
                to an end (500).
        """
        if self._template is None:
            raise invalid("this model has no chat template; use /v1/completions with a prompt", code="no_chat_template")
        for name in switches:
            if name not in self._template:
                raise invalid(
                    f"this model's chat template does not look at {name}; leave it out",
                    f"chat_template_kwargs.{name}", "unsupported_parameter",
                )  # fmt: skip
        variables = {**self._variables, **switches}
        job = {"messages": messages, "tools": tools, "template": self._template, "variables": variables}
        line = json.dumps(job) + "\n"
        async with self._lock:
            answer = await self._asked(line.encode(), len(line))
        if "error" in answer:
            raise invalid(f"the model's chat template refused the messages: {answer['error']}", "messages")
        return str(answer["text"])

    async def close(self) -> None:
        """End the process."""
        await self._kill()

    async def _asked(self, line: bytes, size: int) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
            found: dict[str, Any] = json.loads(answer)
            if len(found.get("text", "")) > MAX_TEXT + size:
                raise ValueError("the text is too long")
        except (TimeoutError, ValueError, OSError, asyncio.LimitOverrunError) as error:
            # Cancelled or broken half-way, its next answer would be another request's: it is not used again.
            await self._kill()
            logger.warning("the chat template was stopped: %s", type(error).__name__)
            raise ApiError(
                500, "chat_template_failed", "the model's chat template took too long or said too much for this request"
            ) from None
        except asyncio.CancelledError:
            await asyncio.shield(self._kill())
            raise
        return found

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "outrider.server.render_child",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20,
            )  # fmt: skip
            assert self._process.stdout is not None
            async with asyncio.timeout(START_SECONDS):
                await self._process.stdout.readline()
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdout is not None:
            with suppress(ValueError):  # a line beyond all limits was cut
                await process.stdout.read()
        await process.wait()
