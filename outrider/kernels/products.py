"""A linear layer with its neighbours fused in: the norm before it, the gate and the residual after it.

A decode step reads every weight once, and for few rows that reading is all it costs. Up to 128 rows one kernel does the
whole of it (`jit/products.py`); for more, and wherever kernels do not run, the library's product and its neighbours do.

**Rows are independent.** All calls of 1 to 16 rows run one kernel with one shape, so a row's bits depend neither on the
other rows nor on how many there are. The same holds inside the buckets of 32, 64 and 128 rows where tuning chose our
kernel; the library promises nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kernels.launch import runs_kernels
from outrider.kernels.tiles import ROW_BUCKETS, Tiles, bucket_of, default_tiles
from outrider.kernels.weights import StoredWeight, WeightQuantization, store

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = ["Activation", "Product", "gate_reference", "product_reference", "silu_mul", "tune"]

Activation = Literal["silu", "gelu_tanh"]

_chosen: dict[tuple[Hashable, int], Tiles | None] = {}  # (kind of product, bucket) -> tuned tiles; None: the library


def gate_reference(both: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up for `both` = [gate, up] side by side: [M, 2 * I] -> [M, I], rounded once."""
    gate, up = both.float().chunk(2, -1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (active * up).to(both.dtype)


def silu_mul(both: Tensor, activation: Activation = "silu") -> Tensor:
    """`gate_reference` in one kernel. Rows may be strided."""
    if not runs_kernels(both):
        return gate_reference(both, activation)
    from outrider.kernels.jit.launch_products import launch_silu_mul

    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    launch_silu_mul(both, out, activation)
    return out


def product_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `Product` computes, in fp32 throughout and rounded once. Shapes as there."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].float()
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if activation is not None:
        y = gate_reference(y, activation)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


class Product:
    """y = epilogue(norm(x) @ weight.T + bias).

    Args:
        weight: [N, K], bf16, fp16 or fp32; gated: [2 * I, K], gate rows before up rows. fp32 always takes the
            library's product, without TF32 unless torch was told otherwise.
        bias: [N], or None.
        norm: (weight [K], eps) of an RMSNorm of x that comes first, or None. A weight wider than x (Gemma's 1 + w in
            fp32) is multiplied in before rounding.
        gated: y = silu(gate) * up, [M, I]. Or the activation's name: "silu", "gelu_tanh".
        out_dtype: Of y; that of x unless given.
        quantization: "fp8", "int8" or "int4" weights (for drafts), or None. Only the rounded weight is kept.
        prefetch: How many steps of its weights each program asks for before x is ready; a power of two. More than
            the tiling's few pays where the kernel before leaves memory idle, as attention does. Changes no bit.

    Attributes:
        in_features: K.
        out_features: Width of y: N, or I.
        num_bytes: Bytes of weight that one pass reads.

    Scratch is shared by all products of a device: do not run products on two streams at once.

    Raises:
        ConfigError: Unknown quantization or activation, a weight of another dtype, or an odd gated weight.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool | Activation = False,
        out_dtype: torch.dtype | None = None,
        quantization: WeightQuantization | None = None,
        prefetch: int | None = None,
    ) -> None:
        self.activation: Activation | None = ("silu" if gated is True else gated) or None
        if self.activation not in (None, "silu", "gelu_tanh"):
            raise ConfigError(f"gated={gated!r} is no activation that a product knows; use 'silu' or 'gelu_tanh'")
        if self.activation is not None and weight.shape[0] % 2:
            raise ConfigError(f"a gated weight has as many gate as up rows, and this one has {weight.shape[0]} rows")
        self.num_weight_rows, self.in_features = weight.shape
        self.out_features = self.num_weight_rows // (1 if self.activation is None else 2)
        self.weight: StoredWeight = store(weight, quantization)
        self.bias = None if bias is None else bias.detach()
        self.norm = None if norm is None else (norm[0].detach().contiguous(), norm[1])
        self.prefetch = prefetch
        self.dtype = weight.dtype
        self.out_dtype = out_dtype or weight.dtype
        self.num_bytes = self.weight.num_bytes
        self.kind: Hashable = (
            (self.num_weight_rows, self.in_features, self.activation, bias is None, norm is None),
            (self.dtype, self.out_dtype, quantization, weight.device),
        )
        if self.runs_kernel:
            self.reserve([tiles for rows in ROW_BUCKETS if (tiles := self.tiles(rows)) is not None])

    @property
    def runs_kernel(self) -> bool:
        """Whether few rows run our kernel at all."""
        return self.dtype != torch.float32 and runs_kernels(self.weight.stored)

    def tiles(self, num_rows: int) -> Tiles | None:
        """How a call of so many rows is cut into tiles; None: by the library."""
        rows = bucket_of(num_rows)
        if rows is None or not self.runs_kernel:
            return None
        if (self.kind, rows) in _chosen:
            return _chosen[self.kind, rows]
        if rows > 64 and self.weight.kind is None:
            return None
        return default_tiles(self.num_weight_rows, self.in_features, rows, self.weight.kind)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[M, K] (rows may be strided), residual [M, out_features] or None -> [M, out_features] in `out_dtype`."""
        tiles = self.tiles(x.shape[0]) if x.shape[0] else None
        return self.by_library(x, residual) if tiles is None else self.by_kernel(x, residual, tiles)

    def by_kernel(self, x: Tensor, residual: Tensor | None, tiles: Tiles) -> Tensor:
        """One launch with these tiles; 1 <= M <= 128."""
        from outrider.kernels.jit.launch_products import launch_product

        out = x.new_empty(x.shape[0], self.out_features, dtype=self.out_dtype)
        normed = self.normed_before
        launch_product(self, self._normed(x) if normed else x, out, residual, tiles, normed=normed)
        return out

    @property
    def normed_before(self) -> bool:
        """Whether the norm runs by itself: in fp16, x * weight alone may leave its range."""
        return self.norm is not None and self.dtype == torch.float16

    def by_library(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The library's norm and product, and a kernel for the gate."""
        x = self._normed(x)
        if self.activation is None and residual is not None and self.bias is None and self._is_plain(residual):
            return torch.addmm(residual, x, self.weight.stored.t())
        wide = self.out_dtype == torch.float32 and x.is_cuda and self.dtype != torch.float32
        if wide and self.weight.kind is None and x.shape[0]:
            y = torch.mm(x, self.weight.stored.t(), out_dtype=torch.float32)
            y = y if self.bias is None else y + self.bias
        else:
            y = self.weight.linear(x, self.bias)
        if self.activation is not None:
            y = silu_mul(y, self.activation)
        if residual is not None:
            y = y + residual
        return y.to(self.out_dtype)

    def untuned(self, num_rows: Sequence[int]) -> dict[int, int]:
        """The buckets of these numbers of rows for which nothing was chosen yet, each with its largest number."""
        largest: dict[int, int] = {}
        if self.runs_kernel and self.weight.stored.is_cuda:
            for rows in num_rows:
                bucket = bucket_of(rows)
                if bucket is not None and (self.kind, bucket) not in _chosen:
                    largest[bucket] = max(rows, largest.get(bucket, 0))
        return largest

    def reserve(self, choices: Sequence[Tiles | None]) -> None:
        """Make room for what programs that share a tile leave to each other. Not while a graph is captured."""
        from outrider.kernels.jit.launch_products import reserve

        num_partials = num_counters = 0
        for tiles in choices:
            if tiles is not None and tiles.split_k > 1:
                num_partials = max(num_partials, tiles.num_partials(self.num_weight_rows, ROW_BUCKETS[-1]))
                num_counters = max(num_counters, tiles.num_tiles(self.num_weight_rows))
        if num_counters:
            reserve(self.weight.stored.device, num_partials, num_counters)

    def choose(self, bucket: int, tiles: Tiles | None) -> None:
        """Run all products of this kind so from now on; None: by the library."""
        _chosen[self.kind, bucket] = tiles
        self.reserve([tiles])

    def _is_plain(self, residual: Tensor) -> bool:
        return self.weight.kind is None and self.out_dtype == self.dtype == residual.dtype

    def _normed(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        weight, eps = self.norm
        if x.dtype == weight.dtype:
            return F.rms_norm(x, (self.in_features,), weight, eps)
        return F.rms_norm(x.to(weight.dtype), (self.in_features,), weight, eps).to(x.dtype)


def tune(
    products: Sequence[tuple[Product, bool]], num_rows: Sequence[int], *, passes: Sequence[Callable[[], object]] = ()
) -> None:
    """Time a few tilings and the library for these numbers of rows, and keep the best for all products of a kind.

    Some tens of milliseconds a kind, more where kernels must be compiled. Up to 16 rows only tilings are compared, so
    that rows stay independent. Does nothing where kernels do not run.

    Args:
        products: Each with whether a residual is added to it.
        num_rows: How many rows they will be called with.
        passes: What else is compiled at the same time, see `compile_ahead`.
    """
    if not any(product.runs_kernel and product.weight.stored.is_cuda for product, _ in products):
        return
    from outrider.kernels.tuning import choices_for, compile_ahead, fastest, recalled

    coming: list[tuple[Product, int, bool, Sequence[Tiles]]] = []
    unknown: dict[tuple[Hashable, int], tuple[Product, int, bool]] = {}
    for product, residual in products:
        for bucket, rows in product.untuned(num_rows).items():
            known, tiles = recalled(product, bucket)
            if known:
                product.choose(bucket, tiles)
                coming.append((product, rows, residual, [] if tiles is None else [tiles]))
            elif (product.kind, bucket) not in unknown:
                unknown[product.kind, bucket] = product, rows, residual
                coming.append((product, rows, residual, choices_for(product, bucket)))
    compile_ahead(products[0][0].weight.stored.device, passes, coming)
    for (_, bucket), (product, rows, residual) in unknown.items():
        product.choose(bucket, fastest(product, rows, residual=residual))
