"""What the controller is asked and told: what rows wish, in which round, what it chose, and what the round took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.cost import CHAIN, PassShape

if TYPE_CHECKING:
    from outrider.sequence import Sequence

__all__ = ["Choice", "Party", "RoundTimes", "TextLength", "Traffic", "Wish"]

FIRST_LENGTH, LENGTH_RATE = 128.0, 0.1  # tokens that a text is held to become before any ended; weight of the last one


class TextLength:
    """How long texts become, by those that ended lately.

    Attributes:
        tokens: Of a text, generated.
    """

    def __init__(self) -> None:
        self.tokens = FIRST_LENGTH

    def ended(self, sequence: Sequence) -> None:
        """Take in a text that has ended: one cut off at the length that it was allowed says no more than that."""
        told, reason = sequence.num_generated, sequence.finish_reason
        if reason == "stop" or (reason == "length" and told > self.tokens):
            self.tokens += LENGTH_RATE * (told - self.tokens)


@dataclass(frozen=True)
class Wish:
    """What a row could use.

    Attributes:
        sequence: Whose row.
        most: Guesses that it may be given.
        lag: Tokens that its drafter must read before it can guess for it.
        usual: Tokens that a text becomes long, see `TextLength`.
    """

    sequence: Sequence
    most: int
    lag: int = 0
    usual: float = FIRST_LENGTH

    @property
    def ends_with(self) -> int:
        """Guesses with which the text would be as long as it may be."""
        return self.sequence.limit - len(self.sequence) - 1

    @property
    def in_all(self) -> float:
        """Tokens that the whole text is expected to have: as many as usual, or twice what it has, if it may."""
        so_far = self.sequence.num_generated
        return min(so_far + self.ends_with + 1, max(self.usual, 2 * so_far, 1))

    @property
    def left(self) -> float:
        """Tokens that are expected to come, one at least."""
        return max(1.0, self.in_all - self.sequence.num_generated)


@dataclass(frozen=True)
class Traffic:
    """What is read beside rounds, and who comes after it.

    Attributes:
        turnover: Rounds beside which the prompts of all others that run are read; 0 unless texts wait for that.
        coming: Rows that are not there yet, but will be soon: their prompts are being read.
    """

    turnover: float = 0.0
    coming: int = 0


@dataclass(frozen=True)
class Party:
    """A drafter and the round that it drafts in.

    Attributes:
        drafter: Its name.
        num_rows: Rows of the round, those of others included.
        most: Guesses of an ordinary round at most: with `DRAFT_LENGTHS`, what there is to choose from.
        trees: Whether guesses are trees.
        inside: Whether the pass makes them itself (a captured round).
        narrows: Whether the pass is cut to the longest proposal.
        drawn: Whether any row of the round draws its tokens.
        context: Tokens of a row, on average.
        floor: Guesses that the pass is as wide as in any case.
        ceiling: Tokens a round of a row that are of use: with more, its text ends before the next one's prompt is read,
            and the row stands idle. Without end where no texts come.
        coming: As `Traffic.coming`.
    """

    drafter: str
    num_rows: int
    most: int
    trees: bool = False
    inside: bool = False
    narrows: bool = False
    drawn: bool = False
    context: int = 0
    floor: int = 0
    ceiling: float = math.inf
    coming: int = 0

    def shape(self, num_tokens: int) -> PassShape:
        """The pass with so many guesses."""
        kind = self.drafter if num_tokens and (self.trees or self.inside) else CHAIN
        return PassShape(self.num_rows, num_tokens, kind, self.drawn, self.context)

    @property
    def rows_soon(self) -> int:
        """Rows as soon as prompts are read."""
        return self.num_rows + self.coming

    @property
    def relieved(self) -> bool:
        """Whether texts follow upon each other: a row is taken by the next one as soon as its own is over."""
        return self.ceiling < math.inf

    @property
    def late(self) -> bool:
        """Whether a row stands idle for a round once its text has ended: the host sees it a round later.

        One that is alone is waited for. Of texts of eight tokens, four at a time, it is a ninth of the plain rounds,
        and a third of those with so many guesses that two are enough.
        """
        return self.inside and self.num_rows > 1

    def calls(self, num_lagging: int) -> int:
        """In how many calls the drafter reads what so many rows lack: on a card they are read together."""
        return min(1, num_lagging) if self.inside else num_lagging


@dataclass(frozen=True)
class Choice:
    """Guesses for each row, and whether any of it is for the sake of knowledge alone."""

    lengths: list[int]
    probe: bool = False
    reference: bool = False


@dataclass(frozen=True)
class RoundTimes:
    """What a round took, by the host's clock.

    Attributes:
        seconds: In all, but for what drafters read before it, where that was timed apart.
        drafting: Of these, for guesses made outside of the pass.
        feeding: For what drafters read before it. On a card, where the host runs ahead, that is the time to ask for it.
        width: Guesses that the pass was as wide as.
        asked: Guesses that the drafter was asked for, and for how many rows.
        rows_asked: See `asked`.
        tokens: Tokens that texts took of it, all together: none behind their ends, nor those of rows that were over.
        clean: Whether nothing else was done in that time.
        fed: Tokens that drafters read before it, of each row that lacked some.
        apart: Whether that was timed apart.
        delayed: Whether the host asked for what drafters read before the next round, before it saw this one's end.
    """

    seconds: float
    drafting: float
    feeding: float
    width: int
    asked: int
    rows_asked: int
    tokens: int
    clean: bool = True
    fed: tuple[int, ...] = ()
    apart: bool = True
    delayed: bool = False
