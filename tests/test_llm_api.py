"""`LLM` as people already write it: today's guides with only the import changed, and errors that say what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider import LLM, CapacityError, ConfigError, InvalidRequestError, ModelLoadError, OutriderError, SamplingParams
from tests.tiny import byte_tokenizer, greedy, save, tiny_draft, tiny_target

torch.set_num_threads(1)  # these models are too small to share work

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = "Explain quantum computing"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {"target": tiny_target(), "draft": tiny_draft(tiny_target(), "noisy")}
    return {name: str(save(model, byte_tokenizer(), root / name)) for name, model in made.items()}


@pytest.fixture(scope="module")
def pair(folders: dict[str, str]) -> LLM:
    return LLM(
        model=folders["target"],
        speculative_model=folders["draft"],
        num_speculative_tokens=5,
        gpu_memory_utilization=0.9,
        max_model_len=400,
        tensor_parallel_size=1,
    )


@pytest.fixture(scope="module")
def plain(folders: dict[str, str]) -> LLM:
    return LLM(model=folders["target"], max_model_len=400)


@pytest.fixture(scope="module")
def draft_llm(folders: dict[str, str]) -> LLM:
    return LLM(model=folders["draft"], max_model_len=400)


# --- the guides' examples


def test_the_offline_example_runs_with_only_the_import_changed(pair: LLM) -> None:
    outputs = pair.generate("Explain quantum computing", SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64))
    for output in outputs:
        assert output.prompt == "Explain quantum computing"
        assert output.outputs[0].text == output.text and 0 < len(output.outputs[0].token_ids) <= 64
    assert len(outputs) == 1 and outputs[0].stats.drafted > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model", None])
def test_speculative_config_as_vllm_spells_it(method: str | None, folders: dict[str, str], plain: LLM) -> None:
    config: dict[str, Any] = {"num_speculative_tokens": 3}
    if method:
        config["method"] = method
    if method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        config["model"] = folders["draft"]
    llm = LLM(model=folders["target"], speculative_config=config, max_model_len=128, max_num_seqs=2)
    prompt = "abc abc abc abc"
    done = llm.generate(prompt, GREEDY)[0]
    assert done.token_ids == plain.generate(prompt, GREEDY)[0].token_ids
    assert done.stats.drafted > 0 and len(done.stats.drafted_per_position) <= 3


@pytest.mark.parametrize("spelling", ["[ngram]", "ngram"])
def test_vllm_s_older_spelling_of_lookup(spelling: str, folders: dict[str, str]) -> None:
    llm = LLM(model=folders["target"], speculative_model=spelling, num_speculative_tokens=4, max_num_seqs=1)
    assert llm.generate("abc abc abc", GREEDY)[0].stats.drafted > 0


def test_a_loaded_llm_is_a_draft(folders: dict[str, str], draft_llm: LLM, plain: LLM) -> None:
    llm = LLM(model=folders["target"], speculative_model=draft_llm, num_speculative_tokens=4, max_num_seqs=2)
    done = llm.generate([PROMPT, "and on"], GREEDY)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain.generate([PROMPT, "and on"], GREEDY)]
    assert done[0].stats.drafted > 0
    assert len(draft_llm.generate(PROMPT, GREEDY)[0].token_ids) == 24, "the draft still serves on its own"


def test_a_request_may_bring_its_own_draft_in_a_mixed_batch(plain: LLM, draft_llm: LLM) -> None:
    own = GREEDY.but(speculative_model=draft_llm, num_speculative_tokens=5)
    assert own == SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, num_speculative_tokens=5)
    prompts = [PROMPT, "and on", "or not", "a"]
    wanted = [one.token_ids for one in plain.generate(prompts, GREEDY)]
    done = plain.generate(prompts, [own, GREEDY, own.but(num_speculative_tokens=2), GREEDY.but(speculation="off")])
    assert [one.token_ids for one in done] == wanted
    assert [one.stats.drafted > 0 for one in done] == [True, False, True, False]


def test_a_request_s_own_draft_beside_the_engine_s(pair: LLM, draft_llm: LLM, plain: LLM) -> None:
    params = [GREEDY.but(speculative_model=draft_llm, num_speculative_tokens=3), GREEDY.but(speculation=4)]
    done = pair.generate([PROMPT, "and on"], params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain.generate([PROMPT, "and on"], GREEDY)]
    assert all(one.stats.drafted > 0 for one in done)


def test_loaded_transformers_models_are_served_and_left_as_they_were() -> None:
    model, drafting = tiny_target(), tiny_draft(tiny_target(), "noisy")
    ids = list(PROMPT.encode())
    wanted = greedy(model, ids, 24)
    with LLM(model=model, tokenizer=byte_tokenizer(), speculative_model=drafting, max_model_len=128) as llm:
        assert list(llm.generate(PROMPT, GREEDY.but(speculation=4))[0].token_ids) == wanted
        with pytest.raises(RuntimeError, match="belongs to an Outrider engine"):
            model(input_ids=torch.tensor([ids]))
    for one in (model, drafting):
        assert one.config._attn_implementation == "eager"
    assert greedy(model, ids, 24) == wanted


def test_one_model_as_target_and_draft_is_given_back() -> None:
    model = tiny_target()
    with LLM(model=model, speculative_model=model, max_model_len=64, max_num_seqs=1) as llm:
        assert llm.generate([[5, 6]], GREEDY.but(speculation=3))[0].stats.accepted > 0
    assert model.config._attn_implementation == "eager"


def test_closing_one_engine_leaves_another_over_the_same_model_alone() -> None:
    model = tiny_target()
    first, second = (LLM(model=model, max_model_len=64, max_num_seqs=1) for _ in range(2))
    prompt = list(b"some words")
    wanted = second.generate([prompt], GREEDY)[0].token_ids
    first.close()
    assert second.generate([prompt], GREEDY)[0].token_ids == wanted


# --- calls


def test_prompts_come_in_every_form(plain: LLM) -> None:
    ids = list(PROMPT.encode())
    wanted = plain.generate(PROMPT, GREEDY)[0].token_ids
    forms: list[Any] = [
        [PROMPT],
        ids,
        [ids],
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        {"prompt": PROMPT},
        [{"prompt_token_ids": ids}],
    ]
    for form in forms:
        (done,) = plain.generate(form, GREEDY)
        assert done.token_ids == wanted and done.prompt_token_ids == tuple(ids)
    assert plain.generate(prompt_token_ids=[ids], sampling_params=GREEDY)[0].token_ids == wanted
    assert plain.generate([], GREEDY) == []


def test_many_prompts_share_parameters_or_bring_their_own(pair: LLM) -> None:
    prompts = [PROMPT, "b", "c c c"]
    shared = pair.generate(prompts, GREEDY)
    each = pair.generate(prompts, [GREEDY.but(max_tokens=size) for size in (1, 2, 3)])
    assert [one.prompt for one in shared] == prompts
    assert [len(one.token_ids) for one in each] == [1, 2, 3]
    assert [one.token_ids[:size] for one, size in zip(shared, (1, 2, 3), strict=True)] == [
        one.token_ids for one in each
    ]


def test_the_default_parameters_are_sampled_and_bounded(pair: LLM) -> None:
    (done,) = pair.generate("x")
    assert 0 < len(done.token_ids) <= 256


def test_chat_uses_the_target_s_template(pair: LLM, plain: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (done,) = pair.chat(messages, GREEDY)
    text = "<s>user\nHello</s>\n<s>assistant\n"
    assert done.prompt_token_ids == tuple(byte_tokenizer()(text, add_special_tokens=False).input_ids)
    assert done.token_ids == plain.chat(messages, GREEDY)[0].token_ids
    both = pair.chat([messages, [{"role": "user", "content": "Bye"}]], GREEDY)
    assert len(both) == 2 and both[0].token_ids == done.token_ids


@pytest.mark.parametrize(
    "params", [GREEDY.but(speculation=4), SamplingParams(seed=1, max_tokens=30), GREEDY.but(stop="o")]
)
def test_the_stream_s_pieces_are_the_text(pair: LLM, params: SamplingParams) -> None:
    whole = pair.generate(PROMPT, params)[0].outputs[0]
    chunks = list(pair.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]


def test_two_streams_and_a_call_between_them_do_not_mix(pair: LLM, plain: LLM) -> None:
    wanted = [one.token_ids for one in plain.generate([PROMPT, "and on", "or not"], GREEDY)]
    first, second = pair.stream(PROMPT, GREEDY), pair.stream("and on", GREEDY)
    got: list[list[int]] = [[], []]
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    assert pair.generate("or not", GREEDY)[0].token_ids == wanted[2]
    for place, stream in enumerate((first, second)):
        got[place] += [token for chunk in stream for token in chunk.token_ids]
    assert [tuple(one) for one in got] == wanted[:2]


def test_results_tell_how_they_came_about(pair: LLM) -> None:
    (done,) = pair.generate(PROMPT, GREEDY.but(speculation=4, logprobs=2, prompt_logprobs=0))
    completion, stats = done.outputs[0], done.stats
    assert done.request_id and completion.index == 0 and completion.error is None
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.text == byte_tokenizer().decode(completion.token_ids)
    assert len(completion.logprobs) == len(completion.origins) == stats.tokens == 24
    assert set(completion.origins) <= {"accepted", "recovered", "bonus", "plain"}
    assert completion.origins.count("accepted") == stats.accepted <= stats.drafted
    assert stats.accepted + stats.rounds == stats.tokens and stats.tokens_per_round == 24 / stats.rounds
    assert sum(stats.accepted_per_position) == stats.accepted and sum(stats.drafted_per_position) == stats.drafted
    assert 0 < stats.first_token_seconds <= stats.seconds and not stats.lossy
    assert len(done.prompt_logprobs) == len(done.prompt_token_ids)


def test_lossy_verification_is_warned_about_and_marked(folders: dict[str, str], draft_llm: LLM) -> None:
    with pytest.warns(UserWarning, match="'typical' is lossy"):
        llm = LLM(
            model=folders["target"],
            speculative_model=draft_llm,
            verification="typical",
            max_num_seqs=1,
            max_model_len=64,
        )
    assert llm.generate("abc", SamplingParams(seed=1, max_tokens=12, speculation=3))[0].stats.lossy
    assert not llm.generate("abc", GREEDY.but(speculation="off"))[0].stats.lossy


def test_the_default_setting_warns_about_nothing(folders: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(model=folders["target"], speculative_model=folders["draft"], max_model_len=64, max_num_seqs=1)
        llm.generate("abc", GREEDY)


def test_everything_public_is_importable() -> None:
    for name in set(outrider.__all__) - {"wrap"}:
        assert getattr(outrider, name) is not None


# --- errors: the value, and what to do


def refused(kind: type[OutriderError], *parts: str, **settings: Any) -> None:
    with pytest.raises(kind) as caught:
        LLM(**settings)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


def test_wrong_settings_are_refused_by_name_value_and_remedy(folders: dict[str, str], tmp_path: Path) -> None:
    model = folders["target"]
    refused(ConfigError, "'num_spec'", "num_speculative_tokens", model=model, speculative_config={"num_spec": 3})
    refused(ConfigError, "dtype", "'float8'", "bfloat16", model=model, dtype="float8")
    refused(ConfigError, "tensor_parallel_size=2", "leave it at 1", model=model, tensor_parallel_size=2)
    refused(ConfigError, "num_speculative_tokens", "[0, 64]", "65", model=model, num_speculative_tokens=65)
    refused(ConfigError, "method", "'eagle9'", "'ngram'", model=model, method="eagle9")
    refused(ConfigError, "verification", "'exact'", "'coupled'", model=model, verification="exact")
    refused(ConfigError, "'draft_model' needs a draft", "speculative_model", model=model, method="draft_model")
    refused(ConfigError, "takes no draft model", model=model, method="ngram", speculative_model=folders["draft"])
    refused(ConfigError, "gpu_memory_utilization", "(0, 1]", "1.5", model=model, gpu_memory_utilization=1.5)
    refused(ConfigError, "max_model_len=4096", "512", "lower it", model=model, max_model_len=4096)
    refused(ModelLoadError, str(tmp_path / "nothing"), model=str(tmp_path / "nothing"))


def test_a_device_that_is_no_string_of_torch_is_a_config_error(folders: dict[str, str]) -> None:
    refused(ConfigError, "device", "'gpu'", model=folders["target"], device="gpu")


def test_a_kv_budget_that_is_too_small_says_what_would_fit(folders: dict[str, str]) -> None:
    with pytest.raises(
        CapacityError, match=r"max_model_len is 400.*kv_cache_bytes.*max_model_len=(\d+) or less"
    ) as caught:
        LLM(model=folders["target"], max_model_len=400, kv_cache_bytes=100_000)
    fits = int(str(caught.value).split("max_model_len=")[1].split()[0])
    llm = LLM(model=folders["target"], max_model_len=fits, kv_cache_bytes=100_000)
    prompt = list(b"x" * (fits - 2))
    assert len(llm.generate([prompt], GREEDY)[0].token_ids) == 2
    with pytest.raises(CapacityError):
        LLM(model=folders["target"], max_model_len=fits + 16, kv_cache_bytes=100_000)


def test_wrong_requests_are_refused_by_name_value_and_remedy(pair: LLM, plain: LLM) -> None:
    def says(*parts: str, llm: LLM = pair, prompts: Any = PROMPT, params: Any = GREEDY) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, params)
        for part in parts:
            assert part in str(caught.value), f"{part!r} is not in {caught.value}"
        assert not llm.engine.busy

    says("empty", "at least one token", prompts="")
    says("empty", prompts=[PROMPT, ""])
    says("no prompt", prompts=None)
    says("400 tokens", "max_model_len is 400", "shorten", prompts=[[5] * 400])
    says("prompt token 2 is 320", "[0, 319]", prompts=[[1, 2, 320]])
    says("prompt token 0 is -1", prompts=[[-1]])
    says("2 prompts came with 3", "one each", prompts=["a", "b"], params=[GREEDY] * 3)
    says("a prompt must be a string", "3.5", prompts=[3.5])
    says("logit_bias names id 400", "319", params=GREEDY.but(logit_bias={400: 1.0}))
    says("stop_token_ids names id 999", params=GREEDY.but(stop_token_ids=[999]))
    says("speculation of 3 tokens needs a drafter", "method='ngram'", llm=plain, params=GREEDY.but(speculation=3))
    says("must be an LLM, got str", llm=plain, params=GREEDY.but(speculative_model="some/model"))
    with pytest.raises(InvalidRequestError, match=r"no chat template.*use generate"):
        LLM(model=tiny_target(), max_num_seqs=1).chat([{"role": "user", "content": "Hi"}], GREEDY)
    with pytest.raises(InvalidRequestError, match="has no tokenizer: pass token ids"):
        LLM(model=tiny_target(), max_num_seqs=1).generate("Hi", GREEDY)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "[0, 100]"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_k", -2, ">= -1"),
        ("min_p", 2, "[0, 1]"),
        ("n", 0, "[1, 1024]"),
        ("max_tokens", -1, ">= 0"),
        ("logprobs", 101, "[0, 100]"),
        ("presence_penalty", 3, "[-2, 2]"),
        ("frequency_penalty", float("nan"), "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 10]"),
        ("speculation", "never", "'auto', 'off' or a length"),
        ("speculation", 65, "[0, 64]"),
        ("num_speculative_tokens", 0, "[1, 64]"),
        ("temperature", True, "[0, 100]"),
        ("seed", 1.5, "integer"),
        ("min_tokens", 300, "at most max_tokens"),
        ("stop", "", "empty string"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {1: 200}, "[-100, 100]"),
    ],
)
def test_parameters_out_of_range_name_field_value_and_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value) and allowed in str(caught.value)


def test_a_refused_request_among_many_starts_nothing(pair: LLM) -> None:
    rounds = pair.engine.figures.rounds
    with pytest.raises(InvalidRequestError):
        pair.generate([PROMPT, "b", []], GREEDY)
    assert pair.engine.figures.rounds == rounds and not pair.engine.busy


def test_parameters_of_another_type_are_refused(plain: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        plain.generate(PROMPT, {"temperature": 0})


def test_prompts_given_twice_are_refused(plain: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="pass the prompts once"):
        plain.generate(PROMPT, prompt_token_ids=[1, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, r"max_model_len=513 is beyond the model's context of 512"),
        ({"quantization": "int3"}, r"quantization must be 'int8', 'int4' or None, got 'int3'"),
        ({"method": "draft_model"}, r"needs a draft"),
        ({"dtype": "float13"}, r"float13"),
    ],
)
def test_wrong_settings_are_refused_before_any_weight_is_read(
    settings: dict[str, Any], message: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*given: object, **named: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("outrider.model.load._read_weights", read)
    with pytest.raises(ConfigError, match=message):
        LLM(folders["target"], **settings)
