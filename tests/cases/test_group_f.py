"""Group F: what is sampled follows the target's distribution, however guesses are made and judged."""

from __future__ import annotations

import pytest
import torch

from outrider import SamplingParams
from outrider.proposal import Proposal
from outrider.sampling.choose import choose, distribution
from outrider.sampling.random import Purpose
from outrider.sampling.rules import Prefix, RuleTable
from outrider.verify import rejection
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    TableLookup,
    base,
    chi_square_p,
    draft,
    guessed,
    ids,
    model_drafter,
    sampled,
    shaped_distribution,
    tables,
)

EXACT = ["coupled", "rejection", "block"]
PLAIN = SamplingParams()
RUNS = 40_000


@pytest.mark.parametrize("verification", EXACT)
@pytest.mark.parametrize("guesser", ["sampled", "greedy"])
def test_F01_sampled_and_greedy_guesses_leave_the_distribution_alone(verification: str, guesser: str) -> None:
    """Fixed tables p and q, T=1, k=3: CHI on the joint of three tokens, with sampled and with argmax guesses."""
    table, other = tables(0)
    chain, at = [], 0
    for _ in range(3):
        at = int(other[at].argmax())
        chain.append(at)
    drafter = model_drafter(other) if guesser == "sampled" else TableLookup(chain)
    tokens, rate = sampled(table, drafter, verification, PLAIN, num_runs=RUNS)
    assert chi_square_p(tokens, shaped_distribution(table)) > 1e-3 and 0.1 < rate < 0.95


@pytest.mark.parametrize("verification", EXACT)
def test_F02_filters_are_the_same_on_both_sides(verification: str) -> None:
    """top_k=3, top_p=0.8, T=0.7: CHI against the filtered distribution, and no token outside it."""
    table, other = tables(1)
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.8)
    tokens, _ = sampled(table, model_drafter(other), verification, params, num_runs=RUNS)
    assert chi_square_p(tokens, shaped_distribution(table, temperature=0.7, top_k=3, top_p=0.8)) > 1e-3


def rules_of(params: SamplingParams, rows: int = 1) -> object:
    table = RuleTable(1, torch.device("cpu"))
    table.write(0, params.but(seed=1), prompt_length=1)
    return table.select([0] * rows)


def test_F02_q_sums_to_one_over_what_can_be_drawn() -> None:
    """The q that the draft returns has the support of its own sampler, position by position."""
    _, other = tables(1)
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.8)
    rules = rules_of(params, 4000)
    object.__setattr__(rules, "seeds", torch.arange(4000) * 104729)
    prefix = Prefix(torch.zeros(4000, 4, dtype=torch.long), torch.ones(4000, 1, dtype=torch.long))
    logits = other[0].expand(4000, 1, -1)
    q = distribution(logits, rules, prefix)[0, 0]  # type: ignore[arg-type]
    drawn = set(choose(logits, rules, prefix, Purpose.GUESS).flatten().tolist())  # type: ignore[arg-type]
    assert drawn == set(q.nonzero().flatten().tolist()) and float(q.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("verification", EXACT)
def test_F04_the_draft_samples_with_the_request_s_temperature(temperature: float, verification: str) -> None:
    """D= is accepted always, at every temperature, and the distribution is right."""
    table, _ = tables(3)
    tokens, rate = sampled(
        table, model_drafter(table.clone()), verification, SamplingParams(temperature=temperature), num_runs=8000
    )
    assert rate == 1.0
    assert chi_square_p(tokens, shaped_distribution(table, temperature=temperature)) > 1e-3


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"top_k": 1, "top_p": 0.8, "temperature": 0.01}, 1),
        ({"top_k": 2, "top_p": 0.05}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": 2, "top_p": 0.999}, 2),
    ],
)
def test_F06_filters_together_always_leave_the_best_token(asked: dict, left: int) -> None:
    """top_k then top_p (then min_p) over a renormalised rest: never an empty support; EQ with BASE where it is one."""
    table, _ = tables(4)
    prefix = Prefix(torch.zeros(len(table), 2, dtype=torch.long), torch.ones(len(table), 1, dtype=torch.long))
    p = distribution(table[:, None], rules_of(SamplingParams(**asked), len(table)), prefix)[:, 0]  # type: ignore[arg-type]
    assert p.count_nonzero(-1).tolist() == [left] * len(table) and p.argmax(-1).equal(table.argmax(-1))
    params = [SamplingParams(seed=5, max_tokens=12, **asked)] * 2
    assert ids(guessed(PROMPTS[:2], draft("noisy"), 3, params=params)) == ids(base(PROMPTS[:2], params=params))


