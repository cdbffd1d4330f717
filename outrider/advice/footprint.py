"""What models and heads take in memory, counted on models that have shapes and no memory (torch's device "meta").

The runner on top is the engine's own, so what a token takes in the cache is asked of the code that will make the cache.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.advice.prediction import PassLoad
from outrider.config import Method
from outrider.errors import UnsupportedModelError
from outrider.kernels import weights as card_weights
from outrider.model import quantize
from outrider.model.blueprint import drawn
from outrider.model.dtypes import parse_dtype
from outrider.model.facts import context_length, eos_token_ids
from outrider.model.load import LoadedModel
from outrider.model.packing import linears_of
from outrider.model.runner import TorchRunner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from outrider.advice.sources import HeadSource, ModelSource
    from outrider.model.checkpoint import StoredTensor

__all__ = ["HeadFootprint", "ModelFootprint", "head_footprint", "model_footprint"]

_MAKERS: dict[str, Any] = {"cpu": quantize, "cuda": card_weights}  # of quantised layers
_NORM_COPIES = 3  # a norm of ours keeps its weight and, side by side, twice more
_NOT_KEPT = re.compile(r"(^|\.)(t2d|inv_freq)$|verifier_")  # of a head: inverses, tables that are computed, copies
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_OUT = re.compile(r"lm_heads?\.|(^|\.)\d+\.\d+\.weight$")  # matrices to the vocabulary
_MTP = re.compile(r"^model\.(layers\.(\d+)|mtp_layers\.0)\.")


@dataclass(frozen=True)
class ModelFootprint:
    """A model that is ready to run, by its bytes.

    Attributes:
        name: Of the checkpoint.
        runner: The engine's own, over a model without memory.
        context_length, vocab_size: As the engine will know them.
        weights: Kind ("bfloat16", "int8", "as stored") -> bytes.
        passed: What a pass reads and computes; its `kv` is a token's.
        notes: What was taken for granted.
    """

    name: str
    runner: TorchRunner
    context_length: int
    vocab_size: int
    weights: dict[str, int]
    passed: PassLoad
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(self.weights.values())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that a cached token takes."""
        return self.runner.bytes_per_slot


@dataclass(frozen=True)
class HeadFootprint:
    """A trained head, by its bytes.

    Attributes:
        num_bytes: Of the weights that are its own.
        bytes_per_slot: Bytes that its cache takes a token.
        features_per_slot: Bytes of hidden states that it wants kept of each token of the target.
        passed: What a pass of it reads and computes.
        context_length: Positions that it was made for, where its config tells.
    """

    name: str
    num_bytes: int
    bytes_per_slot: int
    features_per_slot: int
    passed: PassLoad
    context_length: int | None = None


def model_footprint(
    source: ModelSource,
    *,
    dtype: str | None,
    device: torch.device,
    quantization: str | None = None,
    here: bool = True,
) -> ModelFootprint:
    """Count what a model takes once it is ready to run.

    Args:
        source: What its files say.
        dtype: As users spell it; None or "auto" chooses as the loader does.
        device: Where it will run; of a card only the type matters.
        quantization: Of its weights, as the engine is asked for it.
        here: Whether that device is this machine's. For another one, a quantised checkpoint is taken as it is stored,
            since which libraries are installed there is not known.

    Raises:
        UnsupportedModelError: It cannot be served.
        ConfigError: `dtype` is unknown.
    """
    asked, notes = parse_dtype(dtype), source.notes
    try:
        blueprint = drawn(
            copy.deepcopy(source.config), source.tensors, source.name, asked, device, stored=source.stored_dtype
        )
    except UnsupportedModelError as error:
        if here or getattr(source.config, "quantization_config", None) is None:
            raise
        notes += (f"{source.name} is taken as it is stored; on this machine it would not load: {error}",)
        plain = copy.deepcopy(source.config)
        del plain.quantization_config
        blueprint = drawn(plain, (), source.name, asked, device)
    stored = getattr(source.config, "quantization_config", None) is not None and blueprint.expanded is None
    model = _without_memory(blueprint.model_class, blueprint.config, blueprint.dtype)
    context = context_length(blueprint.config, source.name)
    loaded = LoadedModel(model, None, source.name, eos_token_ids(model, None), context, _rows_of_head(model))
    runner = _runner(loaded)
    if stored and source.tensors:
        weights = {"as stored": sum(one.num_bytes for one in source.tensors)}
    else:
        weights = _ready(model, quantization, device.type)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    copied = _tied(model) and not stored and _becomes(model, head, quantization, device.type) is not None
    passed = _passed(model, sum(weights.values()), runner.bytes_per_slot, copied_head=copied)
    return ModelFootprint(source.name, runner, context, loaded.vocab_size, weights, passed, notes)


def head_footprint(source: HeadSource, method: Method, target: ModelFootprint) -> HeadFootprint:
    """Count what a head takes beside a target, from the headers of its files."""
    size = target.runner.dtype.itemsize
    embedding = (target.vocab_size, _hidden(target))
    kept = [one for one in source.tensors if not _NOT_KEPT.search(one.name)]
    if method is Method.MTP:
        layers = target.runner.model.config.get_text_config().num_hidden_layers
        kept = [one for one in kept if (found := _MTP.match(one.name)) and found[2] in (None, str(layers))]
    shared = (
        ("embed_tokens.weight",) if method is not Method.MTP else ("embed_tokens.weight", "shared_head.head.weight")
    )
    kept = [one for one in kept if not (one.name.endswith(shared) and one.shape == embedding)]
    ids = [one for one in kept if one.name.endswith(("d2t", "token_map"))]
    own = [one for one in kept if one not in ids]
    numbers = sum(one.count for one in own)
    keys = sum(one.shape[0] for one in own if one.name.endswith(("k_proj.weight", "v_proj.weight")))
    width = 0 if method is Method.EARLY_EXIT else _features(source, own, method, target)
    num_bytes = numbers * size + 8 * sum(one.count for one in ids)
    layers = source.config.get("transformer_layer_config") or source.config
    context = layers.get("max_position_embeddings") if method is not Method.MEDUSA else None
    load = _head_load(own, target)
    return HeadFootprint(source.name, num_bytes, keys * size, width * size, load, context)


