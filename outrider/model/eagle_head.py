"""EAGLE heads: one decoder layer that guesses the next token from the target's hidden states (2401.15077, 2503.01840).

At place p a head takes what the target thought there (its *feature*) and the embedding of the token after it, and says
what the target will think at place p + 1; the vocabulary's matrix makes a guess of that. For the next guess its own
output takes the feature's place. EAGLE-1 and 2 read the target's last hidden state, after the last norm. EAGLE-3 reads
three layers, joined by a matrix, and attends over embedding and feature side by side. Later EAGLE-3 heads norm what is
joined, and feed their output back after its last norm.

What is read in which format is in `outrider.model.eagle_files`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.model.attention import Step, attend
from outrider.model.features import FeatureTap, unchanged
from outrider.model.head_cache import HeadCache
from outrider.model.kv_cache import LayerShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from outrider.model.paged import PagedStep

__all__ = ["EagleHead", "EagleSettings"]


@dataclass(frozen=True)
class EagleSettings:
    """What a head's config says, apart from its weights.

    Attributes:
        third: Whether it is an EAGLE-3 head.
        taps: Hidden states of the target that it reads, numbered as in `FeatureTap`.
        hidden: Its width.
        num_heads, num_kv_heads, head_dim: Of its attention.
        eps: Of its norms.
        context_length: Positions it was made for.
        norm_before_residual: EAGLE-3: whether the residual is taken after the feature's norm.
        norm_output: Whether what is fed back for the next guess has passed the last norm.
        window: Places that attention looks back, its own included; None: all.
    """

    third: bool
    taps: tuple[int, ...]
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    context_length: int
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None


@dataclass(eq=False)
class EagleHead:
    """A head's computation over a paged cache of its own.

    Attributes:
        settings: Its shape.
        weights: Tensors by the names that `outrider.model.eagle_files` gives them; absent ones are not computed.
        embed: Token ids -> embeddings.
        head: Hidden states -> logits over the head's own ids.
        rotary: transformers' rotary embedding of the head's config.
        activation: Of its MLP.
        vocab_size: The target's.
        ids: What the head's ids are in the target's vocabulary, ``[ids]``; None: the same.
    """

    settings: EagleSettings
    weights: dict[str, Tensor]
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    rotary: Any
    activation: Callable[[Tensor], Tensor]
    vocab_size: int
    ids: Tensor | None = None
    layer_idx: int = 0
    _cache: HeadCache = field(init=False, repr=False)

    def __post_init__(self) -> None:
        settings = self.settings
        shape = LayerShape(settings.num_kv_heads, settings.head_dim, settings.head_dim, settings.window)
        self._cache = HeadCache([shape], self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.weights["query"].device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.weights["query"].dtype

    @property
    def context_length(self) -> int:
        """Positions that it was made for."""
        return self.settings.context_length

    @property
    def tap(self) -> FeatureTap:
        """What it wants kept of the target: EAGLE-3's three layers are joined at once, for a third of the room."""
        joins = self.settings.third and "fc" in self.weights
        return FeatureTap(self.settings.taps, self.settings.hidden, self._joined if joins else unchanged)

    def _joined(self, hidden: Tensor) -> Tensor:
        """The target's tapped states, side by side -> features."""
        hidden = self._norm(hidden.to(self.dtype), "taps_norm")
        each = self.weights.get("tap_norms")
        if each is not None:
            hidden = self._normed(hidden.view(*hidden.shape[:-1], *each.shape), each).flatten(-2)
        return self._linear(hidden, "fc")

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
        """Feed pairs of a feature and the token after it; keys and values are written before they are read.

        Args:
            tokens: The token after each place, ``[B, T]``.
            features: ``[B, T, hidden]``.
            positions: The features' own places, ``[B, T]``.
            tables: Blocks of each row, ``[B, blocks]``.
            context: The highest place + 1.
            start: First slot of the only row, where its blocks lie in order.
            ancestors: For trees: see `TorchRunner.forward`.

        Returns:
            Features of the next places, as the head sees them, ``[B, T, hidden]``: for `logits`, and to be fed.
        """
        positions = positions.clamp(max=self.context_length - 1)
        step = self._cache.step(positions, tables, context, start, ancestors)
        embedded, features = self.embed(tokens).to(self.dtype), features.to(self.dtype)
        if self.settings.third:
            normed = self._norm(features, "hidden_norm")
            residual = normed if self.settings.norm_before_residual else features
            taken = torch.cat([self._norm(embedded, "input_norm"), normed], -1)
        else:
            embedded = self._norm(embedded, "embedding_norm")
            residual = self._linear(torch.cat([embedded, features], -1), "fc")
            taken = self._norm(residual, "input_norm")
        hidden = residual + self._attended(taken, positions, step)
        hidden = hidden + self._mlp(self._norm(hidden, "post_norm"))
        return self._norm(hidden, "norm") if self.settings.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, ``[B, T, hidden]`` -> fp32 logits over the target's ids, ``[B, T, V]``."""
        if not self.settings.norm_output:
            hidden = self._norm(hidden, "norm")
        own = self.head(hidden).float()
        if self.ids is None:  # vocabularies of one family differ in their padding
            return F.pad(own, (0, self.vocab_size - own.shape[-1]), value=float("-inf"))
        whole = own.new_full((*own.shape[:-1], self.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.ids, own)

    def _attended(self, taken: Tensor, positions: Tensor, step: Step | PagedStep) -> Tensor:
        dim = self.settings.head_dim
        query, key, value = (
            self._linear(taken, name).view(*taken.shape[:2], -1, dim) for name in ("query", "key", "value")
        )
        query, key = self._norm(query, "query_norm"), self._norm(key, "key_norm")
        cos, sin = (part[:, :, None] for part in self.rotary(taken, position_ids=positions))
        query, key = (one * cos + _half_turned(one) * sin for one in (query, key))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        module: Any = self  # all that is asked of it is `layer_idx`
        window = self.settings.window
        out, _ = attend(module, query, key, value, None, scaling=dim**-0.5, sliding_window=window, step=step)
        return self._linear(out.flatten(2), "output")

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate = self.activation(self._linear(hidden, "gate"))
        return self._linear(gate * self._linear(hidden, "up"), "down")

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return F.linear(hidden, self.weights[name], self.weights.get(f"{name}_bias"))

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        """RMSNorm where the head has that norm."""
        weight = self.weights.get(name)
        return hidden if weight is None else self._normed(hidden, weight)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.settings.eps)
        return wide.to(hidden.dtype) * weight


def _half_turned(heads: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    return torch.cat([-high, low], -1)
