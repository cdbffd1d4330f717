"""A share of live texts, run again without speculation while nothing else runs."""

from __future__ import annotations

import logging
import os
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM, ConfigError
from outrider.engine import round as round_module
from outrider.server import recheck as recheck_module
from outrider.server.settings import ServerSettings
from tests.proof.defects import accepts_the_first_guess
from tests.scripted import ScriptedDrafter, engine_with, full_texts, greedy_params
from tests.server.harness import Local, Running, local, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPT = "one two three one two"
PATH = "/v1/completions"
TEXT = {
    "prompt": PROMPT,
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "speculation": {"num_speculative_tokens": 4},
}
LONG = {**TEXT, "max_tokens": 120}
COUNTERS = ("verified_texts", "mismatched_texts", "verify_dropped_texts", "verify_skipped_texts")


def counted(server: Local | Running) -> dict[str, float]:
    """The counters, summed over reasons and by reason; what has no reason yet is 0."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in server.get("/metrics").text.splitlines():
        match = re.match(r'outrider_(\w+)_total(?:\{reason="(\w+)"\})? (\S+)', line)
        if match and match[1] in found:
            found[match[1]] += float(match[3])
            if match[2]:
                found[match[2]] = float(match[3])
    return found


def soon(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def settled(server: Local | Running, chosen: int) -> dict[str, float]:
    """The counters, once every text that was chosen has come to something."""
    assert soon(lambda: sum(counted(server)[name] for name in COUNTERS) >= chosen), counted(server)
    return counted(server)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Draft texts that are half right, so that every text has guesses, accepted and refused."""
    model = tiny_target()
    prompt = list(PROMPT.encode())
    with engine_with(None, model, max_num_seqs=1) as plain:
        texts = full_texts(plain, [prompt], greedy_params(500 - len(prompt)))
    with engine_with(ScriptedDrafter(texts, pattern=(2, 0, 4)), model, max_num_seqs=4) as one:
        yield one


def test_texts_are_run_again_and_found_the_same(llm: LLM) -> None:
    with local(llm, verify_rate=1.0) as server:
        sampled = {**TEXT, "temperature": 1, "seed": 3, "n": 2, "top_p": 0.9, "repetition_penalty": 1.1}
        grammar = {**TEXT, "response_format": {"type": "json_object"}, "max_tokens": 40}
        rest = {**TEXT, "logprobs": 3, "stop": ["zzz"]}, {**TEXT, "prediction": {"type": "content", "content": PROMPT}}
        answers = server.together(PATH, [TEXT, sampled, grammar, *rest])
        assert [answer.status_code for answer in answers] == [200] * 5
        found = settled(server, 6)
        assert (found["verified_texts"], found["mismatched_texts"]) == (6, 0), found
        assert soon(lambda: server.metric("outrider_kv_cache_usage_ratio") == 0)
        tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        assert server.metric("outrider_generated_tokens_total") == tokens + 2  # checks count for no client
        assert not server.faults


