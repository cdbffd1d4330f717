"""`outrider.wrap`: the tensor that transformers' own `generate` returns."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider import LLM, InvalidRequestError, OutriderError, SamplingParams, wrap
from tests.tiny import BOS_ID, EOS_ID, PAD_ID, byte_tokenizer, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.wrapping import WrappedModel


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny_draft(target, "noisy")


@pytest.fixture(scope="module")
def wrapped(target: Any) -> Iterator[WrappedModel]:
    with wrap(target, byte_tokenizer()) as one:
        yield one


def prompt(length: int, seed: int = 0) -> list[int]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=draws).tolist()


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Prompts of these lengths in one left-padded batch."""
    width = max(lengths)
    rows = [prompt(length, seed) for seed, length in enumerate(lengths)]
    return {
        "input_ids": torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def one(length: int = 12) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([prompt(length)])}


def theirs(model: Any, **settings: Any) -> torch.Tensor:
    result: torch.Tensor = model.generate(**settings)
    return result


def eos_of(target: Any, place: int, inputs: dict[str, torch.Tensor]) -> int:
    """The token that greedy text of the first row has at `place`."""
    new = theirs(target, **inputs, max_new_tokens=place + 1, eos_token_id=None)
    return int(new[0, -1])


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 24},
    "do_sample given": {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, "use_cache": True},
    "sampling settings without do_sample": {"max_new_tokens": 8, "do_sample": False, "top_k": 3},
    "repetition penalty": {"max_new_tokens": 24, "repetition_penalty": 1.7},
    "max_length": {"max_length": 30},
    "the default length": {},
    "min_new_tokens": {"max_new_tokens": 16, "min_new_tokens": 6},
    "min_length": {"max_new_tokens": 16, "min_length": 20},
    "lookup": {"max_new_tokens": 24, "prompt_lookup_num_tokens": 4},
    "lookup, longer matches": {"max_new_tokens": 24, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("settings", GREEDY.values(), ids=GREEDY.keys())
def test_greedy_text_is_the_same(wrapped: WrappedModel, target: Any, settings: dict[str, Any]) -> None:
    expected = theirs(target, **one(), **settings)
    assert torch.equal(wrapped.generate(**one(), **settings), expected)


def test_an_assistant_changes_nothing_but_the_rounds(wrapped: WrappedModel, target: Any, draft: Any) -> None:
    expected = theirs(target, **one(), max_new_tokens=32)
    got = wrapped.generate(**one(), assistant_model=draft, max_new_tokens=32, num_assistant_tokens=4)
    assert torch.equal(got, expected)
    assert torch.equal(theirs(target, **one(), assistant_model=draft, max_new_tokens=32), expected)
    assert wrapped.stats[0].drafted > 0


@pytest.mark.parametrize("kind", ["plain", "assistant", "lookup"])
def test_a_left_padded_batch_is_the_same_row_by_row(wrapped: WrappedModel, target: Any, draft: Any, kind: str) -> None:
    """Case L03: prompts of 1, 5, 17 and 40 tokens."""
    more = {"plain": {}, "assistant": {"assistant_model": draft}, "lookup": {"prompt_lookup_num_tokens": 5}}[kind]
    inputs = padded(1, 5, 17, 40)
    got = wrapped.generate(**inputs, **more, max_new_tokens=20)
    assert torch.equal(got, theirs(target, **inputs, max_new_tokens=20))


def test_padding_is_never_attended(wrapped: WrappedModel) -> None:
    """What stands behind the mask does not matter."""
    inputs = padded(3, 9)
    clean = wrapped.generate(**inputs, max_new_tokens=12)[:, 9:]
    inputs["input_ids"][0, :6] = 77
    assert torch.equal(wrapped.generate(**inputs, max_new_tokens=12)[:, 9:], clean)


def test_without_a_mask_padding_is_guessed_from_the_pad_token(wrapped: WrappedModel, target: Any) -> None:
    ids = padded(3, 9)["input_ids"]
    expected = theirs(target, input_ids=ids, max_new_tokens=8)
    assert torch.equal(wrapped.generate(ids, max_new_tokens=8), expected)


@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 9}, {"pad_token_id": 7}])
def test_rows_end_at_eos_and_are_padded(wrapped: WrappedModel, target: Any, more: dict[str, Any]) -> None:
    inputs = padded(12, 5, 9)
    stop = [eos_of(target, 6, {name: value[:1] for name, value in inputs.items()}), EOS_ID]
    expected = theirs(target, **inputs, max_new_tokens=24, eos_token_id=stop, **more)
    got = wrapped.generate(**inputs, max_new_tokens=24, eos_token_id=stop, prompt_lookup_num_tokens=3, **more)
    assert torch.equal(got, expected)


