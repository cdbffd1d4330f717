"""A benchmark of an OpenAI-compatible server: streams over HTTP, as a reader sees them.

Tokens are those that the server's usage tells, or that a tokenizer counts in the text; never chunks, for a round's
tokens come in one chunk and a token's bytes may come in two.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from outrider.bench.plan import AUTO, rotated
from outrider.bench.questions import conversations
from outrider.bench.run import Outcome
from outrider.bench.trials import OFF, Reply, Setting, Trial
from outrider.errors import ConfigError, OutriderError
from outrider.model.checkpoint import first_line
from outrider.outputs import SpeculationStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from outrider.bench.plan import Plan
    from outrider.bench.questions import Question
    from outrider.prompts import Prompt

    Tell = Callable[[str, int], None]

__all__ = ["SERVED", "RemoteBench", "Server", "connect"]

SERVED = "as served"  # the draft length of a server that is not ours: whatever it does
TIMEOUT = httpx.Timeout(600, connect=20)


@dataclass(frozen=True)
class Server:
    """Whom to ask.

    Attributes:
        url: Without /v1.
        key: Sent as a bearer token; None sends none.
        model: What the server calls the model.
        ours: Whether it is Outrider's, and takes `speculation` by request.
        count: Gives a text's tokens where the server does not tell them; None where nobody can.
    """

    url: str
    key: str | None
    model: str
    ours: bool
    count: Callable[[str], int] | None = None

    def client(self, together: int = 1) -> httpx.AsyncClient:
        """Give a client with room for so many connections."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers=_headers(self.key),
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=together + 2, max_keepalive_connections=together + 2),
        )


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def connect(
    url: str, key: str | None = None, model: str | None = None, count: Callable[[str], int] | None = None
) -> Server:
    """Ask a server which model it serves, and whether it is one of ours.

    Raises:
        ConfigError: The address is none, or the server does not answer as OpenAI's do.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{base}/v1/models", headers=_headers(key), timeout=TIMEOUT)
        answer.raise_for_status()
        entries = answer.json()["data"]
        names = [str(one["id"]) for one in entries]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--url {url!r} does not answer GET /v1/models ({first_line(error)}); check the address, that "
            "the server is up, and the key in OPENAI_API_KEY"
        ) from None
    if not names:
        raise ConfigError(f"{url} serves no model; load one there first")
    if model is not None and model not in names:
        raise ConfigError(f"--served-model {model!r} is not served at {url}; it serves {', '.join(names)}")
    chosen = entries[names.index(model) if model is not None else 0]
    return Server(base, key, str(chosen["id"]), chosen.get("owned_by") == "outrider", count)


@dataclass
class RemoteBench:
    """Measures a server, and keeps what came of it, also where it is interrupted.

    Attributes:
        server: Whom.
        questions, plan, tell, outcome, prompts, facts: As of `LocalBench`; `prompts` are conversations.
    """

    server: Server
    questions: Sequence[Question]
    plan: Plan
    tell: Tell = lambda _what, _turns: None
    outcome: Outcome = field(default_factory=Outcome)
    prompts: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def settings(self) -> list[Setting]:
        """An Outrider server is measured plainly and with guesses, by request; others as they are."""
        lengths = (OFF, AUTO) if self.server.ours else (SERVED,)
        return [
            Setting("server", "server", length, concurrency, temperature)
            for temperature in self.plan.temperatures
            for concurrency in self.plan.concurrency
            for length in lengths
        ]

    @property
    def facts(self) -> dict[str, Any]:
        """Say what was measured."""
        kind = "an Outrider server" if self.server.ours else "a server"
        return {"name": self.server.model, "device": f"{kind} at {self.server.url}"}

    def measure(self) -> None:
        """Ask for the conversations' earlier turns, warm up, and measure all settings by turns.

        Raises:
            OutriderError: The server cannot answer the prompts.
        """
        first = self.settings[0]
        greedy = Setting("server", "server", first.length, max(self.plan.concurrency), 0.0)

        def answer(prompts: list[Prompt]) -> list[str]:
            replies = self._replies([("", _messages(one)) for one in prompts], greedy)
            broken = next((one.error for one in replies if one.error is not None), None)
            if broken is not None:
                raise OutriderError(f"the server cannot answer the prompts: {broken}")
            return [one.text or "" for one in replies]

        self.tell("answering the conversations' first turns", 0)
        cases = conversations(self.questions, answer, templated=True)
        self.prompts = [(case.kind, _messages(case.prompt)) for case in cases]
        self.tell("warming up", 0)
        short = [self.prompts[place % len(self.prompts)] for place in range(self.plan.warmup)]
        for setting in self.settings if short else ():
            self._replies(short, setting)
        for repeat, setting in rotated(self.settings, self.plan.repeats):
            if setting in self.outcome.failures:
                continue
            where = f"{setting.concurrency} at a time, temperature {setting.temperature:g}"
            self.tell(f"{setting.title}, {where} (turn {repeat + 1} of {self.plan.repeats})", 1)
            began = time.perf_counter()
            trial = Trial(setting, repeat, 0.0, self._replies(self.prompts, setting))
            trial = Trial(setting, repeat, time.perf_counter() - began, trial.replies)
            if trial.errors:
                reason = f"{len(trial.errors)} of {len(trial.replies)} texts failed: {trial.errors[0]}"
                self.outcome.fail([setting], reason)
            else:
                self.outcome.trials.setdefault(setting, []).append(trial)
        self._compare()

    def _compare(self) -> None:
        """Hold texts, which are all that a server tells, against those of plain decoding."""
        for setting, trials in self.outcome.trials.items():
            plain = Setting("server", "server", OFF, setting.concurrency, setting.temperature)
            if setting.length == AUTO and self.outcome.trials.get(plain):
                pairs = zip(self.outcome.trials[plain][0].replies, trials[0].replies, strict=True)
                same = [one.text == other.text for one, other in pairs]
                told = {"texts": len(same), "equal": sum(same), "expected": False, "guaranteed": False}
                self.outcome.equality[setting] = told

    def _replies(self, prompts: Sequence[tuple[str, Any]], setting: Setting) -> tuple[Reply, ...]:
        return asyncio.run(self._closed_loop(prompts, setting))

    async def _closed_loop(self, prompts: Sequence[tuple[str, Any]], setting: Setting) -> tuple[Reply, ...]:
        """Let so many clients ask until all is answered, each asking anew as soon as it has its answer."""
        replies: list[Reply | None] = [None] * len(prompts)
        waiting = list(enumerate(prompts))[::-1]
        async with self.server.client(setting.concurrency) as client:

            async def one() -> None:
                while waiting:
                    place, (kind, messages) = waiting.pop()
                    replies[place] = await self._ask(client, kind, self._body(messages, setting, place))

            await asyncio.gather(*(one() for _ in range(min(setting.concurrency, len(prompts)))))
        return tuple(reply for reply in replies if reply is not None)

    def _body(self, messages: list[dict[str, Any]], setting: Setting, place: int) -> dict[str, Any]:
        budget = self.plan.budget
        body: dict[str, Any] = {
            "model": self.server.model,
            "messages": messages,
            "max_tokens": budget.max_tokens,
            "temperature": setting.temperature,
            "seed": budget.seed + place,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if budget.ignore_eos:
            body["ignore_eos"] = True
        if self.server.ours:
            body["speculation"] = setting.length
        return body

    async def _ask(self, client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> Reply:
        began = time.perf_counter()
        stream = _Stream()
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code == 200:
                    async for line in _lines(answer):
                        stream.take(line, time.perf_counter())
                else:
                    said = (await answer.aread()).decode(errors="replace")[:300]
                    stream.error = f"HTTP {answer.status_code}: {said}"
        except (httpx.HTTPError, ValueError) as error:
            stream.error = stream.error or f"{type(error).__name__}: {error}"
        return stream.reply(kind, began, self.server.count)


@dataclass
class _Stream:
    """A streamed answer as it comes."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    ended: bool = False

    def take(self, line: str, now: float) -> None:
        """Take in one line of it."""
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self.ended = True
            return
        event = json.loads(data)
        try:
            if "error" in event:
                self.error = json.dumps(event["error"])[:300]
            self.usage = dict(event.get("usage") or self.usage)
            pieces = [_piece(choice.get("delta") or {}) for choice in event.get("choices") or []]
        except (TypeError, AttributeError, ValueError):
            self.error = self.error or f"an event is none of a chat's: {data[:200]}"
            return
        if any(pieces):
            self.text += "".join(pieces)
            self.times.append(now)

    def reply(self, kind: str, began: float, count: Callable[[str], int] | None) -> Reply:
        """Give what came of it."""
        ended = time.perf_counter()
        error, tokens = self.error, self.usage.get("completion_tokens")
        if not isinstance(tokens, int):
            tokens = None
        if error is None and not self.ended:
            error = "the stream broke off"
        if tokens is None and count is not None:
            tokens = count(self.text)
        if tokens is None:
            error = error or "the server tells no usage; name the model, whose tokenizer counts: outrider bench MODEL"
        gaps = tuple(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False))
        first = self.times[0] - began if self.times else None
        stats = _stats(self.usage, tokens or 0)
        # What comes after the last piece of text (usage, the end mark) is no reader's time.
        last = self.times[-1] if self.times else ended
        return Reply(kind, tokens or 0, last - began, first, gaps, stats, text=self.text, error=error)


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Give a stream's lines. They end with line breaks alone: a text may hold other separators (U+2028) as they are."""
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode("utf-8").rstrip("\r")
    if rest:
        yield rest.decode("utf-8")


def _piece(delta: dict[str, Any]) -> str:
    """Give an event's text; a thinking model's thoughts are tokens like others."""
    return "".join(str(delta.get(name) or "") for name in ("reasoning_content", "reasoning", "content"))


def _stats(usage: dict[str, Any], tokens: int) -> SpeculationStats | None:
    """Read what an Outrider server tells of its rounds."""
    told = usage.get("outrider")
    if not isinstance(told, dict):
        return None
    return SpeculationStats(
        rounds=told.get("rounds", 0),
        drafted=told.get("drafted", 0),
        accepted=told.get("accepted", 0),
        drafted_per_position=tuple(told.get("drafted_per_position") or ()),
        accepted_per_position=tuple(told.get("accepted_per_position") or ()),
        tokens=tokens,
    )


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return list(prompt.messages) or [{"role": "user", "content": prompt.text}]
