"""The choice of draft lengths: simulated rounds for what it gains, real ones for what it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.regret_figures import Cell
from benchmarks.regret_simulation import COSTS, Costs
from benchmarks.round_simulation import Machine, Text, compared, run
from outrider import LLM, SamplingParams
from outrider.engine.choice import Choice, Party, RoundTimes, TextLength, Traffic, Wish
from outrider.engine.controller import Controller
from outrider.engine.cost import CHAIN, Grid, PassShape, RoundCosts
from outrider.engine.trials import Trials
from tests.scripted import generate_together
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AGREEMENTS = (0.0, 0.3, 0.6, 0.8, 0.95)


def card() -> Machine:
    """An 8B and a 1B as measured on an H100, milliseconds: drafting is part of the pass."""
    plain = lambda rows: 5.66 + 0.036 * (rows - 1)  # noqa: E731
    wide = lambda rows: 0.03 + 0.012 * rows  # noqa: E731
    return Machine(plain, wide, draft=1.08, call=1.0, inside=True, noise=0.02)


def reading_card() -> Machine:
    """The same on an H200, after prompts of 200 tokens that target and draft read."""
    wide = {1: 0.0, 2: 0.05, 4: 0.12, 8: 0.35, 16: 0.68}
    return Machine(
        lambda rows: 4.19 + 0.03 * (rows - 1),
        lambda rows: wide[1 << (rows - 1).bit_length()],
        draft=0.91, call=1.6, token=0.0045, inside=True, noise=0.01, prompt=200, busy=7.4,
    )  # fmt: skip


def cpu() -> Machine:
    """A draft at a fifth of its target; a pass that costs by the token when many rows share it."""
    return Machine(lambda rows: 0.98 + 0.02 * rows, lambda rows: 0.01 + 0.03 * rows, draft=0.2, call=0.6, noise=0.1)


def lookup() -> Machine:
    """Guesses for nothing, half of the time."""
    return Machine(lambda rows: 0.98 + 0.02 * rows, lambda rows: 0.01 + 0.03 * rows, 0.002, makes=0.5, noise=0.1)


def texts(agreement: float | str, length: int, count: int) -> Callable[[], list[Text]]:
    each = AGREEMENTS if agreement == "mixed" else (agreement,)
    return lambda: [Text(each[place % len(each)], length, seed=place) for place in range(count)]  # type: ignore[arg-type]


def of_the_best(
    machine: Callable[[], Machine], rows: int, agreement: float, length: int, *, seeds: int, lengths: tuple[int, ...],
    count: int = 128, apart: bool = False,
) -> float:  # fmt: skip
    """Give auto's speed over that of the best of some fixed lengths, in the second turn of as many texts.

    Those that are equally long and begin together keep step as long as nobody guesses; with `apart` they do not.
    """
    ratios = []

    def coming(seed: int, turn: int) -> list[Text]:
        first = 1000 * (10 * seed + turn)
        sizes = Cell(rows, length, 0.0, agreement).lengths(count, apart=apart, seed=first)
        return [Text(agreement, size, seed=first + at) for at, size in enumerate(sizes)]

    for seed in range(seeds):
        controller = Controller(machine().profile(rows))
        run(machine(), coming(seed, 0), rows, controller)
        auto = run(machine(), coming(seed, 1), rows, controller)
        ratios.append(auto / max(run(machine(), coming(seed, 1), rows, fixed=one) for one in lengths))
    return sum(ratios) / len(ratios)


def by_plain(machine: Callable[[], Machine], agreement: float, length: int, count: int, rows: int) -> float:
    """Give auto's speed over plain decoding's, of the second to fourth turn of as many texts each."""
    one, gained = machine(), []
    controller = Controller(one.profile(rows))
    for turn in range(4):
        coming = lambda: [Text(agreement, length, seed=1000 * turn + place) for place in range(count)]  # noqa: B023, E731
        gained.append(run(one, coming(), rows, controller) / run(machine(), coming(), rows, fixed=0))
    return sum(gained[1:]) / 3


# --- what is gained


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("machine", [card, cpu, lookup])
def test_one_text_is_as_fast_as_by_the_best_fixed_length(machine: Callable[[], Machine], agreement: float) -> None:
    """An engine that was just started: what it has to find out is part of this."""
    found = compared(machine, texts(agreement, 64, 32), 1)
    assert min(found.values()) > 0.95


@pytest.mark.parametrize("agreement", [0.0, 0.95])
@pytest.mark.parametrize("machine", [card, cpu, lookup])
def test_so_are_many_and_short_ones(machine: Callable[[], Machine], agreement: float) -> None:
    for rows, length in ((4, 8), (16, 64)):
        found = compared(machine, texts(agreement, length, 8 * rows), rows)
        assert min(found.values()) > 0.87  # the shortest are over before a new engine knows its drafter


def test_texts_of_all_kinds_together_are_faster_than_by_any_fixed_length() -> None:
    for machine in (card, cpu):
        assert min(compared(machine, texts("mixed", 128, 30), 1).values()) > 1.08


@pytest.mark.parametrize(("rows", "kinds", "least"), [(4, (0.0, 0.6, 0.95), 0.98), (16, AGREEMENTS, 0.97)])
def test_texts_that_are_hard_to_guess_are_not_left_behind_by_the_others(
    rows: int, kinds: tuple[float, ...], least: float
) -> None:
    """Three times as many as run together, then nobody: with all tokens counted alike these were 0.94 and 0.95."""
    gained = []
    for seed in range(6):

        def made(seed: int = seed) -> list[Text]:
            return [Text(kinds[place % len(kinds)], 128, seed=100 * seed + place) for place in range(3 * rows)]

        controller = Controller(card().profile(rows))
        run(card(), made(), rows, controller)
        auto = run(card(), made(), rows, controller)
        gained.append(auto / max(run(card(), made(), rows, fixed=length) for length in (0, 1, 2, 3, 5)))
    assert sum(gained) / len(gained) > least


def test_drafting_that_never_helps_costs_a_percent() -> None:
    for machine in (card, cpu, lookup):
        assert run(machine(), texts(0.0, 512, 8)(), 1, Controller(machine().profile(1))) > 0.98 * run(
            machine(), texts(0.0, 512, 8)(), 1
        )


def test_a_text_that_becomes_predictable_gets_guesses_within_a_few_dozen_tokens() -> None:
    """A trial that loses 0.8 rounds comes every 80: half of that on average, and once in a while all of it."""
    for machine in (card, cpu, lookup):
        controller = Controller(machine().profile(1))
        run(machine(), [Text(0.0, 600)], 1, controller)  # it knows this drafter for a bad one
        waited = []
        for seed in range(4):
            text = Text(lambda place: 0.97 * (place >= 300), 600, seed=seed)
            run(machine(), [text], 1, controller)
            waited.append(min(at for at in text.guessed if at >= 300) - 300)
            assert sum(300 <= at < 450 for at in text.guessed) >= 4
            assert machine is lookup or sum(at < 300 for at in text.guessed) < 30
        assert max(waited) < 90 and sum(waited) < 4 * 50


@pytest.mark.parametrize("rows", [4, 16])
def test_texts_that_can_be_guessed_are_found_out_after_others_that_could_not(rows: int) -> None:
    """Texts of 128 tokens: a first wrong guess, or a probe of texts that are over, must not cost much of the speed."""
    gained = []
    for seed in range(12):  # a trial has been a moment ago, or long ago
        one = card()
        controller = Controller(one.profile(rows))
        run(one, [Text(0.0, 100 + 10 * seed, seed=place) for place in range(2 * rows)], rows, controller)
        texts = [[Text(0.8, 128, seed=100 + rows * seed + place) for place in range(rows)] for _ in range(3)]
        auto = run(one, texts[0], rows, controller)
        gained.append(auto / max(run(card(), texts[1], rows, fixed=3), run(card(), texts[2], rows, fixed=5)))
    assert sum(gained) / len(gained) > 0.88


@pytest.mark.parametrize(("machine", "least"), [("card", 0.95), ("cpu", 0.85)])
def test_sixteen_texts_go_on_being_tried_while_their_guesses_are_right(machine: str, least: float) -> None:
    """What the draft had to read was held against each trial: 0.68 and 0.77 of the best, when they first came.

    Each begins with a trial: when the next one may be is a matter of what was lost before.
    """
    gained = []
    for seed in range(10):
        one = {"card": reading_card, "cpu": cpu}[machine]()
        controller = Controller(one.profile(16))
        for turn in range(2):
            run(one, [Text(0.0, 128, seed=1000 * (10 * seed + turn) + place) for place in range(32)], 16, controller)
        controller._courses["draft"].trials = Trials()
        coming = lambda: [Text(0.95, 128, seed=10000 * seed + place) for place in range(32)]  # noqa: B023, E731
        auto = run(one, coming(), 16, controller)
        one = {"card": reading_card, "cpu": cpu}[machine]()
        gained.append(auto / max(run(one, coming(), 16, fixed=length) for length in (3, 8)))
    assert sum(gained) / len(gained) > least


@pytest.mark.parametrize("machine", [cpu, reading_card])
def test_sixteen_texts_that_are_seldom_right_are_not_tried_on_and_on(machine: Callable[[], Machine]) -> None:
    """Of sixteen rows one is right nearly always: that alone is no reason to try again at once."""
    assert by_plain(machine, 0.3, 128, 32, rows=16) > 0.965


def test_what_a_draft_reads_beside_a_prompt_counts_too() -> None:
    """Texts of eight tokens, never right: their drafts read when their prompts do, where the clock tells nothing."""
    assert by_plain(reading_card, 0.0, 8, 16, rows=1) > 0.98


def test_what_is_thought_of_the_next_text_is_not_ruled_by_those_that_take_longest() -> None:
    """Requests with eight guesses each came before: three of four of their rounds were of texts that are never right.

    The next texts, of the same three kinds, were held for hard ones and went without guesses: 0.90 of one guess for all
    on an H200, 0.95 here.
    """

    class Eight(Controller):
        def choose(self, party: Party, wishes: Any) -> Choice:
            return Choice([min(8, wish.most) for wish in wishes])

    def coming(seed: int) -> list[Text]:
        return [Text((0.0, 0.6, 0.95)[at % 3], 128, seed=1000 * seed + at) for at in range(24)]

    gained = []
    for seed in range(8):
        controller = Eight(reading_card().profile(4))
        run(reading_card(), coming(100 + seed), 4, controller)
        controller.__class__ = Controller
        auto = run(reading_card(), coming(seed), 4, controller)
        gained.append(auto / max(run(reading_card(), coming(seed), 4, fixed=length) for length in (0, 1, 3)))
    assert sum(gained) / len(gained) > 0.975


@pytest.mark.parametrize("agreement", [0.6, 0.95])
def test_a_row_that_stands_idle_for_a_round_when_its_text_ends_counts_too(agreement: float) -> None:
    """Four texts of eight tokens on a card: nine plain rounds, and with many right guesses three.

    When rounds with guesses alone were held to be followed by an idle one, auto came to 0.96 of three guesses there.
    """
    assert of_the_best(reading_card, 4, agreement, 8, seeds=4, lengths=(0, 1, 3, 8), apart=True) > 0.985


@pytest.mark.parametrize("rows", [1, 32])
def test_rows_that_are_waited_for_together_are_not_guessed_for_by_leaps(rows: int) -> None:
    """Of long and short guesses that come to the same in the long run, the long ones let some rows fall behind.

    By these times, an H200's, eight guesses for 32 rows give seven percent more a second than three while all run, and
    64 texts of 128 tokens took five percent longer with them.
    """
    seconds = {0: 5.1, 1: 7.1, 2: 8.7, 3: 9.95, 5: 14.0, 8: 18.5}
    whole = Grid({(rows, length): taken for length, taken in seconds.items() if length}, stepped=True)
    controller = Controller(RoundCosts({CHAIN: Grid({(rows, 0): seconds[0]}), "draft": whole}))
    coming = [Text(0.95, 128, seed=at) for at in range(rows)]
    for turn in range(256 // rows):
        for one in coming:
            right = next((place for place in range(8) if not one.right[(8 * turn + place) % 128]), 8)
            controller.learn(one, "draft", 8, 8, right, tree=False)  # type: ignore[arg-type]
    wishes: Any = [Wish(one, 8) for one in coming]
    chosen = controller.choose(Party("draft", rows, 8, inside=True), wishes).lengths
    assert chosen == [8 if rows == 1 else 3] * rows


@pytest.mark.parametrize(("rows", "length"), [(16, 8), (8, 8)])
def test_texts_that_would_only_wait_for_the_next_ones_prompt_are_not_hurried(rows: int, length: int) -> None:
    """Two prompts are read beside a round, and texts are short: who is over sooner leaves his row idle.

    With sixteen texts of eight tokens, right nearly always, auto came to 0.84 of plain decoding on an H200.
    """
    busy = lambda: replace(reading_card(), busy=6.3, admits=2)  # noqa: E731
    assert of_the_best(busy, rows, 0.95, length, seeds=3, lengths=(0, 1, 3), apart=True) > 0.98


@pytest.mark.parametrize(("length", "least"), [(32, 0.97), (128, 1.015)])
def test_while_prompts_are_read_the_few_that_run_are_not_hurried(length: int, least: float) -> None:
    """Thirty-two texts, two prompts a round: eight guesses pay for the first ten rows, and gain hardly anything.

    Auto came to 0.95 of plain decoding with 32 tokens each, and to 1.007 of three guesses with 128.
    """
    wide = {1: 0.0, 2: 0.05, 4: 0.12, 8: 0.35, 16: 0.68, 32: 0.75}
    busy = lambda: replace(reading_card(), busy=11.5, admits=2, wide=lambda rows: wide[1 << (rows - 1).bit_length()])  # noqa: E731
    count = 128 if length < 64 else 64
    assert of_the_best(busy, 32, 0.95, length, seeds=3, lengths=(0, 1, 3, 8), count=count) > least


@pytest.mark.parametrize(("length", "promising"), [(512, True), (8, False)])
def test_a_trial_that_each_new_text_must_be_read_for_is_not_followed_by_more(length: int, promising: bool) -> None:
    """All are right, and a round of all would pay; but what was read for eight tokens is to be read for the next."""
    machine = reading_card()
    controller = Controller(machine.profile(16))
    party = Party("draft", 16, 8, inside=True)
    hard = [Text(0.0, 512) for _ in range(16)]
    for _ in range(8):
        for one in hard:
            controller.learn(one, "draft", 1, 1, 0, tree=False)  # type: ignore[arg-type]
    wishes: Any = [Wish(Text(1.0, length), 7, lag=200) for _ in range(16)]
    choice = controller.choose(party, wishes)
    asked = sum(map(bool, choice.lengths))
    assert choice.probe and asked < 16
    seconds = machine.plain(16) + machine.wide(16) + machine.draft + machine.call + 200 * machine.token
    controller.took(party, True, RoundTimes(seconds, 0.0, 0.0, 1, 1, asked, 16 + asked, fed=(200,), apart=False))
    assert (controller._courses["draft"].trials.trusted > 1) == promising


@pytest.mark.parametrize(("count", "tokens", "crowded"), [(40, 3, True), (6, 30, False), (4, 3, False)])
def test_the_engine_tells_how_many_rounds_the_next_prompts_take_and_who_is_coming(
    count: int, tokens: int, crowded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows, a prompt a round, three others to wait for: said of many short texts, of neither long nor few ones."""
    with paired(tmp_path, monkeypatch, max_num_seqs=4, prefill_chunk_size=64) as llm:
        told: list[Traffic] = []
        decide = llm.engine.speculator.decide

        def watched(ready: Any, budget: int, traffic: Traffic) -> Any:
            told.append(traffic)
            return decide(ready, budget, traffic)

        llm.engine.speculator.decide = watched  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompts = [[5 + place] * 33 for place in range(count)]
        llm.generate(prompts, params)
        turnovers = [one.turnover for one in told]
        assert any(turnovers) == crowded
        assert not crowded or max(turnovers) == pytest.approx(3.0)
        assert [one.coming for one in told[:2]] == [2, 0]  # of four, two are read before the first round
        for more in ({}, {"temperature": 0.8, "seed": 7}):
            made = [llm.generate(prompts, params.but(speculation=how, **more)) for how in ("auto", "off")]
            assert [one.token_ids for one in made[0]] == [one.token_ids for one in made[1]]


