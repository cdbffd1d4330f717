"""How far to draft: whatever gives the whole round the most tokens a second, by measured cost and by agreement so far.

Row i's chain of k guesses gives ``E_i(k) = 1 + a_1 + ... + a_k`` tokens a round, a_j the chance that its first j
guesses all agree. All rows share one pass, as wide as its widest row. So one length K is chosen for all of them, and
which rows take part, to make ``sum of w_i E_i(min(K, most_i)) / seconds(K, who takes part)`` largest; K = 0 is plain
decoding. All estimates look at past rounds alone, so no decision depends on a token that is still to be judged.

The weight w_i is what share of a round a token of row i takes as things go. With tokens counted alike, texts that are
easy to guess would be hurried by rounds that are long for all, and those that are hard would be left, alone and late: a
token that comes cheaply at any time is worth less than one that takes a round. Where rows wait for the next
text's prompt, what a text gives beyond `Party.ceiling` is not counted.

What is not tried is not known, and trying costs. A *probe* lets rows guess which would not otherwise; how often that
may be is a matter of what it loses, by the clock (`outrider.engine.trials`). So probes cost about a percent at worst,
and where guesses turn out right they lose nothing and go on at once. In the same way a plain round is run now and then,
where it is in doubt whether drafting pays at all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from outrider.engine.agreement import Agreement, Outlook, Reputation
from outrider.engine.choice import Choice, TextLength
from outrider.engine.cost import CHAIN, RoundCosts
from outrider.engine.trials import Comparisons, Trials
from outrider.engine.weighing import Weighing, weighed_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.engine.choice import Party, RoundTimes, Wish
    from outrider.sequence import Sequence

__all__ = ["Controller"]

LOYALTY = 1.02  # what the last length is favoured by, so that the choice does not flicker
CERTAIN = 3.0  # deviations between drafting and plain decoding beyond which no plain round is run to compare
STANDS = 8  # rounds for which it is not asked anew, while nobody guesses, whether anybody should


@dataclass
class _Course:
    """How one drafter fared lately.

    Attributes:
        trials, comparisons: Of it.
        last: Its length that was chosen last.
        rows, agreements: Of the last choice.
        rested: For how many rounds it has stood that nobody is to guess.
        accepted: Guesses that turned out right in the round that is being read.
        shares: `Agreement.share` of those, all together.
        upkeep: Seconds that a token of a row costs by what its drafter reads for it, as of those tried last.
    """

    trials: Trials = field(default_factory=Trials)
    comparisons: Comparisons = field(default_factory=Comparisons)
    last: int | None = None
    rows: list[ref[Sequence]] = field(default_factory=list)
    rested: int = STANDS
    agreements: list[Agreement] = field(default_factory=list)
    accepted: int = 0
    shares: float = 0.0
    upkeep: float = 0.0

    def weighed(self, tokens: int) -> float:
        """Give the tokens of the round that is being read, guesses weighed as where lengths are chosen."""
        usual = sum(one.share for one in self.agreements) / max(1, len(self.agreements))
        return tokens + (self.shares / usual - self.accepted if usual else 0.0)

    def has(self, wishes: Seq[Wish]) -> bool:
        """Whether these are the rows of the last choice."""
        same = len(self.rows) == len(wishes)
        return same and all(row() is wish.sequence for row, wish in zip(self.rows, wishes, strict=True))


class Controller:
    """Chooses draft lengths.

    Args:
        costs: What rounds cost.

    Attributes:
        costs: What they are expected to cost by now.
        length: Of texts that ended.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.costs = costs
        self.length = TextLength()
        self._agreements: WeakKeyDictionary[Sequence, dict[str, Agreement]] = WeakKeyDictionary()
        self._reputations: dict[tuple[str, bool], Reputation] = {}
        self._courses: defaultdict[str, _Course] = defaultdict(_Course)  # by drafter
        self._read_ahead = 0.0  # seconds by which the last round was late, since the host asked for what the next reads

    # --- before a round

    def choose(self, party: Party, wishes: Seq[Wish]) -> Choice:
        """Choose each row's guesses, 0 to its most."""
        longest = max((wish.most for wish in wishes), default=0)
        if longest <= 0:
            return Choice([0] * len(wishes))
        course = self._courses[party.drafter]
        if self._stands(course, wishes):
            return Choice(_dealt(wishes, course.agreements, 0, []))
        lengths = weighed_lengths(party.most, longest)
        agreements = self._agreements_of(course, party.drafter, wishes)
        outlooks = [self._outlook(party, wish, one) for wish, one in zip(wishes, agreements, strict=True)]
        plan = Weighing(self.costs, party, wishes, outlooks, agreements, lengths)
        ratio, length, members = self._best(plan, lengths, course.last)
        course.last = length
        if course.comparisons.was_last:
            course.comparisons.goes_on(plan.reading(members))
        probe = reference = False
        if len(members) < len(wishes) and (tried := self._tried(course, plan, length, members)):
            length, members, probe = length or plan.probe_length(), tried, True
        elif length and course.comparisons.due(plan.seconds(0, [])) and self._doubtful(party, length, ratio):
            course.comparisons.begin((1 - 1 / ratio) * plan.seconds(0, []))
            length, members, reference = 0, [], True
        rest = not members and not reference  # after a plain round that was run to compare, guesses go on
        course.rested = 0 if rest else STANDS
        for row in members:
            agreements[row].reading += plan.readings[row]
        return Choice(_dealt(wishes, agreements, length, members, outlooks), probe, reference)

    def _agreements_of(self, course: _Course, drafter: str, wishes: Seq[Wish]) -> list[Agreement]:
        if not course.has(wishes):
            course.rows = [ref(wish.sequence) for wish in wishes]
            course.agreements = [self._agreement(drafter, wish.sequence) for wish in wishes]
        return course.agreements

    @staticmethod
    def _best(plan: Weighing, lengths: list[int], last: int | None) -> tuple[float, int, list[int]]:
        """Give the best length, and for whom, with what it is worth by plain decoding: more than one, or length 0."""
        plain = plan.worth(0, [])
        worth, length, members = max(
            (plan.worth(length, members) * (LOYALTY if length == last else 1), length, members)
            for length in lengths
            for members in plan.memberships(length)
        )
        if worth <= plain * (LOYALTY if last == 0 else 1):
            return 1.0, 0, []
        return worth / plain, length, members

    @staticmethod
    def _tried(course: _Course, plan: Weighing, length: int, members: list[int]) -> list[int] | None:
        """Begin a trial, if one may: those who take part and those who are tried beside them."""
        trials = course.trials
        if plan.in_vain():
            return None
        tried = plan.with_tried(members, trials.turn, trials.trusted)
        untried = any(course.agreements[row].untried for row in tried)
        if not trials.due(untried=untried):
            return None
        foreseen = plan.seconds(length or plan.probe_length(), tried) - plan.seconds(0, []) + plan.reading(tried)
        trials.begin(foreseen, untried=untried)
        course.upkeep = plan.upkeep(tried)
        return tried

    @staticmethod
    def _stands(course: _Course, wishes: Seq[Wish]) -> bool:
        """Whether these rows were not to guess a moment ago; without guesses there is nothing new to think about."""
        if course.rested >= STANDS or course.trials.due(untried=False):
            return False
        course.rested += 1
        return course.has(wishes)

    def _doubtful(self, party: Party, length: int, ratio: float) -> bool:
        """Whether drafting is worth so little more than plain decoding that what rounds cost may decide otherwise."""
        doubt = self.costs.doubt(party.shape(0)) + self.costs.doubt(party.shape(length))
        return ratio - 1 < CERTAIN * doubt

    def _outlook(self, party: Party, wish: Wish, agreement: Agreement) -> Outlook:
        if not party.trees:
            return agreement.outlook(wish.most)
        reputation = self._reputation(party.drafter, wish.sequence)
        places = agreement.outlook(reputation.depth(wish.most)).gain
        gain = [places[min(reputation.depth(nodes), len(places) - 1)] for nodes in range(wish.most + 1)]
        return Outlook([0.0, *gain[1:]], [1.0] * len(gain))

    # --- after it

    def learn(self, sequence: Sequence, drafter: str, asked: int, drafted: int, accepted: int, *, tree: bool) -> None:
        """Take in how a sequence's guesses fared: of `asked` ones (or nodes), `drafted` places were guessed.

        To be told of every round of a sequence, of those without guesses too, after it took in what the round gave.
        """
        if sequence.finished:
            self.length.ended(sequence)
        if not asked:
            return
        if tree:
            self._reputation(drafter, sequence).note_depth(asked, drafted)
        agreement = self._agreement(drafter, sequence)
        agreement.learn(drafted if tree else max(asked, drafted), drafted, accepted)
        course = self._courses[drafter]
        course.accepted += accepted
        course.shares += accepted * agreement.share

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
        for course in self._courses.values():
            course.accepted, course.shares = 0, 0.0
        if times.clean and times.fed:
            self.costs.took_feed(party.drafter, sum(times.fed), party.calls(len(times.fed)), feeding)
        if measured:
            drafting = min(times.drafting, times.seconds)
            self.costs.took_draft(party.drafter, times.rows_asked, times.asked, drafting, drawn=party.drawn)
            self.costs.took_pass(shape, times.seconds - drafting)

    def _passed(self, seconds: float) -> None:
        """Take in that time went by, in which what was lost is earned again."""
        for course in self._courses.values():
            course.trials.passed(seconds)
            course.comparisons.passed(seconds)

    def _read_trial(
        self, party: Party, times: RoundTimes, taken: float, feeding: float, expected: float, plain: float
    ) -> None:
        """Take in what a trial came to: it took so many seconds, of them `feeding` for what was to be read first.

        `expected`, `plain`: what a round of its width takes, and one without guesses.
        """
        course = self._courses[party.drafter]
        useful = min(course.weighed(times.tokens), max(1.0, party.ceiling) * party.num_rows)
        lost = taken - plain * useful / party.num_rows
        gain = (useful - party.num_rows) / max(1, times.rows_asked)  # of each row that took part
        reading = (1 + gain) * party.num_rows * course.upkeep  # again and again, as texts come
        promising = gain * plain > expected - plain + reading
        course.trials.read(lost, feeding, plain, promising=promising, num_rows=party.num_rows)

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


def _dealt(
    wishes: Seq[Wish], agreements: Seq[Agreement], length: int, members: Seq[int], outlooks: Seq[Outlook] = ()
) -> list[int]:
    """Give each row its guesses; the others rest."""
    chosen = [0] * len(wishes)
    for place in members:
        chosen[place] = min(length, wishes[place].most)
    for place, own in enumerate(chosen):
        agreements[place].goes_on(1 + (outlooks[place].gain[own] if own else 0.0))
        if not own:
            agreements[place].rest()
    return chosen