# --- models without memory


def _without_memory(model_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation="eager", dtype=dtype)  # noqa: SLF001 - the public one takes no class
    model.tie_weights()
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def _runner(loaded: LoadedModel) -> TorchRunner:
    """The engine's runner over a model without memory.

    Some models look at a value while they run, which those cannot give. Pages that nobody wrote are as good: they take
    no memory until then, and of two tokens' pass only the shapes count.
    """
    try:
        return TorchRunner(loaded)
    except UnsupportedModelError:
        unwritten: Any = copy.deepcopy(loaded.model)
        return TorchRunner(replace(loaded, model=unwritten.to_empty(device="cpu")))


def _rows_of_head(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _ready(model: Any, quantization: str | None, device: str) -> dict[str, int]:
    """Bytes by kind of number, after layers were fused, packed and quantised as the engine does."""
    dtype = _title(model.dtype)
    kinds: Counter[str] = Counter()
    for parameter in _once(model.parameters()):
        kinds[_title(parameter.dtype)] += parameter.nbytes
    for linear in _once(linear for _, _, linear in linears_of(model)):
        kind = _becomes(model, linear, quantization, device)
        if kind is not None and not _looked_up(model, linear):
            kinds[dtype] -= linear.weight.nbytes
        if kind == dtype:
            kinds[dtype] += linear.weight.nbytes
        elif kind is not None:
            outputs, inputs = linear.weight.shape
            kinds[kind] += _MAKERS[device].quantised_bytes(outputs, inputs, kind, model.dtype)
    norms = [one for one in model.modules() if type(one).__name__.endswith("RMSNorm") and hasattr(one, "weight")]
    kinds[dtype] += sum(one.weight.nbytes * (_NORM_COPIES - 1) for one in norms)
    if device == "cuda":
        kinds["float32"] += _rotary_tables(model)
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _becomes(model: Any, linear: Any, quantization: str | None, device: str) -> str | None:
    """The kind of number of what takes a linear layer's place; None where it stays.

    On a CPU the head, and what does not fit, is packed and not quantised, where the processor can have it packed.
    """
    on_cpu, (outputs, inputs) = device == "cpu", linear.weight.shape
    if quantization is not None:
        fits = linear is not model.get_output_embeddings() and not quantize.unfit(outputs, inputs, quantization)
        if fits or not on_cpu:
            return quantization
    return _title(model.dtype) if on_cpu and quantize.packable(model.dtype) else None


def _looked_up(model: Any, linear: Any) -> bool:
    """Whether a layer's weight is the input embedding too: it stays as it is, and the product gets one of its own."""
    return linear.weight is model.get_input_embeddings().weight


def _tied(model: Any) -> bool:
    return _looked_up(model, model.get_output_embeddings())


def _once(items: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in items}.values())


def _rotary_tables(model: Any) -> int:
    """The angles of all positions, which a card tabulates: two of fp32 for each pair of a head's numbers."""
    angles = getattr(getattr(model.base_model, "rotary_emb", None), "inv_freq", None)
    return 0 if angles is None else int(context_length(model.config.get_text_config(), "") * angles.shape[0] * 8)


def _passed(model: Any, num_bytes: int, per_slot: int, *, copied_head: bool) -> PassLoad:
    """What a pass reads: all but an embedding that is only looked up, and of experts those that are visited."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    own_table = copied_head or not _tied(model)
    named = {id(one): (name, one.numel()) for name, one in model.named_parameters()}.values()
    total, experts = sum(count for _, count in named), sum(count for name, count in named if ".experts." in name)
    sizes = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((size for size in sizes if size), 1)
    share = min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / count)
    expert_bytes = num_bytes * experts / total
    return PassLoad(
        weights=num_bytes - expert_bytes - (embedding.nbytes if own_table else 0),
        kv=per_slot,
        parameters=total - experts * (1 - share) - (embedding.numel() if own_table and not copied_head else 0),
        experts=expert_bytes,
        expert_share=share,
    )


def _head_load(own: list[StoredTensor], target: ModelFootprint) -> PassLoad:
    """A head reads its own weights but an embedding, and the target's matrix to the vocabulary if it brings none."""
    read = sum(one.count for one in own if not one.name.endswith("embed_tokens.weight"))
    if not any(_OUT.search(one.name) and one.shape[-1] != one.shape[0] for one in own):
        read += target.vocab_size * _hidden(target)
    return PassLoad(weights=read * target.runner.dtype.itemsize, parameters=read)


def _features(source: HeadSource, own: list[StoredTensor], method: Method, target: ModelFootprint) -> int:
    if method is Method.EAGLE:
        rows = [one.shape[0] for one in own if one.name.endswith("o_proj.weight")]
        return int(rows[0]) if rows else _hidden(target)
    if method is Method.DFLASH:
        layers = source.config.get("transformer_layer_config") or source.config
        return int(layers.get("hidden_size") or _hidden(target))
    return _hidden(target)


def _hidden(target: ModelFootprint) -> int:
    return int(target.runner.model.config.get_text_config().hidden_size)


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
