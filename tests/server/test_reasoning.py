"""What a model thinks is told from what it answers (K06): by ids, the same however a text was cut, and counted.

The model here says a fixed text: its logits depend on the position alone. Several texts stand in it, each at its own
positions, and a prompt's length chooses one. It drafts for itself, so every guess is right and ends fall in mid-run.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from outrider import LLM
from outrider.engine.detokenizer import Detokenizer
from outrider.errors import ConfigError
from outrider.outputs import StreamChunk
from outrider.server.reasoning import CLOSE, OPEN, Part, Reader, thinking_of
from tests.server.harness import Local, local
from tests.tiny import EOS_ID, byte_tokenizer, save, tiny_absolute

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACES = 512
OPEN_ID, CLOSE_ID = 260, 261
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['reasoning_content'] %}[{{ message['reasoning_content'] }}]{% endif %}{{ message['content'] }}"
    "{% endfor %}:{% if tools %}t{% endif %}{% if thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TAILS = {"thinking": {True: 2, False: 0}, "enable_thinking": {True: 0, False: 6}}  # tokens that a switch adds
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
THINKS, SAYS = "\nHm, 😀 é>.\n", "\n\nYes, 4 é."
NUM_THOUGHT = len(THINKS.encode())


def spelled(*parts: str | int) -> list[int]:
    """Ids: text byte by byte, numbers as they are."""
    return [one for part in parts for one in ([part] if isinstance(part, int) else part.encode())]


THOUGHT = spelled(OPEN_ID, THINKS, CLOSE_ID, SAYS, EOS_ID)
OPENED = spelled("So 😀.\n", CLOSE_ID, "\n\nYes.", EOS_ID)
LATE = spelled("No ", OPEN_ID, "x", CLOSE_ID, " here", EOS_ID)
LETTERS = spelled("<think>a</think>b", EOS_ID)
CALLING = spelled(OPEN_ID, CALL, CLOSE_ID, CALL, EOS_ID)
TWICE = spelled("\n", OPEN_ID, "a", OPEN_ID, "b", CLOSE_ID, "c", OPEN_ID, "d", CLOSE_ID, EOS_ID)
BROKEN = spelled(OPEN_ID, "a", 0xF0, 0x9F, CLOSE_ID, "b", EOS_ID)
SCRIPTS = [THOUGHT, OPENED, LATE, LETTERS, TWICE, BROKEN, CALLING]
BEGINS = [32 + sum(len(one) + 1 for one in SCRIPTS[:place]) for place in range(len(SCRIPTS))]
assert BEGINS[-1] + len(BROKEN) < PLACES


def thinker(path: Path) -> str:
    """A checkpoint that says SCRIPTS, each from its own position on."""
    model: Any = tiny_absolute(positions=PLACES, n_embd=PLACES, n_layer=1)
    tokenizer: Any = byte_tokenizer()
    assert tokenizer.add_tokens([OPEN, CLOSE]) == 2
    assert tokenizer.convert_tokens_to_ids([OPEN, CLOSE]) == [OPEN_ID, CLOSE_ID]
    tokenizer.chat_template = TEMPLATE
    with torch.no_grad():
        for block in model.transformer.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight.zero_()
                layer.bias.zero_()
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(10 * torch.eye(PLACES))
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.ln_f.bias.zero_()
        model.lm_head.weight.zero_()
        for begin, script in zip(BEGINS, SCRIPTS, strict=True):
            for place, token in enumerate(script):
                model.lm_head.weight[token, begin - 1 + place] = 1
    return str(save(model, tokenizer, path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Local]:
    with LLM(folder, folder, max_num_seqs=4, max_model_len=PLACES) as llm, local(llm) as one:
        yield one


@contextlib.contextmanager
def single_tokens(server: Local) -> Iterator[None]:
    object.__setattr__(server.service.settings, "single_tokens", True)
    try:
        yield
    finally:
        object.__setattr__(server.service.settings, "single_tokens", False)


def chat(script: list[int], **more: Any) -> dict[str, Any]:
    switches = more.get("chat_template_kwargs") or {}
    length = BEGINS[SCRIPTS.index(script)] - 1 - sum(TAILS[name][value] for name, value in switches.items())
    fixed = {"temperature": 0, "max_tokens": 64, "speculation": {"num_speculative_tokens": 3}}
    return {"messages": [{"role": "user", "content": "x" * length}], **fixed, **more}


def whole(server: Local, body: dict[str, Any]) -> tuple[str, str, int, str]:
    """Thought, answer, tokens of thought, reason to end."""
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    found, choice = answer.json(), answer.json()["choices"][0]
    assert choice["message"].get("reasoning_content", " "), "it is there or not, and never empty"
    details = found["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] <= found["usage"]["completion_tokens"]
    message = choice["message"]
    return (
        message.get("reasoning_content", ""),
        message["content"],
        details["reasoning_tokens"],
        choice["finish_reason"],
    )


def streamed(server: Local, body: dict[str, Any]) -> tuple[str, str, int, str]:
    """The same, put together from a stream, whose running count never falls."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/chat/completions", {**body, "stream_options": options})
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert all(delta.get("reasoning_content", " ") for delta in deltas)
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events if event["usage"]]
    assert counts == sorted(counts)
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    said = "".join(delta.get("content") or "" for delta in deltas)
    return thought, said, counts[-1], choices[-1]["finish_reason"]


