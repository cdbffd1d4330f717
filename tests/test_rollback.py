"""After any number of rounds and rejections the caches are what a fresh start would have made them (SYNC of the cases).

Rollback is a number: what lies behind it must never be read, and nothing is moved or allocated for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from outrider.draft.draft_model import DraftModelDrafter
from outrider.llm import LLM
from outrider.model.kv_cache import BLOCK_SIZE, NULL_BLOCK, RESERVED
from outrider.sampling.params import SamplingParams
from tests.scripted import ALL, ScriptedDrafter, engine_with, full_texts, greedy_params
from tests.tiny import byte_tokenizer, greedy, tiny_draft, tiny_sliding, tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.sequence import Sequence

PROMPTS = [(65,), tuple(b"Hello"), tuple(b"The quick brown f"), tuple(b"abcabcabd" * 4)]
Kind = Literal["same", "noisy", "unrelated"]


@functools.cache
def plain() -> LLM:
    return LLM(tiny_target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu")


@functools.cache
def reference(kind: str = "target") -> Any:
    """A model with its own attention, for computing from scratch."""
    return tiny_target() if kind == "target" else tiny_draft(tiny_target(), kind)  # type: ignore[arg-type]


@functools.cache
def texts(num_tokens: int) -> list[tuple[int, ...]]:
    return full_texts(plain(), PROMPTS, greedy_params(num_tokens))


def with_draft(kind: Kind, **settings: Any) -> LLM:
    target = tiny_target()
    return LLM(
        target, tiny_draft(target, kind), 8, tokenizer=byte_tokenizer(), dtype="float32", device="cpu",
        **{"prefill_chunk_size": 16, **settings},
    )  # fmt: skip


def start(llm: LLM, params: SamplingParams) -> list[Sequence]:
    made = [llm.intake.sequences(llm.intake.request(list(prompt), params))[0] for prompt in PROMPTS]
    for sequence in made:
        llm.engine.add(sequence)
    return made


def next_logits(runner: Any, rows: Any, tokens: list[int], begin: int) -> torch.Tensor:
    """What a model says next, by its cache up to `begin` and the tokens from there on fed anew."""
    positions = torch.arange(begin, len(tokens))[None]
    return runner.forward(torch.tensor([tokens[begin:]]), positions, rows.tables, len(tokens), rows.start)[0, -1]


def from_scratch(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def check_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit: these models are wide and pass rounding on, about tenfold a layer."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def check_caches_equal_a_fresh_start(llm: LLM, params: SamplingParams, kind: str | None = None, every: int = 3) -> None:
    """SYNC: step by step, target and draft say by their caches what they would say from scratch (1e-4)."""
    made, step = start(llm, params), 0
    while llm.engine.busy:
        llm.engine.step()
        step += 1
        for sequence in llm.engine.scheduler.running:
            if sequence.uncached or (step + sequence.prompt_length) % every:
                continue
            if not llm.engine.scheduler.grow(sequence, len(sequence)):
                continue  # no block for its last token yet: the next round will preempt somebody
            rows, tokens = llm.engine.state.gather([sequence]), list(sequence.tokens)
            assert rows.tokens[0, : len(tokens)].tolist() == tokens, "device and host disagree about the text"
            assert rows.lengths.tolist() == [len(tokens)]
            assert sequence.cached == len(tokens) - 1
            got = next_logits(llm.engine.runner, rows, tokens, len(tokens) - 1)
            check_close(got, from_scratch(reference(), tokens))
            drafter = llm.engine.drafter
            if kind is not None and isinstance(drafter, DraftModelDrafter):
                cached = drafter._cached.get(sequence.slot, 0)  # type: ignore[arg-type]
                assert cached < len(tokens), "a cache holds a proper prefix, never the last token"
                got = next_logits(drafter.runner, rows, tokens, min(cached, len(tokens) - 2))
                check_close(got, from_scratch(reference(kind), tokens))
    assert all(len(sequence.output) == params.max_tokens for sequence in made)


@pytest.mark.parametrize("pattern", [(0, 1, 2, 3, 4), (ALL,), (0,), (3, ALL, 1)], ids=str)
def test_the_targets_cache_survives_every_pattern_of_acceptance(pattern: tuple[int, ...]) -> None:
    """B02, B12: a scripted drafter forces rejections at every offset."""
    llm = engine_with(ScriptedDrafter(texts(50), pattern=pattern), tiny_target(), prefill_chunk_size=16)
    check_caches_equal_a_fresh_start(llm, greedy_params(50, 5))


@pytest.mark.parametrize("kind", ["same", "noisy", "unrelated"])
@pytest.mark.parametrize("speculation", [1, 4])
def test_both_caches_survive_a_drafts_luck(kind: Kind, speculation: int) -> None:
    """B01, B02, B03, for greedy and sampled text."""
    llm = with_draft(kind)
    check_caches_equal_a_fresh_start(llm, greedy_params(30, speculation), kind)
    sampled = SamplingParams(temperature=0.9, seed=4, max_tokens=20, speculation=speculation, ignore_eos=True)
    check_caches_equal_a_fresh_start(llm, sampled, kind)


def test_both_caches_survive_preemption() -> None:
    llm = with_draft("noisy", kv_cache_bytes=9 * BLOCK_SIZE * 1024)
    check_caches_equal_a_fresh_start(llm, greedy_params(40, 3), "noisy", every=2)
    assert llm.engine.scheduler.num_preemptions > 0


# --- the draft's luck, exactly


def expected_acceptance(kind: str, text: tuple[int, ...]) -> list[bool]:
    """For each place of a text, whether the draft, given the true tokens before, would guess it."""
    with torch.inference_mode():
        guesses = reference(kind)(input_ids=torch.tensor([text]), use_cache=False).logits[0].argmax(-1)
    return [False, *(guesses[:-1] == torch.tensor(text[1:])).tolist()]


def check_draft_accepts_exactly_what_it_must(kind: Kind, speculation: int, num_tokens: int) -> None:
    """Each round accepts the run of places that the draft, freshly computed, agrees on: not one more, not one less.

    This is acceptance 1.0 for D= (B01, B03), and for D~ it says of every single round that the draft has lost nothing.
    """
    llm = with_draft(kind, max_num_seqs=1)
    text = texts(num_tokens)[1]
    agrees = expected_acceptance(kind, text)
    drafter = llm.engine.drafter
    assert drafter is not None
    heard: list[tuple[int, int]] = []
    commit = drafter.commit

    def listening(slots: Any, lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        heard.extend(zip(lengths, accepted, strict=True))
        commit(slots, lengths, accepted)

    drafter.commit = listening  # type: ignore[method-assign]
    made = llm.generate(prompt_token_ids=list(PROMPTS[1]), sampling_params=greedy_params(num_tokens, speculation))[0]
    assert made.prompt_token_ids + made.token_ids == text
    for length, accepted in heard:
        most = min(speculation, len(text) - length - 1)
        run = next((i for i in range(most) if not agrees[length + i]), most)
        assert accepted == run, f"at {length}: {accepted} guesses were accepted, {run} of {most} agree"
    if kind == "same":
        assert made.stats.acceptance_rate == 1.0
        assert set(made.stats.acceptance_by_position) == {1.0}
        rounds = -(-num_tokens // (speculation + 1))
        assert made.stats.rounds == rounds


@pytest.mark.parametrize("speculation", [1, 2, 3, 4, 5, 6])
def test_a_draft_equal_to_the_target_is_right_300_times_in_a_row(speculation: int) -> None:
    """B01, B03: acceptance exactly 1.0 at every position, for every k."""
    check_draft_accepts_exactly_what_it_must("same", speculation, 300)


@pytest.mark.parametrize("speculation", [1, 3, 6])
def test_a_noisy_draft_is_right_exactly_where_it_would_be_afresh(speculation: int) -> None:
    """B01, B02: first-position acceptance is the same for all k, and late tokens fare no worse than early ones."""
    check_draft_accepts_exactly_what_it_must("noisy", speculation, 200)


def test_a_sampled_text_drafted_by_the_target_itself_is_right_throughout() -> None:
    """F04: with shared noise, at every temperature."""
    llm = with_draft("same")
    for temperature in (0.3, 1.0, 1.7):
        params = SamplingParams(
            temperature=temperature, top_p=0.95, seed=3, max_tokens=40, speculation=4, ignore_eos=True
        )
        for one in llm.generate(prompt_token_ids=[list(prompt) for prompt in PROMPTS], sampling_params=params):
            assert one.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_independent_guesses_of_the_target_itself_are_accepted_too(verification: str) -> None:
    """F04: p equals q, so the ratio is 1 up to the last bits."""
    llm = with_draft("same", verification=verification)
    params = SamplingParams(temperature=1.0, top_k=50, seed=3, max_tokens=40, speculation=4, ignore_eos=True)
    for one in llm.generate(prompt_token_ids=[list(prompt) for prompt in PROMPTS], sampling_params=params):
        assert one.stats.acceptance_rate > 0.99


def test_a_draft_that_failed_once_is_as_good_as_before_afterwards() -> None:
    """A chain that never ran has fed nothing: D= must be right again in all rounds after a passing failure."""
    llm = with_draft("same", max_num_seqs=1)
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    forward, calls = drafter.runner.forward, [0]

    def flaky(*fed: Any, **more: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in (9, 25):
            raise RuntimeError("passing trouble")
        return forward(*fed, **more)

    drafter.runner.forward = flaky  # type: ignore[method-assign]
    made = llm.generate(prompt_token_ids=list(PROMPTS[1]), sampling_params=greedy_params(60, 4))[0]
    assert llm.engine.speculator.num_failures == 2
    assert made.stats.acceptance_rate == 1.0


# --- what lies behind the length


def poison(llm: LLM) -> None:
    """Put NaN wherever no running sequence has a cached token; only the null block keeps its zeros."""
    caches: list[tuple[Any, Callable[[Sequence], int]]] = [(llm.engine.runner.cache, lambda one: one.cached)]
    drafter = llm.engine.drafter
    if isinstance(drafter, DraftModelDrafter):
        caches.append((drafter.runner.cache, lambda one: drafter._cached.get(one.slot, 0)))
    for cache, held in caches:
        unread = torch.ones(cache.num_blocks * BLOCK_SIZE, dtype=torch.bool)
        unread[NULL_BLOCK * BLOCK_SIZE : (NULL_BLOCK + 1) * BLOCK_SIZE] = False
        for sequence in llm.engine.scheduler.running:
            for position in range(held(sequence)):
                unread[sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = False
        for pool in (*cache.keys, *cache.values):
            pool[unread] = float("nan")


def check_nothing_behind_a_length_is_read(llm: LLM, speculation: int | str, num_tokens: int = 30) -> None:
    """B12: with NaN in every slot that belongs to no committed token, the texts are the same."""
    made = start(llm, greedy_params(num_tokens, speculation))
    poison(llm)
    while llm.engine.busy:
        llm.engine.step()
        poison(llm)
    got = [tuple(sequence.tokens) for sequence in made]
    assert got == texts(num_tokens)


@pytest.mark.parametrize("speculation", ["off", 1, 4])
@pytest.mark.parametrize("drafter", ["same", "noisy", "scripted"])
def test_slots_behind_a_rows_length_are_never_read(drafter: str, speculation: int | str) -> None:
    if drafter == "scripted":
        llm = engine_with(ScriptedDrafter(texts(30), pattern=(0, 3, ALL, 1)), tiny_target(), prefill_chunk_size=16)
    else:
        llm = with_draft(drafter)  # type: ignore[arg-type]
    check_nothing_behind_a_length_is_read(llm, speculation)
    if drafter == "same" and speculation != "off":
        assert llm.engine.figures.accepted == llm.engine.figures.drafted > 0


def test_slots_behind_a_window_are_as_good_as_gone_and_those_within_are_kept() -> None:
    """B06: a sliding window of 16, wrapped many times, with rejections on the way."""
    model = tiny_sliding()
    prompt = list(b"0123456789")
    wanted = greedy(model, prompt, 40)
    llm = engine_with(ScriptedDrafter([(*prompt, *wanted)], pattern=(2, ALL, 0)), model)
    made = llm.generate(prompt_token_ids=prompt, sampling_params=greedy_params(40, 4))[0]
    assert list(made.token_ids) == wanted


def test_no_buffer_moves_while_rounds_accept_and_reject() -> None:
    """B12: the caches and the device state keep their addresses and shapes."""
    llm = with_draft("noisy")
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter)

    def addresses() -> list[tuple[int, tuple[int, ...]]]:
        state = llm.engine.state
        caches = (llm.engine.runner.cache, drafter.runner.cache)  # type: ignore[attr-defined]
        tensors = [pool for cache in caches for pool in (*cache.keys, *cache.values)]
        tensors += [state.tokens, state.lengths, state.tables]
        return [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors]

    before = addresses()
    made = llm.generate(prompt_token_ids=[list(p) for p in PROMPTS], sampling_params=greedy_params(100, 4))
    assert [one.prompt_token_ids + one.token_ids for one in made] == texts(100)
    assert 0 < llm.engine.figures.accepted < llm.engine.figures.drafted
    assert addresses() == before


def test_a_context_that_is_said_too_large_shows_a_lone_row_no_more() -> None:
    """A lone row over blocks in order is read as a slice, no further than was written."""
    with engine_with(None, tiny_target()) as llm:
        runner = llm.engine.runner
        tables = torch.arange(RESERVED, RESERVED + 4)[None]
        tokens = torch.tensor([[65, 66, 67, 68, 69]])
        for pool in (*runner.cache.keys, *runner.cache.values):
            pool[BLOCK_SIZE:] = torch.nan
        runner.feed(tokens, torch.arange(5)[None], tables, 5, RESERVED * BLOCK_SIZE)
        asked = torch.tensor([[70]]), torch.tensor([[5]]), tables
        exact, larger = (runner.forward(*asked, context, RESERVED * BLOCK_SIZE) for context in (6, 11))
        assert torch.allclose(exact, larger, atol=1e-5)
