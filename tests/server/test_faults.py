"""Faults in the middle of work: whose fault it is ends, and nothing else does."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider import LLM
from tests.scripted import FAULTS, ScriptedDrafter, engine_with
from tests.server.harness import Local, local
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outrider.draft.drafter import DraftRows
    from outrider.proposal import Proposal

TEXT = {"prompt": "one two three one two", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), method="ngram", max_num_seqs=4) as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), method="none") as plain, local(plain) as server:
        text: str = server.post("/v1/completions", TEXT).json()["choices"][0]["text"]
        return text


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def quiet(server: Local) -> bool:
    """O2: no block is held and nobody waits, soon."""
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    return soon(lambda: not any(server.metric(f"outrider_{name}") for name in names))


def soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something holds before long: the machine may have other work."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


def once(fails: Callable[[], None], work: Any, at: set[int]) -> Any:
    """Wrap a function so that its calls of these numbers fail."""
    calls = iter(range(1 << 30))

    def wrapped(*args: Any, **more: Any) -> Any:
        if next(calls) in at:
            fails()
        return work(*args, **more)

    return wrapped


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize("at", [{0}, {1}, {3}, {2, 3}, {0, 1, 2, 6, 7, 8, 9}])
@pytest.mark.parametrize("method", ["feed", "forward"])
def test_memory_that_runs_out_in_the_target_costs_a_retry(
    llm: LLM, expected: str, monkeypatch: pytest.MonkeyPatch, method: str, at: set[int]
) -> None:
    with local(llm) as server:
        runner = llm.engine.runner
        monkeypatch.setattr(runner, method, once(out_of_memory, getattr(runner, method), at))
        answers = server.together("/v1/completions", [TEXT] * 4)
        alone = [answer for answer in answers if answer.status_code == 500]
        assert all(answer.json()["error"]["code"] == "generation_failed" for answer in alone)
        assert len(alone) < len(at)  # the first time a step is tried again, from the second time on a text is ended
        assert all(text_of(answer) == expected for answer in answers if answer not in alone)
        assert quiet(server)
        monkeypatch.undo()
        assert text_of(server.post("/v1/completions", TEXT)) == expected
        assert not server.faults
        assert server.metric("outrider_out_of_memory_total") >= 1


def test_memory_that_never_suffices_ends_requests_not_the_server(
    llm: LLM, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(llm) as server:
        monkeypatch.setattr(llm.engine.runner, "forward", once(out_of_memory, None, set(range(1000))))
        answers = server.together("/v1/completions", [TEXT] * 3)
        assert [answer.status_code for answer in answers] == [500] * 3
        monkeypatch.undo()
        assert quiet(server)
        assert text_of(server.post("/v1/completions", TEXT)) == expected


def always(_: Proposal, __: int, rows: DraftRows) -> Proposal:
    raise RuntimeError("the draft is broken")


@pytest.mark.parametrize("fault", [*FAULTS, "always raises"])
def test_a_drafter_that_fails_costs_its_guesses_alone(expected: str, fault: str) -> None:
    drafter = ScriptedDrafter(fault=FAULTS.get(fault, always))
    with engine_with(drafter, tiny_target(), max_num_seqs=4) as llm, local(llm) as server:
        body = {**TEXT, "speculation": {"num_speculative_tokens": 4}}
        answers = server.together("/v1/completions", [body] * 4)
        assert [text_of(answer) for answer in answers] == [expected] * 4
        assert not server.faults
        assert drafter.calls
        if fault == "always raises":
            assert server.get("/ready").json() == {"status": "degraded"}
            assert soon(lambda: server.metric("outrider_speculation_degraded") == 1)
        assert quiet(server)


def test_numbers_that_are_none_in_one_row_end_that_request_alone(
    expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), method="none", max_num_seqs=4) as llm, local(llm) as server:
        right = llm.engine.runner.forward

        def broken(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
            logits = right(tokens, *args)
            return logits.masked_fill((tokens[:, :1] == 35)[..., None], float("nan"))  # rows that come from a "#"

        monkeypatch.setattr(llm.engine.runner, "forward", broken)
        bodies = [TEXT, {**TEXT, "prompt": "one two #"}, TEXT]
        answers = server.together("/v1/completions", bodies)
        assert [answer.status_code for answer in answers] == [200, 500, 200]
        assert [text_of(answers[place]) for place in (0, 2)] == [expected] * 2
        assert answers[1].json()["error"]["code"] == "generation_failed"
        streamed = server.post("/v1/completions", {**bodies[1], "stream": True})
        assert "generation_failed" in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert quiet(server)
        assert not server.faults


def test_an_engine_that_fails_tells_everybody_and_is_unready(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, begun = llm.engine.step, set[int]()

    def breaks_with_three() -> None:
        begun.update(one.number for one in llm.engine.scheduler.running)
        if len(begun) == 3:
            raise RuntimeError("a bug in the engine")
        step()

    long = {**TEXT, "max_tokens": 400, "ignore_eos": True, "speculation": "off"}  # none ends before the last has come
    with local(llm) as server:
        monkeypatch.setattr(llm.engine, "step", breaks_with_three)
        answers = server.together("/v1/completions", [long, {**long, "stream": True}, long])
        assert [answer.status_code for answer in answers] == [500, 200, 500]
        assert all("engine_failed" in answer.text and "a bug" not in answer.text for answer in answers)
        assert soon(lambda: bool(server.faults))  # the process hears of it right after those who wait
        assert [str(fault) for fault in server.faults] == ["a bug in the engine"]
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        server.service.fault = server.faults[0]  # as the process does, which then ends
        assert server.get("/live").status_code == 503
        assert server.error("/v1/completions", TEXT, 503)["code"] == "server_not_ready"


def test_a_request_that_waits_too_long_is_refused(llm: LLM) -> None:
    long = {**TEXT, "max_tokens": 480, "n": 4, "speculation": "off"}
    with local(llm, queue_seconds=0.2) as server:
        answers = server.together("/v1/completions", [long, long, TEXT])
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 503}
        late = next(answer for answer in answers if answer.status_code == 503)
        assert late.json()["error"]["code"] == "server_overloaded"
        assert late.headers["retry-after"]
        assert quiet(server)


def test_a_request_that_takes_too_long_is_ended(llm: LLM) -> None:
    long = {**TEXT, "max_tokens": 480, "n": 4, "speculation": "off"}
    with local(llm, deadline_seconds=0.2) as server:
        assert server.error("/v1/completions", long, 504)["code"] == "deadline_exceeded"
        assert "deadline_exceeded" in server.post("/v1/completions", {**long, "stream": True}).text
        assert quiet(server)


def test_keys_have_their_share(llm: LLM) -> None:
    with local(llm, max_per_key=2, max_waiting=0) as server:
        answers = server.together("/v1/completions", [TEXT] * 3)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
        limited = next(answer for answer in answers if answer.status_code == 429)
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert limited.json()["error"]["type"] == "rate_limit_error"
        assert server.metric("outrider_rejected_requests_total") == 1


def test_prompts_that_wait_are_bounded_in_tokens(llm: LLM) -> None:
    body = {**TEXT, "prompt": "x" * 100, "n": 4, "max_tokens": 60}
    with local(llm, max_waiting_tokens=250) as server:
        answers = server.together("/v1/completions", [body] * 4)
        assert {answer.status_code for answer in answers} == {200, 503}
        assert server.service.admission is not None
        assert server.service.admission.waiting_tokens == 0


def test_a_stream_that_is_not_read_is_ended(llm: LLM) -> None:
    with local(llm, max_stream_bytes=2000) as server:

        async def slow() -> str:
            body = {**TEXT, "max_tokens": 300, "logprobs": 5, "stream": True}
            calls = server.service._calls
            sent = asyncio.ensure_future(server.client.post("/v1/completions", json=body, timeout=60))
            while not calls:
                await asyncio.sleep(0.005)
            time.sleep(1.0)  # nothing on the loop reads, while the engine's thread goes on
            return (await sent).text

        text = server.run(slow())
        assert "slow_reader" in text
        assert quiet(server)
