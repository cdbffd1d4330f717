"""Which tiling of a product is fastest on this card: measured as it will run, in a captured chain with cold weights."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.kernels.compilers import compile_apart, expect, wanted_by
from outrider.kernels.launch import uses_kernels
from outrider.kernels.tiles import Tiles, bucket_of, candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.kernels.products import Product

__all__ = ["choices_for", "compile_ahead", "expect_work", "fastest", "recalled", "remember"]

logger = logging.getLogger(__name__)

_COLD_BYTES = 110 << 20  # weights of one turn: twice any L2, so that none is left from the turn before
_CHAIN_BYTES = 600e6  # weights a graph reads, about 200 us
_REPLAYS = 4
_LIBRARY_FROM = 17  # below, rows must not see each other: see `products`


@cache
def _notes(device: torch.device) -> tuple[Path, dict[str, Any]]:
    """The file that keeps what was found on cards like this one, and what it says."""
    import triton

    made_for = f"{torch.cuda.get_device_name(device)}-torch{torch.__version__}-triton{triton.__version__}"
    name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in made_for)
    root = Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser()
    file = root / "products" / f"{name}.json"
    try:
        notes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: found out anew
        notes = {}
    return file, notes if isinstance(notes, dict) else {}


def recalled(product: Product, bucket: int) -> tuple[bool, Tiles | None]:
    """Whether an earlier process found the best tiling for this kind of product, and which (None: the library)."""
    _, notes = _notes(product.weight.stored.device)
    try:
        found = notes[_name(product, bucket)]
        return True, None if found is None else Tiles(**found)
    except (KeyError, TypeError):
        return False, None


def remember(product: Product, bucket: int, tiles: Tiles | None) -> None:
    """Keep what was found for later processes; where nothing can be written, they find out anew."""
    file, notes = _notes(product.weight.stored.device)
    notes[_name(product, bucket)] = None if tiles is None else asdict(tiles)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(notes, indent=1), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        logger.debug("tunings are not kept: %s", error)


def choices_for(product: Product, bucket: int) -> list[Tiles]:
    """The tilings worth timing."""
    return candidates(product.num_weight_rows, product.in_features, bucket, product.weight.kind)


def _name(product: Product, bucket: int) -> str:
    """Names a kind of product, its rows, and the candidates that it was chosen from."""
    digest = hashlib.sha256(repr(choices_for(product, bucket)).encode()).hexdigest()[:12]
    return f"{bucket} {product.kind} {digest}"


def fastest(product: Product, num_rows: int, *, residual: bool) -> Tiles | None:
    """The best tiling for so many rows, or None where the library beats them all."""
    device = product.weight.stored.device
    bucket = bucket_of(num_rows)
    assert bucket is not None
    x = torch.randn(num_rows, product.in_features, device=device).to(product.dtype)
    other = torch.zeros(num_rows, product.out_features, dtype=product.dtype, device=device) if residual else None
    choices = choices_for(product, bucket)
    if len(choices) == 1:
        return choices[0]
    product.reserve(choices)
    copies = _copies(product)
    times: dict[Tiles | None, float] = {}
    for tiles in choices:
        if not _compiles(product, num_rows, residual, tiles):
            continue
        times[tiles] = _time(lambda one, tiles=tiles: one.by_kernel(x, other, tiles), copies)  # type: ignore[misc]
    if num_rows >= _LIBRARY_FROM or not times:
        times[None] = _time(lambda one: one.by_library(x, other), copies)
    best = min(times, key=lambda tiles: times[tiles])
    logger.debug("%d x %d, %d rows: %s", product.num_weight_rows, product.in_features, num_rows, _table(times))
    remember(product, bucket, best)
    return best


def _copies(product: Product) -> list[Product]:
    """The product and others like it, together more than L2 holds; fewer where memory is short."""
    copies = [product]
    while len(copies) * product.num_bytes < _COLD_BYTES:
        other = copy.copy(product)
        try:
            other.weight = replace(product.weight, stored=product.weight.stored.clone())
        except torch.OutOfMemoryError:
            break
        copies.append(other)
    return copies


def expect_work(device: torch.device) -> None:
    """Get ready to compile where no engine was started on a card like this one before; `dismiss` ends it."""
    if device.type == "cuda" and uses_kernels(device) and not _notes(device)[1]:
        expect()


def compile_ahead(
    device: torch.device,
    passes: Sequence[Callable[[], object]],
    wanted: Sequence[tuple[Product, int, bool, Sequence[Tiles]]] = (),
) -> None:
    """Compile what passes run, and tilings of (product, number of rows, whether a residual is added), many at a time.

    Most of a model's first start on a machine is compiling: where a product was never tuned here, other processes do
    it. The passes are run: nothing in them may be looked up by what a kernel computes.
    """
    if device.type != "cuda":
        return
    jobs: dict[Any, tuple[Product, int, bool, Tiles]] = {}
    for product, num_rows, residual, choices in wanted:
        product.reserve(choices)
        for tiles in choices:
            jobs[product.kind, bucket_of(num_rows), tiles] = product, num_rows, residual, tiles
    work = [partial(_compiles, *job) for job in jobs.values()]
    buckets = [(product, bucket) for product, rows, *_ in wanted if (bucket := bucket_of(rows)) is not None]
    if any(not recalled(*one)[0] for one in buckets):
        began = time.perf_counter()
        count = compile_apart(wanted_by([*work, *passes]))
        logger.info("%d kernels compiled in other processes in %.1f s", count, time.perf_counter() - began)
    with ThreadPoolExecutor(max(1, min(len(work), os.cpu_count() or 1))) as pool:
        list(pool.map(lambda one: one(), work))
    for one in passes:
        try:
            one()
        except Exception as error:  # noqa: BLE001 - it will be met again, where it is dealt with
            logger.debug("compiling ahead failed: %s", error)


def _compiles(product: Product, num_rows: int, residual: bool, tiles: Tiles) -> bool:
    """Whether a tiling compiles for this card."""
    from outrider.kernels.jit.launch_products import compile_product

    x = torch.empty(num_rows, product.in_features, dtype=product.dtype, device=product.weight.stored.device)
    other = x.new_empty(num_rows, product.out_features) if residual else None
    out = x.new_empty(num_rows, product.out_features, dtype=product.out_dtype)
    try:
        compile_product(product, x, out, other, tiles, normed=product.normed_before)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, there are other tilings
        logger.debug("%s does not compile here: %s", tiles, error)
        return False
    return True


def _time(run: Callable[[Product], object], copies: list[Product]) -> float:
    """Microseconds of one call, in a chain through all copies; infinite if it cannot be launched."""
    turns = max(1, round(_CHAIN_BYTES / (len(copies) * copies[0].num_bytes)))
    try:
        run(copies[0])
    except Exception as error:  # noqa: BLE001 - too much shared memory for this card is only known at the launch
        logger.debug("a tiling does not run here: %s", error)
        return float("inf")
    torch.cuda.synchronize(copies[0].weight.stored.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for one in copies:
                run(one)
    times = []
    for _ in range(_REPLAYS):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return min(times) * 1e3 / (turns * len(copies))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _table(times: dict[Tiles | None, float]) -> str:
    return ", ".join(f"{tiles or 'library'} {micros:.1f} us" for tiles, micros in times.items())
