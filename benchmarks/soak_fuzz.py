"""A long run of damaged requests: bytes and values changed at random, each answered in the form of all others."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import TYPE_CHECKING, Any

from benchmarks.raw_client import ask
from benchmarks.soak_watch import Pulse, back, quiet, reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.raw_client import Answer
    from benchmarks.soak_site import Site

__all__ = ["damaged", "fuzz"]

TOKENS = 16
SLOW_SECONDS = 30.0
WARM_UP = 2000
MESSAGES = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3 w4 w5"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}}
COMMON = {"model": "target", "temperature": 0.7, "top_p": 0.9, "seed": 7, "n": 2, "stop": ["w9"], "max_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = COMMON | {"messages": MESSAGES}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**COMMON, "prompt": "w1 w2 w3", "logprobs": 2, "logit_bias": {"5": 1.5}, "echo": True}),
    ("/v1/completions", {**COMMON, "prompt": [[1, 2, 3], [4, 5]], "stream": True, "speculation": "off"}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "user": "me"}),
    ("/v1/chat/completions", {**CHAT, **STREAM}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "auto", "min_tokens": 2}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}, "presence_penalty": 1}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ("/v1/responses", {"input": "w1 w2", "instructions": "w3", "max_output_tokens": 8, "top_p": 0.5}),
    ("/v1/responses", {"input": [{"role": "user", "content": "w1"}], "stream": True, "max_output_tokens": 8}),
    ("/tokenize", {"prompt": "w1 w2", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, -1e308, 1e-308, 0.1, "", "\0", "a" * 3000, "NaN",
    "5", [], {}, [[]], [None], {"": None}, [1] * 500, "w1 " * 400, "\ud800", "💥", "../../etc/passwd",
    "{{ 7 * 7 }}",
    {"$ref": "#"}, "' OR 1=1 --", "<script>", "%n%s", "\r\nx: y",
]  # fmt: skip
BYTES = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"[", b'"', b"\\", b"\\u0000", b"\\ud800", b"NaN", b"Infinity", b"1e400",
    b"-", b",", b"\xc3", b"\x80" * 8, b"[" * 500, b'{"a":' * 200, b"9" * 500, b"//", b"\r\n\r\n",
]  # fmt: skip
NAMES = ["prompt", "messages", "n", "max_tokens", "stop", "seed", "logprobs", "tools", "stream", "temperature", "top_k",
         "response_format", "speculation", "prediction", "priority", "unheard_of", "suffix", "",
         "__class__"]  # fmt: skip


def damaged(draws: random.Random) -> tuple[str, bytes]:
    """Give a path, and a body that was right before one to three things in it were changed."""
    path, seed = draws.choice(SEEDS)
    value = copy.deepcopy(seed)
    for _ in range(draws.randint(1, 3)):
        draws.choice(IN_VALUES)(value, draws)
    body = json.dumps(value).encode()
    if draws.random() < 0.4:
        for _ in range(draws.randint(1, 3)):
            body = draws.choice(IN_BYTES)(body, draws)
    return path, body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Give (container, key) of everything inside."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in inside] + [place for _, one in inside for place in _places(one)]


def _changed(value: Any, draws: random.Random) -> None:
    places = _places(value)
    if places:
        container, key = draws.choice(places)
        container[key] = copy.deepcopy(draws.choice(ODD))


def _removed(value: Any, draws: random.Random) -> None:
    places = _places(value)
    if places:
        container, key = draws.choice(places)
        del container[key]


def _added(value: Any, draws: random.Random) -> None:
    value[draws.choice(NAMES)] = copy.deepcopy(draws.choice(ODD))


def _nested(value: Any, draws: random.Random) -> None:
    places = _places(value)
    if places:
        container, key = draws.choice(places)
        container[key] = {"x": [container[key]]} if draws.random() < 0.5 else [container[key]]


def _cut(body: bytes, draws: random.Random) -> bytes:
    return body[: draws.randrange(len(body) + 1)]


def _flipped(body: bytes, draws: random.Random) -> bytes:
    if not body:
        return body
    place = draws.randrange(len(body))
    return body[:place] + bytes([body[place] ^ (1 << draws.randrange(8))]) + body[place + 1 :]


def _inserted(body: bytes, draws: random.Random) -> bytes:
    place = draws.randrange(len(body) + 1)
    return body[:place] + draws.choice(BYTES) + body[place:]


def _doubled(body: bytes, draws: random.Random) -> bytes:
    first, last = sorted((draws.randrange(len(body) + 1), draws.randrange(len(body) + 1)))
    return body[:last] + body[first:last] + body[last:]


IN_VALUES: list[Callable[[Any, random.Random], None]] = [_changed, _changed, _changed, _removed, _added, _nested]
IN_BYTES: list[Callable[[bytes, random.Random], bytes]] = [_cut, _flipped, _inserted, _doubled]


def fuzz(site: Site) -> None:
    """Send damaged requests; what is answered must be documented, shaped, soon, and tell nothing of our insides."""
    count = site.options.count or 10_000
    draws = random.Random(site.options.seed)
    with site.started() as server:

        async def one(number: int) -> None:
            if number % 100 == 0:
                site.record["samples"].append({"case": number, **reading(server.process.pid)})
                answer = await ask(server.port, site.body(number, TOKENS))
                site.check(number, TOKENS, answer, "among damaged ones")
                return
            path, body = damaged(draws)
            answer = await ask(server.port, body, path=path, seconds=SLOW_SECONDS)
            site.outcomes[answer.error.split(":")[0] or str(answer.status)] += 1
            _judge(site, path, body, answer)

        async def cases(count: int) -> None:
            numbers = iter(range(count))

            async def client() -> None:
                for number in numbers:
                    await one(number)
                    site.progress(f"case {number + 1} of {count}", number)

            await asyncio.gather(*(client() for _ in range(8)))

        async def all_of_them() -> None:
            site.record["warm_up"] = site.record["samples"] = []
            await cases(WARM_UP)  # what is loaded on first use and kept, within bounds, is there then
            site.record["samples"] = []
            before = reading(server.process.pid)
            async with Pulse(server.port) as pulse:
                await cases(count)
            quiet(server, site.verdicts, "after all cases")
            pulse.judge(site.verdicts)
            back(before, reading(server.process.pid), site.verdicts, "after all cases")

        asyncio.run(all_of_them())
    site.stopped(server)


def _judge(site: Site, path: str, body: bytes, answer: Answer) -> None:
    before = len(site.verdicts.broken)
    if answer.error or not answer.whole:
        site.verdicts.hold("O4", "an answer at all", False, error=answer.error, status=answer.status)
    elif answer.status >= 500:
        text = answer.body.decode(errors="replace")
        # 503 says that there is no room, which is no fault of anybody.
        site.verdicts.hold("O4", "no fault of ours", answer.status == 503, status=answer.status, told=text[:300])
    else:
        site.verdicts_of_refusal(answer)
    for one in site.verdicts.all[len(site.verdicts.all) - (len(site.verdicts.broken) - before) :]:
        if one["held"] is False:
            one["seen"] |= {"path": path, "sent": body[:2000].decode("latin-1")}
