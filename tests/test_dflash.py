"""Block drafters: read as published, computed as the paper says, and never a changed token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outrider.draft.dflash import BlockDrafter
from outrider.draft.fixed_tree import widest_paths
from outrider.engine.speculator import Speculator
from outrider.errors import ConfigError, ModelLoadError, UnsupportedModelError
from outrider.model.dflash import BlockDraft
from outrider.model.dflash_files import is_block_draft, load_block_draft
from outrider.model.load import LoadedModel, load_model
from outrider.sampling.params import SamplingParams
from tests.heads import NoLooking, acceptance, drafting, write_head
from tests.interpreter import rounds_on_kernels
from tests.scripted import generate_staggered, generate_together, greedy_params
from tests.tiny import byte_tokenizer, tiny_target

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, INNER, MASK = 64, 320, 4, 2, 16, 96, 300
PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
]
LAYERS = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
}
DFLASH = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 6,
    "num_target_layers": 3,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK},
    "layer_types": ["full_attention", "full_attention"],
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 16,
}
DSPARK = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "num_target_layers": 3,
    "target_layer_ids": [-1, 1],
    "mask_token_id": MASK,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "layer_types": ["full_attention", "full_attention"],
}


def target_model(**overrides: Any) -> Any:
    return tiny_target(num_hidden_layers=3, **overrides)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(target_model(), tokenizer=byte_tokenizer())


def tensors(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
    }  # fmt: skip
    for number in range(2):
        prefix = f"layers.{number}."
        sizes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{prefix}self_attn.q_norm.weight": (DIM,),
            f"{prefix}self_attn.k_norm.weight": (DIM,),
            f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    made = {}
    for number, (name, size) in enumerate((sizes | shapes).items()):
        noise = torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + number))
        made[name] = 1 + 0.1 * noise if len(size) == 1 else noise * 1.5 * size[-1] ** -0.5
    return made


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [.., T, H, D], number by number."""
    half = DIM // 2
    angles = positions[:, None].float() * 10000.0 ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def by_the_paper(
    weights: dict[str, torch.Tensor],
    context: torch.Tensor,
    block: torch.Tensor,
    causal: tuple[bool, bool] = (False, False),
    windows: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:
    """DFlash, section 4: [.., C, layers * hidden] of the target and embeddings [.., T, hidden] -> [.., T, hidden].

    Keys and values of the context come of its fused features in every layer, those of the block of its own states.
    """
    length, width = context.shape[-2], block.shape[-2]
    places = torch.arange(length + width)
    fused = normed(context @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    for number in range(2):
        own = {name.split(".", 2)[2]: one for name, one in weights.items() if name.startswith(f"layers.{number}.")}
        state = normed(block, own["input_layernorm.weight"])
        both = torch.cat([fused, state], -2)
        query, key, value = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for name, x in (("q", state), ("k", both), ("v", both))
        )
        query = turned(normed(query, own["self_attn.q_norm.weight"]), places[length:])
        key = turned(normed(key, own["self_attn.k_norm.weight"]), places)
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, -2).transpose(-2, -3) for one in (key, value))
        scores = query.transpose(-2, -3) @ key.mT * DIM**-0.5
        distance = places[length:, None] - places
        hidden = distance < 0 if causal[number] else torch.zeros_like(distance, dtype=torch.bool)
        if windows[number] is not None:
            hidden |= distance >= windows[number]  # type: ignore[operator]
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        block = block + out.transpose(-2, -3).flatten(-2) @ own["self_attn.o_proj.weight"].T
        state = normed(block, own["post_attention_layernorm.weight"])
        inner = F.silu(state @ own["mlp.gate_proj.weight"].T) * (state @ own["mlp.up_proj.weight"].T)
        block = block + inner @ own["mlp.down_proj.weight"].T
    return normed(block, weights["norm.weight"])


