"""Settings that make a draft cheaper: checked before anything is loaded, and the same by every way to give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.options import ModelOptions
from outrider.config import SpeculationConfig
from outrider.errors import CapacityError, ConfigError
from outrider.setup import check_draft_quantization, optimized, speculation_from

HERE = Path(__file__)
SETTINGS = {"draft_quantization": "int8", "draft_vocab_size": 16000, "draft_vocab_corpus": str(HERE)}


def speculation(given: dict[str, Any] | None, **more: Any) -> SpeculationConfig:
    return speculation_from(given, model="a/draft", method=None, num_speculative_tokens=5, **more)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_draft_model_takes_them(kind: str) -> None:
    config = SpeculationConfig("draft_model", "a/draft", draft_quantization=kind, draft_vocab_size=1)  # type: ignore[arg-type]
    assert (config.draft_quantization, config.draft_vocab_size, config.draft_vocab_corpus) == (kind, 1, None)


def test_single_settings_and_a_dict_mean_the_same() -> None:
    assert speculation(SETTINGS) == speculation(None, **SETTINGS) == speculation(SETTINGS, draft_vocab_size=3)
    assert speculation(SETTINGS).draft_vocab_corpus == HERE


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_draft_model_they_are_refused(setting: str, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}=.*method '{method}'.*speculative_model"):
        SpeculationConfig(method, **{setting: SETTINGS[setting]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_quantization": "int3"}, "draft_quantization must be one of 'fp8', 'int8', 'int4' or None, got 'int3'"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be an integer >= 1, got 0"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be an integer >= 1, got 'many'"),
        ({"draft_vocab_corpus": str(HERE)}, "pass draft_vocab_size too"),
        ({"draft_vocab_size": 9, "draft_vocab_corpus": "/no/such.txt"}, "/no/such.txt is not a file"),
        ({"draft_vocab_size": 9, "draft_vocab_corpus": 5}, "must be the path of a file, got 5"),
    ],
)
def test_a_wrong_value_is_named_with_the_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculation(settings)


def test_the_command_line_passes_them_on() -> None:
    options = ModelOptions(speculative_model="a/draft", **SETTINGS)  # type: ignore[arg-type]
    arguments = options.arguments()
    assert {name: arguments[name] for name in SETTINGS} == SETTINGS
    bare = ModelOptions().arguments()
    assert {bare[name] for name in SETTINGS} == {None}


def test_the_help_says_that_text_stays_the_same() -> None:
    from typer.testing import CliRunner

    from outrider.cli import app

    page = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    for option in ("--draft-quantization", "--draft-vocab-size", "--draft-vocab-corpus"):
        assert option in page
    assert page.count("never the text") == 2


def test_a_draft_quantisation_that_cannot_be_is_refused_before_the_draft_is_read() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match="'fp8' needs a GPU; on a CPU use 'int8' or 'int4'"):
        check_draft_quantization("fp8", "a/draft", cpu)
    with pytest.raises(ConfigError, match="pass its folder or Hub id"):
        check_draft_quantization("int8", torch.nn.Linear(2, 2), cpu)
    for kind, device in (("fp8", cuda), ("int8", cpu), ("int4", cuda), (None, cpu)):
        check_draft_quantization(kind, "a/draft", device)


def test_no_room_to_join_weights_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("outrider.model.fuse.optimize", run_out)
    loaded: Any = type("Loaded", (), {"name": "m", "dtype": torch.float32, "device": torch.device("cpu"), "model": 0})
    with pytest.raises(CapacityError, match="ran out of memory while m was loaded"):
        optimized(loaded(), "a/model", None)
