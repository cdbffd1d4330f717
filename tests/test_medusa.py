"""Medusa heads: read as published, computed as the paper says, and never a changed token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outrider.draft.fixed_tree import PUBLISHED_TREE, best_paths, ordered_paths, widest_paths
from outrider.draft.medusa import MedusaDrafter
from outrider.errors import ConfigError, ModelLoadError
from outrider.model import head_files
from outrider.model.features import last_hidden_tap
from outrider.model.load import LoadedModel, load_model
from outrider.model.medusa_heads import MedusaHeads, is_medusa, load_medusa
from outrider.sampling.params import SamplingParams
from tests.heads import NUM_WORDS, NoLooking, acceptance, cycle_target, drafting, following, write_head
from tests.interpreter import rounds_on_kernels
from tests.scripted import generate_staggered, generate_together, greedy_params
from tests.tiny import byte_tokenizer, tiny_target

FILE = "medusa_lm_head.safetensors"
HEADS, LAYERS, HIDDEN, VOCAB = 3, 2, 64, 320
PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.4, "logit_bias": {70: 2.0}},
]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(tiny_target(), tokenizer=byte_tokenizer())


def blocks(seed: int = 0) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Weight and bias of each head's layers."""
    return [
        [(drawn(HIDDEN, HIDDEN, seed=seed + 10 * head + layer), drawn(HIDDEN, seed=seed + 99 + 10 * head + layer))
         for layer in range(LAYERS)]
        for head in range(HEADS)
    ]  # fmt: skip


def outs() -> list[torch.Tensor]:
    return [drawn(VOCAB, HIDDEN, seed=500 + head) for head in range(HEADS)]


def by_the_paper(hidden: torch.Tensor, layers: Any, outs: list[torch.Tensor]) -> torch.Tensor:
    """Section 2.1.1 of 2401.10774: softmax(W2 (SiLU(W1 h) + h)), head by head, row by row: logits [B, heads, V]."""
    rows = []
    for row in hidden:
        heads = []
        for head, out in zip(layers, outs, strict=True):
            state = row
            for weight, bias in head:
                inner = weight @ state + (0 if bias is None else bias)
                state = state + inner * torch.sigmoid(inner)
            heads.append(out @ state)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def authors_tensors(prefix: str = "", own_outs: bool = True) -> dict[str, torch.Tensor]:
    made = {}
    for head, layers in enumerate(blocks()):
        for layer, (weight, bias) in enumerate(layers):
            made[f"{prefix}{head}.{layer}.linear.weight"], made[f"{prefix}{head}.{layer}.linear.bias"] = weight, bias
        if own_outs:
            made[f"{prefix}{head}.{LAYERS}.weight"] = outs()[head]
    return made


AUTHORS = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "someone/target"}
VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_heads": HEADS, "num_hidden_layers": LAYERS}  # fmt: skip


def vllm_tensors(prefix: str = "", bias: bool = False) -> dict[str, torch.Tensor]:
    made = {}
    for head, layers in enumerate(blocks()):
        for layer, (weight, offset) in enumerate(layers):
            made[f"{prefix}blocks.{head}.layers.{layer}.weight"] = weight
            if bias:
                made[f"{prefix}blocks.{head}.layers.{layer}.bias"] = offset
        made[f"{prefix}lm_heads.{head}.weight"] = outs()[head]
    return made


def checked(folder: Path, target: LoadedModel, layers: Any, matrices: list[torch.Tensor]) -> MedusaHeads:
    heads = load_medusa(folder, target)
    hidden = drawn(4, HIDDEN, seed=7) * 8
    wanted = by_the_paper(hidden, layers, matrices)
    assert torch.allclose(heads.logits(hidden), wanted, atol=1e-4)
    assert torch.allclose(heads.logits(hidden, 2), wanted[:, :2], atol=1e-4)
    return heads


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_the_authors_format_is_read(tmp_path: Path, target: LoadedModel, prefix: str) -> None:
    folder = write_head(tmp_path, AUTHORS, authors_tensors(prefix), FILE)
    assert checked(folder, target, blocks(), outs()).num_heads == HEADS


def test_heads_among_a_models_own_weights_are_read(tmp_path: Path, target: LoadedModel) -> None:
    tensors = authors_tensors("medusa_head.") | {"lm_head.weight": outs()[0], "model.norm.weight": torch.ones(HIDDEN)}
    checked(write_head(tmp_path, AUTHORS, tensors, "model.safetensors"), target, blocks(), outs())


