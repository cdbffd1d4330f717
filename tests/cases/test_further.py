"""Situations that other systems failed in and that shared/cases.md does not list: what callers pass, and text at edges.

Each docstring says what was reported, in our own words, and what must hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider import LLM, ConfigError, InvalidRequestError, SamplingParams
from outrider.engine.detokenizer import Detokenizer
from outrider.sampling.params import check_text
from tests.cases_support import GREEDY, base, draft, engine, guessed, idle, ids, lookup, opened, words
from tests.tiny import EOS_ID, byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = list(b"The quick brown fox jumps")
HALF = "a\ud800b"  # half of a surrogate pair, as JSON's "\ud800" gives it


# --- text at edges


def _spaced_tokenizer() -> Any:
    """Words with the space before them in one token, which is dropped where a text begins: SentencePiece's way."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<tool>", special=True)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, unk_token="<unk>")


def test_a_word_after_a_special_token_keeps_its_space() -> None:
    """Decoded piece by piece, a word that follows a left-out special token lost the space before it."""
    tokenizer = _spaced_tokenizer()
    made = Detokenizer(tokenizer, [0])
    tokens = [1, 3, 0, 3, 3, 1]
    streamed = ""
    for token in tokens:
        made.push(token)
        streamed += made.take(final=False)
    whole = tokenizer.decode([0, *tokens], skip_special_tokens=True)
    assert made.text == streamed == whole.removeprefix("one") == " two one two"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_before_half_a_character_is_found_when_the_text_ends(include: bool) -> None:
    """A last token that ends in half a character held back whole ones before it, and a stop string among them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    mixed = {"a": 0, "bÃ": 1}  # "b" and the first byte of "é"
    backend = Tokenizer(models.BPE(vocab={**mixed, "b": 2, "Ã": 3}, merges=[("b", "Ã")]))
    backend.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    made = Detokenizer(make(tokenizer_object=backend), [0], ["b"], include_stop=include)
    assert made.push(0) is None and made.push(1) is None
    assert made.finish() == "b"
    assert made.text == ("ab" if include else "a")


@pytest.fixture(scope="module")
def speaks_its_end() -> LLM:
    """T, but its sixth token after PROMPT is </s>."""
    model = tiny_target()
    sixth = ids(base([PROMPT], max_tokens=6))[0][5]
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[EOS_ID] = head[sixth] * 1.001
    return opened(model)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_the_text(speaks_its_end: LLM, include: bool) -> None:
    """vllm#2123, koboldcpp#791: a special token is left out of the text, and never stopped it."""
    asked = GREEDY.but(stop=["</s>"], include_stop_str_in_output=include)
    outputs = [
        base([PROMPT], speaks_its_end, asked)[0],
        guessed([PROMPT], draft("same"), 4, speaks_its_end, asked)[0],
    ]
    for one in outputs:
        assert one.token_ids[-1] == EOS_ID and len(one.token_ids) == 6
        assert (one.finish_reason, one.stop_reason) == ("stop", "</s>")
        assert one.text.endswith("</s>") == include
    early = base([PROMPT], speaks_its_end, asked.but(min_tokens=6, max_tokens=9))[0]
    assert early.finish_reason == "length", "before min_tokens no stop string is looked for"


@pytest.mark.parametrize(("word", "other"), [("\n", " "), (" ", "\n"), ("\t", " ")])
def test_white_space_can_be_a_bad_word(word: str, other: str) -> None:
    """vllm#23886 and its like: stripped of white space, a banned newline became a banned space."""
    liked = GREEDY.but(logit_bias={ord(word): 80, ord(other): 79})
    assert word in base([PROMPT], params=liked)[0].text
    asked = liked.but(bad_words=[word])
    plain, fast = base([PROMPT], params=asked)[0], guessed([PROMPT], lookup(1, 3), 4, params=asked)[0]
    assert plain.token_ids == fast.token_ids
    assert word not in plain.text and other in plain.text


# --- numbers at edges


