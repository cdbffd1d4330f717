"""From logits to the token taken: every rule at every position, each with that position's own prefix.

Sampling is by Gumbel-max, ``argmax(score + noise(seed, position, id))``: a draw from the softmax of the scores that
depends on nothing but the scores and the position. Greedy is the same with no noise.

Rules apply in this order: logit_bias, penalties, bad words, min_tokens, grammars, temperature, then the filters top_k,
top_p and min_p. So nothing brings back what a grammar rules out, and filters count among what is left. A filter keeps
every token that is as likely as its last one, so ties at a border stay in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.sampling.random import Purpose, gumbel
from outrider.sampling.rules import NOTHING, Prefix, Rules

__all__ = ["TokenLogprobs", "barred", "choose", "distribution", "logprobs", "preferences", "shaped"]

SHORTLIST = 1024  # on a CPU a filter usually needs no more than this many of the likeliest tokens
BANNED = float("-inf")


def choose(logits: torch.Tensor, rules: Rules, prefix: Prefix, purpose: Purpose = Purpose.CHOICE) -> torch.Tensor:
    """Take a token at every position: logits ``[B, T, V]`` -> ids ``[B, T]``."""
    scores = shaped(logits, rules, prefix)
    if not rules.flags.random:
        return scores.argmax(-1)
    scores = _tempered(scores, rules)
    drawn = (rules.temperature > 0)[:, None, None]
    ids: torch.Tensor | None = None
    if rules.flags.filtered:
        floor, values, likeliest = _floor(scores, rules)
        if likeliest is not None:  # all that any row keeps is on its shortlist
            scores, ids = values, likeliest
        scores = scores.masked_fill(scores < floor, BANNED)
    noise = gumbel(rules.seeds, prefix.ends, purpose, scores.shape[-1] if ids is None else ids)
    picked = torch.where(drawn, scores + noise, scores).argmax(-1)
    return picked if ids is None else ids.gather(-1, picked[..., None])[..., 0]


def distribution(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
    """Give what `choose` draws from: fp32 ``[B, T, V]``; one-hot where a row is greedy."""
    scores = shaped(logits, rules, prefix)
    best = scores.argmax(-1, keepdim=True)
    certain = torch.zeros_like(scores).scatter_(-1, best, 1.0)
    if not rules.flags.random:
        return certain
    scores = _tempered(scores, rules)
    if rules.flags.filtered:
        scores = scores.masked_fill(scores < _floor(scores, rules)[0], BANNED)
    return torch.where((rules.temperature > 0)[:, None, None], scores.softmax(-1), certain)


def preferences(logits: torch.Tensor, rules: Rules, prefix: Prefix, ends: torch.Tensor) -> torch.Tensor:
    """Score tokens ``[B, T, V]`` so that the best is what `choose` takes, and the next what it would take instead.

    Where the target draws, its noise at a position is known beforehand: with it, guesses agree with its choice as often
    as two distributions allow.

    Args:
        logits: ``[B, T, V]``.
        rules: Of each row.
        prefix: The text that the rules look at.
        ends: Positions whose noise counts, ``[B, T]`` or ``[B, 1]``: a guess may stand further on than the text that
            the rules see.
    """
    scores = shaped(logits, rules, prefix)
    if not rules.flags.random:
        return scores
    noise = gumbel(rules.seeds, ends, Purpose.CHOICE, logits.shape[-1])
    drawn = distribution(logits, rules, prefix).log() + noise
    return torch.where((rules.temperature > 0)[:, None, None], drawn, scores)


def shaped(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
    """Apply the rules that can change the likeliest token: fp32 ``[B, T, V]`` in and out, the input untouched."""
    flags = rules.flags
    if not (flags.biased or flags.penalised or flags.banned or flags.held or flags.masked):
        return logits
    scores = logits.clone()
    if rules.flags.biased:
        known = (rules.bias_ids != NOTHING) & (rules.bias_ids < scores.shape[-1])
        index = rules.bias_ids.where(known, 0)[:, None, :].expand(-1, scores.shape[1], -1)
        scores.scatter_add_(-1, index, rules.bias_values.where(known, 0)[:, None, :].expand_as(index))
    if rules.flags.penalised:
        scores = _penalised(scores, rules, prefix)
    if rules.flags.banned:
        _ban_words(scores, rules, prefix)
    if rules.flags.held:
        early = prefix.ends - rules.prompt_lengths[:, None] < rules.min_tokens[:, None]
        _ban(scores, rules.stop_ids[:, None, :].expand(-1, scores.shape[1], -1), early[..., None])
    if rules.masks is not None:
        scores.masked_fill_(~_unpacked(rules.masks, scores.shape[-1]), BANNED)
    return scores


def barred(logits: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
    """Say where the rules leave nothing to choose: ``[B, T, V]`` -> bool ``[B, T]``."""
    return shaped(logits, rules, prefix).amax(-1) == BANNED


def _unpacked(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpack an id a bit: int32 ``[B, T, W]`` -> bool ``[B, T, V]``."""
    bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    return (bits & 1).flatten(-2)[..., :vocab_size].bool()


def _tempered(scores: torch.Tensor, rules: Rules) -> torch.Tensor:
    temperature = rules.temperature.where(rules.temperature > 0, 1.0)
    # Shifted first, so that a tiny temperature cannot overflow the likeliest token's score.
    return (scores - scores.amax(-1, keepdim=True)) / temperature[:, None, None]


