"""`outrider tune` on tiny models, and the file that it writes."""

from __future__ import annotations

import json
import shlex
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, ConfigError
from outrider.cli import app
from outrider.cli.options import ModelOptions
from outrider.config_file import config_keys, merged, read_config, written_config
from outrider.tune.equivalents import equivalents
from outrider.tune.prediction import Calibration, Variant, candidates
from outrider.tune.search import Search, Wish
from outrider.tune.state import State
from outrider.tune.verdict import config_text, verdict_of
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, draft/ and two prompts."""
    here = tmp_path_factory.mktemp("tune")
    save(tiny_target(), byte_tokenizer(), here / "target")
    save(tiny_draft(tiny_target(), "noisy"), byte_tokenizer(), here / "draft")
    (here / "prompts.jsonl").write_text('{"prompt": "one two one two"}\n{"prompt": "abc abc"}\n', encoding="utf-8")
    return here


def tune(folder: Path, output: Path, *arguments: str, code: int = 0) -> Result:
    common = ["--dataset", str(folder / "prompts.jsonl"), "-n", "6", "--repeats", "1", "-o", str(output)]
    result = CliRunner().invoke(app, ["tune", str(folder / "target"), *common, *arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def found(folder: Path) -> tuple[Path, Result]:
    """A search over two methods."""
    output = folder / "outrider.toml"
    return output, tune(
        folder, output, "--methods", "ngram,draft_model", "-md", str(folder / "draft"),
        "--num-speculative-tokens", "2,3", "--concurrency", "1,2",
    )  # fmt: skip


# --- the whole command


def test_what_is_written_loads_everywhere(found: tuple[Path, Result], folder: Path) -> None:
    output, told = found
    settings = tomllib.loads(output.read_text(encoding="utf-8"))
    assert settings["model"] == str((folder / "target").resolve())
    with LLM.from_config(output) as llm:
        assert llm.engine.speculation.method == settings["method"]
        assert llm.loaded.name == "target"
    said = CliRunner().invoke(app, ["generate", "--config", str(output), "-n", "4", "--raw", "--json", "abc"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["settings"]["method"] == settings["method"]
    assert "vLLM" in told.stdout
    assert "predictions were off by" in told.stdout


def test_predictions_are_held_against_measurements(found: tuple[Path, Result]) -> None:
    state = json.loads(found[0].with_suffix(".tune.json").read_text(encoding="utf-8"))
    assert set(state["calibrations"]) == {"ngram", "draft_model"}
    assert state["measured"]
    for told in state["measured"].values():
        assert set(told["auto"]) == set(told["fixed"]) == set(told["predicted"]) == {"1", "2"}
        for at, error in told["error"].items():
            assert error == pytest.approx(told["predicted"][at] / told["fixed"][at]["median"] - 1)


def test_a_search_goes_on_where_it_was(found: tuple[Path, Result], folder: Path) -> None:
    output, _ = found
    arguments = ("--methods", "ngram,draft_model", "-md", str(folder / "draft"), "--num-speculative-tokens", "2,3",
                 "--concurrency", "1,2")  # fmt: skip
    again = tune(folder, output, *arguments)
    assert "going on where an earlier search was" in again.stderr
    assert "loading" not in again.stderr
    other = folder / "other.toml"
    other.with_suffix(".tune.json").write_text(output.with_suffix(".tune.json").read_text(encoding="utf-8"))
    anew = tune(
        folder, other, "--methods", "ngram", "--num-speculative-tokens", "2"
    )  # another search: nothing is known
    assert "going on" not in anew.stderr
    assert "loading ngram" in anew.stderr


def test_the_budget_ends_the_search(folder: Path, tmp_path: Path) -> None:
    done = tune(folder, tmp_path / "x.toml", "--methods", "ngram", "--budget", "0.0000001", code=1)
    assert "nothing could be calibrated" in done.stdout
    assert not (tmp_path / "x.toml").exists()


def test_a_method_that_fails_is_named(folder: Path, tmp_path: Path) -> None:
    done = tune(folder, tmp_path / "x.toml", "--methods", "ngram,mtp", "--num-speculative-tokens", "2")
    assert "mtp failed: " in done.stdout
    assert (tmp_path / "x.toml").exists()


def test_ctrl_c_keeps_what_was_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Search._measure

    def interrupted(self: Search, candidate: Any) -> None:
        if self.state.measured:
            raise KeyboardInterrupt
        whole(self, candidate)

    monkeypatch.setattr(Search, "_measure", interrupted)
    tune(folder, tmp_path / "x.toml", "--methods", "ngram,suffix", "--num-speculative-tokens", "2", code=130)
    assert len(json.loads((tmp_path / "x.tune.json").read_text(encoding="utf-8"))["measured"]) == 1
    assert (tmp_path / "x.toml").exists()


def test_ctrl_c_before_anything_was_found_is_an_interruption_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_calibrate", interrupted)
    tune(folder, tmp_path / "x.toml", "--methods", "ngram", code=130)
    assert not (tmp_path / "x.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget"),
        (["--methods", "none"], "nothing that drafts"),
        (["--methods", "telepathy"], "method must be one of"),
        (["--methods", "eagle"], "needs a draft"),
        (["--num-speculative-tokens", "0"], "in [1, 64]"),
        (["-o", "/no/such/folder/x.toml"], "--output"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_input_is_told_before_any_model(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", "/no/such/model", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "loading" not in result.stderr


# --- the cost model


def calibration(gains: tuple[float, ...], slowdown: float) -> Calibration:
    return Calibration(len(gains), gains, {1: 1.0, 8: 1.0}, {1: slowdown, 8: 4 * slowdown})


def test_the_cost_model_is_the_papers() -> None:
    """E(k) = 1 + a + ... + a^k (2211.17192), over a round that grows from 1 to `slowdown`."""
    half = calibration((0.5, 0.25, 0.125, 0.0625), 1.4)
    assert half.speedup(4, 1) == pytest.approx(1.9375 / 1.4)
    assert half.speedup(2, 1) == pytest.approx(1.75 / 1.2)
    ranked = candidates({Variant("ngram"): half}, (1, 2, 4), (1,))
    assert [one.length for one in ranked] == [2, 4, 1]
    assert Calibration.of_record(json.loads(json.dumps(half.record()))) == half


def test_nothing_is_taken_where_nothing_gains(tmp_path: Path) -> None:
    wish = Wish((Variant("ngram"),), (2, 4), (1, 8))
    state = State(tmp_path / "s.json", "k", calibrations={"ngram": calibration((0.1, 0.0, 0.0, 0.0), 2).record()})
    search = Search(wish, {"model": "m"}, [], state)
    assert verdict_of(search) is None
    slow = {"median": 0.7, "min": 0.6, "max": 0.8}
    state.measured["ngram 2"] = {"promise": 0.7, "auto": {"1": slow, "8": slow}, "error": {}}
    verdict = verdict_of(search)
    assert verdict is not None
    assert not verdict.worth
    assert "not worth it" in verdict.reason
    text = config_text(verdict, {"model": "m", "speculative_model": "d"}, ["a note"])
    assert tomllib.loads(text) == {"model": "m", "method": "none"}


def test_the_shortest_of_equals_is_taken_and_losses_are_told(tmp_path: Path) -> None:
    wish = Wish((Variant("ngram+draft_model"),), (2, 4), (1, 8))
    record = calibration((0.9, 0.8, 0.7, 0.6), 1.2).record()
    state = State(tmp_path / "s.json", "k", calibrations={"ngram+draft_model": record})
    fast, slow = {"median": 2.0, "min": 1.9, "max": 2.1}, {"median": 0.9, "min": 0.8, "max": 1.0}
    for length, promise in ((2, 1.40), (4, 1.41)):
        state.measured[f"ngram+draft_model {length}"] = {
            "promise": promise,
            "auto": {"1": fast, "8": slow},
            "error": {},
        }
    verdict = verdict_of(Search(wish, {}, [], state))
    assert verdict is not None
    assert verdict.length == 2
    assert "slower at 8 at a time" in verdict.reason
    base = {"speculative_model": "d", "draft_quantization": "int8", "cross_vocabulary": "off", "prompt_lookup_max": 6,
            "prompt_lookup_min": 1, "suffix_corpus": None, "dtype": "auto", "exact": False}  # fmt: skip
    assert tomllib.loads(config_text(verdict, base, [])) == {
        "method": "ngram+draft_model",
        "num_speculative_tokens": 2,
        "speculative_model": "d",
        "draft_quantization": "int8",
        "prompt_lookup_max": 6,
    }


def test_a_spoilt_state_is_named(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="--fresh"):
        State.opened(file, "k", fresh=False)
    assert not State.opened(file, "k", fresh=True).begun


# --- the file


def test_files_hold_whatever_llm_takes(tmp_path: Path) -> None:
    values = {"model": 'a "b"\\c\né', "exact": True, "skip_layers": (3, 5), "gpu_memory_utilization": 0.5, "seed": None}
    file = tmp_path / "x.toml"
    file.write_text(written_config(values, ["a comment"]), encoding="utf-8")
    found = read_config(file, config_keys(LLM.__init__))
    assert found == {"model": 'a "b"\\c\né', "exact": True, "skip_layers": [3, 5], "gpu_memory_utilization": 0.5}
    with pytest.raises(ConfigError, match="tokenizer"):
        written_config({"tokenizer": object()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metod = 'ngram'", "'metod'"),
        ("method = ", "not TOML"),
        ("tokenizer = 'x'", "'tokenizer'"),
        (None, "cannot be read"),
    ],
)
def test_bad_files_are_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        LLM.from_config(file)
    result = CliRunner().invoke(app, ["generate", "--config", str(file), "x"])
    assert result.exit_code == 2
    assert "x.toml" in result.stderr


def test_explicit_settings_win() -> None:
    found = {"model": "m", "method": "ngram", "num_speculative_tokens": 3, "dtype": "float32", "prompt_lookup_max": 4}
    assert merged(found, {"dtype": "bfloat16"}) == found | {"dtype": "bfloat16"}
    assert merged(found, {"method": "suffix"}) == {"model": "m", "dtype": "float32", "method": "suffix"}
    assert merged(found, {"num_speculative_tokens": 7})["method"] == "ngram"


def test_options_win_even_where_they_are_the_defaults(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f'model = "{folder / "target"}"\nmethod = "suffix"\ndtype = "bfloat16"\n', encoding="utf-8")
    plain = ModelOptions(config=file).arguments()
    assert (plain["method"], plain["dtype"], plain["model"]) == ("suffix", "bfloat16", str(folder / "target"))
    said = CliRunner().invoke(
        app, ["generate", "--config", str(file), "--dtype", "auto", "--raw", "-n", "2", "--json", "abc"]
    )
    assert said.exit_code == 0, said.output
    settings = json.loads(said.stdout)["settings"]
    assert (settings["dtype"], settings["method"]) == ("float32", "suffix")


def test_a_file_that_was_not_asked_for_is_told_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outrider.toml").write_text("method = 'none'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = ["generate", "-m", str(folder / "target"), "--raw", "-n", "2", "--json", "abc"]
    said = CliRunner().invoke(app, command)
    assert "outrider.toml here is not used; --config outrider.toml loads it" in said.stderr
    assert json.loads(said.stdout)["settings"]["method"] == "ngram"
    assert "outrider.toml" not in CliRunner().invoke(app, [*command, "--quiet"]).stderr


# --- other engines


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "mtp", "dflash", "suffix", "medusa"])
def test_vllms_json_is_read_here_too(method: str) -> None:
    """vLLM's spelling is one that our own --speculative-config understands."""
    from outrider.setup import speculation_from

    flags = shlex.split(equivalents(Variant(method), 4, "a folder/head")["vLLM"])
    assert flags[0] == "--speculative-config"
    config = json.loads(flags[1])
    made = speculation_from(config, model=None, method=None, num_speculative_tokens=1, verification="coupled")
    assert (made.method, made.num_speculative_tokens) == (method, 4)


def test_what_others_lack_is_said() -> None:
    assert equivalents(Variant("early_exit"), 4, None) == {
        "vLLM": "no equivalent of early_exit",
        "SGLang": "no equivalent of early_exit",
        "llama.cpp": "no equivalent of early_exit",
    }
    mixed = equivalents(Variant("ngram+draft_model"), 4, "d.gguf")
    assert mixed["vLLM"].startswith("no equivalent")
    assert "--spec-type ngram-simple,draft-simple" in mixed["llama.cpp"]
    assert "--spec-draft-model d.gguf --spec-draft-n-max 4" in mixed["llama.cpp"]
    tree = equivalents(Variant("eagle", "auto"), 12, "h")
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 12" in tree["SGLang"]
    assert tree["vLLM"].startswith("no equivalent")
    chain = equivalents(Variant("draft_model"), 4, "d")["SGLang"]
    assert "STANDALONE" in chain
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in chain