def test_without_matrices_of_their_own_heads_use_the_targets(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, AUTHORS, authors_tensors(own_outs=False), FILE)
    head: Any = target.model.get_output_embeddings()
    checked(folder, target, blocks(), [head.weight] * HEADS)


def test_more_heads_than_the_config_counts_are_used(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, AUTHORS | {"medusa_num_heads": 2}, authors_tensors(), FILE)
    assert load_medusa(folder, target).num_heads == HEADS


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_vllms_format_is_read(tmp_path: Path, target: LoadedModel, prefix: str, bias: bool) -> None:
    config = VLLM | {"medusa_fc_bias": bias, "truncated_vocab_size": None, "logit_scale": 1.0}
    folder = write_head(tmp_path, config, vllm_tensors(prefix, bias), "model.safetensors")
    layers = blocks() if bias else [[(weight, None) for weight, _ in head] for head in blocks()]
    checked(folder, target, layers, outs())


def test_vllms_shared_matrix_and_scale_are_read(tmp_path: Path, target: LoadedModel) -> None:
    tensors = {key: one for key, one in vllm_tensors().items() if key not in ("lm_heads.1.weight", "lm_heads.2.weight")}
    config = VLLM | {"original_lm_head": True, "logit_scale": 0.5}
    folder = write_head(tmp_path, config, tensors, "model.safetensors")
    layers = [[(weight, None) for weight, _ in head] for head in blocks()]
    checked(folder, target, layers, [outs()[0] * 0.5] * HEADS)


@pytest.mark.parametrize("stored_short", [False, True])
def test_a_shortened_vocabulary_is_mapped_to_the_targets(
    tmp_path: Path, target: LoadedModel, stored_short: bool
) -> None:
    ids = torch.tensor([5, 3, 319, 0, 77, 250])
    tensors = vllm_tensors() | {"token_map": ids}
    if stored_short:
        tensors |= {f"lm_heads.{head}.weight": outs()[head][ids] for head in range(HEADS)}
    folder = write_head(tmp_path, VLLM | {"truncated_vocab_size": len(ids)}, tensors, "model.safetensors")
    hidden = drawn(4, HIDDEN, seed=7) * 8
    layers = [[(weight, None) for weight, _ in head] for head in blocks()]
    got, wanted = load_medusa(folder, target).logits(hidden), by_the_paper(hidden, layers, outs())
    assert torch.allclose(got[..., ids], wanted[..., ids], atol=1e-4)
    assert int(got.isfinite().sum(-1).max()) == len(ids)


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path, target: LoadedModel) -> None:
    write_head(tmp_path, AUTHORS, {}, FILE)
    (tmp_path / FILE).rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match=r"medusa_lm_head\.pt, a pickle.*weights_only=True.*lm_head\.safetensors"):
        load_medusa(tmp_path, target)


