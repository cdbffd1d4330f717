"""`outrider plan`: the bill against what loaded engines take, predictions, the tables, and what the command says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.advice.bill import Place, billed, place_of
from outrider.advice.cards import CARDS, card_named, known_card
from outrider.advice.families import candidates, known_families
from outrider.advice.footprint import head_footprint, model_footprint
from outrider.advice.plan import planned
from outrider.advice.prediction import (
    Drafting,
    Machine,
    PassLoad,
    best_length,
    expected_tokens,
    predicted_speedup,
    round_seconds,
    speedup,
)
from outrider.advice.sources import head_source, model_source
from outrider.advice.words import Words, overlap, words_of_gguf
from outrider.bench.heads import write_medusa
from outrider.bench.shapes import parse_shape
from outrider.cli import app
from outrider.config import EngineConfig, Method
from outrider.errors import ConfigError, ModelLoadError
from outrider.llm import LLM
from outrider.model import checkpoint
from tests.eagle_heads import FORMATS, narrow, tiny_head
from tests.test_model_load import small_gguf
from tests.tiny import byte_tokenizer, save, tiny_draft, tiny_family, tiny_sliding, tiny_target

CPU = torch.device("cpu")
BUDGET = 1 << 20
SHAPED = ("--shape", "llama-3.1-8b", "--draft-shape", "llama-3.2-1b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_target(), byte_tokenizer(), tmp_path_factory.mktemp("plan") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = tiny_draft(tiny_target(num_hidden_layers=1), "noisy")
    return save(small, byte_tokenizer(), tmp_path_factory.mktemp("plan") / "draft")


def in_memory(model: Any) -> int:
    """Bytes of all that a model's modules hold, packed weights included."""
    found = {}
    for module in model.modules():
        plain = [one for one in vars(module).values() if isinstance(one, torch.Tensor)]
        for one in [*module._parameters.values(), *module._buffers.values(), *plain]:
            if one is not None:
                found[id(one)] = one.numel() * one.element_size()
    return sum(found.values())


def of_caches(llm: LLM) -> int:
    """Bytes of every cache of an engine's target and draft."""
    return sum(pool.nbytes for runner in llm._owned for pool in runner.cache._pools.values())


def bill_of(footprint: Any, draft: Any = None, **settings: Any) -> Any:
    config = EngineConfig(kv_cache_bytes=BUDGET, **settings)
    return billed(footprint, draft, config, 5, Place("here", "cpu", 1 << 34, 1 << 34, here=True))


def line(bill: Any, what: str) -> int:
    return int(next(one.num_bytes for one in bill.lines if one.what == what))


# --- the bill is what an engine takes


