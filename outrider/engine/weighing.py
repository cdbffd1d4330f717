"""What a round would give and cost with this or that many guesses, for these or those rows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from outrider.engine.cost import DRAFT_LENGTHS

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.engine.agreement import Agreement, Outlook
    from outrider.engine.choice import Party, Wish
    from outrider.engine.cost import RoundCosts

__all__ = ["Weighing", "weighed_lengths"]

UNSTEADY = 0.3  # deviations by which the last row is late, for each doubling of their number
TOGETHER = 256  # tokens that a row gives at least, in one text or several, until others are waited for
AHEAD = 2.0  # plain rounds with all who are coming, that are weighed with a round of those who are there
PROBE_SLACK = 1.25  # a probe is as long as can be for so much more than the shortest one costs


def weighed_lengths(most: int, longest: int) -> list[int]:
    """Give the lengths to choose from: those that are captured on a card, up to the first that is long enough."""
    every = sorted({length for length in (*DRAFT_LENGTHS, most) if length})
    return [length for place, length in enumerate(every) if place == 0 or every[place - 1] < longest]


class Weighing:
    """Weighs one round's possibilities.

    Attributes:
        readings: Seconds for what each row's drafter must read before it can guess.
    """

    def __init__(
        self,
        costs: RoundCosts,
        party: Party,
        wishes: Seq[Wish],
        outlooks: Seq[Outlook],
        agreements: Seq[Agreement],
        lengths: list[int],
    ) -> None:
        self._costs, self._party, self._wishes, self._outlooks = costs, party, wishes, outlooks
        self._lengths = lengths
        self._ends, self._in_all = [wish.ends_with for wish in wishes], [wish.in_all for wish in wishes]
        self._gains, self._late = [one.gain for one in outlooks], party.late
        shares = [one.share for one in agreements]
        self._weights = [one * len(shares) / sum(shares) for one in shares]
        # What is to be read first is spread over all that the row is still to say; calls are shared by those who lag.
        lagging = sum(wish.lag > 0 for wish in wishes)
        calls = party.calls(lagging) / max(1, lagging)
        self.readings = [costs.feed_seconds(party.drafter, wish.lag, calls) if wish.lag else 0.0 for wish in wishes]
        self._spread = [one / wish.left for one, wish in zip(self.readings, wishes, strict=True)]  # on tokens to come
        if party.relieved:
            # Texts follow upon each other, and what was read for one will be for the next: it is not to be had for
            # nothing, though it is there by now.
            paid = [one.reading / in_all for one, in_all in zip(agreements, self._in_all, strict=True)]
            self._spread = [max(pair) for pair in zip(self._spread, paid, strict=True)]
        self._passes: dict[tuple[int, int], float] = {}  # by guesses and rows: asked for again and again, as the next
        self._waits: dict[int, float] = {}

    def memberships(self, length: int) -> list[list[int]]:
        """Who may take part: all rows, or some of those that gain most. Captured rounds cost the same in any case."""
        if self._party.inside:
            return [list(range(len(self._wishes)))]
        order = sorted(range(len(self._wishes)), key=lambda row: self._weights[row] * (1 - self._pace(row, length)))
        counts, count = {len(order)}, len(order)
        while count > 1:
            count = (count + 1) // 2
            counts.add(count)
        return [order[:count] for count in sorted(counts)]

    def worth(self, length: int, members: Seq[int]) -> float:
        """Tokens a second, weighed by what they take as things go; while prompts are read, with what follows on that.

        As long as few rows run, a token takes longer than it will when all run together. What one saves is what it
        would take then: with guesses that ten rows make while others' prompts are read, hardly anything is gained.
        """
        tokens, seconds = self._given(length, members, self._party.num_rows)
        later, then = self._later
        return (tokens + later) / (seconds + then)

    def _given(self, length: int, members: Seq[int], rows: int) -> tuple[float, float]:
        """Tokens of a round and seconds, if there were so many rows like those that there are."""
        party, ceiling = self._party, self._party.ceiling
        others = party.num_rows - len(self._wishes)
        tokens, reading = others * min(1.0, ceiling) + sum(self._plain), 0.0
        for row in members:
            pace = self._pace(row, length)
            tokens += self._weights[row] * (min(pace, ceiling) - self._plain[row])
            reading += self._spread[row] * pace
        more = rows / party.num_rows
        seconds = self._seconds(length, members, rows) + more * reading
        return more * tokens, seconds * self._unsteady(length)

    @cached_property
    def _plain(self) -> list[float]:
        """Tokens of a round without guesses, of each row."""
        return [min(self._pace(row, 0), self._party.ceiling) for row in range(len(self._wishes))]

    @cached_property
    def _later(self) -> tuple[float, float]:
        """Tokens and seconds of some rounds with all who are coming, at the best rate that there is for them."""
        party = self._party
        if not party.coming:
            return 0.0, 0.0
        every = [(one, members) for one in self._lengths for members in self.memberships(one)]
        given = [self._given(*one, party.rows_soon) for one in [(0, []), *every]]
        then = AHEAD * self._pass(party.floor, party.rows_soon)
        return then * max(tokens / seconds for tokens, seconds in given), then

    def seconds(self, length: int, members: Seq[int]) -> float:
        """Seconds of the round, without what is to be read before."""
        return self._seconds(length, members, self._party.num_rows)

    def _seconds(self, length: int, members: Seq[int], rows: int) -> float:
        party, floor = self._party, self._party.floor
        drafting_for = round(len(members) * rows / party.num_rows)
        drafting = self._costs.draft_seconds(party.drafter, drafting_for, length, drawn=party.drawn)
        if not party.narrows or length <= floor:
            return drafting + self._pass(max(length, floor), rows)
        begin, seconds = floor, self._pass(floor, rows)
        taken = drafting + seconds
        for end in self._lengths:
            if begin < end <= length:
                wider = self._pass(end, rows)
                taken += (wider - seconds) * self._reached(begin + 1, members)
                begin, seconds = end, wider
        return taken

    def _pass(self, length: int, rows: int) -> float:
        key = length, rows
        if key not in self._passes:
            self._passes[key] = self._costs.pass_seconds(replace(self._party.shape(length), num_rows=rows))
        return self._passes[key]

    def in_vain(self) -> bool:
        """Whether no guesses could pay, even if all were right: rows wait for the next one's prompt in any case."""
        if not self._party.relieved:
            return False
        everybody, ceiling = range(len(self._wishes)), self._party.ceiling
        plain = self.seconds(0, []) / min(1.0, ceiling)
        return all(min(1.0 + one, ceiling) * plain < self.seconds(one, everybody) for one in self._lengths)

    def probe_length(self) -> int:
        """As many guesses as cost hardly more than one does."""
        everybody = range(len(self._wishes))
        plain = self.seconds(0, [])
        least = self.seconds(self._lengths[0], everybody) - plain
        most = PROBE_SLACK * max(least, 0.0)
        return max(
            (one for one in self._lengths if self.seconds(one, everybody) - plain <= most), default=self._lengths[0]
        )

    def with_tried(self, members: Seq[int], turn: int, count: int) -> list[int]:
        """Add those that are to be tried: `count` rows more, and all that cost hardly more than that."""
        others = [row for row in range(len(self._wishes)) if row not in members]
        begin = turn % len(others)
        tried = [*others[begin:], *others[:begin]][:count]
        least = self.seconds(self._lengths[0], tried) - self.seconds(0, []) + self.reading(tried)
        most = (PROBE_SLACK - 1) * least / len(others)
        return [*members, *tried, *(row for row in others if row not in tried and self._reading(row) <= most)]

    def reading(self, members: Seq[int]) -> float:
        """Seconds until the drafters of these rows have read what they lack."""
        lags = [lag for row in members if (lag := self._wishes[row].lag)]
        return self._costs.feed_seconds(self._party.drafter, sum(lags), self._party.calls(len(lags)))

    def upkeep(self, members: Seq[int]) -> float:
        """Seconds that a token of one of these rows costs by what their drafters read for them."""
        return sum(self._spread[row] for row in members) / len(members)

    def _reading(self, row: int) -> float:
        """Seconds until a row's drafter has read what it lacks; on a card, beside others that are read in any case."""
        calls = self._party.calls(2) - self._party.calls(1)
        return self._costs.feed_seconds(self._party.drafter, self._wishes[row].lag, calls)

    def _pace(self, row: int, length: int) -> float:
        """Tokens a round of a row; where the host sees late that a text has ended, one round more is counted for it.

        A text that ends with its guesses saves about half a round.
        """
        gain = self._gains[row]
        last = len(gain) - 1
        pace = 1 + gain[min(length, last)]
        if 0 < last <= length and self._ends[row] <= last:
            pace += (gain[last] - gain[last - 1]) * pace / 2
        return pace / (1 + pace / self._in_all[row]) if self._late else pace

    def _unsteady(self, length: int) -> float:
        """By what a round's seconds are to be held for longer, since rows side by side do not end together.

        With many guesses a round gives now one token and now nine, so that some rows need more rounds than others for
        as many tokens, and those stand idle while the last is waited for. Of R rows that one is about 0.4 deviations
        behind the mean for each doubling of R; some of it counts, as it is not always waited for.
        """
        if not length or self._party.num_rows == 1:
            return 1.0
        if length not in self._waits:
            variance = tokens = 0.0
            for gain in self._gains:
                last = min(length, len(gain) - 1)
                most = gain[last]
                variance += max(0.0, (2 * last - 1) * most - 2 * sum(gain[:last]) - most * most)
                tokens += 1 + most
            whole = sum(max(TOGETHER, one) for one in self._in_all)
            deviation = math.sqrt(len(self._gains) * variance / (whole * tokens))  # as a share of the rounds
            self._waits[length] = 1 + UNSTEADY * math.log2(self._party.num_rows) * deviation
        return self._waits[length]

    def _reached(self, place: int, members: Seq[int]) -> float:
        """The chance that any of these rows guesses as far as a place."""
        none = 1.0
        for row in members:
            wide = self._outlooks[row].wide
            none *= 1 - wide[place] if place < len(wide) else 1.0
            if not none:
                break
        return 1 - none
