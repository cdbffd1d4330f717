"""Native MTP modules: read from a model's own checkpoint, computed as published, and never a changed token."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from outrider.draft.eagle import EagleDrafter
from outrider.draft.tree import TreeShape
from outrider.errors import ConfigError, ModelLoadError, UnsupportedModelError
from outrider.model.features import FeatureTap, last_hidden_tap, unchanged
from outrider.model.head_files import HeadFiles
from outrider.model.load import load_model
from outrider.model.mtp import has_mtp, load_mtp
from outrider.sampling.params import SamplingParams
from tests.heads import acceptance, cycle_target, drafting, following
from tests.scripted import greedy_params
from tests.tiny import tiny_target

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, INNER = 64, 320, 4, 2, 16, 128
PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
]
MIMO = {
    "prefix": "model.mtp_layers.0.", "embedding": "token_layernorm", "hidden": "hidden_layernorm",
    "joint": "input_proj", "norm": "final_layernorm",
}  # fmt: skip
DEEPSEEK = {
    "prefix": "model.layers.2.", "embedding": "enorm", "hidden": "hnorm", "joint": "eh_proj",
    "norm": "shared_head.norm",
}  # fmt: skip


def tiny_qwen2() -> Any:
    from transformers import Qwen2Config

    from tests.tiny import _SHAPE, _SPECIAL, _build

    return _build(Qwen2Config(**{**_SHAPE, **_SPECIAL, "tie_word_embeddings": False}), seed=4, std=0.6)


def parts(biases: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a dense layer's weights."""
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if biases:
        sizes |= {f"self_attn.{name}_proj.bias": (count * DIM,) for name, count in zip("qkv", (4, 2, 2), strict=True)}
    return sizes


