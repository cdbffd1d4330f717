"""Chains that stop where the draft is not sure: what is learned of that, when they stop, and that it pays."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.draft.chain import Chain
from outrider.draft.confidence import Confidence
from outrider.draft.drafter import DraftRows, SteppingDrafter
from outrider.sampling.rules import Rules, RuleTable
from tests.scripted import greedy_params
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB = 8


def rows_of(count: int, least: float, temperature: float = 0.0) -> DraftRows:
    params = SamplingParams(temperature=temperature, seed=1)
    return DraftRows(
        slots=tuple(range(count)),
        index=torch.arange(count),
        tokens=torch.zeros(count, 64, dtype=torch.long),
        lengths=torch.ones(count, dtype=torch.long),
        host_lengths=(1,) * count,
        tables=torch.zeros(count, 4, dtype=torch.long),
        start=None,
        rules=rules_for(params, count),
        independent=False,
        least=least,
    )


def rules_for(params: SamplingParams, count: int) -> Rules:
    table = RuleTable(count, torch.device("cpu"))
    for slot in range(count):
        table.write(slot, params, prompt_length=1)
    return table.select(range(count))


def sure(chance: float) -> torch.Tensor:
    """Logits of one row whose likeliest token has this chance."""
    rest = torch.full((VOCAB - 1,), (1 - chance) / (VOCAB - 1))
    return torch.cat([torch.tensor([chance]), rest]).log()[None, None]


def written(confidence: Confidence, least: float, *certainties: float, temperature: float = 0.0) -> int:
    """Write a chain for one row as a drafter does; give its length."""
    chain = Chain(rows_of(1, least, temperature), torch.device("cpu"), confidence)
    for one in certainties:
        chain.add(sure(one))
        if not chain.goes_on:
            break
    chain.proposal(torch.tensor([chain.num_guesses]), len(certainties))
    return chain.num_guesses


def test_a_chain_stops_behind_the_guess_that_makes_it_unlikely() -> None:
    confidence = Confidence()
    assert written(confidence, 0.0, 0.2, 0.2, 0.2) == 3  # nobody asked
    assert written(confidence, 0.3, 0.99, 0.99, 0.99) == 3
    assert written(confidence, 0.3, 0.99, 0.2, 0.99) == 2
    assert written(confidence, 5.0, 0.99, 0.99) == 1  # one row cannot give five tokens
    assert written(confidence, 0.3, float("nan"), 0.9) == 1


def test_rows_are_worth_a_step_together() -> None:
    rows, confidence = rows_of(4, 1.0), Confidence()
    chain = Chain(rows, torch.device("cpu"), confidence)
    chain.add(sure(0.5).expand(4, 1, VOCAB))
    assert chain.goes_on  # four halves
    chain.add(sure(0.3).expand(4, 1, VOCAB))
    assert not chain.goes_on


def test_what_certainty_is_worth_is_learned_and_forgotten() -> None:
    """A draft that is always sure and never right, until it is: chains become short, then long."""
    confidence = Confidence()
    for _ in range(100):
        written(confidence, 0.3, 0.95, 0.95)
        confidence.learn(0, 0)
    assert written(confidence, 0.3, 0.95, 0.95, 0.95) == 1
    assert written(confidence, 0.3, 0.95, 0.95, 0.95, temperature=1.0) == 3  # drawn text is another matter
    for _ in range(1000):
        written(confidence, 0.3, 0.95)
        confidence.learn(0, 1)
    assert written(confidence, 0.3, 0.95, 0.95, 0.95) == 3


def test_a_chain_that_was_not_watched_teaches_nothing() -> None:
    confidence = Confidence()
    for _ in range(50):
        written(confidence, 0.3, 0.95)  # its text ended: nobody tells how it fared
        written(confidence, 0.0, 0.95)
        confidence.learn(0, 0)
        confidence.learn(1, 0)
    assert written(confidence, 0.3, 0.95, 0.95, 0.95) == 3


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    model = tiny_target()
    with LLM(model, tiny_draft(model, "noisy"), 8, tokenizer=byte_tokenizer(), device="cpu", max_num_seqs=4) as llm:
        yield llm


def asked_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, least: float, length: int = 8) -> list[Any]:
    """Let the controller always choose one length and one measure; note what the drafter was asked."""
    from outrider.engine.controller import Choice, Controller, Party, Wish

    def choose(_: Controller, party: Party, wishes: list[Wish]) -> Choice:
        assert party.stops and party.narrows
        return Choice([min(length, wish.most) for wish in wishes], least=least)

    seen, drafter = [], llm.engine.drafter
    assert isinstance(drafter, SteppingDrafter)
    propose = drafter.propose

    def noted(rows: DraftRows, num_tokens: int) -> Any:
        proposal = propose(rows, num_tokens)
        seen.append((rows.least, num_tokens, int(proposal.lengths.max()), drafter.num_steps))
        return proposal

    monkeypatch.setattr(Controller, "choose", choose)
    monkeypatch.setattr(drafter, "propose", noted)
    return seen


def test_an_engine_stops_chains_and_times_the_steps_that_were_made(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pair.generate([[65, 66]], greedy_params(40, "off"))[0]
    seen, timed = asked_of(pair, monkeypatch, least=0.4), []
    costs = pair.engine.speculator.costs
    assert costs is not None
    monkeypatch.setattr(costs, "took_draft", lambda _, rows, tokens, *__, **___: timed.append((rows, tokens)))
    done = pair.generate([[65, 66]], greedy_params(40, "auto"))[0]
    assert done.token_ids == plain.token_ids
    assert all(made == steps for _, _, made, steps in seen)
    assert any(steps < asked for _, asked, _, steps in seen), "no chain was cut"
    assert {tokens for _, tokens in timed} - {0} == {steps for *_, steps in seen}  # 0: a plain round
    assert done.stats.drafted == sum(made for _, _, made, _ in seen)


def test_a_request_that_names_a_length_gets_it_whole(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a round with others, whose chains might stop."""
    seen = asked_of(pair, monkeypatch, least=0.9)
    pair.generate([[65, 66], [67, 68]], [greedy_params(60, "auto"), greedy_params(12, 4)])
    together = [one for one in seen if not one[0]]
    assert 2 <= len(together) < len(seen)
    assert all((made, steps) == (asked, 0) for _, asked, made, steps in together)
    assert [least for least, *_ in seen] == [0.0] * len(together) + [0.9] * (len(seen) - len(together))


def test_stopping_pays_where_the_draft_knows_when_it_is_wrong() -> None:
    """Two thousand coins: a draft that is sure of three in four guesses, and right with them."""
    luck, confidence = random.Random(0), Confidence()
    step, rate = 0.2, 2.0
    text = [luck.choice((0.98, 0.98, 0.98, 0.35)) for _ in range(2_000)]
    right = [luck.random() < one for one in text]

    def speed(length: int, least: float) -> float:
        place, seconds = 0, 0.0
        while place < len(text) - length - 1:
            made = written(confidence, least, *text[place : place + length])
            good = 0
            while good < made and right[place + good]:
                good += 1
            confidence.learn(0, good)
            seconds += 1 + step * made
            place += good + 1
        return place / seconds

    fixed = max(speed(length, 0.0) for length in (2, 3, 4, 5))
    assert speed(8, rate * step) > 1.08 * fixed
