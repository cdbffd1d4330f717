"""From logits to a token: the draw, the noise, the filters, the penalties, and what `SamplingParams` refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import InvalidRequestError
from outrider.sampling.choose import SHORTLIST, choose, distribution, shaped
from outrider.sampling.params import MAX_LOGPROBS, SamplingParams
from outrider.sampling.random import Purpose, gumbel, mixed_seed, uniform
from outrider.sampling.rules import Prefix, RuleFlags, Rules, RuleTable
from tests.scripted import chi_square_p

ROWS = 20_000
CPU = torch.device("cpu")


def rules_of(*params: SamplingParams, **more: Any) -> Rules:
    """Rules as the engine holds them, one row for each of `params`."""
    table = RuleTable(len(params), CPU)
    for slot, one in enumerate(params):
        table.write(slot, one.but(seed=one.seed or 0), **more)
    return table.select(list(range(len(params))))


def blank(rows: int, ends: int = 1, steps: int = 1) -> Prefix:
    """A prefix that no rule looks at."""
    return Prefix(torch.zeros(rows, ends + steps).long(), ends + torch.arange(steps).expand(rows, -1))


# --- the draw


@pytest.mark.parametrize("size", [8, SHORTLIST + 8], ids=["whole vocabulary", "shortlist"])
def test_draws_follow_the_softmax_of_the_scores(size: int) -> None:
    """CHI: 20k positions of one request; with a filter, the renormalised rest."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1))
    logits[8:] -= 60
    many = (SamplingParams(), SamplingParams(temperature=0.6, top_k=5), SamplingParams(temperature=2, top_p=0.7))
    for params in many:
        rules = rules_of(params)
        prefix = blank(1, 3, ROWS)
        wide = logits.expand(1, ROWS, -1)
        if size > 8:  # a wide vocabulary at fewer places
            wide, prefix = wide[:, :4000], Prefix(prefix.tokens, prefix.ends[:, :4000])
        drawn = choose(wide, rules, prefix)[0]
        p = distribution(logits.view(1, 1, -1), rules, blank(1))[0, 0].double()
        p = torch.where(p < 1e-15, 0.0, p)
        wanted = p / p.sum() * drawn.numel()
        assert chi_square_p(torch.bincount(drawn, minlength=size), wanted) > 0.001


def check_noise_is_fixed_by_seed_position_and_purpose() -> None:
    """Equal keys give equal noise, whatever the batch; any other key gives noise that has nothing to do with it."""
    seeds = torch.tensor([mixed_seed(1), mixed_seed(2)])
    places = torch.tensor([[10, 11, 12], [11, 12, 13]])
    one = gumbel(seeds, places, Purpose.CHOICE, 400)
    alone = gumbel(seeds[1:], places[1:, 1:2], Purpose.CHOICE, 400)
    assert torch.equal(one[1, 1], alone[0, 0])
    assert torch.equal(one[0, :, 7:9], gumbel(seeds[:1], places[:1], Purpose.CHOICE, torch.tensor([[[7, 8]]]))[0])
    tables = [one[0, 0], one[0, 1], one[0, 2], one[1, 0], one[1, 1]]
    tables += [gumbel(seeds[:1], places[:1, :1], purpose, 400)[0, 0] for purpose in list(Purpose)[1:]]
    close = torch.corrcoef(torch.stack(tables)) - torch.eye(len(tables))
    assert float(close.abs().max()) < 0.2, "two keys share their noise"