def test_a_pickle_on_the_hub_is_refused_with_the_way_out(
    tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(head_files, "download", lambda *_: tmp_path)
    monkeypatch.setattr(head_files, "hub_files", lambda *_: ["config.json", "medusa_lm_head.pt"])
    with pytest.raises(ModelLoadError, match=r"someone/heads holds medusa_lm_head\.pt.*'medusa_lm_head\.safetensors'"):
        load_medusa("someone/heads", target)


def test_medusa_heads_are_told_by_their_config() -> None:
    assert is_medusa(AUTHORS)
    assert is_medusa(VLLM)
    assert not is_medusa({"architectures": ["LlamaForCausalLM"]})
    assert not is_medusa({"architectures": None})


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (VLLM | {"hidden_size": 128}, vllm_tensors(), "hidden size 128, but .* has 64"),
        (VLLM | {"vocab_size": 32000}, vllm_tensors(), "vocabulary size 32000, but .* has 320"),
        (AUTHORS, {"0.0.linear.weight": torch.ones(32, 32), "0.1.weight": torch.ones(320, 32)}, "3 heads of 2 layers"),
        (AUTHORS | {"medusa_num_layers": 1}, authors_tensors(), "3 heads of 1 layers, .* 3 heads of 2 layers"),
        (AUTHORS | {"medusa_num_heads": "many"}, authors_tensors(), "'many'"),
        ({}, {"0.0.linear.weight": torch.ones(32, 32), "0.1.weight": torch.ones(320, 32)}, "hidden size 32"),
        ({}, {"0.0.linear.weight": torch.ones(64, 64), "0.1.weight": torch.ones(321, 64)}, "vocabulary size 321"),
        ({}, {"0.0.linear.weight": torch.ones(64, 64), "1.0.linear.weight": torch.ones(64, 64),
              "0.1.weight": torch.ones(320, 64)}, r"lacks the tensor 1\.1\.weight"),
        ({}, {"fc.weight": torch.ones(2, 2)}, r"holds no Medusa heads.*fc\.weight"),
        (VLLM | {"truncated_vocab_size": 6}, vllm_tensors(), "lacks the tensor token_map"),
        (VLLM | {"truncated_vocab_size": 2}, vllm_tensors() | {"token_map": torch.tensor([1, 320])},
         "ids from 1 to 320"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, target: LoadedModel, config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_medusa(write_head(tmp_path, config, tensors, FILE), target)


def test_missing_files_are_named(tmp_path: Path, target: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_medusa(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"medusa_lm_head\.safetensors or model\.safetensors"):
        load_medusa(tmp_path, target)
    (tmp_path / FILE).write_bytes(b"\x08\x00\x00")
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        load_medusa(tmp_path, target)
    with pytest.raises(ModelLoadError, match="no head at"):
        load_medusa(tmp_path / "nowhere", target)


# --- trees


def test_the_published_tree_is_whole_and_can_be_cut_anywhere() -> None:
    assert len(PUBLISHED_TREE) == len(set(PUBLISHED_TREE)) == 63
    assert max(map(len, PUBLISHED_TREE)) == 4
    assert PUBLISHED_TREE[:5] == ((0,), (0, 0), (1,), (0, 1), (2,))
    for place, path in enumerate(PUBLISHED_TREE):
        assert path[:-1] in ((), *PUBLISHED_TREE[:place])
    assert ordered_paths(PUBLISHED_TREE) == PUBLISHED_TREE


def test_beginnings_that_a_tree_lacks_are_added() -> None:
    assert ordered_paths([[1, 0], [0, 2, 1], [1]][:2]) == ((1,), (1, 0), (0,), (0, 2), (0, 2, 1))


def test_the_widest_tree_holds_all_ranks_and_is_cut_at_the_highest() -> None:
    assert set(widest_paths([2, 3])) == {(0,), (1,), *((one, two) for one in range(2) for two in range(3))}
    assert widest_paths([2, 3], 3) == ((0,), (1,), (0, 0))
    assert widest_paths([1, 1, 1]) == ((0,), (0, 0), (0, 0, 0))
    assert len(widest_paths([10, 10, 10])) == 63


def test_the_best_tree_is_expected_to_have_most_guesses_right() -> None:
    shares = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.0]]

    def worth(path: tuple[int, ...]) -> float:
        return float(torch.tensor([shares[depth][rank] for depth, rank in enumerate(path)]).prod())

    every = sorted(map(worth, widest_paths([3, 3, 3])), reverse=True)
    chosen = best_paths(shares, 12)
    assert torch.allclose(torch.tensor(list(map(worth, chosen))), torch.tensor(every[:12]))
    assert ordered_paths(chosen) == chosen
    assert len(best_paths(shares, 63)) == 39


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "4 deep, but only 3 places"),
        ([[320]], "rank 320, but the vocabulary has 320"),
        ([[rank] for rank in range(64)], "at most 63 guesses, got 64"),
        ([[0], [0]], r"\[0\] twice"),
        ([[-1]], "ranks from 0"),
        ([], "ranks from 0"),
    ],
)
def test_trees_that_cannot_be_are_refused(
    tmp_path: Path, target: LoadedModel, paths: list[list[int]], message: str
) -> None:
    heads = load_medusa(write_head(tmp_path, AUTHORS, authors_tensors(), FILE), target)
    with pytest.raises(ConfigError, match=message):
        MedusaDrafter(heads, paths)


# --- in an engine


def right_heads(model: Any, *, noise: float = 0.0, count: int = HEADS) -> MedusaHeads:
    """Heads that know what a cycle target says of its own words; with noise, their best guess is sometimes another."""
    out = model.get_output_embeddings().weight
    matrices = torch.zeros(count, *out.shape)
    for head in range(count):
        words = torch.arange(NUM_WORDS)
        matrices[head, following(words, head + 2)] = out[following(words)]
    matrices += torch.randn(matrices.shape, generator=torch.Generator().manual_seed(3)) * noise * out.std()
    nothing = torch.zeros(count, out.shape[1], out.shape[1])
    return MedusaHeads((nothing,), (), matrices, model.get_output_embeddings(), None, 1.0, len(out))


