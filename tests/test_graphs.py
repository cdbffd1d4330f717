"""Which rounds are captured, and which one serves whom: without a card, with captures that only take notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.config import Verification
from outrider.draft.ngram import NGramDrafter
from outrider.engine import graphs as graphs_module
from outrider.engine.cost import PassShape
from outrider.engine.graphs import Given, RoundGraphs
from outrider.engine.state import DeviceState
from outrider.model.kv_cache import NULL_BLOCK, RESERVED, TRASH_BLOCK
from outrider.proposal import Proposal
from outrider.sequence import Request, Sequence
from tests.scripted import ScriptedDrafter

CPU = torch.device("cpu")


class Noted(RoundGraphs):
    """Captures nothing: every round is its own bucket's name."""

    captures: list[Any]

    def _capture(self, bucket: Any) -> Any:
        self.captures = [*getattr(self, "captures", []), bucket]
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), result=bucket)


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module.torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs_module.torch.cuda, "Stream", lambda _: None)


def made(drafter: Any, *, most: int = 5, rows: int = 6, exact: bool = False) -> tuple[Noted, DeviceState]:
    state = DeviceState(rows, 64, most, CPU)
    runner: Any = SimpleNamespace(tune=lambda passes, places: None)
    found = Noted(runner, state, Verification.COUPLED, drafter, most=most, exact=exact)
    found.prepare(lambda items, _: items)
    return found, state


def admitted(state: DeviceState, end_ids: tuple[int, ...] = (), **settings: Any) -> Sequence:
    request = Request("r", None, (1, 2, 3), SamplingParams(seed=1, **settings), frozenset(end_ids))
    sequence = Sequence(request, 0, 40, None)
    state.admit(sequence)
    return sequence


def shapes(found: Noted) -> list[tuple[int, int, bool]]:
    return [(one.num_rows, one.num_tokens, one.drafted) for one in found.captures]


def test_usual_rounds_are_captured_at_start_the_largest_first() -> None:
    found, _ = made(NGramDrafter())
    lengths = [(5, True), (3, True), (2, True), (1, True), (0, False)]
    assert shapes(found) == [(rows, *one) for rows in (6, 4, 2, 1) for one in lengths]
    assert found.num_captured == 20


def test_rounds_that_take_guesses_from_outside_are_captured_for_drafters_that_need_the_host() -> None:
    found, state = made(ScriptedDrafter())
    assert shapes(found)[:5] == [(6, 5, True), (6, 3, True), (6, 2, True), (6, 1, True), (6, 0, False)]
    assert {one.given for one in found.captures if one.drafted} == {Given(parents=False, sources=False)}
    row = admitted(state, temperature=0)
    chain = Proposal(torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]))
    assert found.replay([row], [4], None) is None  # guesses must be brought along
    served: Any = found.replay([row], [4], None, chain)
    assert (served.num_rows, served.num_tokens, served.given.parents) == (1, 5, False)
    assert len(found.captures) == 20
    tree = Proposal(chain.tokens, chain.lengths, None, torch.tensor([[-1, -1, 0, 0]]))
    served = found.replay([row], [4], None, tree)
    assert (served.num_tokens, served.given.parents) == (5, True)
    read = found._guesses.proposal(2, 5, served.given)
    assert (read.tokens[0, :4].tolist(), read.lengths.tolist()) == ([5, 6, 7, 8], [4, 0])
    assert read.parents is not None
    assert read.parents[0, :4].tolist() == [-1, -1, 0, 0]
    drawn = Proposal(chain.tokens, chain.lengths, torch.ones(1, 4, 9))
    assert found.replay([row], [4], None, drawn) is None


def test_without_a_drafter_only_plain_rounds_are() -> None:
    found, _ = made(None)
    assert shapes(found) == [(6, 0, False), (4, 0, False), (2, 0, False), (1, 0, False)]


def test_in_exact_mode_plain_rounds_are_as_wide_as_speculative_ones() -> None:
    found, state = made(NGramDrafter(), exact=True)
    assert shapes(found) == [(6, 5, True), (6, 5, False)]
    row = admitted(state, temperature=0)
    for wanted in ([0], [3]):
        served: Any = found.replay([row], wanted, None)
        assert (served.num_rows, served.num_tokens, served.drafted) == (6, 5, wanted != [0])
    assert len(found.captures) == 2


def test_a_round_is_served_by_the_next_larger_one() -> None:
    found, state = made(NGramDrafter())
    rows = [admitted(state, temperature=0), admitted(state, temperature=0.7), admitted(state, temperature=0)]
    served: Any = found.replay(rows, [4, 0, 1], None)
    assert (served.num_rows, served.num_tokens, served.drafted) == (4, 5, True)
    assert len(found.captures) == 20
    served = found.replay(rows[:1], [7], None)  # more than is usual: captured now
    assert (served.num_rows, served.num_tokens) == (1, 8)
    assert len(found.captures) == 21


def test_a_model_with_several_ends_of_text_keeps_the_rounds_captured_at_start() -> None:
    found, state = made(NGramDrafter())
    row = admitted(state, end_ids=(7, 8, 9), temperature=0)  # makes a rule table grow
    assert found.replay([row], [5], None) is not None
    assert len(found.captures) == 20
    held = admitted(state, end_ids=(7, 8), temperature=0, min_tokens=4)  # reads that table: a round of its own
    assert found.replay([held], [5], None) is not None
    assert len(found.captures) == 21


def test_a_report_is_rounded_up_and_one_beyond_all_sizes_runs_eagerly() -> None:
    found, state = made(NGramDrafter())
    row = admitted(state, temperature=0)
    served: Any = found.replay([row], [0], 3)
    assert served.num_logprobs == 5
    assert found.replay([row], [0], 21) is None


def test_captured_rounds_are_timed_on_rows_that_are_at_their_limit_and_all_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short and long contexts, blocks of their own for each row, zeros in them; nothing is left behind."""
    state, cleared, seen = DeviceState(4, 600, 64, CPU), [], []
    runner: Any = SimpleNamespace(
        tune=lambda passes, places: None, copy_blocks=lambda source, target: cleared.append((set(source), target))
    )
    drafter = NGramDrafter()
    found = Noted(runner, state, Verification.COUPLED, drafter, most=3, exact=False)
    found.prepare(lambda items, _: items)

    def timed(captured: Any) -> float:
        bucket = captured.result
        seen.append((bucket, state.lengths.tolist(), state.tables[:4, :4].tolist()))
        return 0.001 * (1 + bucket.num_tokens) * (1 + (state.lengths[0].item() > 128))

    monkeypatch.setattr(found, "_best_replay", timed)
    costs = found.costs(10_000)
    assert costs is not None
    assert {bucket for bucket, *_ in seen} == set(found.captures)
    assert {tuple(lengths) for _, lengths, _ in seen} == {(128,) * 4 + (1,), (599,) * 4 + (1,)}
    blocks = [block for row in seen[0][2] for block in row]
    assert len(set(blocks)) == len(blocks) and min(blocks) >= RESERVED
    assert all(source == {NULL_BLOCK} and set(blocks) <= set(target) for source, target in cleared)
    assert state.lengths.tolist() == state.limits.tolist() == [1] * 5
    assert set(state.tables.flatten().tolist()) == {TRASH_BLOCK}
    assert costs.pass_seconds(PassShape(3, 0)) == pytest.approx(0.001)
    assert costs.pass_seconds(PassShape(3, 2, "ngram")) == pytest.approx(0.003)
    assert costs.pass_seconds(PassShape(3, 2, "ngram", context=599)) == pytest.approx(0.006)
