"""Two texts side by side: whether they are the same, and where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.outputs import RequestOutput

__all__ = ["WHOLE", "Parting", "Text", "Verdict", "first_difference", "parting", "text_of"]

Verdict = Literal["near-tie", "defect"]
WHOLE = ("stop", "length")  # how a text ends that did not fail


@dataclass(frozen=True)
class Text:
    """A prompt's ids, the ids generated after it, and why they ended ("stop", "length", "error", ...)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Parting:
    """Where two texts of one prompt part.

    Attributes:
        prompt: Which prompt.
        position: The first generated token that differs, from 0.
        plain, speculative: The tokens there; None where a text had ended.
        reasons: How the two texts ended.
        prefix: What precedes the place in both, the prompt included; empty where one goes on and the other ends.
        gap: How much logits must change so that either token would be taken; None where a token is clearly out of the
            question, or where one text goes on and the other ends.
        top2: How far the best two choices are apart there, noise of a draw included.
        verdict: "near-tie", or "defect".
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    reasons: tuple[str | None, str | None]
    prefix: tuple[int, ...] = ()
    gap: float | None = None
    top2: float | None = None
    verdict: Verdict = "defect"


def text_of(output: RequestOutput) -> Text:
    """Give an output's first text."""
    return Text(output.prompt_token_ids, output.token_ids, output.outputs[0].finish_reason)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Find the first place at which two lists of ids differ, the end of the shorter included; None for equal ones."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def parting(prompt: int, plain: Text, other: Text) -> Parting | None:
    """Say where two texts part; None for the same text. Two texts that failed are never the same."""
    reasons = plain.finish_reason, other.finish_reason
    place = first_difference(plain.tokens, other.tokens)
    if place is None:
        if reasons[0] == reasons[1] and reasons[0] in WHOLE:
            return None
        return Parting(prompt, len(plain.tokens), None, None, reasons)
    mine, theirs = (ids[place] if place < len(ids) else None for ids in (plain.tokens, other.tokens))
    both = mine is not None and theirs is not None
    prefix = (*plain.prompt, *plain.tokens[:place]) if both else ()
    return Parting(prompt, place, mine, theirs, reasons, prefix)