@pytest.mark.parametrize("feeding", [0.0, 0.4, 0.9])
def test_however_many_texts_are_new_trying_them_costs_a_percent(feeding: float) -> None:
    """They wait half as long, a few in a row with the first; what is owed still when they begin is not forgotten."""
    trials, lost, seconds = Trials(), 0.0, 0.0
    while seconds < 20_000:
        if trials.due(untried=True):
            trials.begin(1.0, untried=True)
            trials.read(1.0, feeding, 10.0, promising=False, num_rows=16)
            lost += 1.0
        trials.passed(1.0)
        seconds += 1.0
    assert 0.009 < lost / seconds < 0.0105


def test_after_a_long_row_of_trials_there_is_another_one_within_reason() -> None:
    """Seventy that were right and lost eight milliseconds each: the next texts were not tried for a minute (H200)."""
    trials = Trials()
    for _ in range(70):
        trials.begin(8.0)
        trials.read(8.0, 7.0, 5.0, promising=True, num_rows=16)
    trials.begin(8.0)
    trials.read(8.0, 7.0, 5.0, promising=False, num_rows=16)
    waited = 0
    while not trials.due(untried=False):
        trials.passed(5.0)
        waited += 5
    assert 8 * 100 < waited < 5 * 8 * 100  # milliseconds: one trial of these loses a percent of 800


