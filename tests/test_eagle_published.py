"""EAGLE heads guess in an engine what the papers say, round after round: chains and trees.

Random heads guess hardly anything right, so the truth is planted among their guesses: texts then grow by as much as a
pattern says, and each round's guesses are held against what the head would say if everything were computed anew.
`tests/test_eagle.py` and `tests/test_eagle_formats.py` have the rest.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.draft.eagle import EagleDrafter
from outrider.engine.engine import Engine
from outrider.engine.speculator import Speculator
from outrider.proposal import Proposal
from tests.eagle_heads import CASES, FORMATS, LAYERS, TinyHead, right_first, right_third, target, written
from tests.eagle_paper import Slow, paths
from tests.heads import NoLooking, acceptance, cycle_target, following
from tests.interpreter import rounds_on_kernels
from tests.scripted import generate_staggered, generate_together, greedy_params
from tests.tiny import byte_tokenizer

PROMPTS = [[65], [72, 101, 108, 108, 111], list(range(60, 77)), [97, 98, 99] * 12]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.4, "logit_bias": {70: 2.0}},
]


def engine(folder: Path, model: Any = None, *, lookahead: int = 4, **settings: Any) -> LLM:
    settings = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4} | settings
    return LLM(model or target(), str(folder), lookahead, method="eagle", **settings)


# --- guesses in an engine


class Forced:
    """Records what heads guess, then plants the truth: as many right guesses as a pattern says, so that texts grow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], pattern: tuple[int, ...]) -> None:
        self.made: list[tuple[list[int], Proposal, int]] = []  # what was known, the guesses, and which row
        self._texts, self._pattern, self._propose = texts, pattern, EagleDrafter.propose

        def forced(drafter: EagleDrafter, rows: Any, num_tokens: int) -> Proposal:
            return self.propose(drafter, rows, num_tokens)

        monkeypatch.setattr(EagleDrafter, "propose", forced)

    def propose(self, drafter: EagleDrafter, rows: Any, num_tokens: int) -> Proposal:
        known = [tokens[:length] for tokens, length in zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True)]
        made = self._propose(drafter, rows, num_tokens)
        planted = made.tokens.clone()
        for row, text in enumerate(known):
            truth = next((one for one in self._texts if one[: len(text)] == text), None)
            if truth is None:
                continue  # while costs are measured
            self.made.append((text, made, row))
            right = truth[len(text) :][: min(num_tokens, self._pattern[len(self.made) % len(self._pattern)])]
            planted[row] = (planted[row] % 250) + 5  # hardly ever right
            planted[row, : len(right)] = torch.tensor(right)
        return Proposal(planted, torch.full_like(made.lengths, num_tokens))  # a chain, so that truth is a path


