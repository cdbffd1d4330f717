"""Medusa heads: small networks that guess several tokens ahead from one hidden state of the target (2401.10774).

Head i (from 0) takes the target's hidden state at some place, after the last norm, and guesses the token i + 2 places
further on; the target's own head guesses the one in between. A head is a few residual blocks, ``x + silu(W x + b)``,
and a matrix to the vocabulary: its own, or the target's.

Formats that are read, all from safetensors:

- FasterDecoding's, also text-generation-inference's: ``{head}.{layer}.linear.weight`` and ``.bias``, then
  ``{head}.{num_layers}.weight``, in ``medusa_lm_head.safetensors`` or, named ``medusa_head.*`` or ``medusa_heads.*``,
  among a model's own weights. Where the last matrices are missing, the target's head is meant (TGI's second version).
- vLLM's `MedusaModel`: ``blocks.{head}.layers.{layer}.weight``, ``lm_heads.{head}.weight``, for a shortened vocabulary
  ``token_map``; with `original_lm_head` all heads share ``lm_heads.0.weight``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.errors import ModelLoadError
from outrider.model.head_files import HeadFiles, head_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from outrider.model.load import LoadedModel

__all__ = ["WEIGHT_FILE", "MedusaHeads", "is_medusa", "load_medusa"]

logger = logging.getLogger("outrider")
WEIGHT_FILE = "medusa_lm_head.safetensors"
_PREFIXES = ("medusa_head.", "medusa_heads.", "")
_LAYER = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.weight")


@dataclass(frozen=True)
class MedusaHeads:
    """N heads, computed side by side.

    Attributes:
        weights: Of the residual blocks, one ``[N, hidden, hidden]`` a layer.
        biases: Theirs, ``[N, 1, hidden]``; empty where they have none.
        outs: Matrices to the vocabulary, ``[N or 1, ids, hidden]``; None: `target_head` is used.
        target_head: The target's own, ``[..., hidden]`` -> ``[..., vocabulary]``.
        ids: What the guessed ids are in the target's vocabulary, ``[ids]``; None: the same.
        scale: Factor of the logits.
        vocab_size: The target's.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    outs: Tensor | None
    target_head: Callable[[Tensor], Tensor]
    ids: Tensor | None
    scale: float
    vocab_size: int

    @property
    def num_heads(self) -> int:
        """How many tokens they can guess."""
        return len(self.weights[0])

    @torch.inference_mode()
    def logits(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Hidden states ``[B, hidden]`` -> fp32 ``[B, N, V]`` of the first `num_heads` heads, over the target's ids."""
        count = self.num_heads if num_heads is None else num_heads
        state = hidden.to(self.weights[0].dtype).expand(count, *hidden.shape)
        for place, weight in enumerate(self.weights):
            product = state @ weight[:count].mT
            if self.biases:
                product = product + self.biases[place][:count]
            state = state + F.silu(product)
        out = self.target_head(state) if self.outs is None else state @ self.outs[:count].mT
        logits = out.transpose(0, 1).float() * self.scale
        if self.ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        whole[..., self.ids] = logits
        return whole


def is_medusa(config: dict[str, Any]) -> bool:
    """Whether a config is that of Medusa heads."""
    return "medusa_num_heads" in config or "MedusaModel" in (config.get("architectures") or ())


def load_medusa(source: str | Path, target: LoadedModel, revision: str | None = None) -> MedusaHeads:
    """Read heads for a target, onto its device and in its dtype.

    Args:
        source: A folder, or a Hub id.
        target: What they were trained on.
        revision: Of the Hub repository.

    Raises:
        ModelLoadError: They are missing, broken, a pickle, or made for another target.
    """
    files = HeadFiles(head_folder(source, revision), [WEIGHT_FILE])
    return _Reader(files, target).read()


class _Reader:
    """Finds out what the files hold, and stacks it head by head."""

    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        self._files, self._target = files, target
        self._hidden = int(target.model.config.get_text_config().hidden_size)
        self._prefix = next(one for one in _PREFIXES if any(name.startswith(one) for name in files.shapes))
        found = [match.groups() for name in files.shapes if (match := _LAYER.fullmatch(self._bare(name)))]
        if not found:
            raise ModelLoadError(
                f"{files.folder} holds no Medusa heads: no tensor is named as in 0.0.linear.weight or "
                f"blocks.0.layers.0.weight, but for example {next(iter(files.shapes), 'none at all')}"
            )
        self._vllm = found[0][0] is not None
        places = {(int(block or head), int(layer or part)) for block, layer, head, part in found}
        self._num_heads = 1 + max(head for head, _ in places)
        self._num_layers = 1 + max(layer for _, layer in places)
        self._check_config(places)

    def _bare(self, name: str) -> str:
        return name.removeprefix(self._prefix) if name.startswith(self._prefix) else ""

    def _check_config(self, places: set[tuple[int, int]]) -> None:
        """Hold what config.json says against the tensors: published configs may count fewer heads than there are."""
        heads = self._files.number("medusa_num_heads", "num_heads", default=self._num_heads)
        layers = self._files.number("medusa_num_layers", "num_hidden_layers", default=self._num_layers)
        folder = self._files.folder
        whole = len(places) == self._num_heads * self._num_layers
        if heads > self._num_heads or layers != self._num_layers or not whole:
            raise ModelLoadError(
                f"{folder}: config.json says {heads} heads of {layers} layers, but the weights have {self._num_heads} "
                f"heads of {self._num_layers} layers, {len(places)} in all; download it again"
            )
        if heads < self._num_heads:
            logger.info("%s: config.json counts %d Medusa heads, all %d are used", folder, heads, self._num_heads)
        hidden = self._files.number("hidden_size", default=self._hidden)
        vocab = self._files.number("vocab_size", default=self._target.vocab_size)
        self._agree("hidden size", hidden, self._hidden)
        self._agree("vocabulary size", vocab, self._target.vocab_size)

    def _agree(self, what: str, mine: int, wanted: int) -> None:
        if mine != wanted:
            raise ModelLoadError(
                f"{self._files.folder}: the heads were made for a target of {what} {mine}, but {self._target.name} has "
                f"{wanted}; use heads that were trained on this target"
            )

    def read(self) -> MedusaHeads:
        first = self._files.shapes[self._layer(0, 0) + ".weight"]
        self._agree("hidden size", first[-1], self._hidden)
        layers = range(self._num_layers)
        size = self._hidden
        has_bias = self._layer(0, 0) + ".bias" in self._files.shapes
        ids, outs = self._outs()
        return MedusaHeads(
            weights=tuple(self._stacked(layer, "weight", (size, size)) for layer in layers),
            biases=tuple(self._stacked(layer, "bias", (size,))[:, None] for layer in layers) if has_bias else (),
            outs=outs,
            target_head=self._target.model.get_output_embeddings(),  # type: ignore[no-untyped-call]
            ids=ids,
            scale=float(self._files.config.get("logit_scale", 1.0)),
            vocab_size=self._target.vocab_size,
        )

    def _layer(self, head: int, layer: int) -> str:
        own = f"blocks.{head}.layers.{layer}" if self._vllm else f"{head}.{layer}.linear"
        return self._prefix + own

    def _stacked(self, layer: int, kind: str, shape: tuple[int, ...]) -> Tensor:
        room = self._room(self._num_heads, *shape)
        for head in range(self._num_heads):
            room[head] = self._files.tensor(f"{self._layer(head, layer)}.{kind}", shape)
        return room

    def _room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._target.dtype, device=self._target.device)

    def _outs(self) -> tuple[Tensor | None, Tensor | None]:
        """The ids that are guessed and the matrices to them."""
        names = [
            self._prefix + (f"lm_heads.{head}.weight" if self._vllm else f"{head}.{self._num_layers}.weight")
            for head in range(self._num_heads)
        ]
        if self._vllm and self._files.config.get("original_lm_head"):
            names = names[:1]
        if names[0] not in self._files.shapes:
            return None, None
        ids = self._ids()
        stored = self._files.shapes[names[0]][0]
        size = self._target.vocab_size if ids is None else len(ids)
        if stored not in (size, self._target.vocab_size):
            self._agree("vocabulary size", stored, size)
        outs = self._room(len(names), size, self._hidden)
        for place, name in enumerate(names):
            matrix = self._files.tensor(name, (stored, self._hidden))
            outs[place] = matrix if stored == size or ids is None else matrix[ids.to(matrix.device)]
        return ids, outs

    def _ids(self) -> Tensor | None:
        """The ids of a shortened vocabulary."""
        name, size = self._prefix + "token_map", self._target.vocab_size
        short = self._files.number("truncated_vocab_size", default=size)
        if short >= size:
            return None
        ids = self._files.tensor(name, (short,)).long()
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ModelLoadError(
                f"{self._files.folder}: {name} holds ids from {int(ids.min())} to {int(ids.max())}, but "
                f"{self._target.name} has {size}; use heads that were trained on this target"
            )
        return ids.to(self._target.device)
