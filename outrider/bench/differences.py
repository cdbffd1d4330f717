"""Where two texts that should be the same part, and whether they have to be the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.config import Verification
from outrider.proof.texts import first_difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.llm import LLM
    from outrider.outputs import RequestOutput
    from outrider.sampling.params import SamplingParams

__all__ = ["Difference", "differences", "is_steady", "promises_tokens", "token_name"]


@dataclass(frozen=True)
class Difference:
    """Where a text first differs: its prompt and sample, the token's place, both tokens (None: the text had ended)."""

    prompt: int
    sample: int
    token: int
    plain: int | None
    speculative: int | None
    gap: float | None = None


def promises_tokens(llm: LLM, *, greedy: bool) -> bool:
    """Whether the same tokens may be expected with guesses as without; others promise a distribution, or nothing."""
    verification = llm.engine.speculation.verification
    return verification is Verification.COUPLED or (greedy and verification.draws_guesses)


def is_steady(llm: LLM) -> bool:
    """Whether passes of all widths round alike as far as a choice can see: in fp32 and in exact mode."""
    return llm.engine.config.exact or llm.loaded.dtype is torch.float32


def differences(
    llm: LLM, plain: Sequence[RequestOutput], speculative: Sequence[RequestOutput], params: list[SamplingParams]
) -> list[Difference]:
    """Give where each text of two runs over the same prompts first differs; one entry a text that does.

    Args:
        llm: Who is asked how far apart the two tokens are.
        plain, speculative: What the runs gave, prompt by prompt.
        params: One a prompt; none: the gaps are of no interest.
    """
    found = []
    for number, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        for sample, (ours, theirs) in enumerate(zip(one.outputs, other.outputs, strict=True)):
            place = first_difference(ours.token_ids, theirs.token_ids)
            if place is None:
                continue
            pair = [ids[place] if place < len(ids) else None for ids in (ours.token_ids, theirs.token_ids)]
            before = (*one.prompt_token_ids, *ours.token_ids[:place])
            gap = _gap(llm, before, pair, params[number]) if params else None
            found.append(Difference(number, sample, place, pair[0], pair[1], gap))
    return found


def _gap(llm: LLM, before: tuple[int, ...], pair: list[int | None], params: SamplingParams) -> float | None:
    """Ask the target how far apart the two tokens are, in log-probability; None where rules decided, or chance."""
    ruled = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty or params.logit_bias
    if not params.greedy or ruled or len(before) >= llm.max_model_len:
        return None
    asked = params.but(n=1, max_tokens=1, min_tokens=0, stop=(), logprobs=10, prompt_logprobs=None, speculation="off")
    report = llm.generate(list(before), asked)[0].outputs[0].logprobs
    top = report[0].top if report else {}
    one, other = (top.get(token) if token is not None else None for token in pair)
    return None if one is None or other is None else abs(one - other)


def token_name(llm: LLM, token: int | None) -> str:
    """Give a token as people read it; None is the text's end."""
    if token is None:
        return "the end"
    return f"{llm.tokenizer.decode([token])!r}" if llm.tokenizer is not None else f"id {token}"
