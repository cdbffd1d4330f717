"""A text that must follow a grammar: which tokens may come next, after what is committed and after each guess.

The state moves by committed tokens alone. To see what may come after guesses, they are followed and taken back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from outrider.errors import OutriderError
from outrider.proposal import ROOT, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.engine.grammar_compiler import CompiledGrammar
    from outrider.engine.round import RoundPlan
    from outrider.sequence import Sequence

__all__ = ["Constraint", "GrammarError", "ended_by_grammar", "masked", "why_stuck", "with_forced"]

ANYTHING = -1  # 32 bits, all set


class GrammarError(OutriderError):
    """A text cannot go on by its grammar."""


class Constraint:
    """Where one text stands in its grammar.

    The text may end where the grammar is satisfied. There a token of `closing` is allowed besides what the grammar
    allows. Where none can be said (there is none, or `min_tokens` are not reached) and nothing else can follow, the
    text is `over`, and ends by itself.

    Args:
        compiled: The grammar.
        ends: End-of-sequence ids of the model: never part of the text.
        closing: Those of them that this request may end with.
        min_tokens: Tokens before which none of them may come.
    """

    def __init__(
        self, compiled: CompiledGrammar, ends: frozenset[int], closing: frozenset[int], min_tokens: int
    ) -> None:
        self.tokens: list[int] = []
        self._compiled, self._words = compiled, compiled.words
        self._ends, self._closing, self._min_tokens = ends, closing, min_tokens
        self._made: Any = None
        self._root: torch.Tensor | None = None

    @property
    def num_words(self) -> int:
        """W: 32-bit words of a mask."""
        return self._words.num_words

    def advance(self, token: int) -> None:
        """Take in a committed token that does not end the text.

        Raises:
            GrammarError: The grammar does not allow it.
        """
        matcher = self._matcher  # at what is known so far
        self.tokens.append(token)
        self._root = None
        if matcher.try_consume_tokens([token]) != 1:
            self._renew([])

    @property
    def over(self) -> bool:
        """Whether nothing can follow, not even an end."""
        if self._can_close(len(self.tokens)) or not self._matcher.is_accepting():
            return False
        return self._matcher.is_stopped() or not self._next(len(self.tokens)).any()

    def root(self) -> torch.Tensor:
        """Give what may follow the committed tokens, int32 ``[W]``, an id a bit.

        Raises:
            GrammarError: Nothing may, or it is too hard to tell.
        """
        if self._root is None:
            self._root = self._after([])
        return self._root

    def forced(self, most: int) -> list[int]:
        """Give tokens that the grammar forces next, as the tokenizer would spell them: good guesses, no more."""
        matcher = self._matcher
        if most <= 0 or matcher.is_stopped():
            return []
        return [int(one) for one in matcher.compute_ff_tokens()[:most]]

    def masks(self, guesses: Seq[int], parents: Seq[int]) -> torch.Tensor:
        """Give what may follow the text and each guess after it, int32 ``[N+1, W]``.

        What is refused by its own mask, or ends the text, is followed by anything: nobody gets there. What cannot go on
        is followed by nothing.

        Args:
            guesses: N ids.
            parents: What each follows, by its place among them, always before its own, or `ROOT`.
        """
        made = torch.full((len(guesses) + 1, self.num_words), ANYTHING, dtype=torch.int32)
        made[0] = self.root()
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        self._follow(ROOT, [], made, guesses, children)
        return made

    def _follow(
        self, at: int, path: list[int], made: torch.Tensor, guesses: Seq[int], children: dict[int, list[int]]
    ) -> None:
        """Fill in what may come after the nodes behind `at`; the matcher stands there, and does again afterwards."""
        for node in children.get(at, ()):
            token = guesses[node]
            allowed = bool(made[at + 1, token // 32] >> (token % 32) & 1)
            if not allowed or token in self._ends or self._matcher.is_stopped():
                continue
            further = [*path, token]
            try:
                if self._matcher.try_consume_tokens([token]) != 1:
                    self._renew(further)
                made[node + 1] = self._after(further)
                self._follow(node, further, made, guesses, children)
                if not self._matcher.rollback(1):
                    self._renew(path)
            except GrammarError:
                made[node + 1] = 0
                self._renew(path)

    @property
    def _matcher(self) -> Any:
        if self._made is None:
            self._made = self._compiled.matcher()
        return self._made

    def _renew(self, path: list[int]) -> None:
        """Put a matcher that shares nothing in place of one that failed, and let it go the whole way again."""
        self._made = self._compiled.renewed()
        whole = [*self.tokens, *path]
        if whole and self._made.try_consume_tokens(whole) != len(whole):
            raise GrammarError(f"the grammar does not allow this text, or is too complex: {self._made.get_error()}")

    def _can_close(self, count: int) -> bool:
        """Whether a text of so many tokens may be ended, as far as the request is concerned."""
        return bool(self._closing) and count >= self._min_tokens

    def _after(self, path: list[int]) -> torch.Tensor:
        """Give what may follow the committed tokens and `path`, where the matcher stands."""
        count = len(self.tokens) + len(path)
        if self._matcher.is_error():
            self._renew(path)
        if not self._matcher.is_stopped():
            bits = self._next(count)
            if self._matcher.is_error():  # perhaps others used up what is shared
                self._renew(path)
                bits = self._next(count)
            if bits.any():
                return bits
        elif self._can_close(count):  # complete, and never asked again
            return self._words.bits(self._closing)
        if self._matcher.is_error() or not self._matcher.is_accepting():
            reason = self._matcher.get_error().splitlines()
            raise GrammarError(f"no token can follow by the grammar ({reason[0] if reason else 'a dead end'})")
        return torch.full((self.num_words,), ANYTHING, dtype=torch.int32)  # `over`: the text ends before it

    def _next(self, count: int) -> torch.Tensor:
        bits = self._words.next_bits(self._matcher) & ~self._words.bits(self._ends)
        if self._can_close(count) and self._matcher.is_accepting():
            bits = bits | self._words.bits(self._closing)
        return bits


def ended_by_grammar(sequence: Sequence) -> bool:
    """End a sequence whose grammar lets nothing follow, be its text whole or not; say whether it was one."""
    constraint = sequence.constraint
    if constraint is None:
        return False
    try:
        if constraint.over:
            sequence.finish("stop")
        else:
            constraint.root()
    except GrammarError as error:
        sequence.fail(str(error))
    return sequence.finished


def why_stuck(sequence: Sequence) -> str:
    """Say why nothing can be chosen after a text."""
    if sequence.constraint is None:
        return "nothing is left to choose: bad_words, and stop ids before min_tokens, ban all the vocabulary"
    try:
        sequence.constraint.root()
    except GrammarError as error:
        return str(error)
    return "nothing is left to choose: bad_words, or stop ids before min_tokens, ban all that the grammar allows"


def with_forced(proposal: Proposal, sequences: Seq[Sequence], wanted: Seq[int]) -> tuple[Proposal, list[int]]:
    """Put what grammars force in place of the first guesses of chains; give how many of a row's are its drafter's own.

    A forced guess does not depend on what was drawn, so it is a certainty for those who ask for its probability.
    """
    tokens, lengths = proposal.tokens.tolist(), proposal.lengths.tolist()
    own = list(lengths)
    certain = torch.zeros_like(proposal.tokens, dtype=torch.bool)
    foreign = torch.zeros_like(certain)
    for row, sequence in enumerate(sequences):
        forced = [] if sequence.constraint is None else sequence.constraint.forced(wanted[row])
        if not forced:
            continue
        certain[row, : len(forced)] = True
        made = tokens[row][: lengths[row]]
        same = next((place for place, pair in enumerate(zip(made, forced, strict=False)) if pair[0] != pair[1]), None)
        if same is None and len(made) >= len(forced):
            continue
        own[row] = len(made) if same is None else same
        tokens[row][: len(forced)], lengths[row] = forced, len(forced)
        foreign[row, own[row] :] = True
    if not bool(certain.any()):
        return proposal, own
    device, probs, sources = proposal.tokens.device, proposal.probs, proposal.sources
    ids = torch.tensor(tokens).to(device)
    if probs is not None:
        probs = torch.where(certain[..., None], F.one_hot(ids, probs.shape[-1]).to(probs.dtype), probs)
    if sources is not None:
        sources = sources.masked_fill(foreign, -1)
    return Proposal(ids, torch.tensor(lengths).to(device), probs, None, sources), own


def masked(plan: RoundPlan, proposal: Proposal, sequences: Seq[Sequence]) -> RoundPlan:
    """Let the rules of a round rule out what the rows' grammars do not allow, at every place that may be chosen for."""
    parents, lengths = proposal.parents_or_chain().tolist(), proposal.lengths.tolist()
    tokens, num_rows = proposal.tokens.tolist(), len(plan.rows.slots)
    width = max(one.constraint.num_words for one in sequences if one.constraint is not None)
    masks = torch.full((num_rows, proposal.num_tokens + 1, width), ANYTHING, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        if sequence.constraint is not None:
            length = lengths[row]
            try:
                masks[row, : length + 1] = sequence.constraint.masks(tokens[row][:length], parents[row][:length])
            except GrammarError:
                masks[row] = 0  # its fault alone: nothing can be chosen, which ends it
    device = proposal.tokens.device
    if device.type == "cuda":
        masks = masks.pin_memory()
    return replace(plan, rows=replace(plan.rows, rules=plan.rows.rules.masked(masks.to(device, non_blocking=True))))
