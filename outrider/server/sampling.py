"""From what a client wrote to `SamplingParams`: bounds of this server first, then the library's own checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError
from outrider.sampling.params import SamplingParams
from outrider.server.errors import invalid
from outrider.server.protocol import Prediction, Speculation

if TYPE_CHECKING:
    from outrider.server.protocol import ContentPart, Generation
    from outrider.server.settings import ServerSettings

__all__ = ["LOOKUP", "checked_count", "drafting_of", "field_of", "sampling_params", "text_of"]

# Fields that mean the same here and there, and are left to the library's default where they are not given.
SHARED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "bad_words", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "n", "priority",
)  # fmt: skip
GRAMMARS = {"json_schema": "response_format", "lark": "tools"}  # what a client sent that became a grammar of this kind
LOOKUP = "ngram"  # a request may ask for it whatever the server drafts with: it needs nothing but the text


def sampling_params(
    asked: Generation, settings: ServerSettings, *, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """Give the parameters of a request.

    Raises:
        ApiError: A value is out of range; it names the field.
    """
    _check_bounds(asked, settings, logprobs)
    given = {name: value for name in SHARED if (value := getattr(asked, name)) is not None}
    if asked.prediction is not None:
        given["prediction"] = _predicted(asked.prediction)
    if asked.stop is not None:
        given["stop"] = asked.stop
    if asked.logit_bias:
        given["logit_bias"] = asked.logit_bias
    speculation = asked.speculation
    if isinstance(speculation, Speculation):
        if speculation.method == "none":
            given["speculation"] = "off"
        elif speculation.num_speculative_tokens is not None:
            given["speculation"] = speculation.num_speculative_tokens
    elif speculation is not None:
        given["speculation"] = speculation
    try:
        given |= {name: value for name, value in more.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
    except InvalidRequestError as error:
        raise invalid(str(error), field_of(str(error))) from None


def drafting_of(asked: Generation, served: str) -> str | None:
    """Give the method that a request asks for in place of the server's own; None for that.

    Raises:
        ApiError: The server has no such method.
    """
    if not isinstance(asked.speculation, Speculation):
        return None
    method = asked.speculation.method
    if method in (None, "none", served):
        return None
    if method == LOOKUP:
        return method
    raise invalid(
        f"speculation.method {method!r} is not served: this server drafts with {served!r}; ask for that, for "
        f"{LOOKUP!r}, or for 'none'",
        "speculation.method",
    )


def checked_count(asked: Generation, settings: ServerSettings, num_prompts: int = 1) -> int:
    """Give how many texts a request wants.

    Raises:
        ApiError: More than one request may have.
    """
    count = (asked.n or 1) * num_prompts
    if count > settings.max_samples:
        raise invalid(
            f"{num_prompts} prompts with n={asked.n or 1} make {count} texts, and {settings.max_samples} is the most "
            "for one request; send several",
            "n",
        )
    return count


def text_of(content: str | list[ContentPart] | None, where: str) -> str:
    """Give the text of a message's content.

    Raises:
        ApiError: A part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise invalid(f"content of type {part.type!r:.60} is not supported: this server takes text only", where)
        texts.append(text)
    return "".join(texts)


def _predicted(prediction: Prediction) -> str:
    return text_of(prediction.content, "prediction")


def _check_bounds(asked: Generation, settings: ServerSettings, logprobs: int | None) -> None:
    if logprobs is not None and logprobs > settings.max_logprobs:
        raise invalid(f"at most {settings.max_logprobs} logprobs are served, got {logprobs}", "logprobs")
    if asked.logit_bias is not None and len(asked.logit_bias) > settings.max_biases:
        raise invalid(
            f"logit_bias may have {settings.max_biases} entries, got {len(asked.logit_bias)}; name fewer", "logit_bias"
        )
    for name in ("stop", "bad_words", "stop_token_ids"):
        value = getattr(asked, name)
        entries = [value] if isinstance(value, str) else value or []
        most = settings.max_stops if name == "stop" else settings.max_biases
        if len(entries) > most:
            raise invalid(f"{name} may have {most} entries, got {len(entries)}", name)
        if any(isinstance(one, str) and len(one) > settings.max_stop_length for one in entries):
            raise invalid(f"an entry of {name} may have {settings.max_stop_length} characters; shorten it", name)


def field_of(message: str) -> str | None:
    """Name the field that a message of the library begins with."""
    known = (*SHARED, "logit_bias", "stop", "max_tokens", "logprobs", "speculation", "prediction", "prompt")
    for word in re.findall(r"[a-z_]+", message)[:4]:
        if word in known:
            return str(word)
        if word in GRAMMARS:
            return GRAMMARS[word]
    return None
