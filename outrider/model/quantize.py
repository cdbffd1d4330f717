"""Linear layers for decode steps on a CPU: prepacked for oneDNN, int8 or int4.

Every kernel here is *row-independent*: in a product of a given number of rows, the bits of one output row depend on
that input row and the weight alone, not on the other rows nor on the row's place. Exact verification needs that, and
feeds every round the same number of rows. fbgemm's dynamic int8 is absent for that reason: it scales all rows by their
common maximum. int8 and int4 also give the same bits for any number of rows. Packed bf16 does so on a Zen 4 from two
rows on (about 105 shapes), but not on an Intel CPU with AMX (2048 x 2048, 2 against 16 rows).

Measured (Zen 4, 2 cores, the layers of SmolLM2-135M without its head, streamed, ms at 1 / 2 / 4 / 6 / 8 / 16 rows; the
machine was not idle, so read 20 % as noise):

    fp32 stock            41 / 69 / 47 / 40 / 42 / 52    the bits of a row change with the number of rows
    fp32 packed           22 / 22 / 18 / 18 / 22 / 29
    bf16 stock            19 / 21 / 22 / 23 / 25 / 29
    bf16 packed           15 / 15 / 14 / 14 / 16 / 19
    int8, scaled by row    8 / 11 / 12 / 13 / 18 / 19    `_weight_int8pack_mm` needs 18 at 6 rows and 32 at 16
    int4                   5 /  - /  8 /  - / 16 / 27    grows with the rows: bf16 packed passes it at about six

Quality and choice of layers: see `outrider.model.fuse`, which walks the model.
"""

# ruff: noqa: SLF001 - torch gives these kernels no public names

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError

__all__ = [
    "GROUP_SIZES",
    "Int4Linear",
    "Int8Linear",
    "PackedLinear",
    "Quantization",
    "check_kind",
    "pack",
    "packable",
    "quantised_bytes",
    "quantize",
    "unfit",
]

Quantization = Literal["int8", "int4"]

GROUP_SIZES = (32, 64, 128)
"""Inputs that share one int4 scale. They differ by 5 % in time, so the finest, first, is used."""

_INT4_OUT_MULTIPLE = 16  # the int4 kernel's block of output features
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's range that the int4 search tries
_ROWS_AT_A_TIME = 4096  # weight rows quantised together: bounds the fp32 copies


