"""The seam between the engine and a model: tokens at positions in, logits out, keys and values kept.

`TorchRunner` runs a transformers model. A runner knows nothing of requests, sampling or speculation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.kernels.attention import slots_of
from outrider.kernels.launch import uses_kernels
from outrider.model.attention import Probe, Step, borrow, give_back
from outrider.model.features import FeatureTap, feature_pool
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED, KVCache, LayerShape, block_slots, blocks_for
from outrider.model.network import Network
from outrider.model.paged import PagedStep
from outrider.model.prompt_graphs import GraphRecorder, PromptGraphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from outrider.kernels.weights import WeightQuantization
    from outrider.model.load import LoadedModel

__all__ = ["Runner", "TorchRunner"]


class Runner(Protocol):
    """What the engine and the drafters ask of a model."""

    vocab_size: int
    context_length: int
    device: torch.device

    @property
    def features(self) -> torch.Tensor | None:
        """What is kept of hidden states for a drafter, ``[slots, width]``; None where no drafter asked."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one cached token takes."""

    def allocate(self, num_blocks: int) -> None:
        """Make the cache."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None,
        ancestors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed tokens, give logits at each of them."""

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, context: int, start: int | None
    ) -> None:
        """Feed tokens for their keys and values alone."""

    def keep_path(self, tables: torch.Tensor, starts: torch.Tensor, path: torch.Tensor) -> None:
        """Move what was kept of a tree's accepted nodes to the places that they now have in the text."""

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy all that is kept in some blocks to others, one by one."""

    def tune(self, passes: Sequence[tuple[int, int]], places: int, lagging: Sequence[int] = ()) -> None:
        """Make prompts and passes of (rows, tokens a row) as fast as they can be; a row's table has so many places.

        `lagging`: how many rows are often fed in the middle of their texts, together.
        """


class TorchRunner:
    """Runs one transformers model over a paged cache.

    Args:
        loaded: The model, with its attention not yet switched.
        exact: Compute each position's attention alone, so that its bits do not depend on what shares the pass.
        quantization: Of the weights, on a card: "fp8", "int8" or "int4". The model can then run in no other way.

    Raises:
        ConfigError: The model's structure does not allow this quantization.
        UnsupportedModelError: Some layer does not attend through `AttentionInterface`, or asks for something that
            Outrider's attention does not do.
    """

    def __init__(
        self, loaded: LoadedModel, *, exact: bool = False, quantization: WeightQuantization | None = None
    ) -> None:
        self.model: PreTrainedModel = loaded.model
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length
        self.device = self.model.device
        self.dtype = self.model.dtype
        self._exact = exact
        if exact and _has_experts(self.model.config.get_text_config()):
            raise UnsupportedModelError(
                f"exact=True cannot be kept for {self.model.config.model_type}: how many rows share an expert's "
                "product depends on the other rows; leave exact off (a near-tie may then flip, in float32 hardly ever)"
            )
        borrow(self.model)
        self.layers = self._probed()
        self._kernels = uses_kernels(self.device)
        self._num_weights = sum(one.numel() for one in self.model.parameters())  # quantised ones are no parameters
        try:
            self.network = Network(self.model, self.layers, self.context_length, quantization)
        except BaseException:
            give_back(self.model)
            raise
        self._tap: FeatureTap | None = None
        self._features: torch.Tensor | None = None
        self._cache: KVCache | None = None
        self._prompts: PromptGraphs | None = None  # captured over the cache that stands then

    def tap(self, tap: FeatureTap) -> None:
        """Keep hidden states for a drafter, from the next allocation on.

        Raises:
            ConfigError: Another drafter asked for other ones.
        """
        if self._tap is not None and self._tap != tap:
            raise ConfigError("two drafters of one engine cannot read different hidden states; use one of them")
        self._tap = tap
        self._cache = None

    @property
    def features(self) -> torch.Tensor | None:
        """What is kept of hidden states for a drafter, ``[slots, width]``; None where no drafter asked."""
        return self._features

    def close(self) -> None:
        """Give the model its own attention back and drop the cache."""
        self._cache = self._features = self._prompts = None
        give_back(self.model)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one cached token takes in all layers."""
        features = 0 if self._tap is None else self._tap.width * self.dtype.itemsize
        return KVCache.bytes_per_slot(self.layers, self.dtype) + features

    @property
    def cache(self) -> KVCache:
        """Where keys and values are kept."""
        assert self._cache is not None, "allocate() comes first"
        return self._cache

    def allocate(self, num_blocks: int) -> None:
        """Make a cache of `num_blocks` blocks; a larger one that stands already is kept."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._prompts = None
            self._cache = KVCache(self.layers, num_blocks, self.dtype, self.device)
            if self._tap is not None:
                self._features = feature_pool(self._tap, num_blocks, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
        ancestors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model over fresh tokens; their keys and values are written before anything is read.

        Args:
            tokens: ``[B, T]``.
            positions: Their absolute positions, ``[B, T]``; every row's earlier positions must be cached.
            tables: Blocks of each row, ``[B, blocks]``.
            context: At least the highest position + 1 (in a tree: the highest place + 1), known to the host.
            start: First slot of the only row, where its blocks lie in order (spares a copy of the cache).
            ancestors: For fresh tokens that are trees, int64 ``[B, T]``: bit i says that a token sees fresh token i,
                itself included. They are stored side by side, from the first one's position on.

        Returns:
            Logits in fp32, ``[B, T, V]``.
        """
        step, positions = self.step(positions, tables, context, start, ancestors)
        logits, hidden = self.network.logits(tokens, positions, step, self._taps)
        self._keep(step, hidden)
        return logits

    @torch.inference_mode()
    def feed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
    ) -> None:
        """Run the model for its keys and values alone; arguments as for `forward`."""
        prompts, begins_texts = self._prompts, context == tokens.shape[1]  # the highest position is no higher than that
        captured = prompts is not None and (
            prompts.replay(tokens, tables) if begins_texts else prompts.go_on(tokens, positions, tables)
        )
        if not captured:
            self._feed(tokens, positions, tables, context, start)

    @torch.inference_mode()
    def _feed(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None = None,
    ) -> None:
        step, positions = self.step(positions, tables, context, start)
        self._keep(step, self.network.feed(tokens, positions, step, self._taps))

    @property
    def _taps(self) -> tuple[int, ...]:
        return () if self._tap is None or self._features is None else self._tap.layers

    def _keep(self, step: Step | PagedStep, hidden: torch.Tensor | None) -> None:
        """Keep the hidden states of fresh tokens, ``[B, T, taps * hidden]``."""
        if self._tap is not None and self._features is not None and hidden is not None:
            kept = self._tap.project(hidden).flatten(0, 1).to(self.dtype)
            self._features.index_copy_(0, step.write, kept)

    @torch.inference_mode()
    def keep_path(self, tables: torch.Tensor, starts: torch.Tensor, path: torch.Tensor) -> None:
        """Move what was kept of a tree's accepted nodes to the places that they now have in the text.

        Args:
            tables: Blocks of each row, ``[B, blocks]``.
            starts: Place of each tree's root, ``[B]``.
            path: Which of the fed tokens stands at each depth, ``[B, D]``; beyond the last accepted one, the depth.
        """
        depths = torch.arange(path.shape[1], device=path.device)
        source = slots_of(tables, starts[:, None] + path).flatten()
        target = slots_of(tables, starts[:, None] + depths).flatten()
        self._move(source, target)

    @torch.inference_mode()
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy all that is kept in some blocks to others, one by one; none may be on both sides."""
        for slots in block_slots(source, target, self.device):
            self._move(*slots)

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what is kept at slots ``[n]`` to others; all is read first."""
        self.cache.move(source, target)
        if self._features is not None:
            self._features.index_copy_(0, target, self._features.index_select(0, source))

    def tune(self, passes: Sequence[tuple[int, int]], places: int, lagging: Sequence[int] = ()) -> None:
        """Make passes of (rows, tokens a row) as fast as they can be, and prompts: compile, time, capture.

        `places`: what a row's table holds. `lagging`: how many rows are often fed in the middle of their texts.
        """
        self.network.tune(passes, places, self.step)
        if self.device.type == "cuda" and not self._exact:  # there, shapes depend on the prompt alone
            self._prompts = PromptGraphs(self._feed, self.device, GraphRecorder(self.device), self._num_weights)
            longest = min(places, self.context_length)
            self._prompts.capture(longest, self.cache, blocks_for(places), lagging)

    def activation_bytes(self, num_tokens: int) -> int:
        """Measure what one pass over so many prompt tokens takes on a card besides weights and cache; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        num_tokens = min(num_tokens, self.context_length)
        self.allocate(RESERVED + blocks_for(num_tokens))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        tables = torch.arange(RESERVED, self.cache.num_blocks, device=self.device)[None]
        positions = torch.arange(num_tokens, device=self.device)[None]
        self.feed(torch.zeros_like(positions), positions, tables, num_tokens)
        most = torch.cuda.max_memory_allocated(self.device) - before
        self._cache = self._features = None
        torch.cuda.empty_cache()
        return most

    def step(
        self,
        positions: torch.Tensor,
        tables: torch.Tensor,
        context: int,
        start: int | None,
        ancestors: torch.Tensor | None = None,
    ) -> tuple[Step | PagedStep, torch.Tensor]:
        """Give a pass's view of the cache, and the positions that the model is told."""
        # A learned table of positions has no row beyond the context; what is fed there belongs to nobody.
        positions = positions.clamp(max=self.context_length - 1)
        context = min(context, self.context_length)
        if self._kernels:
            fixed = tables.shape[1] * BLOCK_SIZE if self._exact else None
            return PagedStep(self.cache, positions, tables, context, fixed, ancestors), positions
        how = {"start": start, "row_wise": self._exact, "ancestors": ancestors}
        return Step.over(self.cache, positions, tables, context, **how), positions  # type: ignore[arg-type]

    @torch.inference_mode()
    def _probed(self) -> list[LayerShape]:
        """Run two tokens through, and check that every layer called our attention and asked for nothing unknown."""
        probe = Probe()
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        config = self.model.config.get_text_config()
        try:
            self.model.base_model(input_ids=tokens, position_ids=positions, step=probe, use_cache=False)
        except Exception as error:
            give_back(self.model)
            raise UnsupportedModelError(
                f"{config.model_type}: its modules do not run with Outrider's attention ({error}); "
                "serve a decoder-only model whose attention goes through transformers' AttentionInterface"
            ) from error
        missing = sorted(set(range(config.num_hidden_layers)) - set(probe.layers))
        problem = None
        if missing:
            problem = f"layers {missing} do not attend through transformers' AttentionInterface"
        elif probe.unknown:
            problem = f"its attention needs {', '.join(sorted(probe.unknown))}, which Outrider's does not have"
        elif _windowed(config) and all(layer.sliding_window is None for layer in probe.layers.values()):
            problem = "its config has a sliding window, but its layers do not pass it on"
        if problem:
            give_back(self.model)
            raise UnsupportedModelError(f"{config.model_type}: {problem}; no exact speculation is possible with it")
        return [probe.layers[index] for index in sorted(probe.layers)]


def _has_experts(config: object) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def _windowed(config: object) -> bool:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return "sliding_attention" in types
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True) is not False