def test_a_nucleus_too_small_for_a_float_still_holds_the_likeliest_token() -> None:
    """top_p below what fp32 can hold left no token, and id 0 came out."""
    greedy = ids(base([PROMPT]))
    for top_p in (1e-9, 1e-50, 5e-324):
        asked = GREEDY.but(temperature=1.0, seed=3, top_p=top_p)
        assert ids(base([PROMPT], params=asked)) == greedy
        assert ids(guessed([PROMPT], draft("noisy"), 4, params=asked)) == greedy


def test_the_smallest_repetition_penalty_makes_no_score_infinite() -> None:
    """It divides: by what fp32 rounds to 0, all scores would tie."""
    least, small = (base([PROMPT], params=GREEDY.but(repetition_penalty=value))[0] for value in (5e-324, 1e-25))
    assert least.error is None and least.token_ids == small.token_ids


def test_bans_that_leave_nothing_end_the_request_and_no_other() -> None:
    """Where bad words and withheld stop ids ban the whole vocabulary, a banned id was emitted."""
    model = tiny_target(vocab_size=260)
    words_ = [chr(code) for code in range(128)]
    everything = GREEDY.but(bad_words=words_, stop_token_ids=list(range(128, 260)), min_tokens=5)
    with LLM(model, model, 3, tokenizer=words(), max_model_len=64) as llm:
        for temperature, speculation in ((0, "off"), (0, 3), (1.0, 3)):
            params = [
                everything.but(temperature=temperature, seed=1, speculation=speculation),
                GREEDY.but(max_tokens=5),
            ]
            stuck, other = (one.outputs[0] for one in llm.generate([PROMPT, PROMPT], params))
            assert (stuck.finish_reason, stuck.token_ids) == ("error", ())
            assert stuck.error is not None and "bad_words" in stuck.error
            assert other.error is None and len(other.token_ids) == 5
        one_left = everything.but(bad_words=words_[1:])
        assert llm.generate([PROMPT], one_left)[0].token_ids[:5] == (0,) * 5


# --- scoring a prompt


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_prompt_is_scored_without_generating(num_samples: int) -> None:
    """Evaluation harnesses ask for max_tokens=0 with prompt log-probabilities: the report came back empty."""
    asked = SamplingParams(max_tokens=0, prompt_logprobs=2, n=num_samples)
    llm, long = engine(), PROMPT * 5
    prompts = [PROMPT, long, [65]]
    scored = llm.generate(prompts, asked)
    known = llm.generate(prompts, asked.but(max_tokens=3))
    for one, other, prompt in zip(scored, known, prompts, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in one.prompt_logprobs] == [None, *prompt[1:]]
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None and theirs is not None
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [(done.token_ids, done.finish_reason) for done in one.outputs] == [((), "length")] * num_samples
    assert idle(llm)


def test_a_score_that_is_no_number_ends_its_request_alone() -> None:
    """NaN in a prompt's own scores was reported as log-probabilities."""
    model = tiny_target()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    llm = opened(model)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=1)
    broken, whole = (one for one in llm.generate([[*PROMPT, 7, 1, 1], PROMPT], asked))
    assert broken.outputs[0].error is not None and "NaN" in broken.outputs[0].error
    assert whole.outputs[0].error is None and whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(PROMPT)
    assert idle(llm)


# --- what callers pass


def test_arrays_of_other_libraries_are_prompts_and_numbers() -> None:
    """A list of tensors is many prompts; one of numpy's integers, one prompt; their scalars are parameters."""
    import numpy as np

    one, two = np.array([65, 66]), torch.tensor([67])
    asked = SamplingParams(
        temperature=np.float32(0), max_tokens=np.int64(1), stop_token_ids=np.array([3]), logit_bias={np.int64(5): 1}
    )
    assert asked == SamplingParams(temperature=0, max_tokens=1, stop_token_ids=(3,), logit_bias={5: 1})
    seen = [output.prompt_token_ids for output in engine().generate([one, two, list(one)], asked)]
    assert seen == [(65, 66), (67,), (65, 66)]


