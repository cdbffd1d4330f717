"""OpenAI's API, in this process: what is answered, in which form, and that the text is the library's own."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM, SamplingParams
from tests.server.harness import Local, local, metric
from tests.tiny import byte_tokenizer, save, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "one two three one two three one two"
FIXED = {"method": "draft_model", "num_speculative_tokens": 3}
CHAT = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[LLM]:
    """The oracle: the library, without speculation."""
    with LLM(folder, method="none") as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    """A target that drafts for itself, so that rounds give several tokens."""
    with LLM(folder, folder, max_num_seqs=4) as one:
        yield one


@pytest.fixture
def fresh(folder: str) -> Iterator[LLM]:
    """The same again, for servers with other settings."""
    with LLM(folder, folder, max_num_seqs=4) as one:
        yield one


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Local]:
    with local(llm) as one:
        yield one


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "speculation": "off", **more})


def test_a_completion_is_the_librarys_text(server: Local, plain: LLM) -> None:
    expected = plain.generate(PROMPT, params())[0]
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": expected.outputs[0].finish_reason}
    ]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == len(expected.prompt_token_ids) + 24


def test_a_chat_is_the_librarys_text_streamed_or_not(server: Local, plain: LLM) -> None:
    expected = plain.chat(CHAT, params(temperature=1.0, seed=7))[0]
    asked = {"messages": CHAT, "max_completion_tokens": 24, "seed": 7, "speculation": FIXED}  # not by the clock
    answer = server.post("/v1/chat/completions", asked).json()
    events = server.events("/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
    ids = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert ids == list(expected.prompt_token_ids)  # A13: one way to a prompt's ids
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected.text)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events[:-1]) == expected.text
    assert [one["choices"][0]["finish_reason"] for one in events[:-1]].count("length") == 1
    assert all(one["object"] == "chat.completion.chunk" and one["usage"] is None for one in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"].pop("prompt_tokens_details")["cached_tokens"] > 0, "the same prompt a second time"
    answer["usage"].pop("prompt_tokens_details")
    assert events[-1]["usage"] == answer["usage"]


def test_usage_tells_what_speculation_did(server: Local) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    names = ("generated_tokens", "draft_tokens", "accepted_tokens", "accepted_tokens_per_position")
    server.post("/v1/completions", {**asked, "speculation": FIXED})  # a place is counted from its first guess on
    before = [counted(server, name) for name in names]
    auto = server.post("/v1/completions", asked).json()["usage"]
    off = server.post("/v1/completions", {**asked, "speculation": "off"}).json()["usage"]
    three = {**asked, "speculation": FIXED}
    fixed = server.post("/v1/completions", three).json()["usage"]
    after = [counted(server, name) for name in names]
    details = auto["completion_tokens_details"]
    assert fixed["outrider"]["drafted"] > 0  # what auto does is for the clock to say
    assert details["accepted_prediction_tokens"] == auto["outrider"]["accepted"]
    assert details["rejected_prediction_tokens"] == auto["outrider"]["drafted"] - auto["outrider"]["accepted"]
    assert off["outrider"] | {"rounds": 48, "drafted": 0, "accepted": 0} == off["outrider"]
    assert len(fixed["outrider"]["drafted_per_position"]) == 3
    assert sum(fixed["outrider"]["accepted_per_position"]) == fixed["outrider"]["accepted"]
    # O7: what the server counted is what its clients were told.
    told = [one["outrider"] for one in (auto, off, fixed)]
    accepted = sum(one["accepted"] for one in told)
    expected = [3 * 48, sum(one["drafted"] for one in told), accepted, accepted]
    assert [now - then for now, then in zip(after, before, strict=True)] == expected


def counted(server: Local, name: str) -> float:
    text = server.get("/metrics").text
    return metric(text, f"outrider_{name}_total") if f"outrider_{name}_total" in text else 0.0


def test_many_prompts_and_samples_come_in_order(server: Local, plain: LLM) -> None:
    prompts = ["one two", [111, 110, 101], "three"]
    expected = [
        one.text
        for output in plain.generate([prompts[0], prompts[2]], params(n=2, temperature=1.0, seed=3))
        for one in output.outputs
    ]
    asked = {"prompt": ["one two", "three"], "n": 2, "seed": 3, "max_tokens": 24}
    answer = server.post("/v1/completions", asked).json()
    events = server.events("/v1/completions", asked)
    ids = server.post("/v1/completions", {"prompt": [prompts[1]], "max_tokens": 0}).json()
    assert [one["text"] for one in answer["choices"]] == expected
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == expected
    assert ids["choices"][0]["text"] == ""
    assert ids["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_key_asked_speeds_no_other_up_unless_told_to(folder: str, shared: bool) -> None:
    keys = {hashlib.sha256(name.encode()).digest(): name for name in ("one", "two")}
    asked = {"prompt": "a beginning that is long enough to fill some blocks", "max_tokens": 2}
    with LLM(folder, share_prefixes=shared) as llm, local(llm, api_keys=keys) as server:
        cached = []
        for name in ("one", "one", "two"):
            answer = server.post("/v1/completions", asked, headers={"authorization": f"Bearer {name}"})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] > 0
    assert (cached[2] > 0) == shared


@pytest.mark.parametrize("wanted", [None, 0, 1, 5])
def test_H04_logprobs_of_completions_have_their_shape(server: Local, wanted: int | None) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": wanted}
    found = server.post("/v1/completions", asked).json()["choices"][0]["logprobs"]
    streamed = server.events("/v1/completions", asked)
    if wanted is None:
        assert found is None
        return
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 5
    assert all(value <= 0 for value in found["token_logprobs"])
    assert (found["top_logprobs"] is None) == (wanted == 0)
    if wanted:
        assert all(token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    pieces = [one["choices"][0]["logprobs"] for one in streamed]
    assert [token for piece in pieces for token in piece["tokens"]] == found["tokens"]


@pytest.mark.parametrize("asked", [{}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 5}])
def test_H04_logprobs_of_chats_have_their_shape(server: Local, asked: dict[str, Any]) -> None:
    # Rounds of the same widths both times: the last bits of a log-probability follow them.
    body = {"messages": CHAT, "max_tokens": 5, "temperature": 0, "speculation": FIXED, **asked}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    events = server.events("/v1/chat/completions", body)
    if not asked.get("logprobs"):
        assert choice["logprobs"] is None
        return
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    assert all(len(one["top_logprobs"]) == asked.get("top_logprobs", 0) for one in content)
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in content)
    pieces = [one["choices"][0]["logprobs"] for one in events if one["choices"][0]["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == content


def test_echo_gives_the_prompt_back_with_its_logprobs(server: Local, plain: LLM) -> None:
    expected = plain.generate(PROMPT, params(max_tokens=3, prompt_logprobs=1))[0]
    asked = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}
    choice = server.post("/v1/completions", asked).json()["choices"][0]
    assert choice["text"] == PROMPT + expected.text
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert expected.prompt_logprobs is not None
    known = [one.logprob for one in expected.prompt_logprobs if one is not None]
    assert values[1 : len(known) + 1] == pytest.approx(known, abs=1e-5)
    assert len(values) == len(expected.prompt_token_ids) + 3


@pytest.mark.parametrize("prompt", [PROMPT, "A", ["ab", "cde"]])
def test_a_prompt_alone_is_scored(server: Local, plain: LLM, prompt: Any) -> None:
    """What evaluation harnesses ask: no new token, and the log-probability of each of the prompt's own."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    expected = plain.generate(prompts, params(max_tokens=1, prompt_logprobs=1))
    alone = plain.generate(prompts, params(max_tokens=0, prompt_logprobs=1))
    asked = {"prompt": prompt, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1}
    choices = server.post("/v1/completions", asked).json()["choices"]
    for choice, text, one, longer in zip(choices, prompts, alone, expected, strict=True):
        assert (choice["text"], choice["finish_reason"], one.token_ids) == (text, "length", ())
        assert one.prompt_logprobs == longer.prompt_logprobs
        assert one.prompt_logprobs is not None
        known = [found.logprob for found in one.prompt_logprobs if found is not None]
        assert len(known) == len(one.prompt_token_ids) - 1
        assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-5) for value in known)]
        assert len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["tokens"])