def test_a_probe_that_something_else_held_up_is_not_the_last_one() -> None:
    """What a draft must read takes 2 seconds once, in place of a millisecond: a compilation, or a neighbour."""

    class Call(float):
        held_up = False

        def __mul__(self, times: float) -> float:
            self.held_up, before = self.held_up and not times, self.held_up
            return times * (2000.0 if before else float(self))

    machine = card()
    controller = Controller(machine.profile(1))
    machine.call = call = Call(1.0)
    run(machine, [Text(0.0, 4000)], 1, controller)
    call.held_up = True
    run(machine, [Text(0.0, 400)], 1, controller)
    assert not call.held_up  # it came
    run(machine, [text := Text(0.97, 600)], 1, controller)
    assert sum(at < 200 for at in text.guessed) > 10


def test_a_noisy_start_heals() -> None:
    """Rounds with guesses looked twice as dear as they are, or plain ones did."""
    for error in (lambda _, width: 2.0 if width else 1.0, lambda _, width: 1.0 if width else 2.0):
        one = card()
        controller = Controller(one.profile(1, error))
        run(one, texts(0.8, 256, 4)(), 1, controller)
        run(one, texts(0.0, 256, 4)(), 1, controller)
        for agreement in (0.0, 0.8):
            auto = run(card(), texts(agreement, 256, 8)(), 1, controller)
            assert auto > 0.93 * max(run(card(), texts(agreement, 256, 8)(), 1, fixed=k) for k in (0, 3))