def medusa(model: Any, paths: Any = None, heads: MedusaHeads | None = None, **settings: Any) -> Any:
    given = right_heads(model) if heads is None else heads

    def make(site: Any) -> MedusaDrafter:
        site.runner.tap(last_hidden_tap(site.target))
        return MedusaDrafter(given, paths)

    return drafting(model, make, **settings)


@pytest.mark.parametrize("paths", [None, widest_paths([2, 2, 1])], ids=["chain", "tree"])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_right_heads_are_always_right(paths: Any, num_heads: int) -> None:
    model = cycle_target()
    prompts = [[following(first, step) for step in range(length)] for first, length in ((65, 1), (9, 5), (150, 20))]
    cut = None if paths is None else [path for path in paths if len(path) <= num_heads]
    with medusa(model, cut, right_heads(model, count=num_heads), lookahead=12) as llm:
        outputs = llm.generate(prompts, greedy_params(120, speculation=12))
        for prompt, one in zip(prompts, outputs, strict=True):
            assert list(one.token_ids) == [following(prompt[-1], step) for step in range(1, 121)]
            assert one.stats.acceptance_rate == 1.0
            assert one.stats.tokens_per_round > 0.9 * (num_heads + 1)


def test_a_tree_finds_what_a_chain_of_weak_heads_misses() -> None:
    model = cycle_target()
    weak = right_heads(model, noise=4.0)
    rates = {}
    for name, paths in (("chain", None), ("tree", widest_paths([5, 3, 2], 20))):
        with medusa(model, paths, weak, lookahead=20) as llm:
            outputs = llm.generate(PROMPTS, greedy_params(100, speculation=20))
            rates[name] = sum(one.stats.tokens_per_round for one in outputs) / len(outputs)
    assert 1.1 < rates["chain"] < 3.7
    assert rates["tree"] > rates["chain"] + 0.2


@pytest.mark.parametrize("paths", [None, widest_paths([3, 2, 1])], ids=["chain", "tree"])
@pytest.mark.parametrize("rules", [{}, {"top_p": 0.8}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}])
def test_guesses_are_drawn_with_the_targets_noise(paths: Any, rules: dict[str, Any]) -> None:
    """Of a target that thinks the same everywhere, heads know the distribution: all that is left is the noise."""
    model = cycle_target(sharpness=6.0)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[7].expand(VOCAB, -1))
        model.get_output_embeddings().weight[:NUM_WORDS].copy_(drawn(NUM_WORDS, HIDDEN, seed=1) * 2)
    head = model.get_output_embeddings()
    heads = MedusaHeads((torch.zeros(3, HIDDEN, HIDDEN),), (), None, head, None, 1.0, VOCAB)
    with medusa(model, paths, heads, lookahead=9) as llm:
        params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True, speculation=9, **rules)
        outputs = llm.generate(PROMPTS, params)
    assert len({token for one in outputs for token in one.token_ids}) > 20
    assert acceptance(outputs) == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("paths", [None, widest_paths([2, 1])], ids=["chain", "tree"])
def test_heads_run_on_kernels_too(paths: Any, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cycle_target(num_hidden_layers=1)
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=2, ignore_eos=True, speculation=3)
    with rounds_on_kernels(monkeypatch), medusa(model, paths, max_model_len=64, max_num_seqs=2) as llm:
        outputs = llm.generate([[72, 79, 86], [5, 6]], params)
        plain = llm.generate([[72, 79, 86], [5, 6]], params.but(speculation="off"))
        assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
        assert llm.engine.speculator.num_failures == 0
    assert acceptance(outputs) > 0.5


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("paths", [None, PUBLISHED_TREE], ids=["chain", "tree"])
def test_medusa_changes_no_token(verification: str, paths: Any) -> None:
    """Heads of no worth, right heads by luck: greedy text by any verifier, drawn text by the coupled one."""
    model = tiny_target()
    head = model.get_output_embeddings()
    layers = (torch.stack([drawn(HIDDEN, HIDDEN, seed=seed) for seed in range(4)]) * 0.3,)
    heads = MedusaHeads(layers, (), None, head, None, 1.0, VOCAB)
    with medusa(model, paths, heads, lookahead=9, verification=verification) as llm:
        for rules in RULES if verification == "coupled" else RULES[:1]:
            params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, **rules)
            wanted = [one.token_ids for one in llm.generate(PROMPTS, params.but(speculation="off"))]
            outputs = llm.generate(PROMPTS, params.but(speculation=9))
            assert [one.token_ids for one in outputs] == wanted
            assert sum(one.stats.drafted for one in outputs) > 0


