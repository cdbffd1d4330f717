"""`outrider doctor`: every fault that it knows is planted once and named, and a healthy pair has none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.advice import doctor, evidence
from outrider.advice.doctor import Diagnosis, diagnose
from outrider.advice.evidence import Agreement, Evidence, Timings, examine, usable_cores
from outrider.advice.findings import Finding, Severity, by_harm
from outrider.advice.run_checks import RUN_CHECKS, check_run
from outrider.bench.heads import write_medusa
from outrider.bench.shapes import parse_shape
from outrider.cli import app
from outrider.errors import ConfigError, ModelLoadError
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams
from tests.eagle_heads import FORMATS, HIDDEN, TinyHead, right_third, tiny_head
from tests.heads import cycle_target
from tests.tiny import byte_tokenizer, save, tiny_absolute, tiny_target

TOKENS = 28
LONG = 12  # guesses a round: for a draft that is always right, fewer would be a fault
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 4 << 20, "max_num_seqs": 3}


def steady(*, draft: float | None = 0.1, wide: float = 0.02, host: float = 1.1, rows: int = 3) -> Timings:
    """Costs of a sound pair: a target's pass is 1, a guess `draft`, each more token of a pass `wide`."""
    rounds = {
        (count, length): 1 + wide * (count * (length + 1) - 1) + length * (draft or 0.0)
        for count in (1, rows)
        for length in range(13)
    }
    return Timings(rounds, 1.0, draft, rounds[rows, 5] * host, rounds[rows, 5], 1.0, 1.5, 0.05)


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests judge names, not the time that shared cores take: costs are those of a sound pair."""
    monkeypatch.setattr(evidence, "_timed", lambda *_: steady())
    monkeypatch.setattr(evidence, "usable_cores", torch.get_num_threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_target(num_hidden_layers=6), byte_tokenizer(), tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose layers add nothing, so that a draft of one layer says the same."""
    place = tmp_path_factory.mktemp("pair")
    target = save(cycle_target(num_hidden_layers=6, tie_word_embeddings=False), byte_tokenizer(), place / "target")
    return target, save(cycle_target(num_hidden_layers=1), byte_tokenizer(), place / "draft")


def codes(found: Diagnosis) -> set[str]:
    return {one.code for one in found.findings}


def files_of(target: Path, draft: Path, **settings: Any) -> Diagnosis:
    settings = {"num_speculative_tokens": 5, **SMALL, **settings}
    return diagnose({"model": str(target), "speculative_model": str(draft), **settings}, measure=False)


def run_of(
    target: Path, draft: Path | None, *, temperature: float = 0.0, tokens: int = TOKENS, **settings: Any
) -> Diagnosis:
    given = {"model": str(target), "num_speculative_tokens": 5, **SMALL, **settings}
    if draft is not None:
        given["speculative_model"] = str(draft)
    return diagnose(given, lambda _: [[1, 2, 3], [7, 8], [65, 66]], max_tokens=tokens, temperature=temperature)


def edited(folder: Path, place: Path, **files: Any) -> Path:
    """A copy of a checkpoint with changed JSON files; `tokenizer_config={...}` adds to that file's object."""
    copy = Path(shutil.copytree(folder, place))
    for name, change in files.items():
        path = copy / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return copy


# --- health


def test_a_healthy_pair_has_nothing_and_the_numbers_show_it(pair: tuple[Path, Path]) -> None:
    found = run_of(*pair, num_speculative_tokens=LONG)
    assert found.findings == ()
    assert found.healthy
    assert found.evidence is not None
    assert found.evidence.agreement.drafted > 60
    assert found.evidence.agreement.by_position == pytest.approx([1.0] * LONG)
    assert found.evidence.agreement.tokens(5) == pytest.approx(6)


def test_a_healthy_head_has_nothing(tmp_path: Path) -> None:
    model = cycle_target(num_hidden_layers=6)
    head = FORMATS["eagle3"](tmp_path / "head", right_third(model))
    target = save(model, byte_tokenizer(), tmp_path / "target")
    found = run_of(target, head, method="eagle", num_speculative_tokens=LONG)
    assert found.findings == ()
    assert found.evidence is not None
    assert found.evidence.variants == {}  # nothing was tried on a head that agrees


