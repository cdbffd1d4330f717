"""Rotation, cache write and attention in one kernel, beside the two steps in plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.kernels.attention import BLOCK_SIZE, Tiling
from outrider.kernels.rotate_attend import MAX_FRESH, rotate_and_attend, rotate_and_attend_reference
from outrider.model.kv_cache import TRASH_BLOCK
from tests.interpreter import mended_interpreter
from tests.kernels.test_attention import TOLERANCE, counters_are_zero, tree

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with mended_interpreter():
        yield


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ANGLES = 400


class Case:
    """Rows that end at `ends` with `steps` fresh tokens; the cache holds NaN wherever no old place of a row is."""

    def __init__(
        self, ends, steps, *, heads=4, groups=1, dim=16, rotary=None, norm=False, dtype=torch.float32, pool=None, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        rows, width = len(ends), -(-max(ends) // BLOCK_SIZE) + 1
        self.heads, self.dtype = heads, dtype
        wide = (heads + 2 * groups) * dim
        self.qkv = normal(rows * steps, wide + 8).to(dtype).to(DEVICE)[:, :wide]
        order = torch.randperm(rows * width, generator=generator) + 2
        self.tables = order.view(rows, width).to(DEVICE)
        begins = torch.tensor(ends)[:, None] - steps
        self.positions = (begins.clamp(min=0) + torch.arange(steps)).to(DEVICE)
        angles = torch.arange(ANGLES)[:, None] * 0.7 ** torch.arange((rotary or dim) // 2)
        self.cos, self.sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        shape = (2, (rows * width + 2) * BLOCK_SIZE, groups, dim)
        self.pools = normal(*shape).to(pool or dtype).to(DEVICE)
        old = torch.zeros(shape[1], dtype=torch.bool)
        for row in range(rows):
            place = torch.arange(int(self.positions[row, 0]))
            old[self.tables[row].cpu()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = True
        self.pools[:, ~old.to(DEVICE)] = torch.nan
        weights = [(1 + normal(dim) / 4).to(dtype).to(DEVICE) if norm else None for _ in range(2)]
        self.settings = {"num_heads": heads, "scale": dim**-0.5, "eps": 1e-5}
        self.settings |= dict(zip(("query_norm", "key_norm"), weights, strict=True))

    def run(self, function=rotate_and_attend, **more):
        """Give the result, and the pools of keys and values as they are left."""
        pools = self.pools.clone()
        given = self.qkv, *pools, self.tables, self.positions, self.cos, self.sin
        return function(*given, **{**self.settings, **more}), pools

    def launched(self, tiling, **more):
        from outrider.kernels.jit.rotate_attend import launch_rotate_attend

        return self.run(launch_rotate_attend, window=None, softcap=None, ancestors=None, tiling=tiling, **more)

    def agrees(self, out=None, **more):
        out, pools = out or self.run(**more)
        wanted, kept = self.run(rotate_and_attend_reference, **more)
        assert out.is_contiguous() and out.dtype == self.dtype and out.isfinite().all()
        torch.testing.assert_close(out, wanted, **TOLERANCE[self.dtype])
        # One rounding of numbers whose last bit may differ.
        tolerance = 2e-6 if pools.dtype == torch.float32 else torch.finfo(pools.dtype).eps
        torch.testing.assert_close(pools, kept, rtol=tolerance, atol=tolerance, equal_nan=True)
        return out


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes_agree_with_the_two_steps(seed):
    draw = random.Random(seed)
    steps, groups, dim = draw.choice([1, 1, 2, 5, 6, 9]), draw.choice([1, 2]), draw.choice([16, 64, 80, 128])
    ends = [steps + draw.choice([0, 1, 15, 63, 64, 65, draw.randrange(200)]) for _ in range(draw.randrange(1, 5))]
    case = Case(
        ends,
        steps,
        heads=groups * draw.choice([1, 4]),
        groups=groups,
        dim=dim,
        rotary=draw.choice([None, None, dim // 2]),
        norm=draw.random() < 0.5,
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        seed=seed,
    )
    case.agrees(window=draw.choice([None, None, 1, 7, 64, 100]), softcap=draw.choice([None, None, 5.0]))


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_agree_with_the_two_steps(seed):
    draw = random.Random(seed)
    steps = [16, 9, 8, 5, 2, 1][seed]
    case = Case([steps + draw.randrange(150) for _ in range(2)], steps, norm=seed % 2 == 0, seed=seed)
    masks, depths = tree(2, steps, seed)
    case.positions = case.positions[:, :1] + depths
    case.agrees(ancestors=masks, window=draw.choice([None, 3, 40]))


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_tiling_agrees(splits, block_m):
    """The fresh tokens join the only split, or the last one, or get their own; of several tiles one writes them."""
    case = Case([140, 40, 17, 5], 5, heads=7)
    out = case.launched(Tiling(block_m, 16, splits, 1))
    case.agrees(out)


def test_a_window_hides_old_places():
    case = Case([200], 3)
    before, _ = case.run(window=50)
    old = torch.arange(148, device=DEVICE)  # the first query, at 197, sees 148 and up
    case.pools[:, case.tables[0, old // BLOCK_SIZE] * BLOCK_SIZE + old % BLOCK_SIZE] = torch.nan
    assert torch.equal(case.run(window=50)[0], before)


def test_a_window_hides_fresh_tokens_too():
    case = Case([40, 6], 6)
    case.agrees(window=2)
    case.positions = case.positions[:, :1] + torch.tensor([0, 1, 1, 2, 2, 3], device=DEVICE)
    masks = torch.tensor([[0b1, 0b11, 0b101, 0b1011, 0b10101, 0b101011]] * 2, device=DEVICE)
    case.agrees(window=2, ancestors=masks)


def test_attention_reads_what_the_cache_will_hold():
    """With a narrower cache, fresh keys and values are rounded before they are used."""
    case = Case([40], 4, dim=64, pool=torch.bfloat16)
    wanted, _ = case.run(rotate_and_attend_reference)
    torch.testing.assert_close(case.run()[0], wanted, **TOLERANCE[torch.bfloat16])  # weights are rounded, too
    alone = Case([1], 1, pool=torch.bfloat16)
    out, (_, values) = alone.run()
    kept = values[alone.tables[0, 0] * BLOCK_SIZE].float()
    assert torch.equal(out[0, 0], kept.expand(4, -1)) and not torch.equal(kept, alone.qkv[:, -16:])


def test_only_the_fresh_slots_are_written():
    case = Case([70, 20], 3, groups=2)
    _, pools = case.run()
    slots = case.tables.gather(1, case.positions // BLOCK_SIZE) * BLOCK_SIZE + case.positions % BLOCK_SIZE
    changed = (pools.nan_to_num(9.0) != case.pools.nan_to_num(9.0)).flatten(2).any(2)
    for pool in changed:
        assert pool.nonzero().flatten().tolist() == sorted(slots.flatten().tolist())


def test_idle_rows_share_the_trash_block_and_harm_nobody():
    case = Case([120, 2, 2], 2)
    before, kept = case.run()
    case.tables[1:] = TRASH_BLOCK
    after, pools = case.run()
    assert torch.equal(after, before)
    mine = (case.tables[0] * BLOCK_SIZE)[:, None] + torch.arange(BLOCK_SIZE, device=DEVICE)
    assert torch.equal(pools[:, mine].nan_to_num(9.0), kept[:, mine].nan_to_num(9.0))
    assert pools[:, TRASH_BLOCK * BLOCK_SIZE : TRASH_BLOCK * BLOCK_SIZE + 2].isfinite().all()


def test_a_place_that_is_named_twice_counts_once():
    """As where a draft feeds the last three tokens of a row of two."""
    case = Case([3, 31], 3)
    case.positions[0] = torch.tensor([0, 0, 1])
    case.qkv = case.qkv[[0, 0, 2, 3, 4, 5]]
    case.agrees()


def test_angles_behind_the_end_are_the_last_ones():
    case = Case([ANGLES + 9, ANGLES], 3)
    case.agrees()


def test_calls_repeat_to_the_bit_and_leave_their_counters_zero():
    case = Case([250, 130], 6)
    first, _ = case.run()
    assert torch.equal(case.run()[0], first)
    assert counters_are_zero()


@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        (MAX_FRESH + 1, {}, "at most 16"),
        (2, {"window": 0}, "sees nothing"),
        (2, {"ancestors": torch.zeros(1, 3, dtype=torch.int64)}, "ancestors"),
        (2, {"num_heads": 3}, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(steps, change, message):
    with pytest.raises(ValueError, match=message):
        Case([20], steps).run(**change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("steps", [1, 6, 16])
@pytest.mark.parametrize("ends", [[300], [16, 33, 200, 390], [100 + 18 * row for row in range(16)]])
def test_real_shapes_agree_on_the_card(ends, steps, dim, norm):
    case = Case(ends, steps, heads=32, groups=8, dim=dim, norm=norm, dtype=torch.bfloat16)
    out = case.agrees()
    for _ in range(20):
        assert torch.equal(case.run()[0], out)
    case.agrees(window=50)
    assert counters_are_zero()
