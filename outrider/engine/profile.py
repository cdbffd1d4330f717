"""Timing real rounds when the engine starts, on rows that belong to nobody; and keeping the result for later starts.

A round is played through as it will be run: guesses, the target's pass, choice, judging, and the way back to the host.
Shapes take turns, so that a slow moment hits all of them, and the best of a few turns counts, since noise only adds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.engine.cost import CHAIN, NEAR, Grid, RoundCosts
from outrider.engine.flight import Readback
from outrider.engine.round import Drafting, RoundPlan, propose, verify
from outrider.engine.state import Rows
from outrider.model.kv_cache import BLOCK_SIZE, NULL_BLOCK, RESERVED, TRASH_BLOCK, blocks_for
from outrider.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outrider.config import Verification
    from outrider.draft.drafter import Drafter, DraftRows
    from outrider.engine.state import DeviceState
    from outrider.model.runner import Runner

__all__ = ["FAR", "Profiler", "clear_blocks", "nobodys_rows"]

logger = logging.getLogger("outrider")
FORMAT = 4  # of the files that are kept
BUDGET = 1.0  # seconds for each of the four things that are timed; what nothing can be said without comes first
TURNS = 3
FAR = 1024  # cached tokens of a second look, for what context costs
MOST_BLOCKS = 2048  # of the cache that are written for this
MOST_KEPT = 256  # profiles on disk, the newest: each kind of engine and each new version leaves one
FED = 16, 128  # tokens that a drafter is let read, to see what that takes
FED_ROWS = 8  # of so many rows at once, where they share a pass: of a card's pass few tokens cost nothing


class Profiler:
    """Times rounds of one engine.

    Args:
        runner: The target.
        state: The device rows; nobody runs.
        verification: How guesses are judged.
        most: Guesses of a round at most.
        num_blocks: Cache blocks, all of them free.
    """

    def __init__(
        self, runner: Runner, state: DeviceState, verification: Verification, most: int, num_blocks: int
    ) -> None:
        self._runner, self._state, self._verification = runner, state, verification
        self._most, self._num_blocks = most, num_blocks
        self._device = runner.device
        self._num_rows = len(state.lengths) - 1
        self._together = self._device.type == "cuda"  # whether drafters read what several rows lack in one pass

    def costs(self, drafter: Drafter, captured: Callable[[], RoundCosts | None] | None = None) -> RoundCosts:
        """Profile rounds with and without a drafter's guesses; what an earlier process found is taken as it is.

        `captured` times rounds that stand ready, where there are any: they are then what is run.
        """
        file = _file(self._device, [*self._identity(drafter), captured is not None])
        found = _recalled(file)
        if found is None:
            began = time.perf_counter()
            found = None if captured is None else captured()
            if found is None:
                found = self._profiled(drafter)
            elif drafter.device_side:  # its guesses are part of the passes
                found.feeds[drafter.name] = self.feed(drafter)
            else:
                found.note(drafter.name, *self.drafter(drafter))
            logger.info("rounds profiled in %.1f s", time.perf_counter() - began)
            _keep(file, found)
        return found

    def drafter(self, drafter: Drafter, *, whole: bool = True) -> tuple[Grid, tuple[float, float]]:
        """Time a drafter alone: its guesses by rows and length, and how it reads what its cache lacks.

        `whole`: of as many rows as there can be; otherwise of one, as while others run their rows are not to be had.

        Raises:
            Exception: Whatever the drafter raises.
        """
        if whole:
            needed = self._num_rows * blocks_for(self._length(FAR) + self._most + 2)
            clear_blocks((self._runner, drafter), min(needed, MOST_BLOCKS), self._num_blocks)
        work = {
            (num_rows, length): partial(self._guesses, drafter, self._rows(num_rows, NEAR, whole=whole), length)
            for num_rows in (self._rows_timed() if whole else [1])
            for length in self._lengths()
            if length
        }
        return Grid(_rising(_fastest(work, self._device))), self.feed(drafter, whole=whole)

    def feed(self, drafter: Drafter, *, whole: bool = True) -> tuple[float, float]:
        """Time how a drafter reads what its cache lacks: seconds of a call, and of a token."""
        idle, length = self._state.idle, self._length(FED[-1])
        lacking = drafter.missing(idle, length) if drafter.bytes_per_slot else 0
        if not lacking:
            return 0.0, 0.0
        most = min(FED_ROWS, self._num_rows) if whole and drafter.device_side and self._together else 1
        slots = (idle,) if most == 1 else tuple(range(most))  # one each: drafters keep count by slot
        half = max(1, most // 2)  # a card reads its first tokens for nothing: what more of them take shows between many
        rows = {count: self._reading(count, length, slots[:count], whole=whole) for count in {1, half, most}}

        def forget() -> None:
            for slot in slots:
                drafter.release(slot)

        def read(num_rows: int, count: int) -> None:
            forget()
            drafter.catch_up(rows[num_rows], (count,) * num_rows)

        few = min(FED[0], lacking)
        try:
            begin = (half, lacking) if most > 1 else (1, few)
            taken = _fastest({key: partial(read, *key) for key in {(1, few), begin, (most, lacking)}}, self._device)
        finally:
            forget()
        more = max(1, most * lacking - begin[0] * begin[1])
        token = max(0.0, taken[most, lacking] - taken[begin]) / more
        return max(0.0, taken[1, few] - token * few), token

    # --- what is timed

    def _profiled(self, drafter: Drafter) -> RoundCosts:
        grid, feed = self.drafter(drafter)
        kind = drafter.name if drafter.makes_trees else CHAIN
        near = self._passes(drafter, NEAR, self._rows_timed())
        passes, growth = {kind: Grid(_rising(near))}, {}
        if self._length(FAR) > 2 * NEAR:
            far = self._passes(drafter, self._length(FAR), [1, self._num_rows][: self._num_rows])
            slopes = {key: max(0.0, far[key] - near[key]) / (self._length(FAR) - NEAR) for key in far if key in near}
            growth = {kind: Grid(slopes)}
        if kind != CHAIN:  # rounds without guesses are chains
            plain = {key: seconds for key, seconds in near.items() if not key[1]}
            passes[CHAIN] = Grid(plain)
            if growth:
                growth[CHAIN] = Grid({key: slope for key, slope in growth[kind].seconds.items() if not key[1]})
        return RoundCosts(passes, growth, {drafter.name: grid}, {drafter.name: feed})

    def _passes(self, drafter: Drafter, context: int, row_counts: list[int]) -> dict[tuple[int, int], float]:
        work = {}
        for num_rows in row_counts:
            rows = self._rows(num_rows, context, whole=True)
            for length in self._lengths():
                work[num_rows, length] = partial(self._pass, rows, self._judged(drafter, rows, length))
        return _fastest(work, self._device)

    def _judged(self, drafter: Drafter, rows: Rows, length: int) -> Proposal:
        """Guesses to judge: of trees and where q is needed the drafter's own, else any."""
        if length and (drafter.makes_trees or self._verification.draws_guesses):
            return self._guesses(drafter, rows, length)
        tokens = torch.zeros(len(rows.slots), length, dtype=torch.long, device=self._device)
        return Proposal(tokens, torch.full_like(rows.lengths, length))

    def _guesses(self, drafter: Drafter, rows: Rows, length: int) -> Proposal:
        return propose(self._plan(rows, length, drafter), self._runner.vocab_size, _raise)[0]

    def _pass(self, rows: Rows, proposal: Proposal) -> None:
        plan = self._plan(rows, proposal.num_tokens)
        Readback(verify(plan, proposal, self._runner, self._state)).rows()

    def _plan(self, rows: Rows, length: int, drafter: Drafter | None = None) -> RoundPlan:
        return RoundPlan(
            rows=rows,
            allowance=torch.full_like(rows.lengths, length),
            num_tokens=length,
            drafting=() if drafter is None else (Drafting(drafter),),
            verification=self._verification,
        )

    # --- on which shapes

    def _rows_timed(self) -> list[int]:
        return sorted({1, min(4, self._num_rows), self._num_rows})

    def _lengths(self) -> list[int]:
        return sorted({length for length in (0, 1, 3, self._most) if length <= self._most})

    def _length(self, context: int) -> int:
        """As many tokens as asked, as far as rows have room for them and for guesses."""
        return max(2, min(context, self._state.tokens.shape[1] - self._most - 2))

    def _rows(self, num_rows: int, context: int, *, whole: bool) -> Rows:
        blocks = self._num_blocks if whole else 0
        return nobodys_rows(self._state, num_rows, self._length(context), self._most + 2, blocks)

    def _reading(self, num_rows: int, length: int, slots: tuple[int, ...], *, whole: bool) -> DraftRows:
        rows = replace(self._rows(num_rows, length, whole=whole), slots=slots)
        return rows.drafting(self._verification.draws_guesses)

    def _identity(self, drafter: Drafter) -> list[Any]:
        sizes = self._num_rows, self._most, self._state.tokens.shape[1], str(self._verification)
        return [*sizes, _target_identity(self._runner), _drafter_identity(drafter)]