def test_a_machine_that_slows_down_changes_no_mind() -> None:
    """Only the length in use is seen to become slow; the others are taken to have become so, too."""

    def slowed() -> Machine:
        one = card()
        one.slow = lambda number: 2.0 if number > 60 else 1.0
        return one

    found = compared(slowed, texts(0.8, 256, 4), 1, costs=card().profile(1))
    assert min(found.values()) > 0.9


# --- what is weighed


def costs(**more: Any) -> RoundCosts:
    passes = Grid({(1, 0): 1.0, (1, 8): 1.4, (16, 0): 1.2, (16, 8): 8.0})
    return RoundCosts({CHAIN: passes}, drafts={"draft": Grid({(1, 1): 0.05, (1, 8): 0.4})}, **more)


def taught(controller: Controller, text: Text, right: int, rounds: int = 12, asked: int = 8) -> Wish:
    for _ in range(rounds):
        controller.learn(text, "draft", asked, asked, right, tree=False)  # type: ignore[arg-type]
    return Wish(text, 8)  # type: ignore[arg-type]


def no_trials_now(controller: Controller) -> None:
    controller._courses["draft"].trials.begin(1.0)
    controller._courses["draft"].comparisons.begin(1.0)


def test_one_good_row_does_not_widen_everybodys_round() -> None:
    """Alone it drafts far; among fifteen that gain nothing it does not, nor do they."""
    controller = Controller(costs())
    good = taught(controller, Text(0, 1000), right=8)
    assert controller.choose(Party("draft", 1, 8), [good]).lengths[0] == 8
    bad = [taught(controller, Text(0, 1000), right=0) for _ in range(15)]
    no_trials_now(controller)
    assert not any(controller.choose(Party("draft", 16, 8, narrows=True), [good, *bad]).lengths)


