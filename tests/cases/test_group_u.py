"""Group U, trees: windows, degenerate shapes, siblings that begin alike. Heads' own rows are in tests of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.proposal import ROOT, Proposal
from tests.scripted import ALL, ScriptedDrafter, bushy, engine_with, full_texts, greedy_params
from tests.tiny import FAMILIES, greedy, tiny_family, tiny_sliding, tiny_target

PROMPTS = [[65], list(range(60, 70)), [97, 98, 99] * 13]


def texts_of(model: Any, num_tokens: int) -> list[tuple[int, ...]]:
    with engine_with(None, model, max_num_seqs=4) as plain:
        return full_texts(plain, PROMPTS, greedy_params(num_tokens))


@pytest.mark.parametrize("length", [3, 9, 20])
def test_U05_trees_beyond_a_sliding_window(length: int) -> None:
    """B06, U05: rows before, at and far beyond the window in one batch; siblings share positions, not places."""
    texts = texts_of(tiny_sliding(), 70)
    drafter = ScriptedDrafter(texts, pattern=(ALL, 3, 0, 1), fault=bushy)
    with engine_with(drafter, tiny_sliding(), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(70, speculation=length))
        assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts
        assert llm.engine.figures.accepted > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_U05_every_family_verifies_trees(family: str) -> None:
    """Soft caps, learned positions, parallel residuals: a node's position is its depth, wherever it is kept."""
    model, prompt = tiny_family(family), [5, 9, 17, 9, 17, 33, 40, 41, 42, 43, 44, 9, 17]
    wanted = tuple(greedy(model, prompt, 24))
    drafter = ScriptedDrafter([(*prompt, *wanted)], pattern=(ALL, 1, 2), vocab_size=96, fault=_small_bush)
    with engine_with(drafter, model, tokenizer=None) as llm:
        output = llm.generate(prompt_token_ids=prompt, sampling_params=greedy_params(24, speculation=8))[0]
        assert output.token_ids == wanted
        assert output.stats.accepted > 5


def _small_bush(proposal: Proposal, call: int, rows: Any) -> Proposal:
    made = bushy(proposal, call, rows)
    return Proposal(made.tokens % 96, made.lengths, None, made.parents)


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


SHAPES: dict[str, Callable[[int], list[int]]] = {
    "one node": lambda _: [ROOT],
    "four roots": lambda _: [ROOT] * 4,
    "a chain": chain,
    "a comb": lambda count: [max(ROOT, node - 2 + node % 2) for node in range(count)],
    "the right one last": lambda count: [ROOT] * count,
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_U06_degenerate_trees(shape: str) -> None:
    texts = texts_of(tiny_target(), 40)

    def shaped(proposal: Proposal, call: int, rows: Any) -> Proposal:
        parents = SHAPES[shape](proposal.num_tokens)[: proposal.num_tokens]
        width = len(parents)
        tokens = proposal.tokens[:, :1].expand(-1, width).clone()
        if shape == "a chain":
            tokens = proposal.tokens
        elif shape in ("four roots", "the right one last"):
            tokens[:, :-1] += torch.arange(1, width)  # only the last one is right
        tokens = torch.nn.functional.pad(tokens % 320, (0, proposal.num_tokens - width))
        parents += [ROOT] * (proposal.num_tokens - width)
        columns = torch.tensor(parents).expand_as(tokens)
        return Proposal(tokens, proposal.lengths.clamp(max=width), None, columns)

    with engine_with(ScriptedDrafter(texts, fault=shaped), tiny_target(), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(40, speculation=5))
        assert [one.prompt_token_ids + one.token_ids for one in outputs] == texts
        for one in outputs:
            # A chain is right to its end; of the others one guess a round is.
            assert one.stats.rounds <= (8 if shape == "a chain" else 21)


def test_Q09_a_trees_places_are_counted_not_its_nodes() -> None:
    """Seven nodes, three deep: three places were guessed, and all were right."""
    texts = texts_of(tiny_target(), 40)

    def three_deep(proposal: Proposal, call: int, rows: Any) -> Proposal:
        if proposal.num_tokens < 7:  # at the text's end
            return Proposal(proposal.tokens, proposal.lengths * 0)
        true, wrong = proposal.tokens, (proposal.tokens + 9) % 320
        picked = [wrong[:, 0], true[:, 0], wrong[:, 1], true[:, 1], true[:, 2], wrong[:, 2], wrong[:, 1]]
        parents = torch.tensor([-1, -1, 0, 1, 3, 3, 1]).expand(len(true), -1)
        return Proposal(torch.stack(picked, 1), proposal.lengths.clamp(max=7), None, parents)

    with engine_with(ScriptedDrafter(texts, fault=three_deep), tiny_target(), max_num_seqs=4) as llm:
        output = llm.generate([PROMPTS[1]], greedy_params(40, speculation=7))[0]
        assert output.prompt_token_ids + output.token_ids == texts[1]
        assert output.stats.accepted == output.stats.drafted == 3 * output.stats.drafted_per_position[0] > 20
        assert len(output.stats.drafted_per_position) == 3
