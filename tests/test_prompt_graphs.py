"""Texts in captured passes: padded tokens, rows that belong to nobody, texts that none is large enough for.

Here a recorded pass is simply run again; that a card's graphs do the same is in test_gpu.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.engine.choice import Choice
from outrider.engine.controller import Controller
from outrider.model.kv_cache import blocks_for
from outrider.model.prompt_graphs import PromptGraphs
from tests.tiny import byte_tokenizer, tiny_draft, tiny_sliding, tiny_target

if TYPE_CHECKING:
    from outrider.model.runner import TorchRunner

LONGEST = 300
LENGTHS = (3, 63, 64, 65, 66, 130, 191, 256, 257, 290)


def captured(runner: TorchRunner, num_weights: int = 0) -> PromptGraphs:
    runner._prompts = PromptGraphs(runner._feed, runner.device, lambda work: work, num_weights)
    runner._prompts.capture(LONGEST, runner.cache, blocks_for(LONGEST), (1, 2, 3))
    return runner._prompts


def prompts() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(5, 250, (length,), generator=drawn).tolist() for length in LENGTHS]


def texts(llm: LLM, **settings: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=8, ignore_eos=True, **settings)
    asked = {"prompt_token_ids": prompts(), "sampling_params": params, "progress": False}
    return [output.token_ids for output in llm.generate(**asked)]


@pytest.mark.parametrize("make", [tiny_target, tiny_sliding])
def test_captured_prompts_change_no_token(make: Any) -> None:
    how = {"tokenizer": byte_tokenizer(), "max_num_seqs": 3, "prefill_chunk_size": 512, "enable_prefix_caching": False}
    with LLM(make(max_position_embeddings=512), method="none", max_model_len=LONGEST, **how) as llm:
        wanted = texts(llm, temperature=0)
    draft = tiny_draft(make(max_position_embeddings=512), "noisy")
    with LLM(make(max_position_embeddings=512), draft, max_model_len=LONGEST, **how) as llm:
        both = captured(llm.engine.runner), captured(llm.engine.drafter.runner)
        assert texts(llm, temperature=0, speculation=4) == wanted
        assert all(one.num_replays > 0 for one in both)
        assert llm.engine.speculator.num_failures == 0


@pytest.mark.parametrize(("rows", "length"), [(3, 100), (8, 60), (7, 100), (5, 180), (4, 256)])
def test_rows_of_nobody_and_more_than_a_pass_holds(rows: int, length: int) -> None:
    with LLM(tiny_target(), method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        runner, blocks = llm.engine.runner, blocks_for(length)
        graphs = captured(runner, num_weights=10**9)
        tokens = torch.randint(5, 250, (rows, length), generator=torch.Generator().manual_seed(1))
        tables = torch.arange(2, 2 + rows * blocks).view(rows, blocks)
        positions = torch.arange(length).expand(rows, -1)
        runner._feed(tokens, positions, tables, length)
        slots = (tables[..., None] * 16 + torch.arange(16)).flatten(1)[:, :length]
        wanted = [pool[slots].clone() for pool in runner.cache.keys + runner.cache.values]
        for pool in runner.cache.keys + runner.cache.values:
            pool[32:] = torch.nan
        assert graphs.replay(tokens, tables)
        for pool, kept in zip(runner.cache.keys + runner.cache.values, wanted, strict=True):
            torch.testing.assert_close(pool[slots], kept)


def test_what_keeps_a_card_busy_for_longer_than_the_host_is_not_captured() -> None:
    with LLM(tiny_target(), method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        runner = llm.engine.runner
        graphs = captured(runner)
        tokens, tables = torch.full((3, 100), 65), torch.arange(2, 2 + 3 * 7).view(3, 7)
        assert graphs.replay(tokens, tables)
        assert not graphs.replay(tokens.repeat(1, 4), tables)
        assert not graphs.replay(tokens.repeat(2, 1), tables.repeat(2, 1))  # 8 rows of 128 are more than a pass holds


@pytest.mark.parametrize("make", [tiny_target, tiny_sliding])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 65, 130, 200])
def test_texts_are_gone_on_with_from_wherever_they_stand(make: Any, num_tokens: int) -> None:
    target = make(max_position_embeddings=512)
    with LLM(target, method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        runner, rows = llm.engine.runner, 3
        graphs = captured(runner)
        whole = torch.randint(5, 250, (rows, LONGEST), generator=torch.Generator().manual_seed(1))
        blocks = blocks_for(LONGEST)
        tables = torch.arange(2, 2 + rows * blocks).view(rows, blocks)
        everywhere = torch.arange(LONGEST).expand(rows, -1)
        runner._feed(whole, everywhere, tables, LONGEST)
        begins = torch.tensor([0, 37, LONGEST - 10])
        positions = (begins[:, None] + torch.arange(num_tokens)).clamp(max=LONGEST - 1)
        tokens = whole.gather(1, positions)
        slots = tables.gather(1, positions // 16) * 16 + positions % 16
        pools = runner.cache.keys + runner.cache.values
        wanted = [pool.clone() for pool in pools]
        for pool in pools:
            pool[slots] = 7.0
        assert graphs.go_on(tokens, positions, tables)
        for pool, kept in zip(pools, wanted, strict=True):
            torch.testing.assert_close(pool[32:], kept[32:], equal_nan=True)  # nobody wrote all of it


def test_texts_that_no_pass_is_large_enough_to_go_on_with() -> None:
    with LLM(tiny_target(), method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        graphs = captured(llm.engine.runner)
        tokens, tables = torch.full((1, 257), 65), torch.arange(2, 2 + blocks_for(LONGEST))[None]
        positions = torch.arange(257)[None]
        assert graphs.go_on(tokens[:, 1:], positions[:, 1:], tables)
        assert not graphs.go_on(tokens, positions, tables)
        assert not graphs.go_on(tokens[:, :5], positions[:, :5], tables.repeat(1, 2))
        assert not graphs.go_on(*(one[:, :5].repeat(5, 1) for one in (tokens, positions)), tables.repeat(5, 1))


def test_a_draft_that_rests_and_reads_what_it_lacks_by_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"tokenizer": byte_tokenizer(), "max_num_seqs": 3, "enable_prefix_caching": False, "max_model_len": LONGEST}
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    asked: dict[str, Any] = {"prompt_token_ids": prompts()[:5], "sampling_params": params, "progress": False}
    with LLM(tiny_target(), method="none", **how) as llm:
        wanted = [output.token_ids for output in llm.generate(**asked)]
    with LLM(tiny_target(), tiny_draft(tiny_target(), "noisy"), **how) as llm:
        graphs, rounds = captured(llm.engine.drafter.runner), 0

        def choose(_: Controller, __: Any, wishes: Any) -> Choice:
            nonlocal rounds
            rounds += 1
            return Choice([0 if rounds % 24 else min(3, wish.most) for wish in wishes])

        monkeypatch.setattr(Controller, "choose", choose)
        assert [output.token_ids for output in llm.generate(**asked)] == wanted
        assert graphs.num_replays > 4 and llm.engine.speculator.num_failures == 0
        assert llm.engine.figures.accepted > 0


@pytest.mark.parametrize(("rows", "free"), [(1, True), (3, True), (4, True), (5, False)])
def test_what_few_rows_lack_after_a_plain_round_is_fed_with_the_guesses(
    rows: int, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that is the target is always right, unless its cache has a hole."""
    how = {"tokenizer": byte_tokenizer(), "max_num_seqs": 8, "enable_prefix_caching": False, "max_model_len": LONGEST}
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(tiny_target(), tiny_draft(tiny_target(), "same"), **how) as llm:
        drafter, rounds, fed = llm.engine.drafter, 0, []
        drafter.tune([1, 2, 4, 8], LONGEST)
        catch_up = drafter.catch_up
        monkeypatch.setattr(drafter, "catch_up", lambda given, counts: (fed.append(counts), catch_up(given, counts)))

        def choose(_: Controller, __: Any, wishes: Any) -> Choice:
            nonlocal rounds
            rounds += 1
            return Choice([min(3, wish.most) if rounds % 3 == 1 else 0 for wish in wishes])  # two plain rounds between

        monkeypatch.setattr(Controller, "choose", choose)
        llm.generate(prompt_token_ids=prompts()[1 : 1 + rows], sampling_params=params, progress=False)
        assert llm.engine.figures.accepted == llm.engine.figures.drafted > 0
        assert max(map(max, fed)) > 2  # the prompts
        assert (min(map(max, fed)) > 2) is free