def clear_blocks(keepers: Sequence[Runner | Drafter], count: int, num_blocks: int) -> None:
    """Put zeros into the first blocks, where nobody's rows will look back: what lies there might not be numbers."""
    blocks = list(range(RESERVED, min(RESERVED + count, num_blocks)))
    for keeper in keepers:
        keeper.copy_blocks([NULL_BLOCK] * len(blocks), blocks)


def nobodys_rows(state: DeviceState, num_rows: int, length: int, room: int, num_blocks: int) -> Rows:
    """Make rows that commit nothing: of the idle slot, `length` tokens of context each, room for `room` more.

    With `num_blocks` they look back on blocks of their own, which must be nobody's; with 0 on the one that is trash.
    """
    needed, free = blocks_for(length + room), min(num_blocks - RESERVED, MOST_BLOCKS)
    tables = torch.full((num_rows, state.tables.shape[1]), TRASH_BLOCK, dtype=torch.long, device=state.device)
    if free > 0:
        places = torch.arange(num_rows * needed, device=state.device).view(num_rows, needed)
        tables[:, :needed] = RESERVED + places % free
    idle = state.gather([], pad_to=num_rows, room=0)
    return Rows(
        slots=idle.slots,
        index=idle.index,
        tokens=torch.zeros(num_rows, length + room, dtype=torch.long, device=state.device),
        lengths=torch.full((num_rows,), length, device=state.device),
        host_lengths=(length,) * num_rows,
        tables=tables,
        start=RESERVED * BLOCK_SIZE if num_rows == 1 and free >= needed else None,
        rules=idle.rules,
        features=state.features,
    )


