"""How far to draft: whatever gives the whole round the most tokens a second, by measured cost and by agreement so far.

Row i's chain of k guesses gives ``E_i(k) = 1 + a_1 + ... + a_k`` tokens a round, a_j the chance that its first j
guesses all agree. All rows share one pass, as wide as its widest row. So one length K is chosen for all of them, and
which rows take part, to make ``sum of w_i E_i(min(K, most_i)) / seconds(K, who takes part)`` largest; K = 0 is plain
decoding. All estimates look at past rounds alone, so no decision depends on a token that is still to be judged.

The weight w_i is what share of a round a token of row i takes as things go. With tokens counted alike, texts that are
easy to guess would be hurried by rounds that are long for all, and those that are hard would be left, alone and late: a
token that comes cheaply at any time is worth less than one that takes a round.

What is not tried is not known, and trying costs. A *probe* lets rows guess which would not otherwise; how often that
may be is a matter of what it loses, by the clock (`outrider.engine.trials`). So probes cost about a percent at worst,
and where guesses turn out right they lose nothing and go on at once. In the same way a plain round is run now and then,
where it is in doubt whether drafting pays at all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from outrider.engine.agreement import Agreement, Outlook, Reputation
from outrider.engine.cost import CHAIN, PassShape, RoundCosts
from outrider.engine.trials import Trials
from outrider.engine.weighing import Weighing, weighed_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.sequence import Sequence

__all__ = ["Choice", "Controller", "Party", "RoundTimes", "Wish"]

REFERENCE_SHARE = 0.005  # of the time that may be lost by plain rounds, where drafting seems to pay
FIRST_REFERENCE = 32  # rounds before the first of these: a short text is better used
LOYALTY = 1.02  # what the last length is favoured by, so that the choice does not flicker
CERTAIN = 3.0  # deviations between drafting and plain decoding beyond which no plain round is run to compare
STANDS = 8  # rounds for which it is not asked anew, while nobody guesses, whether anybody should
SOONEST_END = 64  # tokens that a text is expected to go on for, at least, if it may


@dataclass(frozen=True)
class Wish:
    """What a row could use.

    Attributes:
        sequence: Whose row.
        most: Guesses that it may be given.
        lag: Tokens that its drafter must read before it can guess for it.
    """

    sequence: Sequence
    most: int
    lag: int = 0

    @property
    def ends_with(self) -> int:
        """Guesses with which the text would be as long as it may be."""
        return self.sequence.limit - len(self.sequence) - 1

    @property
    def in_all(self) -> int:
        """Tokens of the whole text, if it becomes as long as it may be."""
        return max(1, self.sequence.limit - len(self.sequence) + self.sequence.num_generated)

    @property
    def left(self) -> int:
        """Tokens to come: as many as it may have, but a text is not expected to become more than twice as long."""
        one = self.sequence
        return max(1, min(one.limit - len(one), max(one.num_generated, SOONEST_END)))


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

    def shape(self, num_tokens: int) -> PassShape:
        """The pass with so many guesses."""
        kind = self.drafter if num_tokens and (self.trees or self.inside) else CHAIN
        return PassShape(self.num_rows, num_tokens, kind, self.drawn, self.context)

    @property
    def late(self) -> bool:
        """Whether a row stands idle for a round once its text has ended with guesses: the host sees it a round later.

        Where a text ends without guesses is known before, and one that is alone is waited for. Texts of eight tokens,
        four at a time, take three and a half rounds for two with three guesses each.
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
        tokens: Tokens that it gave, all rows together.
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