def test_passes_over_several_texts_are_captured_when_they_come_and_one_that_fails_is_fed_as_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(tiny_target(), method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        runner, recorded = llm.engine.runner, []

        def recorder(work: Any) -> Any:
            if len(recorded) == 9:
                raise RuntimeError("out of memory")
            recorded.append(work)
            return work

        graphs = PromptGraphs(runner._feed, runner.device, recorder)
        graphs.capture(LONGEST, runner.cache)
        assert len(recorded) == 4 + 3  # lone texts of 64 to 256 tokens, and the longest pass of 2, 4 and 8
        tokens, tables = torch.full((2, 60), 65), torch.arange(2, 2 + 2 * 8).view(2, 8)
        assert graphs.replay(tokens, tables) and graphs.replay(tokens, tables)
        assert graphs.replay(tokens.repeat(1, 2), tables) and len(recorded) == 9
        assert not graphs.replay(tokens.repeat(1, 3), tables) and "out of memory" in caplog.text
        assert not graphs.replay(tokens.repeat(1, 3), tables) and caplog.text.count("out of memory") == 1
        assert graphs.replay(tokens[:1].repeat(1, 3), tables[:1])


def test_a_model_that_cannot_be_captured_is_fed_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(work: Any) -> Any:
        raise RuntimeError("operation not permitted")

    graphs = PromptGraphs(lambda *_: None, torch.device("cpu"), refuses)
    graphs.capture(LONGEST, None)
    assert "not permitted" in caplog.text
    assert not graphs.replay(torch.zeros(1, 10, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("lost", ["positions", "tables", "tokens"])
def test_a_capture_that_reads_what_is_gone_is_found_out(lost: str, caplog: pytest.LogCaptureFixture) -> None:
    """A graph knows addresses alone: what it reads may have been given to somebody else since."""
    with LLM(tiny_target(), method="none", tokenizer=byte_tokenizer(), max_model_len=LONGEST, max_num_seqs=8) as llm:
        runner = llm.engine.runner
        place = ["tokens", "positions", "tables"].index(lost)

        def feed(*given: torch.Tensor) -> None:
            own = list(given)
            if len(given[0]) > 1 and recorded:
                own[place] = given[place] * 0 + 1
            runner._feed(*own)

        recorded: list[Any] = []

        def recorder(work: Any) -> Any:
            def start() -> None:
                recorded.append(work)
                work()
                recorded.clear()

            return start

        graphs = PromptGraphs(feed, runner.device, recorder)
        graphs.capture(LONGEST, runner.cache)
        assert "does not do what it should" in caplog.text
        assert not graphs.replay(torch.zeros(1, 10, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
