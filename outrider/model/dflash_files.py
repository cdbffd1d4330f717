"""Block drafters as they are published, read into a `BlockDraft`.

- z-lab's DFlash (``DFlashDraftModel``): a Qwen3 config with ``dflash_config`` (``target_layer_ids``, ``mask_token_id``;
  in later ones ``block_size``, ``output_multiplier`` and the like). Embedding and head are the target's.
- DeepSpec's DSpark (``Qwen3DSparkModel``, or ``DSparkDraftModel`` of the type qwen3): all values at the top level, with
  ``markov_rank``; ``markov_head.markov_w1`` and ``markov_w2``, an embedding and a head of its own. What its confidence
  head says is not used: how far to draft is decided by what was accepted so far.
- speculators' ``dflash`` and ``dspark``: the layers' config under ``transformer_layer_config``, layers of the target by
  their number among its hidden states (``aux_hidden_state_layer_ids``), and for a shortened vocabulary a head of its
  own with ``d2t``, the distance from a draft id to the target's.

Layers with a sliding window see the block's earlier places alone, all others the whole block, unless the config says
otherwise (``is_causal``, ``dflash_config.causal``, ``sliding_window_non_causal``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.config import MAX_TREE_NODES
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.model.checkpoint import first_line
from outrider.model.dflash import BlockDraft, BlockOutput, BlockSettings, draft_layer
from outrider.model.head_files import HeadFiles, head_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from outrider.model.load import LoadedModel

__all__ = ["is_block_draft", "load_block_draft"]

_KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_UNUSED = ("attention_sink_bias", "add_swa_attention_sink_bias", "conv_kernel_size", "selector_rank")


def is_block_draft(config: dict[str, Any]) -> bool:
    """Whether a checkpoint's config is a block drafter's, readable or not."""
    names = (*(config.get("architectures") or ()), str(config.get("speculators_model_type", "")))
    return "dflash_config" in config or any("dflash" in name.lower() or "dspark" in name.lower() for name in names)


def load_block_draft(source: str | Path, target: LoadedModel, revision: str | None = None) -> BlockDraft:
    """Read a block drafter for a target, onto its device and in its dtype.

    Args:
        source: A folder, or a Hub id.
        target: What it was trained on.
        revision: Of the Hub repository.

    Raises:
        ModelLoadError: It is missing, broken, or made for another target.
        UnsupportedModelError: It is of a kind that is not computed here.
    """
    return _Reader(HeadFiles(head_folder(source, revision)), target).read()


class _Reader:
    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        self._files, self._target = files, target
        self._text: Any = target.model.config.get_text_config()
        self._inner: dict[str, Any] = files.config.get("dflash_config") or {}
        self._layers_config: dict[str, Any] = files.config.get("transformer_layer_config") or files.config
        self._kind = self._checked_kind()
        self._config = self._qwen3_config()

    def _value(self, name: str, default: Any = None) -> Any:
        """A value of the drafter's own, wherever the format puts it."""
        places = (self._inner, self._files.config, self._layers_config)
        return next((place[name] for place in places if place.get(name) is not None), default)

    def _checked_kind(self) -> str:
        config, folder = self._files.config, self._files.folder
        names = config.get("architectures") or [config.get("speculators_model_type", "none")]
        kind = next((_KINDS[name] for name in names if name in _KINDS), config.get("speculators_model_type"))
        problem = None
        if kind not in ("dflash", "dspark"):
            problem = f"its architecture {names[0]} is none of {', '.join(_KINDS)}"
        elif self._layers_config.get("model_type", "qwen3") != "qwen3":
            problem = f"its layers are of the type {self._layers_config['model_type']}, not qwen3"
        elif self._value("projector_type", kind) != kind:
            problem = f"its projector_type is {self._value('projector_type')!r}"
        elif self._value("markov_head_type", "vanilla") != "vanilla":
            problem = f"its markov_head_type is {self._value('markov_head_type')!r}"
        elif kind == "dflash" and self._value("markov_rank", 0):
            problem = "it is a DFlash model with a Markov head, of which no format is known"
        elif self._value("rope_is_neox_style", True) is False or self._value("is_neox_style", True) is False:
            problem = "its positions rotate neighbouring numbers, not halves"
        elif unknown := [name for name in _UNUSED if self._value(name)]:
            problem = f"it needs {unknown[0]}"
        elif (folder / "mask_embedding.pt").exists():
            problem = "its mask_embedding.pt is a pickle"
        if problem:
            raise UnsupportedModelError(
                f"{folder} is no block drafter that can be run here: {problem}; use a DFlash or DSpark model of Qwen3 "
                "layers"
            )
        return str(kind)

    def _qwen3_config(self) -> Any:
        from transformers import Qwen3Config

        given = {key: one for key, one in self._layers_config.items() if key not in ("architectures", "model_type")}
        try:
            return Qwen3Config(**given)
        except Exception as error:  # validation errors of many kinds
            raise ModelLoadError(
                f"{self._files.folder}: config.json does not describe Qwen3 layers ({first_line(error)}); correct it"
            ) from error

    def read(self) -> BlockDraft:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

        settings, config = self._settings(), self._config
        size = config.hidden_size
        rotary = Qwen3RotaryEmbedding(config).to(self._target.device)
        norms = []
        for name in ("norm", "hidden_norm"):
            norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
            norm.weight = torch.nn.Parameter(self._tensor(f"{name}.weight", (size,)), requires_grad=False)
            norms.append(norm)
        return BlockDraft(
            settings,
            [self._layer(number) for number in range(config.num_hidden_layers)],
            rotary,
            norms[0],
            self._tensor("fc.weight", (size, len(settings.target_layers) * size)),
            norms[1],
            self._embedding(settings.mask_token),
            self._output(),
        )

    def _tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        return self._files.tensor(name, shape).to(self._target.device, self._target.dtype)

    def _agree(self, what: str, mine: int, wanted: int) -> None:
        if mine != wanted:
            raise ModelLoadError(
                f"{self._files.folder}: the drafter was made for a target of {what} {mine}, but {self._target.name} "
                f"has {wanted}; use one that was trained on this target"
            )

    def _settings(self) -> BlockSettings:
        config, num_layers = self._config, int(self._text.num_hidden_layers)
        self._agree("hidden size", config.hidden_size, self._text.hidden_size)
        self._agree("hidden size", self._value("target_hidden_size", config.hidden_size), self._text.hidden_size)
        self._agree("vocabulary size", config.vocab_size, self._target.vocab_size)
        self._agree("layers", self._value("num_target_layers", num_layers), num_layers)
        block_size = self._whole("block_size")
        if not 1 <= block_size <= MAX_TREE_NODES:
            raise ModelLoadError(
                f"{self._files.folder}: block_size must be 1 to {MAX_TREE_NODES}, which is what an attention mask "
                f"holds, got {block_size}"
            )
        return BlockSettings(
            block_size=block_size,
            mask_token=self._whole("mask_token_id"),
            target_layers=self._target_layers(num_layers),
            causal=tuple(self._causal(number) for number in range(config.num_hidden_layers)),
            from_anchor=bool(self._value("sample_from_anchor", self._kind == "dspark")),
            embedding_scale=float(self._value("input_embedding_scale", 1.0)),
            logit_scale=float(self._value("output_multiplier", self._value("logit_scale", 1.0))),
            softcap=float(self._value("final_logit_softcapping", 0)) or None,
            context_length=int(config.max_position_embeddings),
        )

    def _whole(self, name: str) -> int:
        value = self._value(name)
        if not isinstance(value, int) or isinstance(value, bool):
            problem = "has no" if value is None else f"has {value!r} as"
            raise ModelLoadError(f"{self._files.folder}: config.json {problem} {name}; it must be a whole number")
        return value

    def _target_layers(self, num_layers: int) -> tuple[int, ...]:
        ids, shift = self._value("target_layer_ids"), 0
        if ids is None:
            ids, shift = self._value("aux_hidden_state_layer_ids"), 1
        if not ids:
            raise ModelLoadError(f"{self._files.folder}: config.json has no target_layer_ids; download it again")
        layers = tuple(int(one) - shift for one in ids)
        if min(layers) < -1 or max(layers) >= num_layers:
            raise ModelLoadError(
                f"{self._files.folder}: the drafter reads the target's layers {list(layers)}, but {self._target.name} "
                f"has {num_layers}; use one that was trained on this target"
            )
        return layers

    def _window(self, number: int) -> int | None:
        """How far a layer looks back."""
        types = self._layers_config.get("layer_types")
        sliding = types is not None and types[number] == "sliding_attention"
        if self._value("use_swa") and not (types and "sliding_attention" in types):
            sliding = True
        if not sliding:
            return None
        window = self._value("swa_window_size", self._value("sliding_window"))
        if window is None:
            raise ModelLoadError(f"{self._files.folder}: layer {number} has a sliding window, but config.json no size")
        return int(window)

    def _causal(self, number: int) -> bool:
        stated = self._value("causal", self._value("is_causal"))
        if stated is not None:
            return bool(stated)
        types = self._layers_config.get("layer_types")
        sliding = bool(types) and types[number] == "sliding_attention"  # type: ignore[index]
        return sliding and not self._value("sliding_window_non_causal", False)

    def _layer(self, number: int) -> Any:
        layer = draft_layer(self._config, number, self._window(number))
        weights = {name: self._tensor(f"layers.{number}.{name}", one.shape) for name, one in layer.state_dict().items()}
        layer.load_state_dict(weights, assign=True)
        return layer.requires_grad_(False)

    def _embedding(self, mask_token: int) -> Tensor:
        """The drafter's own embedding, or the target's."""
        if "embed_tokens.weight" in self._files.shapes:
            embedding = self._tensor("embed_tokens.weight", (None, self._config.hidden_size))
        else:
            module: Any = self._target.model.get_input_embeddings()
            embedding = module.weight
        if not 0 <= mask_token < len(embedding):
            raise ModelLoadError(
                f"{self._files.folder}: mask_token_id is {mask_token}, but the embedding has {len(embedding)} rows; "
                "use a drafter that was trained on this target"
            )
        return embedding

    def _output(self) -> BlockOutput:
        size, vocab = self._config.hidden_size, self._target.vocab_size
        ids, own = self._ids(), "lm_head.weight" in self._files.shapes
        count = vocab if ids is None else len(ids)
        if ids is not None and not own:
            raise ModelLoadError(f"{self._files.folder} lacks the tensor lm_head.weight of its shortened vocabulary")
        head: Callable[[Tensor], Tensor] = self._target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if own:
            linear = torch.nn.Linear(size, count, bias=False, device="meta")
            linear.weight = torch.nn.Parameter(self._tensor("lm_head.weight", (count, size)), requires_grad=False)
            head = linear
        return BlockOutput(head, vocab, ids, self._markov(count))

    def _markov(self, count: int) -> tuple[Tensor, Tensor] | None:
        rank = int(self._value("markov_rank", 0))
        if self._kind != "dspark" or not rank:
            return None
        rows = self._tensor("markov_head.markov_w1.weight", (self._config.vocab_size, rank))
        return rows, self._tensor("markov_head.markov_w2.weight", (count, rank))

    def _ids(self) -> Tensor | None:
        """The target's ids that are guessed, where those are fewer."""
        vocab = self._target.vocab_size
        short = int(self._value("draft_vocab_size", vocab))
        if short >= vocab:
            return None
        ids = self._files.tensor("d2t", (short,)).long() + torch.arange(short)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise ModelLoadError(
                f"{self._files.folder}: d2t leads to ids from {int(ids.min())} to {int(ids.max())}, but "
                f"{self._target.name} has {vocab}; use a drafter that was trained on this target"
            )
        return ids.to(self._target.device)