def both(server: Local, body: dict[str, Any]) -> tuple[str, str, int, str]:
    """Streamed, by rounds and by tokens, and not: all the same."""
    found = whole(server, body)
    assert streamed(server, body) == found, body
    with single_tokens(server):
        assert streamed(server, body) == found, body
    return found


def bytes_of(ids: list[int]) -> str:
    return bytes(one for one in ids if one < 256).decode("utf-8", errors="replace")


@pytest.mark.parametrize("opened", [False, True])
def test_K06_cut_by_length_anywhere_the_count_is_that_of_the_reasoning_given_out(server: Local, opened: bool) -> None:
    script = OPENED if opened else THOUGHT
    switches = {"chat_template_kwargs": {"thinking": True}} if opened else {}
    for most in range(1, len(script) + 1, 3 if opened else 1):
        given = script[:most] if opened else script[1:most]
        end = given.index(CLOSE_ID) if CLOSE_ID in given else len(given)
        reason = "stop" if most == len(script) else "length"
        expected = (bytes_of(given[:end]), bytes_of(given[end + 1 :]), end, reason)
        assert both(server, chat(script, max_tokens=most, **switches)) == expected, most


STOPS = [
    "Hm", ", 😀", "😀 é", "é>", ".\n</think>", "\n</th", "think>", ">\n\n", ">\n\nYes", "</think>\n\nY", "Yes", "4 é",
    "nowhere", "<think>", ">x",
]  # fmt: skip


@pytest.mark.parametrize(("stop", "keeps"), [*((one, False) for one in STOPS), *((one, True) for one in STOPS[3:9])])
def test_K06_cut_by_a_stop_string_anywhere(server: Local, stop: str, keeps: bool) -> None:
    text = OPEN + THINKS + CLOSE + SAYS
    place = text.find(stop)
    cut = text if place < 0 else text[: place + len(stop) * keeps]
    thought = cut[len(OPEN) :][: len(THINKS)]
    said = cut[len(OPEN + THINKS + CLOSE) :]
    found = both(server, chat(THOUGHT, stop=[stop], include_stop_str_in_output=keeps))
    assert found == (thought, said, len(thought.encode()), "stop")


def test_markers_count_where_a_text_begins_and_once(server: Local) -> None:
    assert both(server, chat(LATE)) == ("", "No <think>x</think> here", 0, "stop")
    assert both(server, chat(LETTERS)) == ("", "<think>a</think>b", 0, "stop")
    assert both(server, chat(TWICE)) == ("a<think>b", "\nc<think>d</think>", 3, "stop")
    assert both(server, chat(BROKEN)) == ("a\ufffd", "b", 3, "stop")


def test_a_client_does_not_open_or_close_what_it_thinks(server: Local) -> None:
    for words in ("<think>", "</think>", "<think> </think>"):
        body = chat(THOUGHT)
        length = len(body["messages"][0]["content"])
        prompt = server.post("/tokenize", {"prompt": words}).json()["count"]
        for content in (words + "x" * (length - prompt), "x" * (length - prompt) + words):
            body["messages"][0]["content"] = content
            assert both(server, body)[:3] == (THINKS, SAYS, NUM_THOUGHT)


def test_switches_reach_the_template_and_nothing_else_does(server: Local) -> None:
    # The prompt closed it: what comes is the answer, and a model that thinks all the same is understood.
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert both(server, chat(LETTERS, **off))[:2] == ("", "<think>a</think>b")
    assert both(server, chat(THOUGHT, **off))[0] == "\nHm, 😀 é>.\n"
    messages = [{"role": "user", "content": "x"}]
    plain, opened = (
        server.post("/tokenize", {"messages": messages, "chat_template_kwargs": one}).json()["tokens"]
        for one in (None, {"thinking": True, "enable_thinking": None})
    )
    assert plain[-1] == ord(":")
    assert opened == [*plain, OPEN_ID, ord("\n")]
    for wrong in ({"thinking": 1}, {"enable_thinking": "yes"}, {"messages": []}, {"tools": None, "add": True}, True):
        for path in ("/v1/chat/completions", "/tokenize"):
            error = server.error(path, {"messages": messages, "chat_template_kwargs": wrong})
            assert error["param"].startswith("chat_template_kwargs"), wrong
    server.error("/v1/responses", {"input": "x", "chat_template_kwargs": {"thinking": True}})


