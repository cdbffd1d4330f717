"""EAGLE heads: read as published, computed as the papers say at every round, and never a changed token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.draft.eagle import EagleDrafter
from outrider.draft.tree import TreeShape
from outrider.errors import ConfigError, ModelLoadError
from outrider.llm import LLM
from outrider.model.eagle_files import is_eagle, load_eagle
from outrider.model.load import load_model
from outrider.proposal import ROOT, Proposal
from outrider.sampling.params import SamplingParams
from tests.eagle_checkpoints import FORMATS, Written, greedy_chain, write
from tests.scripted import generate_staggered, greedy_params
from tests.tiny import byte_tokenizer, save, tiny_target

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]


def with_head(made: Written, target: Any, **settings: Any) -> LLM:
    settings = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4} | settings
    return LLM(target, str(made.folder), method="eagle", **settings)


def watched(llm: LLM) -> list[tuple[list[list[int]], Proposal]]:
    """Note what each round's rows said, and what was guessed."""
    seen: list[Any] = []
    drafter = llm.engine.drafter
    assert isinstance(drafter, EagleDrafter)
    propose = drafter.propose

    def noting(rows: Any, num_tokens: int) -> Proposal:
        texts = [row[:length].tolist() for row, length in zip(rows.tokens, rows.lengths.tolist(), strict=True)]
        made = propose(rows, num_tokens)
        seen.append((texts, made))
        return made

    drafter.propose = noting  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_guesses_what_the_paper_says_round_by_round(kind: str, tmp_path: Path) -> None:
    """B05, B17: each round's chain is that of a fresh pass over true features, whatever was refused before."""
    target = tiny_target()
    made = write(kind, tmp_path / "head", target)
    with with_head(made, target) as llm:
        seen = watched(llm)
        outputs = llm.generate(PROMPTS[:3], greedy_params(30, speculation=4))
        assert [one.token_ids for one in outputs] == [
            one.token_ids for one in llm.generate(PROMPTS[:3], greedy_params(30, "off"))
        ]
    checked = 0
    for texts, proposal in seen[::3]:
        for text, guesses, length in zip(texts, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True):
            if len(text) == 1:
                assert length == 0  # nothing was fed yet
                continue
            assert guesses == greedy_chain(made, tiny_target(), text, len(guesses))
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("tree", [None, "auto", "3x2x1"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_change_no_token(kind: str, tree: str | None, tmp_path: Path) -> None:
    made = write(kind, tmp_path / "head", tiny_target())
    with with_head(made, tiny_target(), tree=tree, num_speculative_tokens=9) as llm:
        for one in (
            {"temperature": 0},
            {"temperature": 1.0},
            {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5},
        ):
            params = SamplingParams(max_tokens=28, ignore_eos=True, seed=3, **one)
            wanted = [output.token_ids for output in llm.generate(PROMPTS, params.but(speculation="off"))]
            for length in (1, 4, 9):
                outputs = llm.generate(PROMPTS, params.but(speculation=length))
                assert [output.token_ids for output in outputs] == wanted
            group = generate_staggered(llm, [(prompt, params.but(speculation=9)) for prompt in PROMPTS])
            assert [tuple(samples[0].output) for samples in group] == wanted
        assert llm.engine.speculator.num_failures == 0
        assert llm.engine.figures.drafted > 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("tree", [None, "auto"])
def test_other_verifiers_give_the_greedy_text(verification: str, tree: str | None, tmp_path: Path) -> None:
    """M07: q is over the head's own ids alone."""
    made = write("eagle3", tmp_path / "head", tiny_target())
    with with_head(made, tiny_target(), verification=verification, tree=tree) as llm:
        seen = watched(llm)
        wanted = llm.generate(PROMPTS, greedy_params(30, "off"))
        outputs = llm.generate(PROMPTS, greedy_params(30, speculation=4))
        assert [one.token_ids for one in outputs] == [one.token_ids for one in wanted]
        llm.generate(PROMPTS, SamplingParams(max_tokens=20, seed=2, speculation=4, ignore_eos=True))
    for _, proposal in seen:
        assert proposal.probs is not None
        outside = [token for token in range(320) if token not in (made.ids or ())]
        assert float(proposal.probs[..., outside].sum()) == 0
        assert torch.allclose(proposal.probs.sum(-1), torch.ones(proposal.tokens.shape))


def copying(folder: Path, target: Any) -> Written:
    """A head that passes the feature on: it guesses what the target's head makes of the feature itself."""
    made = write("eagle", folder, target)
    hidden = target.config.hidden_size
    made.tensors["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        made.tensors[name].zero_()
    made.save()
    return made


def steady_target() -> Any:
    """A target that, whatever the text, says the same token again and again: its features stay what they are."""
    target = tiny_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight.copy_(
            target.model.embed_tokens.weight[:1].expand_as(target.model.embed_tokens.weight)
        )
    return target


@pytest.mark.parametrize("tree", [None, "auto"])
def test_a_head_that_is_always_right_is_always_accepted(tree: str | None, tmp_path: Path) -> None:
    """B01: acceptance 1.0 at every place, for 300 tokens."""
    made = copying(tmp_path / "head", steady_target())
    with with_head(made, steady_target(), tree=tree, max_num_seqs=2, num_speculative_tokens=5) as llm:
        for params in (
            greedy_params(300, speculation=5),
            SamplingParams(max_tokens=300, seed=1, ignore_eos=True, speculation=5),
        ):
            output = llm.generate([[65, 66]], params)[0]
            assert output.stats.acceptance_rate == 1.0
            assert output.stats.rounds <= (51 if tree is None else 160)


def test_a_head_catches_up_after_rounds_without_it_and_after_preemption(tmp_path: Path) -> None:
    made = write("eagle3", tmp_path / "head", tiny_target())
    jobs = [
        (prompt, greedy_params(60, speculation)) for prompt, speculation in zip(PROMPTS, (4, "off", 9, 4), strict=True)
    ]
    with with_head(made, tiny_target(), kv_cache_bytes=16 * 12 * 1024, prefill_chunk_size=16) as llm:
        seen = watched(llm)
        generate_staggered(llm, jobs)
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.speculator.num_failures == 0
    for texts, proposal in seen[::7]:
        for text, guesses, length in zip(texts, proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True):
            if length:
                assert guesses == greedy_chain(made, tiny_target(), text, len(guesses))


def test_what_a_round_left_out_is_not_counted_as_cached(tmp_path: Path) -> None:
    """A chain in place of a tree may commit more than the next window holds, before the host knows of it."""
    head = load_eagle(
        write("eagle3", tmp_path / "head", tiny_target()).folder, load_model(tiny_target(), tokenizer=byte_tokenizer())
    )
    drafter = EagleDrafter(head, 8, TreeShape((2,)))
    drafter.commit((0,), (3,), (8,))
    assert drafter.missing(0, 3) == 0
    missing = drafter.missing(0, 12)
    assert missing > 0
    drafter.commit((0,), (12,), (0,))
    assert drafter.missing(0, 12) == missing


def test_dynamic_trees_hold_the_likeliest_paths(tmp_path: Path) -> None:
    made = write("eagle3 whole", tmp_path / "head", tiny_target())
    with with_head(made, tiny_target(), tree="auto", num_speculative_tokens=24) as llm:
        seen = watched(llm)
        llm.generate([PROMPTS[2]], greedy_params(20, speculation=24))
    for texts, proposal in seen[:4]:
        width = proposal.num_tokens
        if width < 24:
            continue
        parents = proposal.parents_or_chain()[0].tolist()
        assert len({(parent, token) for parent, token in zip(parents, proposal.tokens[0].tolist(), strict=True)}) == 24
        chain = greedy_chain(made, tiny_target(), texts[0], 1)
        assert chain[0] in [
            token for token, parent in zip(proposal.tokens[0].tolist(), parents, strict=True) if parent == ROOT
        ]
        assert int(proposal.positions_guessed()) > 1


def test_u01_what_a_head_lacks_is_the_targets_where_it_fits(tmp_path: Path) -> None:
    target = tiny_target()
    made = write("eagle3 whole", tmp_path / "head", target)
    for name in ("lm_head.weight", "norm.weight"):
        del made.tensors[name]
    made.save()
    head = load_eagle(made.folder, load_model(target, tokenizer=byte_tokenizer()))
    assert head.weights["norm"].equal(target.model.norm.weight)
    hidden = torch.randn(1, 1, 64)
    expected = target.get_output_embeddings()(target.model.norm(hidden))
    assert torch.allclose(head.logits(hidden), expected, atol=1e-5)


def test_u02_a_heads_own_matrix_and_embedding_are_used(tmp_path: Path) -> None:
    target = tiny_target()
    made = write("eagle3 whole", tmp_path / "head", target)
    made.tensors["embed_tokens.weight"] = torch.randn(320, 64)
    made.save()
    head = load_eagle(made.folder, load_model(target, tokenizer=byte_tokenizer()))
    assert head.embed(torch.tensor([[7]]))[0, 0].equal(made.tensors["embed_tokens.weight"][7])
    assert not torch.allclose(head.logits(torch.ones(1, 1, 64)), target.get_output_embeddings()(torch.ones(1, 1, 64)))


def _drop(name: str) -> Any:
    return lambda made: made.tensors.pop(name)


def _replace(name: str, tensor: torch.Tensor) -> Any:
    return lambda made: made.tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("eagle3", _drop("lm_head.weight"), "lacks lm_head.weight"),
        ("eagle3", _drop("midlayer.mlp.up_proj.weight"), "lacks midlayer.mlp.up_proj.weight"),
        ("eagle", _drop("fc.weight"), "lacks fc.weight"),
        ("eagle", _replace("fc.weight", torch.zeros(64, 192)), "hidden states of"),
        ("eagle3", _replace("fc.weight", torch.zeros(64, 3 * 96)), "hidden states of"),
        ("eagle3", _replace("d2t", torch.full((64,), 999)), "d2t leads to ids"),
        ("eagle3", _replace("lm_head.weight", torch.zeros(32, 64)), "do not belong together"),
        ("eagle", _replace("layers.0.mlp.router.weight", torch.zeros(2)), "layers.0.mlp.router.weight"),
        ("eagle", _replace("embed_tokens.weight", torch.zeros(100, 64)), "embeds 100 ids"),
    ],
    ids=("matrix", "layer", "joining", "narrow", "other width", "map", "short matrix", "unknown", "short embedding"),
)
def test_heads_that_do_not_fit_are_refused_by_name(kind: str, damage: Any, message: str, tmp_path: Path) -> None:
    made = write(kind, tmp_path / "head", tiny_target())
    damage(made)
    made.save()
    with pytest.raises(ModelLoadError, match=message):
        load_eagle(made.folder, load_model(tiny_target(), tokenizer=byte_tokenizer()))


def test_layers_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    made = write("speculators eagle3", tmp_path / "head", tiny_target())
    made.config["eagle_aux_hidden_state_layer_ids"] = [2, 16, 29]
    made.save()
    with pytest.raises(ModelLoadError, match="2 layers"):
        load_eagle(made.folder, load_model(tiny_target(), tokenizer=byte_tokenizer()))


def test_a_pickle_is_refused_with_the_remedy(tmp_path: Path) -> None:
    made = write("eagle", tmp_path / "head", tiny_target())
    (made.folder / "model.safetensors").rename(made.folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickle"):
        load_eagle(made.folder, load_model(tiny_target(), tokenizer=byte_tokenizer()))


def test_heads_are_known_by_their_config(tmp_path: Path) -> None:
    target = save(tiny_target(), byte_tokenizer(), tmp_path / "target")
    for kind in ("eagle3", "speculators eagle"):
        made = write(kind, tmp_path / kind.replace(" ", "-"), tiny_target())
        assert is_eagle(made.config)
        with LLM(str(target), str(made.folder), dtype="float32", device="cpu", max_num_seqs=2) as llm:
            assert llm.engine.drafter is not None
            assert llm.engine.drafter.name == "eagle"


def test_trees_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="84 guesses"):
        TreeShape((4, 4, 4))
    made = write("eagle", tmp_path / "head", tiny_target())
    with pytest.raises(ConfigError, match="84 guesses"):
        with_head(made, tiny_target(), tree="4x4x4")
