"""Verification is exact in distribution, shown by summing over all that can happen; and it fails safe at the borders.

The sums use the same pure functions that the engine's verifiers use (`accept_probability`, `residual`, `block_walk`):
for every draft, its chance under q times the chance of each outcome, the rest of the text then drawn from the target.
"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from outrider.config import Verification
from outrider.engine.round import judge
from outrider.llm import LLM
from outrider.proposal import Acceptance, Proposal
from outrider.sampling.choose import choose, distribution
from outrider.sampling.params import SamplingParams
from outrider.sampling.random import Purpose, mixed_seed, uniform
from outrider.sampling.rules import Prefix, Rules, RuleTable
from outrider.verify import coupled as coupled_module
from outrider.verify import rejection as rejection_module
from outrider.verify import typical as typical_module
from tests.scripted import ScriptedDrafter, chi_square_p, engine_with, greedy_params
from tests.tiny import byte_tokenizer, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = 20_000
CPU = torch.device("cpu")


# --- a tiny world: p and q as tables over prefixes


class World:
    """Next-token distributions after every prefix of d <= K tokens over V ids: ``p[d]`` and ``q[d]`` ``[V**d, V]``."""

    def __init__(self, vocab_size: int, depth: int, kind: str, dtype: torch.dtype, seed: int) -> None:
        self.vocab_size, self.depth, self.dtype = vocab_size, depth, dtype
        luck = torch.Generator().manual_seed(seed)

        def drawn(rows: int, style: str) -> torch.Tensor:
            table = torch.rand(rows, vocab_size, generator=luck, dtype=torch.float64) + 0.02
            if style == "zeros":
                table = table * (torch.rand(rows, vocab_size, generator=luck) > 0.4)
                table[table.sum(-1) == 0, 0] = 1.0
            if style == "one-hot":
                table = torch.nn.functional.one_hot(table.argmax(-1), vocab_size).double()
            if style == "low half":
                table[:, vocab_size // 2 :] = 0
            if style == "high half":
                table[:, : vocab_size // 2] = 0
            return table / table.sum(-1, keepdim=True)

        styles = {
            "dense": ("dense", "dense"), "zeros": ("zeros", "zeros"), "one-hot p": ("one-hot", "dense"),
            "one-hot q": ("dense", "one-hot"), "equal": ("dense", "same"), "both one-hot": ("one-hot", "one-hot"),
            "equal one-hot": ("one-hot", "same"), "disjoint": ("low half", "high half"),
            "nearly equal": ("dense", "nearly"),
        }  # fmt: skip
        p_style, q_style = styles[kind]
        self.p = [drawn(vocab_size**d, p_style) for d in range(depth + 1)]
        if q_style == "same":
            self.q = [table.clone() for table in self.p[:depth]]
        elif q_style == "nearly":
            self.q = [(table + 1e-9 * torch.rand(table.shape, generator=luck)) for table in self.p[:depth]]
            self.q = [table / table.sum(-1, keepdim=True) for table in self.q]
        else:
            self.q = [drawn(vocab_size**d, q_style) for d in range(depth)]
        self.p = [table.to(dtype) for table in self.p]
        self.q = [table.to(dtype) for table in self.q]

    def row(self, prefix: tuple[int, ...]) -> int:
        index = 0
        for token in prefix:
            index = index * self.vocab_size + token
        return index

    def at_p(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.p[len(prefix)][self.row(prefix)]

    def at_q(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.q[len(prefix)][self.row(prefix)]

    def joint(self) -> torch.Tensor:
        """The target's own distribution of the first K+1 tokens, flat, fp64."""
        out = self.p[0].double().flatten()
        for table in self.p[1:]:
            out = (out[:, None] * table.double()).flatten()
        return out

    def drafts(self, length: int) -> Iterator[tuple[tuple[int, ...], float]]:
        for draft in itertools.product(range(self.vocab_size), repeat=length):
            chance = 1.0
            for place in range(length):
                chance *= float(self.at_q(draft[:place])[draft[place]])
            if chance > 0:
                yield draft, chance

    def batch(self, draft: tuple[int, ...], length: int) -> tuple[Proposal, torch.Tensor, torch.Tensor]:
        """One row as the verifiers see it: K columns of which `length` count, junk after them."""
        tokens = torch.tensor([[*draft, *[0] * (self.depth - length)]])
        q = [self.at_q(draft[:place]) for place in range(length)]
        q += [torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=self.dtype)] * (self.depth - length)
        p = [self.at_p(draft[:place]) for place in range(length + 1)]
        p += [torch.eye(self.vocab_size, dtype=self.dtype)[0]] * (self.depth - length)
        probs = torch.stack(q)[None]
        return Proposal(tokens, torch.tensor([length]), probs), torch.stack(p)[None], probs