def test_a_wrong_text_is_counted_and_told_without_its_words(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(round_module, "verify_coupled", accepts_the_first_guess)
    with local(llm, verify_rate=1.0) as server, caplog.at_level(logging.WARNING, logger="outrider"):
        text = server.post(PATH, TEXT).json()["choices"][0]["text"]
        found = settled(server, 1)
        assert (found["verified_texts"], found["mismatched_texts"]) == (0, 1), found
        assert soon(lambda: any("is another one" in one for one in caplog.messages))
        [line] = [one for one in caplog.messages if "is another one" in one]
        match = re.search(r"token (\d+) is another one, gap (\S+) of a logit", line)
        assert match, line
        assert float(match[2]) > 0.1  # far from any tie
        assert text[:8] not in line
        assert PROMPT not in line
        assert not server.faults


def test_what_shows_nothing_is_skipped(llm: LLM) -> None:
    with local(llm, verify_rate=1.0) as server:
        server.together(PATH, [{**TEXT, "speculation": "off"}, {**TEXT, "max_tokens": 1}])
        found = settled(server, 2)
        assert found["no_guesses"] == found["verify_skipped_texts"] == 2


def test_other_verifiers_are_skipped() -> None:
    with (
        LLM(tiny_target(), tokenizer=byte_tokenizer(), method="ngram", verification="rejection") as llm,
        local(llm, verify_rate=1.0) as server,
    ):
        server.post(PATH, TEXT)
        assert settled(server, 1)["verification"] == 1


def test_a_request_ends_the_check_that_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check waits again, and comes to its end once nobody asks any more."""
    given_up: list[bool] = []
    real = recheck_module.Rechecks.give_up

    def noted(self: recheck_module.Rechecks) -> None:
        given_up.append(self._running is not None)
        real(self)

    monkeypatch.setattr(recheck_module.Rechecks, "give_up", noted)
    step, hurried = llm.engine.step, list[bool]()

    def slowly() -> None:
        if not hurried and any(one.request.scope == recheck_module.SCOPE for one in llm.engine.scheduler.running):
            time.sleep(0.01)  # so that the next request finds it running
        step()

    monkeypatch.setattr(llm.engine, "step", slowly)
    with local(llm, verify_rate=1.0) as server:
        texts = set()
        for _ in range(3):
            texts.add(server.post(PATH, LONG).json()["choices"][0]["text"])
            assert soon(lambda: any(one.request.scope for one in llm.engine.scheduler.running))
            assert server.metric("outrider_requests_running") == 0
        assert len(texts) == 1
        assert given_up.count(True) >= 2
        hurried.append(True)
        found = settled(server, 3)
        assert (found["verified_texts"], found["verify_dropped_texts"]) == (3, 0), found


def test_what_waits_is_bounded_and_dropped_when_the_server_drains(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck_module.Rechecks, "begin", lambda self: False)
    with local(llm, verify_rate=1.0, max_verify_texts=3, max_verify_tokens=100) as server:
        for _ in range(4):  # 21 + 24 tokens each: two fit
            server.post(PATH, TEXT)
        assert soon(lambda: counted(server).get("no_room") == 2)
        server.service.drain()
        assert soon(lambda: counted(server).get("draining") == 2)


def test_a_check_that_fails_ends_itself_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with local(llm, verify_rate=1.0) as server:
        real = llm.intake.sequences

        def broken(request: Any) -> Any:
            if request.scope == recheck_module.SCOPE:
                raise RuntimeError("no such thing")
            return real(request)

        rechecks: Any = server.service.model.worker._rechecks
        monkeypatch.setattr(rechecks, "_sequences", broken)
        assert server.post(PATH, TEXT).status_code == 200
        assert soon(lambda: counted(server).get("failed") == 1)
        monkeypatch.undo()
        assert server.post(PATH, TEXT).status_code == 200
        assert soon(lambda: counted(server)["verified_texts"] == 1)
        assert not server.faults


def test_nothing_is_run_again_unless_asked(llm: LLM) -> None:
    with local(llm) as server:
        server.post(PATH, TEXT)
        assert not any(counted(server).values())


def test_a_share_is_chosen_by_name() -> None:
    texts: list[Any] = [SimpleNamespace(request=SimpleNamespace(id=f"{n}-ab"), index=n % 2) for n in range(800)]
    chosen = [recheck_module._chosen(one, 0.25) for one in texts]
    assert 150 < sum(chosen) < 250
    assert chosen == [recheck_module._chosen(one, 0.25) for one in texts]
    assert all(recheck_module._chosen(one, 1.0) for one in texts)
    assert not any(recheck_module._chosen(one, 0.0) for one in texts)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"verify_rate must be in \[0, 1\]"):
        ServerSettings(verify_rate=rate)


@pytest.mark.skipif(not os.environ.get("OUTRIDER_SLOW_TESTS"), reason="starting a process takes 12 s")
def test_a_server_process_finds_a_planted_mismatch(tmp_path: Path) -> None:
    folder = save(tiny_target(), byte_tokenizer(), tmp_path)
    plant = (
        "import outrider.engine.round as r\nfrom tests.proof.defects import accepts_the_first_guess\n"
        "r.verify_coupled = accepts_the_first_guess"
    )
    body = {**TEXT, "prompt": "abab" * 8}
    with serving(str(folder), "--verify-rate", "1", first=plant) as server:
        assert server.post(PATH, body).status_code == 200
        found = settled(server, 1)
        assert found["mismatched_texts"] == 1
        assert server.stop() == 0
    assert any("is another one" in line for line in server.lines)
