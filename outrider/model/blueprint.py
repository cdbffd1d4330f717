"""What a checkpoint will be once it is loaded, known from its config and its headers: no weight is read for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.model.checkpoint import first_line, stored_dtype
from outrider.model.dtypes import resolve_dtype
from outrider.model.facts import context_length, require_context
from outrider.model.quantised import plan_quantised
from outrider.model.quiet import quiet_transformers
from outrider.model.room import dense_bytes, stored_bytes
from outrider.model.support import TEXT_HALF_KEYS, causal_text_class, check_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from outrider.model.checkpoint import StoredTensor

__all__ = ["Blueprint", "drawn", "read_config"]


@dataclass(frozen=True)
class Blueprint:
    """A model that can be served, not yet loaded.

    Attributes:
        name: The checkpoint's.
        config: Of the text half, where the whole is more.
        model_class: What transformers makes of it.
        dtype: What its floating weights will be in.
        keys: How the whole names the text half's weights; None where they are one.
        expanded: The scheme whose weights will be expanded to plain ones; None where they load as stored.
        num_bytes: Bytes of the weights once loaded.
        stored_bytes: Bytes of the weights on disk, as far as headers were given.
    """

    name: str
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    dtype: torch.dtype
    keys: dict[str, str] | None
    expanded: str | None
    num_bytes: int
    stored_bytes: int


def drawn(
    whole: PreTrainedConfig,
    tensors: Sequence[StoredTensor],
    name: str,
    asked: torch.dtype | None,
    device: torch.device,
    max_model_len: int | None = None,
    *,
    stored: str | None = None,
) -> Blueprint:
    """Decide how a checkpoint is served, before any weight is read.

    Args:
        whole: Its config.
        tensors: What the headers of its weights say; empty where only the config is known.
        name: What to call it in messages.
        asked: The dtype wished for; None chooses by checkpoint and device.
        device: Where it will run.
        max_model_len: Longest sequence wished for.
        stored: What the weights are stored in, as `resolve_dtype` calls it; None: what config and headers say.

    Raises: UnsupportedModelError for what cannot be served exactly or is quantised in a way that does not load here;
    ConfigError for a `max_model_len` beyond the context.
    """
    config, model_class = causal_text_class(whole, name)
    check_config(config, model_class, name)
    if max_model_len is not None:
        require_context(max_model_len, context_length(config, name))
    expanded = plan_quantised(config, {one.dtype for one in tensors}, name, device)
    dtype = resolve_dtype(asked, stored or stored_dtype(list(tensors), config), device)
    keys = TEXT_HALF_KEYS.get(whole.model_type)
    as_stored = bool(tensors) and expanded is None
    needed = stored_bytes(tensors, dtype, keys) if as_stored else dense_bytes(model_class, config, dtype)
    return Blueprint(name, config, model_class, dtype, keys, expanded, needed, sum(one.num_bytes for one in tensors))


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """A checkpoint's config as transformers understands it, without running any of the checkpoint's code.

    Raises: ModelLoadError for a broken one; UnsupportedModelError for a model type that transformers does not know.
    """
    import transformers

    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        model_type = raw.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path} is not a valid config ({first_line(error)}); restore or download it again"
        ) from error
    if not model_type:
        raise ModelLoadError(f"{path} has no model_type; save the model again with save_pretrained")
    if model_type not in transformers.CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise UnsupportedModelError(
                f"{name}: model type {model_type!r} brings its own code (auto_map), which Outrider never runs, and "
                f"transformers {transformers.__version__} has no class for it; use a model with a native class"
            )
        raise UnsupportedModelError(
            f"{name}: transformers {transformers.__version__} does not know model type {model_type!r}; upgrade it"
        )
    try:
        with quiet_transformers():
            config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # validation errors of many kinds
        raise ModelLoadError(f"{path} is not a valid {model_type} config ({first_line(error)}); correct it") from error
    return config
