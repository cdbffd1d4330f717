"""A product with its neighbours fused in gives what the parts give, and its rows know nothing of each other."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from outrider.errors import ConfigError
from outrider.kernels.launch import runs_kernels
from outrider.kernels.products import Product, gate_reference, product_reference, silu_mul, tune
from outrider.kernels.tiles import Tiles, bucket_of, candidates, default_tiles
from outrider.kernels.weights import store
from tests.interpreter import mended_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(not runs_kernels(torch.empty(0, device=DEVICE)), reason="no Triton here")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    if DEVICE.type == "cuda" or not runs_kernels(torch.empty(0)):
        yield
        return
    with mended_interpreter():
        yield


def _random(*shape, dtype=BF16, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, dtype)


def _case(rows, outputs, inputs, *, dtype=BF16, norm_dtype=None):
    """x, weight, bias, norm weight."""
    weight = _random(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    norm = 1 + _random(inputs, dtype=norm_dtype or dtype, seed=3, scale=0.1)
    return _random(rows, inputs, dtype=dtype), weight, _random(outputs, dtype=dtype, seed=2), norm


def _assert_close(got, expected, roundings=3):
    """Within some roundings of the largest element."""
    bound = (
        roundings * torch.finfo(got.dtype if got.dtype != torch.float32 else BF16).eps * expected.float().abs().max()
    )
    assert got.shape == expected.shape
    assert (got.float() - expected.float()).abs().max() <= bound


def _counters():
    from outrider.kernels.jit.launch_products import _scratch

    return _scratch[DEVICE if DEVICE.type == "cpu" else torch.device("cuda", 0)][1]


# --- what it computes


@pytest.mark.parametrize(
    ("bias", "norm", "gated", "residual"),
    list(itertools.product([False, True], [False, True], [False, True], [False, True])),
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_every_combination_agrees_with_its_parts(bias, norm, gated, residual, dtype):
    x, weight, offset, scale = _case(3, 144, 272, dtype=dtype)
    offset, norm = offset if bias else None, (scale, 1e-5) if norm else None
    product = Product(weight, offset, norm=norm, gated=gated)
    other = _random(3, product.out_features, dtype=dtype, seed=4) if residual else None
    activation = "silu" if gated else None
    expected = product_reference(x, weight, offset, other, norm=norm, activation=activation)
    _assert_close(product(x, other), expected)


@pytest.mark.parametrize("rows", [1, 2, 6, 16, 17, 33, 100, 128, 130])
def test_any_number_of_rows(rows):
    x, weight, bias, scale = _case(rows, 96, 136)
    residual = _random(rows, 96, seed=4)
    got = Product(weight, bias, norm=(scale, 1e-6))(x, residual)
    _assert_close(got, product_reference(x, weight, bias, residual, norm=(scale, 1e-6)))


@pytest.mark.parametrize("tiles", [Tiles(16, 32), Tiles(32, 64, split_k=3), Tiles(64, 128, split_k=2)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 333), (2, 65), (64, 256)])
def test_sizes_that_no_tile_divides(tiles, gated, outputs, inputs):
    if not tiles.fits(outputs, inputs):
        pytest.skip("some programs would have nothing to do")
    x, weight, bias, scale = _case(20, outputs, inputs)
    product = Product(weight, bias, norm=(scale, 1e-5), gated=gated)
    if not product.runs_kernel:
        pytest.skip("no Triton here")
    product.reserve([tiles])
    expected = product_reference(x, weight, bias, norm=(scale, 1e-5), activation="silu" if gated else None)
    _assert_close(product.by_kernel(x, None, tiles), expected)


def test_the_library_agrees_with_the_reference():
    x, weight, bias, scale = _case(9, 64, 96)
    residual = _random(9, 64, seed=4)
    for offset, other in itertools.product((None, bias), (None, residual)):
        product = Product(weight, offset, norm=(scale, 1e-5))
        _assert_close(product.by_library(x, other), product_reference(x, weight, offset, other, norm=(scale, 1e-5)))


def test_half_precision_with_large_numbers_stays_finite():
    x, weight, _, scale = _case(2, 64, 128, dtype=torch.float16)
    x = x * 20000
    got = Product(weight, norm=(scale * 8, 1e-5))(x)
    _assert_close(got, product_reference(x, weight, norm=(scale * 8, 1e-5)))


def test_a_wide_norm_weight_is_multiplied_in_before_rounding():
    x, weight, _, scale = _case(5, 64, 128, norm_dtype=torch.float32)
    _assert_close(Product(weight, norm=(scale, 1e-6))(x), product_reference(x, weight, norm=(scale, 1e-6)))


def test_logits_can_be_wider_than_the_weights():
    x, weight, _, scale = _case(4, 100, 128)
    got = Product(weight, norm=(scale, 1e-6), out_dtype=torch.float32)(x)
    expected = product_reference(x, weight, norm=(scale, 1e-6), out_dtype=torch.float32)
    assert got.dtype == torch.float32
    _assert_close(got, expected)


def test_gelu_gates_too():
    x, weight, _, _ = _case(4, 64, 128)
    _assert_close(Product(weight, gated="gelu_tanh")(x * 3), product_reference(x * 3, weight, activation="gelu_tanh"))


def test_rows_may_be_strided():
    x, weight, _, scale = _case(6, 64, 128)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    product = Product(weight, norm=(scale, 1e-5))
    residual = _random(6, 192, seed=4)
    assert product(wide[:, :128], residual[:, 64:128]).equal(product(x, residual[:, 64:128].contiguous()))
    assert product(wide[:1, :128]).equal(product(x[:1]))


def test_the_gate_has_a_kernel_of_its_own():
    both = _random(5, 2 * 1100)
    for activation in ("silu", "gelu_tanh"):
        _assert_close(silu_mul(both, activation), gate_reference(both, activation), roundings=1)
    assert silu_mul(both[:, 100:300]).equal(silu_mul(both[:, 100:300].contiguous()))


# --- what rows may know of each other


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_bits_of_a_row_do_not_depend_on_how_many_share_the_call(quantization):
    x, weight, bias, scale = _case(16, 64, 512)
    product = Product(weight, bias, norm=(scale, 1e-5), gated=True, quantization=quantization)
    residual = _random(16, 32, seed=4)
    whole = product(x, residual)
    assert product(x[:6], residual[:6]).equal(whole[:6])
    assert product(x[5:6], residual[5:6]).equal(whole[5:6])


@needs_kernels
@pytest.mark.parametrize("split", [1, 3])
def test_a_nan_stays_in_its_row(split):
    x, weight, _, scale = _case(6, 64, 384)
    product = Product(weight, norm=(scale, 1e-5))
    tiles = Tiles(32, 128, split_k=split)
    product.reserve([tiles])
    clean = product.by_kernel(x, None, tiles)
    x[2, 7] = torch.nan
    got = product.by_kernel(x, None, tiles)
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4, 5]].equal(clean[[0, 1, 3, 4, 5]])


@needs_kernels
def test_programs_that_share_a_tile_leave_their_counter_at_zero_and_repeat_themselves():
    x, weight, bias, scale = _case(4, 64, 256)
    product = Product(weight, bias, norm=(scale, 1e-5))
    tiles = Tiles(32, 64, split_k=4)
    product.reserve([tiles])
    first = product.by_kernel(x, None, tiles)
    assert not _counters().any()
    assert product.by_kernel(x, None, tiles).equal(first)
    _assert_close(first, product_reference(x, weight, bias, norm=(scale, 1e-5)))


# --- quantised weights


@pytest.mark.parametrize(("quantization", "bound"), [("fp8", 0.04), ("int8", 0.01), ("int4", 0.11)])
def test_a_quantised_weight_is_near_the_original(quantization, bound):
    weight = _random(70, 200, scale=0.05)
    stored = store(weight, quantization)
    rounded = torch.cat([chunk for _, chunk in stored.chunks()])
    assert (rounded - weight).float().norm() <= bound * weight.float().norm()
    assert stored.num_bytes < weight.numel() * (1.1 if quantization == "int4" else 1.1 + 4 / 200)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "inputs", "dtype"), [(3, 256, BF16), (20, 200, BF16), (2, 128, torch.float16), (130, 96, BF16)]
)
def test_a_quantised_product_is_that_of_its_dequantised_weight(quantization, rows, inputs, dtype):
    x, weight, bias, scale = _case(rows, 80, inputs, dtype=dtype)
    product = Product(weight, bias, norm=(scale, 1e-5), gated=True, quantization=quantization)
    rounded = torch.cat([chunk for _, chunk in store(weight, quantization).chunks()])
    residual = _random(rows, 40, dtype=dtype, seed=4)
    expected = product_reference(x, rounded, bias, residual, norm=(scale, 1e-5), activation="silu")
    _assert_close(product(x, residual), expected, roundings=4)


def test_a_row_of_zeros_can_be_quantised():
    weight = torch.zeros(16, 128, dtype=BF16, device=DEVICE)
    for quantization in ("fp8", "int8", "int4"):
        assert not Product(weight, quantization=quantization)(_random(2, 128)).any()


# --- choices


def test_what_a_product_cannot_take_is_refused_by_name():
    weight = _random(15, 32)
    with pytest.raises(ConfigError, match="int3"):
        Product(weight, quantization="int3")
    with pytest.raises(ConfigError, match="relu"):
        Product(weight, gated="relu")
    with pytest.raises(ConfigError, match="15 rows"):
        Product(weight, gated=True)
    with pytest.raises(ConfigError, match="float64"):
        Product(weight.double())


def test_rows_up_to_sixteen_share_one_bucket():
    assert {bucket_of(rows) for rows in range(1, 17)} == {16}
    assert [bucket_of(rows) for rows in (17, 64, 128, 129)] == [32, 64, 128, None]


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (128256, 2048), (576, 1536), (8, 64)])
def test_every_program_of_every_candidate_has_something_to_do(quantization, outputs, inputs):
    for rows in (16, 32, 64, 128):
        choices = candidates(outputs, inputs, rows, quantization)
        assert choices[0] == default_tiles(outputs, inputs, rows, quantization)
        assert all(tiles.fits(outputs, inputs) for tiles in choices)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (2048, 8192), (1152, 576)])
def test_real_shapes_on_a_card_before_and_after_tuning(quantization, outputs, inputs):
    product_of = {}
    for rows in (1, 6, 16, 24, 64, 100):
        x, weight, _, scale = _case(rows, outputs, inputs)
        product = product_of.setdefault(0, Product(weight, norm=(scale, 1e-5), gated=True, quantization=quantization))
        rounded = torch.cat([chunk for _, chunk in product.weight.chunks()])
        expected = product_reference(x, rounded, norm=(scale, 1e-5), activation="silu")
        _assert_close(product(x), expected)
        tune([(product, False)], [rows])
        _assert_close(product(x), expected)
        assert product(x[:1]).equal(product(x[:1].clone()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_chain_of_products_in_a_graph_repeats_what_it_gave_eagerly():
    x, weight, _, scale = _case(6, 2048, 2048)
    product = Product(weight, norm=(scale, 1e-5))

    def chain():
        y = x
        for _ in range(8):
            y = product(y, residual=y)
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert got.equal(expected)
    assert F.cosine_similarity(got.float(), x.float()).min() < 1
