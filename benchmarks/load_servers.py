"""Server processes under load: how each engine's server is started, when it is ready, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from benchmarks.gpu_machine import end

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ServerProcess", "free_port", "our_server", "peer_server", "write_tokenizer"]

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Give a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ServerProcess:
    """One server on loopback, in a session of its own; its output goes to a file.

    Args:
        command: How to start it.
        port: Where it listens.
        log: Where its output goes.
        environment: Variables beside those that stand.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.url, self.log, self.port = f"http://127.0.0.1:{port}", log, port
        self.began = time.perf_counter()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment,
                cwd=log.parent,  # not here: a peer must not find our package
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self, seconds: float) -> float:
        """Wait until it serves; give the seconds from its start.

        Raises:
            RuntimeError: It ended, or took too long; with the end of its output.
        """
        while time.perf_counter() - self.began < seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200:
                    return time.perf_counter() - self.began
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready after {seconds:.0f} s:\n{self.tail()}")

    def get(self, path: str, seconds: float = 10) -> httpx.Response:
        """Ask for something small."""
        return httpx.get(self.url + path, timeout=seconds, trust_env=False)

    def tail(self, size: int = 3000) -> str:
        """Give the end of what it said."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-size:]

    def stop(self, seconds: float = 40) -> int | None:
        """Ask it to end, and end it where it does not; give its own exit code, None where it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                end(self.process)
                return None
        code = self.process.returncode
        end(self.process)  # whatever it left behind
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def our_server(
    arguments: Sequence[str], log: Path, *, site: Path | None = None, port: int | None = None
) -> ServerProcess:
    """Start ``outrider serve``.

    Args:
        arguments: Those of the command.
        log: Where its output goes.
        site: A folder with packages that the Python here lacks, read after its own.
        port: Where to listen; a free one by default.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "outrider", "serve", *arguments, "--port", str(port)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH"), str(site) if site else None]
    return ServerProcess(command, port, log, {"PYTHONPATH": os.pathsep.join(filter(None, paths))})


def peer_server(
    target: str, log: Path, *, site: Path, max_num_seqs: int, max_model_len: int, draft: str | None, lookahead: int
) -> ServerProcess:
    """Start vLLM's server, plain or with a draft model, its prefix cache off."""
    port = free_port()
    command = [
        sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--model", target, "--served-model-name", "target", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.85",
        "--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs), "--no-enable-prefix-caching",
        "--uvicorn-log-level", "error",
    ]  # fmt: skip
    if draft is not None:
        config = {
            "method": "draft_model", "model": draft, "num_speculative_tokens": lookahead, "max_model_len": max_model_len
        }  # fmt: skip
        command += ["--speculative-config", json.dumps(config)]
    quiet = {
        "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    return ServerProcess(command, port, log, quiet)


def write_tokenizer(folder: Path | str, vocab_size: int) -> None:
    """Give a synthetic checkpoint a tokenizer, a word an id (``w17`` is 17): servers stream text, not ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = Path(folder)
    if (path / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