def outcomes_of_rejection(proposal: Proposal, p: torch.Tensor, q: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """For each count of accepted guesses: its chance, and what the token after them is drawn from."""
    length = int(proposal.lengths)
    chance = rejection_module.accept_probability(p[:, :-1], q, proposal.tokens)[0].double()
    rest = rejection_module.residual(p[:, :-1], q)[0].double()
    reach, found = 1.0, []
    for place in range(length):
        found.append((reach * (1 - float(chance[place])), rest[place]))
        reach *= float(chance[place])
    found.append((reach, p[0, length].double()))
    return found


def outcomes_of_block(proposal: Proposal, p: torch.Tensor, q: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """The same for block verification, where the longest prefix whose coin falls is accepted."""
    length = int(proposal.lengths)
    chance, weight = rejection_module.block_walk(proposal, p, q)
    rest = rejection_module.residual(p[:, :-1], q, weight[:, :-1, None])[0].double()
    found, none_longer = [], 1.0
    for accepted in range(length, -1, -1):
        fell = 1.0 if accepted == 0 else float(chance[0, accepted - 1])
        left = p[0, length].double() if accepted == length else rest[accepted]
        found.append((none_longer * fell, left))
        none_longer *= 1 - fell
    return found[::-1]


OUTCOMES: dict[str, Callable[..., list[tuple[float, torch.Tensor]]]] = {
    "rejection": outcomes_of_rejection,
    "block": outcomes_of_block,
}


def distribution_of_outputs(world: World, method: str, length: int) -> tuple[torch.Tensor, float]:
    """Sum over drafts: the joint distribution of the K+1 tokens put out, and the expected number accepted."""
    size, full = world.vocab_size, world.depth + 1
    out = torch.zeros([size] * full, dtype=torch.float64)
    expected = 0.0
    for draft, chance in world.drafts(length):
        for accepted, (weight, rest) in enumerate(OUTCOMES[method](*world.batch(draft, length))):
            expected += chance * weight * accepted
            if chance * weight == 0:
                continue
            for token in range(size):
                _spread(world, out, (*draft[:accepted], token), chance * weight * float(rest[token]))
    return out.flatten(), expected


def _spread(world: World, out: torch.Tensor, prefix: tuple[int, ...], chance: float) -> None:
    """Let the target go on by itself from `prefix` to the end."""
    if chance == 0:
        return
    table = torch.tensor(chance, dtype=torch.float64)
    while len(prefix) + table.dim() < out.dim():
        begin = len(prefix) + table.dim()
        below = world.p[begin].double().view([world.vocab_size] * (begin + 1))[prefix]
        table = table[..., None] * below
    out[prefix] += table


def check_exact_in_distribution(
    method: str, kind: str, vocab_size: int, depth: int, dtype: torch.dtype, seed: int = 0
) -> float:
    """The check: total variation to the target within rounding, for every number of guesses up to K."""
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    world = World(vocab_size, depth, kind, dtype, seed)
    expected = 0.0
    for length in range(depth + 1):
        got, expected = distribution_of_outputs(world, method, length)
        assert bool(torch.isfinite(got).all())
        distance = float((got - world.joint()).abs().sum() / 2)
        assert distance <= tolerance, f"{method}, {kind}, {length} of {depth} guesses: total variation {distance}"
    return expected


KINDS = (
    "dense", "zeros", "one-hot p", "one-hot q", "equal", "both one-hot", "equal one-hot", "disjoint", "nearly equal",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", OUTCOMES)
def test_the_sum_over_all_drafts_is_the_targets_distribution(method: str, kind: str, dtype: torch.dtype) -> None:
    """Total variation of the joint over K+1 tokens: 1e-12 in fp64 and 1e-6 in fp32, K=1..3, V=3 and 4."""
    for vocab_size, depth, seed in ((3, 1, 0), (4, 1, 1), (3, 2, 2), (4, 2, 3), (3, 3, 4)):
        check_exact_in_distribution(method, kind, vocab_size, depth, dtype, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_at_least_as_many_as_rejection(kind: str) -> None:
    for seed in range(4):
        world = World(3, 3, kind, torch.float64, seed)
        by_block, by_rejection = (distribution_of_outputs(world, method, 3)[1] for method in ("block", "rejection"))
        assert by_block >= by_rejection - 1e-12
    if kind == "dense":
        assert by_block > by_rejection


def test_the_vectorised_verifiers_follow_the_same_chances() -> None:
    """What the sums add up is what `verify_*` do: accepted counts over 20k rows match the enumerated chances."""
    world = World(4, 3, "dense", torch.float32, 5)
    draft = (1, 2, 0)
    for method, verifier in VERIFIERS.items():
        for length in (3, 2):
            proposal, p, q = world.batch(draft[:length], length)
            wanted = torch.tensor([weight for weight, _ in OUTCOMES[method](proposal, p, q)])
            made = verifier(_repeated(proposal), p.expand(ROWS, -1, -1), seeds(), positions(3))
            counts = torch.bincount(made.num_accepted, minlength=length + 1).double()
            assert chi_square_p(counts, wanted * ROWS) > 0.001


VERIFIERS: dict[str, Callable[..., Acceptance]] = {
    "rejection": rejection_module.verify_rejection,
    "block": rejection_module.verify_block,
}


def seeds(first: int = 0) -> torch.Tensor:
    """20k rows with seeds of their own."""
    return torch.arange(first, first + ROWS) * 1_000_003


def positions(num_tokens: int, begin: int = 5) -> torch.Tensor:
    return begin + torch.arange(num_tokens + 1).expand(ROWS, -1)


def _repeated(proposal: Proposal) -> Proposal:
    probs = None if proposal.probs is None else proposal.probs.expand(ROWS, -1, -1)
    return Proposal(proposal.tokens.expand(ROWS, -1), proposal.lengths.expand(ROWS), probs)


def rules_for(params: SamplingParams, rows: int = ROWS) -> Rules:
    """One setting for many rows, each with its own seed."""
    import dataclasses

    table = RuleTable(1, CPU)
    table.write(0, params.but(seed=0))
    rules = table.select([0])
    expanded = {
        name: one.expand(rows, *one.shape[1:]) for name, one in vars(rules).items() if isinstance(one, torch.Tensor)
    }
    return dataclasses.replace(rules, **{**expanded, "seeds": seeds()[:rows]})


# --- drawn, through the functions the engine calls


def check_joint_of_two_tokens(verification: Verification, params: SamplingParams, draft: str) -> None:
    """CHI: 20k rows draft two tokens, verify, and let plain rounds finish; the joint of the first two is the target's.

    `draft` is "sampled" (drawn by the drafters' own rule, q as they return it), "greedy" (q's best token, with q as
    its probabilities would be wrong: it is one-hot) or "certain" (no q at all, as lookup).
    """
    luck = torch.Generator().manual_seed(3)
    size, num_tokens = 8, 2
    by_last = torch.randn(size, size, generator=luck) * 0.7  # the target: logits by the last token
    guess_by_last = by_last + torch.randn(size, size, generator=luck)
    rules = rules_for(params)
    text = torch.zeros(ROWS, 5 + num_tokens + 1, dtype=torch.long)
    ends = positions(num_tokens)
    guesses, probs = [], []
    purpose = Purpose.GUESS if verification.draws_guesses else Purpose.CHOICE
    last = text[:, 4]
    for step in range(num_tokens):
        prefix = Prefix(text, ends[:, step : step + 1])
        logits = guess_by_last[last][:, None]
        q = distribution(logits, rules, prefix)
        if draft == "sampled":
            last = choose(logits, rules, prefix, purpose)[:, 0]
        else:
            last = q.argmax(-1)[:, 0]
            q = torch.nn.functional.one_hot(last, size).float()[:, None]
        guesses.append(last[:, None])
        probs.append(q)
    tokens = torch.cat(guesses, 1)
    proposal = Proposal(tokens, torch.full((ROWS,), num_tokens), None if draft == "certain" else torch.cat(probs, 1))
    fed = torch.cat([text[:, 4:5], tokens], 1)
    logits = by_last[fed]
    made = judge_as_engine(verification, proposal, logits, rules, Prefix(text, ends))
    out = made.tokens.clone()
    # Rows that accepted nothing have one token so far: a plain round gives the second.
    again = judge_as_engine(
        verification,
        Proposal.empty(ROWS, 0, CPU),
        by_last[out[:, 0]][:, None],
        rules,
        Prefix(text, ends[:, 1:2]),
    )
    second = torch.where(made.num_accepted >= 1, out[:, 1], again.tokens[:, 0])
    p = distribution(by_last[:, None], rules_for(params, size), Prefix(text[:size], ends[:size, :1]))[:, 0].double()
    joint = p[0][:, None] * p
    counts = torch.bincount(out[:, 0] * size + second, minlength=size * size).double()
    assert chi_square_p(counts, joint.flatten() * ROWS) > 0.001
    if draft == "sampled":
        assert 0 < int(made.num_accepted.sum()) < num_tokens * ROWS, "nothing was put to the test"


def judge_as_engine(
    verification: Verification, proposal: Proposal, logits: torch.Tensor, rules: Rules, prefix: Prefix
) -> Acceptance:
    return judge(verification, proposal, logits, rules, prefix)


@pytest.mark.parametrize("draft", ["sampled", "greedy", "certain"])
@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION, Verification.BLOCK])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.8),
        SamplingParams(temperature=1.6, min_p=0.2),
    ],
    ids=["T=1", "top_k and top_p", "min_p"],
)
def test_the_joint_of_two_tokens_follows_the_target(
    params: SamplingParams, verification: Verification, draft: str
) -> None:
    """F01, F02, F11: sampled and greedy drafts, filtered q, and deterministic guesses."""
    check_joint_of_two_tokens(verification, params, draft)


