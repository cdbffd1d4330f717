"""Trees: who precedes whom, which path is kept, and that judging siblings is exact in distribution."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outrider.llm import LLM
from outrider.proposal import ROOT, Proposal
from outrider.sampling.params import SamplingParams
from outrider.verify.tree import verify_tree_coupled, verify_tree_rejection, verify_tree_typical
from tests.scripted import ALL, ScriptedDrafter, bushy, chi_square_p, engine_with, full_texts, greedy_params
from tests.tiny import byte_tokenizer, tiny_target

ROWS = 40_000


def tree_of(tokens: list[int], parents: list[int], length: int | None = None) -> Proposal:
    count = len(tokens) if length is None else length
    return Proposal(torch.tensor([tokens]), torch.tensor([count]), None, torch.tensor([parents]))


def random_parents(luck: random.Random, count: int) -> list[int]:
    return [luck.randint(ROOT, node - 1) for node in range(count)]


@pytest.mark.parametrize("count", [1, 2, 7, 40, 63])
def test_a_tree_knows_who_precedes_whom(count: int) -> None:
    luck = random.Random(count)
    parents = random_parents(luck, count)
    tree = tree_of([0] * count, parents).tree()
    bits = tree.ancestors[0].tolist()
    for node in range(count):
        path, at = {node + 1, 0}, parents[node]
        while at != ROOT:
            path.add(at + 1)
            at = parents[at]
        assert {bit for bit in range(count + 1) if bits[node + 1] >> bit & 1} == path
        assert tree.depths[0, node + 1] == len(path) - 1
    assert (bits[0] & (2**64 - 1), int(tree.depths[0, 0])) == (1, 0)


def test_a_chain_is_a_tree_without_branches() -> None:
    chain = Proposal(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    assert chain.tree().depths.tolist() == [[0, 1, 2, 3]]
    assert chain.tree().ancestors.tolist() == [[1, 3, 7, 15]]


def test_the_walk_follows_the_choice_through_the_tree() -> None:
    #        root -> 0 (5), 1 (6);  1 -> 2 (7), 3 (8);  3 -> 4 (9)
    proposal = tree_of([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3])
    choice = torch.tensor([[6, 0, 8, 0, 9, 1]])  # after the root 6, after node 1 8, after node 3 9, after node 4 1
    kept = verify_tree_coupled(proposal, proposal.tree(), choice)
    assert kept.num_accepted.tolist() == [3]
    assert kept.path is not None
    assert kept.path[0, :4].tolist() == [0, 2, 4, 5]
    assert kept.tokens[0, :4].tolist() == [6, 8, 9, 1]
    cut = tree_of([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], length=3)
    assert verify_tree_coupled(cut, cut.tree(), choice).num_accepted.tolist() == [1]


def test_of_equal_siblings_the_first_is_walked() -> None:
    proposal = tree_of([5, 5, 6], [-1, -1, 1])
    kept = verify_tree_coupled(proposal, proposal.tree(), torch.tensor([[5, 6, 6, 6]]))
    assert kept.path is not None
    assert (kept.num_accepted.tolist(), kept.path[0, :2].tolist()) == ([1], [0, 1])


def slow_walk(tokens: list[int], parents: list[int], choice: list[int], length: int) -> list[int]:
    at, out = ROOT, [choice[0]]
    while True:
        children = (node for node in range(length) if parents[node] == at and tokens[node] == out[-1])
        step = next(children, None)
        if step is None:
            return out
        at = step
        out.append(choice[at + 1])


def test_any_tree_is_walked_as_one_would_by_hand() -> None:
    luck = random.Random(1)
    for _ in range(200):
        count = luck.randint(1, 12)
        parents, tokens = random_parents(luck, count), [luck.randint(0, 2) for _ in range(count)]
        choice, length = [luck.randint(0, 2) for _ in range(count + 1)], luck.randint(0, count)
        proposal = tree_of(tokens, parents, length)
        kept = verify_tree_coupled(proposal, proposal.tree(), torch.tensor([choice]))
        accepted = int(kept.num_accepted)
        assert kept.tokens[0, : accepted + 1].tolist() == slow_walk(tokens, parents, choice, length)
        assert kept.path is not None
        assert kept.path[0, accepted + 1 :].tolist() == list(range(accepted + 1, count + 1))


def test_broken_trees_are_cut_before_they_are_fed() -> None:
    proposal = tree_of([5, 6, 7], [-1, 1, 0])  # node 1 would follow itself
    safe = proposal.limited(torch.tensor([3]), 10)
    assert safe.lengths.tolist() == [1]
    assert safe.tree().depths.shape == (1, 4)


# --- exactness in distribution


def tables(vocab: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """P after the root and after each of its children, q of the children."""
    luck = torch.Generator().manual_seed(3)
    p = torch.rand(vocab + 1, vocab, generator=luck, dtype=torch.float64) + 0.05
    q = torch.rand(vocab, generator=luck, dtype=torch.float64) + 0.05
    if kind == "zeros":
        p[:, 0], q[1] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum()


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize("drawn", ["with replacement", "without replacement", "certain"])
def test_judging_siblings_leaves_the_targets_distribution(drawn: str, kind: str) -> None:
    """Three children of the root and a child of each; the first two tokens must come as from the target alone."""
    vocab = 4
    p, q = tables(vocab, kind)
    luck = torch.Generator().manual_seed(5)
    left = q.expand(ROWS, -1).clone()
    children, given = [], []
    for _ in range(3):
        if drawn == "certain":
            children.append(torch.full((ROWS, 1), len(children) + 1))
            given.append(torch.nn.functional.one_hot(children[-1][:, 0], vocab).double())
            continue
        share = left / left.sum(-1, keepdim=True)
        children.append(torch.multinomial(share, 1, generator=luck))
        given.append(share)
        if drawn == "without replacement":
            left = left.scatter(1, children[-1], 0)
            left = torch.where(left.sum(-1, keepdim=True) > 0, left, q)
    grandchildren = [torch.multinomial(q.expand(ROWS, -1), 1, generator=luck) for _ in range(3)]
    tokens = torch.cat([*children, *grandchildren], 1)
    probs = torch.stack([*given, *[q.expand(ROWS, -1)] * 3], 1)
    parents = torch.tensor([-1, -1, -1, 0, 1, 2]).expand(ROWS, -1)
    proposal = Proposal(tokens, torch.full((ROWS,), 6), None if drawn == "certain" else probs, parents)
    if drawn == "certain":
        proposal = Proposal(tokens[:, :3], torch.full((ROWS,), 3), None, parents[:, :3])
    fed = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), proposal.tokens], 1)
    after = torch.cat([p[0].expand(ROWS, 1, -1), p[1 + fed[:, 1:]]], 1)  # p depends on the last token alone
    seeds = torch.arange(ROWS) * 7919 + 11
    positions = torch.arange(fed.shape[1]).expand(ROWS, -1) + 5
    kept = verify_tree_rejection(proposal, proposal.tree(), after, seeds, positions)
    first = kept.tokens[:, 0]
    second = torch.where(
        kept.num_accepted > 0, kept.tokens[:, 1], torch.multinomial(p[1 + first], 1, generator=luck)[:, 0]
    )
    expected = (p[0][:, None] * p[1:]).flatten() * ROWS
    observed = torch.bincount(first * vocab + second, minlength=vocab * vocab)
    assert chi_square_p(observed, expected) > 1e-4
    assert float((kept.num_accepted > 0).double().mean()) > 0.3


def test_siblings_are_accepted_more_often_than_a_lone_guess() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).expand(ROWS, 3, -1)
    proposal = Proposal(
        torch.tensor([[0, 1]]).expand(ROWS, -1), torch.full((ROWS,), 2), None, torch.tensor([[-1, -1]]).expand(ROWS, -1)
    )
    positions = torch.arange(3).expand(ROWS, -1)
    kept = verify_tree_rejection(proposal, proposal.tree(), p, torch.arange(ROWS), positions)
    assert float(kept.num_accepted.double().mean()) == pytest.approx(0.7, abs=0.01)


def test_typical_acceptance_takes_the_longest_likely_path() -> None:
    p = torch.full((1, 4, 4), 0.02, dtype=torch.float64)
    p[0, 0, 0] = p[0, 0, 1] = p[0, 2, 3] = p[0, 3, 2] = 0.5
    proposal = tree_of([0, 1, 3], [-1, -1, 1])
    kept = verify_tree_typical(proposal, proposal.tree(), p / p.sum(-1, keepdim=True), torch.tensor([[9, 9, 9, 2]]))
    assert kept.num_accepted.tolist() == [2]
    assert kept.tokens[0, :3].tolist() == [1, 3, 2]


# --- in an engine


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_trees_give_the_targets_text_and_accept_what_is_right(verification: str) -> None:
    prompts = [tuple(range(60, 60 + count)) for count in (1, 5, 30)]
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, prompts, greedy_params(60))
    drafter = ScriptedDrafter(texts, fault=bushy)
    with engine_with(drafter, tiny_target(), verification=verification, max_num_seqs=4) as llm:
        outputs = llm.generate([list(prompt) for prompt in prompts], greedy_params(60, speculation=12))
        assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts
        for one in outputs:
            assert one.stats.rounds < 20  # about five right guesses a round
            assert one.stats.accepted > 0.6 * one.stats.drafted


def test_rules_see_each_nodes_own_path() -> None:
    """Siblings at one position have different texts before them, so penalties and banned words differ."""
    settings = [
        {"temperature": 0, "frequency_penalty": 2.0, "logit_bias": dict.fromkeys((97, 98, 99), 60)},
        {"temperature": 0.9, "repetition_penalty": 1.4, "seed": 3, "bad_words": ["b", "ac"], "logit_bias": {97: 20}},
        {"temperature": 1.0, "top_p": 0.8, "min_tokens": 5, "seed": 8, "logprobs": 3},
    ]
    prompts = [[97, 98, 99], [120, 121], [65]]
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        for one in settings:
            params = SamplingParams(max_tokens=40, ignore_eos=True, **one)
            wanted = plain.generate(prompts, params)
            texts = [output.prompt_token_ids + output.token_ids for output in wanted]
            for pattern in ((ALL,), (3, 0, 1)):
                drafter = ScriptedDrafter(texts, pattern=pattern, fault=bushy)
                with engine_with(drafter, tiny_target(), max_num_seqs=4) as llm:
                    made = llm.generate(prompts, params.but(speculation=9))
                assert [output.token_ids for output in made] == [output.token_ids for output in wanted]
                assert sum(output.stats.accepted for output in made) > 20
                for mine, theirs in zip(made, wanted, strict=True):
                    pairs = itertools.zip_longest(mine.outputs[0].logprobs or (), theirs.outputs[0].logprobs or ())
                    assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)


def test_exact_mode_goes_on_without_trees() -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, [(65, 66)], greedy_params(20))
    with engine_with(ScriptedDrafter(texts, fault=bushy), tiny_target(), exact=True, lookahead=6) as llm:
        output = llm.generate([[65, 66]], greedy_params(20, speculation=6))[0]
        assert output.prompt_token_ids + output.token_ids == texts[0]
        assert output.stats.accepted == 0
