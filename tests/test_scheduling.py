"""Who is let in, fed, served and sent away, and that nobody waits for ever."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.engine.block_pool import BlockPool
from outrider.engine.detokenizer import Detokenizer
from outrider.engine.waiting import FAIR_TURN, WaitingQueue
from outrider.errors import CapacityError, InvalidRequestError
from outrider.model.kv_cache import BLOCK_SIZE, RESERVED
from outrider.sequence import Request, Sequence
from tests.scripted import generate_staggered, greedy_params
from tests.tiny import byte_tokenizer, tiny_draft, tiny_target

LONG = [(7 * place * place + 3 * place) % 250 for place in range(400)]


@functools.cache
def target() -> Any:
    return tiny_target()


def engine(**settings: Any) -> LLM:
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu"}
    return LLM(target(), **{**common, **settings})


@functools.cache
def plain() -> LLM:
    return engine(enable_prefix_caching=False)


def submit(llm: LLM, prompt: list[int], num_tokens: int, **others: Any) -> Sequence:
    sequence = llm.intake.sequences(llm.intake.request(prompt, greedy_params(num_tokens, "off", **others)))[0]
    llm.engine.add(sequence)
    return sequence


def order_of_ends(llm: LLM, sequences: dict[str, Sequence]) -> str:
    ends = []
    while llm.engine.busy:
        llm.engine.step()
        ends += [name for name, one in sequences.items() if one.finished and name not in ends]
    return "".join(ends)


# --- the queue


def test_the_more_important_are_let_in_first_and_equals_in_order_of_arrival() -> None:
    with engine(max_num_seqs=1) as llm:
        asked = {"a": 3, "b": 5, "c": 0, "d": 0, "e": -2, "f": 5}
        made = {name: submit(llm, [65], 4, priority=priority) for name, priority in asked.items()}
        assert order_of_ends(llm, made) == "ecdabf"


def waiting(number: int, priority: int) -> Sequence:
    request = Request(str(number), None, (1,), SamplingParams(priority=priority))
    sequence = Sequence(request, 0, 2, Detokenizer(None, (1,)))
    sequence.number = number
    return sequence


def test_the_least_important_wait_no_longer_than_is_said() -> None:
    """However many more important ones come: one of `FAIR_TURN` is let in for having come first."""
    queue, patient = WaitingQueue(), [waiting(number, 9) for number in range(3)]
    for one in patient:
        queue.add(one)
    let_in = []
    for number in range(3, 100):
        queue.add(waiting(number, 0))
        let_in.append(queue.pop())
    places = [let_in.index(one) + 1 for one in patient]
    assert places == [FAIR_TURN, 2 * FAIR_TURN, 3 * FAIR_TURN]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whoever_finds_k_others_waiting_is_among_the_next_few_that_are_let_in(seed: int) -> None:
    luck, queue = random.Random(seed), WaitingQueue()
    bounds: dict[Sequence, int] = {}
    number = 0
    for _ in range(200):
        for _ in range(luck.choice([0, 1, 1, 3])):
            one = waiting(number, luck.randrange(4))
            bounds[one] = FAIR_TURN * (len(queue) + 1)
            queue.add(one)
            number += 1
        if len(queue):
            came = queue.pop()
            assert bounds.pop(came) > 0
            bounds = {one: left - 1 for one, left in bounds.items()}
            assert all(left > 0 for left in bounds.values())
            assert all(one.priority != came.priority or one.number > came.number for one in queue)


def test_a_priority_must_be_a_number() -> None:
    for wrong in ("high", 0.5, True, 2**40):
        with pytest.raises(InvalidRequestError, match="priority must be an integer"):
            SamplingParams(priority=wrong)  # type: ignore[arg-type]


# --- prompts


def test_a_long_prompt_does_not_hold_up_those_that_run() -> None:
    """A round a step for each of them, while the prompt is fed a chunk a step."""
    with engine(prefill_chunk_size=16) as llm:
        running = [submit(llm, [65, number], 60) for number in range(3)]
        for _ in range(3):
            llm.engine.step()
        before = [len(one) for one in running]
        long = submit(llm, LONG, 4)
        steps = 0
        while not long.output:
            llm.engine.step()
            steps += 1
            assert [len(one) for one in running] == [length + steps for length in before]
        assert steps == 25


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    with engine(prefill_chunk_size=16) as llm:
        long = submit(llm, LONG, 4)
        for _ in range(4):
            llm.engine.step()
        for number in range(3):
            short = submit(llm, [70 + number, 66, 67], 2)
            steps = 0
            while not short.output:
                llm.engine.step()
                steps += 1
            assert steps <= 2
        assert 0 < long.cached < len(LONG) - 1


def test_a_long_prompt_is_read_however_many_short_ones_come() -> None:
    with engine(prefill_chunk_size=16, max_num_seqs=4, enable_prefix_caching=False) as llm:
        long = submit(llm, LONG, 1)
        steps = 0
        while not long.output:
            if len(llm.engine.scheduler.waiting) < 4:
                submit(llm, [steps % 250, *range(14)], 1)
            llm.engine.step()
            steps += 1
        assert steps <= 2 * 25 + 1


def test_an_important_prompt_is_fed_before_a_shorter_one() -> None:
    with engine(prefill_chunk_size=16) as llm:
        first = submit(llm, LONG[100:350], 1, priority=7)
        short, long = submit(llm, LONG[:20], 1, priority=3), submit(llm, LONG[200:250], 1, priority=0)
        assert order_of_ends(llm, {"f": first, "s": short, "l": long}) == "lsf"


def test_prompts_that_take_turns_are_computed_in_the_same_shapes_in_exact_mode() -> None:
    def texts(together: bool) -> list[tuple[list[int], list[float]]]:
        with engine(exact=True, max_num_seqs=3, max_model_len=448, prefill_chunk_size=32) as llm:
            made = []
            for prompt in (LONG[:200], LONG[200:230], LONG[50:120]):
                params = greedy_params(12, "off", logprobs=0)
                made.append(llm.intake.sequences(llm.intake.request(prompt, params))[0])
                llm.engine.add(made[-1])
                while llm.engine.busy and not together:
                    llm.engine.step()
            while llm.engine.busy:
                llm.engine.step()
            return [(one.output, [each.logprob for each in one.logprobs]) for one in made]

    assert texts(True) == texts(False)


# --- preemption


def test_the_least_important_and_youngest_is_sent_away_but_never_the_one_that_came_first() -> None:
    per_block = BLOCK_SIZE * plain().engine.runner.bytes_per_slot
    with engine(kv_cache_bytes=14 * per_block, max_model_len=128) as llm:
        asked = {"a": 9, "b": 0, "c": 1, "d": 0}
        made = {
            name: submit(llm, [65 + place], 70, priority=priority)
            for place, (name, priority) in enumerate(asked.items())
        }
        gone: list[str] = []
        preempt = llm.engine.scheduler._preempt

        def noted(sequence: Sequence) -> None:
            gone.append(next(name for name, one in made.items() if one is sequence))
            preempt(sequence)

        llm.engine.scheduler._preempt = noted  # type: ignore[method-assign]
        ends = order_of_ends(llm, made)
        assert gone[0] == "c"
        assert "a" not in gone
        assert ends[0] == "a"
        for place, one in enumerate(made.values()):
            wanted = plain().generate(prompt_token_ids=[65 + place], sampling_params=greedy_params(70))[0]
            assert tuple(one.output) == wanted.token_ids


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_order_of_any_priorities_gives_each_request_its_own_text(data: st.DataObject) -> None:
    """A real model: prompts that begin alike, priorities, a tight cache, a draft; each as if it had run alone."""
    jobs = []
    for _ in range(data.draw(st.integers(2, 6))):
        begin, length = data.draw(st.sampled_from([0, 0, 50])), data.draw(st.sampled_from([3, 33, 47, 64]))
        params = greedy_params(
            data.draw(st.sampled_from([1, 9, 30])),
            data.draw(st.sampled_from(["off", 3])),
            priority=data.draw(st.sampled_from([0, 0, 4])),
        )
        jobs.append((LONG[begin : begin + length], params))
    tight, every = data.draw(st.booleans()), data.draw(st.integers(1, 4))
    llm = drafted(tight)
    made = generate_staggered(llm, jobs, every)
    for (prompt, params), group in zip(jobs, made, strict=True):
        assert tuple(group[0].output) == alone(tuple(prompt), params.max_tokens or 0)
    assert llm.engine.scheduler.num_free_blocks == llm.engine.scheduler._pool.capacity


@functools.cache
def drafted(tight: bool) -> LLM:
    draft = tiny_draft(target(), "noisy")
    sizes = {"kv_cache_bytes": 12 * BLOCK_SIZE * 1024, "max_model_len": 128} if tight else {}
    return engine(speculative_model=draft, prefill_chunk_size=32, max_num_seqs=4, **sizes)


@functools.cache
def alone(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    made = plain().generate(prompt_token_ids=list(prompt), sampling_params=greedy_params(num_tokens))[0]
    return made.token_ids


# --- blocks


def test_blocks_come_lowest_first_and_behind_those_that_one_has() -> None:
    pool = BlockPool(RESERVED + 10)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first, second) == ([2, 3, 4], [5, 6])
    pool.free([3])
    assert pool.allocate(1, after=6) == [7]
    assert pool.allocate(1, after=6) == [3]
    assert pool.allocate(6) is None
    assert pool.num_free == 4


def test_idle_blocks_go_last_the_one_longest_not_wanted_first() -> None:
    gone: list[int] = []
    pool = BlockPool(RESERVED + 6, gone.append)
    blocks = pool.allocate(4)
    assert blocks is not None
    for block in blocks:
        pool.keep(block)
    pool.free(blocks[:2])
    pool.free(blocks[2:])
    assert (pool.num_free, pool.num_idle) == (6, 4)
    assert pool.allocate(2) == [6, 7]
    assert not gone
    pool.hold([blocks[1]])  # wanted again
    assert pool.allocate(2) == [2, 5]  # of each text its end first
    assert gone == [2, 5]
    pool.free([blocks[1]])
    assert pool.allocate(1) == [4]


def test_a_lone_sequence_gets_a_row_of_blocks_where_there_is_one() -> None:
    pool = BlockPool(RESERVED + 12)
    blocks = pool.allocate(12)
    assert blocks is not None
    for block in blocks[2:]:
        pool.keep(block)
    pool.free(blocks)
    assert pool.num_idle == 10
    assert pool.allocate_in_a_row(2, 2) == [2, 3]
    row = pool.allocate_in_a_row(3, 5)
    assert row == [9, 10, 11]
    assert pool.allocate(1, after=11) == [12]
    assert pool.allocate_in_a_row(2, 40) is not None  # there is no such row: blocks as they come
    with pytest.raises(CapacityError, match="a pool of 2 blocks holds nothing"):
        BlockPool(2)