def test_noise_depends_on_seed_position_and_purpose_alone() -> None:
    check_noise_is_fixed_by_seed_position_and_purpose()


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of coins of neighbouring positions, seeds and samples fill the unit square evenly."""
    seeds = torch.tensor([mixed_seed(seed) for seed in range(200)])
    coins = uniform(seeds, torch.arange(101).expand(200, -1), Purpose.CHOICE)
    of_samples = torch.tensor([mixed_seed(5, sample) for sample in (0, 1)])
    samples = uniform(of_samples, torch.arange(ROWS).expand(2, -1), Purpose.CHOICE)
    for left, right in ((coins[:, :-1], coins[:, 1:]), (coins[:-1], coins[1:]), (samples[0], samples[1])):
        cells = (left * 8).long() * 8 + (right * 8).long()
        counts = torch.bincount(cells.flatten(), minlength=64)
        assert chi_square_p(counts, torch.full((64,), counts.sum() / 64)) > 0.001


def test_a_seed_is_64_bits_and_any_of_them_works() -> None:
    keys = {mixed_seed(seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63), 2**62, 12345)}
    assert len(keys) == 7
    assert mixed_seed(2**64 - 1) == mixed_seed(-1), "the same 64 bits"
    for seed in (-(2**63), 2**64 - 1):
        rules = rules_of(SamplingParams(seed=seed))
        assert choose(torch.zeros(1, 1, 5), rules, blank(1)).shape == (1, 1)


def test_every_sample_of_a_request_has_a_seed_of_its_own() -> None:
    assert len({mixed_seed(3, sample) for sample in range(1024)}) == 1024


# --- filters, against a second implementation


def kept_by_numpy(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """top_k, then top_p over what is left, then min_p, one token at a time; ties at a border stay in."""
    scores = logits.astype(np.float64) / temperature
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = set(order)
    if 0 < top_k < len(order):
        kept = {token for token in order if scores[token] >= scores[order[top_k - 1]]}
    if top_p < 1:
        weights = {token: math.exp(scores[token] - scores[order[0]]) for token in kept}
        total, sum_before, border = sum(weights.values()), 0.0, None
        for token in [token for token in order if token in kept]:
            if sum_before / total < top_p:
                border = scores[token]
            sum_before += weights[token]
        kept = {token for token in kept if scores[token] >= border}
    if min_p > 0:
        kept = {token for token in kept if math.exp(scores[token] - scores[order[0]]) >= min_p * (1 - 1e-6)}
    return kept


FILTERS = [
    {"top_k": 1}, {"top_k": 3}, {"top_k": 500}, {"top_p": 0.05}, {"top_p": 0.5}, {"top_p": 0.95}, {"min_p": 0.02},
    {"min_p": 0.5}, {"min_p": 1.0}, {"top_k": 4, "top_p": 0.6}, {"top_k": 2, "top_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
def test_filters_keep_what_an_independent_implementation_keeps(temperature: float) -> None:
    """F06 and the rule for ties, every filter in one mixed batch."""
    luck = np.random.default_rng(0)
    params = [SamplingParams(temperature=temperature, **one) for one in FILTERS]  # type: ignore[arg-type]
    rules = rules_of(*params)
    for ties in (False, True):
        for _ in range(5):
            logits = luck.normal(size=40) * 2
            if ties:
                logits = np.round(logits)
            logits = logits.astype(np.float32)
            wide = torch.from_numpy(logits).expand(len(params), 1, -1)
            p = distribution(wide, rules, blank(len(params)))[:, 0]
            for row, one in enumerate(params):
                wanted = kept_by_numpy(logits, temperature, one.top_k, one.top_p, one.min_p)
                got = p[row].numpy()
                # With a tiny temperature the tail underflows in fp32: what is left of it has no mass.
                exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
                visible = {token for token in wanted if exact[token] > 1e-35}
                assert visible <= set(np.flatnonzero(got)) <= wanted, f"{one}: kept {np.flatnonzero(got)}, not {wanted}"


def test_tokens_tied_at_a_border_stay_in() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=math.exp(-1) * 0.999)):
        p = distribution(logits, rules_of(params), blank(1))[0, 0]
        assert (p > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0], ids=["flat", "wide", "steep"])
def test_the_shortlist_gives_what_the_full_sort_gives(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the 1024 likeliest are tried first; flat rows need the full sort, in the same batch as steep ones."""
    import outrider.sampling.choose as module

    size, rows = 5000, len(FILTERS)
    logits = torch.randn(rows, 3, size, generator=torch.Generator().manual_seed(2)) * spread
    logits[0] *= 4
    rules = rules_of(*(SamplingParams(seed=row, **one) for row, one in enumerate(FILTERS)))  # type: ignore[arg-type]
    short, p_short = choose(logits, rules, blank(rows, 4, 3)), distribution(logits, rules, blank(rows, 4, 3))
    alone = [
        choose(logits[row : row + 1], rules_of(SamplingParams(seed=row, **one)), blank(1, 4, 3))[0]  # type: ignore[arg-type]
        for row, one in enumerate(FILTERS)
    ]
    monkeypatch.setattr(module, "SHORTLIST", size)
    full, p_full = choose(logits, rules, blank(rows, 4, 3)), distribution(logits, rules, blank(rows, 4, 3))
    assert torch.equal(short, full)
    assert torch.equal(p_short > 0, p_full > 0)
    assert torch.equal(torch.stack(alone), full), "a row's choice must not depend on its batch mates"