@pytest.mark.parametrize(
    ("tied", "dtype", "quantization"),
    [(False, "float32", None), (True, "bfloat16", None), (True, "bfloat16", "int8"), (False, "float32", "int4")],
)
def test_the_bill_is_what_a_loaded_engine_takes(
    tied: bool, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    path = save(tiny_target(tie_word_embeddings=tied), byte_tokenizer(), tmp_path)
    footprint = model_footprint(model_source(path), dtype=dtype, device=CPU, quantization=quantization)
    with LLM(str(path), dtype=dtype, quantization=quantization, device="cpu", kv_cache_bytes=BUDGET) as llm:
        assert footprint.num_bytes == pytest.approx(in_memory(llm.loaded.model), rel=0.01)
        assert footprint.bytes_per_slot == llm._owned[0].bytes_per_slot
        assert (footprint.vocab_size, footprint.context_length) == (llm.loaded.vocab_size, llm.loaded.context_length)
        bill = bill_of(footprint)
        assert (bill.num_blocks, bill.max_model_len) == (llm._num_blocks, llm.max_model_len)
        assert line(bill, "keys and values") == of_caches(llm)
    assert quantization is None or quantization in footprint.weights


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_bill_where_the_processor_has_no_weights_packed(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is with bfloat16 where there is no AVX-512: then a tied head is no copy, either."""
    monkeypatch.setattr("outrider.model.quantize.packable", lambda _: False)
    test_the_bill_is_what_a_loaded_engine_takes(True, "bfloat16", quantization, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gpt2", "sliding"])
def test_other_structures_are_counted_too(family: str, tmp_path: Path) -> None:
    model = tiny_sliding() if family == "sliding" else tiny_family(family)
    path = save(model, None, tmp_path)
    footprint = model_footprint(model_source(path), dtype="float32", device=CPU)
    with LLM(str(path), dtype="float32", device="cpu", kv_cache_bytes=BUDGET) as llm:
        assert footprint.bytes_per_slot == llm._owned[0].bytes_per_slot
        assert bill_of(footprint).num_blocks == llm._num_blocks
        assert footprint.num_bytes == pytest.approx(in_memory(llm.loaded.model), rel=0.04)


def test_a_draft_model_shares_the_cache_as_in_the_engine(folder: Path, draft: Path) -> None:
    target, small = (model_footprint(model_source(path), dtype="float32", device=CPU) for path in (folder, draft))
    bill = bill_of(target, small, max_model_len=128, max_num_seqs=4)
    with LLM(str(folder), str(draft), dtype="float32", device="cpu", kv_cache_bytes=BUDGET, max_model_len=128,
             max_num_seqs=4) as llm:  # fmt: skip
        assert bill.num_blocks == llm._num_blocks
        assert bill.per_token == sum(runner.bytes_per_slot for runner in llm._owned)
        assert line(bill, "keys and values") == of_caches(llm)
        state = llm.engine.state
        held = (state.tokens, state.lengths, state.limits, state.tables)
        assert line(bill, "texts and tables") == sum(one.nbytes for one in held)
    assert bill.fits


@pytest.mark.parametrize("third", [False, True])
def test_an_eagle_head_is_counted_by_its_headers(third: bool, tmp_path: Path) -> None:
    model = save(tiny_target(num_hidden_layers=6), byte_tokenizer(), tmp_path / "target")
    head = FORMATS["eagle3" if third else "authors"](
        tmp_path / "head", tiny_head(third, ids=narrow() if third else None)
    )
    target = model_footprint(model_source(model), dtype="float32", device=CPU)
    counted = head_footprint(head_source(head), Method.EAGLE, target)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": BUDGET}
    with LLM(str(model), str(head), method="eagle", **settings) as llm:
        drafter: Any = llm.engine.drafter
        assert counted.bytes_per_slot == drafter.bytes_per_slot
        assert counted.features_per_slot == llm.engine.runner.features[0].nbytes  # type: ignore[index]
        assert bill_of(target, counted).num_blocks == llm._num_blocks
        kept = sum(one.nbytes for one in drafter.head.weights.values())
    assert counted.num_bytes >= kept > 0.5 * counted.num_bytes  # the rest is its matrix to the vocabulary


def test_medusa_heads_are_counted_by_their_headers(tmp_path: Path) -> None:
    shape = parse_shape("hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,intermediate=128,vocab=320")
    model = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    head = write_medusa(tmp_path / "head", shape, num_heads=3, dtype=torch.float32)
    target = model_footprint(model_source(model), dtype="float32", device=CPU)
    counted = head_footprint(head_source(head), Method.MEDUSA, target)
    with LLM(str(model), str(head), dtype="float32", device="cpu", kv_cache_bytes=BUDGET) as llm:
        heads: Any = llm.engine.drafter.heads  # type: ignore[union-attr]
        assert bill_of(target, counted).num_blocks == llm._num_blocks
    assert counted.num_bytes == sum(one.nbytes for one in (*heads.weights, *heads.biases, heads.outs))


def test_a_gguf_is_counted_in_the_dtype_that_it_would_be_loaded_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF has no dtype: on a card it becomes bfloat16, on a CPU what products are fast in."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    source = model_source(small_gguf(tmp_path / "tiny.gguf"))
    on_card = model_footprint(source, dtype="auto", device=torch.device("cuda"), here=False)
    assert on_card.runner.dtype is torch.bfloat16
    footprint = model_footprint(source, dtype="auto", device=CPU)
    with LLM(str(tmp_path / "tiny.gguf"), device="cpu", kv_cache_bytes=BUDGET) as llm:
        assert footprint.runner.dtype is llm.loaded.dtype
        assert footprint.num_bytes == pytest.approx(in_memory(llm.loaded.model), rel=0.01)
        assert bill_of(footprint).num_blocks == llm._num_blocks
        assert source.words is not None
        assert llm.tokenizer.get_vocab().items() >= {"zq": 260, "zx": 261}.items()
        assert source.words.ids["zq"] == 260


def test_no_weight_is_read(folder: Path, tmp_path: Path) -> None:
    """A config alone does, and headers whose weights are cut off too."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    lone = model_footprint(model_source(alone), dtype="float32", device=CPU)
    whole = model_footprint(model_source(folder), dtype="float32", device=CPU)
    assert lone.weights == whole.weights
    assert "counted from the config" in lone.notes[0]


def test_of_a_hub_repository_only_configs_and_headers_are_fetched(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    asked: list[str] = []
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(repo: str, revision: str | None, patterns: list[str]) -> Path:
        asked.extend(patterns)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (snapshot / name).write_bytes((folder / name).read_bytes())
        return snapshot

    def headers(self: Any, repo: str, *, revision: str | None) -> Any:
        tensors = {
            one.name: TensorInfo(one.dtype, list(one.shape), (0, one.num_bytes))  # type: ignore[arg-type]
            for one in checkpoint.stored_tensors(folder)
        }
        return SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": SafetensorsFileMetadata({}, tensors)})

    monkeypatch.setattr("outrider.advice.sources.download", download)
    monkeypatch.setattr(HfApi, "get_safetensors_metadata", headers)
    found = model_source("someone/model")
    assert asked
    assert not any("safetensors" in pattern or pattern == "*" for pattern in asked)
    assert {one.name for one in found.tensors} == {one.name for one in checkpoint.stored_tensors(folder)}
    assert found.words is not None
    local = model_footprint(model_source(folder), dtype="float32", device=CPU)
    assert model_footprint(found, dtype="float32", device=CPU).weights == local.weights


def test_a_hub_gguf_that_is_not_here_is_refused_with_the_remedy(monkeypatch: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"not in the local Hub cache; .*download the file and give its path"):
        model_source("someone/model:model.gguf")


# --- a card


def test_on_a_card_the_cache_takes_what_the_engine_leaves_it(folder: Path) -> None:
    target = model_footprint(model_source(folder), dtype="float32", device=torch.device("cuda"), here=False)
    place = place_of(card_named("T4"))
    bill = billed(target, None, EngineConfig(), 5, place)
    fixed = sum(one.num_bytes for one in bill.lines if one.what not in ("keys and values", "texts and tables"))
    assert bill.budget == int(place.total * 0.9) - fixed
    assert {one.what for one in bill.lines} >= {"captured rounds", "CUDA and libraries", "logits and sampling"}


def test_weights_beyond_a_card_are_too_much_by_a_number() -> None:
    made = planned({"method": "ngram"}, shape="llama-3.1-8b", card=card_named("T4"))
    assert not made.bill.fits
    assert 2**30 < made.bill.over < 5 * 2**30
    assert made.bill.num_blocks == 0
    assert any("4 bits" in one for one in made.remedies)
    assert any("L4" in one for one in made.remedies)
    large = planned({"method": "ngram"}, shape="llama-3.1-70b", card=card_named("H200"))
    assert any("no single card" in one for one in large.remedies)


@pytest.mark.parametrize(
    ("text", "name"),
    [("H100 80GB", "H100 80GB"), ("h100-80gb", "H100 80GB"), ("H100", "H100 80GB"), ("nvidia H200", "H200 141GB"),
     ("rtx4090", "RTX 4090"), ("GeForce RTX 3090", "RTX 3090"), ("a100 80gb", "A100 80GB"),
     ("H100 PCIe", "H100 PCIe 80GB")],
)  # fmt: skip
def test_cards_are_found_by_name(text: str, name: str) -> None:
    assert card_named(text).name == name


def test_an_unknown_card_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"no card 'L44' in the table; did you mean 'L4'\? known are T4, L4"):
        card_named("L44")


def test_the_table_of_cards_names_its_sources() -> None:
    assert all(card.source.startswith(("https://www.nvidia.com/", "https://images.nvidia.com/")) for card in CARDS)
    assert known_card("NVIDIA H100 80GB HBM3") == card_named("H100 80GB")
    assert known_card("NVIDIA L4") == card_named("L4")
    assert known_card("NVIDIA L40S") == card_named("L40S")
    assert known_card("Some other card") is None


# --- predictions


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("length", [0, 1, 5, 12])
def test_expected_tokens_is_equation_one(agreement: float, length: int) -> None:
    assert expected_tokens(agreement, length) == pytest.approx((1 - agreement ** (length + 1)) / (1 - agreement))


def test_certain_guesses_are_all_accepted() -> None:
    assert expected_tokens(1.0, 7) == 8


def test_a_round_costs_its_bytes() -> None:
    """(draft bytes x k + target bytes) / bandwidth, as the formula says."""
    target, small = PassLoad(1000.0), Drafting(PassLoad(100.0))
    assert round_seconds(target, small, 1, 4, Machine(10.0)) == pytest.approx((4 * 100 + 1000) / 10)
    assert predicted_speedup(0.8, target, small, 1, 4, Machine(10.0)) == pytest.approx(
        speedup(expected_tokens(0.8, 4), 100, 100, 40)
    )
    heads = Drafting(PassLoad(100.0), at_once=True)
    assert round_seconds(target, heads, 1, 4, Machine(10.0)) == pytest.approx((100 + 1000) / 10)


def test_the_best_length_grows_with_agreement_and_is_none_where_nothing_pays() -> None:
    target, small = PassLoad(1000.0), Drafting(PassLoad(100.0))
    lengths = [best_length(agreement, target, small, 1, Machine(1.0))[0] for agreement in (0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert best_length(0.5, target, Drafting(PassLoad(900.0)), 1, Machine(1.0)) == (0, 1.0)


def test_arithmetic_ends_what_a_large_batch_gains() -> None:
    """Where a pass is bound by its arithmetic already, guesses are not free any more."""
    target = PassLoad(16e9, parameters=8e9)
    machine = Machine(3e12, 1e15)
    one, many = (best_length(0.8, target, Drafting(None), rows, machine)[1] for rows in (1, 512))
    assert one > 3
    assert many < 1.1


def test_experts_are_read_as_they_are_visited() -> None:
    load = PassLoad(10.0, experts=100.0, expert_share=0.25)
    assert load.bytes_read(1, 1) == pytest.approx(35)
    assert load.bytes_read(16, 4) == pytest.approx(110, rel=0.01)


def test_a_drafts_shorter_context_is_told_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    """Case D09: what the draft reaches is known at once, not found out in the middle of a text."""
    short = save(tiny_draft(tiny_target(max_position_embeddings=64), "same"), byte_tokenizer(), tmp_path / "short")
    made = planned({"model": str(folder), "speculative_model": str(short), "device": "cpu", "max_model_len": 256})
    assert any("was made for 64 tokens" in note for note in made.notes)
    enough = planned({"model": str(folder), "speculative_model": str(short), "device": "cpu", "max_model_len": 64})
    assert not enough.notes


# --- vocabularies and families


def test_overlap_tells_same_moved_and_clashing_ids() -> None:
    target = Words({"a": 0, "b": 1, "c": 2, "d": 3}, {"eos": 3})
    other = Words({"a": 0, "c": 1, "e": 4}, {"eos": 4})
    found = overlap(target, other)
    assert (found.same_ids, found.moved, found.clashing) == (1, 1, 1)
    assert (found.share, found.shared_strings) == (0.25, 0.5)
    assert found.special == {"eos": (3, 4)}
    assert not found.fits
    assert overlap(target, target).fits


def test_a_ggufs_words_come_from_its_metadata() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["x", "<s>", "y"], "tokenizer.ggml.token_type": [1, 3, 1],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": "T",
    }  # fmt: skip
    words = words_of_gguf(metadata)
    assert words is not None
    assert words.ids == {"x": 0, "<s>": 1, "y": 2}
    assert words.added == {"<s>": 1}
    assert words.special["bos"] == 1
    assert words.chat_template == "T"
    assert words_of_gguf({}) is None


def test_every_known_draft_has_a_source_and_a_hub_id() -> None:
    for family, drafts in known_families():
        assert drafts, family
        for one in drafts:
            assert one.source.startswith("https://"), one
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.id), one
            assert one.kind in {"draft_model", "eagle", "medusa"}, one


@pytest.mark.parametrize(
    ("name", "first"),
    [("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
     ("unsloth/Meta-Llama-3.1-8B-Instruct-GGUF", "meta-llama/Llama-3.2-1B-Instruct"),
     ("Qwen3-8B-Q4_K_M", "RedHatAI/Qwen3-8B-speculator.eagle3"),
     ("Qwen/Qwen3-8B-FP8", "RedHatAI/Qwen3-8B-speculator.eagle3"),
     ("microsoft/Phi-4-mini-instruct", None), ("SmolLM2-135M-Instruct.Q4_1", None), ("target", None)],
)  # fmt: skip
def test_drafts_are_known_by_the_targets_name(name: str, first: str | None) -> None:
    assert next((one.id for one in candidates(name)), None) == first


# --- the command


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def test_a_plan_that_fits_says_so_in_words(folder: Path, draft: Path) -> None:
    page = run(str(folder), "--speculative-model", str(draft), "--max-model-len", "64", "--kv-cache-bytes", "8M").stdout
    assert "It fits" in page
    assert "Predicted, not measured" in page
    assert "260 of the target's 260 tokens are the draft's too" in page.replace("\n", " ")
    assert max(map(len, page.splitlines())) <= 80


def test_json_holds_all_of_it() -> None:
    found = json.loads(run(*SHAPED, "--gpu", "H100 80GB", "--json").stdout)
    assert found["bill"]["fits"] is True
    assert found["bill"]["per_token"] == 131072 + 32768  # 8B: 32 layers x 8 heads x 128 x 2 x 2 bytes; 1B: 16 x 8 x 64
    eight = next(one for one in found["bill"]["lines"] if one["what"] == "target, bfloat16")
    assert eight["num_bytes"] == pytest.approx(16.06e9, rel=0.001)
    one = next(one for one in found["forecasts"] if "llama-3.2-1b" in one["method"] and one["agreement"] == 0.8)
    assert (
        one["best"] == max(one["by_length"], key=lambda key: one["by_length"][key])
        or int(max(one["by_length"], key=lambda key: one["by_length"][key])) == one["best"]
    )
    assert 1.5 < one["speedup"] < 3
    assert found["candidates"][0]["id"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert found["assumptions"]


def test_a_plan_that_does_not_fit_says_what_would_and_it_does() -> None:
    page = run(*SHAPED, "--gpu", "L4", "--max-model-len", "8192", code=1).stdout
    assert "does not fit" in page
    shorter = re.search(r"--max-model-len (\d+) with 16", page)
    fewer = re.search(r"--max-num-seqs (\d+) at 8192", page)
    other = re.search(r"another card: (\S+)", page)
    assert shorter
    assert fewer
    assert other
    run(*SHAPED, "--gpu", "L4", "--max-model-len", shorter[1])
    run(*SHAPED, "--gpu", "L4", "--max-model-len", "8192", "--max-num-seqs", fewer[1])
    run(*SHAPED, "--gpu", other[1], "--max-model-len", "8192")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--shape", "llama-3.1-8b", "--gpu", "X1"), "no card 'X1'"), (("--shape", "what"), "no shape 'what'"),
     (("somewhere", "--shape", "tiny"), "the target is given twice"), (("./nowhere",), "no model at ./nowhere"),
     (("--shape", "tiny", "--gpu", "L4", "--device", "cpu"), "name two places"),
     (("--shape", "tiny", "--device", "cuda:63"), "device 'cuda:63'"),
     (("--shape", "tiny", "--max-model-len", "99999999"), "beyond the model's context"),
     (("--shape", "tiny", "--context", "99999999"), "context=99999999 is beyond the model's context"),
     (("--shape", "tiny", "--draft-shape", "tiny", "--speculative-model", "x"), "the draft is given twice")],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_two(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