class Controller:
    """Chooses draft lengths.

    Args:
        costs: What rounds cost.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self._agreements: WeakKeyDictionary[Sequence, dict[str, Agreement]] = WeakKeyDictionary()
        self._reputations: dict[tuple[str, bool], Reputation] = {}
        self._last: dict[str, int] = {}  # by drafter, the length chosen last
        self._trials: defaultdict[str, Trials] = defaultdict(Trials)  # by drafter
        self._owed_plain: dict[str, float] = {}  # by drafter, seconds that plain rounds lost and are to be earned again
        self._compared: set[str] = set()  # drafters whose last round was a plain one for the sake of knowledge
        self._settled: dict[str, tuple[list[int], int]] = {}  # by drafter, who was not to guess, and since when
        self._read_ahead = 0.0  # seconds by which the last round was late, since the host asked for what the next reads

    # --- before a round

    def choose(self, party: Party, wishes: Seq[Wish]) -> Choice:
        """Choose each row's guesses, 0 to its most."""
        longest = max((wish.most for wish in wishes), default=0)
        if longest <= 0:
            return Choice([0] * len(wishes))
        if self._stands(party, wishes):
            return Choice(self._dealt(party, wishes, 0, []))
        lengths = weighed_lengths(party.most, longest)
        outlooks = [self._outlook(party, wish) for wish in wishes]
        paces = [self._agreement(party.drafter, wish.sequence).pace for wish in wishes]
        plan = Weighing(self.costs, party, wishes, outlooks, paces, lengths)
        plain = plan.worth(0, [])
        self._owed_plain.setdefault(party.drafter, FIRST_REFERENCE * REFERENCE_SHARE * plan.seconds(0, []))
        best = max(
            (plan.worth(length, members) * (LOYALTY if length == self._last.get(party.drafter) else 1), length, members)
            for length in lengths
            for members in plan.memberships(length)
        )
        worth, length, members = best
        if worth <= plain * (LOYALTY if self._last.get(party.drafter) == 0 else 1):
            worth, length, members = plain, 0, []
        self._last[party.drafter] = length
        if party.drafter in self._compared:  # and what was not guessed then is to be read now
            self._owed_plain[party.drafter] += plan.reading(members)
            self._compared.discard(party.drafter)
        probe = reference = False
        if len(members) < len(wishes) and (tried := self._tried(party, plan, wishes, length, members)):
            length, members, probe = length or plan.probe_length(), tried, True
        elif length and self._doubtful(party, length, worth / plain):
            self._owed_plain[party.drafter] = (1 - plain / worth) * plan.seconds(0, [])
            length, members, reference = 0, [], True
            self._compared.add(party.drafter)
        stands = not members and not reference  # after a plain round that was run to compare, guesses go on
        self._settled[party.drafter] = [id(wish.sequence) for wish in wishes], 0 if stands else STANDS
        return Choice(self._dealt(party, wishes, length, members, outlooks), probe, reference)

    def _tried(
        self, party: Party, plan: Weighing, wishes: Seq[Wish], length: int, members: list[int]
    ) -> list[int] | None:
        """Begin a trial, if one may: those who take part and those who are tried beside them."""
        trials = self._trials[party.drafter]
        tried = plan.with_tried(members, trials.turn, trials.trusted)
        untried = any(self._agreement(party.drafter, wishes[row].sequence).untried for row in tried)
        if not trials.due(untried=untried):
            return None
        foreseen = plan.seconds(length or plan.probe_length(), tried) - plan.seconds(0, []) + plan.reading(tried)
        trials.begin(foreseen, untried=untried)
        return tried

    def _stands(self, party: Party, wishes: Seq[Wish]) -> bool:
        """Whether these rows were not to guess a moment ago; without guesses there is nothing new to think about."""
        rows, rounds = self._settled.get(party.drafter, ([], STANDS))
        if rounds >= STANDS or rows != [id(one.sequence) for one in wishes]:
            return False
        if self._trials[party.drafter].due(untried=False):
            return False
        self._settled[party.drafter] = rows, rounds + 1
        return True

    def _dealt(
        self, party: Party, wishes: Seq[Wish], length: int, members: Seq[int], outlooks: Seq[Outlook] = ()
    ) -> list[int]:
        """Give each row its guesses; the others rest."""
        chosen = [0] * len(wishes)
        for place in members:
            chosen[place] = min(length, wishes[place].most)
        for place, own in enumerate(chosen):
            agreement = self._agreement(party.drafter, wishes[place].sequence)
            agreement.goes_on(1 + (outlooks[place].gain[own] if own else 0.0))
            if not own:
                agreement.rest()
        return chosen

    def _doubtful(self, party: Party, length: int, ratio: float) -> bool:
        """Whether it is time to run a plain round, to see that drafting is indeed worth more."""
        if self._owed_plain.get(party.drafter, 0.0) > 0:
            return False
        doubt = self.costs.doubt(party.shape(0)) + self.costs.doubt(party.shape(length))
        return ratio - 1 < CERTAIN * doubt

    def _outlook(self, party: Party, wish: Wish) -> Outlook:
        agreement = self._agreement(party.drafter, wish.sequence)
        if not party.trees:
            return agreement.outlook(wish.most)
        reputation = self._reputation(party.drafter, wish.sequence)
        places = agreement.outlook(reputation.depth(wish.most)).gain
        gain = [places[min(reputation.depth(nodes), len(places) - 1)] for nodes in range(wish.most + 1)]
        return Outlook([0.0, *gain[1:]], [1.0] * len(gain))

    # --- after it

    def learn(self, sequence: Sequence, drafter: str, asked: int, drafted: int, accepted: int, *, tree: bool) -> None:
        """Take in how a sequence's guesses fared: of `asked` ones (or nodes), `drafted` places were guessed."""
        if not asked:
            return
        if tree:
            self._reputation(drafter, sequence).note_depth(asked, drafted)
        self._agreement(drafter, sequence).learn(drafted if tree else max(asked, drafted), drafted, accepted)

    def took(self, party: Party, choice_was_probe: bool, times: RoundTimes) -> None:
        """Take in what a round took."""
        shape = party.shape(times.width)
        plain = self.costs.pass_seconds(replace(shape, num_tokens=0, kind=CHAIN))
        expected = self.costs.draft_seconds(party.drafter, times.rows_asked, times.asked, drawn=party.drawn)
        expected += self.costs.pass_seconds(shape)
        measured = times.clean and (times.apart or not (times.fed or times.delayed))
        feeding = self._feeding(party, times, expected)
        seconds = times.seconds if measured else expected if times.clean else plain
        self._passed(seconds)
        if choice_was_probe:
            self._read_trial(party, times, (seconds if times.clean else expected) + feeding, feeding, expected, plain)
        if times.clean and times.fed:
            self.costs.took_feed(party.drafter, sum(times.fed), party.calls(len(times.fed)), feeding)
        if measured:
            drafting = min(times.drafting, times.seconds)
            self.costs.took_draft(party.drafter, times.rows_asked, times.asked, drafting, drawn=party.drawn)
            self.costs.took_pass(shape, times.seconds - drafting)

    def _passed(self, seconds: float) -> None:
        """Take in that time went by, in which what was lost is earned again."""
        for trials in self._trials.values():
            trials.passed(seconds)
        for name, owed in self._owed_plain.items():
            self._owed_plain[name] = max(0.0, owed - REFERENCE_SHARE * seconds)

    def _read_trial(
        self, party: Party, times: RoundTimes, taken: float, feeding: float, expected: float, plain: float
    ) -> None:
        """Take in what a trial came to: it took so many seconds, of them `feeding` for what was to be read first.

        `expected`, `plain`: what a round of its width takes, and one without guesses.
        """
        lost = taken - plain * times.tokens / party.num_rows
        gain = (times.tokens - party.num_rows) / max(1, times.rows_asked)  # of each row that took part
        promising = gain * plain > expected - plain
        self._trials[party.drafter].read(lost, feeding, plain, promising=promising, num_rows=party.num_rows)

    def _feeding(self, party: Party, times: RoundTimes, expected: float) -> float:
        """Seconds for what drafters read before a round; where the host does not wait for it, by what was late for it.

        On a card both the host and the device are busy with it: while the host asks for it, the round before is not
        read; and the device comes to the round itself afterwards. Where something else was done too, it is what this
        much reading takes as a rule.
        """
        ahead, self._read_ahead = self._read_ahead, 0.0
        if times.apart:
            return times.feeding
        if not times.clean:
            calls = party.calls(len(times.fed))
            return max(times.feeding, self.costs.feed_seconds(party.drafter, sum(times.fed), calls))
        late = max(0.0, times.seconds - expected)
        if times.fed:
            return ahead + late
        if times.delayed:
            self._read_ahead = late
        return 0.0

    def _agreement(self, drafter: str, sequence: Sequence) -> Agreement:
        known = self._agreements.setdefault(sequence, {})
        if drafter not in known:
            known[drafter] = Agreement(self._reputation(drafter, sequence))
        return known[drafter]

    def _reputation(self, drafter: str, sequence: Sequence) -> Reputation:
        """Greedy and drawn text are two: guesses for the one say little of guesses for the other."""
        key = drafter, sequence.request.params.temperature > 0
        return self._reputations.setdefault(key, Reputation())
