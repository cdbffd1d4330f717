"""Attention over the paged cache, called by transformers' modules through `AttentionInterface`.

The model's code knows nothing of the cache: each attention layer calls `attend` with its fresh queries, keys and
values, and with the `Step` that the runner passed through the model as a keyword. Keys and values are written first,
then read together with what was there: position alone decides what a query sees.

This is the torch reference, used on CPUs; it is plain enough to check other kernels against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from outrider.kernels.attention import seen_places, slots_of, stored_places
from outrider.model.kv_cache import BLOCK_SIZE, KVCache, LayerShape
from outrider.model.load import set_attention
from outrider.model.paged import PagedStep

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["ATTENTION_NAME", "Probe", "Step", "attend", "borrow", "give_back", "register"]

ATTENTION_NAME = "outrider"
EXACT_SPAN = 64  # in exact mode a query reads a multiple of this many slots, by its position alone
KNOWN_KEYWORDS = frozenset({"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"})


@dataclass
class Probe:
    """A stand-in for `Step` that records what each layer is like, while attention runs over the fresh tokens alone."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    calls: int = 0
    unknown: set[str] = field(default_factory=set)


@dataclass
class Step:
    """One forward pass's view of the cache.

    Attributes:
        cache: Where keys and values are kept.
        positions: Absolute position of each fresh token, ``[B, T]``.
        write: Slot of each fresh token, ``[B * T]``.
        read: Slots that hold positions 0..L-1 of each row: a slice where one row's lie in order, or ``[B, L]``.
        context: L, at least the highest position + 1.
        row_wise: Whether every query is computed alone, over a span that its position fixes (exact mode).
        ancestors: See `PagedStep`.
    """

    cache: KVCache
    positions: torch.Tensor
    write: torch.Tensor
    read: slice | torch.Tensor
    context: int
    row_wise: bool = False
    ancestors: torch.Tensor | None = None
    masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)
    spans: list[list[int]] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        cache: KVCache,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        *,
        start: int | None = None,
        row_wise: bool = False,
        ancestors: torch.Tensor | None = None,
    ) -> Step:
        """Work out the slots once for all layers.

        Args:
            cache: The cache to write and read.
            positions: ``[B, T]``.
            tables: Blocks of each row, ``[B, blocks]``.
            context: How many places to read, known to the host: at least the highest one + 1.
            start: First slot of the one row, where its blocks lie in order.
            row_wise: See the class.
            ancestors: See `PagedStep`; not together with `row_wise`.
        """
        places = stored_places(positions, ancestors)
        write = slots_of(tables, places).flatten()
        if start is not None and not row_wise:
            if places.device.type == "cpu":  # a slice reads whatever lies in it: no further than was written
                context = min(context, int(places.max()) + 1)
            return cls(cache, positions, write, slice(start, start + context), context, ancestors=ancestors)
        if row_wise:
            context = -(-context // EXACT_SPAN) * EXACT_SPAN
        place = torch.arange(context, device=positions.device)
        slots = slots_of(tables, place.expand(len(tables), -1))
        seen = place <= places.amax(1, keepdim=True)
        read = torch.where(seen, slots, place % BLOCK_SIZE)  # the null block
        spans = (positions // EXACT_SPAN * EXACT_SPAN + EXACT_SPAN).tolist() if row_wise else []
        return cls(cache, positions, write, read, context, row_wise, ancestors, spans=spans)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write fresh keys and values ``[B, kv heads, T, dim]``."""
        for pool, fresh in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            pool.index_copy_(0, self.write, fresh.transpose(1, 2).reshape(-1, *pool.shape[1:]).to(pool.dtype))

    def load(self, pool: torch.Tensor) -> torch.Tensor:
        """Read a layer's keys or values: ``[B, kv heads, L, dim]``."""
        if isinstance(self.read, slice):
            return pool[self.read].transpose(0, 1)[None]
        rows, length = self.read.shape
        picked = pool.index_select(0, self.read.flatten())
        return picked.view(rows, length, *pool.shape[1:]).transpose(1, 2)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask ``[B, 1, group * T, L]``, one for all layers of a kind; None where everything is seen."""
        key = (window, group)
        if key not in self.masks:
            lone = isinstance(self.read, slice) and self.positions.shape[1] == 1
            everything = lone and (window is None or self.context <= window)
            self.masks[key] = None if everything else self._mask(window, group, dtype)
        return self.masks[key]

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor:
        place = torch.arange(self.context, device=self.positions.device)
        seen = seen_places(place, self.positions, window, self.ancestors)
        rows, steps, length = seen.shape
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return hidden[:, None, None].expand(rows, 1, group, steps, length).reshape(rows, 1, group * steps, length)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers passes it
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step: Step | PagedStep | Probe | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from T fresh positions a row; positions decide what is seen, `attention_mask` is not used.

    Query ``[B, H, T, D]``, key and value ``[B, Hkv, T, D]`` -> ``[B, T, H, D]``, laid out in that order, which some
    models' modules rely on. Raises RuntimeError where a model
    runs outside Outrider's runner, without a step.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(step, Probe):
        return _probe(step, layer, query, key, value, scale, sliding_window, softcap, others), None
    if step is None:
        raise RuntimeError("this model's attention belongs to an Outrider engine; give it back with engine.close()")
    step.store(layer, key, value)
    if isinstance(step, PagedStep):
        return step.attend(layer, query.transpose(1, 2), scale, sliding_window, softcap), None
    keys, values = step.load(step.cache.keys[layer]), step.load(step.cache.values[layer])
    batch, heads, steps, dim = query.shape
    group = heads // keys.shape[1]
    # Grouped heads become further query rows of their KV head: no copy of keys or values a head.
    folded = query.reshape(batch, keys.shape[1], group * steps, dim)
    mask = step.mask(sliding_window, group, query.dtype)
    if step.row_wise:
        out = _row_wise(folded, keys, values, mask, scale, softcap, step.spans)
    else:
        out = _scored(folded, keys, values, mask, scale, softcap)
    return out.reshape(batch, heads, steps, -1).transpose(1, 2).contiguous(), None


def _scored(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax attention of ``[B, Hkv, Q, D]`` over ``[B, Hkv, L, D]``."""
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(query.dtype) @ values


def _row_wise(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    spans: list[list[int]],
) -> torch.Tensor:
    """Compute each query alone over a span fixed by its position: its bits depend on nothing else."""
    rows, heads, width, _ = query.shape
    steps = len(spans[0])
    out = query.new_empty(rows, heads, width, values.shape[-1])
    for row in range(rows):
        for step in range(steps):
            span = spans[row][step]
            picked = (slice(row, row + 1), slice(None), slice(step, None, steps))
            seen = None if mask is None else mask[row : row + 1, :, step::steps, :span]
            out[picked] = _scored(
                query[picked].contiguous(),
                keys[row : row + 1, :, :span].contiguous(),
                values[row : row + 1, :, :span].contiguous(),
                seen,
                scale,
                softcap,
            )
    return out


def _probe(
    probe: Probe,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    probe.calls += 1
    probe.layers[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], window, softcap)
    probe.unknown |= {name for name, given in others.items() if given is not None and name not in KNOWN_KEYWORDS}
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2).contiguous()


def register() -> None:
    """Make `attend` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)


# How many runners use a model's modules, and the attention it had before the first: the last one gives it back.
_borrowed: WeakKeyDictionary[PreTrainedModel, tuple[int, str]] = WeakKeyDictionary()


def borrow(model: PreTrainedModel) -> None:
    """Let a model attend with `attend` until `give_back` was called as often as this."""
    register()
    users, previous = _borrowed.get(model, (0, ""))
    if not users:
        previous = set_attention(model, ATTENTION_NAME)
    _borrowed[model] = (users + 1, previous)


def give_back(model: PreTrainedModel) -> None:
    """Undo one `borrow`."""
    users, previous = _borrowed.pop(model)
    if users > 1:
        _borrowed[model] = (users - 1, previous)
    else:
        set_attention(model, previous)