def test_one_token_a_chunk_where_asked_for(server: Local, fresh: LLM) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0, "speculation": FIXED}
    whole = server.post("/v1/completions", asked).json()
    rounds = server.events("/v1/completions", asked)
    with local(fresh, single_tokens=True) as other:
        singles = other.events("/v1/completions", asked)
    assert {len(one["choices"][0]["logprobs"]["tokens"]) for one in singles} == {1}
    assert len(singles) == 40
    assert len(rounds) < 30  # a round gave several tokens at once
    for events in (rounds, singles):
        assert "".join(one["choices"][0]["text"] for one in events) == whole["choices"][0]["text"]


def test_responses_say_the_same_as_a_chat(server: Local, plain: LLM) -> None:
    told = [{"role": "system", "content": "Be brief."}, *CHAT]
    expected = plain.chat(told, params())[0]
    asked = {"input": CHAT[0]["content"], "instructions": "Be brief.", "max_output_tokens": 24, "temperature": 0}
    answer = server.post("/v1/responses", asked).json()
    stream = server.post("/v1/responses", {**asked, "stream": True}).text
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == expected.text
    assert answer["usage"]["input_tokens"] == len(expected.prompt_token_ids)
    names = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event: ")]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert names[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip


def test_models_and_tokens(fresh: LLM) -> None:
    with local(fresh, served_name="tiny/model") as server:
        listed = server.get("/v1/models").json()["data"]
        one = server.get("/v1/models/tiny/model").json()
        missing = server.get("/v1/models/../../etc/passwd")
        ids = server.post("/tokenize", {"prompt": "héllo"}).json()
        text = server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
        wrong = server.error("/v1/completions", {"model": "other", "prompt": "x"}, 404)
        right = server.post("/v1/completions", {"model": "tiny/model", "prompt": "x", "max_tokens": 1})
    assert listed == [one]
    assert one["id"] == "tiny/model"
    assert one["speculation"]["method"] == "draft_model"
    assert missing.status_code == 404
    assert (ids["count"], text) == (6, "héllo")
    assert wrong["code"] == "model_not_found"
    assert right.status_code == 200