def _raise(drafter: Drafter, error: Exception) -> None:
    raise RuntimeError(f"drafter {drafter.name}: {error}") from error


def _fastest(
    work: Mapping[tuple[int, int], Callable[[], object]], device: torch.device
) -> dict[tuple[int, int], float]:
    """Give each piece of work's best time in seconds, by (rows, size); those of whole rows only.

    The first run warms up, and counts only where it must. When the budget is spent nothing is begun but the first rows.
    """
    times: dict[tuple[int, int], list[float]] = {key: [] for key in work}
    least, began = min(key[0] for key in work), time.perf_counter()
    for turn in range(TURNS + 1):
        for key, run in work.items():
            spent = time.perf_counter() - began > BUDGET
            if spent and (turn or key[0] != least):
                continue
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[key].append(time.perf_counter() - start)
    missing = {key[0] for key, taken in times.items() if not taken}
    return {key: min(taken[1:] or taken) for key, taken in times.items() if key[0] not in missing}


def _rising(seconds: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Let no round cost more than one with more rows or guesses does."""
    return {
        (rows, width): min(value for (more, wider), value in seconds.items() if more >= rows and wider >= width)
        for rows, width in seconds
    }


# --- what is kept


def _file(device: torch.device, identity: list[Any]) -> Path:
    """Name the file of this machine, these versions, this pair and these settings."""
    from outrider import __version__

    hardware: list[Any] = [platform.machine(), platform.processor(), torch.get_num_threads(), os.cpu_count()]
    if device.type == "cuda":
        hardware = [torch.cuda.get_device_name(device)]
    elif (info := Path("/proc/cpuinfo")).exists():
        hardware += [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")][
            :1
        ]
    known = [FORMAT, __version__, str(torch.__version__), hardware, identity]
    digest = hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()[:24]
    root = Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser()
    return root / "rounds" / f"{digest}.json"


def _target_identity(runner: Any) -> list[Any]:
    model = getattr(runner, "model", None)
    known: list[Any] = [runner.vocab_size, runner.context_length, runner.bytes_per_slot]
    if isinstance(model, torch.nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
        known += [sum(one.nbytes for one in tensors), sorted({type(one).__name__ for one in model.modules()})]
    return known


def _drafter_identity(drafter: Drafter) -> list[Any]:
    known: list[Any] = [drafter.name, type(drafter).__name__, drafter.context_length, drafter.bytes_per_slot]
    known += [drafter.makes_trees, drafter.device_side]
    known += [_drafter_identity(part) for part in getattr(drafter, "parts", ())]
    runner = getattr(drafter, "runner", None)
    return known if runner is None else [*known, _target_identity(runner)]


def _recalled(file: Path) -> RoundCosts | None:
    """Read what was kept; None where there is nothing, or nothing that makes sense."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        grids = {
            table: {name: Grid.of_record(grid) for name, grid in found[table].items()}
            for table in ("passes", "growth", "drafts")
        }
        feeds = {name: (float(call), float(token)) for name, (call, token) in found["feeds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return RoundCosts(grids["passes"], grids["growth"], grids["drafts"], feeds) if CHAIN in grids["passes"] else None


def _keep(file: Path, costs: RoundCosts) -> None:
    """Keep a profile for later processes; where nothing can be written, they find out anew."""
    tables = {"passes": costs.passes, "growth": costs.growth, "drafts": costs.drafts}
    record: dict[str, Any] = {
        table: {name: grid.record() for name, grid in grids.items()} for table, grids in tables.items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**record, "feeds": costs.feeds}) + "\n", encoding="utf-8")
        part.replace(file)
        newest = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in newest[MOST_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("the profile is not kept: %s", error)