def features(model: Any, text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Outputs of the target's layers for all tokens but the last, [C, layers * hidden]."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0, :-1] for layer in layers], -1)


class Watched(BlockDraft):
    """A network that keeps what it was asked and what it said, over a cache where nothing unwritten may be read."""

    calls: list[tuple[torch.Tensor, torch.Tensor]]

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        for pool in [*self._cache.made.keys, *self._cache.made.values]:
            pool[16:] = torch.nan

    def guess(self, last: Any, places: Any, tables: Any, length: int, start: Any, num_tokens: int) -> torch.Tensor:
        logits = super().guess(last, places, tables, length, start, num_tokens)
        self.__dict__.setdefault("calls", []).append((places.clone(), logits))
        return logits


def engine(model: Any, folder: Path, paths: Any = None, **settings: Any) -> tuple[Any, list[Any]]:
    """An engine that drafts with the folder's drafter, and the networks that it made."""
    made: list[Any] = []

    def make(site: Any) -> BlockDrafter:
        network = load_block_draft(folder, site.target)
        network.__class__ = Watched
        site.runner.tap(network.tap)
        made.append(network)
        return BlockDrafter(network, paths)

    return drafting(model, make, **settings), made


@pytest.mark.parametrize("kind", ["full", "sliding", "causal", "non_causal_sliding"])
def test_logits_in_an_engine_are_the_papers(tmp_path: Path, kind: str) -> None:
    """Through prompts in chunks, rejections and lengths that differ from round to round."""
    config, causal, windows = DFLASH, (False, False), (None, None)
    if kind == "sliding":
        config, causal, windows = DFLASH | SLIDING, (True, False), (16, None)  # type: ignore[assignment]
    if kind == "causal":
        config, causal = DFLASH | {"is_causal": True}, (True, True)
    if kind == "non_causal_sliding":
        config, windows = DFLASH | SLIDING | {"is_causal": False}, (16, None)  # type: ignore[assignment]
    model, weights = target_model(), tensors()
    llm, networks = engine(model, write_head(tmp_path, config, weights, "model.safetensors"), prefill_chunk_size=16)
    with llm:
        prompt, seen = PROMPTS[3], []
        for length in (5, 2, 3, 1):
            networks[0].calls = []
            output = llm.generate([prompt], greedy_params(18, speculation=length))[0]
            seen.append(([*prompt, *output.token_ids], networks[0].calls))
    for text, calls in seen:
        assert text == seen[0][0]
        compare(model, text, calls, weights, causal, windows)


def compare(model: Any, text: list[int], calls: Any, weights: Any, causal: Any, windows: Any) -> None:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert len(calls) > 4
    for places, logits in calls:
        (place,) = places[:, 0].tolist()
        known = text[: place + 1]
        block = embedding[torch.tensor([known[-1], *[MASK] * logits.shape[1]])]
        wanted = by_the_paper(weights, features(model, known, (0, 1)), block, causal, windows)[1:] @ head.T
        assert torch.allclose(logits[0], wanted, atol=2e-3), (place, (logits[0] - wanted).abs().max())


def test_rows_of_a_batch_are_computed_alike(tmp_path: Path) -> None:
    model, weights = target_model(), tensors()
    llm, networks = engine(model, write_head(tmp_path, DFLASH, weights, "model.safetensors"))
    with llm:
        prompts = PROMPTS[1:]
        networks[0].calls = []
        outputs = llm.generate(prompts, greedy_params(12, speculation=4))
        texts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, outputs, strict=True)]
    seen = set()
    for places, logits in networks[0].calls:
        if len(places) != len(prompts):
            continue
        for row, text in enumerate(texts):
            place = int(places[row])
            if place + 1 > len(text) - 1:
                continue
            compare(
                model, text, [(places[row : row + 1], logits[row : row + 1])] * 5, weights, (False,) * 2, (None,) * 2
            )
            seen.add((row, place))
    assert len(seen) > 8