def test_rows_that_gain_nothing_stay_out_where_others_draft() -> None:
    """Two rows, drafting dear by the row: the one that is always wrong gets no guesses."""
    grid = Grid({(1, 1): 0.1, (1, 8): 0.8, (2, 1): 0.4, (2, 8): 3.2})
    controller = Controller(RoundCosts({CHAIN: Grid({(1, 0): 1.0})}, drafts={"draft": grid}))
    wishes = [taught(controller, Text(0, 1000), right) for right in (8, 0)]
    no_trials_now(controller)
    lengths = controller.choose(Party("draft", 2, 8), wishes).lengths
    assert lengths[0] >= 5 and not lengths[1]


def test_who_takes_part_is_a_matter_of_what_guesses_gain_not_of_how_hard_a_text_is() -> None:
    """A hard text's tokens weigh four times as much, and its guesses gain nothing all the same."""
    grid = Grid({(1, 1): 0.1, (1, 8): 0.8, (2, 1): 0.4, (2, 8): 3.2})
    controller = Controller(RoundCosts({CHAIN: Grid({(1, 0): 1.0})}, drafts={"draft": grid}))
    wishes = [taught(controller, Text(0, 1000), right) for right in (0, 2)]
    for wish, pace in zip(wishes, (1.0, 4.0), strict=True):
        controller._agreement("draft", wish.sequence).pace = pace
    no_trials_now(controller)
    lengths = controller.choose(Party("draft", 2, 8), wishes).lengths
    assert lengths[1] >= 2 and not lengths[0]


