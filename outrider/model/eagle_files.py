"""EAGLE heads as they are published, read unconverted, from safetensors alone.

Three formats, told apart by config.json and by the names of the tensors:

- **The authors' EAGLE-1 and 2** (github.com/SafeAILab/EAGLE, eagle/model/cnets1.py): the config of a Llama of one
  layer; ``fc.weight`` over embedding and feature side by side, perhaps ``fc.bias``, ``layers.0.*`` without a first
  norm, and the target's embedding and head. The feature is the target's last hidden state, after its last norm.
- **EAGLE-3** (``LlamaForCausalLMEagle3``: eagle/model/cnets.py there; also SpecForge, SGLang, AngelSlim): ``fc.weight``
  over three hidden states, ``midlayer.*`` or ``layers.0.*`` with a ``hidden_norm``, ``norm``, ``lm_head`` over a short
  vocabulary, and ``d2t``, the distance from a draft id to the target's. Later heads (EAGLE-3.1) bring ``fc_norm.*``, a
  norm for each hidden state, or ``input_norm``, one for all of them, and say `norm_output`.
- **speculators'** (github.com/vllm-project/speculators): `speculators_model_type` "eagle" or "eagle3", the layer's
  sizes in `transformer_layer_config`; of "eagle", ``fusion_fc.*``, ``transformer.*`` and perhaps more norms.

Which hidden states an EAGLE-3 head reads, as inputs of layers: 2, n // 2 and n - 3 of n by the authors' code
(modeling_llama_kv.py). A list at the config's top is vLLM's and speculators', which count so too (llama.py there). One
inside `eagle_config` is SGLang's, SpecForge's and ModelOpt's, which name the layer whose *output* is read: one less
(`set_eagle3_layers_to_capture` adds it). With `use_aux_hidden_state` false there it is the last one, as for EAGLE-1.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from outrider.errors import ModelLoadError, UnsupportedModelError, VocabularyMismatchError
from outrider.model.checkpoint import first_line
from outrider.model.eagle_head import EagleHead, EagleSettings
from outrider.model.head_files import HeadFiles, head_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from outrider.model.load import LoadedModel

__all__ = ["is_eagle", "load_eagle"]

logger = logging.getLogger("outrider")
_PREFIXES = ("midlayer.", "layers.0.", "transformer.")  # of the layer
_LAYER_NAMES = {
    "query": "self_attn.q_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight", "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight", "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight", "output_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "gate_bias": "mlp.gate_proj.bias",
    "up": "mlp.up_proj.weight", "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight", "down_bias": "mlp.down_proj.bias",
    "input_norm": "input_layernorm.weight", "hidden_norm": "hidden_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
}  # fmt: skip
_OPTIONAL = ("bias", "query_norm", "key_norm")
_LLAMA_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "head_dim",
)  # fmt: skip
_JOINING, _JOINING_BIAS = ("fc.weight", "fusion_fc.weight"), ("fc.bias", "fusion_fc.bias")
_NORM = ("norm.weight", "pre_lm_head_layernorm.weight")
_NOT_READ = ("rotary_emb.inv_freq", "t2d", "verifier_")  # computed, the inverse of d2t, and copies of the target's
_PADDING = 1024  # ids by which vocabularies of one family differ at most
_OTHER_TARGET = "use a head that was trained for this target"
_INCOMPLETE = "the head is incomplete: download it again"
_NOT_TOGETHER = "the files do not belong together: download them again"


def is_eagle(config: dict[str, Any]) -> bool:
    """Whether a config says by itself that it is an EAGLE head's; the authors' own EAGLE-1 does not."""
    names = [str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ())]
    return any("eagle" in name.lower() for name in names)


def load_eagle(source: str | Path, target: LoadedModel, revision: str | None = None) -> EagleHead:
    """Read a head for a target; what it does not bring is the target's.

    Raises:
        ModelLoadError: It is missing, broken, of a format that is not read, or made for another target.
        UnsupportedModelError: It is an EAGLE head of a kind that is not served.
        VocabularyMismatchError: It was made for another vocabulary.
    """
    files = HeadFiles(head_folder(source, revision))
    _check_kind(files)
    reader = _Reader(files, target)
    head = reader.head()
    unread = [name for name in files.shapes if name not in reader.read and not any(one in name for one in _NOT_READ)]
    if unread:
        raise UnsupportedModelError(
            f"{files.folder} has tensors that no EAGLE head of a known kind has: {', '.join(sorted(unread)[:4])}; it "
            "would be computed wrongly, so it is not served"
        )
    ids = "all ids" if head.ids is None else f"{len(head.ids)} ids"
    kind, sizes = "EAGLE-3" if head.settings.third else "EAGLE", head.settings
    logger.info("%s head of width %d over %s, reads hidden states %s", kind, sizes.hidden, ids, sizes.taps)
    return head


def _check_kind(files: HeadFiles) -> None:
    """Refuse by name what is an EAGLE head, but of a kind that is not served."""
    config, names = files.config, list(files.shapes)
    layer = config.get("transformer_layer_config") or config
    kind = config.get("speculators_model_type")
    problem = None
    if kind not in (None, "eagle", "eagle3"):
        problem = (
            f"is a speculators checkpoint of the kind {kind!r}, not 'eagle' or 'eagle3'; use the method of that kind"
        )
    elif isinstance(config.get("model"), dict):
        problem = (
            "is vLLM's old conversion of a head (a config in the config); use the checkpoint that it was made from"
        )
    elif "mask_hidden" in names:
        problem = "guesses in parallel (P-EAGLE, mask_hidden); use a head that guesses one token after another"
    elif any(name.endswith((".weight_scale", ".weight_packed", ".qweight", ".scales")) for name in names):
        problem = "is quantised; use the unquantised head, which is small"
    elif any(name.removeprefix("model.").startswith(("layers.1.", "midlayer.1.")) for name in names):
        problem = f"has more than one layer ({layer.get('num_hidden_layers')}); use a head of one"
    elif any(".self_attn.kv_a_proj" in name for name in names):
        problem = "attends by compressed keys (MLA); use a head of Llama's kind"
    elif (layer.get("partial_rotary_factor") or 1.0) != 1.0:
        problem = (
            f"turns a part of each head alone (partial_rotary_factor {layer['partial_rotary_factor']}); use another"
        )
    if problem:
        raise UnsupportedModelError(f"{files.folder} {problem}")


class _Reader:
    """Reads one head, and notes what it has read."""

    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        self.files, self.target = files, target
        self.read: set[str] = set()
        self.model: Any = target.model
        self.device, self.dtype = self.model.device, self.model.dtype
        self.layer: dict[str, Any] = files.config.get("transformer_layer_config") or files.config
        prefix = next((one for one in _PREFIXES if self._stored(f"{one}self_attn.q_proj.weight")), None)
        if prefix is None:
            raise ModelLoadError(f"{files.folder} is no EAGLE head: it has no {_PREFIXES[0]}self_attn.q_proj.weight")
        self.prefix = prefix
        self.third = self._stored(f"{prefix}hidden_norm.weight") is not None
        sizes = self.model.config.get_text_config()
        self.target_hidden, self.target_layers = int(sizes.hidden_size), int(sizes.num_hidden_layers)
        nested: dict[str, Any] = files.config.get("eagle_config") or {}
        self.says = {**nested, **files.config}  # ModelOpt's settings may be in either
        self.taps = self._taps(nested)

    def head(self) -> EagleHead:
        """Put the head together."""
        config, rotary, activation = self._kind_of_layer()
        hidden = int(config.hidden_size)
        weights = self._layer_weights() | self._joined_weights(hidden)
        norm = self._optional("norm", *_NORM)
        weights |= norm or (self._target_norm(hidden) if self.third else {})
        embedding = self._optional("embedding_norm", "embedding_layernorm.weight")
        dim = int(config.head_dim)
        settings = EagleSettings(
            third=self.third,
            taps=self.taps,
            hidden=hidden,
            num_heads=weights["query"].shape[0] // dim,
            num_kv_heads=weights["key"].shape[0] // dim,
            head_dim=dim,
            eps=float(config.rms_norm_eps),
            context_length=int(config.max_position_embeddings),
            norm_before_residual=bool(self.says.get("norm_before_residual", False)),
            norm_output=self.third and bool(self.says.get("norm_output", False)),
            window=self._window(),
        )
        ids, embed = self._ids(), self._embedding(hidden)
        vocabulary = self._vocabulary(hidden, ids)
        return EagleHead(
            settings, weights | embedding, embed, vocabulary, rotary, activation, self.target.vocab_size, ids
        )

    def _kind_of_layer(self) -> tuple[Any, Any, Callable[[Tensor], Tensor]]:
        """The layer's config, its rotary embedding and the activation of its MLP, by transformers."""
        from transformers import LlamaConfig  # here: whoever has no head waits for none of it
        from transformers.activations import ACT2FN
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        try:
            config: Any = LlamaConfig(**{name: self.layer[name] for name in _LLAMA_KEYS if name in self.layer})
            rotary, activation = LlamaRotaryEmbedding(config).to(self.device), ACT2FN[config.hidden_act]
        except Exception as error:  # whatever transformers makes of it
            raise ModelLoadError(f"{self.files.folder}: config.json cannot be used ({first_line(error)})") from error
        name = self._first(f"{self.prefix}self_attn.o_proj.weight")
        rows, columns = self.files.shapes[name]
        if (rows, columns) != (config.hidden_size, config.num_attention_heads * config.head_dim):
            raise ModelLoadError(
                f"{self.files.folder}: {name} has the shape [{rows}, {columns}], but config.json says hidden_size "
                f"{config.hidden_size}, and {config.num_attention_heads} heads of {config.head_dim}; {_NOT_TOGETHER}"
            )
        return config, rotary, activation

    def _window(self) -> int | None:
        kinds = self.layer.get("layer_types") or ["full_attention"]
        return int(self.layer["sliding_window"]) if kinds[0] == "sliding_attention" else None

    def _layer_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, stored in _LAYER_NAMES.items():
            optional = name.endswith(_OPTIONAL) or (not self.third and name in ("hidden_norm", "input_norm"))
            if optional:
                weights |= self._optional(name, self.prefix + stored)
            else:
                weights[name] = self._tensor(self._first(self.prefix + stored))
        return weights

    def _joined_weights(self, hidden: int) -> dict[str, Tensor]:
        """What makes features of the target's hidden states, or joins them with the embedding."""
        if self.third and self.says.get("use_aux_hidden_state") is False:
            self._check_hidden(hidden)
            return {}
        name = self._first(*_JOINING)
        columns = self.files.shapes[name][1]
        self._check_hidden((columns / len(self.taps)) if self.third else columns - hidden)
        weights = {"fc": self._tensor(name)} | self._optional("fc_bias", *_JOINING_BIAS)
        if self.third:
            weights |= self._optional("taps_norm", "input_norm.weight")
            if self._stored("fc_norm.0.weight") is not None:
                norms = [self._tensor(self._first(f"fc_norm.{place}.weight")) for place in range(len(self.taps))]
                weights["tap_norms"] = torch.stack(norms)
        return weights

    def _check_hidden(self, made_for: float) -> None:
        if made_for != self.target_hidden:
            raise ModelLoadError(
                f"{self.files.folder} was made for hidden states of {made_for:g} numbers (of {len(self.taps)} layers), "
                f"but {self.target.name} has {self.target_hidden}; {_OTHER_TARGET}"
            )

    def _target_norm(self, hidden: int) -> dict[str, Tensor]:
        """EAGLE-3 norms before its matrix; where that norm was left out, the target's serves."""
        norm = getattr(self.model.base_model, "norm", None)
        if norm is None or hidden != self.target_hidden:
            raise ModelLoadError(
                f"{self.files.folder} lacks norm.weight, and the target's does not fit ({hidden} numbers by "
                f"{self.target_hidden}); {_INCOMPLETE}"
            )
        return {"norm": norm.weight.detach()}

    def _embedding(self, hidden: int) -> Callable[[Tensor], Tensor]:
        """Its own embedding, or the target's where it has none, or the same."""
        own, stored = self.model.get_input_embeddings(), self._stored("embed_tokens.weight")
        if stored is None:
            if own.weight.shape[1] != hidden:
                raise ModelLoadError(
                    f"{self.files.folder} brings no embedding, and the target's has {own.weight.shape[1]} numbers a "
                    f"token, not {hidden}; {_INCOMPLETE}"
                )
            table = own.weight
        else:
            table = self._tensor(stored)
            self._check_vocabulary(table.shape[0], "embeds")
            if table.shape == own.weight.shape and torch.equal(table, own.weight):
                table = own.weight  # a copy, which most heads bring: kept once
        if not isinstance(own, nn.Embedding) and table is own.weight:
            return own  # type: ignore[no-any-return]
        most = table.shape[0] - 1
        return lambda tokens: F.embedding(tokens.clamp(max=most), table)

    def _vocabulary(self, hidden: int, ids: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Its own matrix to the vocabulary; where it has none, its embedding if they are tied, else the target's."""
        tied = bool(self.layer.get("tie_word_embeddings", False)) and self.third
        stored = self._stored("lm_head.weight") or (self._stored("embed_tokens.weight") if tied else None)
        if stored is not None:
            matrix = self._tensor(stored)
            if ids is None:
                self._check_vocabulary(matrix.shape[0], "guesses")
            if matrix.shape != (len(ids) if ids is not None else matrix.shape[0], hidden):
                raise ModelLoadError(
                    f"{self.files.folder}: {stored} has the shape {list(matrix.shape)}, but d2t and config.json say "
                    f"{'any' if ids is None else len(ids)} ids of {hidden} numbers; {_NOT_TOGETHER}"
                )
            return lambda states: F.linear(states, matrix)
        own = self.model.get_output_embeddings()
        columns = getattr(own, "in_features", None) or own.weight.shape[1]
        if ids is not None or columns != hidden:
            raise ModelLoadError(
                f"{self.files.folder} lacks lm_head.weight, and the target's does not fit; {_INCOMPLETE}"
            )
        return own  # type: ignore[no-any-return]

    def _ids(self) -> Tensor | None:
        """The target's id of each of the head's: `d2t` has the distances."""
        if "t2d" in self.files.shapes:
            self._check_vocabulary(self.files.shapes["t2d"][0], "maps")
        if "d2t" not in self.files.shapes:
            return None
        distances = self._tensor("d2t", torch.long)
        ids = distances + torch.arange(len(distances), device=self.device)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.target.vocab_size or len(set(ids.tolist())) != len(ids):
            raise VocabularyMismatchError(
                f"{self.files.folder}: d2t leads to ids {low} to {high}, but {self.target.name} has 0 to "
                f"{self.target.vocab_size - 1}, each once; {_OTHER_TARGET}"
            )
        return ids

    def _check_vocabulary(self, size: int, does: str) -> None:
        """Paddings may differ; no id that the target's tokenizer knows may be missing."""
        has, tokenizer = self.target.vocab_size, self.target.tokenizer
        known = min(has, has if tokenizer is None else len(tokenizer))
        if size < known or size > has + _PADDING:
            raise VocabularyMismatchError(
                f"{self.files.folder} {does} {size} ids, but {self.target.name} has {has}; {_OTHER_TARGET}"
            )

    def _taps(self, nested: dict[str, Any]) -> tuple[int, ...]:
        """Which hidden states are read, numbered as in `FeatureTap`; see this module's beginning."""
        num_layers = self.target_layers
        if not self.third or nested.get("use_aux_hidden_state") is False:
            return (num_layers,)
        listed = self.files.config.get("eagle_aux_hidden_state_layer_ids")
        inside = nested.get("eagle_aux_hidden_state_layer_ids")
        taps = tuple(listed or [one + 1 for one in inside or ()]) or (2, num_layers // 2, num_layers - 3)
        if min(taps) < 0 or max(taps) > num_layers:
            raise ModelLoadError(
                f"{self.files.folder} reads the inputs of layers {list(taps)}, but {self.target.name} has {num_layers} "
                f"layers; {_OTHER_TARGET}"
            )
        return taps

    def _stored(self, name: str) -> str | None:
        """A tensor's full name, if it is there."""
        return next((full for full in (name, f"model.{name}") if full in self.files.shapes), None)

    def _first(self, *names: str) -> str:
        found = next((full for name in names if (full := self._stored(name)) is not None), None)
        if found is None:
            raise ModelLoadError(f"{self.files.folder} lacks {names[0]}; {_INCOMPLETE}, or it is no EAGLE head")
        return found

    def _optional(self, name: str, *names: str) -> dict[str, Tensor]:
        found = next((full for one in names if (full := self._stored(one)) is not None), None)
        return {} if found is None else {name: self._tensor(found)}

    def _tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        self.read.add(name)
        return self.files.tensor(name).to(self.device, dtype or self.dtype)