def test_later_values_of_the_config_are_used(tmp_path: Path, target: LoadedModel) -> None:
    inner = DFLASH["dflash_config"] | {  # type: ignore[operator]
        "block_size": 4, "output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0,
    }  # fmt: skip
    config = {key: one for key, one in DFLASH.items() if key != "block_size"} | {"dflash_config": inner}
    weights = tensors()
    network = load_block_draft(write_head(tmp_path, config, weights, "model.safetensors"), target)
    assert network.settings.num_guesses == 3
    network.allocate(4)
    tables, last = torch.tensor([[2, 3]]), torch.tensor([[70]])
    got = network.guess(last, torch.zeros_like(last), tables, 1, None, 3)
    model: Any = target.model
    block = model.get_input_embeddings().weight[torch.tensor([70, MASK, MASK, MASK])] * 2.0
    hidden = by_the_paper(weights, torch.zeros(0, 2 * HIDDEN), block)[1:]
    wanted = torch.tanh(hidden @ model.get_output_embeddings().weight.T * 0.5 / 3.0) * 3.0
    assert torch.allclose(got[0], wanted, atol=1e-4)


def dspark_tensors() -> dict[str, torch.Tensor]:
    return tensors(3) | {
        "embed_tokens.weight": tensors(7, e=(VOCAB, HIDDEN))["e"],
        "lm_head.weight": tensors(8, e=(VOCAB, HIDDEN))["e"] * 3,
        "markov_head.markov_w1.weight": tensors(9, e=(VOCAB, 8))["e"],
        "markov_head.markov_w2.weight": tensors(10, e=(VOCAB, 8))["e"] * 3,
        "confidence_head.proj.weight": torch.ones(1, HIDDEN + 8),
        "confidence_head.proj.bias": torch.zeros(1),
    }


def test_dspark_guesses_are_its_authors(tmp_path: Path) -> None:
    """The first place guesses the next token, and each is corrected by the one before it."""
    model, weights = target_model(), dspark_tensors()
    llm, _ = engine(model, write_head(tmp_path, DSPARK, weights, "model.safetensors"), lookahead=5)
    made = []
    with llm, pytest.MonkeyPatch.context() as patch:
        propose = BlockDrafter.propose

        def kept(self: BlockDrafter, rows: Any, num_tokens: int) -> Any:
            length = int(rows.lengths[0])
            made.append((rows.tokens[0, :length].tolist(), propose(self, rows, num_tokens)))
            return made[-1][1]

        patch.setattr(BlockDrafter, "propose", kept)
        output = llm.generate([PROMPTS[1]], greedy_params(20, speculation=5))[0]
    text = [*PROMPTS[1], *output.token_ids]
    rounds = [(known, one) for known, one in made if known == text[: len(known)] and len(known) > 4]
    assert len(rounds) > 4
    for known, proposal in rounds:
        count = int(proposal.lengths[0])
        assert count == min(5, len(text) - len(known) - 1) or count == 5
        block = weights["embed_tokens.weight"][torch.tensor([known[-1], *[MASK] * (count - 1)])]
        base = by_the_paper(weights, features(model, known, (-1, 1)), block) @ weights["lm_head.weight"].T
        previous, wanted = known[-1], []
        for logits in base:
            bias = weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][previous]
            previous = int((logits + bias).argmax())
            wanted.append(previous)
        assert proposal.tokens[0, :count].tolist() == wanted


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_speculators_format_is_read(tmp_path: Path, target: LoadedModel, kind: str) -> None:
    short = 40
    ids = torch.arange(short) * 7 + 3
    config = {
        "speculators_model_type": kind,
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "transformer_layer_config": LAYERS | {"model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        "block_size": 6,
        "draft_vocab_size": short,
        "markov_rank": 8 if kind == "dspark" else None,
    }
    weights = tensors() | {
        "lm_head.weight": tensors(8, e=(short, HIDDEN))["e"],
        "d2t": ids - torch.arange(short),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    if kind == "dspark":
        weights |= {name: one for name, one in dspark_tensors().items() if "w1" in name}
        weights["markov_head.markov_w2.weight"] = tensors(10, e=(short, 8))["e"]
    network = load_block_draft(write_head(tmp_path, config, weights, "model.safetensors"), target)
    assert network.settings.target_layers == (0, 2)
    assert network.tap.layers == (1, 3)
    assert network.settings.num_guesses == (5 if kind == "dflash" else 6)
    network.allocate(4)
    last = torch.tensor([[70]])
    logits = network.guess(last, torch.zeros_like(last), torch.tensor([[2, 3]]), 1, None, 5)
    assert logits.shape == (1, 5, short)
    scores = network.corrected(logits[:, :1], last)
    wanted = logits[0, 0]
    if kind == "dspark":
        wanted = wanted + weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][70]
    assert torch.allclose(scores[0, 0, ids], wanted, atol=1e-5)
    assert int(scores.isfinite().sum()) == short


# --- errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 128}, ModelLoadError, "hidden size 128, but .* has 64"),
        ({"vocab_size": 400}, ModelLoadError, "vocabulary size 400, but .* has 320"),
        ({"num_target_layers": 36}, ModelLoadError, "layers 36, but .* has 3"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 1}}, ModelLoadError, r"\[0, 3\], but .* 3;"),
        ({"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 320}}, ModelLoadError, "320 rows"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, ModelLoadError, "no mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1}}, ModelLoadError, "no target_layer_ids"),
        ({"block_size": 80}, ModelLoadError, "1 to 63, .* got 80"),
        ({"intermediate_size": 80}, ModelLoadError, r"mlp\.gate_proj\.weight has the shape \[96, 64\], but \[80, 64\]"),
        ({"num_hidden_layers": 3, "layer_types": None}, ModelLoadError, r"lacks the tensor layers\.2\."),
        ({"hidden_size": "wide"}, ModelLoadError, "does not describe Qwen3 layers"),
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedModelError, "DFlash2DraftModel"),
        ({"architectures": ["KimiK3DSparkModel"]}, UnsupportedModelError, "KimiK3DSparkModel"),
        ({"model_type": "llama"}, UnsupportedModelError, "type llama"),
        ({"markov_rank": 8}, UnsupportedModelError, "Markov head"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"}, UnsupportedModelError, "'gated'"),
        ({"projector_type": "domino"}, UnsupportedModelError, "'domino'"),
        ({"rope_is_neox_style": False}, UnsupportedModelError, "neighbouring"),
        ({"add_swa_attention_sink_bias": True}, UnsupportedModelError, "add_swa_attention_sink_bias"),
    ],
)  # fmt: skip
def test_drafters_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, target: LoadedModel, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_head(tmp_path, DFLASH | changes, tensors(), "model.safetensors")
    with pytest.raises(error, match=message):
        load_block_draft(folder, target)