def _counts(rules: Rules, prefix: Prefix, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count each id among the generated tokens, and find those seen at all: fp32 and bool ``[B, T, V]``.

    Taken from the tokens themselves each time: there is no penalty state that a rejection could leave behind.
    """
    ends, steps = prefix.ends, prefix.ends.shape[1]
    place = torch.arange(prefix.tokens.shape[1], device=ends.device)[None]
    tokens = prefix.tokens.clamp(0, vocab_size - 1)
    first = ends[:, :1]  # tokens before the first choice; each later choice has one more
    generated = ((place >= rules.prompt_lengths[:, None]) & (place < first)).float()
    counts = torch.zeros(len(ends), vocab_size, device=ends.device).scatter_add_(1, tokens, generated)
    seen = torch.zeros_like(counts).scatter_add_(1, tokens, (place < first).float())
    counts, seen = counts[:, None].repeat(1, steps, 1), seen[:, None].repeat(1, steps, 1)
    for step in range(1, steps):
        guess = tokens.gather(1, ends[:, step - 1 : step])
        for table in (counts, seen):
            later = table[:, step:]
            later.scatter_add_(2, guess[:, None].expand(-1, steps - step, -1), torch.ones_like(later[..., :1]))
    return counts, seen > 0


def _penalised(scores: torch.Tensor, rules: Rules, prefix: Prefix) -> torch.Tensor:
    counts, seen = _counts(rules, prefix, scores.shape[-1])
    repetition = rules.repetition[:, None, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - counts * rules.frequency[:, None, None] - (counts > 0) * rules.presence[:, None, None]


def _ban(scores: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> None:
    """Rule out `ids` ``[B, T, N]`` (those that are ids at all) in place, where the condition holds."""
    known = where & (ids != NOTHING) & (ids < scores.shape[-1])
    hits = torch.zeros_like(scores, dtype=torch.int32)
    hits.scatter_add_(-1, ids.where(known, 0), known.int())
    scores.masked_fill_(hits > 0, BANNED)


def _ban_words(scores: torch.Tensor, rules: Rules, prefix: Prefix) -> None:
    """Rule out the last token of each bad word whose other tokens end the prefix."""
    heads, lasts = rules.bad_words[..., :-1], rules.bad_words[..., -1]  # [B, NW, LW-1], [B, NW]
    steps, length = prefix.ends.shape[1], heads.shape[-1]
    back = prefix.ends[..., None] - torch.arange(length, 0, -1, device=scores.device)  # [B, T, LW-1]
    flat = back.clamp(min=0).flatten(1)
    tail = prefix.tokens.gather(1, flat).view_as(back).masked_fill(back < 0, NOTHING - 1)
    matches = ((tail[:, :, None] == heads[:, None]) | (heads[:, None] == NOTHING)).all(-1)  # [B, T, NW]
    _ban(scores, lasts[:, None].expand(-1, steps, -1), matches)


def _floor(scores: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Find the lowest score each row keeps: ``[B, T, 1]``, with the shortlist (scores, ids) where that suffices.

    A full sort of the vocabulary is what a filter costs. On a CPU the likeliest few nearly always decide, so each row
    is settled by them where they suffice; a row's result does not depend on whether another row needed the sort.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size <= SHORTLIST:
        ordered = scores.sort(-1, descending=True).values
        return _floor_of(ordered, scores, rules), scores, None
    values, ids = scores.topk(SHORTLIST, dim=-1)
    floor = _floor_of(values, scores, rules)
    settled = (values[..., -1:] < floor) & (rules.top_k <= SHORTLIST)[:, None, None]
    settled |= (rules.temperature == 0)[:, None, None]
    if bool(settled.all()):
        return floor, values, ids
    ordered = scores.sort(-1, descending=True).values
    return torch.where(settled, floor, _floor_of(ordered, scores, rules)), scores, None


def _floor_of(ordered: torch.Tensor, scores: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Combine the three filters over scores in falling order ``[B, T, M]``: ``[B, T, 1]``."""
    size = ordered.shape[-1]
    top_k, top_p, min_p = (column[:, None, None] for column in (rules.top_k, rules.top_p, rules.min_p))
    last = ordered.gather(-1, (top_k.clamp(1, size) - 1).expand(-1, ordered.shape[1], -1))
    limited = (top_k > 0) & (top_k <= size)
    floor = last.masked_fill(~limited, BANNED)
    # Nucleus, over what top_k left; its first token is always in, since nothing precedes it.
    kept = ordered.masked_fill(ordered < floor, BANNED)
    total = torch.where(limited, kept.logsumexp(-1, keepdim=True), scores.logsumexp(-1, keepdim=True))
    mass = (kept - total).exp()
    inside = (mass.cumsum(-1) - mass < top_p) & (kept > BANNED)
    nucleus = kept.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    floor = torch.maximum(floor, nucleus.masked_fill(top_p >= 1, BANNED))
    return torch.maximum(floor, (ordered[..., :1] + min_p.log()).masked_fill(min_p == 0, BANNED))


class TokenLogprobs(NamedTuple):
    """Log-probabilities at each position: the token taken ``[B, T]``, and the N likeliest ``[B, T, N]`` with ids."""

    taken: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def logprobs(logits: torch.Tensor, taken: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Give the target's own log-probabilities: logits ``[B, T, V]``, ids ``[B, T]``."""
    logp = logits.log_softmax(-1)
    top = logp.topk(min(num_top, logp.shape[-1]), dim=-1)
    return TokenLogprobs(logp.gather(-1, taken[..., None])[..., 0], top.indices, top.values)
