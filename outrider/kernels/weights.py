"""Weights as a product reads them: as they came, or rounded to 8 or 4 bits for a draft that may be wrong.

Only weights are rounded; activations stay as they are and sums are fp32. An int8 or fp8 weight has one scale an output
row; int4 has one for each group of 128 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GROUP", "StoredWeight", "WeightQuantization", "quantised_bytes", "store"]

WeightQuantization = Literal["fp8", "int8", "int4"]
GROUP = 128
"""Inputs that share an int4 scale. Byte j of a group holds input j in its low half and input 64 + j in its high one."""

_LARGEST = {"fp8": 448.0, "int8": 127.0}
_CHUNK = 4096  # output rows converted at a time


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K] in the form that kernels read.

    Attributes:
        stored: [N, K] in its own dtype, or bytes: [N, K] (fp8, int8) or [N, groups * 64] (int4).
        scales: None, [N] fp32 (fp8, int8), or [groups, N] in the activations' dtype (int4).
        kind: How it is quantised, or None.
        dtype: The activations' dtype.
        in_features: K.
    """

    stored: Tensor
    scales: Tensor | None
    kind: WeightQuantization | None
    dtype: torch.dtype
    in_features: int

    @property
    def num_bytes(self) -> int:
        """What one pass reads."""
        parts = [self.stored] if self.scales is None else [self.stored, self.scales]
        return sum(part.numel() * part.element_size() for part in parts)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(output rows, their weights [rows, K] in the activations' dtype), a chunk at a time."""
        if self.kind is None:
            yield slice(None), self.stored
            return
        for start in range(0, self.stored.shape[0], _CHUNK):
            rows = slice(start, min(start + _CHUNK, self.stored.shape[0]))
            yield rows, self._dequantise(rows)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[M, K] -> [M, N] by the library's product, in the activations' dtype."""
        if self.kind is None:
            return F.linear(x, self.stored, bias)
        out = x.new_empty(x.shape[0], self.stored.shape[0])
        for rows, weight in self.chunks():
            out[:, rows] = F.linear(x, weight, None if bias is None else bias[rows])
        return out

    def _dequantise(self, rows: slice) -> Tensor:
        stored, scales = self.stored[rows], self.scales
        assert scales is not None
        if self.kind == "int4":
            groups = stored.view(stored.shape[0], -1, GROUP // 2)
            numbers = torch.cat((groups & 15, groups >> 4), -1).float() - 8
            wide = numbers * scales[:, rows].t().float()[:, :, None]
            return wide.flatten(1)[:, : self.in_features].to(self.dtype)
        numbers = stored.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        return (numbers * scales[rows, None]).to(self.dtype)


def store(weight: Tensor, quantization: WeightQuantization | None) -> StoredWeight:
    """Bring a weight [N, K] into the form that kernels read. Quantised, nothing of the original is kept.

    Raises:
        ConfigError: The quantization is unknown, or the weight's dtype is not bf16, fp16 or fp32.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"a product needs weights in bfloat16, float16 or float32, not {weight.dtype}")
    weight = weight.detach()
    if quantization is None:
        whole = weight if weight.stride(-1) == 1 else weight.contiguous()
        return StoredWeight(whole, None, None, weight.dtype, weight.shape[1])
    if quantization not in get_args(WeightQuantization):
        known = ", ".join(get_args(WeightQuantization))
        raise ConfigError(f"quantization={quantization!r} is unknown; choose one of {known}, or None")
    quantise = _to_int4 if quantization == "int4" else _to_bytes
    parts = [quantise(chunk, quantization) for chunk in torch.split(weight, _CHUNK)]
    stored = torch.cat([part[0] for part in parts])
    scales = torch.cat([part[1] for part in parts], dim=-1)
    return StoredWeight(stored, scales, quantization, weight.dtype, weight.shape[1])


def quantised_bytes(out_features: int, in_features: int, kind: str, dtype: torch.dtype) -> int:
    """Bytes of a weight [out, in] that `store` quantises; `dtype` is that of the activations."""
    if kind != "int4":
        return out_features * (in_features + 4)
    return -(-in_features // GROUP) * out_features * (GROUP // 2 + dtype.itemsize)


def _to_bytes(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """[n, K] -> bytes [n, K], scales [n]: the row's largest number becomes the format's."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / _LARGEST[kind]).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = wide / scales[:, None]
    small = scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
    return small.view(torch.uint8), scales


def _to_int4(weight: Tensor, _: str) -> tuple[Tensor, Tensor]:
    """[n, K] -> bytes [n, groups * 64], scales [groups, n]: the number of largest size becomes -8."""
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(weight.shape[0], -1, GROUP)
    peaks = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (peaks / -8).to(weight.dtype)
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    numbers = ((groups * inverse[..., None]).round() + 8).clamp(0, 15).to(torch.uint8)
    low, high = numbers.chunk(2, -1)
    return (low | high << 4).flatten(1), scales.t().contiguous()
