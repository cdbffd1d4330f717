"""Mixtures of drafters: always the target's text, the better part's guesses taken, and each part's share told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.draft.draft_model import DraftModelDrafter
from outrider.draft.mixture import MixtureDrafter, merged
from outrider.draft.ngram import NGramDrafter
from outrider.llm import LLM
from outrider.model.runner import TorchRunner
from outrider.proposal import Proposal
from outrider.sampling.params import SamplingParams
from tests.scripted import ALL, ScriptedDrafter, bushy, engine_with, full_texts, generate_staggered, greedy_params
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
REPEATING = {"temperature": 0, "frequency_penalty": -2.0}  # the target comes to say the same again and again


def mixture(*parts: Any, merge: bool = False, slots: int = 5) -> MixtureDrafter:
    return MixtureDrafter(parts, slots, torch.device("cpu"), merge=merge)


class WithModel(LLM):
    """Lookup and a draft model."""

    merge = False
    kind: Any = "noisy"

    def _drafter(self, *_: object) -> MixtureDrafter:
        with LLM(
            tiny_draft(tiny_target(), self.kind), tokenizer=byte_tokenizer(), dtype="float32", device="cpu"
        ) as one:
            loaded = one.loaded
        runner = TorchRunner(loaded)
        self._owned.append(runner)
        model = DraftModelDrafter(runner, runner.vocab_size, runner.vocab_size)
        return mixture(NGramDrafter(), model, merge=self.merge)


def with_model(merge: bool, kind: str = "noisy", **settings: Any) -> LLM:
    made = type("Mixed", (WithModel,), {"merge": merge, "kind": kind})
    settings = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4} | settings
    return made(tiny_target(), method="ngram", **settings)


@pytest.mark.parametrize("merge", [False, True], ids=["choose", "merge"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_lookup_and_a_model_change_no_token(merge: bool, verification: str) -> None:
    settings: list[dict[str, Any]] = [{"temperature": 0}, REPEATING]
    if verification == "coupled":
        settings += [{"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5}]
    with with_model(merge, verification=verification) as llm:
        for one in settings:
            params = SamplingParams(max_tokens=36, ignore_eos=True, seed=7, **one)
            wanted = [output.token_ids for output in llm.generate(PROMPTS, params.but(speculation="off"))]
            for length in (1, 4, 9):
                outputs = llm.generate(PROMPTS, params.but(speculation=length))
                assert [output.token_ids for output in outputs] == wanted
            jobs = [(prompt, params.but(speculation=6)) for prompt in PROMPTS]
            made = generate_staggered(llm, jobs)
            assert [tuple(group[0].output) for group in made] == wanted
        assert llm.engine.speculator.num_failures == 0


def test_an_identical_draft_in_a_mixture_is_always_right() -> None:
    """Its cache stays in step although other guesses are taken in some rounds."""
    with with_model(False, "same") as llm:
        output = llm.generate(
            [PROMPTS[3]], SamplingParams(max_tokens=200, ignore_eos=True, speculation=5, **REPEATING)
        )[0]
        made, right = output.stats.by_drafter["draft_model"]
        assert made == right > 20


@pytest.mark.parametrize("merge", [False, True], ids=["choose", "merge"])
def test_the_part_that_is_right_does_the_work(merge: bool) -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, PROMPTS, greedy_params(80))
    wrong, right = ScriptedDrafter(texts, pattern=(0,)), ScriptedDrafter(texts, pattern=(ALL,))
    wrong.name, right.name = "wrong", "right"  # type: ignore[misc]
    with engine_with(mixture(wrong, right, merge=merge), tiny_target(), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(80, speculation=6))
        assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts
        for one in outputs:
            assert one.stats.by_drafter["wrong"][1] == 0
            made, good = one.stats.by_drafter["right"]
            assert made >= good > 40
            assert one.stats.rounds < 40  # 80 by plain decoding


def test_a_dear_part_is_not_asked_where_a_cheap_one_promises_as_much() -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, PROMPTS, greedy_params(80))
    cheap, dear = ScriptedDrafter(texts), ScriptedDrafter(texts)
    with engine_with(mixture(cheap, dear), tiny_target(), max_num_seqs=4) as llm:
        llm.generate(PROMPTS, greedy_params(80, speculation=6))
    assert cheap.calls > 10
    assert dear.calls == 0


def test_a_part_that_fails_costs_guesses_alone() -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, PROMPTS, greedy_params(40))
    parts = ScriptedDrafter(texts, fault=bushy), ScriptedDrafter(texts, pattern=(2, 0))
    for merge in (False, True):
        with engine_with(mixture(*parts, merge=merge), tiny_target(), max_num_seqs=4) as llm:
            outputs = llm.generate(PROMPTS, greedy_params(40, speculation=8))
            assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts


def test_a_part_that_is_outgrown_leaves_the_others_to_go_on() -> None:
    with LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as plain:
        texts = full_texts(plain, PROMPTS, greedy_params(60))
    short, long = ScriptedDrafter(texts, context_length=20), ScriptedDrafter(texts, context_length=70)
    with engine_with(mixture(short, long), tiny_target(), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(60, speculation=5))
        assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts
    assert short.calls > 0
    assert long.calls > 0


# --- joining


def chain(*rows: list[int], width: int = 4) -> Proposal:
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return Proposal(tokens, torch.tensor([len(row) for row in rows]))


def paths(proposal: Proposal, row: int = 0) -> set[tuple[int, ...]]:
    """Every path from the root to a leaf."""
    count = int(proposal.lengths[row])
    tokens, parents = proposal.tokens[row, :count].tolist(), proposal.parents_or_chain()[row, :count].tolist()
    found = []
    for node in set(range(count)) - set(parents):
        path, at = [], node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        found.append(tuple(path[::-1]))
    assert all(parent < node for node, parent in enumerate(parents))
    return set(found)


def test_two_chains_become_a_tree_that_shares_their_beginning() -> None:
    joined = merged(chain([1, 2, 3], [1], [], [4, 5]), chain([1, 2, 7, 8], [2, 3], [6], [4, 5, 6]))
    assert paths(joined, 0) == {(1, 2, 3), (1, 2, 7, 8)}
    assert paths(joined, 1) == {(1,), (2, 3)}
    assert paths(joined, 2) == {(6,)}
    assert paths(joined, 3) == {(4, 5, 6)}
    assert joined.lengths.tolist() == [5, 3, 1, 3]


def test_a_chain_joins_the_first_path_of_a_tree() -> None:
    tree = Proposal(torch.tensor([[1, 2, 9]]), torch.tensor([3]), None, torch.tensor([[-1, 0, -1]]))
    assert paths(merged(tree, chain([1, 2, 3]))) == {(1, 2, 3), (9,)}
    assert merged(tree, chain([1, 2, 3])).widened(2).lengths.tolist() == [2]