@functools.cache
def truth() -> list[list[int]]:
    with LLM(target(), method="none", tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, greedy_params(40))
    return [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize("case", ["EAGLE-1", "speculators EAGLE-3, normed"])
def test_chains_are_the_published_ones_round_after_round(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = Forced(monkeypatch, truth(), (0, 4, 1, 2, 0, 0, 3))
    with engine(written(case, tmp_path), prefill_chunk_size=16) as llm:
        texts = []
        for length in (4, 2):
            outputs = llm.generate(PROMPTS, greedy_params(40, speculation=length))
            texts += [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, outputs, strict=True)]
    assert texts == truth() * 2
    counts = {len(text) for text, _, _ in forced.made}
    assert len(forced.made) > 80
    assert len(counts) > 40
    for text, made, row in forced.made:
        if len(text) == 1:  # nothing was fed yet
            assert int(made.lengths[row]) == 0
        else:
            assert made.tokens[row].tolist() == Slow(target(), CASES[case][1], text).chain(made.num_tokens)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_rest_now_and_then_guess_as_if_they_had_not(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed without the head is fed to it before it guesses, though the host lags a round behind."""
    case = "EAGLE-1"
    forced = Forced(monkeypatch, truth(), (2, 3, 1, 2))
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=depth))
    rests: dict[int, int] = {}

    def now_and_then(_: Speculator, sequence: Any) -> int:
        turn = rests[id(sequence)] = rests.get(id(sequence), 0) + 1
        return 4 if turn % 9 in (0, 4, 5) and sequence.limit - len(sequence) > 10 else 0

    monkeypatch.setattr(Speculator, "_most", now_and_then)
    with engine(written(case, tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(40, speculation=4))
    assert [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, outputs, strict=True)] == truth()
    assert len(forced.made) > 8
    for text, made, row in forced.made:
        if len(text) > 1:
            assert made.tokens[row].tolist() == Slow(target(), CASES[case][1], text).chain(made.num_tokens)


@pytest.mark.parametrize("case", ["EAGLE-1", "speculators EAGLE-3, normed"])
@pytest.mark.parametrize("size", [5, 14])
def test_trees_are_the_published_ones(case: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = Forced(monkeypatch, truth(), (0, 3, 1))
    with engine(written(case, tmp_path), lookahead=size, tree="auto") as llm:
        outputs = llm.generate(PROMPTS[1:], greedy_params(16, speculation=size))
    assert [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS[1:], outputs, strict=True)] == [
        text[: len(prompt) + 16] for prompt, text in zip(PROMPTS[1:], truth()[1:], strict=True)
    ]
    assert len(forced.made) > 15
    branching = 0
    for text, made, row in forced.made:
        found = paths(made, row)
        assert len(found) == len(set(found)) == made.num_tokens  # fewer at a text's end
        assert set(found) == Slow(target(), CASES[case][1], text).tree(made.num_tokens)
        branching += max(map(len, found)) < len(found)
    assert branching > 2


def test_named_branches_are_grown_level_by_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = "EAGLE-3, short vocabulary"
    forced = Forced(monkeypatch, truth(), (2, 0))
    with engine(written(case, tmp_path), lookahead=9, tree="3x1x1") as llm:
        llm.generate(PROMPTS[1:2], greedy_params(12, speculation=9))
    assert forced.made
    for text, made, row in forced.made:
        if made.num_tokens < 9:
            continue  # at the text's end
        slow, wanted = Slow(target(), CASES[case][1], text), []
        for first in slow.after(()).topk(3).indices.tolist():
            second = int(slow.after((first,)).argmax())
            wanted += [(first,), (first, second), (first, second, int(slow.after((first, second)).argmax()))]
        assert set(paths(made, row)) == set(wanted)


# --- acceptance


def right_head(kind: str, model: Any) -> tuple[str, TinyHead]:
    if kind == "authors":
        return kind, right_first(model)
    return kind, right_third(model, torch.arange(0, 202, 1) if kind == "speculators" else None)


@pytest.mark.parametrize("kind", ["authors", "eagle3", "speculators"])
@pytest.mark.parametrize("tree", [None, "2x1x1", "auto"])
def test_a_right_head_is_always_right(kind: str, tree: str | None, tmp_path: Path) -> None:
    model = cycle_target(num_hidden_layers=LAYERS)
    kind, head = right_head(kind, model)
    folder = FORMATS[kind](tmp_path, head)
    num_tokens = 300 if tree is None else 60
    with engine(folder, model, lookahead=6, tree=tree) as llm:
        outputs = llm.generate(PROMPTS[1:], greedy_params(num_tokens, speculation=6))
        for prompt, one in zip(PROMPTS[1:], outputs, strict=True):
            assert list(one.token_ids) == [following(prompt[-1], step) for step in range(1, num_tokens + 1)]
            assert one.stats.acceptance_rate == 1.0
            assert one.stats.tokens_per_round > 3


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_drawn_guesses_of_a_right_head_are_accepted(verification: str, tmp_path: Path) -> None:
    model = cycle_target(sharpness=8.0, num_hidden_layers=LAYERS)
    folder = FORMATS["eagle3"](tmp_path, right_third(model))
    with engine(folder, model, verification=verification) as llm:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, speculation=4)
        assert acceptance(llm.generate(PROMPTS[1:], params)) > 0.99


def test_a_trees_best_guesses_are_what_the_targets_noise_would_take(tmp_path: Path) -> None:
    model = cycle_target(sharpness=6.0, num_hidden_layers=LAYERS)
    folder = FORMATS["authors"](tmp_path, right_first(model))
    with engine(folder, model, lookahead=6, tree="auto") as llm:
        for rules in RULES[1:3]:
            params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, speculation=6, **rules)
            rounds = [one.stats.tokens_per_round for one in llm.generate(PROMPTS[1:], params)]
            assert min(rounds) > 2


# --- and no token is changed


@pytest.mark.parametrize(
    ("case", "tree"), [("EAGLE-3, narrower than its target", "auto"), ("EAGLE-3, two hidden states, a window", None)]
)
def test_unusual_heads_change_no_token_either(case: str, tree: str | None, tmp_path: Path) -> None:
    with engine(written(case, tmp_path), lookahead=9, tree=tree) as llm:
        for rules in RULES:
            params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True, **rules)
            wanted = [one.token_ids for one in llm.generate(PROMPTS, params.but(speculation="off"))]
            outputs = llm.generate(PROMPTS, params.but(speculation=9))
            assert [one.token_ids for one in outputs] == wanted
            assert sum(one.stats.drafted for one in outputs) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_come_rest_and_are_sent_away_lose_nothing(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cycle_target(num_hidden_layers=LAYERS)
    folder = FORMATS["authors"](tmp_path, right_first(model))
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=depth))
    jobs = [
        (prompt, SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, speculation=length))
        for prompt, length in zip([*PROMPTS, [7, 8]], [4, 0, 4, 2, 4], strict=True)
    ]
    with engine(folder, model, max_model_len=128, kv_cache_bytes=600_000) as llm:
        for made in (generate_together(llm, jobs), generate_staggered(llm, jobs)):
            for (prompt, params), (sequence,) in zip(jobs, made, strict=True):
                assert sequence.output == [following(prompt[-1], step) for step in range(1, 71)]
                if params.speculation and len(prompt) > 1:
                    assert sequence.ledger.accepted == sequence.ledger.drafted != []
        assert llm.engine.scheduler.num_preemptions > 0


def test_beyond_the_heads_context_the_text_goes_on_without_guesses(tmp_path: Path) -> None:
    model = cycle_target(num_hidden_layers=LAYERS)
    head = right_first(model)
    folder = FORMATS["authors"](tmp_path, head.but(layer=head.layer | {"max_position_embeddings": 40}))
    with engine(folder, model) as llm:
        (one,) = llm.generate([PROMPTS[1]], greedy_params(80, speculation=4))
    assert list(one.token_ids) == [following(PROMPTS[1][-1], step) for step in range(1, 81)]
    assert 20 < one.stats.drafted <= 40
    assert one.stats.accepted == one.stats.drafted


@pytest.mark.parametrize(("tree", "independent"), [(None, False), ("auto", False), ("2x2", False), ("auto", True)])
def test_guessing_never_makes_the_host_wait(
    tree: str | None, independent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose, seen = EagleDrafter.propose, []

    def blind(self: EagleDrafter, rows: Any, num_tokens: int) -> Proposal:
        with NoLooking():
            seen.append(propose(self, replace(rows, independent=independent), num_tokens))
        return seen[-1]

    monkeypatch.setattr(EagleDrafter, "propose", blind)
    with engine(written("speculators EAGLE-3, normed", tmp_path), lookahead=6, tree=tree) as llm:
        for rules in ({"temperature": 0.0}, {"temperature": 1.0, "presence_penalty": 0.3}):
            llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True, speculation=6, **rules))
    assert any(int(made.lengths.max()) for made in seen)
    assert all((made.probs is not None) == independent for made in seen)


@pytest.mark.parametrize("tree", [None, "auto"])
def test_heads_run_on_kernels_too(tree: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter: what a card runs, trees and their ancestors included."""
    model = cycle_target(num_hidden_layers=2)
    folder = FORMATS["eagle3"](tmp_path, right_third(model).but(taps=(0, 1, 2)))
    with rounds_on_kernels(monkeypatch), engine(folder, model, max_model_len=64, max_num_seqs=2, tree=tree) as llm:
        outputs = llm.generate([[72, 101, 108], [5, 6]], greedy_params(6, speculation=4))
    for one in outputs:
        assert list(one.token_ids) == [following(one.prompt_token_ids[-1], step) for step in range(1, 7)]
        assert one.stats.acceptance_rate == 1.0
        assert one.stats.drafted > 2
