"""Native multi-token prediction: a decoder layer that a model's own checkpoint carries beside the model (2412.19437).

At place p an MTP module takes the target's hidden state there, after the last norm, and the embedding of the token
after it; both are normed, joined by a matrix, and go through one decoder layer of the target's kind. Normed once more,
the target's own head makes a guess of the token at place p + 2 of it. For the next guess its own output takes the
target's place, as an EAGLE head's does. transformers leaves these weights alone when it loads a model, so they are read
here from the same files. Two ways to name them:

- DeepSeek-V3's, and GLM-4.5's: as one more layer, ``model.layers.{num_hidden_layers}.*``, with ``enorm``, ``hnorm``,
  ``eh_proj`` (over embedding and hidden state) and ``shared_head.norm``.
- MiMo's: ``model.mtp_layers.0.*``, with ``token_layernorm``, ``hidden_layernorm``, ``input_proj`` (over hidden state
  and embedding) and ``final_layernorm``.

Embedding and head are the target's. Of several modules the first is used for all guesses.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.model.attention import ATTENTION_NAME, Probe, Step, register
from outrider.model.features import last_hidden_tap
from outrider.model.head_cache import HeadCache
from outrider.model.head_files import HeadFiles, head_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from outrider.model.load import LoadedModel
    from outrider.model.paged import PagedStep

__all__ = ["MtpHead", "has_mtp", "load_mtp"]

logger = logging.getLogger("outrider")


@dataclass(frozen=True)
class _Names:
    """What a format calls the parts that are not of the decoder layer."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    joint: str
    norm: str
    hidden_first: bool
    shared: tuple[str, ...] = ()  # copies of the target's own


_DEEPSEEK = _Names(
    "model.layers.{layers}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", hidden_first=False,
    shared=("embed_tokens.weight", "shared_head.head.weight"),
)  # fmt: skip
_MIMO = _Names(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
)
_FORMATS = (_DEEPSEEK, _MIMO)
_OTHERS = ("mtp.", "model.mtp.", "model.mtp_", "nextn.")  # known to be MTP, in formats that are not read


class MtpHead:
    """Runs an MTP module over a paged cache of its own: for a drafter it is what an `EagleHead` is.

    Args:
        layer: A decoder layer of the target's kind, attending by our attention as layer 0.
        norms: Of the embedding, of the hidden state, and of the result.
        joint: ``[hidden, 2 * hidden]``.
        hidden_first: Whether the hidden state comes before the embedding in what `joint` takes.
        target: Whose embedding, angles and head are used.

    Attributes:
        tap: What it reads of the target.
        context_length: Positions that it was made for.
    """

    def __init__(
        self, layer: Any, norms: tuple[nn.Module, nn.Module, nn.Module], joint: Tensor, hidden_first: bool,
        target: LoadedModel,
    ) -> None:  # fmt: skip
        model: Any = target.model
        self.tap, self.context_length = last_hidden_tap(target), target.context_length
        self.device, self.dtype = joint.device, joint.dtype
        self._layer, self._joint, self._hidden_first = layer, joint, hidden_first
        self._embedding_norm, self._hidden_norm, self._norm = norms
        self._embed: Callable[[Tensor], Tensor] = model.get_input_embeddings()
        self._head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        self._rotary = model.base_model.rotary_emb
        self._cache = HeadCache([self._probed()], self.dtype, self.device)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that its cache takes a token."""
        return self._cache.bytes_per_slot

    def allocate(self, num_blocks: int) -> None:
        """Make its cache; a larger one that stands already is kept."""
        self._cache.allocate(num_blocks)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what its cache keeps in some blocks to others, one by one."""
        self._cache.copy_blocks(source, target)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        tables: Tensor,
        context: int,
        start: int | None = None,
        ancestors: Tensor | None = None,
    ) -> Tensor:
        """Feed pairs of a hidden state and the token after it: all as for `EagleHead.forward`."""
        positions = positions.clamp(max=self.context_length - 1)
        step = self._cache.step(positions, tables, context, start, ancestors)
        return self._run(tokens, features, positions, step)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, ``[B, T, hidden]`` -> fp32 logits, ``[B, T, V]``."""
        return self._head(hidden).float()

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, step: Step | PagedStep | Probe) -> Tensor:
        embedded = self._embedding_norm(self._embed(tokens).to(self.dtype))
        features = self._hidden_norm(features.to(self.dtype))
        pair = (features, embedded) if self._hidden_first else (embedded, features)
        hidden = F.linear(torch.cat(pair, -1), self._joint)
        hidden = self._layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
            position_embeddings=self._rotary(hidden, position_ids=positions),
            step=step,
        )
        made: Tensor = self._norm(hidden)
        return made

    @torch.inference_mode()
    def _probed(self) -> Any:
        """Find out what the layer keeps, from two tokens."""
        probe, tokens = Probe(), torch.zeros(1, 2, dtype=torch.long, device=self.device)
        features = torch.zeros(1, 2, self._joint.shape[0], dtype=self.dtype, device=self.device)
        self._run(tokens, features, torch.arange(2, device=self.device)[None], probe)
        return probe.layers[0]


def has_mtp(files: HeadFiles) -> bool:
    """Whether a model's files hold an MTP module that can be read."""
    return _format_of(files) is not None


