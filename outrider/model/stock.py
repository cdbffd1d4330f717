"""transformers' own `generate`, as a user would call it: to be measured beside ours, never to serve."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ConfigError
from outrider.model.checkpoint import default_model_source, locate
from outrider.model.gguf import converted_folder
from outrider.model.quiet import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Clock", "StockModel", "StockText"]


class Clock:
    """A streamer that notes when tokens came, and how many at a time.

    Attributes:
        times: On the clock of `time.perf_counter`; the first entry is the prompt's.
        counts: Tokens of each delivery, the prompt's first.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take what a step gave; the very first call brings the prompt."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is held back."""


@dataclass(frozen=True)
class StockText:
    """One text.

    Attributes:
        began: When it was asked for, on the clock of `times`.
        times: When deliveries came.
        rounds: Passes of the target that gave tokens.
    """

    token_ids: tuple[int, ...]
    began: float
    seconds: float
    times: tuple[float, ...]
    rounds: int


class StockModel:
    """A model as `from_pretrained` gives it, with SDPA attention, one prompt at a time.

    Args:
        source: A folder, Hub id or GGUF file; of a GGUF it gets the same weights as our engines, in safetensors.
        draft: The assistant, given in the same way.
        dtype, device: Of both.

    Raises:
        ConfigError: transformers cannot load one of them.
    """

    def __init__(
        self, source: str | None, draft: str | None = None, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.model = _loaded(source or default_model_source(), dtype, device)
        self.draft = None if draft is None else _loaded(draft, dtype, device)

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
        lookup: int | None = None,
        assisted: int | None = None,
    ) -> StockText:
        """Generate.

        Args:
            prompt: Token ids.
            max_tokens: At most.
            temperature: 0 is greedy.
            seed: Of torch's generator.
            ignore_eos: Go on after end-of-sequence.
            lookup: Guesses of prompt lookup.
            assisted: Guesses of the draft a round; 0 leaves their number to transformers.
        """
        ids = torch.tensor([list(prompt)], device=self.model.device)
        how: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if ignore_eos:
            how["min_new_tokens"] = max_tokens
        if lookup is not None:
            how["prompt_lookup_num_tokens"] = lookup
        if assisted is not None:
            how["assistant_model"] = self.draft
            if assisted and self.draft is not None:
                config = self.draft.generation_config
                config.num_assistant_tokens, config.num_assistant_tokens_schedule = assisted, "constant"
                config.assistant_confidence_threshold = 0.0
        torch.manual_seed(seed)
        clock, began = Clock(), time.perf_counter()
        with quiet_transformers():
            output = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=clock, **how
            )
        seconds = time.perf_counter() - began
        new = tuple(output[0, ids.shape[1] :].tolist())
        return StockText(new, began, seconds, tuple(clock.times[1:]), len(clock.times) - 1)


def _loaded(source: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained  # untyped
    checkpoint = locate(source)
    folder = checkpoint.path if checkpoint.kind == "safetensors" else converted_folder(checkpoint.path, dtype)
    try:
        with quiet_transformers():
            model = load(folder, dtype=dtype).to(device).eval()
    except Exception as error:
        raise ConfigError(
            f"transformers cannot load {source!r} ({type(error).__name__}: {error}); leave out --peer transformers"
        ) from error
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model