def test_unknown_fields_are_named_or_refused(server: Local, fresh: LLM) -> None:
    asked = {"prompt": "x", "max_tokens": 1, "colour": "red", "stream_options": {"speed": 1}}
    answer = server.post("/v1/completions", asked)
    for field, value in (
        ("suffix", "y"), ("prompt_embeds", "gASV"), ("logits_processors", ["code"]), ("best_of", 3),
        ("use_beam_search", True),
    ):  # fmt: skip
        error = server.error("/v1/completions", {"prompt": "x", field: value})
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    for field, value in (("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"tokenize": True})):
        error = server.error("/v1/chat/completions", {"messages": CHAT, field: value})
        assert error["param"] == field
    assert answer.status_code == 200
    assert answer.headers["x-outrider-ignored-fields"] == '["colour", "stream_options.speed"]'
    with local(fresh, strict=True) as other:
        assert other.error("/v1/completions", asked)["param"] == "colour"


def test_an_answer_may_be_sent_back_as_it_came(fresh: LLM) -> None:
    """Clients append an answer's message to the conversation, with all its fields; null is what they do not say."""
    with local(fresh, strict=True) as server:
        answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "temprature": None})
        said = {**answer.json()["choices"][0]["message"], "audio": None, "function_call": None, "annotations": []}
        again = server.post("/v1/chat/completions", {"messages": [*CHAT, said, *CHAT], "max_tokens": 2})
        assert (again.status_code, "x-outrider-ignored-fields" in again.headers) == (200, False)
        asked = {"max_tokens": 8, "temperature": 0}
        texts = [
            server.post("/v1/chat/completions", {**asked, "messages": [*CHAT, {"role": "assistant", **refused}, *CHAT]})
            for refused in (
                {"content": "I cannot."},
                {"content": None, "refusal": "I cannot."},
                {"content": [{"type": "refusal", "refusal": "I cannot."}]},
            )
        ]
        assert len({one.json()["choices"][0]["message"]["content"] for one in texts}) == 1


@pytest.mark.parametrize(
    "asked",
    [{"suffix": ""}, {"use_beam_search": False}, {"functions": []}, {"reasoning_effort": "none"}, {"audio": None}],
)
def test_what_asks_for_nothing_is_served(server: Local, asked: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, **asked})
    assert (answer.status_code, "x-outrider-ignored-fields" in answer.headers) == (200, False)


SAMPLED = {"temperature": 1.0, "seed": 2}
FIELDS: list[dict[str, Any]] = [
    {"n": 1},
    SAMPLED,
    {"stop": ["e"]},
    {"logit_bias": {"101": -100}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"min_p": 0.2, **SAMPLED},
    {"top_k": 3, **SAMPLED},
    {"top_p": 0.5, **SAMPLED},
    {"repetition_penalty": 1.3},
    {"min_tokens": 20, "stop_token_ids": [101]},
    {"bad_words": ["e"]},
    {"include_stop_str_in_output": True, "stop": "e"},
]


@pytest.mark.parametrize("asked", FIELDS)
def test_E04_every_sampling_field_is_honoured_with_speculation(
    server: Local, plain: LLM, asked: dict[str, Any]
) -> None:
    expected = plain.generate(PROMPT, params(**asked))[0]
    body = {"temperature": 0, "max_tokens": 24, "prompt": PROMPT, "speculation": {"num_speculative_tokens": 4}, **asked}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.outputs[0].finish_reason


def test_a_prediction_drafts_and_changes_nothing(server: Local, plain: LLM) -> None:
    expected = plain.chat(CHAT, params())[0]
    asked = {"messages": CHAT, "max_tokens": 24, "temperature": 0}
    body = {**asked, "prediction": {"type": "content", "content": expected.text}}
    body["speculation"] = {"num_speculative_tokens": 5}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 5
