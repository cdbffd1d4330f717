"""Make a loaded decoder cheap to run for a few tokens at a time, by replacing modules in place.

A decode step of a small model is bound by two things: reading the weights, and the cost of starting each operation.
`optimize` lowers both without touching transformers' code:

1. Products that read the same input (query, key and value; gate and up) become one product. On any device.
2. A gated MLP becomes one module, an RMSNorm one call. A module is replaced only when its structure is the expected one
   *and* the replacement gives the same numbers on a probe; otherwise it stays as it was. On any device.
3. On a CPU, weights are laid out for oneDNN or quantised (see `outrider.model.quantize`), and the originals are freed.

What stays as it is: embeddings (an embedding tied to the head is kept and the head gets a packed copy), routers and
experts of mixtures (their weights are plain parameters, not linear layers), all of attention but its projections.

Under quantization the head is packed, not quantised: it decides near-ties. Measured on SmolLM2-135M with noise of
3 % on its weights (its own lie on a 4-bit grid already), 300 tokens, against fp32: KL / same most likely token.

    bf16 0.002 / 98 %    int8 0.038 / 87 %, with its head 0.053 / 84 %    int4 0.068 / 85 %, with its head 0.148 / 75 %

The head's share is about 1.5 ms of a step. int4 in groups of 64 is far worse (0.56) and 3 % faster.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigError
from outrider.model.packing import is_plain_linear, parents_of, replace_linears
from outrider.model.quantize import Int4Linear, Int8Linear, PackedLinear, Quantization, check_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = [
    "GatedMLP",
    "Optimization",
    "RMSNorm",
    "SharedProduct",
    "SharedProductPart",
    "describe",
    "optimize",
]

logger = logging.getLogger(__name__)

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_FEW = 1 << 16  # numbers up to which starting operations costs more than computing them
_PROBE_SCALES = (1.0, 1e-3, 30.0)  # the small one makes a wrong epsilon visible, the large one a wrong clamp


class SharedProduct(nn.Module):
    """Several linear layers that read one input, as one product.

    The first part asked for computes all; the others are handed out from what it left. Each part is handed out once and
    only for the very tensor it was computed from. Anything else (another input, a second call) computes afresh, so
    a caller that uses the layers in an unforeseen way gets right results, only later. Not for use by several threads.

    Args:
        linears: Layers of equal input size, dtype and device, all or none of them with a bias.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.product = _stack(linears)
        self.sizes = [linear.out_features for linear in linears]
        self._source: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(linears)

    def forward(self, x: Tensor, index: int) -> Tensor:
        """[..., in] -> [..., sizes[index]], a view of the shared result."""
        part = self._parts[index]
        if part is None or x is not self._source:
            parts = self.product(x).split(self.sizes, -1)
            self._source, self._parts, part = x, list(parts), parts[index]
        self._parts[index] = None
        return part