@pytest.mark.parametrize("draft_temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION, Verification.BLOCK])
def test_a_draft_equal_to_the_target_is_always_accepted(verification: Verification, draft_temperature: float) -> None:
    """F04: D= at every temperature."""
    logits = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1)).expand(500, -1, -1)
    rules = rules_for(SamplingParams(temperature=draft_temperature), 500)
    prefix = Prefix(torch.zeros(500, 9, dtype=torch.long), positions(2)[:500])
    purpose = Purpose.GUESS if verification.draws_guesses else Purpose.CHOICE
    before = Prefix(prefix.tokens, prefix.ends[:, :2])
    tokens = choose(logits[:, :2], rules, before, purpose)
    q = distribution(logits[:, :2], rules, before) if verification.draws_guesses else None
    made = judge_as_engine(verification, Proposal(tokens, torch.full((500,), 2), q), logits, rules, prefix)
    assert bool((made.num_accepted == 2).all())


# --- borders


@pytest.mark.parametrize("method", VERIFIERS)
def test_a_token_the_target_cannot_say_is_refused_even_by_the_lowest_coin(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F08: u = 0 exactly and p = 0."""
    monkeypatch.setattr(rejection_module, "uniform", lambda seeds, positions, purpose: torch.zeros(positions.shape))
    p = torch.tensor([[[0.0, 0.4, 0.6], [0.2, 0.3, 0.5]]])
    for probs in (None, torch.tensor([[[0.9, 0.05, 0.05]]])):
        made = VERIFIERS[method](
            Proposal(torch.tensor([[0]]), torch.tensor([1]), probs), p, torch.tensor([1]), torch.tensor([[4, 5]])
        )
        assert made.num_accepted.tolist() == [0]
        assert made.tokens[0, 0] != 0


def test_coins_lie_strictly_between_zero_and_one() -> None:
    coins = uniform(seeds(), positions(40), Purpose.ACCEPT)
    assert float(coins.min()) > 0
    assert float(coins.max()) < 1
    assert float(coins.mean()) == pytest.approx(0.5, abs=0.002)


@pytest.mark.parametrize("method", VERIFIERS)
def test_nothing_becomes_nan_where_draft_and_target_agree_exactly(method: str) -> None:
    """F09: p == q, one-hot p, and both at a tiny temperature; a refusal there falls back to p."""
    one_hot, spread = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    rules = rules_for(SamplingParams(temperature=1e-4), 2)
    prefix = Prefix(torch.zeros(2, 2).long(), torch.ones(2, 1).long())
    cold = distribution(torch.tensor([3.0, 2.999, -50]).expand(2, 1, 3), rules, prefix)[0, 0]
    assert bool(torch.isfinite(cold).all())
    for p in (one_hot, spread, cold):
        assert torch.equal(rejection_module.residual(p, p), p)
        token = int(p.argmax())
        table = p.expand(200, 3, 3)
        proposal = Proposal(torch.full((200, 2), token), torch.full((200,), 2), table[:, :2])
        made = VERIFIERS[method](proposal, table, seeds()[:200], positions(2)[:200])
        assert bool((made.num_accepted == 2).all())
        assert bool((p[made.tokens[:, 2]] > 0).all())


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK, Verification.COUPLED])
def test_greedy_takes_the_likeliest_token_whatever_the_ratio_of_raw_probabilities(verification: Verification) -> None:
    """A14: target 0.5/0.3/0.2, the 0.3 token proposed with q = 0.2, temperature 0, 1000 seeds."""
    rules = rules_for(SamplingParams(temperature=0), 1000)
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 2, 3)
    q = torch.tensor([0.6, 0.2, 0.2]).expand(1000, 1, 3)
    for guess in (0, 1, 2):
        made = judge_as_engine(
            verification, Proposal(torch.full((1000, 1), guess), torch.ones(1000).long(), q), logits, rules,
            Prefix(torch.zeros(1000, 8).long(), positions(1)[:1000]),
        )  # fmt: skip
        assert bool((made.tokens[:, 0] == 0).all())
        assert bool((made.num_accepted == (guess == 0)).all())


@pytest.mark.parametrize("method", VERIFIERS)
def test_a_guess_that_was_not_drawn_is_accepted_with_the_targets_own_probability(method: str) -> None:
    """F11: without q a guess is a certainty, and acceptance has chance p(x)."""
    p = torch.tensor([[0.1, 0.3, 0.6], [0.3, 0.3, 0.4]]).expand(ROWS, 2, 3)
    for guess, chance in enumerate(p[0, 0].tolist()):
        made = VERIFIERS[method](
            Proposal(torch.full((ROWS, 1), guess), torch.ones(ROWS).long()), p, seeds(), positions(1)
        )
        rate = float((made.num_accepted == 1).float().mean())
        assert rate == pytest.approx(chance, abs=4 * (chance * (1 - chance) / ROWS) ** 0.5)


def test_filters_leave_the_best_token_and_guesses_outside_are_refused() -> None:
    """F06: top_k=1 with top_p at a tiny temperature, top_k=2 with a tiny top_p, min_p=1."""
    logits = torch.tensor([0.1, 2.0, 1.9, -1.0]).expand(64, 2, 4)
    prefix = Prefix(torch.zeros(64, 8).long(), positions(1)[:64])
    for params in (
        SamplingParams(temperature=0.01, top_k=1, top_p=0.8),
        SamplingParams(top_k=2, top_p=0.05),
        SamplingParams(min_p=1.0),
    ):
        rules = rules_for(params, 64)
        p = distribution(logits, rules, prefix)
        assert bool((p > 0).any(-1).all())
        assert p[0, 0].argmax() == 1
        assert p[0, 0, 2] == 0
        for verification in (Verification.COUPLED, Verification.REJECTION, Verification.BLOCK):
            made = judge_as_engine(
                verification, Proposal(torch.full((64, 1), 2), torch.ones(64).long()), logits, rules, prefix
            )
            assert bool((made.num_accepted == 0).all())
            assert bool((made.tokens[:, 0] == 1).all())


def check_rows_of_different_lengths(method: str) -> None:
    """A row's result does not depend on how many guesses its batch mates have, nor on what lies behind its own."""
    world = World(4, 3, "dense", torch.float32, 9)
    rows = [world.batch((1, 2, 0)[:length], length) for length in (0, 1, 2, 3)]
    together = Proposal(
        torch.cat([one.tokens for one, _, _ in rows]),
        torch.cat([one.lengths for one, _, _ in rows]),
        torch.cat([q for _, _, q in rows]),
    )
    p = torch.cat([p for _, p, _ in rows])
    for seed in range(60):
        key, place = torch.full((4,), mixed_seed(seed)), positions(3)[:4]
        made = VERIFIERS[method](together, p, key, place)
        for row, (proposal, one_p, q) in enumerate(rows):
            length = int(proposal.lengths)
            taken = int(made.num_accepted[row])
            assert taken <= length
            if length == 0:
                continue
            narrow = Proposal(proposal.tokens[:, :length], proposal.lengths, q[:, :length])
            alone = VERIFIERS[method](narrow, one_p[:, : length + 1], key[:1], place[:1, : length + 1])
            assert taken == int(alone.num_accepted)
            assert made.tokens[row, : taken + 1].tolist() == alone.tokens[0, : taken + 1].tolist()


@pytest.mark.parametrize("method", VERIFIERS)
def test_rows_of_different_lengths_share_a_batch_without_touching_each_other(method: str) -> None:
    check_rows_of_different_lengths(method)


# --- coupled


def check_coupled_walk() -> None:
    """Agreement counts to the first difference, within the row's own guesses; the choice is committed."""
    choice = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    tokens = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 7], [9, 6, 7], [5, 6, 7]])
    made = coupled_module.verify_coupled(Proposal(tokens, torch.tensor([3, 3, 1, 3, 0])), choice)
    assert made.num_accepted.tolist() == [3, 1, 1, 0, 0]
    assert torch.equal(made.tokens, choice)
    assert made.lengths.tolist() == [4, 2, 2, 1, 1]


