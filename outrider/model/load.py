"""From what a user names (a Hub id, a folder, a GGUF, a loaded model) to a model ready to serve, or one clear error.

Only safetensors and GGUF are read and no code from a checkpoint is ever run. What cannot be served exactly is refused
from its config, before the weights. The attention function is switched later, with `set_attention`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ConfigError, ModelLoadError, UnsupportedModelError
from outrider.model.blueprint import drawn, read_config
from outrider.model.checkpoint import (
    Checkpoint,
    default_model_source,
    first_line,
    locate,
    stored_tensors,
)
from outrider.model.dtypes import parse_dtype, resolve_dtype
from outrider.model.facts import context_length, eos_token_ids
from outrider.model.gguf import converted_folder
from outrider.model.quiet import quiet_transformers
from outrider.model.room import capacity_errors, require_room
from outrider.model.support import causal_text_class, check_config, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from outrider.model.blueprint import Blueprint

__all__ = [
    "LoadedModel",
    "default_model_source",
    "load_model",
    "read_tokenizer",
    "resolve_dtype",
    "set_attention",
]

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_MAX_NAMED_KEYS = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, and the facts about it the engine asks for.

    `eos_token_ids` is the union of what generation config, config and tokenizer state, and may be empty.
    `vocab_size` is the number of logits (rows of the head), padding included. `context_length` counts positions.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    eos_token_ids: tuple[int, ...]
    context_length: int
    vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device the weights are on."""
        return self.model.device