def load_mtp(target: LoadedModel, source: str | Path | None = None) -> MtpHead:
    """Read the MTP module that a target's own checkpoint carries, onto its device and in its dtype.

    Args:
        target: The model.
        source: Its folder or Hub id; None: where it was loaded from.

    Raises:
        ModelLoadError: The files hold no such module, or an incomplete one.
        UnsupportedModelError: They hold one in a format or of a kind that is not computed here.
    """
    folder = source or str(target.model.config.name_or_path)
    if not folder:
        raise ModelLoadError(f"{target.name} was not loaded from files, so where its MTP module lies is not known")
    return _Reader(HeadFiles(head_folder(folder)), target).read()


def _format_of(files: HeadFiles) -> tuple[_Names, str] | None:
    """How the module is named, and the beginning of its tensors' names."""
    text = files.config.get("text_config") or files.config
    for names in _FORMATS:
        prefix = names.prefix.format(layers=text.get("num_hidden_layers"))
        if f"{prefix}{names.joint}.weight" in files.shapes:
            return names, prefix
    return None


class _Reader:
    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        self._files, self._target = files, target
        self._base: Any = target.model.base_model
        found = _format_of(files)
        if found is None:
            other = next((name for name in files.shapes if name.startswith(_OTHERS)), None)
            if other is not None:
                raise UnsupportedModelError(
                    f"{target.name}: its MTP module is of a format that is not read ({other}); use one named as "
                    "DeepSeek-V3's or MiMo's, or another method"
                )
            raise ModelLoadError(
                f"{target.name}: its files hold no MTP module (no model.layers.N.eh_proj, no model.mtp_layers); it "
                "was published without one: use another method"
            )
        self._names, self._prefix = found
        self._check()

    def _check(self) -> None:
        name, stored = self._target.name, [one for one in self._files.shapes if one.startswith(self._prefix)]
        coded = next((one for one in stored if one.endswith(("_scale_inv", "_scale", ".scales", "qweight"))), None)
        if coded is not None:
            raise UnsupportedModelError(
                f"{name}: its MTP module is quantised ({coded}), which is not read; use another"
            )
        for parts in (self._base, self._base.layers[-1]):
            if not hasattr(parts, "rotary_emb" if parts is self._base else "self_attn"):
                raise UnsupportedModelError(
                    f"{name}: {self._target.model.config.model_type} is not of the usual decoder structure; its MTP "
                    "module cannot be run"
                )
        kinds = set(getattr(self._target.model.config.get_text_config(), "layer_types", None) or ())
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"{name}: its layers are of several kinds ({', '.join(sorted(kinds))}), and of which one its MTP "
                "module is, is not known; use another method"
            )
        more = self._prefix.replace(".0.", ".1.") if self._names is _MIMO else self._next_layer()
        if any(one.startswith(more) for one in self._files.shapes):
            logger.info("%s has several MTP modules; the first makes all guesses", name)

    def _next_layer(self) -> str:
        layers = self._target.model.config.get_text_config().num_hidden_layers
        return self._names.prefix.format(layers=layers + 1)

    def read(self) -> MtpHead:
        names, size = self._names, int(self._target.model.config.get_text_config().hidden_size)
        layer = self._layer()
        norms = [self._norm(layer, name, size) for name in (names.embedding_norm, names.hidden_norm, names.norm)]
        joint = self._tensor(f"{names.joint}.weight", (size, 2 * size))
        return MtpHead(layer, (norms[0], norms[1], norms[2]), joint, names.hidden_first, self._target)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._files.tensor(self._prefix + name, shape).to(self._target.device, self._target.dtype)

    def _norm(self, layer: Any, name: str, size: int) -> nn.Module:
        """A norm as the layer's own are: the target's may have been replaced by faster ones."""
        alike = (one for own, one in layer.named_modules() if "norm" in own and one.weight.shape == (size,))
        norm: nn.Module = copy.deepcopy(next(alike))
        norm.load_state_dict({"weight": self._tensor(f"{name}.weight", (size,))}, assign=True)
        return norm.requires_grad_(False)

    def _layer(self) -> Any:
        """A decoder layer as the target's last one is: of a mixture of experts, if that has experts."""
        register()
        config = copy.deepcopy(self._target.model.config.get_text_config())
        config._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - its only name
        with torch.device("meta"):
            layer = type(self._base.layers[-1])(config, int(config.num_hidden_layers) - 1)
        wanted: Mapping[str, Tensor] = layer.state_dict()
        weights = {name: self._weight(name, tuple(one.shape)) for name, one in wanted.items()}
        self._check_all_used(set(weights))
        layer.load_state_dict(weights, assign=True)
        if any(one.is_meta for one in layer.buffers()):
            raise UnsupportedModelError(f"{self._target.name}: its decoder layer computes what no file holds")
        for attention in layer.modules():
            if hasattr(attention, "layer_idx"):
                attention.layer_idx = 0
        return layer.eval().requires_grad_(False)

    def _weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight of the layer; experts lie one by one in the files, and together in the layer."""
        if self._prefix + name in self._files.shapes or ".experts." not in name:
            return self._tensor(name, shape)
        experts, kind = name.rsplit(".", 1)
        room = torch.empty(shape, dtype=self._target.dtype, device=self._target.device)
        for number in range(shape[0]):
            one = f"{experts}.{number}"
            if kind == "gate_up_proj":
                half = (shape[1] // 2, shape[2])
                parts = [self._tensor(f"{one}.{part}_proj.weight", half) for part in ("gate", "up")]
                room[number] = torch.cat(parts)
            else:
                room[number] = self._tensor(f"{one}.{kind}.weight", shape[1:])
        return room

    def _check_all_used(self, used: set[str]) -> None:
        """A stored tensor that no part takes would mean that the module computes something else."""
        names = self._names
        parts = {f"{one}.weight" for one in (names.embedding_norm, names.hidden_norm, names.joint, names.norm)}
        known = used | parts | set(names.shared)
        stored = [name.removeprefix(self._prefix) for name in self._files.shapes if name.startswith(self._prefix)]
        odd = next((name for name in stored if name not in known and ".experts." not in name), None)
        if odd is not None:
            raise UnsupportedModelError(
                f"{self._target.name}: its MTP module has the tensor {self._prefix}{odd}, which a layer of "
                f"{self._target.model.config.model_type} does not; it cannot be run here"
            )
