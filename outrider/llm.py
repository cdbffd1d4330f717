"""`LLM`: load a target and perhaps a drafter, then generate, chat or stream."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from outrider.config import EngineConfig, SpeculationConfig
from outrider.config_file import config_keys, merged, read_config
from outrider.draft_models import DraftSite, drafter_over
from outrider.drafters import make_drafter
from outrider.engine.engine import Engine
from outrider.engine.intake import Intake, listed, paired, token_ids
from outrider.engine.memory import sized, working_bytes
from outrider.errors import InvalidRequestError, OutriderError
from outrider.garbage import only_new_garbage
from outrider.model.runner import TorchRunner
from outrider.progress import counted, tracked
from outrider.sampling.params import SamplingParams
from outrider.sequence import output_of
from outrider.setup import (
    check_draft,
    check_exact,
    check_parallel,
    load_target,
    resolve_device,
    speculation_from,
    warn_lossy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from outrider.draft.drafter import Drafter
    from outrider.model.load import LoadedModel
    from outrider.outputs import RequestOutput, StreamChunk
    from outrider.sequence import Request, Sequence

__all__ = ["LLM"]

PREFILL_CHUNK = (512, 2048)  # prompt tokens between two rounds, on a CPU and on a card: one or two rounds' time


class LLM:
    """Generates text with a target model, faster by speculation and with the same result.

    Args:
        model: A Hub id, a folder with safetensors, a GGUF file, a loaded transformers model, or None for the default
            model (SmolLM2-135M-Instruct).
        speculative_model: The draft, given in the same ways, or another `LLM`; it must share the target's vocabulary.
            "[ngram]" means lookup.
        num_speculative_tokens: Guesses a round at most.
        method: Where guesses come from, see `SpeculationConfig`; by default what `speculative_model` implies.
        speculative_config: The same settings in one dict, as vLLM spells them: ``{"method": ..., "model": ...,
            "num_speculative_tokens": ..., "prompt_lookup_max": ..., "prompt_lookup_min": ...}``.
        verification: "coupled" (the same text as without speculation, for sampling too), "rejection" or "block"
            (the same distribution), or the lossy "typical".
        exact: Rounds of one fixed shape, so that not even the last bit can differ between plain and speculative.
        tokenizer: One to use in place of the checkpoint's.
        dtype: "auto", "bfloat16", "float16" or "float32".
        device: "cuda", "cuda:1", "cpu"; by default a card where there is one.
        draft_dtype, draft_device: The same for the draft; by default as the target's.
        quantization: "int8" or "int4" weights, on a CPU; the quantised model is then the target.
        revision: Of the Hub repository.
        max_model_len, max_num_seqs, gpu_memory_utilization, kv_cache_bytes, prefill_chunk_size, seed: See
            `EngineConfig`.
        enable_prefix_caching, share_prefixes: `EngineConfig.prefix_caching` and `EngineConfig.share_prefixes`. After
            changing the weights of a model object in place, call `reset_prefix_cache`.
        tensor_parallel_size: Only 1 so far.
        drafting: The other settings of `SpeculationConfig`, by name: tree, prompt_lookup_max, prompt_lookup_min,
            suffix_corpus, exit_layer, skip_layers, draft_quantization, draft_vocab_size, draft_vocab_corpus,
            allow_failure.

    Raises:
        ConfigError: A setting is out of range.
        ModelLoadError: A model is missing, broken, or cannot be served.
        CapacityError: Memory does not suffice; the message says what would.
    """

    def __init__(
        self,
        model: Any = None,
        speculative_model: Any = None,
        num_speculative_tokens: int = 5,
        *,
        method: str | None = None,
        speculative_config: dict[str, Any] | None = None,
        verification: str = "coupled",
        exact: bool = False,
        tokenizer: Any = None,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        draft_dtype: torch.dtype | str | None = None,
        draft_device: torch.device | str | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        gpu_memory_utilization: float = 0.9,
        kv_cache_bytes: int | None = None,
        prefill_chunk_size: int | None = None,
        seed: int | None = None,
        enable_prefix_caching: bool = True,
        share_prefixes: bool = False,
        tensor_parallel_size: int = 1,
        **drafting: Any,
    ) -> None:
        check_parallel(tensor_parallel_size)
        speculation = speculation_from(
            speculative_config,
            model=speculative_model,
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            verification=verification,
            **drafting,
        )
        where = resolve_device(device, model)
        check_draft(speculation, draft_dtype, draft_device)
        chunk = PREFILL_CHUNK[where.type == "cuda"] if prefill_chunk_size is None else prefill_chunk_size
        sizes = max_model_len, max_num_seqs, gpu_memory_utilization, kv_cache_bytes, chunk
        config = EngineConfig(*sizes, exact, seed, enable_prefix_caching, share_prefixes)
        check_exact(exact, speculation)
        warn_lossy(speculation.verification)
        self._lock = threading.RLock()
        self._owned: list[TorchRunner] = []
        self._drafters: dict[int, tuple[Any, Drafter]] = {}
        more: dict[str, Any] = {"revision": revision, "tokenizer": tokenizer, "max_model_len": max_model_len}
        self.loaded = load_target(model, quantization, dtype=dtype, device=where, **more)
        try:
            runner = self._runner(self.loaded, exact=exact)
            slots = config.max_num_seqs + 1
            how = (draft_dtype, draft_device, dtype, self._owned, self._scope_of)
            site = DraftSite(speculation, self.loaded, runner, slots, *how)
            self._start(runner, self._drafter(site), config, speculation)
        except BaseException:
            self.close()  # a model object that was passed in gets its attention back
            raise

    def _start(
        self, runner: TorchRunner, drafter: Drafter | None, config: EngineConfig, speculation: SpeculationConfig
    ) -> None:
        lookahead = speculation.num_speculative_tokens
        per_slot = runner.bytes_per_slot + (drafter.bytes_per_slot if drafter else 0)
        working = working_bytes(self._owned, config, lookahead)
        how = config, runner.context_length, per_slot, lookahead, runner.device
        config, self._num_blocks = sized(*how, working=working)
        runner.allocate(self._num_blocks)
        if drafter is not None:
            drafter.allocate(self._num_blocks)
        self.engine = Engine(runner, drafter, config, speculation, self._num_blocks)
        self.engine.prepare(counted)
        assert config.max_model_len is not None
        self.intake = Intake(
            self.tokenizer,
            runner.vocab_size,
            config.max_model_len,
            self.loaded.eos_token_ids,
            longest_draft=self.engine.longest_draft,
            can_draft=self.engine.drafter is not None,
            seed=config.seed,
            drafter_for=self._drafter_for,
        )

    @classmethod
    def from_config(cls, path: str | Path, **settings: Any) -> Self:
        """Make one by a file such as `outrider tune` writes; `settings` are arguments that win over the file's.

        Naming a method or a draft in `settings` sets all the file's drafting aside.

        Raises:
            ConfigError: The file cannot be read, or has an unknown key; and what the constructor raises.
        """
        return cls(**merged(read_config(path, config_keys(LLM.__init__)), settings))

    # --- what is asked of it

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        prompt_token_ids: Any = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; many run together.

        Args:
            prompts: A string, a list of token ids, or a list of either.
            sampling_params: One for all prompts, or one for each; by default `SamplingParams()`.
            prompt_token_ids: Token ids in place of `prompts`.
            progress: Show a progress bar on stderr; by default for several prompts on a terminal.

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: Some prompt or parameter is wrong; then nothing was generated.
        """
        if prompts is not None and prompt_token_ids is not None:
            raise InvalidRequestError("pass the prompts once: as `prompts` or as `prompt_token_ids`, not both")
        many = listed(prompt_token_ids if prompts is None else prompts)
        each = paired(many, sampling_params)
        with self._lock:
            requests = [self.intake.request(prompt, params) for prompt, params in zip(many, each, strict=True)]
            made = [self._submit(request) for request in requests]
            self._finish([one for group in made for one in group], progress)
        return [output_of(request, group) for request, group in zip(requests, made, strict=True)]

    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role", "content"}``), or a list of conversations."""
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError(f"messages must be a list of dicts or of such lists, got {messages!r:.100}")
        many = messages if messages and isinstance(messages[0], list | tuple) else [messages]
        rendered = [self.render(one, **template_arguments) for one in many]
        return self.generate(rendered, sampling_params, progress=progress)

    def render(self, messages: list[dict[str, Any]], **template_arguments: Any) -> list[int]:
        """Give the token ids of a conversation by the target's chat template, ready for the answer."""
        tokenizer, name = self.tokenizer, self.loaded.name
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise InvalidRequestError(
                f"{name} has no chat template; use generate() with a prompt, or an instruct model"
            )
        arguments: dict[str, Any] = {"add_generation_prompt": True, **template_arguments}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except Exception as error:
            raise InvalidRequestError(f"the chat template of {name} refused the messages: {error}") from error
        return token_ids(tokenizer, text, "the conversation", special=False)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Generate for one prompt, and give what each round adds as it comes.

        Text in a chunk is final: whole characters, and nothing that a stop string might still take back. The last
        chunk of each sample has a finish_reason. Leaving the loop early ends the request.
        """
        with self._lock:
            request = self.intake.request(prompt, sampling_params or SamplingParams())
        return self._streamed(request)

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds of earlier texts: after the weights of a model object were changed in place."""
        with self._lock:
            self.engine.scheduler.forget()

    def close(self) -> None:
        """Give up the caches; a transformers model that was passed in gets its own attention back."""
        for runner in self._owned:
            runner.close()
        self._owned.clear()
        self._drafters.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer; None where it has none."""
        return self.loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together."""
        assert self.engine.config.max_model_len is not None
        return self.engine.config.max_model_len

    @property
    def models(self) -> list[Any]:
        """The transformers models whose modules run here, the target's first."""
        return [runner.model for runner in self._owned]

    # --- how it is done

    def _submit(self, request: Request) -> list[Sequence]:
        if not self._owned:
            raise OutriderError("this LLM was closed; make a new one")
        sequences = self.intake.sequences(request)
        for sequence in sequences:
            if not sequence.finished:
                self.engine.add(sequence)
        return sequences

    def _finish(self, sequences: list[Sequence], progress: bool | None) -> None:
        """Step the engine until all are done; whatever goes wrong, none is left behind in it."""
        try:
            with only_new_garbage(), tracked(sequences, progress) as tick:
                while not all(sequence.finished for sequence in sequences):
                    self.engine.step()
                    tick()
        finally:
            for sequence in sequences:
                self.engine.abort(sequence)

    def _streamed(self, request: Request) -> Iterator[StreamChunk]:
        with self._lock:  # from the first read on, so that a stream that nobody reads costs nothing
            sequences = self._submit(request)
        given = [0] * len(sequences)
        ended = [False] * len(sequences)
        try:
            while not all(ended):
                for place, sequence in enumerate(sequences):
                    if not ended[place] and (sequence.num_generated > given[place] or sequence.finished):
                        chunk = sequence.chunk(given[place])
                        given[place] += len(chunk.token_ids)
                        ended[place] = chunk.finish_reason is not None
                        yield chunk
                if not all(ended):
                    with self._lock:
                        self.engine.step()
        finally:
            with self._lock:
                for sequence in sequences:
                    self.engine.abort(sequence)

    def _runner(self, loaded: LoadedModel, *, exact: bool = False) -> TorchRunner:
        runner = TorchRunner(loaded, exact=exact)
        self._owned.append(runner)
        return runner

    def _scope_of(self, slot: int) -> str | None:
        holder = self.engine.state.holder(slot) if hasattr(self, "engine") else None
        return None if holder is None else holder.request.scope

    def _drafter(self, site: DraftSite) -> Drafter | None:
        return make_drafter(site)

    def _drafter_for(self, model: Any) -> Drafter:
        """Give the drafter for a request's own draft, made on first use."""
        if not isinstance(model, LLM):
            raise InvalidRequestError(f"speculative_model in SamplingParams must be an LLM, got {type(model).__name__}")
        if id(model) not in self._drafters:
            name = f"draft_model:{model.loaded.name}:{len(self._drafters) + 1}"  # costs are kept by name
            crossing = self.engine.speculation.cross_vocabulary
            drafter = drafter_over(model.loaded, self.loaded, self._owned, crossing, name=name)
            drafter.allocate(self._num_blocks)
            self._drafters[id(model)] = (model, drafter)
        return self._drafters[id(model)][1]
