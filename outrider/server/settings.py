"""How a server behaves: every bound in one place, each with the reason for its default."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.errors import ConfigError

__all__ = ["ServerSettings"]

REASONING_PARSERS = ("auto", "none", "think")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, whom it lets in, and how much it takes on.

    Attributes:
        host, port: Where it listens; port 0 takes a free one.
        served_name: What clients call the model; None takes the model's own name.
        api_keys: Who may ask, by SHA-256 of the key: digest -> name. Empty lets everybody in.
        allowed_hosts: Host headers that are served; empty takes any. On loopback it is loopback's names, so that no web
            page can reach the server by another name (DNS rebinding).
        allowed_origins: Web pages that may read answers (CORS); none by default.
        strict: Refuse fields that are not known, in place of naming them in a header.
        single_tokens: Stream one token a chunk in place of what each round gave.
        reasoning_parser: How thoughts are told from answers: "think", "none", or "auto", which asks the checkpoint.
        max_waiting: Texts that may wait beyond those that run; more are refused at once.
        max_waiting_tokens: Prompt tokens that may wait.
        max_per_key: Texts that one key may have under way; None for no bound.
        queue_seconds: How long a text may wait to be begun.
        deadline_seconds: How long a request may take in all.
        drain_seconds: How long running requests may go on after SIGTERM.
        stall_seconds: How long a client may leave its stream unread, a body unfinished.
        header_seconds: How long a request's head may take to arrive.
        step_seconds: How long one step of the engine may take before it counts as hung.
        max_body_bytes, max_header_bytes, max_headers, max_json_depth: Of a request.
        max_samples: Texts of one request (its prompts times n).
        max_logprobs, max_biases, max_stops, max_stop_length: Of its parameters.
        max_stream_bytes: What may wait for one reader.
        verify_rate: Share of texts that are run again without speculation while nothing else runs, and compared.
        max_verify_texts, max_verify_tokens: What may wait to be run again, prompts counted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_keys: dict[bytes, str] = field(default_factory=dict, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict: bool = False
    single_tokens: bool = False
    reasoning_parser: str = "auto"
    max_waiting: int = 64
    max_waiting_tokens: int = 1 << 20
    max_per_key: int | None = None
    queue_seconds: float = 30.0
    deadline_seconds: float = 600.0
    drain_seconds: float = 30.0
    stall_seconds: float = 30.0
    header_seconds: float = 10.0
    step_seconds: float = 120.0
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_json_depth: int = 64
    max_samples: int = 8
    max_logprobs: int = 20
    max_biases: int = 1024
    max_stops: int = 4
    max_stop_length: int = 256
    max_stream_bytes: int = 256 << 10
    verify_rate: float = 0.0
    max_verify_texts: int = 64
    max_verify_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        for name, low in (("port", 0), ("max_waiting", 0), ("max_waiting_tokens", 1), ("max_samples", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be {low} or more, got {getattr(self, name)}")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for name in ("queue_seconds", "deadline_seconds", "stall_seconds", "header_seconds", "step_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"drain_seconds must be a number, 0 or more, got {self.drain_seconds}")
        if self.served_name is not None and not self.served_name.strip():
            raise ConfigError("served_model_name must not be empty; name it, or leave it out")
        if not 0 <= self.verify_rate <= 1:
            raise ConfigError(f"verify_rate must be in [0, 1], got {self.verify_rate}")
        if self.reasoning_parser not in REASONING_PARSERS:
            raise ConfigError(f"reasoning_parser must be auto, none or think, got {self.reasoning_parser!r}")
        if self.max_per_key is not None and self.max_per_key < 1:
            raise ConfigError(f"max_per_key must be 1 or more, got {self.max_per_key}")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host headers that are served, without ports; empty for any."""
        if self.allowed_hosts:
            return self.allowed_hosts
        return (*LOOPBACK, "[::1]") if self.on_loopback else ()
