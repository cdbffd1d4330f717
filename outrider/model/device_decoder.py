"""The common pre-norm decoder on a card: five kernels a layer in a round, each reading what it must and no more.

A decode step reads every weight once; whatever else runs between those reads is lost time. So norms are computed
inside the product that follows them, activation and residual inside the one before, and rotation writes keys and
values where they belong. `outrider.model.decoder` decides whether a model is of this structure; a check at load then
compares the numbers.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.kernels.products import Product, tune
from outrider.kernels.rotary import rotate_and_store
from outrider.kernels.rotate_attend import MAX_FRESH, rotate_and_attend
from outrider.kernels.tiles import ROW_BUCKETS
from outrider.kernels.tuning import compile_ahead
from outrider.model.attention import Probe
from outrider.model.decoder import MODEL_ROUNDINGS, PROBE_TOKENS, within
from outrider.model.fuse import GatedMLP, RMSNorm
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, KVCache, blocks_for
from outrider.model.packing import is_plain_linear
from outrider.model.paged import PagedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.kernels.weights import WeightQuantization
    from outrider.model.decoder import Decoder
    from outrider.model.kv_cache import LayerShape

__all__ = ["DeviceDecoder", "device_decoder_for"]

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh"}
_ANGLES_AT_A_TIME = 8192
_PROMPT = ROW_BUCKETS[-1] + 1  # tokens that are more than any kernel for products takes


class _Layer:
    """``h + attention(norm(h))``, then ``h + mlp(norm(h))``; h is ``[B*T, hidden]``."""

    def __init__(self, layer: Any, shape: LayerShape, index: int, quantization: WeightQuantization | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.shape, self.scaling = index, shape, float(attention.scaling)
        product = attention.q_proj.shared.product
        self.num_heads = attention.q_proj.shared.sizes[0] // shape.key_dim
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [None if norm is None else norm.weight for norm in norms]
        self.head_eps = 1e-6 if norms[0] is None else norms[0].eps
        self.qkv = _product(product, quantization, norm=layer.input_layernorm)
        self.output = _product(attention.o_proj, quantization)
        activation = _ACTIVATIONS[type(mlp.act_fn).__name__]
        self.gate_up = _product(mlp.gate_up_proj, quantization, norm=layer.post_attention_layernorm, gated=activation)
        self.down = _product(mlp.down_proj, quantization)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: PagedStep) -> Tensor:
        out = self._attended(self.qkv(hidden), cos, sin, step)
        hidden = self.output(out.flatten(2).flatten(0, 1), residual=hidden)
        return self.down(self.gate_up(hidden), residual=hidden)

    def _attended(self, qkv: Tensor, cos: Tensor, sin: Tensor, step: PagedStep) -> Tensor:
        """Rotate, store and attend, ``[B, T, H, D]``: in one kernel for few tokens, but not in exact mode."""
        keys, values = step.cache.keys[self.index], step.cache.values[self.index]
        if step.fixed_length is None and step.positions.shape[1] <= MAX_FRESH:
            how = self._heads | self._looking | {"ancestors": step.ancestors}
            return rotate_and_attend(qkv, keys, values, step.tables, step.positions, cos, sin, **how)
        query = rotate_and_store(qkv, step.tables, step.places, step.positions, cos, sin, keys, values, **self._heads)
        return step.attend(self.index, query, *self._looking.values())

    def attend(self, step: PagedStep) -> Tensor:
        """Attend for queries of nobody: ``[B, T, H, D]``."""
        of = step.cache.keys[self.index]
        return step.attend(
            self.index, of.new_zeros(*step.positions.shape, self.num_heads, of.shape[2]), *self._looking.values()
        )

    @property
    def _heads(self) -> dict[str, Any]:
        norms = {"query_norm": self.head_norms[0], "key_norm": self.head_norms[1]}
        return {"num_heads": self.num_heads, **norms, "eps": self.head_eps}

    @property
    def _looking(self) -> dict[str, Any]:
        return {"scale": self.scaling, "window": self.shape.sliding_window, "softcap": self.shape.softcap}


class DeviceDecoder:
    """Runs a whole model of the usual structure by kernels.

    Args:
        model: A fused model, on its card; it keeps all modules and, unless quantised, all weights.
        layers: What each attention layer keeps.
        context_length: Positions that angles are computed for.
        quantization: Of the weights: "fp8", "int8" or "int4"; None leaves them.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[LayerShape],
        context_length: int,
        quantization: WeightQuantization | None = None,
    ) -> None:
        base = model.base_model
        self._embedding = base.embed_tokens
        self._cos, self._sin = _angles(base.rotary_emb, context_length, model.device)
        self._layers = [
            _Layer(layer, shape, index, quantization)
            for index, (layer, shape) in enumerate(zip(base.layers, layers, strict=True))
        ]
        self._norm = base.norm
        head = model.get_output_embeddings()
        tied = head.weight is base.embed_tokens.weight
        self._head = _product(head, quantization, norm=base.norm, out_dtype=torch.float32, keep=tied)

    def hidden(self, tokens: Tensor, step: PagedStep, taken: dict[int, Any] | None = None) -> Tensor:
        """[B, T] ids at the step's positions -> [B * T, hidden], before the last norm.

        The keys of `taken` name hidden states to keep there, as in `FeatureTap`.
        """
        hidden: Tensor = self._embedding(tokens.flatten())
        for place, layer in enumerate(self._layers):
            if taken and place in taken:
                taken[place] = hidden
            hidden = layer(hidden, self._cos, self._sin, step)
        if taken and len(self._layers) in taken:
            taken[len(self._layers)] = self._norm(hidden)
        return hidden

    def __call__(self, tokens: Tensor, step: PagedStep, taken: dict[int, Any] | None = None) -> Tensor:
        """[B, T] ids at the step's positions -> logits in fp32, [B, T, V]; `taken` as for `hidden`."""
        return self._head(self.hidden(tokens, step, taken)).view(*tokens.shape, -1)

    def only(self, keep: Sequence[int]) -> DeviceDecoder:
        """Give the same decoder with some of its layers alone."""
        part = copy.copy(self)
        part._layers = [self._layers[place] for place in keep]  # noqa: SLF001 - it is of this class
        return part

    def tune(self, num_rows: Sequence[int], steps: Sequence[PagedStep], attended: Sequence[PagedStep]) -> None:
        """Find the fastest way to compute products of so many rows, and compile all that these passes run.

        Of the `attended` ones it is attention alone.
        """
        kinds = {(layer.shape, layer.scaling): place for place, layer in enumerate(self._layers)}
        few = self.only(sorted(kinds.values()))
        passes = [partial(few.hidden, torch.zeros_like(step.positions), step) for step in steps]
        passes += [partial(layer.attend, step) for step in attended for layer in few._layers]  # noqa: SLF001 - as above
        tune(self.products, num_rows, passes=passes)

    @property
    def products(self) -> list[tuple[Product, bool]]:
        """All of them, each with whether a residual is added to it."""
        each = [(one, one in (layer.output, layer.down)) for layer in self._layers for one in layer.products]
        return [*each, (self._head, False)]