def module(names: dict[str, str], sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A random MTP module, by its names without prefix."""
    sizes = sizes | {
        f"{names['embedding']}.weight": (HIDDEN,),
        f"{names['hidden']}.weight": (HIDDEN,),
        f"{names['norm']}.weight": (HIDDEN,),
        f"{names['joint']}.weight": (HIDDEN, 2 * HIDDEN),
    }
    made = {}
    for number, (name, size) in enumerate(sizes.items()):
        noise = torch.randn(size, generator=torch.Generator().manual_seed(number))
        made[name] = 1 + 0.1 * noise if "norm" in name else noise * 1.5 * size[-1] ** -0.5
    return made


def write(folder: Path, model: Any, names: dict[str, str], weights: dict[str, torch.Tensor], **config: Any) -> Path:
    """A model's checkpoint with an MTP module in it."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = model.config.to_dict() | {"architectures": [type(model).__name__]} | config
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = {name: one.clone() for name, one in model.state_dict().items()}
    tensors |= {names["prefix"] + name: one.contiguous().clone() for name, one in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, H, D] at the places 0 to T - 1."""
    half = DIM // 2
    angles = torch.arange(len(x))[:, None].float() * 10000.0 ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def as_published(
    weights: dict[str, torch.Tensor], names: dict[str, str], features: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """2412.19437, section 2.2, equations 21 to 23, for [T, hidden] of places 0 to T - 1: what the head is given."""
    hidden = normed(features, weights[f"{names['hidden']}.weight"])
    embedded = normed(embedded, weights[f"{names['embedding']}.weight"])
    pair = [hidden, embedded] if names is MIMO else [embedded, hidden]
    state = torch.cat(pair, -1) @ weights[f"{names['joint']}.weight"].T
    taken = normed(state, weights["input_layernorm.weight"])
    query, key, value = (
        (taken @ weights[f"self_attn.{name}_proj.weight"].T + weights.get(f"self_attn.{name}_proj.bias", 0)).unflatten(
            -1, (-1, DIM)
        )
        for name in "qkv"
    )
    query, key = turned(query), turned(key)
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * DIM**-0.5
    future = torch.ones(len(state), len(state), dtype=torch.bool).triu(1)
    out = torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
    state = state + out.flatten(1) @ weights["self_attn.o_proj.weight"].T
    taken = normed(state, weights["post_attention_layernorm.weight"])
    inner = F.silu(taken @ weights["mlp.gate_proj.weight"].T) * (taken @ weights["mlp.up_proj.weight"].T)
    return normed(state + inner @ weights["mlp.down_proj.weight"].T, weights[f"{names['norm']}.weight"])


def chain(
    model: Any, weights: dict[str, torch.Tensor], names: dict[str, str], text: list[int], count: int
) -> list[int]:
    """Greedy guesses after a text: everything anew for each, true states where the target has seen the token."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        features = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1]
    tokens, guesses = text[1:], []
    for _ in range(count):
        out = as_published(weights, names, features, embedding[torch.tensor(tokens)])[-1]
        guesses.append(int((out @ head.T).argmax()))
        tokens, features = [*tokens, guesses[-1]], torch.cat([features, out[None]])
    return guesses


def engine(source: Any, shape: TreeShape | None = None, lookahead: int = 4, **settings: Any) -> Any:
    def make(site: Any) -> EagleDrafter:
        head = load_mtp(site.target)
        site.runner.tap(head.tap)
        return EagleDrafter(head, lookahead, shape, "mtp")

    return drafting(source, make, lookahead=lookahead, **settings)


KINDS = {"mimo": (tiny_qwen2, MIMO, True), "deepseek": (tiny_target, DEEPSEEK, False)}


@cache
def of_kind(kind: str) -> tuple[Any, dict[str, str], dict[str, torch.Tensor]]:
    make, names, biases = KINDS[kind]
    return make(), names, module(names, parts(biases))


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_in_an_engine_are_the_published_ones(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, names, weights = of_kind(kind)
    made = []
    propose = EagleDrafter.propose

    def kept(self: EagleDrafter, rows: Any, num_tokens: int) -> Any:
        known = [tokens[:length] for tokens, length in zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True)]
        proposal = propose(self, rows, num_tokens)
        made.extend(zip(known, proposal.tokens.tolist(), strict=True))
        return proposal

    monkeypatch.setattr(EagleDrafter, "propose", kept)
    with engine(write(tmp_path, model, names, weights), prefill_chunk_size=16) as llm:
        prompts = [PROMPTS[1], PROMPTS[3]]
        texts = []
        for length in (4, 2):
            outputs = llm.generate(prompts, greedy_params(12, speculation=length))
            texts += [[*prompt, *one.token_ids] for prompt, one in zip(prompts, outputs, strict=True)]
    rounds = [(known, guesses) for known, guesses in made if any(known == text[: len(known)] for text in texts)]
    assert len(rounds) > 20
    for known, guesses in rounds:
        if len(known) > 4:
            assert guesses == chain(model, weights, names, known, len(guesses))


def test_logits_are_the_published_ones(tmp_path: Path) -> None:
    for kind in KINDS:
        model, names, weights = of_kind(kind)
        loaded = load_model(write(tmp_path / kind, model, names, weights))
        head = load_mtp(loaded)
        head.allocate(6)
        features = torch.randn(1, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
        tokens = torch.arange(20)[None] * 11 % 256
        hidden = head.forward(tokens, features, torch.arange(20)[None], torch.tensor([[2, 3]]), 20)
        wanted = as_published(weights, names, features[0], model.get_input_embeddings().weight[tokens[0]])
        assert torch.allclose(hidden[0], wanted, atol=1e-4)
        assert torch.allclose(head.logits(hidden)[0], wanted @ model.get_output_embeddings().weight.T, atol=1e-3)


def tiny_experts() -> Any:
    from transformers import Glm4MoeConfig

    from tests.tiny import _SHAPE, _SPECIAL, _build

    experts = {
        "head_dim": DIM, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    config = Glm4MoeConfig(**{**_SHAPE, **_SPECIAL, "tie_word_embeddings": False, **experts})
    return _build(config, seed=4, std=0.4)


def experts_module(model: Any) -> dict[str, torch.Tensor]:
    """A GLM-4.5 module: experts one by one, and copies of embedding and head, as published."""
    made = module(DEEPSEEK, {})
    for number, (name, one) in enumerate(model.model.layers[-1].state_dict().items()):
        noise = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 + number))
        weight = 1 + 0.1 * noise if "layernorm" in name else noise * one.shape[-1] ** -0.5
        if "mlp.experts.gate_up_proj" in name:
            for expert, both in enumerate(weight):
                made[f"mlp.experts.{expert}.gate_proj.weight"], made[f"mlp.experts.{expert}.up_proj.weight"] = (
                    both.chunk(2)
                )
        elif "mlp.experts.down_proj" in name:
            made |= {f"mlp.experts.{expert}.down_proj.weight": matrix for expert, matrix in enumerate(weight)}
        else:
            made[name] = weight
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return made | {"embed_tokens.weight": shared[0], "shared_head.head.weight": shared[1]}


def test_a_module_with_experts_computes_what_transformers_does(tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this transformers runs no MTP modules")
    model = tiny_experts()
    stored = experts_module(model)
    head = load_mtp(load_model(write(tmp_path, model, DEEPSEEK, stored, num_nextn_predict_layers=1)))
    head.allocate(6)
    features = torch.randn(1, 20, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens, places = torch.arange(20)[None] * 11 % 256, torch.arange(20)[None]
    got = head.forward(tokens, features, places, torch.tensor([[2, 3]]), 20)

    last, config = model.model.layers[-1], model.config.get_mtp_config()
    theirs = layers.MtpLayer(config, type(last), type(last.input_layernorm), 0)
    weights = {f"mtp_block.{name}": one for name, one in stored.items() if not name.startswith("mlp.experts.")}
    weights |= {f"{name}.weight": stored[f"{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
    weights["post_norm.weight"] = stored["shared_head.norm.weight"]
    parts = [
        [stored[f"mlp.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down")] for number in range(4)
    ]
    weights["mtp_block.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
    weights["mtp_block.mlp.experts.down_proj"] = torch.stack([part[2] for part in parts])
    theirs.load_state_dict({name: weights[name] for name in theirs.state_dict()})
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        future = torch.full((20, 20), -torch.inf).triu(1)[None, None]
        angles = model.model.rotary_emb(embedded, position_ids=places)
        wanted = theirs(embedded, features, angles, future, places, None)
    assert torch.allclose(got, wanted, atol=1e-4)


# --- errors


def test_models_without_a_module_are_refused(tmp_path: Path) -> None:
    model = tiny_target()
    folder = write(tmp_path, model, DEEPSEEK, {})
    assert not has_mtp(HeadFiles(folder))
    with pytest.raises(ModelLoadError, match="hold no MTP module"):
        load_mtp(load_model(folder))
    with pytest.raises(ModelLoadError, match="was not loaded from files"):
        load_mtp(load_model(model))


@pytest.mark.parametrize(
    ("prefix", "extra", "error", "message"),
    [
        ("mtp.", {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}, UnsupportedModelError, r"not read \(mtp\.fc\.weight\)"),
        ("model.layers.2.", {"mlp.experts.0.weight_scale_inv": torch.ones(1)}, UnsupportedModelError, "quantised"),
        ("model.layers.2.", {"self_attn.indexer.weight": torch.ones(1)}, UnsupportedModelError, r"indexer\.weight"),
        ("model.layers.2.", {"eh_proj.weight": torch.ones(HIDDEN, HIDDEN)}, ModelLoadError, r"shape \[64, 64\]"),
        ("model.layers.2.", {"enorm.weight": None}, ModelLoadError, r"lacks the tensor model\.layers\.2\.enorm"),
        ("model.layers.2.", {"mlp.up_proj.weight": None}, ModelLoadError, r"model\.layers\.2\.mlp\.up_proj"),
    ],
)
def test_modules_that_cannot_be_run_are_refused_by_name(
    tmp_path: Path, prefix: str, extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, names, weights = of_kind("deepseek")
    weights = {} if prefix == "mtp." else dict(weights)
    weights = {name: one for name, one in (weights | extra).items() if one is not None}
    folder = write(tmp_path, model, names | {"prefix": prefix}, weights)
    assert has_mtp(HeadFiles(folder)) == (prefix != "mtp.")
    with pytest.raises(error, match=message):
        load_mtp(load_model(folder))


def test_a_target_of_mixed_layers_is_refused(tmp_path: Path) -> None:
    from tests.tiny import tiny_family

    model = tiny_family("qwen2")
    names = MIMO
    weights = {"input_proj.weight": torch.ones(32, 64)}
    with pytest.raises(UnsupportedModelError, match="full_attention, sliding_attention"):
        load_mtp(load_model(write(tmp_path, model, names, weights)))


# --- in an engine


def right_module(model: Any) -> dict[str, torch.Tensor]:
    """A module for a cycle target that passes on the embedding of the token that it is told."""
    made = module(DEEPSEEK, parts(biases=False))
    made = {name: torch.ones_like(one) if "norm" in name else torch.zeros_like(one) for name, one in made.items()}
    made["eh_proj.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    return made


@pytest.mark.parametrize("shape", [None, TreeShape((2, 1, 1)), TreeShape()], ids=["chain", "branches", "dynamic"])
def test_a_right_module_is_always_right(tmp_path: Path, shape: TreeShape | None) -> None:
    model = cycle_target()
    with engine(write(tmp_path, model, DEEPSEEK, right_module(model)), shape, lookahead=6) as llm:
        outputs = llm.generate(PROMPTS[1:], greedy_params(60, speculation=6))
        for prompt, one in zip(PROMPTS[1:], outputs, strict=True):
            assert list(one.token_ids) == [following(prompt[-1], step) for step in range(1, 61)]
            assert one.stats.acceptance_rate == 1.0
            assert one.stats.tokens_per_round > 3


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_drawn_guesses_of_a_right_module_are_accepted(tmp_path: Path, verification: str) -> None:
    model = cycle_target(sharpness=8.0)
    folder = write(tmp_path, model, DEEPSEEK, right_module(model))
    with engine(folder, verification=verification) as llm:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, speculation=4)
        assert acceptance(llm.generate(PROMPTS[1:], params)) > 0.99


@pytest.mark.parametrize("kind", [*KINDS, "experts"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_modules_change_no_token(tmp_path: Path, kind: str, verification: str) -> None:
    if kind == "experts":
        model = tiny_experts()
        folder = write(tmp_path, model, DEEPSEEK, experts_module(model), num_nextn_predict_layers=1)
    else:
        folder = write(tmp_path, *of_kind(kind))
    shape = TreeShape() if kind == "mimo" else None
    with engine(folder, shape, lookahead=6, verification=verification) as llm:
        for rules in RULES if verification == "coupled" else RULES[:1]:
            params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, **rules)
            wanted = [one.token_ids for one in llm.generate(PROMPTS, params.but(speculation="off"))]
            outputs = llm.generate(PROMPTS, params.but(speculation=6))
            assert [one.token_ids for one in outputs] == wanted
            assert sum(one.stats.drafted for one in outputs) > 0


def test_heads_that_read_the_same_share_what_is_kept(tmp_path: Path) -> None:
    model, names, weights = of_kind("deepseek")
    with engine(write(tmp_path, model, names, weights)) as llm:
        runner = llm.engine.runner
        runner.tap(last_hidden_tap(llm.loaded))  # as Medusa heads beside it would
        with pytest.raises(ConfigError, match="different hidden states"):
            runner.tap(FeatureTap((0,), HIDDEN, unchanged))
