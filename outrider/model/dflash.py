"""A block drafter: one pass guesses a whole block of tokens, conditioned on the target's hidden states.

DFlash (2602.06036) is a small stack of Qwen3 layers. The block it is fed holds the last committed token and mask tokens
for the places to be guessed; within the block every place sees every other. Of the text before the block it sees no
tokens: hidden states of some target layers, projected and normed, take the place of the hidden states from which keys
and values are made. Those keys and values are kept in a paged cache like any others.

DSpark (deepseek-ai/DeepSpec) adds a Markov head: a matrix of low rank that corrects each place's logits by the token
before it. Its first guess is made at the last committed token's own place, so that a block of N guesses N tokens; a
DFlash block of N guesses N - 1, each at its own place.

What is read in which format is in `outrider.model.dflash_files`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.kernels.attention import slots_of
from outrider.model.attention import ATTENTION_NAME, Step, register
from outrider.model.features import FeatureTap
from outrider.model.head_cache import HeadCache
from outrider.model.kv_cache import LayerShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from outrider.model.paged import PagedStep

__all__ = ["BlockDraft", "BlockOutput", "BlockSettings", "draft_layer"]


@dataclass(frozen=True)
class BlockSettings:
    """What a block drafter's config says, apart from its layers.

    Attributes:
        block_size: Tokens of the block it was trained on, the last committed one included.
        mask_token: Id that stands at places to be guessed.
        target_layers: Layers of the target whose outputs it reads; -1 is the embedding.
        causal: Whether each layer lets a place see the block's earlier places alone.
        from_anchor: Whether the last committed token's own place makes the first guess (DSpark).
        embedding_scale: Factor of the embeddings.
        logit_scale: Factor of the logits.
        softcap: Logits become ``tanh(logit / softcap) * softcap``.
        context_length: Positions it was made for.
    """

    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    causal: tuple[bool, ...]
    from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    context_length: int = 32768

    @property
    def num_guesses(self) -> int:
        """How many tokens a block guesses."""
        return self.block_size if self.from_anchor else self.block_size - 1


@dataclass(frozen=True)
class BlockOutput:
    """From a place's last hidden state to scores of the target's ids.

    Attributes:
        head: ``[..., hidden]`` -> ``[..., ids]``.
        vocab_size: The target's.
        ids: What the guessed ids are in the target's vocabulary, ``[ids]``; None: the same.
        markov: Of DSpark: rows of the token before, ``[V, rank]``, and what they add to each id, ``[ids, rank]``.
    """

    head: Callable[[Tensor], Tensor]
    vocab_size: int
    ids: Tensor | None = None
    markov: tuple[Tensor, Tensor] | None = None


class BlockDraft:
    """Runs a block drafter.

    Args:
        settings: See the class.
        layers: transformers' Qwen3 decoder layers, see `draft_layer`.
        rotary: Gives the angles of positions.
        norm: After the last layer.
        joint: ``[hidden, len(target_layers) * hidden]``: makes one hidden state of the target's several.
        joint_norm: After that.
        embedding: ``[V, hidden]``.
        output: See the class.
    """

    def __init__(
        self,
        settings: BlockSettings,
        layers: Sequence[nn.Module],
        rotary: nn.Module,
        norm: nn.Module,
        joint: Tensor,
        joint_norm: nn.Module,
        embedding: Tensor,
        output: BlockOutput,
    ) -> None:
        register()
        self.settings, self.output = settings, output
        self.vocab_size = output.vocab_size
        self.device, self.dtype = joint.device, joint.dtype
        self._layers: list[Any] = list(layers)
        self._rotary, self._norm, self._joint_norm = rotary, norm, joint_norm
        self._joint, self._embedding = joint, embedding
        self.layers = [_shape(layer.self_attn) for layer in self._layers]
        self._cache = HeadCache(self.layers, self.dtype, self.device)
        self._tap = FeatureTap(tuple(one + 1 for one in settings.target_layers), joint.shape[0], self._condition)

    @property
    def tap(self) -> FeatureTap:
        """What it reads of the target: hidden states of several layers, made one."""
        return self._tap

    @property
    def context_length(self) -> int:
        """Positions that it was made for."""
        return self.settings.context_length

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one cached token takes in all layers."""
        return self._cache.bytes_per_slot

    def allocate(self, num_blocks: int) -> None:
        """Make the cache; a larger one that stands already is kept."""
        self._cache.allocate(num_blocks)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what its cache keeps in some blocks to others, one by one."""
        self._cache.copy_blocks(source, target)

    @torch.inference_mode()
    def keep(self, features: Tensor, places: Tensor, tables: Tensor) -> None:
        """Make keys and values of the target's features ``[B, T, hidden]`` at these places ``[B, T]``, and keep them.

        Several entries of one place must be the same.
        """
        kept = self._cache.made
        slots = slots_of(tables, places).flatten()
        features = features.to(self.dtype)
        cos, sin = self._rotary(features, position_ids=places)
        for number, layer in enumerate(self._layers):
            attention = layer.self_attn
            shape = (*features.shape[:2], -1, attention.head_dim)
            key = _rotated(attention.k_norm(attention.k_proj(features).view(shape)), cos, sin)
            value = attention.v_proj(features).view(shape)
            kept.keys[number].index_copy_(0, slots, key.flatten(0, 1))
            kept.values[number].index_copy_(0, slots, value.flatten(0, 1))

    @torch.inference_mode()
    def guess(
        self, last: Tensor, places: Tensor, tables: Tensor, length: int, start: int | None, num_tokens: int
    ) -> Tensor:
        """Run a block behind each row's text: logits over the draft's ids, fp32 ``[B, num_tokens, ids]``.

        A block is as wide as guesses are wanted, as is one at the end of a text in the authors' code.

        Args:
            last: The last committed token, ``[B, 1]``.
            places: Its place, ``[B, 1]``; features of all places before it must be kept.
            tables: Blocks of each row, ``[B, blocks]``.
            length: Tokens of the longest row at most, known to the host; of a lone row exactly so many.
            start: First slot of the only row, where its blocks lie in order.
            num_tokens: Guesses wanted, up to `num_guesses`.
        """
        width = num_tokens if self.settings.from_anchor else num_tokens + 1
        tokens = F.pad(last, (0, width - 1), value=self.settings.mask_token)
        positions = places + torch.arange(width, device=places.device)
        hidden = F.embedding(tokens, self._embedding) * self.settings.embedding_scale
        angles = self._rotary(hidden, position_ids=positions)
        context = length - 1 + width
        steps = {causal: self._step(positions, tables, context, start, causal) for causal in set(self.settings.causal)}
        for causal, layer in zip(self.settings.causal, self._layers, strict=True):
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                use_cache=False,
                position_embeddings=angles,
                step=steps[causal],
            )
        return self._logits(self._norm(hidden[:, width - num_tokens :]))

    @torch.inference_mode()
    def corrected(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Give one place's scores over the target's ids, ``[B, 1, V]``, told the token before it, ``[B, 1]``."""
        if self.output.markov is not None:
            rows, columns = self.output.markov
            logits = logits + F.linear(rows[previous], columns).float() * self.settings.logit_scale
        return self.spread(logits)

    def spread(self, logits: Tensor) -> Tensor:
        """Spread scores of the draft's ids ``[..., ids]`` over the target's, ``[..., V]``."""
        if self.output.ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        whole[..., self.output.ids] = logits
        return whole

    def _condition(self, hidden: Tensor) -> Tensor:
        """Make one hidden state of the target's several: ``[B, T, layers * hidden]`` -> ``[B, T, hidden]``."""
        made: Tensor = self._joint_norm(F.linear(hidden.to(self.dtype), self._joint))
        return made

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.output.head(hidden).float() * self.settings.logit_scale
        softcap = self.settings.softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _step(
        self, positions: Tensor, tables: Tensor, context: int, start: int | None, causal: bool
    ) -> Step | PagedStep:
        # In an ancestor mask where every token is everybody's ancestor (all bits: -1), the whole block is seen.
        everyone = None if causal else torch.full_like(positions, -1)
        return self._cache.step(positions, tables, context, start, everyone)


def draft_layer(config: Any, number: int, window: int | None) -> Any:
    """Make a Qwen3 decoder layer without weights, that attends by our attention.

    Args:
        config: A `Qwen3Config`.
        number: Its place in the stack.
        window: How many positions it sees at most, its own included; None for all.
    """
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    config._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - its only name
    with torch.device("meta"):
        layer = Qwen3DecoderLayer(config, number)
    layer.self_attn.sliding_window = window
    return layer.eval().requires_grad_(False)


def _shape(attention: Any) -> LayerShape:
    heads = attention.k_proj.out_features // attention.head_dim
    return LayerShape(heads, attention.head_dim, attention.head_dim, attention.sliding_window)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by halves: heads ``[B, T, H, D]``, angles ``[B, T, D]``."""
    first, second = heads.chunk(2, -1)
    return heads * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
