"""A transformers model whose `generate` is Outrider's.

The model stays the caller's: its weights are not touched, and between two calls it has its own attention, so its own
`forward` and `generate` go on working.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from outrider.errors import InvalidRequestError, OutriderError
from outrider.llm import LLM
from outrider.model.attention import borrow, give_back
from outrider.model.facts import context_length
from outrider.wrapping.settings import GenerationRequest, resolved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.outputs import RequestOutput, SpeculationStats

__all__ = ["WrappedModel"]

SMALLEST_CONTEXT = 256
MOST_ROWS = 256  # decoded together; more wait


@dataclass(frozen=True)
class _Need:
    """What an engine must be like to serve a call."""

    models: tuple[Any, ...]  # device, dtype and vocabulary of target and draft, which a caller may change in between
    assistant: int | None  # id() of the draft
    lookup: int | None  # longest run that lookup matches
    draft_length: int
    rows: int
    context: int

    def met_by(self, other: _Need) -> bool:
        """Whether an engine made for `other` will do: the same kind, and at least as large."""
        kinds = [(one.models, one.assistant, one.lookup, one.draft_length) for one in (self, other)]
        return kinds[0] == kinds[1] and self.rows <= other.rows and self.context <= other.context


class WrappedModel:
    """A transformers model and, from the first call on, an engine for it.

    The engine is kept for the next call, and made anew where a call needs another kind (another assistant, another
    draft length) or a larger one. `close` gives its memory back.

    Attributes:
        model: The transformers model.
        tokenizer: Its tokenizer, if one was given.
        stats: Figures of the last call, one an output row.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stats: list[SpeculationStats] = []
        self._engine: tuple[_Need, LLM] | None = None
        self._assistant: Any = None
        self._lock = threading.Lock()

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        assistant_model: Any = None,
        seed: int | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        """Generate as ``model.generate`` does; defaults come from ``model.generation_config``.

        Guesses are made where asked for: by `assistant_model`, or by lookup with `prompt_lookup_num_tokens`. Both
        work for batches and for sampling too. What differs from transformers: sampled tokens are drawn with another
        random generator; `repetition_penalty` does not count padding; a row ends where the model's context does; stop
        strings are looked for in new text alone, not across the prompt's end; and a row that one of them ended is
        padded even where no eos_token_id is in force.

        Args:
            inputs: Prompt ids ``[B, T]``, as `input_ids`.
            generation_config: In place of the model's own.
            input_ids: Prompt ids ``[B, T]``, padded on the left.
            attention_mask: ``[B, T]``, 0 where padding is; by default guessed from pad_token_id, as transformers does.
            assistant_model: A smaller transformers model with the same vocabulary.
            seed: Fixes sampled tokens (row r uses seed + r); by default taken from torch's generator, so that
                `torch.manual_seed` does.
            **settings: max_new_tokens, max_length, min_new_tokens, min_length, do_sample, temperature, top_k, top_p,
                min_p, repetition_penalty, eos_token_id, pad_token_id, num_return_sequences, stop_strings,
                prompt_lookup_num_tokens, max_matching_ngram_size, num_assistant_tokens.

        Returns:
            Prompts as they came and the new tokens, ``[B * num_return_sequences, T + new]``, padded on the right.

        Raises:
            InvalidRequestError: A setting is unknown, unsupported or out of range; the message names it.
        """
        if (inputs is None) == (input_ids is None):
            raise InvalidRequestError("pass the prompts once: as the first argument or as input_ids")
        ids = inputs if input_ids is None else input_ids
        asked = resolved(self.model, ids, attention_mask, generation_config, settings)
        if assistant_model is not None and asked.lookup_tokens is not None:
            raise InvalidRequestError("assistant_model and prompt_lookup_num_tokens exclude each other; give one")
        if seed is None:  # greedy text has no use for one, and leaves torch's generator as it is
            seed = 0 if asked.params.greedy else int(torch.randint(2**62, ()))
        with self._lock, self._lent(assistant_model):
            llm = self._engine_for(asked, assistant_model)
            params = [asked.params.but(seed=(seed + row) % 2**63) for row in range(len(asked.prompts))]
            try:
                outputs = llm.generate(prompt_token_ids=asked.prompts, sampling_params=params, progress=False)
            except InvalidRequestError:
                raise
            except BaseException:  # Ctrl-C too: it may have come in the middle of a round
                self._drop()
                raise
        self.stats = [one.stats for output in outputs for one in output.outputs]
        return _tensor(ids, outputs, asked.pad_token_id)

    def close(self) -> None:
        """Give the engine's memory back; the next `generate` makes a new one."""
        with self._lock, self._lent(self._assistant):
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine_for(self, asked: GenerationRequest, assistant: Any) -> LLM:
        need = self._need(asked, assistant)
        if self._engine is not None and need.met_by(self._engine[0]):
            return self._engine[1]
        self._drop()
        method = "none" if not need.draft_length else "ngram" if assistant is None else "draft_model"
        llm = LLM(
            self.model,
            assistant,
            need.draft_length,
            method=method,
            tokenizer=self.tokenizer,
            device=self.model.device,
            draft_device=None if assistant is None else assistant.device,
            max_model_len=need.context,
            max_num_seqs=need.rows,
            enable_prefix_caching=False,  # the model is the caller's, who may train it between two calls
            prompt_lookup_max=need.lookup or 2,
            prompt_lookup_min=1,
        )
        self._engine, self._assistant = (need, llm), assistant
        return llm

    def _need(self, asked: GenerationRequest, assistant: Any) -> _Need:
        """Work out sizes, rounded up to powers of two: a little more next time makes no new engine."""
        longest = max(len(prompt) for prompt in asked.prompts) + (asked.params.max_tokens or 0)
        most = context_length(self.model.config.get_text_config(decoder=True), type(self.model).__name__)
        rows = len(asked.prompts) * asked.params.n
        models = [one for one in (self.model, assistant) if one is not None]
        return _Need(
            models=tuple((one.device, one.dtype, len(one.get_input_embeddings().weight)) for one in models),
            assistant=None if assistant is None else id(assistant),
            lookup=asked.lookup_match if asked.lookup_tokens else None,
            draft_length=asked.assistant_tokens if assistant is not None else asked.lookup_tokens or 0,
            rows=min(_power_of_two(rows), MOST_ROWS),
            context=min(max(_power_of_two(longest), SMALLEST_CONTEXT), most),
        )

    @contextmanager
    def _lent(self, assistant: Any) -> Iterator[None]:
        """Let the engine have the models inside the block alone, and undo after it what it switches.

        Their own attention is read anew each time, since the caller may have changed it in between.
        """
        models = [model for model in (self.model, assistant) if model is not None]
        training = [module for model in models for module in model.modules() if module.training]
        for model in self._held():
            borrow(model)
        try:
            yield
        finally:
            for model in self._held():
                give_back(model)
            for module in training:
                module.training = True

    def _held(self) -> list[Any]:
        return [] if self._engine is None else self._engine[1].models

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
        self._engine, self._assistant = None, None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _tensor(prompts: Any, outputs: list[RequestOutput], pad_token_id: int | None) -> torch.Tensor:
    """Put the new tokens behind the prompts as they came, shorter rows padded on the right."""
    made: list[list[int]] = []
    for row, output in enumerate(outputs):
        for one in output.outputs:
            if one.error is not None:
                raise OutriderError(f"row {row} failed: {one.error}")
            made.append(list(one.token_ids))
    samples = len(made) // len(outputs)
    width = max(map(len, made))
    filler = 0 if pad_token_id is None else pad_token_id
    new = torch.tensor(
        [row + [filler] * (width - len(row)) for row in made], dtype=torch.long, device=prompts.device
    ).view(len(made), width)
    return torch.cat([prompts.to(torch.long).repeat_interleave(samples, 0), new], 1)
