"""From what a caller passes to checked requests: everything wrong with a request is said here, before any work."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.draft.prediction import PredictionDrafter
from outrider.engine.constraint import Constraint
from outrider.engine.detokenizer import Detokenizer
from outrider.engine.grammar_compiler import GrammarCompiler
from outrider.errors import InvalidRequestError
from outrider.sampling.params import SamplingParams, check_text
from outrider.sequence import Request, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.draft.drafter import Drafter

__all__ = ["Intake", "listed", "paired", "token_ids"]


class Intake:
    """Tokenizes, checks and completes requests.

    Args:
        tokenizer: A transformers tokenizer, or None: then prompts must be token ids.
        vocab_size: Ids below this can be fed.
        max_model_len: Longest sequence.
        eos_token_ids: Ids that end a text unless a request ignores them.
        longest_draft: Guesses a round that a request may ask for.
        can_draft: Whether the engine has a drafter of its own.
        seed: Fixes the seeds of requests that bring none.
        drafter_for: Gives a drafter for the model in ``params.speculative_model``.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        *,
        longest_draft: int,
        can_draft: bool,
        seed: int | None,
        drafter_for: Callable[[Any], Drafter],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._longest_draft = longest_draft
        self._can_draft = can_draft
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._drafter_for = drafter_for
        self._numbers = itertools.count()
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        scope: str = "",
        drafter: Drafter | None = None,
    ) -> Request:
        """Check one prompt with its parameters; `scope` says whose it is. Any thread may ask.

        `drafter` drafts for it in place of the engine's own, unless the parameters name another.

        Raises:
            InvalidRequestError: The prompt is empty, too long or holds unknown ids, or a parameter does not fit, or the
                grammar does not compile.
        """
        params = _checked(params)
        text, ids = self._tokenized(prompt)
        self._check_prompt(ids)
        self._check_params(params, can_draft=self._can_draft or drafter is not None)
        if params.seed is None:
            params = params.but(seed=self._seeds.getrandbits(63))
        own = frozenset(params.stop_token_ids)
        return Request(
            id=request_id or f"request-{next(self._numbers)}",
            prompt=text,
            prompt_token_ids=tuple(ids),
            params=params,
            end_ids=own if params.ignore_eos else own | frozenset(self._eos_token_ids),
            own_stop_ids=own,
            bad_words=self._bad_words(params.bad_words),
            grammar=None if params.grammar is None else self._grammars.compile(params.grammar),
            drafter=self._drafter(params, len(ids)) or (None if params.draft_length == 0 else drafter),
            scope=scope,
        )

    def _drafter(self, params: SamplingParams, prompt_length: int) -> Drafter | None:
        """Give the drafter for this request alone, if it asks for one."""
        if params.speculative_model is not None:
            return self._drafter_for(params.speculative_model)
        if params.prediction is None or params.draft_length == 0:
            return None
        expected = params.prediction
        if isinstance(expected, str):
            if self._tokenizer is None:
                raise InvalidRequestError("prediction as text needs a tokenizer, and this model has none; pass ids")
            expected = token_ids(self._tokenizer, expected, "prediction", special=False)
        return PredictionDrafter(expected[: self._max_model_len], prompt_length)

    def sequences(self, request: Request) -> list[Sequence]:
        """Make the request's n sequences.

        With max_tokens 0 they are finished as they are, but for the first where its prompt is to be reported on.
        """
        params = request.params
        room = self._max_model_len - len(request.prompt_token_ids)
        limit = len(request.prompt_token_ids) + (room if params.max_tokens is None else min(room, params.max_tokens))
        made = []
        for index in range(params.n):
            detokenizer = Detokenizer(
                self._tokenizer,
                request.prompt_token_ids,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
            sequence = Sequence(request, index, limit, detokenizer, self._constraint(request))
            if params.max_tokens == 0 and (index > 0 or not sequence.lacks_prompt_logprobs):
                sequence.finish("length")
            made.append(sequence)
        return made

    def _constraint(self, request: Request) -> Constraint | None:
        if request.grammar is None:
            return None
        ends = frozenset(self._eos_token_ids)
        return Constraint(request.grammar, ends, ends & request.end_ids, request.params.min_tokens)

    def _tokenized(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            named = [prompt[key] for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not named:
                raise InvalidRequestError(
                    f"a prompt that is a dict needs 'prompt' or 'prompt_token_ids', got the keys {list(prompt)!r:.200}"
                )
            prompt = named[0]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("this model has no tokenizer: pass token ids, or LLM(..., tokenizer=...)")
            return prompt, token_ids(self._tokenizer, prompt, "the prompt")
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, list | tuple) and all(_is_id(item) for item in prompt):
            return None, [operator.index(item) for item in prompt]
        raise InvalidRequestError(f"a prompt must be a string or a list of token ids, got {prompt!r:.200}")

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise InvalidRequestError("the prompt is empty: there is nothing to go on from; pass at least one token")
        for place, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt token {place} is {token}, but ids must be in [0, {self._vocab_size - 1}]"
                )
        if len(ids) >= self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, but max_model_len is {self._max_model_len} and one more must fit; "
                "shorten the prompt or raise max_model_len"
            )

    def _check_params(self, params: SamplingParams, *, can_draft: bool) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= self._vocab_size:
                    raise InvalidRequestError(
                        f"{name} names id {token}, but the vocabulary ends at {self._vocab_size - 1}"
                    )
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequestError(f"{name} needs a tokenizer, and this model has none; use stop_token_ids")
        asked = params.draft_length or 0
        if asked > self._longest_draft:
            raise InvalidRequestError(
                f"speculation of {asked} tokens is beyond this engine's {self._longest_draft}; ask for less, "
                "or start it with num_speculative_tokens to match"
            )
        if asked and not can_draft and params.speculative_model is None and params.prediction is None:
            raise InvalidRequestError(
                f"speculation of {asked} tokens needs a drafter, and this engine has none; start it with "
                "method='ngram' or speculative_model=..., pass a prediction, or leave speculation at 'auto'"
            )

    def _bad_words(self, words: Any) -> tuple[tuple[int, ...], ...]:
        """Tokenize each word as it stands and as it follows a space: the two usually differ.

        Other white space than a space is a part of the word, and spaces alone are a word of their own.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, " " + bare) if bare else (word,):
                ids = tuple(token_ids(self._tokenizer, text, "bad_words", special=False))
                if ids:
                    found[ids] = None
        return tuple(found)


def token_ids(tokenizer: Any, text: str, name: str, *, special: bool = True) -> list[int]:
    """Tokenize a text.

    Args:
        tokenizer: The model's.
        text: What a caller gave.
        name: As what.
        special: Whether the tokenizer may add its own tokens, such as the beginning of a text.

    Raises:
        InvalidRequestError: See `check_text`.
    """
    check_text(name, text)
    return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)


def _is_id(item: Any) -> bool:
    """Whether it is an integer, of Python's, numpy's or torch's; an array of one is a prompt of its own."""
    if isinstance(item, bool) or getattr(item, "ndim", 0) > 0:
        return False
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def listed(prompts: Any) -> list[Any]:
    """Give a list of prompts for one prompt or many."""
    if prompts is None:
        raise InvalidRequestError("there is no prompt: pass a string, token ids, or a list of either")
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, list | tuple) and not (prompts and all(_is_id(item) for item in prompts)):
        return list(prompts)
    return [prompts]


def paired(prompts: list[Any], params: SamplingParams | list[SamplingParams] | None) -> list[SamplingParams]:
    """Give each prompt its parameters."""
    if isinstance(params, list | tuple):
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts came with {len(params)} sampling parameters; give one each"
            )
        return list(params)
    return [params or SamplingParams()] * len(prompts)


def _checked(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling parameters must be SamplingParams, got {params!r:.100}; write SamplingParams(temperature=0, ...)"
        )
    return params
