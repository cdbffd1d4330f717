"""Rotary embedding, query and key norm and the cache write in one kernel, against torch and against transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from outrider.kernels.rotary import rotate_and_store, rotate_and_store_reference
from outrider.model.kv_cache import BLOCK_SIZE, TRASH_BLOCK

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, ANGLES = 8, 50


@dataclass
class Case:
    """Tensors of one call; `rotary` of `dim` numbers turn."""

    rows: int = 2
    steps: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    rotary: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    norm: bool = False
    places: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.rows + self.heads + self.dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(DEVICE)

        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = normal(self.rows * self.steps, width + 8).to(self.dtype)[:, :width]
        blocks = 2 + torch.randperm(NUM_BLOCKS - 2, generator=random)[: 2 * self.rows]
        self.tables = blocks.view(self.rows, 2).to(DEVICE)
        if self.places is None:
            begins = torch.randint(2 * BLOCK_SIZE - self.steps, (self.rows, 1), generator=random)
            self.places = begins + torch.arange(self.steps)
        self.places = self.places.to(DEVICE)
        self.positions = (self.places + 5 if self.positions is None else self.positions).to(DEVICE)
        angles = torch.arange(ANGLES)[:, None] * 0.7 ** torch.arange(self.rotary // 2)
        self.cos, self.sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        pool = torch.zeros(2, NUM_BLOCKS * BLOCK_SIZE, self.kv_heads, self.dim, device=DEVICE)
        self.keys, self.values = pool.to(self.pool_dtype or self.dtype)
        weights = [normal(self.dim).to(self.dtype) if self.norm else None for _ in range(2)]
        self.norms = dict(zip(("query_norm", "key_norm"), weights, strict=True))

    def run(self, function=rotate_and_store) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give queries, keys and values."""
        keys, values = self.keys.clone(), self.values.clone()
        given = self.qkv, self.tables, self.places, self.positions, self.cos, self.sin, keys, values
        return function(*given, num_heads=self.heads, eps=1e-5, **self.norms), keys, values

    @property
    def slots(self) -> torch.Tensor:
        return self.tables.gather(1, self.places // BLOCK_SIZE) * BLOCK_SIZE + self.places % BLOCK_SIZE


CASES = {
    "grouped heads": Case(heads=9, kv_heads=3),
    "one key head": Case(rows=1, steps=1, heads=5, kv_heads=1),
    "many heads": Case(rows=3, steps=1, heads=12, kv_heads=12),
    "normed": Case(norm=True),
    "partly rotated": Case(dim=20, rotary=8),
    "partly rotated, normed": Case(dim=24, rotary=12, norm=True),
    "no power of two": Case(dim=12, rotary=12, norm=True),
    "wide heads": Case(rows=1, heads=3, kv_heads=1, dim=256, rotary=256),
    "bf16": Case(dtype=torch.bfloat16, norm=True),
    "fp16": Case(dtype=torch.float16, dim=20, rotary=16),
    "narrow pool": Case(pool_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_gives_what_torch_gives(case: Case) -> None:
    for ours, wanted in zip(case.run(), case.run(rotate_and_store_reference), strict=True):
        assert ours.dtype == wanted.dtype
        assert ours.is_contiguous()
        # One rounding each, of sums whose last bit may differ.
        tolerance = 2e-6 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", [rotate_and_store, rotate_and_store_reference])
def test_it_is_the_rotation_and_norm_of_transformers(function) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    case = Case(norm=True)
    queries, keys, values = case.run(function)
    heads = case.qkv.reshape(case.rows, case.steps, -1, case.dim)
    query, key, value = heads.split([case.heads, case.kv_heads, case.kv_heads], 2)
    normed = []
    for part, weight in zip((query, key), case.norms.values(), strict=True):
        norm = Qwen3RMSNorm(case.dim, eps=1e-5).to(DEVICE)
        norm.weight.data = weight
        normed.append(norm(part))
    cos, sin = (torch.cat([table, table], -1)[case.positions] for table in (case.cos, case.sin))
    query, key = apply_rotary_pos_emb(*normed, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(queries, query)
    torch.testing.assert_close(keys[case.slots], key)
    assert torch.equal(values[case.slots], value)


def test_only_the_named_slots_are_written() -> None:
    case = Case()
    case.keys += 3.0
    case.values += 4.0
    _, keys, values = case.run()
    others = torch.ones(len(keys), dtype=torch.bool, device=DEVICE)
    others[case.slots.flatten()] = False
    assert bool((keys[others] == 3.0).all())
    assert bool((values[others] == 4.0).all())
    assert bool((keys[~others] != 3.0).any())


def test_a_place_and_an_angle_may_differ() -> None:
    """As in a tree of guesses, where siblings share a position and none shares a slot."""
    case = Case(rows=1, places=torch.tensor([[4, 5, 6]]), positions=torch.tensor([[4, 5, 5]]))
    case.qkv = case.qkv[:1].expand(3, -1)
    queries, keys, _ = case.run()
    assert torch.equal(queries[0, 1], queries[0, 2])
    assert not torch.equal(queries[0, 0], queries[0, 1])
    assert torch.equal(keys[case.slots[0, 1]], keys[case.slots[0, 2]])


def test_places_and_positions_behind_the_end_are_held_there() -> None:
    case = Case(rows=1, places=torch.tensor([[2 * BLOCK_SIZE + 3]]), steps=1, positions=torch.tensor([[ANGLES + 9]]))
    near = Case(rows=1, places=torch.tensor([[BLOCK_SIZE + 3]]), steps=1, positions=torch.tensor([[ANGLES - 1]]))
    for one, other in zip(case.run(), near.run(), strict=True):
        assert torch.equal(one, other)


def test_idle_rows_share_the_trash_block_and_harm_nobody() -> None:
    case = Case(rows=3, steps=2, places=torch.tensor([[3, 4], [0, 1], [0, 1]]))
    case.tables[1:] = TRASH_BLOCK
    _, keys, _ = case.run()
    written = keys.flatten(1).any(1).nonzero().flatten().tolist()
    trash = [TRASH_BLOCK * BLOCK_SIZE, TRASH_BLOCK * BLOCK_SIZE + 1]
    assert sorted(written) == sorted([*case.slots[0].tolist(), *trash])


def test_a_token_is_the_same_alone_and_among_others() -> None:
    case = Case(rows=2, steps=3, norm=True)
    queries, keys, _ = case.run()
    for row in range(2):
        alone = Case(rows=1, steps=1, norm=True)
        alone.qkv, alone.norms = case.qkv[row * 3 : row * 3 + 1], case.norms
        alone.tables, alone.places = case.tables[row : row + 1], case.places[row : row + 1, :1]
        alone.positions = case.positions[row : row + 1, :1]
        query, key, _ = alone.run()
        slot = case.slots[row, 0]
        assert torch.equal(query[0, 0], queries[row, 0])
        assert torch.equal(key[slot], keys[slot])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_real_shapes_on_a_card(norm: bool, dim: int) -> None:
    case = Case(rows=3, steps=6, heads=32, kv_heads=8, dim=dim, rotary=dim, dtype=torch.bfloat16, norm=norm)
    for ours, wanted in zip(case.run(), case.run(rotate_and_store_reference), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2**-7, atol=2**-7)
