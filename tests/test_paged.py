"""How prompts attend over a card's cache, as far as that can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.kernels.attention import reference_attention
from outrider.model import paged
from outrider.model.kv_cache import RESERVED, KVCache, LayerShape
from outrider.model.paged import PagedStep


@pytest.mark.parametrize(("begin", "heads"), [(0, 2), (0, 4), (40, 2), (40, 4)])
def test_a_prompt_attends_by_what_makes_no_plan_for_its_length(
    begin: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's attention takes 50 ms and more to plan for each length that it has not met (H200, torch 2.11)."""
    steps, dim = 80, 16
    generator = torch.Generator().manual_seed(0)
    cache = KVCache([LayerShape(2, dim, dim, None, None)], RESERVED + 8, torch.float32, torch.device("cpu"))
    for pool in cache.keys + cache.values:
        pool.normal_(generator=generator)
    positions = torch.arange(begin, begin + steps)[None]
    step = PagedStep(cache, positions, torch.arange(RESERVED, RESERVED + 8)[None], begin + steps)
    assert step.feeds_prompt
    query = torch.randn(1, steps, heads, dim, generator=generator)
    usual, plans = torch.nn.functional.scaled_dot_product_attention, []

    def attention(*args: Any, **more: Any) -> torch.Tensor:
        plans.append(torch.backends.cuda.cudnn_sdp_enabled())
        return usual(*args, **more)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(paged, "F", SimpleNamespace(scaled_dot_product_attention=attention))
    made = step.attend(0, query, 0.25, None, None)
    wanted = reference_attention(query, cache.keys[0], cache.values[0], step.tables, positions, scale=0.25)
    torch.testing.assert_close(made, wanted)
    assert plans and not any(plans)
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