def test_a_short_text_is_not_worth_reading_a_long_prompt_for() -> None:
    """Ten plain rounds to read what the draft lacks: for 8 tokens they do not come back, for 500 they do."""
    controller = Controller(costs(feeds={"draft": (10.0, 0.0)}))
    taught(controller, Text(0, 1000), right=8)
    no_trials_now(controller)
    short, long = Text(0, 8), Text(0, 500)
    long.num_generated = 100
    assert not any(controller.choose(Party("draft", 1, 8), [Wish(short, 7, lag=200)]).lengths)  # type: ignore[arg-type]
    assert any(controller.choose(Party("draft", 1, 8), [Wish(long, 8, lag=200)]).lengths)  # type: ignore[arg-type]


def ended(tokens: int, limit: int) -> Any:
    """A text that ended, or was cut off at its limit."""
    return SimpleNamespace(num_generated=tokens, finish_reason="length" if tokens == limit else "stop")


def test_texts_are_expected_to_become_as_long_as_those_before_them() -> None:
    """What a draft reads for a text is spread over what is to come; those cut off short do not say that more is not."""
    length = TextLength()
    fresh = lambda limit, so_far=0: Wish(begun(limit, so_far), 8, usual=length.tokens)  # noqa: E731
    for _ in range(60):
        length.ended(ended(300, 300))
    assert 295 < length.tokens < 300 and fresh(1000).left == length.tokens
    assert fresh(1000, 100).left == length.tokens - 100  # as far as usual
    assert fresh(1000, 400).left == 400  # beyond that, twice what it has
    assert fresh(1000, 800).left == 200 and fresh(1000, 999).left == 1  # as far as it may
    for _ in range(60):
        length.ended(ended(8, 8))
    assert fresh(1000).left > 295 and fresh(8).left == 8
    for _ in range(60):
        length.ended(ended(30, 1000))
    assert 30 < fresh(1000).left < 31 and fresh(8).left == 8
    length.ended(SimpleNamespace(num_generated=0, finish_reason="abort"))  # type: ignore[arg-type]
    assert fresh(1000).left > 30


def begun(limit: int, so_far: int) -> Any:
    text = Text(0.0, limit)
    text.num_generated = so_far
    return text


def test_texts_whose_drafts_must_be_read_first_are_not_left_alone_half_of_the_time() -> None:
    """32 texts at 0.6 on a card: guesses gain five percent once a draft has read, of as many tokens as texts have."""
    costs = Costs.of_record(COSTS)
    taken = {None: 0.0, 0: 0.0, 1: 0.0}
    for seed in range(4):
        controller = Controller(costs.machine().profile(32))
        coming = lambda turn: [Text(0.6, 128, seed=1000 * seed + 100 * turn + place) for place in range(64)]  # noqa: B023, E731
        for turn in range(3):
            run(costs.machine(), coming(turn), 32, controller, fixed=turn)
        for fixed in taken:
            taken[fixed] += sum(1 / run(costs.machine(), coming(turn), 32, controller, fixed) for turn in (3, 4))
    assert taken[None] < taken[1] < 0.98 * taken[0]


def compared_to_plain(lag: int, rounds: int = 2000) -> int:
    """Count plain rounds run to compare, of a text whose guesses pay a little; after each it lacks `lag` tokens."""
    controller = Controller(costs(feeds={"draft": (0.5, 0.0)}))
    wish = taught(controller, Text(0, 100_000), right=2, asked=2)
    party, now, count = Party("draft", 1, 2), wish, 0
    for place in range(rounds):
        choice = controller.choose(party, [now])
        guesses = choice.lengths[0]
        assert guesses or choice.reference  # one round, and not some more behind it
        if guesses:
            controller.learn(wish.sequence, "draft", guesses, guesses, int(place % 4 == 0), tree=False)  # type: ignore[arg-type]
        controller.took(party, choice.probe, RoundTimes(0.0, 0.0, 0.0, guesses, guesses, 1, 1 + guesses))
        controller._passed(1.0)
        now = Wish(wish.sequence, 2, lag) if choice.reference else wish
        count += choice.reference
    return count


def test_a_plain_round_to_compare_is_one_round_and_what_is_read_after_it_is_part_of_its_price() -> None:
    """They took half a percent of the time, and eight more rounds each in which nobody was asked again."""
    cheap, dear = compared_to_plain(lag=0), compared_to_plain(lag=1)
    assert 2 * dear < cheap and dear > 2


def test_a_tree_is_weighed_by_what_its_nodes_cost_and_by_how_deep_they_reach() -> None:
    """Eight nodes, all right: three levels pay for two and a half passes; one does not, nor do three for five."""
    for nodes, depth, wanted in ((2.5, 3, True), (2.5, 1, False), (5.0, 3, False)):
        passes = {CHAIN: Grid({(1, 0): 1.0}), "draft": Grid({(1, 1): nodes, (1, 8): nodes})}
        controller = Controller(RoundCosts(passes))
        text = Text(0, 1000)
        for _ in range(12):
            controller.learn(text, "draft", 8, depth, depth, tree=True)  # type: ignore[arg-type]
        no_trials_now(controller)
        chosen = controller.choose(Party("draft", 1, 8, trees=True), [Wish(text, 8)]).lengths[0]  # type: ignore[arg-type]
        assert bool(chosen) is wanted


