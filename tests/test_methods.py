"""Methods as users name them: alone, mixed, by request; wrong settings are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.config import SpeculationConfig
from outrider.errors import ConfigError, InvalidRequestError, ModelLoadError
from tests.scripted import greedy_params
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

PROMPTS = ["abcabcabc", "Hello", "The quick brown fox", "x"]


def llm_with(method: str, **settings: Any) -> LLM:
    draft = tiny_draft(tiny_target(), "noisy") if "draft_model" in method else None
    settings = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4} | settings
    return LLM(tiny_target(), draft, method=method, **settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ngram", {}),
        ("suffix", {}),
        ("suffix", {"tree": "auto", "num_speculative_tokens": 12}),
        ("early_exit", {"exit_layer": 1}),
        ("early_exit", {"skip_layers": (0,)}),
        ("early_exit", {}),
        ("ngram+draft_model", {}),
        ("ngram+draft_model", {"tree": "auto", "num_speculative_tokens": 12}),
        ("suffix+early_exit", {"exit_layer": 1}),
        ("draft_model", {"tree": "auto", "num_speculative_tokens": 12}),
        ("draft_model", {"tree": "3x2x1", "num_speculative_tokens": 15}),
        ("early_exit", {"exit_layer": 1, "tree": "auto", "num_speculative_tokens": 12}),
        ("suffix+ngram+draft_model", {"tree": "auto", "num_speculative_tokens": 20}),
    ],
    ids=str,
)
def test_a_method_named_drafts_and_changes_no_token(method: str, settings: dict[str, Any]) -> None:
    with llm_with(method, **settings) as llm:
        for one in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.3}):
            params = SamplingParams(max_tokens=50, ignore_eos=True, seed=4, **one)
            wanted = [output.token_ids for output in llm.generate(PROMPTS, params.but(speculation="off"))]
            for speculation in ("auto", 6):
                outputs = llm.generate(PROMPTS, params.but(speculation=speculation))
                assert [output.token_ids for output in outputs] == wanted
        assert llm.engine.figures.drafted > 0
        assert llm.engine.speculator.num_failures == 0


def test_a_prediction_that_is_right_makes_rounds_few() -> None:
    with llm_with("none") as llm:
        params = greedy_params(60)
        text = llm.generate("Hello", params)[0]
        for expected in (list(text.token_ids), text.token_ids):
            again = llm.generate("Hello", params.but(prediction=expected, speculation=10))[0]
            assert again.token_ids == text.token_ids
            assert again.stats.rounds < 10
        wrong = llm.generate("Hello", params.but(prediction="something else", speculation=10))[0]
        assert wrong.token_ids == text.token_ids


def test_requests_with_predictions_leave_nothing_behind() -> None:
    with llm_with("ngram") as llm:
        for _ in range(5):
            llm.generate("Hello", greedy_params(10, prediction="Hello there"))
        assert len(llm.engine.speculator._drafters) == 1


def test_predictions_of_several_samples_and_other_requests_stay_apart() -> None:
    with llm_with("ngram") as llm:
        params = [
            SamplingParams(max_tokens=30, ignore_eos=True, seed=3, n=2, temperature=1.0, prediction="abc" * 10),
            greedy_params(30),
            greedy_params(30, prediction="quick brown fox", speculation=5),
            greedy_params(30, "off"),
        ]
        plain = [one.but(prediction=None, speculation="off") for one in params]
        wanted = llm.generate(PROMPTS, plain)
        made = llm.generate(PROMPTS, params)
        for mine, theirs in zip(made, wanted, strict=True):
            assert [one.token_ids for one in mine.outputs] == [one.token_ids for one in theirs.outputs]


def test_outputs_are_shared_if_asked_and_only_within_a_scope() -> None:
    with llm_with("suffix", suffix_sharing=True, num_speculative_tokens=8) as llm:
        params = greedy_params(40, speculation=8)
        first = llm.generate("Hello", params)[0]
        again = llm.generate("Hello", params)[0]
        assert again.token_ids == first.token_ids
        assert again.stats.rounds < first.stats.rounds
        other = llm.intake.sequences(llm.intake.request("Hello", params, scope="somebody"))[0]
        llm.engine.add(other)
        while llm.engine.busy:
            llm.engine.step()
        assert other.stats.rounds == first.stats.rounds


def test_a_corpus_is_a_source_of_guesses(tmp_path: Path) -> None:
    with llm_with("none") as llm:
        text = llm.generate("Hello", greedy_params(60))[0].text
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Hello" + text, encoding="utf-8")
    with llm_with("suffix", suffix_corpus=corpus, num_speculative_tokens=8) as llm:
        assert llm.generate("Hello", greedy_params(60, speculation=8))[0].stats.accepted > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method must be one of"),
        ({"method": "ngram+none"}, "mixes drafting with none"),
        ({"method": "draft_model+eagle", "model": "x"}, "two draft models"),
        ({"method": "eagle"}, "needs a draft"),
        ({"method": "suffix", "model": "x"}, "takes no draft model"),
        ({"method": "ngram", "exit_layer": 3}, "exit_layer=3 is for method 'early_exit'"),
        ({"method": "ngram", "suffix_corpus": "x"}, "suffix_corpus='x' is for method 'suffix'"),
        ({"method": "suffix", "suffix_corpus": "/nowhere"}, "is not a file"),
        ({"method": "early_exit", "exit_layer": 2, "skip_layers": "auto"}, "pass one of them"),
        ({"method": "early_exit", "skip_layers": "one"}, "skip_layers must be"),
        ({"method": "early_exit", "exit_layer": 0}, "exit_layer must be"),
        ({"method": "ngram", "tree": "4x"}, "tree must be"),
        ({"method": "ngram", "tree": "auto", "num_speculative_tokens": 64}, "at most 63"),
        ({"method": "ngram+suffix", "tree": "2x2"}, "tree='auto'"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**settings)


def test_methods_have_other_names_too() -> None:
    assert SpeculationConfig(method="eagle3", model="x").method == "eagle"
    assert SpeculationConfig(method="prompt_lookup+eagle2", model="x").method == "ngram+eagle"
    assert SpeculationConfig(method="early_exit", skip_layers="5,3").skip_layers == (3, 5)


@pytest.mark.parametrize("wrong", [{"prediction": [-1]}, {"prediction": 7}])
def test_a_prediction_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="prediction"):
        SamplingParams(**wrong)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="no setting 'trees'"):
        LLM("nowhere", trees="auto")


@pytest.mark.parametrize("method", [None, "draft_model", "eagle", "ngram+draft_model"])
def test_a_draft_that_is_not_there_is_told_before_the_target_is_loaded(
    method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.llm.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ModelLoadError, match=r"no model at \./nowhere/draft"):
        LLM("a/model", "./nowhere/draft", method=method)


def test_an_identical_drafts_tree_always_holds_the_targets_path() -> None:
    """Acceptance 1.0 to the tree's depth, for 300 tokens; sampled, too, since draft and target share their noise."""
    draft = tiny_draft(tiny_target(), "same")
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    with LLM(tiny_target(), draft, tree="2x2x1", num_speculative_tokens=10, **common) as llm:
        for params in (greedy_params(300), SamplingParams(max_tokens=300, temperature=1.0, seed=5, ignore_eos=True)):
            output = llm.generate("Hello", params.but(speculation=10))[0]
            assert output.token_ids == llm.generate("Hello", params.but(speculation="off"))[0].token_ids
            assert output.stats.rounds <= 76
            assert output.stats.acceptance_by_position == (1.0, 1.0, 1.0)