class SharedProductPart(nn.Module):
    """Stands where one of the layers stood: gives its part of the shared product."""

    def __init__(self, shared: SharedProduct, index: int, in_features: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index
        self.in_features, self.out_features = in_features, shared.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.shared(x, self.index)  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one product.

    Args:
        original: A module with the children `gate_proj`, `up_proj`, `down_proj` and `act_fn`.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        gate, up = original.get_submodule("gate_proj"), original.get_submodule("up_proj")
        assert isinstance(gate, nn.Linear)
        assert isinstance(up, nn.Linear)
        self.gate_up_proj = _stack([gate, up])
        self.down_proj = original.get_submodule("down_proj")
        self.act_fn = original.get_submodule("act_fn")

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in one call; half precision is widened inside and rounded once.

    Args:
        weight: [width]. Where it is wider than the input (Gemma's 1 + weight, in fp32), the input is widened first.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.shape = tuple(weight.shape)
        self.doubled = (2 * weight.shape[0],)
        self.both_weights = torch.cat([weight, weight])
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if x.dtype == self.weight.dtype and x.device.type == "cpu" and x.numel() <= _FEW:
            # LayerNorm of (x, -x) has mean 0 and variance mean(x^2): one fused kernel where rms_norm is ten small ones.
            both = torch.cat((x, -x), -1)
            return torch.layer_norm(both, self.doubled, self.both_weights, None, self.eps)[..., : self.shape[0]]
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Optimization:
    """What `optimize` made of a model.

    Attributes:
        counts: How many modules of each kind, by class name.
        unquantised: Name of each layer that was to be quantised and is not -> the reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    unquantised: dict[str, str] = field(default_factory=dict)


def optimize(model: PreTrainedModel, *, quantization: Quantization | None = None, fuse: bool = True) -> None:
    """Replace modules of `model`, in place, by faster ones. What was replaced: see `describe`.

    The model must be in eval mode and is for inference from here on: packed weights are no parameters, and can be
    neither moved to another device nor saved.

    Args:
        model: A loaded decoder of transformers, on its final device and in its final dtype.
        quantization: "int8" or "int4" weights (CPU only), or None.
        fuse: Join sibling products and replace MLPs and norms. Off leaves only packing and quantization.

    Raises:
        ConfigError: `quantization` is no known kind, or the model, its device or its dtype cannot take it.
    """
    _check(model, quantization)
    with torch.no_grad():
        if fuse:
            _fuse(model)
        replace_linears(model, quantization)
    found = describe(model)
    if quantization is not None and not {"Int8Linear", "Int4Linear"} & found.counts.keys():
        reason = next(iter(found.unquantised.values()), "it has no linear layers")
        raise ConfigError(f"quantization={quantization!r} fits no layer of {_title(model)} ({reason}); leave it off")
    for name, reason in found.unquantised.items():
        logger.info("%s is not quantised: %s", name, reason)


def describe(model: nn.Module) -> Optimization:
    """Count what stands in an optimised model, and name the layers that could not be quantised."""
    kinds = (SharedProduct, GatedMLP, RMSNorm, PackedLinear, Int8Linear, Int4Linear, nn.Linear, Conv1D)
    counts: dict[str, int] = {}
    unquantised: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
        reason = getattr(module, "reason", "")
        if isinstance(reason, str) and reason:
            unquantised[name] = reason
    return Optimization(counts, unquantised)


def _title(model: nn.Module) -> str:
    return type(model).__name__


def _check(model: PreTrainedModel, quantization: str | None) -> None:
    if model.training:
        raise ConfigError(f"{_title(model)} is in training mode; call model.eval() before optimize()")
    if quantization is None:
        return
    check_kind(quantization, model.device)
    for module in model.modules():
        if not is_plain_linear(module):
            continue
        weight = module.weight
        check_kind(quantization, weight.device)
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"quantization={quantization!r} needs a model in float32 or bfloat16, and {_title(model)} is in "
                f"{weight.dtype}; load it with dtype='bfloat16'"
            )


def _stack(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer that gives the outputs of all, side by side."""
    first, outputs = linears[0], sum(linear.out_features for linear in linears)
    stacked = nn.Linear(first.in_features, outputs, bias=first.bias is not None, device="meta")
    stacked.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        stacked.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return stacked.eval()


# --- fusion


def _fuse(model: nn.Module) -> None:
    for parent in parents_of(model):
        for name, child in list(parent.named_children()):
            faster = _faster_norm(child) or _faster_mlp(child)
            if faster is not None:
                setattr(parent, name, faster)
    for parent in parents_of(model):
        for names in _SIBLINGS:
            _share_product(parent, names)


def _share_product(parent: nn.Module, names: Sequence[str]) -> None:
    linears = [getattr(parent, name, None) for name in names]
    if not _stackable(linears):
        return
    shared = SharedProduct([linear for linear in linears if isinstance(linear, nn.Linear)])
    for index, name in enumerate(names):
        setattr(parent, name, SharedProductPart(shared, index, shared.product.in_features))


def _stackable(modules: Sequence[object]) -> bool:
    """Whether all are linear layers that one product can stand for."""
    traits = set()
    for module in modules:
        if not isinstance(module, nn.Linear) or not is_plain_linear(module):
            return False
        traits.add((module.in_features, module.weight.dtype, module.weight.device, module.bias is None))
    return len(traits) == 1


def _faster_mlp(module: nn.Module) -> GatedMLP | None:
    children = dict(module.named_children())
    if children.keys() != _GATED_MLP or not _stackable([children["gate_proj"], children["up_proj"]]):
        return None
    gate = children["gate_proj"]
    assert isinstance(gate, nn.Linear)
    faster = GatedMLP(module).eval()
    return faster if _agree(module, faster, gate.in_features, gate.weight) else None


def _faster_norm(module: nn.Module) -> RMSNorm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or type(module) is RMSNorm:
        return None
    for scale in (weight.detach(), 1.0 + weight.detach().float()):  # Llama's way, and Gemma's
        faster = RMSNorm(scale, eps).eval()
        if _agree(module, faster, weight.shape[0], weight):
            return faster
    return None


def _agree(original: nn.Module, faster: nn.Module, width: int, like: Tensor) -> bool:
    """Whether two modules give the same output on a probe [1, 3, width], but for rounding.

    An element may be off by two roundings of its row's largest; bf16 MLPs round three times on the way and get more.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, len(_PROBE_SCALES), width, generator=generator) * torch.tensor(_PROBE_SCALES)[:, None]
    probe = probe.to(like.device, like.dtype)
    expected, got = original(probe), faster(probe)
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    largest = expected.abs().amax(-1, keepdim=True).float()
    bound = max(2 * torch.finfo(like.dtype).eps, 1e-5)
    return bool(((expected.float() - got.float()).abs() <= bound * largest).all())
