"""An engine in a process of its own.

llama.cpp and torch both bring OpenMP, and each llama.cpp server a team of threads: in one process libgomp counts them
all, finds more threads than cores, and lets every engine's threads sleep at each barrier. Apart, none slows another.
A crash in native code, too, then costs one engine and not the run.
"""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.peers.contestant import Contestant, Prompt, Setting
    from benchmarks.summary import Run

__all__ = ["Isolated"]

PATIENCE = 600  # seconds for one answer


class Isolated:
    """Forwards every call to an engine that is made, and stays, in a child process. Clocks run in the child."""

    def __init__(self, setting: Setting, *, make: Callable[..., Contestant], **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, partial(make, setting, **settings)), daemon=True)
        self._process.start()
        far.close()
        try:
            self._said: dict[str, Any] = {**self._answer(), "process": "its own"}
        except Exception:
            self.close()
            raise

    def generate(self, prompt: Prompt, num_tokens: int) -> Run:
        """Let the child generate."""
        self._pipe.send((prompt, num_tokens))
        run: Run = self._answer()
        return run

    def describe(self) -> dict[str, Any]:
        """Give what the engine said of itself."""
        return self._said

    def close(self) -> None:
        """End the child."""
        self._process.terminate()
        self._process.join(10)
        self._pipe.close()

    def _answer(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise RuntimeError(f"no answer within {PATIENCE} s")
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise RuntimeError(f"its process died (exit code {self._process.exitcode})") from None
        if not good:
            raise RuntimeError(answer)
        return answer


def _serve(pipe: Connection, make: Callable[[], Contestant]) -> None:
    """Make the engine and answer until the parent goes away."""
    try:
        engine = make()
        pipe.send((True, engine.describe()))
    except Exception as error:  # noqa: BLE001 - the parent reports it
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            prompt, num_tokens = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, engine.generate(prompt, num_tokens)))
        except Exception as error:  # noqa: BLE001
            pipe.send((False, f"{type(error).__name__}: {error}"))
