"""A model's computation, by the fastest way that its structure allows: kernels, its own modules, or transformers.

All ways take the same arguments and write keys and values through the same step; which one runs is decided once.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.kernels.launch import uses_kernels
from outrider.model.attention import Step
from outrider.model.decoder import Decoder, decoder_for
from outrider.model.device_decoder import DeviceDecoder, device_decoder_for
from outrider.model.kv_cache import TRASH_BLOCK, blocks_for
from outrider.model.paged import PagedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from outrider.kernels.weights import WeightQuantization
    from outrider.model.kv_cache import LayerShape

    SeenAs = Callable[[torch.Tensor, torch.Tensor, int, int | None], tuple[Step | PagedStep, torch.Tensor]]

__all__ = ["Network"]

# Tokens a row that are fed between rounds: with these, all kernels are met that read what a cache lacks. So many tokens
# of two rows ask for attention's other tilings, up to a chunk of 2,048.
FEED_WIDTHS, LONG_WIDTHS = (4, 8, 16, 17, 32, 64, 128), (128, 256, 512, 1024, 2048)


class Network:
    """Runs all layers of a model, or some of them.

    Args:
        model: Its attention is switched to ours already.
        layers: What each attention layer keeps.
        context_length: Positions that it was made for.
        quantization: Of the weights, on a card: "fp8", "int8" or "int4". The model can then run in no other way.

    Attributes:
        decoder: Calls the model's modules directly; None where its structure is another.
        device_decoder: Runs kernels in their place; None without a card or where its structure is another.

    Raises:
        ConfigError: The model's structure does not allow this quantization.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerShape],
        context_length: int,
        quantization: WeightQuantization | None = None,
    ) -> None:
        self._model = model
        self.decoder: Decoder | None = decoder_for(model)
        self.device_decoder: DeviceDecoder | None = None
        if uses_kernels(model.device):
            self.device_decoder = device_decoder_for(model, self.decoder, layers, context_length, quantization)
        if quantization is not None and self.device_decoder is None:
            raise ConfigError(
                f"draft_quantization={quantization!r} is not possible for {model.config.model_type}: it is not of "
                "the usual decoder structure; leave it off"
            )

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: Step | PagedStep, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model over tokens ``[B, T]``: logits in fp32, ``[B, T, V]``, and the tapped hidden states.

        Those are side by side, ``[B, T, len(taps) * hidden]``, numbered as in `FeatureTap`; None where none is tapped.
        """
        taken = dict.fromkeys(taps)
        if isinstance(step, PagedStep) and self.device_decoder is not None:
            logits = self.device_decoder(tokens, step, taken)
        elif isinstance(step, Step) and self.decoder is not None:
            logits = self.decoder(tokens, positions, step, taken).float()
        else:
            more = {"output_hidden_states": True} if taps else {}
            output: Any = self._model(input_ids=tokens, position_ids=positions, step=step, use_cache=False, **more)
            taken = {tap: output.hidden_states[tap] for tap in taps}
            logits = output.logits.float()
        return logits, _joined(taken, taps, tokens)

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: Step | PagedStep, taps: Sequence[int] = ()
    ) -> torch.Tensor | None:
        """Run the model for its keys and values, and the tapped hidden states, alone."""
        taken = dict.fromkeys(taps)
        if isinstance(step, PagedStep) and self.device_decoder is not None:
            self.device_decoder.hidden(tokens, step, taken)
        elif isinstance(step, Step) and self.decoder is not None:
            self.decoder.hidden(tokens, positions, step, taken)
        else:
            base: Any = self._model.base_model
            more = {"output_hidden_states": True} if taps else {}
            output = base(input_ids=tokens, position_ids=positions, step=step, use_cache=False, **more)
            taken = {tap: output.hidden_states[tap] for tap in taps}
        return _joined(taken, taps, tokens)

    def tune(self, passes: Sequence[tuple[int, int]], places: int, seen: SeenAs) -> None:
        """Make passes of (rows, tokens a row) as fast as they can be, and what is fed between them.

        `places`: what a row's table holds. `seen`: gives a pass's view of the cache.
        """
        if self.device_decoder is None:
            return
        rows = sorted({count for count, _ in passes})
        every = sorted({*passes, *((count, width) for count in rows for width in FEED_WIDTHS)})
        steps = [_nobodys(seen, *shape, places, self._model.device) for shape in every]
        long = [_nobodys(seen, 2, width, places, self._model.device) for width in LONG_WIDTHS]
        self.device_decoder.tune(sorted({count * width for count, width in passes}), steps, long)

    def only(self, keep: Sequence[int]) -> Network:
        """Give the same network with some of its layers alone, in this order: it shares all weights."""
        part = copy.copy(self)
        if self.decoder is not None:
            part.decoder = self.decoder.only(keep)
        if self.device_decoder is not None:
            part.device_decoder = self.device_decoder.only(keep)
        part._model = _with_layers(self._model, keep)  # noqa: SLF001 - it is of this class
        return part


def _nobodys(seen: SeenAs, num_rows: int, num_tokens: int, places: int, device: torch.device) -> PagedStep:
    """Give the view of a pass over tokens that belong to nobody, in the middle of texts."""
    positions = torch.arange(1, num_tokens + 1, device=device).repeat(num_rows, 1)
    tables = torch.full((num_rows, blocks_for(places)), TRASH_BLOCK, dtype=torch.long, device=device)
    step, _ = seen(positions, tables, num_tokens + 1, None)
    assert isinstance(step, PagedStep)
    return step


def _joined(taken: dict[int, Any], taps: Sequence[int], tokens: torch.Tensor) -> torch.Tensor | None:
    parts = [taken[tap].view(*tokens.shape, -1) for tap in taps]
    return torch.cat(parts, -1) if parts else None


def _with_layers(model: Any, keep: Sequence[int]) -> Any:
    """Give a model that shares all modules, but has some of the layers alone."""
    prefix = model.base_model_prefix
    base = _copied(getattr(model, prefix))
    name = next((name for name in ("layers", "h", "blocks") if hasattr(base, name)), None)
    if name is not None:
        _keep(base, name, keep)
    elif hasattr(base, "decoder"):  # OPT keeps its layers one module deeper
        base.decoder = _copied(base.get_submodule("decoder"))
        _keep(base.decoder, "layers", keep)
    else:
        raise ConfigError(f"the layers of {model.config.model_type} were not found; early exit is not possible with it")
    outer = _copied(model)
    setattr(outer, prefix, base)
    return outer


def _keep(module: nn.Module, name: str, keep: Sequence[int]) -> None:
    whole = getattr(module, name)
    setattr(module, name, nn.ModuleList([whole[index] for index in keep]))


def _copied(module: nn.Module) -> nn.Module:
    """Give a module object of its own, whose children are the same."""
    copied = copy.copy(module)
    vars(copied)["_modules"] = dict(vars(module)["_modules"])
    return copied
