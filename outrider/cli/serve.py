"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from outrider.cli.config_option import mention_config
from outrider.cli.console import reported, say
from outrider.cli.options import ModelOptions
from outrider.cli.values import one_model
from outrider.errors import ConfigError
from outrider.server.settings import ServerSettings

__all__ = ["SERVE_EXAMPLES", "SERVE_HELP", "ServeOptions", "serve"]

NETWORK, ACCESS, LIMITS = "Network", "Access", "Limits"
KEY_VARIABLE = "OUTRIDER_API_KEY"

SERVE_HELP = """Serve a model with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models.

Requests run together and speculate each as it pays; a request may say so itself ("speculation": "off", "auto" or
{"num_speculative_tokens": 3}). Without a model: SmolLM2-135M-Instruct, drafting by lookup.

It listens on this machine only, unless you give --host, which wants API keys: in a file (--api-key-file) or in the
environment variable OUTRIDER_API_KEY. /live and /ready are for probes, /metrics for Prometheus.

SIGTERM or Ctrl-C: no new requests, running ones may end (--drain-seconds); a second one stops at once.
"""

SERVE_EXAMPLES = """**Examples**

    outrider serve

    outrider serve Qwen/Qwen2.5-7B-Instruct --speculative-model Qwen/Qwen2.5-0.5B-Instruct --max-model-len 4096

    outrider serve model.gguf --host 0.0.0.0 --api-key-file keys.txt

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

**Exit codes:** 0 stopped by a signal, 1 or 2 it could not start (2: what you gave was wrong), 70 the engine failed.
"""


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, whom to let in, how much to take on."""

    target: Annotated[
        str | None, Argument(metavar="[MODEL]", help="Hub id, folder or GGUF file.", show_default=False)
    ] = None
    host: Annotated[str, Option(help="Address to listen on.", rich_help_panel=NETWORK)] = ServerSettings.host
    port: Annotated[int, Option(help="Port; 0 takes a free one.", rich_help_panel=NETWORK)] = ServerSettings.port
    served_model_name: Annotated[
        str | None,
        Option(help="What clients call the model.", show_default="the model's own name", rich_help_panel=NETWORK),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Option(help="Keys that may ask: a line each, KEY or NAME:KEY.", show_default="none", rich_help_panel=ACCESS),
    ] = None
    allow_anyone: Annotated[
        bool, Option("--allow-anyone", help="Listen beyond this machine without keys.", rich_help_panel=ACCESS)
    ] = False
    allowed_host: Annotated[
        list[str],
        Option(metavar="NAME", help="Host name this server is reached by; repeatable.", rich_help_panel=ACCESS),
    ] = field(default_factory=list)
    allowed_origin: Annotated[
        list[str],
        Option(metavar="URL", help="Web page's origin that may ask (CORS); repeatable.", rich_help_panel=ACCESS),
    ] = field(default_factory=list)
    share_prefixes: Annotated[
        bool,
        Option("--share-prefixes", help="Share the prefix cache between keys; timing then tells what others asked.",
               rich_help_panel=ACCESS),
    ] = False  # fmt: skip
    strict: Annotated[
        bool,
        Option("--strict", help="Refuse unknown fields instead of naming them in a header.", rich_help_panel=ACCESS),
    ] = False
    stream_tokens: Annotated[
        str,
        Option(
            metavar="round|single", help="Stream what each round gave, or one token a chunk.", rich_help_panel=NETWORK
        ),
    ] = "round"
    reasoning_parser: Annotated[
        str,
        Option(metavar="auto|none|think", help="Tell what stands in <think> from the answer (reasoning_content).",
               rich_help_panel=NETWORK),
    ] = ServerSettings.reasoning_parser  # fmt: skip
    max_waiting: Annotated[
        int | None,
        Option(help="Texts that may wait.", show_default="4 times --max-num-seqs", rich_help_panel=LIMITS),
    ] = None
    max_per_key: Annotated[
        int | None, Option(help="Texts one key may have under way.", show_default="no bound", rich_help_panel=LIMITS)
    ] = None
    max_samples: Annotated[int, Option(help="Texts one request may ask for.", rich_help_panel=LIMITS)] = (
        ServerSettings.max_samples
    )
    queue_seconds: Annotated[float, Option(help="How long a request may wait.", rich_help_panel=LIMITS)] = (
        ServerSettings.queue_seconds
    )
    deadline_seconds: Annotated[float, Option(help="How long a request may take in all.", rich_help_panel=LIMITS)] = (
        ServerSettings.deadline_seconds
    )
    drain_seconds: Annotated[
        float, Option(help="How long running requests may go on after SIGTERM.", rich_help_panel=LIMITS)
    ] = ServerSettings.drain_seconds
    stall_seconds: Annotated[
        float, Option(help="How long a client may leave a stream unread or a body unsent.", rich_help_panel=LIMITS)
    ] = ServerSettings.stall_seconds
    step_seconds: Annotated[
        float, Option(help="How long the engine may take for a step before it counts as hung.", rich_help_panel=LIMITS)
    ] = ServerSettings.step_seconds
    header_seconds: Annotated[
        float, Option(help="How long a request's head may take to arrive.", rich_help_panel=LIMITS)
    ] = ServerSettings.header_seconds
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(metavar="URL", help="Collector that a span of each request goes to (OTLP over HTTP).",
               show_default="OTEL_EXPORTER_OTLP_ENDPOINT, else none", rich_help_panel=NETWORK),
    ] = None  # fmt: skip
    verify_rate: Annotated[
        float,
        Option(help="Share of texts, 0 to 1, to run again without guesses while idle, and compare.",
               rich_help_panel=LIMITS),
    ] = ServerSettings.verify_rate  # fmt: skip
    traceback: Annotated[bool, Option("--traceback", help="Show where an error arose.")] = False

    def settings(self, max_num_seqs: int) -> ServerSettings:
        """Give the server's settings.

        Raises:
            ConfigError: A value is out of range, or anybody could use the server.
        """
        if self.stream_tokens not in ("round", "single"):
            raise ConfigError(f"--stream-tokens must be round or single, got {self.stream_tokens!r}")
        settings = ServerSettings(
            host=self.host,
            port=self.port,
            served_name=self.served_model_name,
            api_keys=keys_of(self.api_key_file),
            allowed_hosts=tuple(self.allowed_host),
            allowed_origins=tuple(self.allowed_origin),
            strict=self.strict,
            single_tokens=self.stream_tokens == "single",
            reasoning_parser=self.reasoning_parser,
            max_waiting=4 * max_num_seqs if self.max_waiting is None else self.max_waiting,
            max_per_key=self.max_per_key,
            max_samples=self.max_samples,
            queue_seconds=self.queue_seconds,
            deadline_seconds=self.deadline_seconds,
            drain_seconds=self.drain_seconds,
            stall_seconds=self.stall_seconds,
            header_seconds=self.header_seconds,
            step_seconds=self.step_seconds,
            verify_rate=self.verify_rate,
        )
        if not settings.on_loopback and not settings.api_keys and not self.allow_anyone:
            raise ConfigError(
                f"--host {self.host} lets anybody who reaches it use the model; give keys with --api-key-file or "
                f"{KEY_VARIABLE}, or say --allow-anyone"
            )
        return settings


def keys_of(path: Path | None) -> dict[bytes, str]:
    """Read keys from a file and from the environment: SHA-256 of the key -> name.

    Raises:
        ConfigError: The file cannot be read, holds no key, or names one twice.
    """
    lines = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file {path} cannot be read ({type(error).__name__}); check the path"
            ) from None
        lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not lines:
            raise ConfigError(f"--api-key-file {path} holds no key; write one a line")
    if os.environ.get(KEY_VARIABLE):
        lines.append(os.environ[KEY_VARIABLE])
    keys: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        name, colon, key = line.partition(":")
        if not colon:
            name, key = f"key-{number}", line
        digest = hashlib.sha256(key.strip().encode()).digest()
        if not key.strip() or digest in keys:
            raise ConfigError(f"key {number} is {'there twice' if digest in keys else 'empty'}; mend the list")
        keys[digest] = name
    return keys


def _stopped(*_: object) -> None:
    raise SystemExit(0)


def serve(server: ServeOptions, model: ModelOptions) -> None:
    """Take the port, then load, then serve until told to stop."""
    with reported(show_traceback=server.traceback):
        model = replace(model, model=one_model(server.target, model.model))
        settings = server.settings(model.max_num_seqs)
        mention_config(model.config)
        model.arguments()  # what is wrong with them is said before the port is taken
        from outrider.server.binding import bound
        from outrider.server.tracing import traces_to

        tracing = traces_to(server.otlp_traces_endpoint)

        taken = bound(settings.host, settings.port)
        signal.signal(signal.SIGTERM, _stopped)  # until the server has handlers of its own
        say(f"loading {model.shown_model}; http://{settings.host}:{taken.getsockname()[1]}/ready tells when it serves")
        try:
            from outrider.server.run import serve as run
        except ImportError as error:
            raise ConfigError(
                f"serving needs packages that are not installed ({error.name}): pip install 'outrider[server]'"
            ) from None
        code = run(taken, settings, partial(model.load, share_prefixes=server.share_prefixes), say, tracing)
    sys.stdout.flush()
    if code:
        raise typer.Exit(code)