@pytest.mark.filterwarnings("ignore:verification='typical' is lossy")
@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
def test_other_verifiers_accept_right_heads_too(verification: str) -> None:
    model = cycle_target()
    with medusa(model, widest_paths([2, 1, 1]), lookahead=4, verification=verification) as llm:
        params = SamplingParams(temperature=0.5, seed=3, max_tokens=60, ignore_eos=True, speculation=3)
        assert acceptance(llm.generate(PROMPTS, params)) > 0.9


def test_rows_of_all_kinds_come_and_go_together() -> None:
    model = cycle_target(sharpness=12.0)
    jobs = [
        (prompt, SamplingParams(max_tokens=30 + 7 * number, seed=number, ignore_eos=True, speculation=5, **rules))
        for number, (prompt, rules) in enumerate(zip(PROMPTS * 2, RULES * 2, strict=True))
    ]
    with medusa(model, PUBLISHED_TREE[:20], right_heads(model, noise=0.2, count=4), lookahead=6) as llm:
        plain = [(prompt, params.but(speculation="off")) for prompt, params in jobs]
        wanted = [group[0].output for group in generate_together(llm, plain)]
        assert [group[0].output for group in generate_staggered(llm, jobs)] == wanted


def test_preempted_rows_go_on_as_they_were() -> None:
    model = cycle_target(sharpness=12.0)
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=90, ignore_eos=True, speculation=6)
    with medusa(model, PUBLISHED_TREE, right_heads(model, count=4), lookahead=6) as llm:
        wanted = [one.token_ids for one in llm.generate(PROMPTS, params)]
    with medusa(model, PUBLISHED_TREE, right_heads(model, count=4), lookahead=6, kv_cache_bytes=350_000) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, params)] == wanted


@pytest.mark.parametrize("paths", [None, PUBLISHED_TREE[:12]], ids=["chain", "tree"])
@pytest.mark.parametrize("independent", [False, True])
def test_the_host_looks_at_nothing(paths: Any, independent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    propose = MedusaDrafter.propose

    def blind(self: MedusaDrafter, rows: Any, num_tokens: int) -> Any:
        with NoLooking():
            seen.append(propose(self, replace(rows, independent=independent), num_tokens))
        return seen[-1]

    monkeypatch.setattr(MedusaDrafter, "propose", blind)
    model = cycle_target()
    with medusa(model, paths, lookahead=12) as llm:
        for temperature in (0.0, 1.0):
            llm.generate(PROMPTS, greedy_params(20, speculation=12).but(temperature=temperature))
    assert any(int(made.lengths.max()) for made in seen)
    assert all(made.num_tokens == 12 or made.num_tokens < 12 for made in seen)
    assert all((made.probs is not None) == independent for made in seen)


def test_q_is_each_heads_distribution() -> None:
    model = cycle_target(sharpness=3.0)
    heads = right_heads(model, count=2)
    made: list[Any] = []
    propose = MedusaDrafter.propose

    class Kept(MedusaDrafter):
        def propose(self, rows: Any, num_tokens: int) -> Any:
            proposal = propose(self, rows, num_tokens)
            made.append((proposal, rows.tokens[0, : int(rows.lengths[0])].tolist()))
            return proposal

    def make(site: Any) -> MedusaDrafter:
        site.runner.tap(last_hidden_tap(site.target))
        return Kept(heads)

    with drafting(model, make, lookahead=2, verification="rejection") as llm:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, speculation=2)
        outputs = llm.generate([[65, 66]], params)
    text = [*outputs[0].prompt_token_ids, *outputs[0].token_ids]
    norm, rounds = model.model.norm, [one for one in made if one[1] == text[: len(one[1])]]
    assert len(rounds) > 8
    for proposal, seen in rounds:
        hidden = norm(model.model.embed_tokens(torch.tensor([seen[-2]])))
        wanted = F.softmax(heads.logits(hidden), -1)
        assert proposal.probs is not None
        assert torch.allclose(proposal.probs[0], wanted[0], atol=1e-5)
