"""`optimize` on tiny models of many families: same output, fewer modules, nothing kept twice."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.errors import ConfigError
from outrider.model.fuse import GatedMLP, RMSNorm, SharedProduct, SharedProductPart, describe, optimize
from outrider.model.quantize import PackedLinear, packable

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLDER: dict[str, Any] = {
    key: LLAMA_LIKE[key] for key in LLAMA_LIKE if key not in ("num_key_value_heads", "head_dim", "intermediate_size")
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": LLAMA_LIKE,
    "Mistral": LLAMA_LIKE,
    "Qwen2": LLAMA_LIKE,
    "Qwen3": LLAMA_LIKE,
    "Qwen3Moe": LLAMA_LIKE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "Gemma": LLAMA_LIKE,
    "Gemma2": LLAMA_LIKE,
    "Gemma3Text": LLAMA_LIKE,
    "Phi3": LLAMA_LIKE,
    "Olmo2": LLAMA_LIKE,
    "GPTNeoX": OLDER | {"intermediate_size": 96},
    "GPT2": OLDER | {"n_inner": 96},
    "OPT": OLDER | {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
TOKENS = torch.arange(2, 11)[None]


def make(family: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model with weights large enough, and norms uneven enough, for mistakes to show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(3)
    return model.requires_grad_(False)


def logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits.float()  # type: ignore[no-any-return]


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_optimised_models_give_the_same_logits(family: str, dtype: torch.dtype, bound: float) -> None:
    model = make(family, dtype)
    expected = logits(model)
    optimize(model)
    assert difference(logits(model), expected) < bound
    left = {"Linear", "Conv1D"} & {*describe(model).counts}
    assert bool(left) != packable(dtype)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.05), ("int4", 0.4)])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Gemma2", "GPT2", "OPT"])
def test_quantised_models_stay_near(family: str, kind: Any, bound: float) -> None:
    model = make(family)
    expected = logits(model)
    optimize(model, quantization=kind)
    assert 0 < difference(logits(model), expected) < bound
    assert describe(model).counts[f"{kind.capitalize()}Linear"] >= 6
    assert isinstance(model.get_output_embeddings(), PackedLinear), "the head stays as precise as it was"


def test_what_a_llama_becomes() -> None:
    model = make()
    optimize(model)
    assert describe(model).counts == {"SharedProduct": 2, "GatedMLP": 2, "RMSNorm": 5, "PackedLinear": 9}


def test_without_fusion_every_layer_is_only_packed() -> None:
    model = make()
    expected = logits(model)
    optimize(model, fuse=False)
    assert describe(model).counts == {"PackedLinear": 15}
    assert difference(logits(model), expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_and_many_rows_agree_bit_for_bit_outside_attention(dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    optimize(model)
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    x = torch.randn(1, 16, 64).to(dtype)
    with torch.no_grad():
        expected = mlp(norm(x))
        for rows in (1, 2, 3, 6, 8):
            assert torch.equal(mlp(norm(x[:, :rows])), expected[:, :rows])


def test_tied_embedding_stays_and_the_originals_are_freed() -> None:
    model = make(tie_word_embeddings=True)
    old = [weakref.ref(p) for name, p in model.named_parameters() if name.endswith("proj.weight")]
    embedding = model.get_input_embeddings().weight
    expected = logits(model)
    optimize(model)
    gc.collect()
    assert isinstance(model.lm_head, PackedLinear)
    assert model.get_input_embeddings().weight is embedding
    assert difference(logits(model), expected) < 2e-6
    assert len(old) == 14
    assert not any(reference() is not None for reference in old)


def test_expert_weights_and_router_are_left_alone() -> None:
    model = make("Qwen3Moe")
    before = model.model.layers[1].mlp
    optimize(model)
    assert model.model.layers[1].mlp is before
    assert isinstance(model.model.layers[0].mlp, GatedMLP)


def test_shared_product_is_right_in_any_order_and_for_different_inputs() -> None:
    torch.manual_seed(0)
    shared = SharedProduct([nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(8, 4)])
    parts = [SharedProductPart(shared, index, 8) for index in range(3)]
    one, two = torch.randn(2, 8), torch.randn(2, 8)
    with torch.no_grad():
        for x, index in [(one, 2), (one, 0), (two, 1), (one, 1), (one, 1), (two, 0), (two, 2)]:
            expected = shared.product(x).split(shared.sizes, -1)[index]
            assert torch.equal(parts[index](x), expected)


def test_shared_product_sees_an_input_changed_in_place_between_two_steps() -> None:
    shared = SharedProduct([nn.Linear(8, 4), nn.Linear(8, 4)])
    parts = [SharedProductPart(shared, index, 8) for index in range(2)]
    x = torch.randn(1, 8)
    with torch.inference_mode():
        for _ in range(3):
            expected = shared.product(x).split(4, -1)
            assert all(torch.equal(part(x), want) for part, want in zip(parts, expected, strict=True))
            x.mul_(2)


def test_a_shared_product_runs_once_a_step() -> None:
    model = make()
    optimize(model)
    calls = []
    for module in model.modules():
        if isinstance(module, SharedProduct):
            module.product.register_forward_hook(lambda *_: calls.append(1))
    logits(model)
    assert len(calls) == 2


class OddNorm(nn.Module):
    """Named like the usual norm, but not computing it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True) * self.weight