def test_greedy_wins_over_the_filters_and_needs_no_noise() -> None:
    """A11."""
    logits = torch.randn(4, 2, 50, generator=torch.Generator().manual_seed(0))
    greedy = [SamplingParams(temperature=0, top_p=0.01, top_k=1), SamplingParams(temperature=0, min_p=1.0)]
    mixed = rules_of(*greedy, SamplingParams(temperature=2.0, seed=3), SamplingParams(temperature=0))
    drawn = choose(logits, mixed, blank(4, 1, 2))
    assert torch.equal(drawn[[0, 1, 3]], logits.argmax(-1)[[0, 1, 3]])
    assert distribution(logits, mixed, blank(4, 1, 2))[[0, 1, 3]].max(-1).values.eq(1).all()


def test_a_tiny_temperature_neither_overflows_nor_changes_the_likeliest() -> None:
    logits = torch.tensor([[[30.0, 29.9, -500.0, 30.0 - 1e-3]]])
    rules = rules_of(SamplingParams(temperature=1e-5))
    assert distribution(logits, rules, blank(1))[0, 0].tolist() == pytest.approx([1, 0, 0, 0], abs=1e-30)
    assert choose(logits, rules, blank(1)).item() == 0


# --- penalties, each position with its own prefix


def penalised_by_hand(
    logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams
) -> list[float]:
    out = list(logits)
    for token, amount in params.logit_bias.items():
        out[token] += amount
    for token in range(len(out)):
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        count = generated.count(token)
        out[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    return out


def check_penalties_follow_each_positions_own_prefix() -> None:
    """E01, E02, E09: a batch of differing rows and lengths, three guesses each, against a recount by hand."""
    luck = torch.Generator().manual_seed(4)
    many = [
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=-0.7),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(),
        SamplingParams(presence_penalty=-1, frequency_penalty=2, repetition_penalty=0.6, logit_bias={2: -3.5, 5: 100}),
    ]
    prompts = [[1, 2, 3], [4], [5, 5, 1, 0], [2], [7, 2]]
    generated = [[1, 1], [], [0, 4, 4, 4], [3], [2, 2, 2]]
    guesses = torch.randint(0, 9, (5, 3), generator=luck)
    guesses[0] = torch.tensor([6, 6, 6])
    table = RuleTable(5, CPU)
    tokens = torch.full((5, 12), 8)  # what lies behind a row's guesses is junk that must not count
    ends = torch.zeros(5, 4).long()
    for row, one in enumerate(many):
        table.write(row, one.but(seed=0), prompt_length=len(prompts[row]))
        text = prompts[row] + generated[row] + guesses[row].tolist()
        tokens[row, : len(text)] = torch.tensor(text)
        ends[row] = len(text) - 3 + torch.arange(4)
    logits = torch.randn(5, 4, 9, generator=luck) * 2
    got = shaped(logits, table.select(range(5)), Prefix(tokens, ends))
    for row, one in enumerate(many):
        for step in range(4):
            output = generated[row] + guesses[row, :step].tolist()
            wanted = penalised_by_hand(logits[row, step].tolist(), prompts[row], output, one)
            assert got[row, step].tolist() == pytest.approx(wanted, abs=1e-4), f"row {row}, position {step}"


def test_penalties_at_each_position_count_that_positions_own_prefix() -> None:
    check_penalties_follow_each_positions_own_prefix()


def test_the_input_logits_are_left_as_they_were() -> None:
    """Log-probabilities are reported from them."""
    logits = torch.randn(1, 1, 9)
    before = logits.clone()
    choose(logits, rules_of(SamplingParams(presence_penalty=1, logit_bias={1: 5}, top_k=2, temperature=0.5)), blank(1))
    assert torch.equal(logits, before)


# --- what must not be said


def banned_at(tokens: list[int], end: int, words: list[tuple[int, ...]], size: int = 10) -> set[int]:
    rules = rules_of(SamplingParams(bad_words=["any"]), bad_words=words)
    scores = shaped(torch.zeros(1, 1, size), rules, Prefix(torch.tensor([tokens]), torch.tensor([[end]])))
    return set(torch.isinf(scores[0, 0]).nonzero()[:, 0].tolist())


def test_a_bad_word_is_ruled_out_at_its_last_token_only() -> None:
    """Also across the border of prompt and output, at the text's begin, and beside shorter and longer words."""
    words = [(3,), (4, 5), (1, 2, 6), (9, 9)]
    assert banned_at([0, 0, 0], 2, words) == {3}
    assert banned_at([0, 4, 0], 2, words) == {3, 5}
    assert banned_at([1, 2, 0], 2, words) == {3, 6}
    assert banned_at([2, 0, 0], 1, words) == {3}, "a prefix shorter than the word cannot match it"
    assert banned_at([9, 7, 0], 1, words) == {3, 9}
    assert banned_at([4, 0, 4], 2, words) == {3}, "what lies behind the prefix does not count"