def test_lengths_are_those_that_are_captured() -> None:
    controller = Controller(costs())
    seen = set()
    for right in range(11):
        wish = taught(controller, Text(0, 1000), right, asked=10)
        seen |= set(controller.choose(Party("draft", 1, 10, inside=True), [Wish(wish.sequence, 10)]).lengths)
    assert seen <= {0, 1, 2, 3, 5, 8, 10}


# --- what is learned of costs


def test_costs_are_read_between_what_was_measured_and_beyond() -> None:
    grid = Grid({(1, 0): 1.0, (1, 4): 3.0, (3, 0): 2.0, (3, 4): 6.0})
    assert [grid.at(1, 2), grid.at(2, 0), grid.at(2, 4), grid.at(1, 6)] == pytest.approx([2.0, 1.5, 4.5, 4.0])
    assert Grid.of_record(json.loads(json.dumps(grid.record()))) == grid
    for damaged in ({"cells": [], "stepped": False}, {"cells": [[1, 0, 1.0], [2, 1, 1.0]], "stepped": False}, {}):
        with pytest.raises((ValueError, KeyError)):
            Grid.of_record(damaged)


def test_context_counts() -> None:
    growth = {CHAIN: Grid({(1, 0): 0.001, (16, 0): 0.01})}
    told = costs(growth=growth)
    short, far = (told.pass_seconds(PassShape(16, 0, context=context)) for context in (128, 1128))
    assert far - short == pytest.approx(10.0)


def test_one_wild_timing_changes_little_and_many_are_believed() -> None:
    told, shape = costs(), PassShape(1, 0)
    for _ in range(20):
        told.took_pass(shape, 1.0)
    told.took_pass(shape, 50.0)
    assert told.pass_seconds(shape) == pytest.approx(1.0, rel=0.03)
    for _ in range(200):
        told.took_pass(shape, 1.5)
    assert told.pass_seconds(shape) == pytest.approx(1.5, rel=0.05)
    assert told.pass_seconds(PassShape(1, 8)) > 1.7  # what has the machine in common became slower, too


def test_unclean_rounds_teach_no_costs() -> None:
    controller = Controller(costs())
    before = controller.costs.pass_seconds(PassShape(1, 0))
    controller.took(Party("draft", 1, 8), False, RoundTimes(9.0, 0.0, 0.0, 0, 0, 0, 1, clean=False))
    assert controller.costs.pass_seconds(PassShape(1, 0)) == before


def test_what_a_draft_reads_on_a_card_is_what_two_rounds_were_late_by() -> None:
    """Its launches hold up the reading of the round before, its work the round itself; neither is slower for it."""
    grids = {CHAIN: Grid({(1, 0): 1.0}, stepped=True), "draft": Grid({(1, 1): 1.2}, stepped=True)}
    controller = Controller(RoundCosts(grids, feeds={"draft": (0.5, 0.0)}))
    party = Party("draft", 1, 1, inside=True)
    for _ in range(50):
        controller.took(party, False, RoundTimes(1.0, 0.0, 0.0, 0, 0, 0, 1, apart=False))
        controller.took(party, False, RoundTimes(4.0, 0.0, 0.0, 0, 0, 0, 1, apart=False, delayed=True))
        controller.took(party, False, RoundTimes(1.7, 0.0, 0.1, 1, 1, 1, 2, fed=(20,), apart=False))
    assert controller.costs.feed_seconds("draft", 20) == pytest.approx(3.5, rel=0.1)
    assert controller.costs.pass_seconds(PassShape(1, 0)) == pytest.approx(1.0, rel=0.02)
    assert controller.costs.pass_seconds(PassShape(1, 1, "draft")) == pytest.approx(1.2, rel=0.02)


def test_a_round_that_was_late_for_nothing_that_is_known_says_nothing_of_reading() -> None:
    grids = {CHAIN: Grid({(1, 0): 1.0}, stepped=True), "draft": Grid({(1, 1): 1.2}, stepped=True)}
    controller = Controller(RoundCosts(grids, feeds={"draft": (0.5, 0.0)}))
    party = Party("draft", 1, 1, inside=True)
    controller.took(party, False, RoundTimes(9.0, 0.0, 0.0, 0, 0, 0, 1, clean=False, apart=False, delayed=True))
    controller.took(party, False, RoundTimes(1.7, 0.0, 0.1, 1, 1, 1, 2, fed=(20,), apart=False))
    assert controller.costs.feed_seconds("draft", 20) == pytest.approx(0.5)


