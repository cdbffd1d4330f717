"""How a product is launched: its grid, its flags and the scratch that programs share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from outrider.kernels.jit.products import product_kernel, silu_mul_kernel
from outrider.kernels.launch import interpreted, overlaps
from outrider.kernels.tiles import bucket_of

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.kernels.products import Product
    from outrider.kernels.tiles import Tiles

__all__ = ["compile_product", "launch_product", "launch_silu_mul", "reserve"]

_scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
_outgrown: list[tuple[Tensor, Tensor]] = []  # captured graphs may still write here


def reserve(device: torch.device, num_partials: int, num_counters: int) -> None:
    """Make sure there is room for so many partial sums (fp32) and counters (zero). Not while a graph is captured."""
    partials, counters = _scratch.get(device, (None, None))
    if partials is not None and counters is not None:
        if partials.numel() >= num_partials and counters.numel() >= num_counters:
            return
        num_partials, num_counters = max(num_partials, partials.numel()), max(num_counters, counters.numel())
        _outgrown.append((partials, counters))
    _scratch[device] = (
        torch.empty(num_partials, dtype=torch.float32, device=device),
        torch.zeros(num_counters, dtype=torch.int32, device=device),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the zeros are there, whichever stream comes next


def _call(product: Product, x: Tensor, out: Tensor, residual: Tensor | None, tiles: Tiles, normed: bool):
    """(grid, positional arguments, keywords) of `product_kernel`."""
    weight, num_weight_rows = product.weight, product.num_weight_rows
    rows = bucket_of(x.shape[0])
    assert rows is not None
    partials = counters = out
    if tiles.split_k > 1:
        reserve(x.device, tiles.num_partials(num_weight_rows, rows), tiles.num_tiles(num_weight_rows))
        partials, counters = _scratch[x.device]
    overlap = overlaps(x.device)
    norm = product.norm is not None and not normed
    several = x.shape[0] > 1  # the stride of a lone row can be anything, and each would be a compilation
    inputs = product.in_features
    even = inputs % tiles.block_k == 0
    arguments = (
        x,
        weight.stored,
        out,
        product.bias if product.bias is not None else out,
        product.norm[0] if product.norm is not None else out,
        residual if residual is not None else out,
        weight.scales if weight.scales is not None else out,
        partials,
        counters,
        product.norm[1] if product.norm is not None else 0.0,
        x.shape[0],
        num_weight_rows,
        inputs,
        x.stride(0) if several else inputs,
        weight.stored.stride(0),
        residual.stride(0) if residual is not None and several else product.out_features,
        out.stride(0) if several else product.out_features,
    )
    keywords = {
        "ACTIVATION": product.activation or "none",
        "NORM": norm,
        "BIAS": product.bias is not None,
        "RESIDUAL": residual is not None,
        "KIND": weight.kind or "none",
        "FAST": weight.kind is not None and x.dtype == torch.bfloat16 and not interpreted(),
        "EVEN_K": even,
        "SPLIT_K": tiles.split_k,
        "PREFETCH": (product.prefetch or tiles.prefetch) if even and _aligned(weight.stored) else 0,
        "LINE": tiles.line,
        "RELEASE": tiles.release,
        "BLOCK_M": rows,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "OVERLAP": overlap,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "launch_pdl": overlap,
    }
    return (triton.cdiv(num_weight_rows, tiles.block_n), tiles.split_k), arguments, keywords


def _aligned(stored: Tensor) -> bool:
    """Whether all rows begin where a prefetch may: at a multiple of 16 bytes."""
    return stored.data_ptr() % 16 == 0 and stored.stride(0) * stored.element_size() % 16 == 0


def launch_product(
    product: Product, x: Tensor, out: Tensor, residual: Tensor | None, tiles: Tiles, *, normed: bool = False
) -> None:
    """Write the product of x [M, K], 1 <= M <= 128, to `out`. `normed`: x has been through the product's norm."""
    grid, arguments, keywords = _call(product, x, out, residual, tiles, normed)
    product_kernel[grid](*arguments, **keywords)


def compile_product(
    product: Product, x: Tensor, out: Tensor, residual: Tensor | None, tiles: Tiles, *, normed: bool = False
) -> None:
    """Compile what `launch_product` would run, and run nothing. Several threads may do this at once."""
    with torch.cuda.device(x.device):
        grid, arguments, keywords = _call(product, x, out, residual, tiles, normed)
        product_kernel.warmup(*arguments, grid=grid, **keywords)


def launch_silu_mul(both: Tensor, out: Tensor, activation: str) -> None:
    """Write activation(first half of each row of `both`) * second half to `out`."""
    rows, width = out.shape
    overlap = overlaps(both.device)
    block = 1024
    silu_mul_kernel[(rows, triton.cdiv(width, block))](
        both, out, width, both.stride(0), activation, block, overlap, num_warps=4, launch_pdl=overlap
    )