def test_a_row_alone_is_no_longer_than_its_text(wrapped: WrappedModel, target: Any) -> None:
    stop = eos_of(target, 6, one())
    expected = theirs(target, **one(), max_new_tokens=24, eos_token_id=stop)
    assert expected.shape[1] < 12 + 24
    assert torch.equal(wrapped.generate(**one(), max_new_tokens=24, eos_token_id=stop), expected)


def test_settings_come_from_the_models_generation_config(target: Any) -> None:
    model = copy.deepcopy(target)
    model.generation_config.max_new_tokens = 9
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.pad_token_id = None
    model.generation_config.eos_token_id = [eos_of(target, 3, one()), BOS_ID]
    with wrap(model) as mine:
        assert torch.equal(mine.generate(**padded(12, 4)), theirs(model, **padded(12, 4)))
        given = copy.deepcopy(model.generation_config)
        given.max_new_tokens = 5
        expected = theirs(model, **one(), generation_config=given)
        assert torch.equal(mine.generate(**one(), generation_config=given), expected)


def test_sampled_tensors_have_the_same_shape_and_follow_the_seed(wrapped: WrappedModel, draft: Any) -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "min_p": 0.01,
        "num_return_sequences": 3, "eos_token_id": None,
    }  # fmt: skip
    inputs = padded(3, 7)
    first = wrapped.generate(**inputs, **settings, seed=5)
    assert first.shape == (6, 17)
    assert torch.equal(first[:, :7], inputs["input_ids"].repeat_interleave(3, 0))
    assert torch.equal(wrapped.generate(**inputs, **settings, seed=5, assistant_model=draft), first)
    assert not torch.equal(wrapped.generate(**inputs, **settings, seed=6), first)
    torch.manual_seed(1)
    unseeded = wrapped.generate(**inputs, **settings)
    torch.manual_seed(1)
    assert torch.equal(wrapped.generate(**inputs, **settings), unseeded)


def test_equal_rows_are_sampled_differently(wrapped: WrappedModel) -> None:
    ids = torch.tensor([prompt(6), prompt(6)])
    rows = wrapped.generate(ids, max_new_tokens=12, do_sample=True, temperature=2.0, seed=0)
    assert not torch.equal(rows[0], rows[1])


def test_a_stop_string_ends_a_row(wrapped: WrappedModel, target: Any) -> None:
    greedy = theirs(target, **one(), max_new_tokens=16)[0, 12:].tolist()
    place = next(i for i, token in enumerate(greedy) if token < 128)
    got = wrapped.generate(**one(), max_new_tokens=16, stop_strings=[chr(greedy[place])])
    assert got[0, 12:].tolist() == greedy[: place + 1]


def test_the_models_are_their_own_again_after_each_call(target: Any, draft: Any) -> None:
    model, assistant = copy.deepcopy(target).train(), copy.deepcopy(draft)
    model.base_model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with wrap(model) as mine:
        mine.generate(**one(), assistant_model=assistant, max_new_tokens=4)
        assert model.config._attn_implementation == assistant.config._attn_implementation == "eager"
        assert [module.training for module in model.modules()] == before
        model.set_attn_implementation("sdpa")
        mine.generate(**one(), max_new_tokens=4)  # drops the assistant's engine
        assert (model.config._attn_implementation, assistant.config._attn_implementation) == ("sdpa", "eager")
        assert theirs(model.eval(), **one(), max_new_tokens=4).shape == (1, 16)
    assert model.config._attn_implementation == "sdpa"