# --- in an engine


def paired(cache: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    settings = {"max_num_seqs": 2, "max_model_len": 64, **settings}
    model = tiny_target()
    return LLM(model, tiny_draft(model, "noisy"), tokenizer=byte_tokenizer(), device="cpu", **settings)


def test_a_profile_is_kept_for_later_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pair and settings read it; other settings make their own; a damaged one is made anew."""
    kept = lambda: sorted((tmp_path / "rounds").iterdir())  # noqa: E731
    paired(tmp_path, monkeypatch).close()
    (file,) = kept()
    record = json.loads(file.read_text())
    record["passes"][CHAIN]["cells"] = [[rows, width, 77.0] for rows, width, _ in record["passes"][CHAIN]["cells"]]
    file.write_text(json.dumps(record))
    with paired(tmp_path, monkeypatch) as llm:
        controller = llm.engine.speculator._controller
        assert controller is not None and controller.costs.pass_seconds(PassShape(1, 0)) == 77.0
    paired(tmp_path, monkeypatch, max_num_seqs=3).close()
    assert len(kept()) == 2
    monkeypatch.setattr("outrider.engine.profile.MOST_KEPT", 2)
    paired(tmp_path, monkeypatch, max_num_seqs=4).close()
    assert len(kept()) == 2 and file not in kept()  # the oldest made room
    for damage in ("{", "[]", json.dumps({**record, "passes": {CHAIN: {"cells": [[1, 0, "x"]], "stepped": False}}})):
        file.write_text(damage)
        with paired(tmp_path, monkeypatch) as llm:
            controller = llm.engine.speculator._controller
            assert controller is not None and controller.costs.pass_seconds(PassShape(1, 0)) < 77.0
    monkeypatch.setenv("OUTRIDER_CACHE", str(file))  # a file: nothing can be kept there
    with paired(file, monkeypatch) as llm:
        assert llm.engine.speculator._controller is not None


def test_profiling_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, limits and tables are as before, and the draft has nothing cached for any slot."""
    with paired(tmp_path, monkeypatch) as llm:
        state, drafter = llm.engine.state, llm.engine.drafter
        assert state.lengths.tolist() == state.limits.tolist() == [1, 1, 1]
        assert drafter is not None and [drafter.kept(slot) for slot in range(3)] == [0, 0, 0]
        first = llm.generate([[65, 66]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
        plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation="off")
        assert first.token_ids == llm.generate([[65, 66]], plain)[0].token_ids


@pytest.mark.parametrize("depth", [0, 1])
def test_rounds_are_timed_as_they_run(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is told of once, with what it was; those that a prompt was fed beside are not clean."""
    from functools import partial

    from outrider.engine.engine import Engine

    monkeypatch.setattr("outrider.llm.Engine", partial(Engine, depth=depth))
    told: list[tuple[Party, RoundTimes]] = []
    with paired(tmp_path, monkeypatch) as llm:
        controller = llm.engine.speculator._controller
        assert controller is not None
        controller.took = lambda party, _, times: told.append((party, times))  # type: ignore[method-assign]
        jobs = [([65, 66], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=3))]
        jobs += [([70] * 9, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculation="off"))]
        made = generate_together(llm, jobs)
        rounds = llm.engine.figures.rounds
    assert len(told) == rounds
    assert sum(times.tokens for _, times in told) >= sum(group[0].num_generated for group in made)
    assert not told[0][1].clean and any(times.clean for _, times in told)
    assert {times.asked for _, times in told} <= {0, 1, 2, 3} and all(times.seconds > 0 for _, times in told)
    assert all(times.rows_asked == (times.asked > 0) for _, times in told)


def test_the_round_before_one_whose_draft_reads_first_is_told_as_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functools import partial

    from outrider.engine.engine import Engine

    monkeypatch.setattr("outrider.llm.Engine", partial(Engine, depth=1))
    told: list[RoundTimes] = []
    with paired(tmp_path, monkeypatch) as llm:
        controller = llm.engine.speculator._controller
        assert controller is not None
        controller.took = lambda party, probe, times: told.append(times)  # type: ignore[method-assign]
        controller.choose = lambda party, wishes: Choice(  # type: ignore[method-assign]
            [0 if len(told) % 6 else min(2, wish.most) for wish in wishes]
        )
        llm.generate([[65, 66]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    late = [place for place, times in enumerate(told) if times.delayed]
    assert late and all(told[place + 1].fed for place in late)
    assert not any(times.apart for times in told)