def load_model(
    source: str | Path | PreTrainedModel | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load `source`: None or "default", a Hub id, a folder, a `.gguf` file, `hub_id:file.gguf`, or a loaded model.

    A loaded model is used as it is, never copied, moved or cast; it is put in eval mode. `tokenizer` overrides the
    checkpoint's own. A `max_model_len` beyond the model's context is refused before the weights are read.

    Raises: ConfigError for a bad dtype, device or length; UnsupportedModelError for an architecture that cannot be
    served exactly or is quantised in a way that does not load here; ModelLoadError for everything missing, broken or in
    another format; CapacityError for weights that do not fit on the device.
    """
    target_device = _device(device)
    asked = parse_dtype(dtype)
    if source is not None and not isinstance(source, str | Path):
        return _adopt(source, asked, target_device, _given_tokenizer(tokenizer))
    if source is None or source == "default":
        source = default_model_source()
    checkpoint = locate(source, revision)
    if checkpoint.kind == "gguf":
        folder = converted_folder(checkpoint.path, resolve_dtype(asked, "gguf", target_device))
        checkpoint = Checkpoint("safetensors", folder, checkpoint.name)
    blueprint = drawn(
        read_config(checkpoint.path, checkpoint.name), stored_tensors(checkpoint.path), checkpoint.name, asked,
        target_device, max_model_len,
    )  # fmt: skip
    resolved, needed = blueprint.dtype, blueprint.num_bytes
    require_room(needed, checkpoint.name, resolved, target_device)
    if blueprint.expanded is not None:
        logger.warning(
            "%s is quantised with %r; here its weights are expanded to %s and take %.2f GiB (%.2f as stored)",
            checkpoint.name, blueprint.expanded, resolved, needed / 2**30, blueprint.stored_bytes / 2**30,
        )  # fmt: skip
    with capacity_errors(checkpoint.name, resolved, target_device):
        model = _read_weights(checkpoint, blueprint, target_device)
    words = read_tokenizer(checkpoint.path, checkpoint.name) if tokenizer is None else _given_tokenizer(tokenizer)
    return _describe(model, words, checkpoint.name)


def set_attention(model: PreTrainedModel, name: str) -> str:
    """Make every layer attend with the function registered as `name`; returns the name in force before.

    Raises: UnsupportedModelError where the architecture keeps its own attention, or `name` is not registered.
    """
    previous = str(model.config._attn_implementation)  # noqa: SLF001 - its only name
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot attend with {name!r} ({first_line(error)}); use an architecture that "
            f"transformers can dispatch through AttentionInterface"
        ) from error
    if model.config._attn_implementation != name:  # noqa: SLF001
        raise UnsupportedModelError(f"{type(model).__name__} does not let its attention be replaced by {name!r}")
    return previous


def _device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, but this torch sees no CUDA GPU; use device='cpu'")
    return parsed


def _read_weights(checkpoint: Checkpoint, blueprint: Blueprint, device: torch.device) -> PreTrainedModel:
    config, model_class, dtype = blueprint.config, blueprint.model_class, blueprint.dtype
    name = checkpoint.name
    place: dict[str, Any] = (
        {} if device.type == "cpu" or find_spec("accelerate") is None else {"device_map": {"": device}}
    )
    try:
        with quiet_transformers():
            loaded: Any = model_class.from_pretrained(
                checkpoint.path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                key_mapping=blueprint.keys,
                output_loading_info=True,
                generation_config=_read_defaults(checkpoint, config),
                **place,
            )
            model: Any = loaded[0] if place else loaded[0].to(device)  # quantised models refuse to be moved
            info = loaded[1]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors, huggingface_hub and torch each raise kinds of their own
        raise ModelLoadError(
            f"the weights of {name} do not load as {model_class.__name__} ({first_line(error)}); "
            f"config and weights do not fit together, or a file is corrupt: download it again"
        ) from error
    _check_complete(name, info)
    check_model(model, name)
    if getattr(model, "is_quantized", False) and model.dtype != dtype:
        logger.warning("%s computes in %s, not in %s: its quantisation asks for that", name, model.dtype, dtype)
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def _read_defaults(checkpoint: Checkpoint, config: PreTrainedConfig) -> Any:
    """The checkpoint's generation defaults. Only their end ids matter here, so a broken file is no reason to stop."""
    from transformers import GenerationConfig

    if not (checkpoint.path / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(checkpoint.path)
    except (ValueError, TypeError, OSError) as error:
        logger.warning("%s: generation_config.json is not used (%s)", checkpoint.name, first_line(error))
        return GenerationConfig.from_model_config(config)


def _check_complete(name: str, info: dict[str, Any]) -> None:
    """Weights that are not in the checkpoint would be random numbers: an error, never a warning."""
    missing = sorted(info["missing_keys"])  # transformers has taken tied weights out
    problems = sorted(str(key[0]) for key in info.get("mismatched_keys", ())) + [
        str(e) for e in info.get("error_msgs", ())
    ]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED_KEYS} more" if len(missing) > _MAX_NAMED_KEYS else ""
        raise ModelLoadError(
            f"{name} lacks {len(missing)} weights of its architecture: {', '.join(missing[:_MAX_NAMED_KEYS])}{more}; "
            f"the checkpoint is incomplete or of another model type: download it again"
        )
    if problems:
        raise ModelLoadError(
            f"weights of {name} do not fit its config: {', '.join(problems[:_MAX_NAMED_KEYS])}; fix config.json"
        )


def read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it has none (the engine then takes and gives ids only)."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        logger.warning("%s has no tokenizer: prompts must be token ids", name)
        return None
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            words: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers, sentencepiece and transformers each raise kinds of their own
        raise ModelLoadError(
            f"the tokenizer of {name} does not load ({first_line(error)}); restore its files or pass tokenizer="
        ) from error
    return words


def _given_tokenizer(tokenizer: PreTrainedTokenizerBase | str | Path | None) -> PreTrainedTokenizerBase | None:
    if tokenizer is not None and not isinstance(tokenizer, str | Path) and not callable(tokenizer):
        raise ConfigError(
            f"tokenizer must be a folder, a Hub id or a transformers tokenizer, got {type(tokenizer).__name__}"
        )
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if Path(tokenizer).expanduser().is_dir():
        words = read_tokenizer(Path(tokenizer).expanduser(), str(tokenizer))
        if words is None:
            raise ModelLoadError(f"tokenizer {tokenizer}: the folder has no tokenizer files; check the path")
        return words
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            hub_words: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(
            f"tokenizer {tokenizer} is neither a folder nor loadable from the Hub ({first_line(error)}); check the path"
        ) from error
    return hub_words


def _adopt(
    model: Any, dtype: torch.dtype | None, device: torch.device, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """Take a model the caller loaded: check it, leave its weights, device, dtype and gradients alone."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model must be a Hub id, a path or a transformers PreTrainedModel, got {type(model).__name__}; "
            f"for a peft model pass model.merge_and_unload()"
        )
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    config, _ = causal_text_class(model.config, name)
    check_config(config, type(model), name)
    check_model(model, name)
    if model.device.type != device.type or device.index not in (None, model.device.index):
        raise ConfigError(f"{name} is on {model.device}, but device={str(device)!r} was asked for; move it there first")
    if dtype is not None and dtype != model.dtype:
        raise ConfigError(f"{name} is in {model.dtype}, but {dtype} was asked for; cast it first or leave dtype out")
    model.train(False)
    return _describe(model, tokenizer, name)


def _describe(model: Any, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LoadedModel:
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} has no language-model head; load its ForCausalLM class"
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        eos_token_ids=eos_token_ids(model, tokenizer),
        context_length=context_length(model.config.get_text_config(decoder=True), name),
        vocab_size=int(getattr(head, "out_features", 0) or head.weight.shape[0]),  # packed weights have other rows
    )
