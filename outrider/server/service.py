"""What stands behind all routes: the loaded model, its thread, who is let in, and the way from a prompt to chunks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.draft.ngram import NGramDrafter
from outrider.errors import InvalidRequestError
from outrider.sampling.params import SamplingParams, check_text
from outrider.server.admission import Admission
from outrider.server.call import Call
from outrider.server.errors import ApiError, invalid, not_ready
from outrider.server.reasoning import thinking_of
from outrider.server.recheck import Rechecks
from outrider.server.rendering import Renderer, template_of
from outrider.server.sampling import field_of
from outrider.server.worker import EngineWorker, Job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from outrider.llm import LLM
    from outrider.sequence import Request
    from outrider.server.admission import Ticket
    from outrider.server.metrics import Metrics
    from outrider.server.reasoning import Thinking
    from outrider.server.settings import ServerSettings
    from outrider.server.tracing import Origin, RequestSpan, Tracing

__all__ = ["Model", "Service"]

logger = logging.getLogger("outrider")
READY_BEAT_SECONDS = 10.0
SELF_TEST_SECONDS = 300.0  # the first passes of a large model may compile what later ones find


class Model:
    """A loaded model at work.

    Args:
        llm: The model, from now on this server's own.
        name: What clients call it.
        worker: The thread that runs it.
        renderer: Its chat template.
        thinking: How it marks what it thinks; None where that is not told apart.
    """

    def __init__(
        self, llm: LLM, name: str, worker: EngineWorker, renderer: Renderer, thinking: Thinking | None
    ) -> None:
        self.llm, self.name, self.worker, self.renderer, self.thinking = llm, name, worker, renderer, thinking
        self.method = llm.engine.speculation.method if llm.engine.drafter is not None else "none"
        self.lookup = NGramDrafter()
        vocabulary = llm.tokenizer.get_vocab() if llm.tokenizer is not None else ()
        # What is longer than this many characters has too many tokens, whatever they are: it need not be tokenized.
        self.longest_text = llm.max_model_len * max(map(len, vocabulary), default=1)


class Service:
    """One server's state, on the event loop.

    Args:
        settings: Bounds.
        metrics: What is counted.
        tracing: Where spans of requests go; None for nowhere.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.settings, self.metrics, self._tracing = settings, metrics, tracing
        self.admission: Admission | None = None
        self.fault: BaseException | None = None
        self.started_at = int(time.time())
        self._model: Model | None = None
        self._draining = False
        # Tokenizing a long prompt takes a while: not on the loop, and not all at once.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="outrider-intake")
        self._calls: set[Call] = set()
        self._numbers = itertools.count()

    # --- its life

    async def start(self, llm: LLM, on_fault: Callable[[BaseException], None]) -> None:
        """Put a loaded model to work, and try it once."""
        tokenizer: Any = llm.tokenizer
        template = template_of(tokenizer)
        thinking = thinking_of(tokenizer, template, self.settings.reasoning_parser)
        renderer = Renderer(template, dict(getattr(tokenizer, "special_tokens_map", None) or {}))
        await renderer.start()
        rechecks = Rechecks(llm.engine, llm.intake.sequences, self.settings, self.metrics)
        loop = asyncio.get_running_loop()
        worker = EngineWorker(llm.engine, loop, self.settings, self.metrics, on_fault, rechecks)
        self.admission = Admission(self.settings, llm.engine.config.max_num_seqs)
        worker.start()
        model = Model(llm, self.settings.served_name or llm.loaded.name, worker, renderer, thinking)
        await self._self_test(model)
        rechecks.accepting = True
        self._model = model

    async def _self_test(self, model: Model) -> None:
        """Generate two tokens, so that a server that says it is ready has shown that it can."""
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0)
        assert self.admission is not None
        call = await self._opened(model, self.admission.enter(""), [[0]], params, None)
        try:
            async for _ in call.chunks(SELF_TEST_SECONDS):
                pass
        finally:
            call.close()

    def drain(self) -> None:
        """Let nobody in any more."""
        self._draining = True
        if self.admission is not None:
            self.admission.draining = True
        if self._model is not None:
            self._model.worker.drain()

    async def drained(self, seconds: float) -> bool:
        """Wait until nothing is under way; False where that took too long."""
        try:
            async with asyncio.timeout(seconds):
                while self._calls:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: ApiError) -> None:
        """End everything that is under way."""
        for call in list(self._calls):
            call.fail(error)

    async def close(self) -> None:
        """Stop the thread and the processes, and give the model up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        model, self._model = self._model, None
        if model is not None:
            model.worker.stop()
            await model.renderer.close()
            await asyncio.to_thread(model.worker.join, 5.0)

    @property
    def draining(self) -> bool:
        """Whether it is about to stop."""
        return self._draining

    @property
    def model(self) -> Model:
        """The model at work.

        Raises:
            ApiError: There is none yet.
        """
        if self._model is None or self.fault is not None:
            raise not_ready()
        return self._model

    def why_not_ready(self) -> str | None:
        """Say what keeps it from serving; None where nothing does."""
        if self.fault is not None:
            return "failed"
        if self._draining:
            return "draining"
        if self._model is None:
            return "loading"
        if not self._model.worker.is_alive():
            return "failed"
        if self._model.worker.silent_seconds > READY_BEAT_SECONDS:
            return "stalled"
        return None

    @property
    def degraded(self) -> bool:
        """Whether the drafter failed and is left out: texts are right, and slower."""
        return self._model is not None and self._model.llm.engine.speculator.disabled

    @property
    def alive(self) -> bool:
        """Whether the engine's thread shows signs of life (or has none to show yet)."""
        if self.fault is not None:
            return False
        worker = None if self._model is None else self._model.worker
        return worker is None or (worker.is_alive() and worker.silent_seconds < self.settings.step_seconds)

    # --- requests

    async def call(
        self,
        prompts: Callable[[], Awaitable[Sequence[str | list[int]]]],
        params: SamplingParams,
        ticket: Ticket,
        *,
        method: str | None = None,
        num_prompts: int = 1,
        origin: Origin | None = None,
    ) -> Call:
        """Let a request in and start it; the caller must close what this gives.

        Args:
            prompts: Makes the prompts, as text or ids; not called before there is room.
            params: How to go on from each.
            ticket: Its first place; whoever took that gives all of them back.
            method: What drafts in place of the server's own method.
            num_prompts: How many prompts there will be.
            origin: What its span begins with; without, it has none.

        Raises:
            ApiError: There is no room, or something is wrong with it.
        """
        model = self.model
        try:
            ticket.take(params.n * num_prompts)
        except ApiError as error:
            self.metrics.refused.labels(error.code).inc()
            raise
        span = None
        try:
            if self._tracing is not None and origin is not None:
                span = self._tracing.begin(origin, model.name, params)
            return await self._opened(model, ticket, await prompts(), params, method, span)
        except BaseException as error:
            if span is not None:
                span.refused(error)
            raise

    async def _opened(
        self,
        model: Model,
        ticket: Ticket,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        method: str | None,
        span: RequestSpan | None = None,
    ) -> Call:
        """Tokenize and check, off the loop; then hand over to the engine."""
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_prompt(prompt, model)
        drafter = None if method is None else model.lookup
        names = [self._name() for _ in prompts]

        def made() -> list[tuple[Request, list[Any]]]:
            intake, found = model.llm.intake, []
            for name, prompt in zip(names, prompts, strict=True):
                request = intake.request(prompt, params, name, ticket.key, drafter=drafter)
                _check_room(request, params, model.llm.max_model_len)
                found.append((request, intake.sequences(request)))
            return found

        try:
            ready = await self.work(made)
        except InvalidRequestError as error:
            code = "context_length_exceeded" if "max_model_len" in str(error) else "invalid_value"
            raise invalid(str(error), field_of(str(error)), code) from None
        ticket.weigh(sum(len(request.prompt_token_ids) for request, _ in ready))
        call = Call(model.worker, ticket, self, span)
        for request, sequences in ready:
            call.add(Job(request, sequences, call.receiver(len(call.jobs))))
        call.start()
        return call

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Give a text's ids.

        Raises:
            ApiError: It has no tokenizer, or the text is far too long for it.
        """
        model = self.model
        tokenizer: Any = model.llm.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer; send token ids")
        _check_prompt(text, model)
        encoded = await self.work(lambda: tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
        return list(encoded)

    async def detokenize(self, ids: list[int]) -> str:
        """Give the text of ids, special tokens included.

        Raises:
            ApiError: It has no tokenizer, or there is no such id.
        """
        llm = self.model.llm
        tokenizer: Any = llm.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer")
        vocab_size = llm.engine.runner.vocab_size
        for token in ids:
            if token >= vocab_size:
                raise invalid(f"token id {token} is not in the vocabulary of {vocab_size}", "tokens")
        decoded = partial(tokenizer.decode, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(await self.work(decoded))

    async def work(self, job: Callable[[], Any]) -> Any:
        """Run something that takes a while off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, job)

    def opened(self, call: Call) -> None:
        """Remember a call."""
        self._calls.add(call)

    def closed(self, call: Call) -> None:
        """Forget it."""
        self._calls.discard(call)

    def _name(self) -> str:
        return f"{next(self._numbers)}-{secrets.token_hex(8)}"


def _check_room(request: Request, params: SamplingParams, most: int) -> None:
    length = len(request.prompt_token_ids)
    if params.max_tokens is not None and length + params.max_tokens > most:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"the prompt has {length} tokens and max_tokens is {params.max_tokens}, together "
            f"{length + params.max_tokens}; the longest text here is {most} tokens; shorten the prompt or ask for less",
            param="max_tokens",
        )


def _check_prompt(text: str, model: Model) -> None:
    """Refuse what can never fit, and what is no text, before any tokenizer sees it.

    Raises:
        ApiError: It is either.
    """
    if len(text) > model.longest_text:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"the prompt has {len(text)} characters, and the longest text here is "
            f"{model.llm.max_model_len} tokens; shorten it",
            param="prompt",
        )
    try:
        check_text("the prompt", text)
    except InvalidRequestError as error:
        raise invalid(str(error)) from None