def test_calls_are_read_off_the_answer_alone_and_shapes_leave_no_room_to_think(server: Local) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {"tools": tools, "max_tokens": 120}
    body = chat(CALLING, **more)
    body["messages"][0]["content"] = body["messages"][0]["content"][1:]  # tools are told with one token
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == CALL
    assert choice["message"]["content"] is None
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["f"]
    events = server.events("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == CALL
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["f"]
    shaped = chat(OPENED, chat_template_kwargs={"thinking": True}, response_format={"type": "json_object"})
    answer = server.post("/v1/chat/completions", {**shaped, "max_tokens": 8}).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_several_texts_and_log_probabilities(server: Local) -> None:
    answer = server.post("/v1/chat/completions", chat(THOUGHT, n=2, logprobs=True)).json()
    assert [one["message"]["reasoning_content"] for one in answer["choices"]] == [THINKS] * 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * NUM_THOUGHT
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(THOUGHT)
    events = server.events("/v1/chat/completions", chat(THOUGHT, logprobs=True))
    told = [one["choices"][0]["logprobs"] for one in events]
    assert sum(len(one["content"]) for one in told if one) == len(THOUGHT)
    # Completions are what was generated, as ever.
    text = server.post("/v1/completions", {"prompt": "x" * BEGINS[0], "max_tokens": 64, "temperature": 0}).json()
    assert text["choices"][0]["text"] == "<think>\nHm, 😀 é>.\n</think>\n\nYes, 4 é."
    assert text["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_responses_have_an_item_of_reasoning_which_may_be_sent_back(server: Local) -> None:
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=server.client)
    name = server.get("/v1/models").json()["data"][0]["id"]
    asked = "x" * (BEGINS[0] - 1)

    async def both_ways() -> Any:
        response = await client.responses.create(model=name, input=asked, temperature=0)
        stream = await client.responses.create(model=name, input=asked, temperature=0, stream=True)
        return response, [event async for event in stream]

    response, events = server.run(both_ways())
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == THINKS
    assert response.output_text == "\n\nYes, 4 é."
    assert response.usage.output_tokens_details.reasoning_tokens == NUM_THOUGHT
    said = {kind: "".join(one.delta for one in events if one.type == f"response.{kind}.delta")
            for kind in ("reasoning_text", "output_text")}  # fmt: skip
    assert said == {"reasoning_text": "\nHm, 😀 é>.\n", "output_text": "\n\nYes, 4 é."}
    done = [one.item.type for one in events if one.type == "response.output_item.done"]
    assert done == ["reasoning", "message"]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].response.output == response.model_copy(update={"output": events[-1].response.output}).output
    back = [{"role": "user", "content": "q"}, *(item.model_dump(exclude_none=True) for item in response.output)]
    again = server.post("/v1/responses", {"input": back, "max_output_tokens": 1})
    assert again.status_code == 200, again.text
    told = server.post("/tokenize", {"prompt": f"q[{THINKS}]{SAYS}:"}).json()["count"]
    assert again.json()["usage"]["input_tokens"] == told
    server.error("/v1/responses", {"input": [response.output[0].model_dump(exclude_none=True)]})


def test_it_is_told_apart_where_the_checkpoint_speaks_of_it(folder: str) -> None:
    plain, marked = byte_tokenizer(), byte_tokenizer()
    marked.add_tokens([OPEN, CLOSE])
    assert thinking_of(marked, TEMPLATE, "auto") is not None
    assert thinking_of(marked, "{{ messages }}", "auto") is None
    assert thinking_of(marked, None, "auto") is None
    assert thinking_of(plain, TEMPLATE, "auto") is None
    assert thinking_of(None, TEMPLATE, "auto") is None
    assert thinking_of(marked, TEMPLATE, "none") is None
    assert thinking_of(marked, None, "think") is not None
    with pytest.raises(ConfigError, match="lacks <think> and </think>"):
        thinking_of(plain, TEMPLATE, "think")


def test_markers_that_are_special_tokens_are_no_text_and_are_known() -> None:
    special: Any = byte_tokenizer()
    special.add_tokens([OPEN, CLOSE], special_tokens=True)
    thinking = thinking_of(special, TEMPLATE, "auto")
    assert thinking is not None
    for size in (1, 2, 3, 5, 64):
        reader, detokenizer = Reader(thinking, opened=False, skip=True), Detokenizer(special, [])
        parts: list[Part] = []
        for first in range(0, len(THOUGHT), size):
            ids = THOUGHT[first : first + size]
            for token in ids:
                detokenizer.push(token)
            text = detokenizer.take(final=False)
            parts += reader.push(StreamChunk(0, text, tuple(ids), text_ends=detokenizer.ends(first, text)))
        assert "".join(part.text for part in parts if part.thought) == THINKS
        assert "".join(part.text for part in parts if not part.thought) == SAYS
        assert reader.num_tokens == NUM_THOUGHT
