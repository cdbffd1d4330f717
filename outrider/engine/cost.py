"""What a pass costs on this machine: measured on the real runner and drafters, on a row that belongs to nobody."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from outrider.draft.drafter import Drafter, DraftRows
from outrider.engine.controller import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner

__all__ = ["measured"]

logger = logging.getLogger("outrider")
CONTEXT = 128  # cached tokens that the measured pass looks back on
REPEATS = 3


def measured(runner: Runner, state: DeviceState, drafters: list[Drafter], most: int) -> CostModel:
    """Time target passes of 1 to ``most + 1`` tokens, and chains of up to `most` guesses.

    Takes about as long as thirty plain rounds.
    """
    rows = _idle_rows(state)
    widths = sorted({1, 2, 4, most + 1} & set(range(1, most + 2)))
    target = [(width, _fastest(partial(_pass, runner, rows, width), runner.device)) for width in widths]
    draft = {}
    for drafter in drafters:
        lengths = sorted({1, most})
        try:
            draft[drafter.name] = tuple(
                (length, _fastest(partial(drafter.propose, rows, length), runner.device)) for length in lengths
            )
        except Exception as error:  # noqa: BLE001 - it will fail in its rounds too, where that is dealt with
            logger.debug("drafter %s could not be timed: %s", drafter.name, error)
    # A wider pass never costs less; where noise says so, the wider figure is the better one.
    for index in range(len(target) - 2, -1, -1):
        target[index] = (target[index][0], min(target[index][1], target[index + 1][1]))
    return CostModel(tuple(target), draft)


def _idle_rows(state: DeviceState) -> DraftRows:
    length = min(CONTEXT, state.tokens.shape[1] - 66)
    rows = state.gather([], pad_to=1, room=0)
    device = state.device
    return DraftRows(
        slots=rows.slots,
        tokens=torch.zeros(1, length + 66, dtype=torch.long, device=device),
        lengths=torch.full((1,), length, device=device),
        host_lengths=(length,),
        tables=rows.tables,
        start=None,
        rules=rows.rules,
        independent=False,
    )


def _pass(runner: Runner, rows: DraftRows, width: int) -> None:
    positions = rows.lengths[:, None] - 1 + torch.arange(width, device=rows.lengths.device)
    tokens = rows.tokens[:, :width]
    runner.forward(tokens, positions, rows.tables, rows.host_lengths[0] + width - 1, None)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Give the best of a few runs, in seconds: noise only ever adds."""
    best = float("inf")
    for attempt in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt:  # the first warms up
            best = min(best, time.perf_counter() - began)
    return best