def test_an_engine_beside_a_wrapped_model_leaves_it_alone_and_is_left_alone(target: Any) -> None:
    """In a notebook the same model object is wrapped, and given to an LLM: each found the other's attention."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with wrap(target) as first:
        wanted = theirs(target, **one(), max_new_tokens=6).tolist()
        assert first.generate(**one(), max_new_tokens=6).tolist() == wanted
        with LLM(target, tokenizer=byte_tokenizer(), max_model_len=64) as llm:
            for _ in range(2):
                assert [prompt(12) + list(llm.generate(prompt(12), params)[0].token_ids)] == wanted
                assert first.generate(**one(), max_new_tokens=6).tolist() == wanted
        assert target.config._attn_implementation == "eager"
        assert theirs(target, **one(), max_new_tokens=6).tolist() == wanted
        assert first.generate(**one(), max_new_tokens=6).tolist() == wanted
    assert target.config._attn_implementation == "eager"


def test_a_vocabulary_that_grew_between_two_calls_is_seen() -> None:
    """`resize_token_embeddings` after the first call: the engine of before knew none of the new ids."""
    model = tiny_target()
    with wrap(model) as wrapped:
        wrapped.generate(**one(), max_new_tokens=2)
        model.resize_token_embeddings(400, mean_resizing=False)
        ids = torch.tensor([[390, 1]])
        assert (
            wrapped.generate(ids, max_new_tokens=6).tolist() == theirs(model, input_ids=ids, max_new_tokens=6).tolist()
        )


def test_a_stop_string_that_is_a_special_token_stops() -> None:
    model = tiny_target()
    fourth = theirs(model, **one(), max_new_tokens=4)[0, -1]
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[EOS_ID] = head[fourth] * 1.001
    settings: dict[str, Any] = {"max_new_tokens": 9, "stop_strings": ["</s>"], "eos_token_id": None}
    wanted = theirs(model, **one(), **settings, tokenizer=byte_tokenizer())
    assert wanted.shape == (1, 16)
    with wrap(model, byte_tokenizer()) as wrapped:
        assert wrapped.generate(**one(), **settings).tolist() == wanted.tolist()


def test_a_failed_call_leaves_the_model_usable(wrapped: WrappedModel, target: Any) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        wrapped.generate(**one(), do_sample=True, temperature=-1.0)
    with pytest.raises(OutriderError):
        wrapped.generate(torch.tensor([[1, 5000]]), max_new_tokens=4)
    assert target.config._attn_implementation == "eager"
    assert theirs(target, **one(), max_new_tokens=4).shape == (1, 16)


def test_the_engine_is_kept_while_it_suffices(wrapped: WrappedModel) -> None:
    wrapped.generate(**padded(5, 6), max_new_tokens=4)
    engine = wrapped._engine
    wrapped.generate(**one(), max_new_tokens=9)
    assert wrapped._engine is engine
    wrapped.generate(**one(), max_new_tokens=300)
    assert wrapped._engine is not engine


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 4}, "num_beams=4 is not supported.*it|generate.*supports max_new_tokens"),
    "a dict of outputs": ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    "a streamer": ({"streamer": object()}, "streamer"),
    "banned ids": ({"bad_words_ids": [[3]]}, "bad_words_ids"),
    "nonsense": ({"max_tokns": 3}, "does not know 'max_tokns'; it supports max_new_tokens"),
    "greedy samples": ({"num_return_sequences": 2}, "num_return_sequences"),
    "two drafters": ({"assistant_model": object(), "prompt_lookup_num_tokens": 3}, "exclude"),
    "no room": ({"max_length": 12}, "max_length=12"),
    "stops that wait": ({"stop_strings": "a", "min_new_tokens": 5}, r"stop_strings with min_new_tokens .*\(5 new"),
    "a huge draft": ({"prompt_lookup_num_tokens": 100}, r"prompt_lookup_num_tokens must be .*\[1, 64\]"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_supported_is_refused_by_name(
    wrapped: WrappedModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        wrapped.generate(**one(), **settings)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "pass the prompts once"),
        ({"input_ids": [[1, 2]]}, "must be a tensor"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"\(1, 0\)"),
        ({"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.tensor([[1, 1, 0]])}, "pad on the left"),
        ({"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.tensor([[1, 1]])}, "attention_mask is"),
    ],
)
def test_wrong_inputs_are_refused(wrapped: WrappedModel, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        wrapped.generate(**inputs)


def test_the_function_stays_a_function_once_its_module_is_imported() -> None:
    import outrider
    import outrider.wrapping as module

    assert outrider.wrap is module.wrap