OddNorm.__name__ = "OddRMSNorm"


class OddMLP(nn.Module):
    """Has the usual children, but clamps the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj, self.act_fn = nn.Linear(96, 64, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=0.1)) * self.up_proj(x))  # type: ignore[no-any-return]


def test_modules_that_only_look_right_are_left_alone() -> None:
    model = make()
    model.model.norm, model.model.layers[0].mlp = OddNorm(), OddMLP().eval()
    model.requires_grad_(False)
    expected = logits(model)
    optimize(model)
    assert isinstance(model.model.norm, OddNorm)
    assert isinstance(model.model.layers[0].mlp, OddMLP)
    assert isinstance(model.model.layers[0].mlp.gate_proj, SharedProductPart)  # joining them is right all the same
    assert isinstance(model.model.layers[1].input_layernorm, RMSNorm)
    assert difference(logits(model), expected) < 2e-6


def test_a_layer_with_a_hook_keeps_it() -> None:
    model = make()
    seen: list[int] = []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: seen.append(1))
    optimize(model)
    logits(model)
    assert seen == [1]


def test_layers_that_do_not_fit_int4_are_packed_and_named() -> None:
    model = make(intermediate_size=72)  # 72 is no multiple of 32: down_proj; 2 * 72 is one of 16: gate and up fit
    optimize(model, quantization="int4")
    found = describe(model)
    assert set(found.unquantised) == {f"model.layers.{layer}.mlp.down_proj" for layer in range(2)}
    assert "72" in found.unquantised["model.layers.0.mlp.down_proj"]
    assert found.counts["PackedLinear"] == 2 + 1  # and the head


@pytest.mark.parametrize(
    ("quantization", "changes", "named"),
    [
        ("int5", {}, "int5"),
        ("int4", {"dtype": torch.float64}, "float64"),
        ("int4", {"hidden_size": 40, "head_dim": 10, "intermediate_size": 40}, "int4"),
    ],
)
def test_quantization_that_cannot_be_is_refused_with_value_and_remedy(
    quantization: Any, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        optimize(make(**changes), quantization=quantization)


def test_quantization_off_the_cpu_is_refused_and_training_mode_too() -> None:
    with pytest.raises(ConfigError, match="meta"):
        optimize(make().to("meta"), quantization="int8")
    with pytest.raises(ConfigError, match=r"eval\(\)"):
        optimize(make().train())
