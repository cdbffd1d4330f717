"""Which linear layers of a model can be replaced, and their packed or quantised stand-ins on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.kernels.launch import uses_kernels
from outrider.model.quantize import Quantization, pack, quantize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

__all__ = ["is_plain_linear", "linears_of", "parents_of", "replace_linears"]


def is_plain_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether this is a linear layer and nothing more (no subclass, hook or patched forward that would be lost)."""
    if not isinstance(module, nn.Linear | Conv1D) or type(module) not in (nn.Linear, Conv1D):
        return False
    if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point() or module.weight.itemsize == 1:
        return False  # quantised already: a tensor subclass (torchao), or codes that something else gives a scale
    hooks = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001 - torch offers no other way to see them
    return not hooks and "forward" not in module.__dict__


def parents_of(model: nn.Module) -> list[nn.Module]:
    """Modules with children. Leaves are not held, so that a replaced layer's weight is freed at once."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def replace_linears(model: PreTrainedModel, quantization: Quantization | None) -> None:
    """Pack every linear layer on a CPU, or quantise all but the head; on a card they stay as they are."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    done: dict[int, nn.Module] = {}  # a layer that stands in two places stays one layer
    for parent, name, linear in linears_of(model):
        if linear.weight.device.type != "cpu" or uses_kernels(linear.weight.device):
            continue
        if id(linear) not in done:
            done[id(linear)] = _replacement(linear, None if linear is head else quantization)
        setattr(parent, name, done[id(linear)])


def linears_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """Linear layers that can be replaced: parent, name in it, layer."""
    for parent in parents_of(model):
        for name, child in list(parent.named_children()):
            if is_plain_linear(child):
                yield parent, name, child


def _replacement(linear: nn.Linear | Conv1D, quantization: Quantization | None) -> nn.Module:
    weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    reason = ""
    if quantization is not None:
        quantised = quantize(weight, linear.bias, quantization)
        if isinstance(quantised, nn.Module):
            return quantised.eval()
        reason = quantised
    packed = pack(weight, linear.bias, reason)
    return linear if packed is None else packed.eval()
