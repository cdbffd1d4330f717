"""What all long runs share: a tiny pair whose text is known, its server, and what is noted of a run."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from benchmarks.load_servers import our_server, write_tokenizer
from benchmarks.soak_watch import Verdicts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.load_servers import ServerProcess
    from benchmarks.raw_client import Answer
    from benchmarks.terminal import Console

__all__ = ["LEAKS", "Site"]

READY_SECONDS = 120
PROMPT_TOKENS = 40
DOCUMENTED = (200, 400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504)
ERROR_FIELDS = {"message", "type", "param", "code"}
LEAKS = re.compile(r"Traceback|File \"|/root/|/home/|/usr/|/tmp/|\.py\b|0x[0-9a-f]{6,}")


class Site:
    """One long run.

    Args:
        options: `work`, `max_num_seqs`, `threads`, `seed`, and the mode's own.
        console: Where progress is told.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        from outrider.bench.pair import open_pair, read_facts, write_pair
        from outrider.bench.shapes import parse_shape

        self.options, self.console = options, console
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        shape = parse_shape("tiny")
        if not (self.work / "draft").is_dir():
            write_pair(self.work, target=shape, draft=shape, agreement=0.8, seed=0, num_prompts=2, force=True)
        pair = open_pair(self.work / "target", self.work / "draft")
        for folder in (pair.target, pair.draft):
            write_tokenizer(folder, read_facts(folder)["shape"].vocab)
        self._saying = pair.saying
        self._prompts = pair.saying.prompts(64, PROMPT_TOKENS)
        self.verdicts, self.outcomes, self.record = Verdicts(), Counter[str](), dict[str, Any]()
        self.texts = 0
        self.wrong: list[dict[str, Any]] = []
        self._told = 0.0

    # --- servers

    def start(self, port: int | None = None) -> ServerProcess:
        """Start a server of the pair; it is not ready yet."""
        options = self.options
        arguments = [
            str(self.work / "target"), "--speculative-model", str(self.work / "draft"), "--served-model-name", "target",
            "--max-num-seqs", str(options.max_num_seqs), "--max-model-len", "512", "--threads", str(options.threads),
            "--queue-seconds", "120",
        ]  # fmt: skip
        return our_server(arguments, self.work / "server.log", port=port)

    def ready(self, server: ServerProcess) -> float:
        """Wait for it."""
        return server.wait_until_ready(READY_SECONDS)

    @contextlib.contextmanager
    def started(self) -> Iterator[ServerProcess]:
        """Give a server that is ready, and end it."""
        with self.start() as server:
            self.ready(server)
            yield server

    def stopped(self, server: ServerProcess) -> None:
        """Say how a server ended that was asked to."""
        self.verdicts.hold("drain", "it ends with 0", server.process.returncode == 0, code=server.process.returncode)

    # --- requests

    def body(self, number: int, tokens: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
        """Give the request of a number; its text is known."""
        prompt = self._prompts[number % len(self._prompts)]
        asked = {"model": "target", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return asked | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {}) | more

    def check(self, number: int, tokens: int, answer: Answer, what: str) -> bool:
        """O1, O3, O8: a text must have come, once, whole, and the one that is known."""
        prompt = self._prompts[number % len(self._prompts)]
        expected = [f"w{token}" for token in self._saying.after(prompt[-1], tokens)]
        self.texts += 1
        fine = answer.status == 200 and answer.whole and answer.endings == 1 and answer.text.split() == expected
        if not fine:
            told = {"status": answer.status, "error": answer.error, "whole": answer.whole, "endings": answer.endings}
            self.wrong.append(
                {"what": what, "number": number, **told, "body": answer.body[-300:].decode(errors="replace")}
            )
        return fine

    def verdicts_of_refusal(self, answer: Answer) -> None:
        """O4: a documented status, OpenAI's error, and nothing of our insides."""
        error = (answer.json or {}).get("error") if isinstance(answer.json, dict) else None
        shaped = answer.status == 200 or (isinstance(error, dict) and set(error) == ERROR_FIELDS)
        leak = LEAKS.search(answer.body.decode(errors="replace"))
        if answer.status not in DOCUMENTED or not shaped or leak:
            seen = {"status": answer.status, "error": answer.error, "body": answer.body[:300].decode(errors="replace")}
            self.verdicts.hold("O4", "an answer in the form of all others", False, **seen)

    # --- the end

    def progress(self, what: str, number: int) -> None:
        """Tell how far it is, now and then."""
        now = time.monotonic()
        if now - self._told > 10:
            self._told = now
            self.console.print(f"{what}: {number} requests, {len(self.wrong)} texts wrong", style="dim")

    def finished(self) -> dict[str, Any]:
        """Give the record, once the mode is done."""
        wrong = len(self.wrong)
        self.verdicts.hold("O3", "every text that was read to its end is the known one, ended once", not wrong,
                           texts=self.texts, wrong=self.wrong[:20])  # fmt: skip
        held = not self.verdicts.broken
        return {
            **self.record, "outcomes": self.outcomes, "texts": self.texts, "verdicts": self.verdicts.all, "held": held
        }  # fmt: skip
