"""Which tiling of a product is fastest on this card: measured, with cold caches."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from outrider.kernels.tiles import bucket_of, candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outrider.kernels.products import Product
    from outrider.kernels.tiles import Tiles

__all__ = ["fastest"]

logger = logging.getLogger(__name__)

_SCRUB_BYTES = 128 << 20  # more than any L2; writing it also keeps the card busy while the host launches
_REPEATS = 5
_LIBRARY_FROM = 17  # below, rows must not see each other: see `products`


def fastest(product: Product, num_rows: int, *, residual: bool) -> Tiles | None:
    """The best tiling for so many rows, or None where the library beats them all by more than noise."""
    device = product.weight.stored.device
    x = torch.randn(num_rows, product.in_features, device=device).to(product.dtype)
    other = torch.zeros(num_rows, product.out_features, dtype=product.dtype, device=device) if residual else None
    bucket = bucket_of(num_rows)
    assert bucket is not None
    bucketed = candidates(product.num_weight_rows, product.in_features, bucket, product.weight.kind)
    product.reserve(bucketed)
    usable = _compiled(product, x, other, bucketed)
    scrub = torch.empty(_SCRUB_BYTES, dtype=torch.uint8, device=device)
    times: dict[Tiles | None, float] = {}
    for tiles in usable:
        times[tiles] = _time(lambda tiles=tiles: product.by_kernel(x, other, tiles), scrub)  # type: ignore[misc]
    if num_rows >= _LIBRARY_FROM or not times:
        times[None] = _time(lambda: product.by_library(x, other), scrub)
    best = min(times, key=lambda tiles: times[tiles])
    logger.debug("%d x %d, %d rows: %s", product.num_weight_rows, product.in_features, num_rows, _table(times))
    return best


def _compiled(product: Product, x: Tensor, residual: Tensor | None, choices: list[Tiles]) -> list[Tiles]:
    """Those that compile and fit this card (a smaller one may lack the shared memory)."""
    from outrider.kernels.jit.launch_products import compile_product

    out = x.new_empty(x.shape[0], product.out_features, dtype=product.out_dtype)
    normed = product.norm is not None and product.dtype == torch.float16

    def works(tiles: Tiles) -> bool:
        try:
            compile_product(product, x, out, residual, tiles, normed=normed)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, there are other tilings
            logger.debug("%s does not compile here: %s", tiles, error)
            return False
        return True

    with ThreadPoolExecutor(len(choices)) as pool:
        return [tiles for tiles, good in zip(choices, pool.map(works, choices), strict=True) if good]


def _time(run: Callable[[], object], scrub: Tensor) -> float:
    """Median microseconds of one call that finds nothing in L2; infinite if it cannot be launched."""
    pairs = [(_event(), _event()) for _ in range(_REPEATS)]
    try:
        run()
        for start, end in pairs:
            scrub.zero_()
            start.record()
            run()
            end.record()
    except Exception as error:  # noqa: BLE001 - too much shared memory for this card is only known at the launch
        logger.debug("a tiling does not run here: %s", error)
        return float("inf")
    torch.cuda.synchronize(scrub.device)
    times = sorted(float(start.elapsed_time(end)) for start, end in pairs)
    return times[_REPEATS // 2] * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _table(times: dict[Tiles | None, float]) -> str:
    return ", ".join(f"{tiles or 'library'} {micros:.1f} us" for tiles, micros in times.items())