@pytest.mark.parametrize("verify", [rejection.verify_rejection, rejection.verify_block])
def test_F08_a_coin_of_zero_does_not_accept_a_ruled_out_token(verify: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """u=0.0 exactly and p(token)=0: rejected."""
    monkeypatch.setattr(rejection, "uniform", lambda seeds, positions, purpose: torch.zeros(positions.shape))
    p = torch.tensor([[[0.0, 0.6, 0.4], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.8, 0.1, 0.1]]])
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), q)
    judged = verify(proposal, p, torch.tensor([1]), torch.tensor([[1, 2]]))  # type: ignore[operator]
    assert judged.num_accepted.item() == 0 and judged.tokens[0, 0].item() in (1, 2)


@pytest.mark.parametrize("verify", [rejection.verify_rejection, rejection.verify_block])
@pytest.mark.parametrize("row", [[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]])
def test_F09_an_empty_residual_is_never_nan(verify: object, row: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """p == q exactly, also one-hot: falls back to p; even a coin that refuses everything yields a token of p."""
    p, q = torch.tensor([[row, row]]), torch.tensor([[row]])
    assert rejection.residual(p[:, :1], q).equal(p[:, :1])
    monkeypatch.setattr(rejection, "uniform", lambda seeds, positions, purpose: torch.ones(positions.shape))
    judged = verify(Proposal(torch.tensor([[1]]), torch.tensor([1]), q), p, torch.tensor([1]), torch.tensor([[1, 2]]))  # type: ignore[operator]
    assert row[int(judged.tokens[0, 0])] > 0


@pytest.mark.parametrize("verification", EXACT)
def test_F09_a_tiny_temperature_is_no_numerical_accident(verification: str) -> None:
    """T=1e-4 with D~: every token is the argmax, nothing is NaN."""
    table, other = tables(5, distance=0.2)
    tokens, _ = sampled(table, model_drafter(other), verification, SamplingParams(temperature=1e-4), num_runs=200)
    at, chain = 0, []
    for _ in range(3):
        at = int(table[at].argmax())
        chain.append(at)
    assert tokens.eq(torch.tensor(chain)).all()


@pytest.mark.parametrize("verification", EXACT)
def test_F11_a_deterministic_guess_is_accepted_with_probability_p(verification: str) -> None:
    """A lookup's guess is a certainty: accepted with p(x), and CHI."""
    table, _ = tables(6)
    guess = int(table[0].argsort()[-2])
    tokens, rate = sampled(table, TableLookup([guess]), verification, PLAIN, k=1, num_tokens=1)
    wanted = float(table[0].softmax(-1)[guess])
    assert rate == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / 20_000) ** 0.5)
    assert chi_square_p(tokens, shaped_distribution(table)) > 1e-3


@pytest.mark.parametrize("verification", EXACT)
def test_F12_each_row_is_judged_by_its_own_settings(verification: str) -> None:
    """One batch of T=0, T=0.7 top_p=.9 and T=1.5 top_k=3: each row CHI to its own."""
    table, other = tables(7)
    params = [GREEDY, SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.5, top_k=3)]
    tokens, _ = sampled(table, model_drafter(other), verification, params, num_runs=RUNS)
    wanted = [
        torch.nn.functional.one_hot(table.argmax(-1), len(table)).double(),
        shaped_distribution(table, temperature=0.7, top_p=0.9),
        shaped_distribution(table, temperature=1.5, top_k=3),
    ]
    assert tokens[0::3].unique(dim=0).shape[0] == 1
    for row in (0, 1, 2):
        assert chi_square_p(tokens[row::3], wanted[row]) > 1e-3
