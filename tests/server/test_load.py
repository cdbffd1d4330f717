"""Everything at once: 32 clients, every kind of request, one in ten hanging up in the middle.

Each answer must be what the library says alone and without speculation, however full the batch that it came from.
For a few seconds; OUTRIDER_LOAD_SECONDS=60 makes it a minute, which is how it was first run.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.raw_client import Answer, Cut, ask
from benchmarks.soak_watch import reading
from outrider import LLM, Grammar, SamplingParams
from tests.server.harness import Running, serving
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from pathlib import Path

CLIENTS = 32
SECONDS = float(os.environ.get("OUTRIDER_LOAD_SECONDS", "5"))
MOST = 24  # tokens of a text
PROMPTS = ["one two three one two", "abcabcabcabc", "Was it a car or a cat I saw?", "to be or not to be, to be or"]
SCHEMA = {"enum": ["yes", "no", "perhaps"]}
# What a request says -> the same in the library.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"speculation": "off"}, {}),
    "auto": ({}, {}),
    "fixed": ({"speculation": {"method": "draft_model", "num_speculative_tokens": 3}}, {}),
    "sampled": ({"temperature": 1.1, "seed": 5}, {"temperature": 1.1, "seed": 5}),
    "ruled": (
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 0.7},
    ),
    "predicted": ({"prediction": {"type": "content", "content": "three one two three"}}, {}),
    "short": ({"max_tokens": 1}, {"max_tokens": 1}),
    "by a grammar": (
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
            "ignore_eos": False,
        },
        {"grammar": Grammar.json_schema(SCHEMA), "ignore_eos": False},
    ),
}


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str]
    tokens: int = 0  # of whole answers
    cut: int = 0
    slowest_live: float = 0.0


def body(kind: str, prompt: str) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": MOST, "temperature": 0, "ignore_eos": True} | KINDS[kind][0]
    return {"model": "tiny"} | asked


def alone(folder: str) -> dict[tuple[str, str], str]:
    """The oracle: every text by the library, one after another, without speculation."""
    with LLM(folder, method="none") as llm:
        return {
            (kind, prompt): llm.generate(
                prompt,
                SamplingParams(**{"temperature": 0, "max_tokens": MOST, "ignore_eos": True} | settings),
                progress=False,
            )[0].text
            for kind, (_, settings) in KINDS.items()
            for prompt in PROMPTS
        }


async def client(port: int, number: int, end: float, texts: dict[tuple[str, str], str], tally: Tally) -> None:
    draws = random.Random(number)
    while time.monotonic() < end:
        kind, prompt, streams = draws.choice(list(KINDS)), draws.choice(PROMPTS), draws.random() < 0.6
        asked = body(kind, prompt)
        if streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        if draws.random() < 0.1:
            cut: Cut = (draws.choice((-1, 1, 2, 4)) if streams else -1, draws.choice(("fin", "rst")))
            tally.cut += (await ask(port, asked, cut=cut)).cut
            continue
        answer = await ask(port, asked)
        tally.outcomes[judged(answer, texts[kind, prompt], kind)] += 1
        tally.tokens += answer.usage.get("completion_tokens", 0)


def judged(answer: Answer, text: str, kind: str) -> str:
    if answer.error or answer.status != 200:
        return f"{kind}: {answer.error or answer.status} {answer.body[:200]!r}"
    if answer.text != text or answer.endings != 1 or not answer.whole:
        return f"{kind}: {answer.text!r} in place of {text!r}, {answer.endings} endings"
    return "right"


async def looks(running: Running, end: float, tally: Tally) -> None:
    """Ask /live all the while, from a thread of its own: the clients' work must not be taken for the server's."""
    while time.monotonic() < end:
        began = time.monotonic()
        answer = await asyncio.to_thread(running.get, "/live")
        assert answer.status_code == 200
        tally.slowest_live = max(tally.slowest_live, time.monotonic() - began)
        await asyncio.sleep(0.2)


def test_everything_at_once(tmp_path: Path) -> None:
    target = tiny_target()
    folder = str(save(target, byte_tokenizer(), tmp_path / "target"))
    draft = str(save(tiny_draft(target, "noisy"), byte_tokenizer(), tmp_path / "draft"))
    texts, tally = alone(folder), Tally(Counter())
    how = ("--speculative-model", draft, "--max-num-seqs", "8")
    with serving(folder, *how, "--served-model-name", "tiny") as running:

        async def all_clients(seconds: float) -> None:
            end = time.monotonic() + seconds
            numbers = range(CLIENTS)
            await asyncio.gather(
                looks(running, end, tally), *(client(running.port, one, end, texts, tally) for one in numbers)
            )

        asyncio.run(all_clients(1.5))  # grammars compiled, threads started
        assert running.idle(20)
        before, counted = reading(running.process.pid), running.metric("outrider_generated_tokens_total")
        tally = Tally(Counter())
        asyncio.run(all_clients(SECONDS))
        assert running.idle(20)
        made, after = running.metric("outrider_generated_tokens_total") - counted, reading(running.process.pid)
        assert running.metric("outrider_accepted_tokens_total") > 0
        assert running.stop() == 0
    assert dict(tally.outcomes) == {"right": tally.outcomes.total()}
    assert tally.outcomes.total() > CLIENTS
    assert tally.cut > 0
    # Counters agree with what the clients saw; of answers that were cut off the clients know the most there can be.
    assert tally.tokens <= made <= tally.tokens + tally.cut * MOST
    assert tally.slowest_live < 5
    assert after["files"] <= before["files"] + 2
    assert after["threads"] <= before["threads"] + 4
    assert after["rss"] < 1.15 * before["rss"]
