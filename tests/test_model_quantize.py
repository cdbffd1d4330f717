"""The packed and quantised linear layers: right values, and rows that do not influence each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.quantize import Int4Linear, Int8Linear, PackedLinear, pack, packable, quantize

DTYPES = [torch.float32, torch.bfloat16]
ROW_COUNTS = (2, 3, 6, 8, 16)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def weights(out_features: int, in_features: int, dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    weight = (torch.randn(out_features, in_features) * 0.05).to(dtype)
    return weight, torch.randn(out_features).to(dtype) if bias else None


def build(kind: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
    if kind == "packed":
        if not packable(weight.dtype):
            pytest.skip(f"this processor has no {weight.dtype} weights packed: they stay as they are")
        return PackedLinear(weight, bias)
    made = quantize(weight, bias, kind)  # type: ignore[arg-type]
    assert isinstance(made, nn.Module), made
    return made


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "bound"), [("packed", 4e-3), ("int8", 2e-2), ("int4", 0.12)])
def test_product_is_near_the_plain_one(kind: str, bound: float, dtype: torch.dtype, bias: bool) -> None:
    weight, offset = weights(96, 128, dtype, bias)
    layer = build(kind, weight, offset)
    x = torch.randn(2, 5, 128).to(dtype)
    got = layer(x)
    assert got.shape == (2, 5, 96)
    assert got.dtype == dtype
    assert relative_error(got, F.linear(x.float(), weight.float(), None if offset is None else offset.float())) < bound


@pytest.mark.parametrize("shape", [(96, 64), (64, 1536), (2048, 2048)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_row_has_the_same_bits_among_any_number_of_rows(
    kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Packed bf16 does not promise this: on a CPU with AMX the bits change between 2 and 16 rows."""
    layer = build(kind, *weights(*shape, dtype))
    x = torch.randn(16, shape[1]).to(dtype)
    expected = layer(x)
    for rows in ROW_COUNTS:
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows
    assert torch.equal(layer(x[:1]), expected[:1]), "a single row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["packed", "int8", "int4"])
def test_a_row_has_the_same_bits_at_any_place_and_beside_any_others(kind: str, dtype: torch.dtype) -> None:
    layer = build(kind, *weights(96, 128, dtype))
    row = torch.randn(1, 128).to(dtype)
    expected = layer(row.expand(2, -1))[0]
    for place in range(8):
        x = (torch.randn(8, 128) * 1000).to(dtype)
        x[place] = row
        assert torch.equal(layer(x)[place], expected), place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["packed", "int8", "int4"])
def test_strided_input_and_no_rows(kind: str, dtype: torch.dtype) -> None:
    layer = build(kind, *weights(32, 64, dtype))
    wide = torch.randn(1, 4, 128).to(dtype)
    assert torch.equal(layer(wide[..., :64]), layer(wide[..., :64].contiguous()))
    assert layer(wide[:, :0, :64]).shape == (1, 0, 32)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_and_groups_of_zeros_stay_finite(kind: str) -> None:
    weight, _ = weights(32, 64, torch.float32)
    weight[3] = 0
    weight[:, :32] = 0
    layer = build(kind, weight, None)
    out = layer(torch.stack([torch.zeros(64), torch.randn(64)]))
    assert out.isfinite().all()
    assert not out[0].any()
    assert out[:, 3].abs().max() < 1e-6


def test_int4_reproduces_weights_that_are_on_its_grid() -> None:
    steps = torch.randint(0, 16, (32, 64)).float()
    steps[:, ::32], steps[:, 1::32] = 0, 15  # every group spans the whole range
    weight = (steps - 8) * 0.25
    layer = Int4Linear(weight, None, 32)
    assert torch.allclose(layer(torch.eye(64)).t(), weight, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "shape", "named"),
    [("int4", (24, 64), "24"), ("int4", (32, 48), "48"), ("int8", (32, 30), "30")],
)
def test_a_shape_that_does_not_fit_is_answered_with_the_reason(kind: str, shape: tuple[int, int], named: str) -> None:
    reason = quantize(*weights(*shape, torch.float32), kind)  # type: ignore[arg-type]
    assert isinstance(reason, str)
    assert named in reason


def test_pack_refuses_dtypes_onednn_does_not_take() -> None:
    assert pack(*weights(8, 8, torch.float64)) is None
    assert isinstance(pack(*weights(8, 8, torch.float32)), PackedLinear)


def test_quantised_weights_take_the_memory_they_should() -> None:
    weight, _ = weights(64, 128, torch.float32, bias=False)
    int8, int4 = Int8Linear(weight, None), Int4Linear(weight, None, 32)
    assert int8.weight.numel() * int8.weight.element_size() == 64 * 128
    assert int4.codes.numel() * int4.codes.element_size() == 64 * 128 // 2
