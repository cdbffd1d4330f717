"""The common pre-norm decoder (Llama's, and with it Mistral's, Qwen2's, Qwen3's ...) with little around its products.

In a decode step of a small model a good part of the time goes into starting operations, not into the products. Where a
model has the usual structure, its own modules are called here directly, about half as many operations a layer as
through transformers' forward. Whether it really is such a model is not judged by its name: every layer must ask for the
same attention and give the same numbers as the original on a probe, and so must the whole model; otherwise it runs
through transformers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.model.attention import Probe, Step, attend
from outrider.model.fuse import SharedProductPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["MODEL_ROUNDINGS", "PROBE_TOKENS", "Decoder", "decoder_for", "within"]

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
PROBE_TOKENS = 3
_LAYER_ROUNDINGS = 16  # a layer rounds in rotation, attention, activation and two sums
MODEL_ROUNDINGS = 64


class _Layer:
    """``h + attention(norm(h))``, then ``h + mlp(norm(h))``, with rotary positions by halves (2104.09864).

    Calls modules' `forward` directly: they have no hooks, and the call machinery costs as much as a small operation.
    """

    def __init__(self, layer: Any) -> None:
        self.attention = layer.self_attn
        shared = self.attention.q_proj.shared
        self.dim = self.attention.head_dim
        self.heads, kv_heads, _ = (size // self.dim for size in shared.sizes)
        self.turned_heads = self.heads + kv_heads
        self.window: int | None = None  # found by the probe: each family keeps it elsewhere
        self.scaling = self.attention.scaling
        self.product, self.projected, self.mlp = (
            shared.product.forward,
            self.attention.o_proj.forward,
            layer.mlp.forward,
        )
        self.input_norm, self.output_norm = layer.input_layernorm.forward, layer.post_attention_layernorm.forward
        norms = [getattr(self.attention, name, None) for name in ("q_norm", "k_norm")]
        self.query_norm, self.key_norm = (norm.forward if norm is not None else None for norm in norms)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: Step | Probe) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; `sin` carries the sign of the rotation."""
        fused = self.product(self.input_norm(hidden)).unflatten(-1, (-1, self.dim))
        turned = fused[:, :, : self.turned_heads]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = fused[:, :, : self.heads], fused[:, :, self.heads : self.turned_heads]
            turned = torch.cat([self.query_norm(queries), self.key_norm(keys)], 2)
        turned = torch.addcmul(turned * cos, turned.roll(self.dim // 2, -1), sin).transpose(1, 2)
        out, _ = attend(
            self.attention,
            turned[:, : self.heads],
            turned[:, self.heads :],
            fused[:, :, self.turned_heads :].transpose(1, 2),
            None,
            scaling=self.scaling,
            sliding_window=self.window,
            step=step,
        )
        hidden = hidden + self.projected(out.flatten(2))
        return hidden + self.mlp(self.output_norm(hidden))  # type: ignore[no-any-return]


class Decoder:
    """Runs a whole model of the usual structure by its own modules.

    Args:
        model: A fused model of the usual structure; it keeps all modules and weights.
    """

    def __init__(self, model: Any) -> None:
        base = model.base_model
        self._embed, self._angles = base.embed_tokens, base.rotary_emb
        self._norm, self._head = base.norm, model.get_output_embeddings()
        self.layers = [_Layer(layer) for layer in base.layers]

    def hidden(
        self, tokens: Tensor, positions: Tensor, step: Step | Probe, taken: dict[int, Any] | None = None
    ) -> Tensor:
        """[B, T] ids at [B, T] positions -> [B, T, hidden], before the last norm.

        The keys of `taken` name hidden states to keep there, as in `FeatureTap`.
        """
        hidden = self._embed(tokens)
        cos, sin = signed_angles(*self._angles(hidden, position_ids=positions))
        for place, layer in enumerate(self.layers):
            if taken and place in taken:
                taken[place] = hidden
            hidden = layer(hidden, cos, sin, step)
        if taken and len(self.layers) in taken:
            taken[len(self.layers)] = self._norm(hidden)
        return hidden  # type: ignore[no-any-return]

    def __call__(
        self, tokens: Tensor, positions: Tensor, step: Step | Probe, taken: dict[int, Any] | None = None
    ) -> Tensor:
        """[B, T] ids at [B, T] positions -> logits [B, T, V]; `taken` as for `hidden`."""
        return self._head(self._norm(self.hidden(tokens, positions, step, taken)))  # type: ignore[no-any-return]

    def only(self, keep: Sequence[int]) -> Decoder:
        """Give the same decoder with some of its layers alone."""
        part = copy.copy(self)
        part.layers = [self.layers[place] for place in keep]
        return part


def signed_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare transformers' angles ``[B, T, D]`` for all heads, the sign of the rotation moved into the sine.

    Rotating by halves negates what comes from the second half: with the sign in the sine, a roll does the rest.
    """
    half = sin.shape[-1] // 2
    return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]


@torch.inference_mode()
def decoder_for(model: PreTrainedModel) -> Decoder | None:
    """Give a `Decoder` where the probes allow it. The model attends with `attend` already, and was fused."""
    base: Any = model.base_model
    if {name for name, _ in base.named_children()} != _MODEL or not all(map(_usual, base.layers)):
        return None
    try:
        decoder = Decoder(model)
        same = _same_layers(decoder, base.layers, model) and _same_logits(decoder, model)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another structure after all
        return None
    return decoder if same else None


def _usual(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if children.keys() != _LAYER:
        return False
    attention = children["self_attn"]
    inside = dict(attention.named_children())
    if inside.keys() not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    parts = [inside["q_proj"], inside["k_proj"], inside["v_proj"]]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())  # noqa: SLF001
    return all(isinstance(part, SharedProductPart) for part in parts) and not hooked


def _same_layers(decoder: Decoder, layers: Any, model: PreTrainedModel) -> bool:
    """Whether each layer gives the same on random tokens at random angles, and asks for the same attention."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    hidden = torch.randn(1, PROBE_TOKENS, config.hidden_size, generator=generator).to(model.device, model.dtype)
    places = torch.arange(PROBE_TOKENS, device=model.device)[None]
    for mine, original in zip(decoder.layers, layers, strict=True):
        angle = torch.randn(1, PROBE_TOKENS, mine.dim // 2, generator=generator).repeat(1, 1, 2)
        angles = tuple(part.to(model.device, model.dtype) for part in (angle.cos(), angle.sin()))
        probes = Probe(), Probe()
        expected = original(
            hidden,
            position_embeddings=angles,
            position_ids=places,
            attention_mask=None,
            use_cache=False,
            step=probes[0],
        )
        mine.window = next(shape.sliding_window for shape in probes[0].layers.values())
        got = mine(hidden, *signed_angles(*angles), probes[1])
        if probes[0].layers != probes[1].layers or not _close(expected, got, _LAYER_ROUNDINGS):
            return False
    return True


def _same_logits(decoder: Decoder, model: PreTrainedModel) -> bool:
    """Whether the whole model gives the same: nothing scales embeddings or logits in between."""
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] + 1
    positions = tokens - 1
    expected = model(input_ids=tokens, position_ids=positions, step=Probe(), use_cache=False).logits
    return _close(expected, decoder(tokens, positions, Probe()), MODEL_ROUNDINGS)


def _close(expected: Tensor, got: Tensor, roundings: int) -> bool:
    same_kind = expected.shape == got.shape and expected.dtype == got.dtype
    return same_kind and within(expected.float(), got.float(), roundings, expected.dtype)


def within(expected: Tensor, got: Tensor, roundings: int, dtype: torch.dtype) -> bool:
    """Whether two fp32 tensors differ by no more than so many roundings of `dtype` of each row's largest number."""
    bound = max(roundings * torch.finfo(dtype).eps, 1e-5)
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((expected - got).abs() <= bound * largest).all())