def test_bad_words_follow_the_guesses_of_a_round() -> None:
    """E08: three positions at once, each with its own prefix, next to a row without bad words."""
    table = RuleTable(2, CPU)
    table.write(0, SamplingParams(bad_words=["x"], seed=0), bad_words=[(4, 5), (5, 5, 1)])
    table.write(1, SamplingParams(seed=0))
    tokens = torch.tensor([[4, 4, 5, 5], [4, 4, 5, 5]])
    scores = shaped(torch.zeros(2, 4, 8), table.select([0, 1]), Prefix(tokens, torch.tensor([[1, 2, 3, 4]] * 2)))
    banned = [torch.isinf(row).nonzero()[:, 0].tolist() for row in scores[0]]
    assert banned == [[5], [5], [], [1]]
    assert not torch.isinf(scores[1]).any()


def test_rules_that_failed_to_be_written_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in a slot is unknown then, even to a request with the rules that lay there before."""
    table = RuleTable(1, CPU)
    before = SamplingParams(logit_bias={3: 5.0}, seed=0)
    table.write(0, before)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr("outrider.sampling.rules._place", fails)
        table.write(0, SamplingParams(logit_bias={1: 2.0, 2: 1.0}, seed=0))
    table.write(0, before)
    assert shaped(torch.zeros(1, 1, 6), table.select([0]), blank(1))[0, 0].tolist() == [0, 0, 0, 5, 0, 0]


def test_min_tokens_rules_out_every_stop_until_enough_are_generated() -> None:
    """E02: counted from the prompt's end by position, never by round."""
    rules = rules_of(SamplingParams(min_tokens=3), prompt_length=4, stop_ids=[2, 7])
    scores = shaped(torch.zeros(1, 6, 9), rules, Prefix(torch.zeros(1, 12).long(), 4 + torch.arange(6)[None]))
    for step in range(6):
        banned = torch.isinf(scores[0, step]).nonzero()[:, 0].tolist()
        assert banned == ([2, 7] if step < 3 else [])


def test_rules_apply_in_the_documented_order() -> None:
    """logit_bias, penalties, bans, temperature, top_k, top_p: each pair here would come out otherwise if swapped."""
    logits = torch.tensor([[[1.0, 4.0, -2.0, 0.5]]])
    prefix, seen = Prefix(torch.tensor([[0, 0]]), torch.tensor([[1]])), {"prompt_length": 1}
    biased = shaped(logits, rules_of(SamplingParams(logit_bias={0: -2}, repetition_penalty=2.0), **seen), prefix)
    assert biased[0, 0, 0] == -2.0, "bias, then penalty: (1 - 2) * 2"
    forced = shaped(
        logits, rules_of(SamplingParams(logit_bias={3: 100}, min_tokens=9), prompt_length=1, stop_ids=[3]), prefix
    )
    assert forced[0, 0, 3] == -math.inf, "no bias brings back what min_tokens forbids"
    hot = distribution(logits, rules_of(SamplingParams(temperature=4.0, top_p=0.5)), blank(1))[0, 0]
    assert int((hot > 0).sum()) == 2, "temperature flattens before top_p cuts"
    narrow = torch.tensor([[[1.0, 0.9, 0.8, 0.7]]])
    narrow = distribution(narrow, rules_of(SamplingParams(top_k=2, top_p=0.5)), blank(1))
    assert int((narrow > 0).sum()) == 1, "top_p is a share of what top_k left (0.52 and 0.48)"


# --- what is refused