def test_the_coupled_walk_stops_at_the_first_difference_and_at_each_rows_own_length() -> None:
    check_coupled_walk()


def test_shared_noise_agrees_at_least_as_often_as_the_bound_says() -> None:
    """Design, section 2: agreement is at least (1 - TV) / (1 + TV), and well above that of independent draws."""
    luck = torch.Generator().manual_seed(0)
    rules = rules_for(SamplingParams(temperature=1.0))
    prefix = Prefix(torch.zeros(ROWS, 8).long(), positions(0))
    for strength in (0.2, 0.7, 2.0):
        p_logits = torch.randn(1, 1, 12, generator=luck) * 1.5
        q_logits = p_logits + strength * torch.randn(1, 1, 12, generator=luck)
        p, q = p_logits.softmax(-1), q_logits.softmax(-1)
        variation = float((p - q).abs().sum() / 2)
        choice = choose(p_logits.expand(ROWS, -1, -1), rules, prefix)
        guess = choose(q_logits.expand(ROWS, -1, -1), rules, prefix)
        agreement = float((choice == guess).float().mean())
        bound = (1 - variation) / (1 + variation)
        assert bound - 0.015 <= agreement <= 1 - variation + 0.015
        assert agreement > float((p * q).sum()) + 0.02, "no better than independent draws"


