"""Synthetic pairs: ordinary checkpoints of chosen sizes whose text and whose agreement are known beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, CapacityError, ConfigError, ModelLoadError, SamplingParams
from outrider.bench import pair as pairs
from outrider.bench.pair import Pair, Saying, open_pair, read_facts, write_draft, write_pair
from outrider.bench.shapes import SHAPES, Shape, parse_shape
from outrider.bench.shards import INDEX, Weight, num_bytes, write_weights
from outrider.cli import app

SIZES = "hidden=32,layers=1,heads=4,kv_heads=2,head_dim=16,intermediate=48,vocab=300"
GREEDY = SamplingParams(temperature=0, max_tokens=256, speculation=4)


def tiny_pair(folder: Path, agreement: float = 0.8, **more: Any) -> Pair:
    settings: dict[str, Any] = {"target": "tiny", "draft": "tiny", "device": "cpu", "num_prompts": 2, **more}
    return write_pair(folder, agreement=agreement, **settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return tiny_pair(tmp_path_factory.mktemp("pair") / "tiny")


def generated(made: Pair, draft: Path | None = None) -> Any:
    with LLM(str(made.target), str(draft or made.draft), 4, device="cpu", max_model_len=512, max_num_seqs=1) as llm:
        return llm.generate(made.prompts[0], GREEDY, progress=False)[0]


def agreement_of(output: Any) -> float:
    """The share of guesses that were right, of those that stood on right ones."""
    return sum(output.stats.accepted_per_position) / sum(output.stats.reached_per_position)


def command(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pair", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    return result.stderr


# --- what the models say


def test_our_engine_writes_the_cycle_and_meets_the_agreement(made: Pair, tmp_path: Path) -> None:
    output = generated(made)
    assert made.saying.mismatches(made.prompts[0], output.token_ids) == 0
    assert agreement_of(output) == pytest.approx(0.8, abs=0.07)
    half = write_draft(tmp_path / "half", target=made.target, draft="tiny", agreement=0.5, device="cpu")
    output = generated(half)
    assert half.saying.mismatches(made.prompts[0], output.token_ids) == 0
    assert agreement_of(output) == pytest.approx(0.5, abs=0.07)


def test_a_draft_that_always_agrees_is_always_accepted(made: Pair, tmp_path: Path) -> None:
    sure = write_draft(tmp_path / "sure", target=made.target, draft=SIZES, agreement=1, device="cpu")
    assert read_facts(sure.draft)["shape"].vocab == 512  # the target's
    assert generated(made, sure.draft).stats.acceptance_rate == 1


@pytest.mark.parametrize("sizes", ["tiny", SIZES + ",type=qwen3", SIZES])
def test_transformers_writes_the_cycle_by_a_wide_margin(sizes: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    one = write_pair(tmp_path, target=sizes, draft=sizes, agreement=0.5, device="cpu", prompt_length=40, num_prompts=3)
    for folder, following in ((one.target, one.following), (one.draft, one.saying.guesses)):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
        assert model.dtype == torch.bfloat16
        ids = torch.tensor(one.prompts)
        top = model(ids).logits.float().topk(2, -1)
        assert torch.equal(top.indices[..., 0], following[ids])
        assert (top.values[..., 0] - top.values[..., 1]).min() > 8  # 64 steps of bf16 there
    out = model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), do_sample=False, max_new_tokens=8)
    assert out.shape == (1, 48)  # no token ends the text


def test_prompts_lie_on_the_cycle_and_may_be_longer_than_it(made: Pair) -> None:
    stored = json.loads((made.target / "prompt_ids.json").read_text())
    assert stored == made.prompts
    assert stored[0] != stored[1]
    for prompt in [*stored, made.saying.prompts(1, 1300)[0]]:
        assert torch.equal(made.following[torch.tensor(prompt[:-1])], torch.tensor(prompt[1:]))
    assert {len(prompt) for prompt in stored} == {200}


@pytest.mark.parametrize("agreement", [0.0, 0.6, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("vocab", [300, 2048])
def test_agreement_is_exact_from_every_prompts_end_on(agreement: float, vocab: int) -> None:
    said = Saying.of(vocab, 7, agreement)
    assert sorted(said.guesses.tolist()) == list(range(vocab))
    right = said.guesses == said.following
    assert right.float().mean() == pytest.approx(agreement, abs=1 / vocab)
    for prompt in said.prompts(4, 10) if vocab > 300 else []:
        fed = torch.tensor([prompt[-1], *said.after(prompt[-1], 255)])
        assert right[fed].float().mean() == pytest.approx(agreement, abs=1 / 256)


def test_a_seed_decides_everything(made: Pair, tmp_path: Path) -> None:
    again, other = tiny_pair(tmp_path / "again"), tiny_pair(tmp_path / "other", seed=1)
    for folder in ("target", "draft"):
        name = f"{folder}/model.safetensors"
        first = (made.target.parent / name).read_bytes()
        assert (again.target.parent / name).read_bytes() == first
        assert (other.target.parent / name).read_bytes() != first
    assert torch.equal(open_pair(made.target, made.draft).saying.guesses, made.saying.guesses)
    with pytest.raises(ModelLoadError, match="was not written for"):
        open_pair(made.target, other.draft)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_writes_a_pair_that_says_the_same(tmp_path: Path) -> None:
    one = write_pair(tmp_path, target="qwen3-0.6b", draft="tiny", agreement=0.8, device="cuda")
    with LLM(str(one.target), str(one.draft), 4, max_model_len=512, max_num_seqs=1) as llm:
        output = llm.generate(one.prompts[0], GREEDY, progress=False)[0]
    assert one.saying.mismatches(one.prompts[0], output.token_ids) == 0


# --- files and shapes


def test_large_models_are_split_with_an_index(tmp_path: Path) -> None:
    from safetensors import safe_open

    held = {f"w{place}": torch.randn(5 + place, 3) for place in range(4)}
    weights = [
        Weight(name, tuple(one.shape), one.dtype, lambda start, stop, one=one: one[start:stop])
        for name, one in held.items()
    ]
    told: list[int] = []
    write_weights(tmp_path, weights, told.append, shard_bytes=150)
    index = json.loads((tmp_path / INDEX).read_text())
    shapes = {name: tuple(one.shape) for name, one in held.items()}
    assert sum(told) == index["metadata"]["total_size"] == num_bytes(shapes, torch.float32)
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), held[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.50),
        ("llama-3.1-70b", 70.55),
        ("qwen3-8b", 8.19),
        ("qwen3-0.6b", 0.75),
    ],
)
def test_named_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    # The small ones tie the head to the embedding; here it is a matrix of its own.
    assert num_bytes(SHAPES[name].tensors(), torch.bfloat16) / 2e9 == pytest.approx(billions, abs=0.005)


def test_sizes_are_read_and_kv_heads_and_head_dim_are_optional() -> None:
    assert parse_shape(SIZES + ",type=qwen3") == Shape(32, 1, 4, 2, 16, 48, 300, "qwen3")
    short = parse_shape("hidden=64,layers=2,heads=4,intermediate=128", 99)
    assert (short.kv_heads, short.head_dim, short.vocab) == (4, 16, 99)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-4", "known are llama-3.1-8b, .*tiny"),
        ("hidden=64", "lack layers, heads, intermediate, vocab"),
        (SIZES + ",depth=3", "'depth=3' is no size"),
        (SIZES + ",layers=two", "'layers=two' is no size"),
        (SIZES + ",layers=0", "layers must be 1 or more, got 0"),
        (SIZES + ",heads=3", "must be a multiple"),
        (SIZES + ",type=gpt", "type must be one of llama, qwen3"),
    ],
)
def test_shapes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_shape(text)


# --- the command


def test_the_command_writes_a_pair_and_tells_where(tmp_path: Path) -> None:
    said = command(tmp_path / "p", "--target", SIZES, "--draft", "tiny", "--num-prompts", 3, "--prompt-length", 9)
    assert "prompt_ids.json" in said
    one = open_pair(tmp_path / "p/target", tmp_path / "p/draft")
    assert [len(prompt) for prompt in one.prompts] == [9, 9, 9]
    assert command(tmp_path / "q", "--target", "tiny", "--draft", "tiny", "--quiet", "--dtype", "float32") == ""
    assert read_facts(tmp_path / "q/target")["dtype"] == "float32"


def test_only_the_draft_can_be_replaced(tmp_path: Path) -> None:
    one = tiny_pair(tmp_path, 0.8, seed=3)
    before = (one.target / "model.safetensors").stat().st_mtime_ns
    command(tmp_path, "--only", "draft", "--agreement", 0.5, "--force")
    assert open_pair(one.target, one.draft).agreement == 0.5
    assert (read_facts(one.draft)["seed"], read_facts(one.draft)["shape"]) == (3, SHAPES["tiny"])
    assert (one.target / "model.safetensors").stat().st_mtime_ns == before
    assert "whose seed is not 4" in command(tmp_path, "--only", "draft", "--seed", 4, "--force", code=2)
    assert "is not empty" in command(tmp_path, "--only", "draft", code=2)
    assert "outrider pair" in command(tmp_path / "none", "--only", "draft", code=2)
    assert "--only must be draft" in command(tmp_path, "--only", "target", code=2)


def test_what_is_there_is_kept_without_force_and_strangers_files_always(tmp_path: Path) -> None:
    tiny_pair(tmp_path)
    stranger = tmp_path / "target" / "notes.txt"
    stranger.write_text("mine")
    arguments = (tmp_path, "--target", "tiny", "--draft", "tiny", "--agreement", 0.1)
    assert "is not empty; name another folder" in command(*arguments, code=2)
    assert read_facts(tmp_path / "draft")["agreement"] == 0.8
    command(*arguments, "--force")
    assert read_facts(tmp_path / "draft")["agreement"] == 0.1
    assert stranger.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--agreement", "1.5"), "agreement must be in [0, 1], got 1.5"),
        (("--agreement", "nan"), "agreement must be in [0, 1], got nan"),
        (("--dtype", "int3"), "dtype must be one of bfloat16, float16, float32"),
        (("--prompt-length", "16384"), "prompt_length must be in [1, 16383]"),
        (("--num-prompts", "0"), "num_prompts must be 1 or more"),
        (("--target", "llama-9"), "known are llama-3.1-8b"),
        (("--device", "toaster"), "device must be 'cpu' or 'cuda'"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    said = command(tmp_path / "p", "--target", "tiny", "--draft", "tiny", *arguments, code=2)
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "p").exists()


def test_a_full_disk_is_noticed_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100_000

    monkeypatch.setattr(pairs.shutil, "disk_usage", lambda path: Usage)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=r"need 558,336 bytes, but .* has 100,000 free"):
        tiny_pair(tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_a_folder_that_is_half_written_is_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk on fire")

    tiny_pair(tmp_path)
    monkeypatch.setattr(pairs, "write_weights", fails)
    with pytest.raises(OSError, match="on fire"):
        tiny_pair(tmp_path, force=True)
    with pytest.raises(ModelLoadError, match="outrider pair"):
        open_pair(tmp_path / "target", tmp_path / "draft")
