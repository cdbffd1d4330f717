"""The clients that people use, against a real server process: OpenAI's for Python, LangChain's over it, and Node's.

The client reads an answer more strictly than a test that looks at JSON does, and it sends what its users never wrote:
headers, fields and ways to hang up.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from outrider import LLM, SamplingParams
from tests.server.harness import Running, serving
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "tiny"
KEY = "key-of-the-tests"
PROMPT = "one two three one two three one two"
CHAT: list[Any] = [{"role": "user", "content": "Say something."}]
NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def texts(folder: str) -> dict[str, str]:
    """The oracle: what the library says, without speculation."""
    with LLM(folder, method="none") as llm:

        def params(**more: Any) -> SamplingParams:
            return SamplingParams(**{"temperature": 0, "max_tokens": 24, "speculation": "off", **more})

        return {
            "completion": llm.generate(PROMPT, params())[0].text,
            "chat": llm.chat(CHAT, params())[0].text,
            "seeded": llm.chat(CHAT, params(temperature=1.0, seed=7))[0].text,
        }


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    """The target drafts for itself, so that rounds give several tokens."""
    arguments = ("--speculative-model", folder, "--max-num-seqs", "4", "--served-model-name", NAME)
    with serving(folder, *arguments, OUTRIDER_API_KEY=KEY) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as one:
        yield one


def asynchronous(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60)


def idle(server: Running) -> bool:
    return server.idle(headers={"authorization": f"Bearer {KEY}"})


def letter_of(text: str) -> str:
    """A letter of ASCII in the midst of a text, to stop at; random bytes are mostly no characters at all."""
    return next(one for one in text[3:] if one.isascii() and one.isalnum() and one not in text[:3])


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "temperature": 0, "max_tokens": 24, **more}


# --- OpenAI's client for Python


def test_completions_whole_and_streamed_are_the_librarys_text(client: openai.OpenAI, texts: dict[str, str]) -> None:
    asked = greedy(extra_body={"speculation": {"num_speculative_tokens": 3}})
    whole = client.completions.create(prompt=PROMPT, **asked)
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **asked)
    events = list(stream)
    assert whole.choices[0].text == texts["completion"]
    assert whole.choices[0].finish_reason == "length"
    assert "".join(one.choices[0].text for one in events if one.choices) == texts["completion"]
    assert len(events) < 24  # rounds gave several tokens a chunk
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert events[-1].usage is not None and events[-1].choices == []
    assert events[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    assert whole.usage.model_extra is not None
    assert whole.usage.model_extra["outrider"]["accepted"] > 0


def test_chats_whole_and_streamed_are_the_librarys_text(client: openai.OpenAI, texts: dict[str, str]) -> None:
    for asked, expected in ((greedy(), "chat"), (greedy(temperature=1, seed=7), "seeded")):
        whole = client.chat.completions.create(messages=CHAT, **asked)
        events = list(client.chat.completions.create(messages=CHAT, stream=True, **asked))
        assert whole.object == "chat.completion" and whole.model == NAME
        assert whole.choices[0].message.content == texts[expected]
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(one.choices[0].delta.content or "" for one in events) == texts[expected]
        assert [one.choices[0].finish_reason for one in events if one.choices[0].finish_reason] == ["length"]
        assert all(one.object == "chat.completion.chunk" and one.id == events[0].id for one in events)


def test_the_clients_own_accumulator_gives_the_same_text(client: openai.OpenAI, texts: dict[str, str]) -> None:
    """It holds a text cut by its length for an error, so this one ends by a stop."""
    stop = letter_of(texts["chat"])
    with client.chat.completions.stream(messages=CHAT, stop=stop, **greedy()) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(deltas) == final.message.content == texts["chat"].partition(stop)[0]
    assert final.finish_reason == "stop"


def test_responses_whole_and_streamed_are_the_librarys_text(client: openai.OpenAI, texts: dict[str, str]) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": CHAT[0]["content"], "temperature": 0, "max_output_tokens": 24}
    asked["extra_body"] = {"speculation": {"method": "draft_model", "num_speculative_tokens": 3}}  # chunks are rounds
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    with client.responses.stream(**asked) as stream:
        followed = list(stream)
    assert whole.output_text == texts["chat"]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == texts["chat"]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type for one in events] == [one.type for one in followed]
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == texts["chat"]
    snapshots = [one.snapshot for one in followed if one.type == "response.output_text.delta"]
    assert snapshots[-1] == texts["chat"]
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 24


def test_samples_logprobs_and_stops(client: openai.OpenAI, texts: dict[str, str]) -> None:
    asked = greedy(temperature=1, seed=3)
    several = client.chat.completions.create(messages=CHAT, n=3, logprobs=True, top_logprobs=2, **asked)
    again = client.chat.completions.create(messages=CHAT, n=3, **asked)
    assert [one.index for one in several.choices] == [0, 1, 2]
    assert len({one.message.content for one in several.choices}) == 3
    assert [one.message.content for one in several.choices] == [one.message.content for one in again.choices]
    for choice in several.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 24
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)
    listed = client.completions.create(prompt=PROMPT, logprobs=2, **greedy()).choices[0].logprobs
    assert listed is not None and listed.tokens is not None and listed.token_logprobs is not None
    assert len(listed.tokens) == len(listed.token_logprobs) == 24
    stop = letter_of(texts["completion"])
    stopped = client.completions.create(prompt=PROMPT, stop=[stop], **greedy()).choices[0]
    assert (stopped.text, stopped.finish_reason) == (texts["completion"].partition(stop)[0], "stop")


def test_errors_are_those_that_the_client_knows(server: Running, client: openai.OpenAI) -> None:
    for wrong, param, code in (
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({"n": 99}, "n", "invalid_value"),
        ({"extra_body": {"suffix": "x"}}, "suffix", "unsupported_parameter"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=PROMPT, **greedy(**wrong))
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.type == "invalid_request_error" and caught.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(messages=CHAT, **greedy(model="gpt-5"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="other").models.list()
    assert stranger.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as streamed:
        client.chat.completions.create(messages=CHAT, stream=True, **greedy(top_logprobs=2))
    assert streamed.value.param == "top_logprobs"
    assert idle(server)


def test_models_and_raw_answers(client: openai.OpenAI, texts: dict[str, str]) -> None:
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "outrider"
    raw = client.chat.completions.with_raw_response.create(
        messages=CHAT, extra_body={"of_tomorrow": 1, "speculation": "off"}, **greedy()
    )
    assert raw.status_code == 200
    assert json.loads(raw.headers["x-outrider-ignored-fields"]) == ["of_tomorrow"]
    whole = raw.parse()
    assert whole.choices[0].message.content == texts["chat"]
    assert whole.usage is not None and whole.usage.model_extra is not None
    assert whole.usage.model_extra["outrider"]["drafted"] == 0
    with client.completions.with_streaming_response.create(prompt=PROMPT, stream=True, **greedy()) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_a_client_that_gives_up_frees_the_engine(server: Running, client: openai.OpenAI) -> None:
    """R01: in the midst of a stream, by its own clock, and before anything came."""
    long = greedy(max_tokens=440, extra_body={"speculation": "off", "ignore_eos": True})
    for _ in range(5):
        with client.chat.completions.create(messages=CHAT, stream=True, **long) as stream:
            assert [next(stream) for _ in range(3)]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(messages=CHAT, n=8, **long)
    assert idle(server)


def test_the_asynchronous_client_many_at_once(server: Running, texts: dict[str, str]) -> None:
    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(messages=CHAT, stream=True, **greedy())
        return "".join([one.choices[0].delta.content or "" async for one in stream])

    async def cut(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            prompt=PROMPT, stream=True, **greedy(max_tokens=440, extra_body={"ignore_eos": True})
        )
        async for _ in stream:
            break
        await stream.close()

    async def every_way() -> None:
        async with asynchronous(server) as client:
            whole = [client.chat.completions.create(messages=CHAT, **greedy()) for _ in range(4)]
            asked: dict[str, Any] = {"model": NAME, "input": CHAT, "temperature": 0, "max_output_tokens": 24}
            answers, streams, response, *_ = await asyncio.gather(
                asyncio.gather(*whole), asyncio.gather(*(streamed(client) for _ in range(4))),
                client.responses.create(**asked), cut(client), cut(client),
            )  # fmt: skip
            assert {one.choices[0].message.content for one in answers} == {texts["chat"]}
            assert set(streams) == {response.output_text} == {texts["chat"]}
            task = asyncio.ensure_future(client.chat.completions.create(messages=CHAT, **greedy(max_tokens=440, n=8)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(every_way())
    assert idle(server)


# --- LangChain's


def test_langchain_chats(server: Running, texts: dict[str, str]) -> None:
    from langchain_openai import ChatOpenAI

    arguments: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": KEY, "max_retries": 0}
    arguments |= {"model": NAME, "temperature": 0, "max_tokens": 24}
    question = CHAT[0]["content"]

    async def invoked() -> tuple[Any, str]:
        async with openai.DefaultAsyncHttpxClient() as http:  # LangChain's own is never closed
            chat = ChatOpenAI(http_async_client=http, **arguments)
            return await chat.ainvoke([("human", question)]), "".join(
                [str(one.content) async for one in chat.astream(question)]
            )

    chat = ChatOpenAI(**arguments)
    answer, (later, streamed) = chat.invoke(question), asyncio.run(invoked())
    pieces = list(chat.stream(question, stream_usage=True))
    batch = chat.batch([question] * 3)
    assert answer.content == later.content == streamed == texts["chat"]
    assert "".join(str(one.content) for one in pieces) == texts["chat"]
    assert [one.content for one in batch] == [texts["chat"]] * 3
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"
    assert sum(one.usage_metadata["output_tokens"] for one in pieces if one.usage_metadata) == 24
    with pytest.raises(openai.BadRequestError):
        chat.invoke(question, max_tokens=100_000)


def test_langchain_completes(server: Running, texts: dict[str, str]) -> None:
    from langchain_openai import OpenAI

    arguments: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": KEY, "max_retries": 0}
    model = OpenAI(model=NAME, temperature=0, max_tokens=24, **arguments)
    assert model.invoke(PROMPT) == texts["completion"]
    assert "".join(model.stream(PROMPT)) == texts["completion"]
    assert model.generate([PROMPT, PROMPT]).generations[1][0].text == texts["completion"]


# --- OpenAI's client for Node


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client in it. Where the checks run, Node's registry must answer; elsewhere it may not."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "client.mjs"):
        shutil.copy(NODE / name, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode and not os.environ.get("OUTRIDER_SLOW_TESTS"):
        pytest.skip("npm cannot install the client here")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_client_for_node(server: Running, texts: dict[str, str], node_folder: Path) -> None:
    environment = {**os.environ, "OPENAI_BASE_URL": server.url + "/v1", "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        ["node", "client.mjs", NAME, PROMPT, CHAT[0]["content"]],
        cwd=node_folder, env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("completion") == found.pop("completion_stream") == texts["completion"]
    for name in ("chat", "chat_stream", "response", "response_stream"):
        assert found.pop(name) == texts["chat"], name
    assert found.pop("seeded") == texts["seeded"]
    assert found == {
        "models": [NAME],
        "usage": 24,
        "tokens_with_logprobs": 24,
        "error": ["BadRequestError", 400, "max_tokens", "context_length_exceeded"],
        "stranger": ["AuthenticationError", 401, None, "invalid_api_key"],
        "cut": 3,
    }
    assert idle(server)
