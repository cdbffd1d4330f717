"""Which dtype to compute in: what was asked for, what the checkpoint holds, and what the device does well."""

from __future__ import annotations

import logging

import torch

from outrider.errors import ConfigError

__all__ = ["parse_dtype", "resolve_dtype"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_SERVED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def resolve_dtype(asked: torch.dtype | None, stored: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `stored` is the checkpoint's dtype by name, or "gguf" for a quantised file.

    On a CPU half precision means bfloat16 (float16 products are slow and overflow), and without native bfloat16 the
    automatic choice is float32.
    """
    if asked is not None:
        if asked is torch.float16 and device.type == "cpu":
            logger.warning("float16 is not served on a CPU; using bfloat16")
            return torch.bfloat16
        return asked
    kept = _DTYPES.get(stored)
    if stored == "float64":
        kept = torch.float32
    if device.type != "cpu":
        return kept or torch.bfloat16
    if kept is torch.float32:
        return torch.float32
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether products in bfloat16 run in hardware here; False where this torch cannot say."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe()) if probe is not None else False


def parse_dtype(dtype: torch.dtype | str | None, name: str = "dtype") -> torch.dtype | None:
    """The dtype meant by a spelling; None for "auto". Raises: ConfigError naming the setting, with the spellings."""
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, str):
        parsed = _DTYPES.get(dtype.removeprefix("torch."))
    else:
        parsed = dtype if dtype in _SERVED_DTYPES else None
    if parsed is None:
        raise ConfigError(f"{name} must be one of auto, {', '.join(_DTYPES)} or None, got {dtype!r}")
    return parsed
