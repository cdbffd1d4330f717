"""What EAGLE heads compute, written from the papers in plain torch: whole texts at once, no cache, no pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.draft.tree import DEEPEST, SEEN
from outrider.proposal import ROOT, Proposal
from tests.eagle_heads import DIM

if TYPE_CHECKING:
    from tests.eagle_heads import TinyHead

__all__ = ["Slow", "as_published", "features", "paths", "scores"]


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: torch.Tensor, stretch: float) -> torch.Tensor:
    """Rotary embedding of [T, H, D] at the places 0 to T - 1."""
    half = DIM // 2
    angles = torch.arange(len(x))[:, None] / stretch * 10000.0 ** (-torch.arange(half).float() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    out = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([out.real, out.imag], -1)


def features(model: Any, head: TinyHead, text: list[int]) -> torch.Tensor:
    """What the head is given of each place, [T, hidden]: 2401.15077, section 3.1; 2503.01840, section 3.1."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    taken = [states[tap][0] for tap in head.taps]
    if not head.third or "fc" not in head.tensors:
        return taken[0]
    each = head.tensors.get("tap_norms")
    joined = normed(torch.cat(taken, -1), head.tensors.get("taps_norm"))
    if each is not None:
        joined = torch.cat(
            [normed(one, weight) for one, weight in zip(joined.chunk(len(each), -1), each, strict=True)], -1
        )
    return joined @ head.tensors["fc"].T


def as_published(model: Any, head: TinyHead, given: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Pairs of a feature [T, hidden] and the token after it -> what is fed back, [T, hidden]."""
    parts = head.tensors
    table = parts.get("embedding", model.get_input_embeddings().weight)
    embedded = table[torch.tensor(tokens)]
    if head.third:
        side = normed(given, parts["hidden_norm"])
        state = side if head.says.get("norm_before_residual") else given
        taken = torch.cat([normed(embedded, parts["input_norm"]), side], -1)
    else:
        embedded = normed(embedded, parts.get("embedding_norm"))
        state = torch.cat([embedded, given], -1) @ parts["fc"].T + parts.get("fc_bias", 0)
        taken = normed(state, parts.get("input_norm"))
    query, key, value = ((taken @ parts[one].T + parts.get(f"{one}_bias", 0)).unflatten(-1, (-1, DIM)) for one in "qkv")
    query, key = (
        turned(normed(one, parts.get(name)), head.stretch) for one, name in ((query, "q_norm"), (key, "k_norm"))
    )
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * DIM**-0.5
    unseen = torch.ones(len(state), len(state), dtype=torch.bool).triu(1)
    if "layer_types" in head.layer:
        unseen |= torch.ones_like(unseen).tril(-head.layer["sliding_window"])
    out = torch.einsum("hts,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), value)
    state = state + out.flatten(1) @ parts["o"].T
    taken = normed(state, parts["post_norm"])
    state = state + (F.silu(taken @ parts["gate"].T) * (taken @ parts["up"].T)) @ parts["down"].T
    return normed(state, parts.get("norm")) if head.says.get("norm_output") else state


def scores(model: Any, head: TinyHead, state: torch.Tensor) -> torch.Tensor:
    """What the head thinks of all of the target's ids, [..., V]."""
    state = state if head.says.get("norm_output") else normed(state, head.tensors.get("norm"))
    own = state @ head.tensors.get("head", model.get_output_embeddings().weight).T
    if head.ids is None:
        return own
    return torch.full((*own.shape[:-1], 320), -torch.inf).index_copy(-1, head.ids, own)


class Slow:
    """A head's guesses after one text, everything computed anew for each: true features as far as there are any."""

    def __init__(self, model: Any, head: TinyHead, text: list[int]) -> None:
        self.model, self.head, self.text = model, head, text
        self.given = features(model, head, text)[:-1]
        self._states: dict[tuple[int, ...], torch.Tensor] = {}

    def after(self, path: tuple[int, ...]) -> torch.Tensor:
        """Log-probabilities of what follows the text and some guesses, [V]."""
        fed_back = [self._state(path[:count]) for count in range(len(path))]
        given = torch.stack([*self.given, *fed_back])
        state = as_published(self.model, self.head, given, [*self.text[1:], *path])[-1]
        self._states[path] = state
        return scores(self.model, self.head, state).log_softmax(-1)

    def _state(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self._states:
            self.after(path)
        return self._states[path]

    def chain(self, count: int) -> list[int]:
        path: tuple[int, ...] = ()
        for _ in range(count):
            path = (*path, int(self.after(path).argmax()))
        return list(path)

    def tree(self, size: int) -> set[tuple[int, ...]]:
        """2406.16858, section 4: follow the best paths of each level, and keep the best of all that were seen."""
        depth = min(DEEPEST, size)
        follow = max(1, size // depth)
        seen: dict[tuple[int, ...], float] = {(): 0.0}
        level: list[tuple[int, ...]] = [()]
        for _ in range(depth):
            fresh: dict[tuple[int, ...], float] = {}
            for path in level:
                best = self.after(path).topk(max(SEEN, follow))
                for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    fresh[(*path, token)] = seen[path] + score
            seen |= fresh
            level = sorted(fresh, key=lambda path: -fresh[path])[:follow]
        del seen[()]
        return set(sorted(seen, key=lambda path: -seen[path])[:size])


def paths(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """Each node's guesses from the root on."""
    parents, made = proposal.parents_or_chain()[row].tolist(), []
    for token, parent in zip(proposal.tokens[row, : int(proposal.lengths[row])].tolist(), parents, strict=False):
        made.append((*(made[parent] if parent != ROOT else ()), token))
    return made