def test_sampling_with_a_good_draft_is_no_fault_and_neither_is_one_in_int8(pair: tuple[Path, Path]) -> None:
    found = run_of(*pair, temperature=0.8, num_speculative_tokens=LONG, draft_quantization="int8")
    assert found.healthy
    assert found.evidence is not None
    assert found.evidence.greedy is not None
    assert found.evidence.unquantised is not None


# --- faults that files show


def test_another_vocabulary_is_named_and_nothing_is_loaded(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = json.loads((pair[1] / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    names = list(vocab)
    vocab[names[10]], vocab[names[11]] = vocab[names[11]], vocab[names[10]]
    other = edited(pair[1], tmp_path / "draft", tokenizer=tokens)
    found = run_of(pair[0], other)
    assert found.findings[0].code == "vocabulary_mismatch"
    assert found.findings[0].severity is Severity.SEVERE
    assert found.findings[0].evidence["clashing_ids"] == 2
    assert found.evidence is None
    assert "not measured" in found.notes[0]
    crossing = files_of(pair[0], other, cross_vocabulary="auto").findings[0]
    assert (crossing.code, crossing.severity) == ("vocabulary_mismatch", Severity.MODERATE)


def test_other_special_tokens_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = edited(pair[1], tmp_path / "draft", tokenizer_config={"bos_token": "<unk>", "eos_token": "<pad>"})
    found = next(one for one in files_of(pair[0], other).findings if one.code == "special_tokens")
    assert found.evidence["eos"] == "target 258, draft 256"
    assert found.harmful


def test_an_added_token_that_the_draft_lacks_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = byte_tokenizer()
    tokens.add_tokens(["<|turn|>"], special_tokens=True)
    tokens.chat_template = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    tokens.save_pretrained(target)
    found = next(one for one in files_of(target, pair[1]).findings if one.code == "special_tokens")
    assert found.evidence["added_tokens_unknown_to_the_draft"] == 1
    assert found.harmful  # the template speaks it


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"])
def test_another_chat_template_is_named(pair: tuple[Path, Path], tmp_path: Path, template: str | None) -> None:
    tokens = byte_tokenizer()
    tokens.chat_template = template
    other = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    (other / "chat_template.jinja").unlink(missing_ok=True)
    tokens.save_pretrained(other)
    assert codes(files_of(pair[0], other)) == {"chat_template"}


def test_templates_that_write_the_same_are_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = byte_tokenizer()
    tokens.chat_template = "{# the same, written otherwise #}" + str(tokens.chat_template)
    other = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    tokens.save_pretrained(other)
    assert not codes(files_of(pair[0], other))


def test_a_draft_that_ends_before_the_texts_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = edited(pair[1], tmp_path / "draft", config={"max_position_embeddings": 64})
    found = files_of(pair[0], other)
    assert codes(found) == {"draft_context"}
    assert found.findings[0].evidence == {"draft_context": 64, "longest_text": 512}
    assert not codes(files_of(pair[0], other, max_model_len=64))


def test_a_draft_as_large_as_the_target_is_named_by_its_bytes(pair: tuple[Path, Path]) -> None:
    found = files_of(pair[0], pair[0]).findings[0]
    assert (found.code, found.severity) == ("draft_too_large", Severity.SEVERE)
    assert found.evidence["byte_ratio"] == 1.0


def test_a_draft_stored_in_too_few_bits_is_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GGUF in 2 or 3 bits: its file is small for its weights."""
    whole = doctor.model_source

    def small(source: Any, *revision: Any) -> Any:
        found = whole(source, *revision)
        return replace(found, file_bytes=found.stored_bytes * 3 // 32) if str(source) == str(pair[1]) else found

    monkeypatch.setattr(doctor, "model_source", small)
    found = files_of(*pair)
    assert codes(found) == {"draft_quantised"}
    assert found.findings[0].evidence["bits_a_weight"] == pytest.approx(3, abs=0.1)


def test_a_head_for_another_target_is_named(folder: Path, tmp_path: Path) -> None:
    wide = save(tiny_target(num_hidden_layers=6, hidden_size=96), byte_tokenizer(), tmp_path / "wide")
    head = FORMATS["eagle3"](tmp_path / "head", tiny_head(True))
    assert "head_mismatch" in codes(run_of(wide, head, method="eagle"))
    shape = parse_shape("hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,intermediate=128,vocab=320")
    medusa = write_medusa(tmp_path / "medusa", shape, dtype=torch.float32)
    assert "head_mismatch" in codes(run_of(wide, medusa))


def test_layers_that_the_target_has_not_are_named(folder: Path, tmp_path: Path) -> None:
    head = FORMATS["vllm"](tmp_path / "head", tiny_head(True, taps=(2, 3, 30)))
    found = run_of(folder, head, method="eagle").findings[0]
    assert (found.code, found.severity) == ("head_layers", Severity.SEVERE)
    assert found.evidence["target_layers"] == 6


def test_a_missing_norm_of_a_head_is_named(folder: Path, tmp_path: Path) -> None:
    head = FORMATS["eagle3"](tmp_path / "head", tiny_head(True).but({"norm": None}))
    assert "head_norm" in codes(files_of(folder, head, method="eagle"))


def test_a_head_that_ends_before_the_texts_is_named(folder: Path, tmp_path: Path) -> None:
    head = FORMATS["eagle3"](tmp_path / "head", tiny_head(True, layer={"max_position_embeddings": 128}))
    assert "draft_context" in codes(files_of(folder, head, method="eagle"))


# --- faults that a run shows


def test_a_draft_that_never_agrees_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save(tiny_target(num_hidden_layers=1, seed=9), byte_tokenizer(), tmp_path / "other")
    found = next(one for one in run_of(pair[0], other).findings if one.code == "low_agreement")
    assert found.severity is Severity.SEVERE
    assert float(found.evidence["first_guess"]) < 0.15


def test_chance_that_parts_draft_and_target_is_named(tmp_path: Path) -> None:
    """The draft is surer of itself than the target: greedily both say the same, with chance they do not."""
    target = save(cycle_target(num_hidden_layers=6, sharpness=4.0), byte_tokenizer(), tmp_path / "target")
    sure = save(cycle_target(num_hidden_layers=1), byte_tokenizer(), tmp_path / "draft")
    found = run_of(target, sure, temperature=1.5)
    drop = next(one for one in found.findings if one.code == "temperature")
    assert float(drop.evidence["greedy"]) == 1.0
    assert float(drop.evidence["at_this_temperature"]) < 0.5


def test_a_draft_that_was_quantised_too_far_is_named(tmp_path: Path) -> None:
    target = save(tiny_target(std=0.6), byte_tokenizer(), tmp_path / "target")
    found = run_of(target, target, draft_quantization="int4")
    lost = next(one for one in found.findings if one.code == "draft_quantised")
    assert float(lost.evidence["as_stored"]) == 1.0
    assert float(lost.evidence["quantised"]) < 0.95


def test_a_draft_that_loses_its_way_is_named(tmp_path: Path) -> None:
    """Positions from 24 on are noise to the draft, as beyond the length that it was trained for."""
    model = tiny_absolute(positions=128)
    target = save(model, byte_tokenizer(), tmp_path / "target")
    with torch.no_grad():
        table = model.transformer.wpe.weight
        table[24:] = torch.randn(table[24:].shape, generator=torch.Generator().manual_seed(3)) * 5
    lost = save(model, byte_tokenizer(), tmp_path / "draft")
    found = run_of(target, lost, tokens=44)
    drift = next(one for one in found.findings if one.code == "context_drift")
    assert float(drift.evidence["first_half"]) > 2 * float(drift.evidence["second_half"])


def needy_head(model: Any, scale: float) -> TinyHead:
    """A right head whose feature is what two hidden states differ by: nothing, if they are the right ones."""
    head = right_third(model)
    joint = torch.zeros(HIDDEN, 3 * HIDDEN)
    joint[:, :HIDDEN], joint[:, HIDDEN : 2 * HIDDEN] = -scale * torch.eye(HIDDEN), scale * torch.eye(HIDDEN)
    return head.but({"fc": joint})


def shifted_target() -> Any:
    """A cycle target with a constant in one of its hidden states, that before layer 4; which layer 4 takes away."""
    model = cycle_target(num_hidden_layers=6, attention_bias=True)
    shift = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7)) * 40
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
        model.model.layers[3].self_attn.o_proj.bias.copy_(shift)
        model.model.layers[4].self_attn.o_proj.bias.copy_(-shift)
    return model


def test_a_head_that_reads_the_wrong_layers_is_named_with_the_right_ones(tmp_path: Path) -> None:
    """Layers by their output where inputs are meant: each is one too high. (Of the third nothing is read.)"""
    model = shifted_target()
    head = replace(needy_head(model, 1.0), taps=(3, 4, 5))
    place = FORMATS["vllm"](tmp_path / "head", head)
    found = run_of(save(model, byte_tokenizer(), tmp_path / "target"), place, method="eagle")
    wrong = next(one for one in found.findings if one.code == "head_layers")
    assert wrong.severity is Severity.SEVERE
    assert "[2, 3, " in wrong.remedy


def test_a_head_whose_residual_is_normed_at_the_wrong_place_is_named(tmp_path: Path) -> None:
    """Its features are ten times what its norm makes of them, so it matters which of the two goes on."""
    model = cycle_target(num_hidden_layers=6)
    head = right_third(model)
    joint = torch.zeros(HIDDEN, 3 * HIDDEN)
    joint[:, :HIDDEN] = 30 * torch.eye(HIDDEN)
    place = FORMATS["vllm"](tmp_path / "head", head.but({"fc": joint}))
    found = run_of(save(model, byte_tokenizer(), tmp_path / "target"), place, method="eagle")
    wrong = next(one for one in found.findings if one.code == "head_norm")
    assert "norm_before_residual true" in wrong.remedy


def test_short_texts_are_named(pair: tuple[Path, Path]) -> None:
    assert "output_too_short" in codes(run_of(*pair, tokens=6))


def test_a_model_that_runs_the_slow_way_is_told_and_is_no_harm(tmp_path: Path) -> None:
    target = save(tiny_absolute(positions=128), byte_tokenizer(), tmp_path / "target")
    found = run_of(target, None, method="ngram")
    assert "compile_missing" in codes(found)
    assert found.healthy


def test_lookup_without_repetition_is_told_and_is_no_harm(folder: Path) -> None:
    found = run_of(folder, None, method="ngram")
    assert found.healthy
    assert codes(found) <= {"little_repeats"}


# --- faults of time: the evidence of a healthy run, with other costs


@pytest.fixture(scope="module")
def healthy(pair: tuple[Path, Path]) -> Evidence:
    with LLM(str(pair[0]), str(pair[1]), LONG, **SMALL) as llm:
        return examine(llm, [[1, 2, 3], [7, 8], [65, 66]], SamplingParams(temperature=0, max_tokens=TOKENS), steady())


def named(found: Evidence) -> set[str]:
    return {one.code for one in check_run(found)}


def with_agreement(found: Evidence, share: float) -> Evidence:
    places = Agreement(200, (share,) * 5, (100, 60, 40, 30, 20), share, share, 100, 100)
    return replace(found, agreement=places, num_tokens=5)


def test_a_guess_that_costs_nearly_a_pass_is_named(healthy: Evidence) -> None:
    slow = replace(with_agreement(healthy, 0.7), timings=steady(draft=0.9))
    assert "draft_too_large" in named(slow)
    assert "draft_too_large" not in named(replace(healthy, timings=steady(draft=0.1)))


def test_real_costs_tell_a_large_draft_from_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the clock of this machine: a draft of many more layers than its target costs more, whatever else runs."""
    monkeypatch.undo()
    target = save(cycle_target(num_hidden_layers=1), byte_tokenizer(), tmp_path / "target")
    large = save(cycle_target(num_hidden_layers=12), byte_tokenizer(), tmp_path / "draft")
    assert "draft_too_large" in codes(run_of(target, large, tokens=24))


def test_too_many_guesses_are_named_with_the_best_number(healthy: Evidence) -> None:
    found = [one for one in check_run(with_agreement(healthy, 0.4)) if one.code == "draft_length_too_long"]
    assert found[0].evidence["configured"] == 5
    assert int(found[0].evidence["best"]) < 5
    assert f"--num-speculative-tokens {found[0].evidence['best']}" in found[0].remedy


def test_too_few_guesses_are_named_with_the_best_number(healthy: Evidence) -> None:
    cheap = replace(healthy, num_tokens=1, timings=steady(draft=0.02),
                    agreement=Agreement(200, (0.95,), (200,), 0.95, 0.95, 100, 100))  # fmt: skip
    found = [one for one in check_run(cheap) if one.code == "draft_length_too_short"]
    assert int(found[0].evidence["best"]) > 1


def test_a_batch_that_makes_verification_dear_is_named(healthy: Evidence) -> None:
    crowded = replace(with_agreement(healthy, 0.7), rows=32, timings=steady(wide=0.3, rows=32, draft=0.1))
    alone = dict(steady().rounds)
    mixed = {key: seconds if key[0] == 32 else alone[key] for key, seconds in crowded.timings.rounds.items()}
    crowded = replace(crowded, timings=replace(crowded.timings, rounds=mixed))
    assert "batch_too_large" in named(crowded)


def test_rounds_that_wait_for_the_host_are_named(healthy: Evidence) -> None:
    assert "host_bound" in named(replace(healthy, num_tokens=5, timings=steady(host=4.0)))
    assert "host_bound" in named(replace(healthy, num_tokens=5, device="cuda", timings=steady(host=2.5)))


def test_too_many_threads_are_named(healthy: Evidence) -> None:
    found = next(one for one in check_run(replace(healthy, threads=4, cores=2)) if one.code == "threads_oversubscribed")
    assert found.evidence == {"threads": 4, "cores": 2}
    assert "--threads 2" in found.remedy
    assert usable_cores() >= 1


def test_missing_graphs_on_a_card_are_harm(healthy: Evidence) -> None:
    without = replace(healthy, device="cuda", slow_paths=("rounds are not captured as CUDA graphs",))
    found = next(one for one in check_run(without) if one.code == "compile_missing")
    assert found.severity is Severity.SEVERE


def test_a_handful_of_guesses_proves_nothing(healthy: Evidence) -> None:
    few = replace(healthy, agreement=Agreement(5, (0.0,), (5,), 0.0, 0.0, 3, 2))
    assert named(few) == set()


def test_the_healthy_evidence_passes_every_check(healthy: Evidence) -> None:
    assert [finding for check in RUN_CHECKS for finding in check(healthy)] == []


def test_findings_come_by_harm_and_each_name_once() -> None:
    found = [
        Finding("a", Severity.MODERATE, "", "", harm=0.2), Finding("b", Severity.SEVERE, "", "", harm=0.1),
        Finding("c", Severity.MODERATE, "", "", harm=0.7), Finding("a", Severity.SLIGHT, "", "", harm=0.9),
    ]  # fmt: skip
    assert [(one.code, one.severity) for one in by_harm(found)] == [
        ("b", Severity.SEVERE), ("c", Severity.MODERATE), ("a", Severity.MODERATE)
    ]  # fmt: skip


# --- the command


def command(*arguments: str, code: int) -> Any:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def test_the_command_says_plainly_that_nothing_was_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "two", "three")))
    settings = ("--dtype", "float32", "-f", str(prompts), "-n", "40", "--max-num-seqs", "3", "--draft", "12")
    page = command(str(pair[0]), "--speculative-model", str(pair[1]), *settings, code=0).stdout
    assert "Nothing found that costs speed." in page
    assert "agreement by place" in page
    assert max(map(len, page.splitlines())) <= 80


