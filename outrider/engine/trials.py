"""When guesses are tried that do not seem to pay: what is not tried is not known, and trying costs.

What a trial lost must first be earned again: the next one comes when that is a hundredth of the time that has passed
since. A text that was never tried waits half as long (what is owed still then is added to what that one loses), and is
tried a few times in a row where most of what the first one lost was the drafter's reading: one wrong guess says little,
and what was read is there for the others.

Where guesses turn out right, more rows are tried at once, and without a wait as long as they go on being right: when
the traffic has changed, what is true of one is true of others. What such a row of trials lost is earned again after its
end, but for a very long one: or nothing would be tried for minutes. How many must be right is a matter of what guesses
cost: with sixteen rows one of them nearly always is.
"""

from __future__ import annotations

__all__ = ["Comparisons", "Trials"]

PROBE_SHARE = 0.01  # of the time that may be lost by trying what does not pay
UNTRIED_SHARE = 0.5  # of what was lost that may be owed still when a text is tried for the first time
MOST_MORE = 2  # trials of a text in a row after its first
UNREAD = 0.01  # seconds that are owed at least until a trial is read
REFERENCE_SHARE = 0.005  # of the time that may be lost by plain rounds, where drafting seems to pay
FIRST_REFERENCE = 32  # rounds before the first of these: a short text is better used
MOST_ROW = 4.0  # times what the dearest of a row of trials lost, that the whole row is held to have lost at most
MOST_BLAME = 4.0  # times what a trial may lose: beyond it was something else, as a compilation or a neighbour


class Comparisons:
    """Plain rounds that are run where guesses seem to pay a little, to see that they do.

    They cost what the guesses would have gained, and what drafts have to read after them.

    Attributes:
        was_last: Whether the round before was one.
    """

    def __init__(self) -> None:
        self._owed: float | None = None  # seconds that were lost and time has not earned again; None before the first
        self.was_last = False

    def due(self, plain: float) -> bool:
        """Whether one may be run; `plain`: seconds that it takes."""
        if self._owed is None:
            self._owed = FIRST_REFERENCE * REFERENCE_SHARE * plain
        return self._owed <= 0

    def begin(self, lost: float) -> None:
        """One is run, which loses so many seconds."""
        self._owed, self.was_last = lost, True

    def goes_on(self, reading: float) -> None:
        """Take in that another round follows it, before which drafts read for so many seconds."""
        self._owed = (self._owed or 0.0) + reading
        self.was_last = False

    def passed(self, seconds: float) -> None:
        """Take in that time went by."""
        if self._owed is not None:
            self._owed = max(0.0, self._owed - REFERENCE_SHARE * seconds)


class Trials:
    """The trials of one drafter.

    Attributes:
        turn: Whose turn it is to be tried.
        trusted: How many are tried at once.
    """

    def __init__(self) -> None:
        self.turn, self.trusted = 0, 1
        self._owed = 0.0  # seconds that were lost and time has not earned again
        self._last = 0.0  # what the last one owed when it was read
        self._foreseen = 0.0  # seconds that a trial may lose, as expected or as seen
        self._spent, self._dearest = 0.0, 0.0  # what those in a row have lost so far, and the dearest of them
        self._more = 0  # how many may follow
        self._carried = 0.0  # what was owed still when they began

    def due(self, *, untried: bool) -> bool:
        """Whether one may begin; `untried`: of a text that had none before, which has to wait half as long."""
        return self._owed <= (UNTRIED_SHARE * self._last if untried else 0.0)

    def begin(self, foreseen: float, *, untried: bool = False) -> None:
        """One begins, expected to lose so many seconds; until it is read, no other does.

        `untried`: it is of a text that had none before.
        """
        self._more = self._more - 1 if self._more else MOST_MORE if untried else 0
        self._foreseen = max(foreseen, self._foreseen)
        self._carried += self._owed
        self._owed, self._last = max(foreseen, UNREAD), 0.0

    def passed(self, seconds: float) -> None:
        """Take in that time went by."""
        self._owed = max(0.0, self._owed - PROBE_SHARE * seconds)

    def read(self, lost: float, feeding: float, plain: float, *, promising: bool, num_rows: int) -> None:
        """Take in what one came to.

        Args:
            lost: Seconds, by what plain rounds would have taken for its tokens.
            feeding: Of these, for what the drafter had to read first.
            plain: Seconds of a plain round.
            promising: Whether a round would have paid in which all rows had gained as much as those that took part.
            num_rows: Rows of the round.
        """
        lost = self._believed(lost, plain)
        self._dearest = max(self._dearest, lost)
        self._spent = min(self._spent + lost, MOST_ROW * self._dearest)
        if promising:
            self.trusted, self._more = min(2 * self.trusted, num_rows), max(1, self._more)
        if self._more and (promising or feeding == 0 or 2 * feeding > lost):
            self._owed = 0.0
            return
        if not promising:
            self.turn, self.trusted = self.turn + 1, 1
        self._owed = self._last = max(0.0, self._spent + self._carried)
        self._spent, self._dearest, self._carried, self._more = 0.0, 0.0, 0.0, 0

    def _believed(self, lost: float, plain: float) -> float:
        """Give what one is held to have lost: what nobody expected is believed when it comes again."""
        lost = min(lost, MOST_BLAME * max(self._foreseen, plain))
        self._foreseen = max(0.0, lost)
        return lost
