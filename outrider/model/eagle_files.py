"""EAGLE heads as they are published, read unconverted, from safetensors alone.

Three formats, told apart by config.json and by the names of the tensors:

- **The authors' EAGLE-1 and 2** (github.com/SafeAILab/EAGLE): the config of a Llama of one layer; ``fc.weight`` over
  embedding and feature side by side, ``layers.0.*`` without a first norm, and the target's embedding and head. The
  feature is the target's last hidden state, after its last norm.
- **EAGLE-3** (``LlamaForCausalLMEagle3``; also github.com/sgl-project/SpecForge): ``fc.weight`` over three hidden
  states, ``midlayer.*``, ``norm``, ``lm_head`` over a shorter vocabulary, and ``d2t``, the distance from a draft id to
  the target's.
- **speculators'** (github.com/vllm-project/speculators): `speculators_model_type` "eagle" or "eagle3", the layer's
  sizes in `transformer_layer_config`; of "eagle", ``fusion_fc.*``, ``transformer.*`` and perhaps more norms.

Which layers an EAGLE-3 head reads, as inputs of layers: 2, n // 2 and n - 3 of n by the authors' code. A list at the
config's top is vLLM's, which counts so; one inside `eagle_config` is SGLang's and SpecForge's, which name the layer
whose *output* is read, that is one less.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.errors import ModelLoadError
from outrider.model.eagle_head import EagleHead, EagleSettings
from outrider.model.head_files import HeadFiles, head_folder

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from outrider.model.load import LoadedModel

__all__ = ["is_eagle", "load_eagle"]

logger = logging.getLogger("outrider")
_LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.", "transformer.")
_LAYER_NAMES = {
    "query": "self_attn.q_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight", "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight", "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight", "output_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
    "input_norm": "input_layernorm.weight", "hidden_norm": "hidden_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
}  # fmt: skip
_OPTIONAL = ("bias", "query_norm", "key_norm", "input_norm")
_JOINING = ("fc.weight", "model.fc.weight", "fusion_fc.weight")
_EMBEDDING = ("embed_tokens.weight", "model.embed_tokens.weight")
_HEAD = ("lm_head.weight",)
_LAST_NORM = ("norm.weight", "model.norm.weight", "pre_lm_head_layernorm.weight")
_IGNORED = ("rotary_emb.inv_freq", "t2d", "verifier_", "hidden_norm.bias")


def is_eagle(config: dict[str, Any]) -> bool:
    """Whether a config says by itself that it is an EAGLE head's; the authors' own EAGLE-1 does not."""
    names = [str(config.get("speculators_model_type", "")), *map(str, config.get("architectures") or ())]
    return any("eagle" in name.lower() for name in names)


def load_eagle(source: str | Path, target: LoadedModel, revision: str | None = None) -> EagleHead:
    """Read a head for a target; what it does not bring is the target's.

    Raises:
        ModelLoadError: It is missing, broken, of a format that is not read, or made for another target.
    """
    files = HeadFiles(head_folder(source, revision))
    reader = _Reader(files, target)
    head = reader.head()
    unread = [name for name in files.shapes if name not in reader.read and not any(one in name for one in _IGNORED)]
    if unread:
        raise ModelLoadError(
            f"{files.folder} has tensors that no EAGLE head of a known kind has: {', '.join(sorted(unread)[:4])}; it "
            "would be computed wrongly, so it is not served"
        )
    ids = "all ids" if head.ids is None else f"{len(head.ids)} ids"
    kind = "EAGLE-3" if head.settings.third else "EAGLE"
    logger.info(
        "%s head of width %d over %s, reads hidden states %s", kind, head.settings.hidden, ids, head.settings.taps
    )
    return head


class _Reader:
    """Reads one head, and notes what it has read."""

    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        self.files, self.target = files, target
        self.read: set[str] = set()
        self.model: Any = target.model
        self.device, self.dtype = self.model.device, self.model.dtype
        self.layer = files.config.get("transformer_layer_config") or files.config
        found = [prefix for prefix in _LAYER_PREFIXES if f"{prefix}self_attn.q_proj.weight" in files.shapes]
        if not found:
            raise ModelLoadError(
                f"{files.folder} is no EAGLE head: it has no {_LAYER_PREFIXES[0]}self_attn.q_proj.weight"
            )
        self.prefix = found[0]
        self.third = f"{self.prefix}hidden_norm.weight" in files.shapes

    def head(self) -> EagleHead:
        """Put the head together."""
        config = LlamaConfig(**{name: self.layer[name] for name in _LLAMA_KEYS if name in self.layer})
        target_config = self.model.config.get_text_config()
        width = self._first(_JOINING)
        hidden, joined = self.files.shapes[width]
        num_taps = joined // target_config.hidden_size if self.third else 1
        wanted = num_taps * target_config.hidden_size if self.third else hidden + target_config.hidden_size
        if joined != wanted or not num_taps or (not self.third and hidden != target_config.hidden_size):
            made_for = self.files.config.get("target_hidden_size") or (joined // 3 if self.third else joined - hidden)
            raise ModelLoadError(
                f"{self.files.folder} was made for hidden states of {made_for} numbers, but {self.target.name} has "
                f"{target_config.hidden_size}; use a head that was trained for this target"
            )
        weights = self._layer_weights() | {"fc": self._tensor(width)}
        for name, names in {
            "fc_bias": ("fc.bias", "fusion_fc.bias"),
            "embedding_norm": ("embedding_layernorm.weight",),
        }.items():
            if any(one in self.files.shapes for one in names):
                weights[name] = self._tensor(self._first(names))
        weights |= self._last_norm(hidden, target_config.hidden_size)
        head_dim = self.layer.get("head_dim") or hidden // config.num_attention_heads
        settings = EagleSettings(
            third=self.third,
            taps=self._taps(num_taps, target_config.num_hidden_layers),
            hidden=hidden,
            num_heads=weights["query"].shape[0] // head_dim,
            num_kv_heads=weights["key"].shape[0] // head_dim,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            context_length=config.max_position_embeddings,
            norm_before_residual=bool(self.files.config.get("norm_before_residual", False)),
        )
        ids = self._ids()
        return EagleHead(
            settings, weights, self._embedding(hidden), self._vocabulary(hidden, ids),
            LlamaRotaryEmbedding(config).to(self.device), ACT2FN[config.hidden_act], self.target.vocab_size, ids,
        )  # fmt: skip

    def _layer_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, stored in _LAYER_NAMES.items():
            full = self.prefix + stored
            if full in self.files.shapes:
                weights[name] = self._tensor(full)
            elif not name.endswith(_OPTIONAL) and (self.third or name != "hidden_norm"):
                raise ModelLoadError(f"{self.files.folder} lacks {full}; the head is incomplete: download it again")
        return weights

    def _last_norm(self, hidden: int, target_hidden: int) -> dict[str, Tensor]:
        """EAGLE-3 norms before its matrix; where that norm was left out, the target's serves."""
        if any(name in self.files.shapes for name in _LAST_NORM):
            return {"norm": self._tensor(self._first(_LAST_NORM))}
        if not self.third:
            return {}
        norm = getattr(self.model.base_model, "norm", None)
        if norm is None or hidden != target_hidden:
            raise ModelLoadError(
                f"{self.files.folder} lacks norm.weight, and the target's does not fit (width {hidden} by "
                f"{target_hidden}); the head is incomplete: download it again"
            )
        return {"norm": norm.weight.detach()}

    def _embedding(self, hidden: int) -> Any:
        """Its own embedding, or the target's where it has none."""
        stored = next((name for name in _EMBEDDING if name in self.files.shapes), None)
        if stored is not None:
            table = self._tensor(stored)
            if table.shape[0] < min(self.target.vocab_size, len(self.target.tokenizer or ()) or table.shape[0]):
                raise ModelLoadError(
                    f"{self.files.folder} embeds {table.shape[0]} ids, but {self.target.name} has "
                    f"{self.target.vocab_size}; use a head that was trained for this target"
                )
            most = table.shape[0] - 1
            return lambda tokens: F.embedding(tokens.clamp(max=most), table)
        own = self.model.get_input_embeddings()
        if own.weight.shape[1] != hidden:
            raise ModelLoadError(
                f"{self.files.folder} lacks an embedding; the target's is {own.weight.shape[1]} wide, not {hidden}; "
                "the head is incomplete: download it again"
            )
        return own

    def _vocabulary(self, hidden: int, ids: Tensor | None) -> Any:
        """Its own matrix to the vocabulary, or the target's where it has none."""
        stored = next((name for name in _HEAD if name in self.files.shapes), None)
        if stored is not None:
            matrix = self._tensor(stored)
            if matrix.shape != (len(ids) if ids is not None else matrix.shape[0], hidden):
                raise ModelLoadError(
                    f"{self.files.folder}: lm_head.weight has the shape {list(matrix.shape)}, but d2t names "
                    f"{0 if ids is None else len(ids)} ids of width {hidden}; the files do not belong together"
                )
            return lambda states: F.linear(states, matrix)
        own = self.model.get_output_embeddings()
        if ids is not None or own.in_features != hidden:
            raise ModelLoadError(
                f"{self.files.folder} lacks lm_head.weight, and the target's does not fit it; the head is incomplete: "
                "download it again"
            )
        return own

    def _ids(self) -> Tensor | None:
        """The target's id of each of the head's: `d2t` has the distances."""
        if "d2t" not in self.files.shapes:
            return None
        distances = self._tensor("d2t", torch.long)
        ids = distances + torch.arange(len(distances), device=self.device)
        if int(ids.min()) < 0 or int(ids.max()) >= self.target.vocab_size or len(set(ids.tolist())) != len(ids):
            raise ModelLoadError(
                f"{self.files.folder}: d2t leads to ids {int(ids.min())} to {int(ids.max())}, {self.target.name} has "
                f"0 to {self.target.vocab_size - 1}, each once; the head was made for another vocabulary"
            )
        return ids

    def _taps(self, num_taps: int, num_layers: int) -> tuple[int, ...]:
        if not self.third:
            return (num_layers,)
        listed = self.files.config.get("eagle_aux_hidden_state_layer_ids")
        if not listed:
            nested = (self.files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
            listed = [one + 1 for one in nested] if nested else None
        taps = tuple(listed) if listed else (2, num_layers // 2, num_layers - 3)
        if len(taps) != num_taps or min(taps) < 0 or max(taps) > num_layers:
            raise ModelLoadError(
                f"{self.files.folder} reads hidden states {list(taps)}, {num_taps} at a time, but {self.target.name} "
                f"has {num_layers} layers; the head was made for another target"
            )
        return taps

    def _first(self, names: tuple[str, ...]) -> str:
        found = next((name for name in names if name in self.files.shapes), None)
        if found is None:
            raise ModelLoadError(f"{self.files.folder} lacks {names[0]}; it is no EAGLE head, or incomplete")
        return found

    def _tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        self.read.add(name)
        return self.files.tensor(name).to(self.device, dtype or self.dtype)


_LLAMA_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "head_dim",
)  # fmt: skip