def test_the_command_names_faults_and_exits_with_one(pair: tuple[Path, Path]) -> None:
    result = command(str(pair[0]), "--speculative-model", str(pair[0]), "--files-only", "--json", code=1)
    found = json.loads(result.stdout)
    assert found["healthy"] is False
    assert found["findings"][0]["code"] == "draft_too_large"
    assert found["findings"][0]["evidence"]["byte_ratio"] == 1.0
    page = command(str(pair[0]), "--speculative-model", str(pair[0]), "--files-only", code=1).stdout
    assert "severe: draft_too_large" in page
    assert "remedy:" in page


def test_the_whole_of_the_evidence_goes_into_json(pair: tuple[Path, Path]) -> None:
    arguments = ("--speculative-model", str(pair[1]), "--dtype", "float32", "-n", "40", "--json", "--draft", "12")
    found = json.loads(command(str(pair[0]), *arguments, code=0).stdout)
    assert found["evidence"]["agreement"]["by_position"][0] == 1.0
    assert {"texts": 1, "guesses": 0, "seconds": 1.0} in found["evidence"]["timings"]["rounds"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--method", "none"), "there is no drafter to examine"), (("--temperature", "-1"), "must be 0 to 100"),
     (("-f", "nowhere.jsonl"), "cannot be read"), (("--speculative-model", "./nowhere"), "no model at ./nowhere")],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_two(
    pair: tuple[Path, Path], arguments: tuple[str, ...], words: str
) -> None:
    result = command(str(pair[0]), *arguments, "--json", code=2)
    assert words in result.stderr
    assert result.stdout == ""


def test_a_broken_target_is_an_error_not_a_finding(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        diagnose({"model": str(tmp_path), "method": "ngram"})
    with pytest.raises(ConfigError, match="no drafter"):
        diagnose({"model": str(tmp_path), "num_speculative_tokens": 0, "method": "ngram"})
