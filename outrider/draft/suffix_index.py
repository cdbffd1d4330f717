"""A suffix automaton that grows: where text stood before, what followed it, and how often.

Each state stands for all strings that end at the same places; its link leads to the longest shorter suffix that ends
at more of them. So the longest run of last tokens that stood anywhere before is one link away from the end of a text,
and the longest one that stands in another text is kept up at a few steps a token. Both are linear in time and memory
(Blumer et al. 1985), whatever the text: at most 2 states and 3 transitions a token.

Added to the classic: how often each state was reached and left, and the most frequent way on in front (the most recent
one among equals), so that following it takes no search. Counting all suffixes of every token would be quadratic in a
text of equal tokens; only the longest `MOST_COUNTED` of them are counted, more than other texts have.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

from outrider.proposal import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["SuffixIndex"]

MOST_COUNTED = 16  # suffixes of a text's end whose continuation is counted
WIDEST = 64  # continuations that are compared for a tree's branches; where there are more, none is likely


class SuffixIndex:
    """The suffix automaton of any number of texts, the last of which may still grow.

    State 0 is the empty string, in which nothing is counted.

    Attributes:
        num_tokens: Tokens taken in, of all texts.
        end: The state of the growing text as a whole; 0 where none grows.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.end = 0
        self._length = array("i", [0])  # of a state's longest string
        self._link = array("i", [-1])
        self._token = array("q", [0])  # the preferred way on, and where it leads; 0: nowhere
        self._target = array("i", [0])
        self._reached = array("i", [0])  # how often, from any but the empty string
        self._left = array("i", [0])
        self._others: dict[int, dict[int, int]] = {}  # the other ways on, of states that have any

    @property
    def num_states(self) -> int:
        """How many there are: at most twice the tokens, and the empty string's."""
        return len(self._length)

    # --- growing

    def extend(self, tokens: Iterable[int]) -> None:
        """Let the last text grow."""
        for token in tokens:
            last, known = self.end, self._next(self.end, token)
            if not known:
                self.end = self._grown(last, token)
            elif self._length[known] == self._length[last] + 1:
                self.end = known
            else:
                self.end = self._split(last, token, known)
            self._count(last, token)
            self.num_tokens += 1

    def add(self, tokens: Iterable[int]) -> None:
        """Take in a text of its own: no match spans two."""
        self.end = 0
        self.extend(tokens)
        self.end = 0

    def _grown(self, last: int, token: int) -> int:
        """Make the state of a text that no text went on as before."""
        link, state = self._link, last
        made = self._made(self._length[last] + 1)
        known = 0
        while state >= 0:
            known = self._next(state, token)
            if known:
                break
            if not self._target[state]:
                self._token[state], self._target[state] = token, made
            else:
                self._others.setdefault(state, {})[token] = made
            state = link[state]
        if known and self._length[known] != self._length[state] + 1:
            known = self._split(state, token, known)
        link[made] = known
        return made

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the strings that end here, too, a state of their own: those of `known` up to `state`'s and `token`."""
        made = self._made(self._length[state] + 1)
        for column in (self._link, self._token, self._target, self._reached, self._left):
            column[made] = column[known]
        if known in self._others:
            self._others[made] = self._others[known].copy()
        self._link[known] = made
        while state >= 0 and self._next(state, token) == known:
            if self._target[state] == known:
                self._target[state] = made
            else:
                self._others[state][token] = made
            state = self._link[state]
        return made

    def _made(self, length: int) -> int:
        self._length.append(length)
        for column in (self._link, self._token, self._target, self._reached, self._left):
            column.append(0)
        return len(self._length) - 1

    def _count(self, state: int, token: int) -> None:
        """Count that a text's end and its suffixes went on with a token; where it is the most frequent, prefer it."""
        reached, left, link = self._reached, self._left, self._link
        preferred, target, others = self._token, self._target, self._others
        before = 0
        for _ in range(MOST_COUNTED):
            if state <= 0:
                return
            known = preferred[state] == token
            follows = target[state] if known else others[state][token]
            if follows != before:  # several suffixes may lead to one state
                reached[follows] += 1
                before = follows
            left[state] += 1
            if not known and reached[follows] >= reached[target[state]]:
                ways = others[state]
                del ways[token]
                ways[preferred[state]] = target[state]
                preferred[state], target[state] = token, follows
            state = link[state]

    def _next(self, state: int, token: int) -> int:
        """Give the state that a token leads to, 0 where none."""
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return others.get(token, 0) if others else 0

    # --- looking up

    def match(self, tokens: Iterable[int], state: int = 0, matched: int = 0) -> tuple[int, int]:
        """Follow tokens from a match on: the state and length of their longest suffix that stands in any text.

        A match is only good for as long as the index does not grow.
        """
        length, link = self._length, self._link
        for token in tokens:
            follows = self._next(state, token)
            while not follows and state:
                state = link[state]
                matched = length[state]
                follows = self._next(state, token)
            state, matched = (follows, matched + 1) if follows else (0, 0)
        return state, matched

    def match_of_end(self) -> tuple[int, int]:
        """Give the longest suffix of the growing text that stood before."""
        state = max(0, self._link[self.end])
        return state, self._length[state]

    def shorter(self, state: int, matched: int, least: int) -> Iterator[tuple[int, int]]:
        """Give a match, and its suffixes that stood at more places, the longest first, down to `least` tokens."""
        while state > 0 and matched >= least:
            yield state, matched
            state = self._link[state]
            matched = self._length[state]

    def chain(self, state: int, matched: int, most: int, least: float) -> tuple[list[int], float]:
        """Follow the preferred way on from a match.

        The chance of a guess is how often it came here, among all that came: ``n / (N + 1 / m)`` after a match of m
        tokens, so that what was seen once after a short match is worth little.

        Args:
            state, matched: A match, as `match` gives it.
            most: Guesses at most.
            least: What the chance that all guesses are right must not fall below.

        Returns:
            The guesses, and how many of them may be expected to be right.
        """
        tokens: list[int] = []
        chance, expected = 1.0, 0.0
        while len(tokens) < most:
            if state == self.end:  # here the text ends; what followed its longest suffix that stood before?
                state, matched = self.match_of_end()
            follows = self._target[state]
            if not follows or not state:
                break
            chance *= self._chance(state, matched, follows)
            if chance < least:
                break
            tokens.append(self._token[state])
            expected += chance
            state, matched = follows, matched + 1
        return tokens, expected

    def tree(
        self, state: int, matched: int, most: int, least: float, *, deepest: int, branches: int
    ) -> tuple[list[int], list[int], float]:
        """Grow a tree from a match, the likeliest path first (2411.04975, algorithm 1).

        Args:
            state, matched, least: As for `chain`.
            most: Nodes at most.
            deepest: Guesses on a path at most.
            branches: Ways on from a node at most.

        Returns:
            The guesses, each one's parent by its place among them (`ROOT`: the match), and how many may be expected to
            be right.
        """
        tokens: list[int] = []
        parents: list[int] = []
        expected = 0.0
        heap: list[tuple[float, int, int, int, int, int, int]] = []
        node = ROOT, 0, 1.0  # its place, depth and chance
        while True:
            if node[1] < deepest:
                if state == self.end:
                    state, matched = self.match_of_end()
                for rank, (token, follows) in enumerate(self._ways_on(state, branches)):
                    chance = node[2] * self._chance(state, matched, follows)
                    if chance >= least:
                        order = len(tokens) * branches + rank
                        heapq.heappush(heap, (-chance, order, token, follows, matched + 1, node[0], node[1] + 1))
            if not heap or len(tokens) == most:
                return tokens, parents, expected
            lost, _, token, state, matched, parent, depth = heapq.heappop(heap)
            node = len(tokens), depth, -lost
            tokens.append(token)
            parents.append(parent)
            expected -= lost

    def _ways_on(self, state: int, most: int) -> list[tuple[int, int]]:
        """Tokens that followed, and the states they lead to, the most frequent first."""
        follows = self._target[state]
        if not follows or not state:
            return []
        others = self._others.get(state, {})
        if most > 1 and 0 < len(others) <= WIDEST:
            found = heapq.nlargest(most - 1, others.items(), key=lambda way: self._reached[way[1]])
            return [(self._token[state], follows), *found]
        return [(self._token[state], follows)]

    def _chance(self, state: int, matched: int, follows: int) -> float:
        came = self._reached[follows]
        return came / (max(self._left[state], came) + 1 / matched)
