"""Settings as users spell them, brought into one form; and a loaded model made ready to run."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from outrider.config import Method, SpeculationConfig, Verification
from outrider.errors import ConfigError, ModelLoadError
from outrider.model.checkpoint import check_source
from outrider.model.dflash_files import is_block_draft
from outrider.model.dtypes import parse_dtype
from outrider.model.eagle_files import is_eagle
from outrider.model.head_files import head_config
from outrider.model.medusa_heads import is_medusa

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.model.load import LoadedModel
    from outrider.model.quantize import Quantization

__all__ = [
    "check_draft",
    "check_draft_quantization",
    "check_exact",
    "check_parallel",
    "implied_method",
    "load_target",
    "optimized",
    "resolve_device",
    "speculation_from",
    "speculation_of",
    "warn_lossy",
]

NGRAM_MODELS = ("[ngram]", "ngram")  # vLLM's older spelling of lookup, in place of a model


def speculation_from(given: dict[str, Any] | None, **settings: Any) -> SpeculationConfig:
    """Merge `speculative_config` over the single settings, and work out the method where none is named.

    Raises:
        ConfigError: An unknown key, or settings that contradict each other.
    """
    known = {field.name for field in fields(SpeculationConfig)}
    for name in settings.keys() - known:
        raise ConfigError(f"there is no setting {name!r}; settings of drafting are {', '.join(sorted(known))}")
    if given is not None and not hasattr(given, "items"):
        raise ConfigError(
            f"speculative_config must be a dict such as {{'method': 'ngram', 'num_speculative_tokens': 5}}, "
            f"got {given!r:.100}"
        )
    if given is not None:
        unknown = sorted(set(given) - known - {"draft_tensor_parallel_size"})
        if unknown:
            raise ConfigError(
                f"speculative_config does not know {', '.join(map(repr, unknown))}; it knows {', '.join(sorted(known))}"
            )
        if given.get("draft_tensor_parallel_size", 1) != 1:
            wanted = given["draft_tensor_parallel_size"]
            raise ConfigError(f"draft_tensor_parallel_size={wanted!r} is not supported yet; leave it at 1")
        settings |= {name: value for name, value in given.items() if name in known}
    if isinstance(settings["model"], str) and settings["model"] in NGRAM_MODELS:
        settings |= {"model": None, "method": settings["method"] or Method.NGRAM}
    if settings["method"] is not None:
        return SpeculationConfig(**settings)
    # All else is checked first: telling a head by its config may mean a download.
    settings["method"] = Method.NONE if settings["model"] is None else Method.DRAFT_MODEL
    made = SpeculationConfig(**settings)
    return replace(made, method=implied_method(made.model))


def speculation_of(arguments: Mapping[str, Any]) -> SpeculationConfig:
    """Give the settings of drafting that ``LLM(**arguments)`` would have.

    Raises:
        ConfigError: As for `speculation_from`.
    """
    known = {field.name for field in fields(SpeculationConfig)} - {"model", "method"}
    settings = {name: value for name, value in arguments.items() if name in known}
    model, method = arguments.get("speculative_model"), arguments.get("method")
    return speculation_from(arguments.get("speculative_config"), model=model, method=method, **settings)


def implied_method(model: Any) -> Method:
    """What drafts where only a model is named: heads are known by their config, all else drafts as a model."""
    if model is None:
        return Method.NONE
    try:
        config = head_config(model)
    except ModelLoadError:  # it will be met again where the draft is loaded, and be dealt with there
        config = None
    if config is not None and is_eagle(config):
        return Method.EAGLE
    if config is not None and is_block_draft(config):
        return Method.DFLASH
    if config is not None and is_medusa(config):
        return Method.MEDUSA
    return Method.DRAFT_MODEL


def resolve_device(device: torch.device | str | None, source: Any = None) -> torch.device:
    """Give the device named; or the one that a loaded `source` is on; or a card where there is one.

    Raises:
        ConfigError: There is no device of that name.
    """
    if device is None and isinstance(getattr(source, "device", None), torch.device):
        return source.device  # type: ignore[no-any-return]
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error


def check_draft(
    speculation: SpeculationConfig, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> None:
    """Refuse a draft that is not there, and a dtype or a device of it that is none, before the target is loaded.

    Raises:
        ConfigError: There is no such dtype or device.
        ModelLoadError: There is no such draft, and no leave to go on without.
    """
    parse_dtype(dtype, "draft_dtype")
    try:
        resolve_device(device)
    except ConfigError:
        raise ConfigError(f"draft_device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from None
    needed = any(method.takes_model for method in speculation.methods) and not speculation.allow_failure
    if needed and isinstance(speculation.model, str | Path):
        check_source(speculation.model)


def warn_lossy(verification: Verification) -> None:
    """Say plainly that "typical" acceptance changes what is generated."""
    if verification is Verification.TYPICAL:
        warnings.warn(
            "verification='typical' is lossy: sampled text no longer follows the target's distribution "
            "(outputs are marked stats.lossy); use 'coupled', 'rejection' or 'block' for exact results",
            stacklevel=4,
        )


def check_draft_quantization(kind: str | None, source: Any, device: torch.device) -> None:
    """Refuse, before the draft is read, weights that `device` has no kernels for, or that the caller still holds.

    Raises:
        ConfigError: The message has the value and the remedy.
    """
    if kind is None:
        return
    if not _is_name(source):
        raise ConfigError(
            f"draft_quantization={kind!r} would change the model object that was passed in; "
            "pass its folder or Hub id instead"
        )
    if kind == "fp8" and device.type == "cpu":
        raise ConfigError("draft_quantization='fp8' needs a GPU; on a CPU use 'int8' or 'int4', or leave it out")


def check_exact(exact: bool, speculation: SpeculationConfig) -> None:
    """Refuse what exact mode cannot keep its promise with.

    Raises:
        ConfigError: Trees are asked for.
    """
    if exact and speculation.tree is not None:
        raise ConfigError(
            f"exact=True and tree={speculation.tree!r} exclude each other: a path's last bits depend on where in the "
            "tree it was; leave one of them out"
        )


def check_parallel(tensor_parallel_size: int) -> None:
    """Refuse what cannot be done yet.

    Raises:
        ConfigError: More than one device is asked for.
    """
    if tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size={tensor_parallel_size!r} is not supported yet; leave it at 1")


def load_target(source: Any, quantization: str | None, *, device: torch.device, **how: Any) -> LoadedModel:
    """Load the target and make it ready to run; `how` goes to `load_model`.

    Raises:
        ConfigError: A setting is out of range; known before any weight is read.
        ModelLoadError: The model is missing, broken, or cannot be served.
    """
    from outrider.kernels.compilers import dismiss
    from outrider.kernels.tuning import expect_work
    from outrider.model.load import load_model
    from outrider.model.quantize import check_kind

    check_kind(quantization, device)
    expect_work(device)  # gets ready while weights are read
    try:
        return optimized(load_model(source, device=device, **how), source, quantization)
    except BaseException:
        dismiss()
        raise


def optimized(loaded: LoadedModel, source: Any, quantization: str | None) -> LoadedModel:
    """Fuse and pack a model that Outrider loaded itself; a caller's own model object is left as it is.

    Raises:
        ConfigError: Quantisation is asked for a model that the caller still holds, or that cannot take it.
        CapacityError: The device has no room to join weights.
    """
    from outrider.model.fuse import optimize
    from outrider.model.room import capacity_errors

    if _is_name(source):
        with capacity_errors(loaded.name, loaded.dtype, loaded.device):
            optimize(loaded.model, quantization=cast("Quantization | None", quantization))  # it refuses others
    elif quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} would change the model object that was passed in; "
            "pass its folder or Hub id instead"
        )
    return loaded


def _is_name(source: Any) -> bool:
    """Whether a model is named, not given: then nobody else holds it."""
    return source is None or isinstance(source, str) or hasattr(source, "__fspath__")
