"""The server as a process on loopback: its life, its port, its keys, its signals, and clients that misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.server.harness import ROOT, Running, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = {"prompt": "one two three one two", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "one two three", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
CANARY = "canary-5731"
JSON = "content-type: application/json\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    patience = ("--header-seconds", "2", "--stall-seconds", "2")
    with serving(folder, "--max-num-seqs", "4", "--max-waiting", "4", *patience) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with keys, whose lines say nothing of what it was told: looked at when all is over."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who may ask\nalice:secret-one\nsecret-two\n", encoding="utf-8")
    with serving(folder, "--api-key-file", str(keys), OUTRIDER_API_KEY="secret-three") as running:
        yield running
        running.stop()
        assert running.lines
        assert not any("secret" in line or CANARY in line for line in running.lines)


def connected(server: Running, text: str) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    made.sendall(text.encode())
    return made


def request(body: Any, path: str = "/v1/completions", headers: str = "") -> str:
    data = json.dumps(body)
    return f"POST {path} HTTP/1.1\r\n{JSON}{headers}content-length: {len(data)}\r\n\r\n{data}"


def everything(connection: socket.socket) -> bytes:
    parts = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_it_serves_and_says_so(server: Running) -> None:
    answer = server.post("/v1/completions", TEXT)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/live").json() == {"status": "alive"}
    assert server.get("/health").status_code == 200
    assert "server" not in answer.headers


def test_R01_streams_that_are_left_free_their_places(server: Running) -> None:
    for _ in range(20):
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=30) as stream:
            for number, _ in enumerate(stream.iter_lines()):
                if number == 3:
                    break
    assert server.idle()
    before = server.metric("outrider_generated_tokens_total")
    time.sleep(0.3)
    assert server.metric("outrider_generated_tokens_total") == before
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_R01_a_client_that_gives_up_waiting_frees_its_place(server: Running) -> None:
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=LONG, timeout=0.2)
    assert server.idle()


def test_R03_leaving_while_the_prompt_is_read_leaves_nothing(server: Running) -> None:
    expected = server.post("/v1/completions", TEXT).json()["choices"][0]["text"]
    for _ in range(5):
        connected(server, request({**LONG, "prompt": "x y " * 100})).close()
        assert server.post("/v1/completions", TEXT).json()["choices"][0]["text"] == expected
    assert server.idle()


def test_resets_at_any_time_leave_nothing(server: Running) -> None:
    for size in (1, 40, 120, 200, 10_000):
        connection = connected(server, request({**LONG, "stream": True})[:size])
        time.sleep(0.02)
        linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # RST in place of FIN
        connection.close()
    assert server.idle()


def test_a_full_server_refuses_at_once_and_recovers(server: Running) -> None:
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG))) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 503}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert all(answer.headers["retry-after"] for answer in refused)
    assert all(answer.json()["error"]["code"] == "server_overloaded" for answer in refused)
    texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
    assert len(texts) == 1
    assert server.idle()
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_heads_that_drip_or_never_end_are_cut_off(server: Running) -> None:
    silent = connected(server, "")
    dripping = connected(server, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
    half = connected(server, request(TEXT)[:-5])
    large = connected(server, "GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + "a" * 200_000)
    assert b"431" in everything(large).split(b"\r\n")[0]
    garbage = connected(server, "\x80\x04\x95 no http at all\r\n\r\n")
    assert b"400" in everything(garbage).split(b"\r\n")[0]
    assert b"408" in everything(dripping).split(b"\r\n")[0]
    assert everything(silent) == b""
    assert b"408" in everything(half).split(b"\r\n")[0]
    assert server.get("/live").status_code == 200


def test_several_requests_on_one_connection(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=TEXT, timeout=30).status_code == 200
        assert (
            client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code
            == 400
        )
        assert client.get("/live").status_code == 200


def test_R11_every_stream_ends_properly(server: Running) -> None:
    def one(number: int, found: list[str]) -> None:
        body = {**TEXT, "max_tokens": 1 + number % 13, "stream": True, "stop": ["e"] if number % 3 else None}
        for _ in range(100):
            answer = server.post("/v1/completions", body)
            if answer.status_code == 200:
                return found.append(answer.text)
            time.sleep(0.05)
        return None

    texts: list[str] = []
    for first in range(0, 96, 4):
        threads = [threading.Thread(target=one, args=(first + place, texts)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 96
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all(text.count('"finish_reason":"') == 1 for text in texts)


# --- keys


def test_every_route_but_probes_wants_a_key(keyed: Running) -> None:
    for path in ("/live", "/ready"):
        assert keyed.get(path).status_code == 200
    wrong = [
        "",
        "Bearer",
        "Bearer secret",
        "secret-one",
        "Basic secret-one",
        "Bearer secret-one-",
        "Bearer ' OR 1=1",
    ]
    for value in wrong:
        for path in ("/v1/models", "/metrics", "/health", "/openapi.json", "/nothing", "/live/", "/LIVE", "//live"):
            answer = keyed.get(path, headers={"authorization": value} if value else {})
            assert answer.status_code == 401, (path, value)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text
    for raw in (
        "GET http://x/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        "GET /%6cive HTTP/1.1\r\nhost: localhost/live?\r\nconnection: close\r\n\r\n",
        "GET /v1/models?x=/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        "GET /live/../v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ):
        first = everything(connected(keyed, raw)).split(b"\r\n")[0]
        assert b" 200 " not in first or b"%6cive" in raw.encode(), raw
    for key in ("secret-one", "secret-two", "secret-three"):
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.get("/v1/models", headers=headers).status_code == 200
        assert keyed.post("/v1/completions", TEXT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "0.0.0.0"), "--api-key-file"),
        (("--api-key-file", "/nowhere"), "/nowhere"),
        (("--stream-tokens", "all"), "--stream-tokens"),
        (("--port", "70000"), "port"),
        (("--queue-seconds", "0"), "queue_seconds"),
        (("--model", "x"), "twice"),
        (("--method", "telepathy"), "telepathy"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(
    folder: str, arguments: tuple[str, ...], said: str
) -> None:
    code, text, seconds = refused(folder, *arguments)
    assert code == 2
    assert said in text
    assert text.strip().splitlines()[-1].startswith("error: ")
    assert seconds < 50  # no model was read: that takes longer on a machine with other work


def test_a_taken_port_is_named(server: Running, folder: str) -> None:
    code, text, _ = refused(folder, "--port", str(server.port))
    assert code == 2
    assert str(server.port) in text


def test_M08_a_draft_that_is_missing_is_an_error_at_start(folder: str) -> None:
    code, text, _ = refused(folder, "--port", "0", "--speculative-model", "/nowhere/draft")
    assert code == 2
    assert "/nowhere/draft" in text


def refused(folder: str, *arguments: str) -> tuple[int, str, float]:
    began = time.monotonic()
    command = [sys.executable, "-m", "outrider", "serve", folder, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done.returncode, done.stderr, time.monotonic() - began


def test_python_dash_m_is_the_same(folder: str) -> None:
    command = [sys.executable, "-m", "outrider.server", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert "--api-key-file" in done.stdout


# --- signals


def test_SIGTERM_lets_running_streams_end_and_refuses_new_ones(folder: str) -> None:
    with serving(folder, "--drain-seconds", "20") as server:
        texts: list[str] = []
        body = {**LONG, "max_tokens": 200, "stream": True}
        threads = [
            threading.Thread(target=lambda: texts.append(server.post("/v1/completions", body).text)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while server.metric("outrider_requests_running") < 4:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        if server.process.poll() is None:
            answer = server.post("/v1/completions", TEXT)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_draining"
            assert answer.headers["connection"] == "close"
            assert server.get("/ready").json() == {"status": "draining"}
        for thread in threads:
            thread.join()
        assert server.process.wait(60) == 0
    assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
    assert len(texts) == 4


@pytest.mark.parametrize("twice", [False, True])
def test_what_outlasts_the_drain_is_told_so(folder: str, twice: bool) -> None:
    with serving(folder, "--drain-seconds", "300" if twice else "0.2", "--max-model-len", "512") as server:
        texts: list[str] = []
        body = {**LONG, "max_tokens": 490, "n": 8, "stream": True, "speculation": "off"}
        thread = threading.Thread(target=lambda: texts.append(server.post("/v1/completions", body).text))
        thread.start()
        while server.metric("outrider_requests_running") < 1:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        if twice:
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        thread.join()
    assert '"server_draining"' in texts[0] or texts[0].count('"finish_reason":"length"') == 8


def test_SIGTERM_while_loading_ends_it_at_once(folder: str) -> None:
    with serving(folder, ready=False) as server:
        assert server.stop() == 0


def test_kill_leaves_no_child_and_the_port_is_free(folder: str) -> None:
    with serving(folder) as server:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True, check=True
        )
        children = [int(word) for word in listed.stdout.split()]
        assert children  # the template's
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 5
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    with serving(folder, "--port", str(server.port)) as again:
        assert again.port == server.port
        assert again.post("/v1/completions", TEXT).status_code == 200


def test_nothing_else_listens_and_prompts_are_not_logged(keyed: Running) -> None:
    headers = {"authorization": "Bearer secret-one"}
    asked: list[dict[str, Any]] = [{"prompt": CANARY, "max_tokens": 2}, {"prompt": CANARY, "max_tokens": -1}]
    for body in (*asked, {"prompt": [CANARY], "n": CANARY}):
        keyed.post("/v1/completions", body, headers=headers)
    assert CANARY not in keyed.get("/metrics", headers=headers).text
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=False).stdout
    ours = [line for line in listening.splitlines() if f"pid={keyed.process.pid}," in line]
    assert not listening or len(ours) == 1


# --- the engine's own faults end the process

PLANTED = """
import time
from outrider.engine.engine import Engine
right = Engine.step
count = 0
def step(self):
    global count
    count += len(self.scheduler.running) == 3  # all that will ask have come, however slow the machine is
    if count > 20:
        {fault}
    return right(self)
Engine.step = step
"""


@pytest.mark.parametrize("fault", ["raise RuntimeError('planted')", "time.sleep(300)"])
def test_an_engine_that_fails_or_hangs_ends_the_process_and_tells_its_clients(folder: str, fault: str) -> None:
    with serving(folder, "--step-seconds", "2", first=PLANTED.format(fault=fault)) as server:
        texts: list[str] = []
        body = {**LONG, "stream": True, "speculation": "off"}
        threads = [
            threading.Thread(target=lambda: texts.append(server.post("/v1/completions", body).text)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert server.process.wait(60) == 70
        for thread in threads:
            thread.join()
        children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=False)
        assert not children.stdout
    assert all('"engine_failed"' in text and text.endswith("data: [DONE]\n\n") for text in texts)
    assert len(texts) == 3
