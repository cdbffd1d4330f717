"""From a budget to cache blocks and the longest sequence: what fits is said, never found out later."""

from __future__ import annotations

import logging

import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.memory import sized
from outrider.engine.profile import BUDGET, TURNS, _fastest
from outrider.errors import CapacityError, ConfigError
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED

CPU = torch.device("cpu")
SLOT = 1000  # bytes a cached token


def budget(blocks: int) -> int:
    return (blocks + RESERVED) * BLOCK_SIZE * SLOT


def test_a_budget_for_all_sequences_gives_each_its_whole_length() -> None:
    config, blocks = sized(EngineConfig(128, 4, kv_cache_bytes=budget(10_000)), 512, SLOT, 5, CPU)
    assert config.max_model_len == 128
    assert blocks == 4 * 9 + RESERVED  # 128 tokens and 5 guesses take nine blocks of 16; more would lie idle


def test_a_length_beyond_the_models_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=513 is beyond the model's context of 512"):
        sized(EngineConfig(513, 4), 512, SLOT, 5, CPU)


def test_a_length_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len is 400; .*max_model_len=160 or less"):
        sized(EngineConfig(400, 4, kv_cache_bytes=budget(10)), 512, SLOT, 5, CPU)


def test_without_a_wish_the_length_follows_the_budget_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        config, _ = sized(EngineConfig(None, 4, kv_cache_bytes=budget(10)), 512, SLOT, 5, CPU)
    assert config.max_model_len == 160
    assert "max_model_len is 160, not the model's 512" in caplog.text


@pytest.mark.parametrize("given", [1, 10, budget(0)])
def test_a_budget_for_nothing_says_how_much_is_needed(given: int) -> None:
    with pytest.raises(
        CapacityError, match=rf"{given} bytes holds no sequence at all; {budget(32)} would hold one of 512"
    ):
        sized(EngineConfig(None, 4, kv_cache_bytes=given), 512, SLOT, 5, CPU)


def test_timing_repeats_quick_work_and_not_slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("outrider.engine.profile.time.perf_counter", lambda: clock[0])
    calls: list[str] = []

    def work(name: str, seconds: float) -> None:
        calls.append(name)
        clock[0] += seconds

    assert _fastest({(1, 0): lambda: work("quick", 0.01)}, CPU)[1, 0] == pytest.approx(0.01)
    assert len(calls) == TURNS + 1
    calls.clear()
    assert _fastest({(1, 0): lambda: work("slow", 2 * BUDGET)}, CPU)[1, 0] == pytest.approx(2 * BUDGET)
    assert calls == ["slow"]
