"""What a pass costs on this machine: measured on the real runner and drafters, on a row that belongs to nobody."""

from __future__ import annotations

import logging
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_DRAFT_TOKENS
from outrider.draft.drafter import Drafter, DraftRows
from outrider.engine.controller import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner

__all__ = ["measured", "measured_draft"]

logger = logging.getLogger("outrider")
CONTEXT = 128  # cached tokens that the measured pass looks back on
REPEATS = 4
PATIENCE = 2.0  # seconds after which no more repeats are begun: a large model on a CPU is timed once


def measured(runner: Runner, state: DeviceState, most: int) -> CostModel:
    """Time target passes of 1 to ``most + 1`` tokens.

    Takes about as long as twenty plain rounds. Widths take turns, so that a slow moment hits all of them, and the best
    of a few runs counts, since noise only ever adds.
    """
    rows = _idle_rows(state)
    widths = sorted({1, 2, 4, 8, most + 1} & set(range(1, most + 2)))
    target = _fastest({width: partial(_pass, runner, rows, width) for width in widths}, runner.device)
    for narrow, wide in reversed(list(pairwise(widths))):
        target[narrow] = min(target[narrow], target[wide])  # a narrower pass never costs more
    return CostModel(tuple(target.items()), {})


def measured_draft(drafter: Drafter, state: DeviceState, most: int) -> tuple[tuple[int, float], ...]:
    """Time chains of 1 and `most` guesses; nothing where the drafter cannot be timed."""
    rows = _idle_rows(state)
    try:
        chains = {length: partial(drafter.propose, rows, length) for length in sorted({1, most})}
        return tuple(_fastest(chains, state.device).items())
    except Exception as error:  # noqa: BLE001 - it will fail in its rounds too, where that is dealt with
        logger.debug("drafter %s could not be timed: %s", drafter.name, error)
        return ()


def _idle_rows(state: DeviceState) -> DraftRows:
    room = MAX_DRAFT_TOKENS + 2
    length = max(2, min(CONTEXT, state.tokens.shape[1] - room))
    rows = state.gather([], pad_to=1, room=0)
    return DraftRows(
        slots=rows.slots,
        index=rows.index,
        tokens=torch.zeros(1, length + room, dtype=torch.long, device=state.device),
        lengths=torch.full((1,), length, device=state.device),
        host_lengths=(length,),
        tables=rows.tables,
        start=None,
        rules=rows.rules,
        independent=False,
        features=state.features,
    )


def _pass(runner: Runner, rows: DraftRows, width: int) -> None:
    positions = rows.lengths[:, None] - 1 + torch.arange(width, device=rows.lengths.device)
    runner.forward(rows.tokens[:, :width], positions, rows.tables, rows.host_lengths[0] + width - 1, None)


def _fastest(work: Mapping[int, Callable[[], object]], device: torch.device) -> dict[int, float]:
    """Give each piece of work's best time, in seconds. The first run warms up, and counts only where it must."""
    times: dict[int, list[float]] = {size: [] for size in work}
    started = time.perf_counter()
    for attempt in range(REPEATS + 1):
        if attempt and time.perf_counter() - started > PATIENCE:
            break
        for size, run in work.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[size].append(time.perf_counter() - began)
    return {size: min(taken[1:] or taken) for size, taken in times.items()}