NUMBERS: list[tuple[str, list[Any], str]] = [
    ("n", [0, -1, 1025, 1.5, True, "2"], "[1, 1024]"),
    ("temperature", [-0.1, 101, math.nan, math.inf, "warm", True], "[0, 100]"),
    ("top_p", [0, -0.1, 1.01, math.nan, None], "(0, 1]"),
    ("top_k", [-2, 1.5, True, None], ">= -1"),
    ("min_p", [-0.01, 1.01, math.nan], "[0, 1]"),
    ("seed", [-(2**63) - 1, 2**64, 1.0, True, "1"], f"[{-(2**63)}, {2**64 - 1}]"),
    ("max_tokens", [-1, 2.0, True], ">= 0"),
    ("min_tokens", [-1, 0.5, None], ">= 0"),
    ("presence_penalty", [-2.1, 2.1, math.nan], "[-2, 2]"),
    ("frequency_penalty", [-2.1, 2.1, math.inf], "[-2, 2]"),
    ("repetition_penalty", [0, -1, 10.1, math.nan], "(0, 10]"),
    ("logprobs", [-1, MAX_LOGPROBS + 1, 1.5, True], f"[0, {MAX_LOGPROBS}]"),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1], f"[0, {MAX_LOGPROBS}]"),
    ("num_speculative_tokens", [0, -1, 65, 2.5], "[1, 64]"),
    ("speculation", [-1, 65, 1.5, True], "[0, 64]"),
]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [(name, value, allowed) for name, values, allowed in NUMBERS for value in values],
    ids=repr,
)
def test_a_value_out_of_range_is_refused_with_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{name: value})
    message = str(refusal.value)
    assert name in message
    assert repr(value) in message
    assert allowed in message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stop", [""], "empty string"),
        ("stop", [1], "[1]"),
        ("stop", None, "None"),
        ("bad_words", [""], "empty string"),
        ("bad_words", 3, "3"),
        ("stop_token_ids", [-1], "-1"),
        ("stop_token_ids", ["a"], "'a'"),
        ("stop_token_ids", 5, "5"),
        ("logit_bias", [1], "[-100, 100]"),
        ("logit_bias", {"x": 1}, "'x'"),
        ("logit_bias", {-1: 1}, "-1"),
        ("logit_bias", {1: 101}, "[-100, 100]"),
        ("logit_bias", {1: math.nan}, "nan"),
        ("speculation", "always", "'always'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{name: value})
    assert name in str(refusal.value)
    assert said in str(refusal.value)


def test_fewer_tokens_at_most_than_at_least_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(9\).*max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_values_at_the_borders_are_taken() -> None:
    SamplingParams(
        n=1024, temperature=100, top_p=1, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=0, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=10, logit_bias={"3": -100}, logprobs=0, speculation=64,
    )  # fmt: skip
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(logit_bias={"3": 1}).logit_bias == {3: 1.0}
    assert SamplingParams(stop="x").stop == ("x",)


def test_asking_for_a_draft_length_is_understood_in_both_spellings() -> None:
    assert SamplingParams(speculation="off").draft_length == 0
    assert SamplingParams(speculation=7).draft_length == 7
    assert SamplingParams(num_speculative_tokens=3).draft_length == 3
    assert SamplingParams().draft_length is None


def test_a_simple_round_does_not_depend_on_tables_that_it_does_not_read() -> None:
    """A model with several ends of text makes a table grow; what is captured for simple rounds stays good."""
    table = RuleTable(2, CPU)
    table.write(0, SamplingParams(seed=1), stop_ids=[5])
    simple, ruled = RuleFlags(random=True), RuleFlags(random=True, held=True)
    before = table.shapes(simple), table.shapes(ruled)
    gathered = table.gather(torch.tensor([0]), simple)
    table.write(1, SamplingParams(seed=2), stop_ids=[5, 6, 7])
    assert table.shapes(simple) == before[0]
    assert table.shapes(ruled) != before[1]
    again = table.gather(torch.tensor([0]), simple)
    assert torch.equal(gathered.seeds, again.seeds)
    assert torch.equal(gathered.temperature, again.temperature)


def test_a_slot_follows_its_newest_rules_and_nothing_of_those_before() -> None:
    everything = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.5, "min_tokens": 4, "logit_bias": {5: 2.0, 7: -1.0}, "seed": 1,
    }  # fmt: skip
    each: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (everything, {"stop_ids": [3, 4], "bad_words": [[1], [2, 3, 4]], "prompt_length": 9, "sample": 1}),
        ({"seed": 2, "temperature": 0}, {}),
        ({"seed": 3, "logit_bias": {6: 1.0}}, {"stop_ids": [3], "bad_words": [[8, 9]]}),
        ({"seed": 3, "logit_bias": {6: -1.0}}, {"stop_ids": [4], "bad_words": [[9, 8]]}),
        ({"seed": 4}, {}),
    ]
    used, seen = RuleTable(2, CPU), []
    for params, more in [*each, *each]:
        used.write(1, SamplingParams(**params), **more)
        fresh = RuleTable(2, CPU)
        fresh.write(1, SamplingParams(**params), **more)
        flags = fresh.flags([1])
        columns = [vars(table.gather(torch.tensor([1]), replace(flags, banned=True))) for table in (used, fresh)]
        for name, wanted in columns[1].items():
            if isinstance(wanted, torch.Tensor):
                got = columns[0][name].flatten()
                kept = got[(got != -1) & (got != 0)]  # padding: -1, and 0 of a bias
                assert kept.tolist() == wanted.flatten()[(wanted != -1).flatten() & (wanted != 0).flatten()].tolist()
        seen.append(columns[0]["seeds"].item())
    assert len(set(seen)) == 4
