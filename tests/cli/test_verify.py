"""`outrider verify` on tiny models: what is proven, what is found, what is told apart, what is refused."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, ConfigError
from outrider.cli import app
from outrider.engine import round as round_module
from outrider.proof.record import _digest, read_record
from outrider.sampling import choose as choose_module
from outrider.verify import rejection as rejection_module
from tests.proof.defects import accepts_the_first_guess, accepts_whatever_comes, residual_backwards
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

SMALL = ("--num-prompts", "3", "-n", "24", "--max-num-seqs", "8", "--max-model-len", "400", "--device", "cpu")
DRAWN = ("--num-prompts", "2", "-n", "3", "--temperature", "2", "--num-speculative-tokens", "2", "--samples", "120",
         "--max-num-seqs", "32", "--max-model-len", "400", "--device", "cpu")  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target = tiny_target()
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    for folder, model in zip(folders, (target, tiny_draft(target, "noisy")), strict=True):
        save(model, byte_tokenizer(), folder)
    return str(folders[0]), str(folders[1])


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft whose guesses are far from what the target would say."""
    draft = tiny_draft(tiny_target(), "unrelated")
    return str(save(draft, byte_tokenizer(), tmp_path_factory.mktemp("stranger")))


@pytest.fixture(scope="module", autouse=True)
def quick_start() -> Any:
    """Lengths are fixed here, so no controller needs measured costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.speculator.Speculator.prepare", lambda *_: None)
        yield


def verify(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def found(*arguments: str, code: int = 0) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(verify(*arguments, "--json", code=code).stdout)
    return said


def refusal(*arguments: str) -> str:
    lines = [line for line in verify(*arguments, code=2).stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


# --- tokens


def test_a_true_pair_is_proven(pair: tuple[str, str]) -> None:
    target, draft = pair
    result = verify(target, "-md", draft, *SMALL, "--temperature", "0,0.8,0.8", "--top-p", "0.9")
    lines = [line.split() for line in result.stdout.splitlines() if "temperature" in line]
    assert [line[:2] for line in lines] == [["temperature", "0,"], ["temperature", "0.8,"]]
    assert all(line[-8:-3] == ["3", "3", "0", "0", "0"] for line in lines), result.stdout
    assert "proven as far as tested: 6 texts, 0 near-ties, no defect" in result.stderr
    assert "nothing is granted to rounding" in result.stderr


def test_lookup_and_prompts_of_ones_own(pair: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc abc abc abc"}\n{"messages": [{"role": "user", "content": "one one one one"}]}\n')
    said = found(pair[0], "--prompts", str(file), "-n", "24", "--exact", "--max-num-seqs", "2", "--seed", "5")
    assert said["verdict"] == "proven as far as tested"
    assert [cell["texts"] for cell in said["cells"]] == [2, 2]
    assert all(cell["drafted"] and not cell["partings"] for cell in said["cells"])


def test_a_model_without_a_tokenizer_gets_ids(tmp_path: Path) -> None:
    folder = str(save(tiny_target(), None, tmp_path / "target"))
    said = found(folder, *SMALL, "--temperature", "0", "--method", "early_exit", "--exit-layer", "1")
    assert said["cells"][0]["texts"] == 3
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("one two three")
    assert "has no tokenizer for --prompts" in refusal(folder, "--prompts", str(prompt))


def test_a_wrong_guess_that_passes_is_a_defect(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "verify_coupled", accepts_the_first_guess)
    target, draft = pair
    result = verify(target, "-md", draft, *SMALL, "--temperature", "0", code=1)
    assert "NOT PROVEN" in result.stderr
    shown = [line for line in result.stdout.splitlines() if ": token " in line]
    assert shown
    assert all("top-2 gap" in line and line.endswith(": defect") for line in shown)
    assert shown[0].startswith("temperature 0, prompt 1: token ")


@pytest.mark.parametrize("exact", [False, True])
def test_a_wrong_guess_is_a_defect_in_bf16_too(
    pair: tuple[str, str], stranger: str, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    monkeypatch.setattr(round_module, "verify_coupled", accepts_the_first_guess)
    more = ("--exact",) if exact else ()
    said = found(pair[0], "-md", stranger, *SMALL, "--temperature", "0", "--dtype", "bfloat16", *more, code=1)
    assert said["verdict"] == "defect"
    assert (said["noise"] is None) == exact
    [cell] = said["cells"]
    assert cell["defects"]
    assert all(one["gap"] > (said["near"] or 0) for one in cell["partings"] if one["verdict"] == "defect")


def near_tie_once(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take the second likeliest where a pass has several positions and the two are within bf16's rounding."""

    def choose(logits: torch.Tensor, *more: Any) -> torch.Tensor:
        chosen = real(logits, *more)
        if logits.shape[1] == 1:
            return chosen
        best = logits.topk(2, -1)
        near = best.values[..., 0] - best.values[..., 1] < 0.3
        return torch.where(near, best.indices[..., 1], chosen)

    return choose


