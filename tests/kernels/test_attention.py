"""Attention over the paged cache: the kernel (on CPUs in Triton's interpreter) beside the plain reference."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.kernels.attention import BLOCK_SIZE, Tiling, paged_attention, reference_attention
from outrider.kernels.rotate_attend import MAX_FRESH
from outrider.model.network import FEED_WIDTHS, LONG_WIDTHS
from tests.interpreter import mended_interpreter

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with mended_interpreter():
        yield


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}


class Case:
    """A cache with scrambled tables, NaN wherever no row may look, and queries at the end of each row."""

    def __init__(self, ends, steps, *, heads=4, groups=2, dim=64, dim_v=None, dtype=torch.float32, seed=0, loud=1.0):
        generator = torch.Generator().manual_seed(seed)
        rows, spare, dim_v = len(ends), 2, dim_v or dim
        width = -(-max(ends) // BLOCK_SIZE) + spare
        order = torch.randperm(rows * width, generator=generator) + 2  # blocks 0 and 1 belong to nobody
        self.tables = order.view(rows, width).to(DEVICE)
        slots = (rows * width + 3) * BLOCK_SIZE
        # Queries are a slice of a wider tensor, as a fused product leaves them.
        fused = torch.randn(rows, steps, heads + 2 * groups, dim, generator=generator) * loud
        self.query = fused.to(dtype).to(DEVICE)[:, :, :heads]
        self.keys = torch.randn(slots, groups, dim, generator=generator).to(dtype).to(DEVICE)
        self.values = torch.randn(slots, groups, dim_v, generator=generator).to(dtype).to(DEVICE)
        last = torch.tensor(ends, device=DEVICE)[:, None] - 1
        self.positions = (last - torch.arange(steps - 1, -1, -1, device=DEVICE)).clamp(min=0)
        self.settings = {"scale": dim**-0.5}
        self.poison(ends)

    def poison(self, ends):
        seen = torch.zeros(len(self.keys), dtype=torch.bool, device=DEVICE)
        for row, end in enumerate(ends):
            place = torch.arange(end, device=DEVICE)
            seen[self.tables[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = True
        self.keys[~seen] = torch.nan
        self.values[~seen] = torch.nan

    def arguments(self):
        return self.query, self.keys, self.values, self.tables, self.positions

    def run(self, **more):
        return paged_attention(*self.arguments(), **{**self.settings, **more})

    def reference(self, **more):
        return reference_attention(*self.arguments(), **{**self.settings, **more})

    def launched(self, tiling, **more):
        options = {"window": None, "softcap": None, "ancestors": None, "fixed_length": None, **self.settings, **more}
        from outrider.kernels.jit.attention import attend_paged

        return attend_paged(*self.arguments(), page=BLOCK_SIZE, tiling=tiling, **options)

    def agrees(self, **more):
        out = self.run(**more)
        assert out.is_contiguous() and out.dtype == self.query.dtype
        torch.testing.assert_close(out, self.reference(**more), **TOLERANCE[self.query.dtype])
        return out


def counters_are_zero():
    from outrider.kernels.jit.attention import counters_for

    return bool(counters_for(DEVICE, 1).eq(0).all())


def tree(rows, steps, seed):
    """Random trees in order of their nodes: (ancestor masks, depths), ``[rows, steps]`` each."""
    draw = random.Random(seed)
    masks, depths = [], []
    for _ in range(rows):
        mask, depth = [1], [0]
        for node in range(1, steps):
            parent = draw.randrange(node)
            mask.append(mask[parent] | 1 << node)
            depth.append(depth[parent] + 1)
        masks.append([m - (1 << 64) if m >> 63 else m for m in mask])
        depths.append(depth)
    return torch.tensor(masks, device=DEVICE), torch.tensor(depths, device=DEVICE)


def test_the_reference_is_ordinary_attention():
    case = Case([9], 9)
    slots = case.tables[0, 0] * BLOCK_SIZE + torch.arange(9, device=DEVICE)
    key, value = (pool[slots].transpose(0, 1).repeat_interleave(2, 0) for pool in (case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.query[0].transpose(0, 1), key, value, is_causal=True
    )
    torch.testing.assert_close(case.reference()[0], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_random_shapes_agree_with_the_reference(seed):
    draw = random.Random(seed)
    groups = draw.choice([1, 2])
    case = Case(
        [draw.choice([1, 2, 15, 16, 17, 63, 64, 65, draw.randrange(1, 250)]) for _ in range(draw.randrange(1, 4))],
        draw.choice([1, 1, 2, 5, 6, 13]),
        heads=groups * draw.choice([1, 3, 4]),
        groups=groups,
        dim=draw.choice([16, 64, 80, 128]),
        dim_v=draw.choice([None, None, 24, 48]),
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        seed=seed,
    )
    case.agrees(
        window=draw.choice([None, None, 1, 7, 64, 100]),
        softcap=draw.choice([None, None, 5.0]),
        fixed_length=draw.choice([None, None, 512]),
    )


def test_many_queries_take_several_tiles():
    Case([130, 70], 64, heads=3, groups=1, dim=16).agrees()


def test_wide_heads_fit():
    Case([70], 2, groups=1, dim=256, dtype=torch.bfloat16).agrees()


def test_keys_and_values_may_be_of_different_widths():
    Case([40, 3], 3, dim=48, dim_v=96).agrees()


def test_a_window_hides_old_positions():
    case = Case([200, 20], 3, groups=1)
    before = case.run(window=50)
    old = torch.arange(140, device=DEVICE)  # the first query sees 148 and up
    slots = case.tables[0, old // BLOCK_SIZE] * BLOCK_SIZE + old % BLOCK_SIZE
    case.keys[slots] = case.values[slots] = torch.nan
    assert torch.equal(case.run(window=50), before)


def test_a_soft_cap_holds_large_scores():
    Case([90], 4, loud=300.0).agrees(softcap=30.0)


def test_large_scores_without_a_cap_stay_finite():
    case = Case([90], 4, loud=300.0)  # scores of hundreds: fp32 holds them to 1e-5 or so
    torch.testing.assert_close(case.run(), case.reference(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_agree_with_the_reference(seed):
    draw = random.Random(seed)
    steps = [64, 33, 8, 5, 2, 16][seed]
    case = Case([draw.randrange(steps, 200) for _ in range(2)], steps, groups=1, heads=2, seed=seed)
    masks, depths = tree(2, steps, seed)
    case.positions = case.positions[:, :1] + depths
    window = draw.choice([None, 3, 40])
    case.agrees(ancestors=masks, window=window, fixed_length=draw.choice([None, 256]))


def test_a_chain_written_as_a_tree_is_the_chain():
    case = Case([100, 37], 6, groups=1, dim=16)
    masks = (2 << torch.arange(6, device=DEVICE)).sub(1).expand(2, 6)
    for window in (None, 4, 30):
        expected = case.run(window=window)
        torch.testing.assert_close(case.run(window=window, ancestors=masks), expected, **TOLERANCE[torch.float32])


def test_siblings_do_not_see_each_other():
    case = Case([20], 3)
    case.positions = torch.tensor([[17, 18, 18]], device=DEVICE)
    masks = torch.tensor([[0b001, 0b011, 0b101]], device=DEVICE)
    before = case.run(ancestors=masks)
    case.values[case.tables[0, 18 // BLOCK_SIZE] * BLOCK_SIZE + 18 % BLOCK_SIZE] += 1
    after = case.run(ancestors=masks)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]]) and not torch.equal(before[:, 1], after[:, 1])


def test_positions_may_repeat():
    case = Case([33], 5)
    case.positions = torch.tensor([[30, 31, 32, 32, 32]], device=DEVICE)
    out = case.agrees()
    assert out.isfinite().all()


def test_an_idle_row_does_not_disturb_the_others():
    case = Case([120, 1], 2)
    before = case.run()
    case.tables[1] = 1  # where the keys of nobody go
    after = case.run()
    assert torch.equal(after[0], before[0]) and after[1].isnan().all()


def test_a_row_that_sees_nothing_is_zero():
    case = Case([40, 8], 2)
    case.positions[1] = -1
    assert case.run()[1].eq(0).all()


def test_places_beyond_the_table_are_not_read():
    case = Case([64], 1)
    case.tables = case.tables[:, :2]
    case.positions[:] = 63
    shorter = Case([64], 1)
    shorter.positions[:] = 31
    torch.testing.assert_close(case.run(), shorter.run())


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 70)])
def test_exact_bits_depend_on_the_position_alone(dtype, window):
    case = Case([181, 300], 6, groups=1, heads=4, dim=16, dtype=dtype)
    together = case.run(window=window, fixed_length=512)
    query, positions, tables = case.query, case.positions, case.tables
    for row in (0, 1):
        for step in (0, 5):
            case.query = query[row : row + 1, step : step + 1]
            case.positions, case.tables = positions[row : row + 1, step : step + 1], tables[row : row + 1]
            assert torch.equal(case.run(window=window, fixed_length=512)[0, 0], together[row, step])


def test_exact_bits_do_not_depend_on_the_rows_beside():
    case = Case([90, 200, 33], 2, groups=1, dim=16, dtype=torch.bfloat16)
    together = case.run(fixed_length=256)
    case.query, case.positions, case.tables = case.query[1:2], case.positions[1:2], case.tables[1:2]
    assert torch.equal(case.run(fixed_length=256)[0], together[1])


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_number_of_splits_agrees(splits, block_m):
    case = Case([140, 40], 3, groups=1, dim=16)
    for fixed_length in (None, 150):
        out = case.launched(Tiling(block_m, 16, splits, 1), fixed_length=fixed_length)
        torch.testing.assert_close(out, case.reference(), **TOLERANCE[torch.float32])


def test_a_row_longer_than_the_fixed_length_is_still_whole():
    Case([200], 2).agrees(fixed_length=100)


def test_calls_repeat_to_the_bit_and_leave_their_counters_zero():
    case = Case([250, 130], 6, groups=1, dim=16)
    first = case.run()
    assert torch.equal(case.run(), first)
    assert counters_are_zero()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has its own order")
def test_bits_do_not_depend_on_which_split_ends_last(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case([250, 130], 3, groups=1, dim=16)
    first, place = case.run(), InterpreterBuilder.set_grid_idx
    monkeypatch.setattr(
        InterpreterBuilder, "set_grid_idx", lambda self, x, y, z: place(self, self.grid_dim[0] - 1 - x, y, z)
    )
    assert torch.equal(case.run(), first)
    assert counters_are_zero()


def test_the_card_is_filled_twice_over():
    one = Tiling.choose(1, 8, 4, 128, 2, None, 132, 16384)
    assert (one.block_m, one.splits) == (16, 16)
    assert Tiling.choose(1, 8, 4, 128, 2, None, 132, 4096).splits == 8
    many = Tiling.choose(16, 8, 24, 128, 2, None, 132, 16384)
    assert (many.block_m, many.splits) == (32, 4)
    assert Tiling.choose(64, 8, 2048, 128, 2, None, 132, 16384).splits == 1
    exact = {Tiling.choose(rows, 8, members, 128, 2, 8192, 132, 8192) for rows in (1, 16) for members in (4, 24, 256)}
    assert len(exact) == 1


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("places", [512, 32768])
def test_a_few_passes_at_start_meet_every_tiling_that_a_chunk_may_ask_for(heads, group, places):
    def tiling(rows: int, width: int) -> Tiling:
        return Tiling.choose(rows, heads, width * group, 128, 2, None, 132, places)

    for most in (1, 3, 8, 12, 32):
        rows = {1 << power for power in range(6) if 1 << power < most} | {most}
        met = {tiling(one, width) for one in rows for width in FEED_WIDTHS if width > MAX_FRESH}
        met |= {tiling(2, width) for width in LONG_WIDTHS}
        for one in range(1, most + 1):
            for width in range(MAX_FRESH + 1, min(places, 2048 // one) + 1, 3):
                assert tiling(one, width) in met, (one, width)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "sees nothing"),
        ({"ancestors": torch.zeros(1, 3, dtype=torch.int64)}, "ancestors"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Case([20], 2).run(**change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("steps", [1, 6, 300])
@pytest.mark.parametrize("ends", [[8000], [333, 2000, 900, 4100], [300 + 100 * row for row in range(16)]])
def test_real_shapes_agree_on_the_card(ends, steps, dim):
    case = Case(ends, steps, heads=32, groups=8, dim=dim, dtype=torch.bfloat16)
    out = case.agrees()
    for _ in range(20):
        assert torch.equal(case.run(), out)
    case.agrees(window=500)
    assert counters_are_zero()
    together = case.run(fixed_length=8192)
    case.query, case.positions, case.tables = case.query[:1, -1:], case.positions[:1, -1:], case.tables[:1]
    assert torch.equal(case.run(fixed_length=8192)[0, 0], together[0, -1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_one_captured_graph_serves_every_length():
    case = Case([8000, 3000], 6, heads=32, groups=8, dim=128, dtype=torch.bfloat16)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for shorter in (0, 100, 2000):
        case.positions.sub_(shorter)
        graph.replay()
        torch.testing.assert_close(out, case.reference(), **TOLERANCE[torch.bfloat16])
    assert counters_are_zero()