class PackedLinear(nn.Module):
    """A linear layer whose weight is laid out once for oneDNN, so that 1 to 16 rows cost nearly the same.

    The packed weight is opaque: it is no parameter or buffer, cannot be moved, saved or trained.

    A single row may take another summation order than several. In fp32 it does from 1536 inputs on, so one row is
    computed as two (22 ms against 22 above). In bf16 it did in 1 of 105 shapes tried on a Zen 4 (192 x 2304), where
    doubling cost more than it brings: whoever needs exactness in bf16 feeds a fixed number of rows.

    Args:
        weight: [out, in], fp32 or bf16, on the CPU. Copied; the caller drops the original.
        bias: [out] or None.
        reason: Why this layer is not quantised although that was asked; empty when it was not asked.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, reason: str = "") -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.reason = reason
        self.bias = None if bias is None else bias.detach().contiguous()
        self.doubles_single_row = weight.dtype == torch.float32
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.doubles_single_row and x.numel() == self.in_features:
            pair = self._product(x.reshape(1, -1).expand(2, -1), self._packed, self.bias, "none", [], "")
            return pair[:1].view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]
        return self._product(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Show the shape, as nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(nn.Module):
    """int8 weights with a scale per output, times int8 activations with a scale per row, summed exactly in int32.

    Integer sums have no rounding, hence no order: row independence holds by construction.

    Args:
        weight: [out, in], floating point, on the CPU.
        bias: [out] or None.
    """

    weight: Tensor  # [in, out], int8: the transpose, as `_int_mm` wants its second factor
    scale: Tensor  # [out], fp32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        codes, scale = _int8_codes(weight.detach())
        self.register_buffer("weight", codes.t(), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        largest = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True, dtype=torch.float32)  # [rows, 1]
        step = largest.clamp_(min=1e-10).mul_(1 / 127)
        codes = (rows / step).round_().to(torch.int8)
        out: Tensor = (torch._int_mm(codes, self.weight) * step).mul_(self.scale).to(self.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Show the shape, as nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int4Linear(nn.Module):
    """4-bit weights with a scale and a zero point per group of inputs; activations stay as they are.

    Args:
        weight: [out, in], floating point, on the CPU; out a multiple of 16, in a multiple of `group`.
        bias: [out] or None.
        group: Inputs that share a scale, one of `GROUP_SIZES`.
    """

    codes: Tensor  # [out, in / 2], uint8, two weights a byte in the kernel's own order
    scales: Tensor  # [in / group, out, 2]: scale, and the value that code 8 stands for

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = group
        codes, scales = _int4_codes(weight.detach(), group)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.register_buffer("codes", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, self.scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Show the shape, as nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


def check_kind(kind: str | None, device: torch.device) -> None:
    """Refuse a quantization that there is none of, or not on this device: known before any weight is read.

    Raises:
        ConfigError: The message names the value and the remedy.
    """
    if kind is None:
        return
    if kind not in get_args(Quantization):
        raise ConfigError(f"quantization must be 'int8', 'int4' or None, got {kind!r}")
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={kind!r} runs on a CPU only, and the model is meant for {device}; "
            "load it with device='cpu' or leave quantization off"
        )


def pack(weight: Tensor, bias: Tensor | None, reason: str = "") -> PackedLinear | None:
    """Lay a weight [out, in] out for oneDNN; None where oneDNN cannot (another dtype, no oneDNN, no bf16 support)."""
    return PackedLinear(weight, bias, reason) if packable(weight.dtype) else None


def quantize(weight: Tensor, bias: Tensor | None, kind: Quantization) -> nn.Module | str:
    """Quantise one linear layer; where its shape does not fit the kernel, say why instead.

    Args:
        weight: [out, in], on the CPU.
        bias: [out] or None.
        kind: "int8" or "int4".
    """
    out_features, in_features = weight.shape
    reason = unfit(out_features, in_features, kind)
    if reason:
        return reason
    return Int8Linear(weight, bias) if kind == "int8" else Int4Linear(weight, bias, GROUP_SIZES[0])


def unfit(out_features: int, in_features: int, kind: str) -> str:
    """Say why a layer of this shape cannot be quantised; empty where it can."""
    if kind == "int8":  # VNNI sums four products at a time; other widths fall to a slow reference loop
        return f"in_features {in_features} is no multiple of 4" if in_features % 4 else ""
    if out_features % _INT4_OUT_MULTIPLE:
        return f"out_features {out_features} is no multiple of {_INT4_OUT_MULTIPLE}"
    if in_features % GROUP_SIZES[0]:
        return f"in_features {in_features} is no multiple of {GROUP_SIZES[0]}"
    return ""


def quantised_bytes(out_features: int, in_features: int, kind: str, dtype: torch.dtype) -> int:
    """Bytes of a quantised layer's codes and scales; `dtype` is that of its input."""
    if kind == "int8":
        return out_features * (in_features + 4)
    return out_features * in_features // 2 + in_features // GROUP_SIZES[0] * out_features * 2 * dtype.itemsize


def packable(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are laid out for oneDNN here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> codes [out, in] in -127..127 and scales [out]; symmetric, since `_int_mm` knows no zero point."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = weight.abs().amax(1).float().clamp_(min=1e-10) / 127
    for start in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        codes[rows] = (weight[rows].float() / scale[rows, None]).round_().to(torch.int8)
    return codes, scale


def _int4_codes(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[out, in] -> codes [out, in] in 0..15 (int32) and (scale, value of code 8) [in / group, out, 2]."""
    out_features, in_features = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int32)
    scales = torch.empty(in_features // group, out_features, 2, dtype=weight.dtype)
    for start in range(0, out_features, _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        groups = weight[rows].float().view(-1, in_features // group, group)
        picked, scale, middle = _best_clip(groups, weight.dtype)
        codes[rows] = picked.view(-1, in_features).int()
        scales[:, rows] = torch.cat([scale, middle], -1).transpose(0, 1).to(weight.dtype)
    return codes, scales


def _best_clip(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For each group keep the clipped range with the least squared error.

    Rounding a group's rare outliers harder buys finer steps for the rest. Scale and middle are rounded to the kernel's
    dtype *before* the codes are chosen, so the codes make up for that rounding.

    Args:
        groups: [out, in / group, group], fp32.
        dtype: What the kernel will hold scales in.

    Returns:
        Codes [out, in / group, group], scale and middle [out, in / group, 1], all fp32.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for clip in _CLIPS:
        scale = ((high - low) * clip / 15).clamp_(min=1e-8).to(dtype).float()
        middle = (low * clip + 8 * scale).to(dtype).float()
        codes = ((groups - middle) / scale).round_().add_(8).clamp_(0, 15)
        error = ((codes - 8) * scale + middle - groups).square_().sum(-1, keepdim=True)
        if best is None:
            best, least = (codes, scale, middle), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better, codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, middle, best[2]),
        )
    assert best is not None
    return best