@pytest.mark.parametrize(
    "ask",
    [
        lambda: engine().generate(HALF),
        lambda: engine().chat([{"role": "user", "content": HALF}]),
        lambda: SamplingParams(stop=[HALF]),
        lambda: SamplingParams(bad_words=[HALF]),
        lambda: SamplingParams(prediction=HALF),
    ],
    ids=["prompt", "chat", "stop", "bad_words", "prediction"],
)
def test_half_a_surrogate_pair_is_refused_wherever_text_is_taken(ask: Callable[[], Any]) -> None:
    """Tokenizers raise a TypeError of their own, which says nothing."""
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        ask()
    check_text("a pair", "\U0001f600")


def test_half_a_surrogate_pair_in_a_corpus_is_refused_by_line(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "whole"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ConfigError, match="line 2 holds half of a surrogate pair"):
        opened(tiny_target(), method="suffix", suffix_corpus=corpus)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "half an id": (lambda: SamplingParams(logit_bias={1.7: 3}), r"token ids, got 1\.7"),
    "no id at all": (lambda: SamplingParams(logit_bias={float("inf"): 3}), "token ids, got inf"),
    "a truth as id": (lambda: SamplingParams(logit_bias={True: 3}), "got True"),
    "an endless number": (lambda: SamplingParams(temperature=10**400), r"temperature must be in \[0, 100\]"),
    "a word for a truth": (lambda: SamplingParams(ignore_eos="no"), "ignore_eos must be True or False, got 'no'"),  # type: ignore[arg-type]
    "a tokenizer's dict": (lambda: engine().generate({"input_ids": [1]}), r"needs 'prompt'.*\['input_ids'\]"),
    "a list of floats": (lambda: engine().generate([torch.tensor(1.5)]), "list of token ids"),
    "one message": (lambda: engine().chat({"role": "user"}), "messages must be a list"),  # type: ignore[arg-type]
    "no messages": (lambda: engine().chat("Hello"), "messages must be a list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("ask", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_requests_are_refused_with_the_value(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ask()


MISSET: dict[str, tuple[dict[str, Any], str]] = {
    "a model as a head": ({"method": "eagle", "speculative_model": object()}, "'eagle' takes the folder or Hub id"),
    "a method as a config": ({"speculative_config": "ngram"}, "speculative_config must be a dict.*got 'ngram'"),
    "half a seed": ({"seed": 1.5}, "seed must be an integer"),
    "no tokenizer": ({"tokenizer": 5}, "tokenizer must be .* got int"),
}


@pytest.mark.parametrize(("settings", "message"), MISSET.values(), ids=MISSET.keys())
def test_wrong_settings_are_refused_before_anything_is_loaded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_target(), **{"tokenizer": byte_tokenizer(), **settings})


def test_conversations_may_be_tuples() -> None:
    message = {"role": "user", "content": "Hi"}
    asked = GREEDY.but(max_tokens=1)
    made = [engine().chat(messages, asked) for messages in ([message], (message,), [(message,)], ([message],))]  # type: ignore[arg-type, list-item]
    assert len({one[0].prompt_token_ids for one in made}) == 1


# --- models


def test_a_model_that_takes_attention_as_it_is_laid_out_runs_in_batches() -> None:
    """Some models view what attention gives without a copy: one row passed, at load too, and every batch failed."""
    from transformers import AfmoeConfig

    from tests.tiny import _build, greedy

    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_dense_layers": 1}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    model = _build(AfmoeConfig(**special, **shape, **layers, **experts, max_position_embeddings=64), seed=0, std=0.5)
    prompts = [[5, 9, 17, 9, 17, 33, 40, 41, 42, 43], [7, 8]]
    wanted = [greedy(model, prompt, 12) for prompt in prompts]
    with LLM(model, method="ngram", dtype="float32", device="cpu") as llm:
        for changes in ({"speculation": "off"}, {"speculation": 4, "prediction": wanted[0][:6]}):
            made = llm.generate(prompts, GREEDY.but(max_tokens=12, **changes))
            assert [list(one.token_ids) for one in made] == wanted