# --- typical


def test_typical_acceptance_keeps_likely_guesses_by_the_papers_threshold() -> None:
    """min(0.09, 0.3 exp(-H)): a guess above it is kept though the target chose another; a guess below it is not."""
    sharp, flat = torch.tensor([0.9, 0.08, 0.02, 0.0]), torch.full((4,), 0.25)
    p = torch.stack([torch.stack([sharp, flat]), torch.stack([flat, sharp]), torch.stack([sharp, flat])])
    choice = torch.tensor([[0, 3], [2, 3], [0, 3]])
    made = typical_module.verify_typical(Proposal(torch.tensor([[1], [1], [0]]), torch.tensor([1, 1, 0])), p, choice)
    assert made.num_accepted.tolist() == [0, 1, 0]  # 0.08 < 0.09 in the sharp row; 0.25 > 0.075 in the flat one
    assert made.tokens[0, 0] == 0
    assert made.tokens[1].tolist() == [1, 3]


def test_typical_acceptance_is_exact_for_a_greedy_row() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]).repeat(2, 1, 1)
    choice = torch.tensor([[1, 0], [1, 0]])
    made = typical_module.verify_typical(Proposal(torch.tensor([[0], [1]]), torch.tensor([1, 1])), p, choice)
    assert made.num_accepted.tolist() == [0, 1]
    assert made.tokens[0, 0] == 1


def test_typical_warns_when_chosen_and_marks_what_it_touched() -> None:
    """The one lossy verifier is opt-in by name, warned about, and marked in the output; the exact ones are silent."""
    model = tiny_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(model, tokenizer=byte_tokenizer(), device="cpu", verification="block").close()
    with pytest.warns(UserWarning, match="lossy"):
        llm = engine_with(ScriptedDrafter(), model, verification="typical")
    marked = llm.generate(prompt_token_ids=[5, 6], sampling_params=SamplingParams(max_tokens=6, seed=1, speculation=3))
    assert marked[0].stats.lossy
    untouched = llm.generate(prompt_token_ids=[5, 6], sampling_params=greedy_params(6, "off"))
    assert not untouched[0].stats.lossy
    exact = engine_with(ScriptedDrafter(), model, verification="rejection")
    assert not exact.generate(prompt_token_ids=[5, 6], sampling_params=greedy_params(6, 3))[0].stats.lossy