def _product(
    linear: nn.Linear, quantization: WeightQuantization | None, *, norm: Any = None, keep: bool = False, **kind: Any
) -> Product:
    made = Product(
        linear.weight,
        linear.bias,
        norm=None if norm is None else (norm.weight, norm.eps),
        quantization=quantization,
        **kind,
    )
    if quantization is not None and not keep:  # the packed weight takes its place
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    return made


def _angles(rotary: Any, context_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tabulate what the model's own module says of each position, in fp32: two times ``[context, R / 2]``."""
    parts: list[tuple[Tensor, Tensor]] = []
    like = torch.zeros(1, dtype=torch.float32, device=device)
    for begin in range(0, context_length, _ANGLES_AT_A_TIME):
        places = torch.arange(begin, min(begin + _ANGLES_AT_A_TIME, context_length), device=device)
        cos, sin = rotary(like, position_ids=places[None])
        half = cos.shape[-1] // 2
        parts.append((cos[0, :, :half], sin[0, :, :half]))
    cos, sin = (torch.cat(part).contiguous() for part in zip(*parts, strict=True))
    return cos, sin


def _fits(model: Any) -> bool:
    """Whether every module is what the kernels stand for."""
    for layer in model.base_model.layers:
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for name in ("q_norm", "k_norm") if (norm := getattr(layer.self_attn, name, None)) is not None]
        linears = [layer.self_attn.o_proj, layer.self_attn.q_proj.shared.product]
        if not isinstance(layer.mlp, GatedMLP) or type(layer.mlp.act_fn).__name__ not in _ACTIVATIONS:
            return False
        linears += [layer.mlp.gate_up_proj, layer.mlp.down_proj]
        if not all(isinstance(norm, RMSNorm) for norm in norms) or not all(map(is_plain_linear, linears)):
            return False
    head = model.get_output_embeddings()
    return is_plain_linear(head) and isinstance(model.base_model.norm, RMSNorm)


@torch.inference_mode()
def device_decoder_for(
    model: Any,
    decoder: Decoder | None,
    layers: Sequence[LayerShape],
    context_length: int,
    quantization: WeightQuantization | None = None,
) -> DeviceDecoder | None:
    """Give a `DeviceDecoder` where the model is of the usual structure and the numbers agree."""
    if decoder is None or not _fits(model) or any(shape.key_dim != shape.value_dim for shape in layers):
        return None
    made = DeviceDecoder(model, layers, context_length, quantization)
    if quantization is not None or _same_logits(
        made, decoder, model, layers, context_length
    ):  # a rounded draft is judged by its guesses
        return made
    return None


def _same_logits(
    made: DeviceDecoder, decoder: Decoder, model: Any, layers: Sequence[LayerShape], context_length: int
) -> bool:
    """Whether a few tokens get the logits that the plain modules give them; a prompt's kernels are compiled along."""
    places = torch.arange(_PROMPT, device=model.device)[None]
    cache = KVCache(list(layers), RESERVED + blocks_for(_PROMPT), model.dtype, model.device)
    tables = torch.arange(RESERVED, cache.num_blocks, device=model.device)[None]
    tokens = places[:, :PROBE_TOKENS] + 1
    step = PagedStep(cache, tokens - 1, tables, BLOCK_SIZE)
    products = [(product, PROBE_TOKENS, residual, ()) for product, residual in made.products]
    prompt = PagedStep(cache, places.clamp(max=context_length - 1), tables, _PROMPT)  # compiled now, soon needed
    compile_ahead(model.device, [partial(made, tokens, step), partial(made.hidden, places * 0, prompt)], products)
    return within(decoder(tokens, tokens - 1, Probe()).float(), made(tokens, step), MODEL_ROUNDINGS, model.dtype)