def test_a_pickle_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, DFLASH, tensors(), "model.safetensors")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"mask_embedding\.pt is a pickle"):
        load_block_draft(folder, target)
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin, a pickle"):
        load_block_draft(folder, target)


def test_a_block_drafter_is_told_by_its_config() -> None:
    assert is_block_draft(DFLASH)
    assert is_block_draft(DSPARK)
    assert is_block_draft({"speculators_model_type": "dflash"})
    assert is_block_draft({"architectures": ["DFlash2DraftModel"]})
    assert not is_block_draft(LAYERS | {"architectures": ["Qwen3ForCausalLM"]})


def test_a_tree_deeper_than_the_block_is_refused(tmp_path: Path, target: LoadedModel) -> None:
    network = load_block_draft(write_head(tmp_path, DFLASH, tensors(), "model.safetensors"), target)
    with pytest.raises(ConfigError, match="6 deep, but only 5 places"):
        BlockDrafter(network, [[0] * 6])


# --- in an engine


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize(("config", "paths"), [(DFLASH, None), (DFLASH | SLIDING, widest_paths([3, 2, 2, 1], 12)),
                                               (DSPARK, None)], ids=["chain", "tree", "dspark"])  # fmt: skip
def test_block_drafters_change_no_token(tmp_path: Path, verification: str, config: dict[str, Any], paths: Any) -> None:
    weights = dspark_tensors() if config is DSPARK else tensors()
    folder = write_head(tmp_path, config, weights, "model.safetensors")
    llm, _ = engine(target_model(), folder, paths, lookahead=8, verification=verification)
    with llm:
        for rules in RULES if verification == "coupled" else RULES[:1]:
            params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True, **rules)
            wanted = [one.token_ids for one in llm.generate(PROMPTS, params.but(speculation="off"))]
            outputs = llm.generate(PROMPTS, params.but(speculation=8))
            assert [one.token_ids for one in outputs] == wanted
            assert sum(one.stats.drafted for one in outputs) > 0


