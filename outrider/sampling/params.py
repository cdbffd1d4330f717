"""What a request asks for: one frozen value, checked in full when it is made."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import InvalidRequestError
from outrider.sampling.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MAX_LOGPROBS", "SamplingParams", "Speculation", "check_text"]

MAX_LOGPROBS = 100
LARGEST = 2**31 - 1
Speculation = Literal["auto", "off"] | int


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is not a finite number within [low, high] (or (low, high] where `low_open`)."""
    brackets = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    unusable = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or unusable:
        raise InvalidRequestError(f"{name} must be a finite number in {brackets}, got {value!r}")
    if value > high or value < low or (low_open and value == low):
        raise InvalidRequestError(f"{name} must be in {brackets}, got {value!r}")


def _whole(name: str, value: object, low: int, high: int = LARGEST) -> None:
    """Refuse what is not an integer of at least `low` (and at most `high`, which at last is what a table can hold)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or value > high:
        too_large = isinstance(value, int) and value > high
        allowed = f"an integer >= {low}" if high == LARGEST and not too_large else f"an integer in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}")


def _plain(value: Any) -> Any:
    """Give Python's own numbers and lists for numpy's and torch's."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_text(name: str, text: str) -> None:
    """Refuse text that is none: half a surrogate pair, which no tokenizer takes.

    Raises:
        InvalidRequestError: The message says where it stands.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} holds half of a surrogate pair ({text[error.start]!a} at character {error.start}), which is no "
            "character; pass valid text"
        ) from None


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {value!r}")
    if any(not item for item in items):
        raise InvalidRequestError(f"{name} must not hold an empty string: every text holds it; leave it out")
    for item in items:
        check_text(name, item)
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {value!r}")
    ids = tuple(map(_plain, value))
    for item in ids:
        _whole(f"every id in {name}", item, 0)
    return ids


def _bias(value: object) -> dict[int, float]:
    if not hasattr(value, "items"):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers in [-100, 100], got {value!r}")
    bias: dict[int, float] = {}
    for key, given in value.items():  # JSON has no integer keys: OpenAI clients send "1234"
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {key!r:.50}") from None
        _whole("every logit_bias key", key if isinstance(key, bool) else token, 0)
        amount = _plain(given)
        _number(f"logit_bias[{token}]", amount, -100, 100)
        bias[token] = float(amount)
    return bias


@dataclass(frozen=True)
class SamplingParams:
    """How to choose and when to stop. Every field is exact together with speculation.

    Args:
        n: Samples per prompt; sample ``i`` of a seeded request uses a seed derived from ``seed`` and ``i``.
        temperature: 0 is greedy, whatever top_p, top_k and min_p say.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all. Ties at the border stay in.
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        seed: Fixes the sampled text: it then depends on target, prompt and these parameters alone. None draws one.
        max_tokens: Tokens to generate at most; None goes to the context's end; 0 returns an empty text (with
            ``prompt_logprobs`` the prompt is scored all the same).
        min_tokens: No stop token is chosen before this many tokens, and no stop string is looked for.
        stop: Strings that end the text; cut off unless ``include_stop_str_in_output``. One that is a special token
            ends it too, though such tokens are left out of the text.
        stop_token_ids: Further token ids that end the text, besides the model's own end-of-sequence ids.
        ignore_eos: Go on after the model's end-of-sequence ids.
        presence_penalty, frequency_penalty: Subtracted from logits of tokens already generated (OpenAI's definition).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output (CTRL,
            1909.05858); above 1 discourages.
        logit_bias: Token id -> number added to its logit; -100 or less in effect bans.
        bad_words: Strings that must not be generated, as token sequences with and without a leading space; white space
            alone is meant as it stands.
        logprobs: Also report the log-probabilities of this many likeliest tokens at each position (and of the chosen
            one), from the target's own distribution before penalties and temperature; None reports none.
        prompt_logprobs: The same for the prompt's tokens.
        grammar: What the text must look like, see `Grammar`; no other rule allows again what it bans. The text may end
            where it is whole. Where end-of-sequence cannot be said there (``ignore_eos``, before ``min_tokens``, a
            model without one) it goes on while the grammar does, and then ends by itself.
        speculation: "auto" drafts while it pays, "off" never, a number drafts up to that many tokens each round.
        prediction: What the output is expected to be like, as text or token ids (OpenAI's field of that name): guesses
            are taken from it in place of the engine's drafter. It changes how fast the text comes, never the text.
        speculative_model: An ``LLM`` to draft for this request alone, in place of the engine's own drafter.
        num_speculative_tokens: The draft length that goes with ``speculative_model``; the same as ``speculation=N``.
        skip_special_tokens: Leave special tokens out of the text (never out of the ids).
        priority: Who is let in first where not all can run: lower first, and in order of arrival among equals.

    Raises:
        InvalidRequestError: A value is out of range; the message names field, value and allowed range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: str | Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculation: Speculation = "auto"
    prediction: str | Sequence[int] | None = None
    speculative_model: Any = field(default=None, repr=False, compare=False)
    num_speculative_tokens: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _plain(value))
        self._check_numbers()
        self._check_speculation()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(
                f"grammar must be a Grammar, got {self.grammar!r:.100}; write Grammar.json_schema(...) or the like"
            )
        normal = {
            "top_k": max(self.top_k, 0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _strings("bad_words", self.bad_words),
            "logit_bias": _bias(self.logit_bias),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        _whole("n", self.n, 1, 1024)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _whole("min_tokens", self.min_tokens, 0)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 10, low_open=True)
        _whole("priority", self.priority, -(2**31), 2**31 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_speculation(self) -> None:
        if isinstance(self.prediction, str):
            check_text("prediction", self.prediction)
        elif self.prediction is not None:
            object.__setattr__(self, "prediction", _ids("prediction", self.prediction))
        if self.prediction is not None and self.speculative_model is not None:
            raise InvalidRequestError("prediction and speculative_model both say what drafts; pass one of them")
        if self.num_speculative_tokens is not None:
            _whole("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        if isinstance(self.speculation, str):
            if self.speculation not in ("auto", "off"):
                raise InvalidRequestError(f"speculation must be 'auto', 'off' or a length, got {self.speculation!r}")
        else:
            _whole("speculation, given as a length,", self.speculation, 0, 64)

    @property
    def draft_length(self) -> int | None:
        """Draft tokens a round at most, as asked for; None leaves it to the engine."""
        if self.speculation == "off":
            return 0
        if isinstance(self.speculation, int):
            return self.speculation
        return self.num_speculative_tokens

    @property
    def greedy(self) -> bool:
        """Whether the choice is the likeliest token, with no randomness."""
        return self.temperature == 0

    def but(self, **changes: Any) -> SamplingParams:
        """Give a copy with some fields changed."""
        return replace(self, **changes)
