"""`outrider chat`: a conversation over stdin and stdout."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from outrider.cli.config_option import mention_config
from outrider.cli.console import reported, say, working
from outrider.cli.options import STOPPING, ModelOptions, SamplingOptions
from outrider.cli.show import summary
from outrider.errors import InvalidRequestError, OutriderError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.llm import LLM
    from outrider.outputs import SpeculationStats
    from outrider.sampling.params import SamplingParams

__all__ = ["ChatOptions", "Conversation", "chat"]

COMMANDS = "/reset forgets the conversation, /system TEXT sets the system prompt, /stats shows figures, /exit leaves"


@dataclass(frozen=True)
class ChatOptions:
    """How to talk."""

    system: Annotated[str | None, Option(metavar="TEXT", help="The system prompt; also spelled -sys.")] = None
    max_tokens: Annotated[
        int,
        Option(
            "--max-tokens", "-n", help="Tokens an answer at most, -1 to the context's end.", rich_help_panel=STOPPING
        ),
    ] = 1024
    quiet: Annotated[bool, Option("--quiet", "-q", help="Nothing but answers and errors.")] = False
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.")] = False


def chat(options: ChatOptions, model: ModelOptions, sampling: SamplingOptions) -> None:
    """Load the model, then answer line by line until the input ends."""
    with reported(show_traceback=options.traceback):
        params = sampling.params(options.max_tokens)
        if not options.quiet:
            mention_config(model.config)
        with working(f"loading {model.shown_model}", quiet=options.quiet):
            llm = model.load()
        with llm:
            if not getattr(llm.tokenizer, "chat_template", None):
                raise InvalidRequestError(
                    f"{llm.loaded.name} has no chat template; use an instruct model, or outrider generate --raw"
                )
            if not options.quiet:
                say(f"{llm.loaded.name} listens. {COMMANDS}.")
            talk(Conversation(llm, params, options.system))


def talk(conversation: Conversation) -> None:
    """Read lines and answer them; a line that starts with / is a command."""
    while (line := _read_line()) is not None:
        line = line.strip()
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            say(conversation.command(line))
        elif line:
            _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    text = ""
    try:
        for piece in conversation.answer(line):
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except OutriderError as error:
        say(f"error: {error}")
        return
    typer.echo(nl=not text.endswith("\n"))


def _read_line() -> str | None:
    """Read a message; None at the input's end. Ctrl-C here only drops the line."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history in input()
    while True:
        try:
            return input("> ")
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /exit leaves)")


class Conversation:
    """What was said so far, and how fast.

    Args:
        llm: Who answers.
        params: How.
        system: The system prompt.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self.turns: list[dict[str, Any]] = []
        self.stats: list[SpeculationStats] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """System prompt and turns."""
        return ([{"role": "system", "content": self._system}] if self._system else []) + self.turns

    def command(self, line: str) -> str:
        """Do what a line with a slash asks for; give what to say about it."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.turns.clear()
            return "the conversation is forgotten"
        if name == "/system":
            self._system = text.strip() or None
            return "the system prompt is set" if self._system else "there is no system prompt now"
        if name == "/stats":
            return self._figures()
        return COMMANDS if name == "/help" else f"there is no command {name}; {COMMANDS}"

    def answer(self, message: str) -> Iterator[str]:
        """Stream the answer to a message; Ctrl-C ends it early, and what came of it stays in the conversation.

        Raises:
            OutriderError: It cannot be answered (too long, for one); then it was never said.
        """
        self.turns.append({"role": "user", "content": message})
        said = ""
        try:
            prompt = self._llm.render(self.messages)
            self._check_room(len(prompt))
            with _interruptible() as interrupted:
                for chunk in self._llm.stream(prompt, self._params):
                    said += chunk.text
                    yield chunk.text
                    if chunk.stats is not None:
                        self.stats.append(chunk.stats)
                    if chunk.error is not None:
                        say(f"error: {chunk.error}")
                    if interrupted.is_set():
                        break
        except OutriderError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": said})

    def _check_room(self, length: int) -> None:
        if length >= self._llm.max_model_len:
            raise InvalidRequestError(
                f"the conversation has grown to {length} tokens, and the context holds {self._llm.max_model_len}; "
                "/reset forgets it"
            )

    def _figures(self) -> str:
        if not self.stats:
            return "no answers yet"
        last = summary(self.stats[-1:], self.stats[-1].seconds)
        return f"last: {last}\nall: {summary(self.stats, sum(one.seconds for one in self.stats))}"


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Note a first Ctrl-C instead of raising, so that no round breaks off in the middle; a second one raises."""
    interrupted = threading.Event()

    def note(*_: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