def test_a_near_tie_is_told_apart(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same flip is a near-tie in bf16, and a defect where nothing is granted to rounding."""
    monkeypatch.setattr(round_module, "choose", near_tie_once(choose_module.choose))
    target, draft = pair
    arguments = (target, "-md", draft, *SMALL, "--temperature", "0", "--num-prompts", "6")
    said = found(*arguments, "--dtype", "bfloat16")
    [cell] = said["cells"]
    assert cell["partings"]
    assert {one["verdict"] for one in cell["partings"]} == {"near-tie"}
    assert all(one["gap"] <= said["near"] == said["noise"]["max"] for one in cell["partings"])
    strict = found(*arguments, "--dtype", "float32", code=1)
    assert {one["verdict"] for one in strict["cells"][0]["partings"]} == {"defect"}


# --- distributions


def test_draws_follow_the_targets_distribution(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    path = str(tmp_path / "draws.json")
    said = found(target, "-md", draft, *DRAWN, "--verification", "rejection", "--record", path)
    [cell] = said["cells"]
    assert (cell["compared"], cell["texts"], len(cell["tests"])) == ("distributions", 120, 3)
    assert all(one["outcome"]["smallest"] < 0.4 and not one["failed"] for one in cell["tests"])
    again = found("--replay", path)
    assert again["verdict"] == "proven as far as tested"
    assert [(one["run"], one["texts"], one["partings"]) for one in again["replayed"]] == [
        ("plain", 0, []), ("speculative", 120, []),
    ]  # fmt: skip


def test_block_verification_follows_it_too_and_rounds(pair: tuple[str, str]) -> None:
    target, draft = pair
    said = found(target, "-md", draft, *DRAWN, "--verification", "block", "--dtype", "bfloat16")
    outcomes = [one["outcome"] for one in said["cells"][0]["tests"]]
    assert all(one["rounding"] > 0 for one in outcomes)
    assert said["noise"]["max"] > 0


@pytest.mark.parametrize(
    ("verification", "name", "fault"),
    [
        ("rejection", "accept_probability", accepts_whatever_comes),
        ("rejection", "residual", residual_backwards),
        ("block", "residual", residual_backwards),
    ],
)
def test_a_biased_verifier_is_found(
    pair: tuple[str, str], stranger: str, monkeypatch: pytest.MonkeyPatch, verification: str, name: str, fault: Any
) -> None:
    monkeypatch.setattr(rejection_module, name, fault)
    result = verify(pair[0], "-md", stranger, *DRAWN, "--verification", verification, code=1)
    assert "NOT PROVEN" in result.stderr
    assert "defect" in result.stdout
    assert "TV 0." in result.stdout


def test_greedy_texts_are_compared_token_by_token_under_rejection(pair: tuple[str, str]) -> None:
    target, draft = pair
    said = found(target, "-md", draft, *SMALL, "--temperature", "0", "--verification", "rejection")
    assert [cell["compared"] for cell in said["cells"]] == ["tokens"]


# --- records


@pytest.fixture(scope="module")
def record(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "proof.json"
    target, draft = pair
    verify(target, "-md", draft, *SMALL, "--record", str(path), "-q")
    return path


def changed(record: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = True) -> str:
    """A copy of a record that somebody changed; with a digest that fits it, unless not sealed."""
    content = json.loads(record.read_text())
    change(content)
    if seal:
        content["digest"] = _digest(content)
    path = record.with_name("changed.json")
    path.write_text(json.dumps(content))
    return str(path)


def test_a_record_holds_what_it_takes(record: Path, pair: tuple[str, str]) -> None:
    content = json.loads(record.read_text())
    assert set(content["weights"]) == {"target", "draft"}
    assert set(content["weights"]["target"]) == {"model.safetensors", "config.json"}
    assert set(content["machine"]) >= {"outrider", "torch", "transformers", "device", "dtype", "threads"}
    assert content["load"]["model"] == pair[0]
    assert content["load"]["dtype"] == "float32"
    assert len(content["prompts"]) == 3
    assert all(len(run) == 3 for texts in content["texts"] for run in texts.values())
    assert content["found"]["verdict"] == "proven as far as tested"
    assert [path.name for path in record.parent.iterdir() if path.suffix == ".part"] == []


def test_a_record_is_confirmed(record: Path) -> None:
    result = verify("--replay", str(record))
    assert "the record is confirmed" in result.stderr
    assert "note: " not in result.stderr


def test_tampered_tokens_do_not_pass(record: Path) -> None:
    def tamper(content: dict[str, Any]) -> None:
        ids = content["texts"][0]["speculative"][1]["token_ids"]
        ids[5] = (ids[5] + 1) % 256

    assert "digest is not that of its content" in refusal("--replay", changed(record, tamper, seal=False))
    result = verify("--replay", changed(record, tamper), code=1)
    assert "1 of them against the record" in result.stderr
    assert "speculative text against the record, prompt 2: token 5: recorded" in result.stdout


def test_weights_may_move_but_not_change(record: Path, pair: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(tiny_target(seed=9), byte_tokenizer(), other)
    message = refusal("--replay", str(record), "-m", str(other))
    assert "the target's file model.safetensors is another one" in message
    moved = tmp_path / "moved"
    shutil.copytree(pair[0], moved)
    elsewhere = changed(record, lambda content: content["machine"].update(torch="1.0"))
    result = verify("--replay", elsewhere, "-m", str(moved))
    assert "note: torch 1.0 (recorded) and " in result.stderr
    assert "the record is confirmed" in result.stderr
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    assert "the target's file config.json is another one" in refusal("--replay", str(record), "-m", str(moved))


def set_at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at("format", value="other"), "'format'"),
        (set_at("version", value=2), "'version'"),
        (set_at("plan", "max_tokens", value=0), "'max_tokens'"),
        (set_at("plan", "max_tokens", value=True), "'max_tokens'"),
        (set_at("plan", "guesses", value="5"), "'guesses'"),
        (set_at("plan", "settings", value=[]), "'settings'"),
        (set_at("plan", "settings", 0, value={"n": 4}), "'settings'"),
        (set_at("plan", "settings", 0, value={"temperature": -1}), "temperature"),
        (set_at("plan", "seed", value=2**70), "seed"),
        (set_at("prompts", value=[[]]), "'prompts'"),
        (set_at("prompts", 0, value=[1, "2"]), "'prompts'"),
        (set_at("prompts", 0, value=[1, -2]), "'prompts'"),
        (set_at("texts", value={}), "'texts'"),
        (set_at("texts", 0, "plain", value=[]), "'plain'"),
        (set_at("texts", 0, "plain", 0, "token_ids", value=None), "'token_ids'"),
        (set_at("texts", 0, "plain", 0, value=3), "an object is expected"),
        (set_at("weights", value={}), "'target'"),
        (set_at("weights", "target", "model.safetensors", value=7), "an object is expected"),
        (set_at("machine", "threads", value="2"), "'threads'"),
        (set_at("load", "model", value={"a": 1}), "'model'"),
        (set_at("load", "verification", value="rejection"), "by the record's own settings"),
        (set_at("load", "unheard_of", value=1), "unheard_of"),
        (set_at("load", "max_model_len", value="long"), "'long' for max_model_len"),
        (set_at("load", "exact", value="yes"), "'yes' for exact"),
        (set_at("load", "speculative_config", value="x"), "'x' for speculative_config"),
        (set_at("load", "max_num_seqs", value=True), "True for max_num_seqs"),
        (set_at("load", "num_speculative_tokens", value=100), "num_speculative_tokens must be"),
        (set_at("load", "verification", value="typical"), "lossy by design"),
        (set_at("found", value=None), "an object is expected"),
    ],
)
def test_damaged_records_are_refused_by_name(
    record: Path, change: Callable[[dict[str, Any]], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in refusal("--replay", changed(record, change))


def test_whatever_is_changed_in_a_record_is_read_or_refused(record: Path) -> None:
    """Never another error: 300 copies with one value each replaced or taken away."""
    values: list[Any] = [None, True, 0, -1, 2**70, 1.5, "", "x", [], {}, [[]], [{}], {"a": 1}, [1, "2"]]
    content, luck, refused = json.loads(record.read_text()), random.Random(7), 0
    places = [place for place in paths_in(content) if place]
    for _ in range(300):
        *way, last = luck.choice(places)

        def change(copied: dict[str, Any], way: list[Any] = way, last: Any = last) -> None:
            place = functools.reduce(lambda inside, key: inside[key], way, copied)
            if isinstance(place, dict) and luck.random() < 0.2:
                del place[last]
            else:
                place[last] = luck.choice(values)

        try:
            read_record(Path(changed(record, change)))
        except ConfigError:
            refused += 1
    assert refused > 100


def paths_in(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record; of a list the first three."""
    yield before
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, one in inside:
        yield from paths_in(one, (*before, key))


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"format": 1}', "\ufeff{}"])
def test_what_is_no_record_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert "is no proof record" in refusal("--replay", str(path))
    assert "cannot be read" in refusal("--replay", str(tmp_path / "missing.json"))


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--verification", "typical"), "lossy by design"),
        (("--speculative-config", '{"verification": "typical"}'), "lossy by design"),
        (("--temperature", "0,warm"), "--temperature must be numbers"),
        (("--temperature", "-1"), "temperature must be in"),
        (("--top-p", "2"), "top_p must be in"),
        (("--quantization", "int8"), "add --exact"),
        (("--record", "/nowhere/at/all.json"), "--record /nowhere/at/all.json cannot be written"),
        (("--model", "other"), "the model is given twice"),
        (("--prompts", "/nowhere.jsonl"), "cannot be read"),
        (("--method", "none"), "nothing to verify without guesses"),
        (("--num-prompts", "999"), "the number of prompts must be in"),
        (("--max-tokens", "100000"), "leaves no room for a prompt"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(pair: tuple[str, str], arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(pair[0], *arguments)


def test_nothing_guessed_is_nothing_shown(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = LLM.generate

    def plainly(llm: LLM, prompts: Any, params: Any, **more: Any) -> Any:
        return real(llm, prompts, [one.but(speculation="off") for one in params], **more)

    monkeypatch.setattr(LLM, "generate", plainly)
    assert "nothing was guessed, so nothing is shown" in refusal(pair[0], *SMALL)