PERIOD = 4


@cache
def periodic() -> tuple[Any, dict[str, torch.Tensor]]:
    """A target that says 0, 1, 2, 3, 0, ... and a drafter that was taught to guess it."""
    model = target_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)))
        model.model.norm.weight.fill_(1.0)
        head.zero_()
        head[(torch.arange(PERIOD) + 1) % PERIOD] = F.normalize(embedding[:PERIOD]) * 4
    weights = {name: one.clone().requires_grad_() for name, one in tensors().items()}
    steps = torch.optim.Adam(weights.values(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(150):
        length = int(torch.randint(6, 40, (1,), generator=generator))
        texts = (torch.arange(length + 5) + torch.arange(PERIOD)[:, None]) % PERIOD
        with torch.no_grad():
            states = model(input_ids=texts[:, :length], output_hidden_states=True).hidden_states
        context = torch.cat([states[layer + 1][:, :-1] for layer in (0, 1)], -1)
        block = F.embedding(F.pad(texts[:, length - 1 : length], (0, 5), value=MASK), embedding)
        logits = by_the_paper(weights, context, block)[:, 1:] @ head.T
        loss = F.cross_entropy(logits.flatten(0, 1), texts[:, length:].flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
    return model, {name: one.detach() for name, one in weights.items()}


PERIODIC_PROMPTS = [[0, 1, 2, 3, 0, 1, 2], [(place + 2) % PERIOD for place in range(30)], [1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize("paths", [None, widest_paths([2, 2, 1, 1, 1])], ids=["chain", "tree"])
def test_a_taught_drafter_is_right(tmp_path: Path, paths: Any) -> None:
    model, weights = periodic()
    llm, _ = engine(model, write_head(tmp_path, DFLASH, weights, "model.safetensors"), paths, lookahead=12)
    with llm:
        for prompts in (PERIODIC_PROMPTS, PERIODIC_PROMPTS[:1]):
            outputs = llm.generate(prompts, greedy_params(60, speculation=12))
            for prompt, one in zip(prompts, outputs, strict=True):
                assert list(one.token_ids) == [(prompt[-1] + step) % PERIOD for step in range(1, 61)]
                assert one.stats.acceptance_rate > 0.9
                assert one.stats.tokens_per_round > 4


def test_a_taught_drafter_is_right_on_kernels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = periodic()
    folder = write_head(tmp_path, DFLASH, weights, "model.safetensors")
    with rounds_on_kernels(monkeypatch):
        llm, _ = engine(model, folder, lookahead=5, max_model_len=64, max_num_seqs=2)
        with llm:
            outputs = llm.generate(PERIODIC_PROMPTS[:2], greedy_params(6, speculation=5))
            assert llm.engine.speculator.num_failures == 0
    for prompt, one in zip(PERIODIC_PROMPTS, outputs, strict=False):
        assert list(one.token_ids) == [(prompt[-1] + step) % PERIOD for step in range(1, 7)]
    assert acceptance(outputs) > 0.8


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_drawn_guesses_of_a_taught_drafter_are_accepted(tmp_path: Path, verification: str) -> None:
    model, weights = periodic()
    folder = write_head(tmp_path, DFLASH, weights, "model.safetensors")
    llm, _ = engine(model, folder, lookahead=5, verification=verification)
    with llm:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, speculation=5)
        assert acceptance(llm.generate(PERIODIC_PROMPTS, params)) > 0.8


def test_what_was_not_drafted_for_is_caught_up(tmp_path: Path) -> None:
    """Rows that went on plainly for long, then draft; and preempted ones."""
    model, weights = periodic()
    folder = write_head(tmp_path, DFLASH, weights, "model.safetensors")
    params = greedy_params(70, speculation=5)
    jobs = [(prompt, params) for prompt in PERIODIC_PROMPTS * 2]
    llm, _ = engine(model, folder, lookahead=5)
    with llm:
        plain = [(prompt, params.but(speculation="off")) for prompt, _ in jobs]
        wanted = [group[0].output for group in generate_together(llm, plain)]
        groups = generate_staggered(llm, jobs)
        assert [group[0].output for group in groups] == wanted
        assert sum(group[0].stats.accepted for group in groups) > 200
    llm, _ = engine(model, folder, lookahead=5, kv_cache_bytes=340_000)
    with llm:
        before = llm.engine.scheduler.num_preemptions
        groups = generate_together(llm, jobs)
        assert llm.engine.scheduler.num_preemptions > before
        assert [group[0].output for group in groups] == wanted
        assert sum(group[0].stats.accepted for group in groups) > 200


def test_rows_that_rested_are_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that goes on plainly for a while leaves a gap in the drafter's cache."""
    whole = Speculator._most
    rests = range(60, 85)
    monkeypatch.setattr(Speculator, "_most", lambda *args: 0 if len(args[1]) in rests else whole(*args))
    model, weights = target_model(), tensors()
    llm, networks = engine(model, write_head(tmp_path, DFLASH, weights, "model.safetensors"))
    with llm:
        networks[0].calls = []
        output = llm.generate([PROMPTS[3]], greedy_params(64, speculation=4))[0]
    places = [int(one[0]) for one, _ in networks[0].calls]
    assert min(places) < 58
    assert max(places) > 86
    assert not set(places) & set(range(59, 84))
    compare(model, [*PROMPTS[3], *output.token_ids], networks[0].calls, weights, (False, False), (None, None))


def test_a_round_keeps_up_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt nothing is to be caught up, however much a round adds: captured rounds could not wait."""
    model, weights = periodic()
    fed: list[tuple[int, ...]] = []
    catch_up = BlockDrafter.catch_up
    monkeypatch.setattr(
        BlockDrafter, "catch_up", lambda self, rows, counts: (fed.append(counts), catch_up(self, rows, counts))
    )
    llm, _ = engine(model, write_head(tmp_path, DFLASH, weights, "model.safetensors"), lookahead=5)
    with llm:
        output = llm.generate(PERIODIC_PROMPTS[1:2], greedy_params(60, speculation=5))[0]
    assert output.stats.tokens_per_round > 5
    assert sum(map(sum, fed)) == len(PERIODIC_PROMPTS[1]) - 1 - 6


def test_a_gap_is_not_forgotten(tmp_path: Path, target: LoadedModel) -> None:
    """Where a round was made in spite of a gap, the gap is still to be filled."""
    drafter = BlockDrafter(load_block_draft(write_head(tmp_path, DFLASH, tensors(), "model.safetensors"), target))
    assert drafter.missing(0, 100) == 99 - 6
    drafter.commit((0,), (100,), (3,))
    assert drafter.missing(0, 104) == 103 - 6
    drafter.commit((1,), (7,), (5,))
    assert drafter.missing(1, 13) == 0
    assert drafter.missing(1, 14) == 1
    drafter.release(1)
    assert drafter.missing(1, 13) == 6


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("paths", [None, widest_paths([2, 2, 2])], ids=["chain", "tree"])
def test_the_host_looks_at_nothing(
    tmp_path: Path, independent: bool, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    propose = BlockDrafter.propose

    def blind(self: BlockDrafter, rows: Any, num_tokens: int) -> Any:
        with NoLooking():
            seen.append(propose(self, replace(rows, independent=independent), num_tokens))
        return seen[-1]

    monkeypatch.setattr(BlockDrafter, "propose", blind)
    llm, _ = engine(target_model(), write_head(tmp_path, DSPARK, dspark_tensors(), "model.safetensors"), paths)
    with llm:
        llm.generate(PROMPTS, greedy_params(8, speculation=4).but(temperature=1.0))
    assert seen
    assert all((made.probs is not None) == independent for made in seen)
