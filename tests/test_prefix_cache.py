"""Texts that begin alike share blocks of the cache: never a wrong token, never another's block, never a write to one.

BASE is the same request alone on an engine without drafter and without a prefix cache.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import outrider.engine.prefix_cache as prefix_module
from outrider import LLM, SamplingParams, wrap
from outrider.config import Verification
from outrider.draft.mixture import MixtureDrafter
from outrider.draft.ngram import NGramDrafter
from outrider.draft.retokenised import RetokenisedDrafter
from outrider.draft.translated import TranslatedDrafter
from outrider.engine.round import Drafting, RoundPlan, propose
from outrider.model.attention import Step
from outrider.model.kv_cache import BLOCK_SIZE, KVCache
from tests import test_dflash, test_mtp
from tests.eagle_checkpoints import write
from tests.heads import write_head
from tests.scripted import ScriptedDrafter, engine_with, generate_staggered, greedy_params
from tests.test_heads_by_name import medusa_folder
from tests.tiny import byte_tokenizer, greedy, tiny_draft, tiny_sliding, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from outrider.sequence import Sequence as Running

SYSTEM = tuple(range(40, 40 + 3 * BLOCK_SIZE + 5))  # three full blocks and a bit
LONG = tuple((7 * place * place + 3 * place) % 250 for place in range(200))
PROMPTS = [(*SYSTEM, *b"Hello"), (*SYSTEM, *b"How do you do?"), SYSTEM, (*SYSTEM, *range(60, 100)), (65,)]


@functools.cache
def target() -> Any:
    return tiny_target()


@functools.cache
def plain() -> LLM:
    return LLM(target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu", enable_prefix_caching=False)


@functools.cache
def base(prompt: tuple[int, ...], num_tokens: int, temperature: float = 0.0, seed: int = 0) -> tuple[int, ...]:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    return plain().generate(prompt_token_ids=list(prompt), sampling_params=params)[0].token_ids


def engine(**settings: Any) -> LLM:
    return LLM(target(), **{"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", **settings})


def submit(llm: LLM, prompt: Sequence[int], params: SamplingParams, scope: str = "") -> list[Running]:
    made = llm.intake.sequences(llm.intake.request(list(prompt), params, scope=scope))
    for sequence in made:
        llm.engine.add(sequence)
    return made


def finish(llm: LLM) -> None:
    while llm.engine.busy:
        llm.engine.step()
    assert llm.engine.scheduler.num_free_blocks == llm.engine.scheduler._pool.capacity
    assert llm.engine.state.num_free == llm.engine.config.max_num_seqs


def ask(llm: LLM, prompt: Sequence[int], num_tokens: int = 8, scope: str = "", **others: Any) -> Running:
    """Run one request to its end."""
    sequence = submit(llm, prompt, greedy_params(num_tokens, **others), scope)[0]
    finish(llm)
    return sequence


# --- what is found


def test_a_prompt_that_comes_again_is_not_computed_again() -> None:
    with engine() as llm:
        first, again = ask(llm, LONG), ask(llm, LONG)
        assert first.output == again.output == list(base(LONG, 8))
        assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 192)
        figures = llm.engine.figures
        assert (figures.prefix_queries, figures.prefix_hits) == (400, 192)
        output = llm.generate(prompt_token_ids=list(LONG), sampling_params=greedy_params(8))[0]
        assert output.cached_tokens == output.stats.cached_tokens == 192


def test_the_last_token_of_a_prompt_is_always_fed() -> None:
    with engine() as llm:
        ask(llm, LONG)
        for length in (15, 16, 17, 32, 33, 192, 193):
            sequence = ask(llm, LONG[:length])
            assert sequence.output == list(base(LONG[:length], 8))
            # The token after a block is the block's, too: the last block of a whole number of them is not taken.
            assert sequence.stats.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_what_was_generated_is_found_too() -> None:
    """The next turn of a conversation: prompt, answer and something new."""
    with engine() as llm:
        first = ask(llm, LONG[:20], 40)
        turn = (*LONG[:20], *first.output, 7, 8, 9)
        second = ask(llm, turn)
        assert second.output == list(base(turn, 8))
        assert second.stats.cached_tokens == 48  # of 59 that the cache held: whole blocks


def test_a_block_counts_with_the_token_after_it() -> None:
    """What a head keeps of a place is made with the token after it: alike up to a border is not alike enough."""
    with engine() as llm:
        ask(llm, LONG[:40])
        other = ask(llm, (*LONG[:32], LONG[32] + 1, 5, 6))
        assert other.stats.cached_tokens == 16
        assert other.output == list(base((*LONG[:32], LONG[32] + 1, 5, 6), 8))


def test_it_can_be_switched_off() -> None:
    with engine(enable_prefix_caching=False) as llm:
        assert ask(llm, LONG).stats.cached_tokens == ask(llm, LONG).stats.cached_tokens == 0
        assert llm.engine.figures.prefix_queries == llm.engine.figures.prefix_hits == 0


@pytest.mark.parametrize("speculation", ["off", 4])
def test_texts_in_one_batch_share_their_beginning(speculation: Any) -> None:
    """All come at once: each takes over what those before it have computed by then."""
    with engine(method="ngram") as llm:
        made = [submit(llm, prompt, greedy_params(12, speculation))[0] for prompt in PROMPTS]
        llm.engine.step()
        first, *others = (sequence.blocks[:3] for sequence in made[:4])
        assert all(other == first for other in others)
        assert [llm.engine.scheduler._pool.num_holders(block) for block in first] == [4, 4, 4]
        finish(llm)
        assert [tuple(sequence.output) for sequence in made] == [base(prompt, 12) for prompt in PROMPTS]
        assert sorted(sequence.stats.cached_tokens for sequence in made) == [0, 0, 48, 48, 48]


def test_hits_are_the_same_with_and_without_guesses() -> None:
    def hits(speculation: Any, **settings: Any) -> list[int]:
        with engine(prefill_chunk_size=16, **settings) as llm:
            jobs = [(prompt, greedy_params(20, speculation)) for prompt in (*PROMPTS, *PROMPTS)]
            return [one.stats.cached_tokens for group in generate_staggered(llm, jobs, 4) for one in group]

    wanted = hits("off")
    assert sum(wanted) > 0
    assert hits("off", speculative_model=tiny_draft(target(), "noisy")) == wanted
    for settings in ({"method": "early_exit", "exit_layer": 1}, {"speculative_model": tiny_draft(target(), "same")}):
        found = hits(3, **settings)
        assert found[: len(PROMPTS)] == wanted[: len(PROMPTS)]
        assert all(one >= other for one, other in zip(found, wanted, strict=True))  # texts end sooner: more is there


def test_samples_of_one_request_share_their_prompt() -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    alone = plain().generate(prompt_token_ids=list(LONG), sampling_params=params)[0]
    with engine() as llm:
        made = submit(llm, LONG, params)
        llm.engine.step()
        assert len({tuple(sequence.blocks[:12]) for sequence in made}) == 1
        finish(llm)
        assert [tuple(sequence.output) for sequence in made] == [one.token_ids for one in alone.outputs]
        assert [sequence.stats.cached_tokens for sequence in made] == [0, 192, 192, 192]


# --- whose it is


def test_nothing_is_shared_across_scopes_unless_asked_for() -> None:
    """Advisory row 30: another key's prompt cannot be guessed by the time of a first token."""
    with engine() as llm:
        ask(llm, LONG, scope="one key")
        assert ask(llm, LONG, scope="another").stats.cached_tokens == 0
        assert ask(llm, LONG).stats.cached_tokens == 0
        assert ask(llm, LONG, scope="one key").stats.cached_tokens == 192
    with engine(share_prefixes=True) as llm:
        ask(llm, LONG, scope="one key")
        assert ask(llm, LONG, scope="another").stats.cached_tokens == 192


@pytest.mark.parametrize("kind", ["all alike", "by the last token", "without what came before"])
def test_a_collision_of_hashes_takes_over_nothing_of_another_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advisory row 31."""
    hashes = {
        "all alike": lambda before, tokens: b"",
        "by the last token": lambda before, tokens: bytes([tokens[-1]]),
        "without what came before": lambda before, tokens: bytes(tokens),
    }
    monkeypatch.setattr(prefix_module, "block_digest", hashes[kind])
    repeated = LONG[:17] * 4
    prompts = [LONG, tuple(reversed(LONG)), (*LONG[16:32], *LONG[16:]), LONG[16:], repeated, (*LONG[:16], *LONG[:40])]
    with engine() as llm:
        for prompt in (*prompts, *prompts):
            assert ask(llm, prompt).output == list(base(prompt, 8))
        made = [(prompt, submit(llm, prompt, greedy_params(8))[0]) for prompt in (*prompts, *prompts)]
        finish(llm)
        assert all(tuple(sequence.output) == base(prompt, 8) for prompt, sequence in made)


# --- what must not be found


def test_refused_guesses_are_never_found() -> None:
    """R08: the second prompt is the first with the guesses that were refused."""
    text = (*LONG[:30], *base(LONG[:30], 20))
    drafter = ScriptedDrafter([text], pattern=(0,))
    with engine_with(drafter, target()) as llm:
        ask(llm, LONG[:30], 20, speculation=16)
        wrong = (*LONG[:30], *((token + 1) % 320 for token in text[30:46]), 5)
        sequence = ask(llm, wrong)
        assert sequence.stats.cached_tokens == 16
        assert sequence.output == list(base(wrong, 8))


def test_what_a_failed_request_computed_is_not_found() -> None:
    with engine() as llm:
        sequence = submit(llm, LONG, greedy_params(8))[0]
        forward, runner = llm.engine.runner.forward, llm.engine.runner
        runner.forward = lambda *fed, **more: forward(*fed, **more) * torch.nan  # type: ignore[method-assign]
        finish(llm)
        assert sequence.finish_reason == "error"
        runner.forward = forward  # type: ignore[method-assign]
        again = ask(llm, LONG)
        assert again.stats.cached_tokens == 0
        assert again.output == list(base(LONG, 8))


def test_a_report_on_the_prompt_is_computed() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, n=2)
    wanted = plain().generate(prompt_token_ids=list(LONG), sampling_params=params)[0]
    with engine() as llm:
        ask(llm, LONG)
        made = llm.generate(prompt_token_ids=list(LONG), sampling_params=params)[0]
        assert made.cached_tokens == 0
        assert made.prompt_logprobs is not None
        assert wanted.prompt_logprobs is not None
        assert len(made.prompt_logprobs) == len(LONG)
        for mine, theirs in zip(made.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ask(llm, LONG).stats.cached_tokens == 192


class _Private(ScriptedDrafter):
    shares_blocks = False


def test_a_draft_whose_blocks_hold_other_texts_shares_none() -> None:
    """Drafts with another tokenizer: their tokens stand at other places than the target's."""
    assert not TranslatedDrafter.shares_blocks
    assert not RetokenisedDrafter.shares_blocks
    parts = [NGramDrafter(3, 1), _Private()]
    assert not MixtureDrafter(parts, 2, torch.device("cpu")).shares_blocks
    with engine_with(_Private([(*LONG, *base(LONG, 8))]), target()) as llm:
        assert ask(llm, LONG).output == ask(llm, LONG).output == list(base(LONG, 8))
        assert llm.engine.figures.prefix_hits == llm.engine.figures.prefix_queries == 0


# --- eviction and preemption


def test_blocks_are_given_away_when_they_are_needed_and_nothing_stale_is_found() -> None:
    """Blocks for 200 tokens: beginnings come, go and come again, alone and together."""
    per_block = BLOCK_SIZE * plain().engine.runner.bytes_per_slot
    prompts = [(*LONG[start : start + 40], *LONG[:width]) for start in (0, 40, 80) for width in (10, 30, 60)]
    with engine(kv_cache_bytes=15 * per_block, max_model_len=200) as llm:
        for prompt in (*prompts, *reversed(prompts)):
            assert ask(llm, prompt).output == list(base(prompt, 8))
        jobs = [(prompt, greedy_params(20)) for prompt in prompts]
        made = [one for group in generate_staggered(llm, jobs) for one in group]
        assert [tuple(one.output) for one in made] == [base(prompt, 20) for prompt in prompts]
        assert llm.engine.figures.prefix_hits > 0
        prefixes = llm.engine.scheduler._prefixes
        assert prefixes is not None
        assert len(prefixes) == llm.engine.scheduler._pool.num_idle


def test_a_row_that_was_sent_away_starts_from_what_is_left_of_it() -> None:
    per_block = BLOCK_SIZE * plain().engine.runner.bytes_per_slot
    with engine(kv_cache_bytes=11 * per_block, max_model_len=100) as llm:
        jobs = [((*LONG[:30], place), greedy_params(60)) for place in range(3)]
        made = [one for group in generate_staggered(llm, jobs, 1) for one in group]
        assert [tuple(one.output) for one in made] == [base(prompt, 60) for prompt, _ in jobs]
        assert llm.engine.scheduler.num_preemptions > 0
        returned = [one for one in made if one.returned]
        assert returned
        assert all(one.stats.cached_tokens <= 16 for one in made), "of the prompt, and only the first time"
        assert llm.engine.figures.prefix_hits > sum(one.stats.cached_tokens for one in made)


# --- nothing that is shared is written


@pytest.fixture
def eagle(tmp_path: Path) -> str:
    return str(write("eagle3", tmp_path / "head", target()).folder)


METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "lookup": {"method": "ngram"},
    "lookup trees": {"method": "suffix", "tree": "auto"},
    "early exit": {"method": "early_exit", "exit_layer": 1},
    "early exit trees": {"method": "early_exit", "exit_layer": 1, "tree": "auto"},
    "same": {"method": "draft_model"},
    "noisy": {"method": "draft_model"},
    "noisy trees": {"method": "draft_model", "tree": "auto"},
    "eagle": {"method": "eagle"},
    "eagle trees": {"method": "eagle", "tree": "auto"},
    "lookup or noisy": {"method": "ngram+draft_model"},
}


def drafting(name: str, head: str, **settings: Any) -> LLM:
    settings = {**METHODS[name], **settings}
    if "draft_model" in settings["method"]:
        settings["speculative_model"] = tiny_draft(target(), "same" if name == "same" else "noisy")
    if settings["method"] == "eagle":
        settings["speculative_model"] = head
    return engine(**{"num_speculative_tokens": 8, "prefill_chunk_size": 32, **settings})


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """Engines by their target's cache: nothing that is registered may be written there."""
    engines: dict[int, Any] = {}
    store, move = Step.store, KVCache.move
    seen = []

    def check(cache: KVCache, slots: torch.Tensor) -> None:
        llm = engines.get(id(cache))
        if llm is not None:
            blocks = set((slots // BLOCK_SIZE).tolist())
            kept = llm.engine.scheduler._pool._kept & blocks
            assert not kept, f"blocks {kept} are registered and were written"
            seen.append(blocks)

    def storing(self: Step, layer: int, key: Any, value: Any) -> None:
        check(self.cache, self.write)
        store(self, layer, key, value)

    def moving(self: KVCache, source: torch.Tensor, into: torch.Tensor) -> None:
        stays = source == into
        check(self, into[~stays])
        move(self, source, into)

    monkeypatch.setattr(Step, "store", storing)
    monkeypatch.setattr(KVCache, "move", moving)
    yield engines
    assert seen


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_no_shared_block_of_the_target_is_ever_written(
    name: str, tight: bool, eagle: str, guarded: dict[int, Any]
) -> None:
    """What a round writes (guesses, trees, kept paths) lies behind what is shared, whatever drafts."""
    with drafting(name, eagle) as llm:
        per_block = BLOCK_SIZE * (llm.engine.runner.bytes_per_slot + getattr(llm.engine.drafter, "bytes_per_slot", 0))
    limits = {"kv_cache_bytes": 16 * per_block, "max_model_len": 160} if tight else {}
    with drafting(name, eagle, **limits) as llm:
        guarded[id(llm.engine.runner.cache)] = llm
        guesses: Any = "off" if name == "plain" else 8
        jobs = [
            (prompt, greedy_params(24, guesses)) for prompt in (*PROMPTS, *reversed(PROMPTS), LONG[:100], LONG[:90])
        ]
        made = [one for group in generate_staggered(llm, jobs) for one in group]
        assert [tuple(one.output) for one in made] == [base(prompt, 24) for prompt, _ in jobs]
        assert llm.engine.speculator.num_failures == 0
        assert llm.engine.figures.prefix_hits > 0


# --- drafts after a hit


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another"])
def test_a_draft_equal_to_the_target_is_always_right_after_a_hit(company: bool) -> None:
    """R05; and it is not fed again what another row's draft has cached."""
    with drafting("same", "") as llm:
        ask(llm, LONG, 20, speculation=4)
        drafter: Any = llm.engine.drafter
        fed: list[int] = []
        feed = drafter.runner.feed

        def counting(tokens: torch.Tensor, *more: Any) -> None:
            fed.append(tokens.shape[1])
            feed(tokens, *more)

        drafter.runner.feed = counting
        if company:
            other = submit(llm, PROMPTS[0], greedy_params(40, 4))[0]
            while not other.stats.drafted:
                llm.engine.step()
            fed.clear()
        again = submit(llm, (*LONG[:196], 5, 6), greedy_params(20, 4))[0]
        finish(llm)
        assert again.output == list(base((*LONG[:196], 5, 6), 20))
        assert again.stats.cached_tokens == 192
        assert again.stats.acceptance_rate == 1.0
        assert sum(fed) < 16
        if company:
            assert other.stats.acceptance_rate == 1.0


def test_rows_whose_drafts_lag_feed_shared_blocks_without_harm() -> None:
    """All come at once, so no draft's entries are there to take over: each feeds the shared blocks of its own cache."""
    with drafting("same", "") as llm:
        made = [submit(llm, (*LONG, place), greedy_params(30, 4))[0] for place in range(4)]
        finish(llm)
        assert llm.engine.figures.prefix_hits == 3 * 192
        assert [one.stats.acceptance_rate for one in made] == [1.0] * 4


def with_head(name: str, root: Path, **settings: Any) -> LLM:
    """Heads that read the target's hidden states; their targets are their own."""
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_speculative_tokens": 7, **settings}
    if name == "mtp":
        model, names, weights = test_mtp.of_kind("mimo")
        return LLM(str(test_mtp.write(root / "target", model, names, weights)), method="mtp", **common)
    common["tokenizer"] = byte_tokenizer()
    if name == "dflash":
        folder = write_head(root / "block", test_dflash.DFLASH, test_dflash.tensors(), "model.safetensors")
        return LLM(test_dflash.target_model(), str(folder), **common)
    return LLM(tiny_target(), str(medusa_folder(root)), method="medusa", **common)


def guesses_of(llm: LLM) -> list[Any]:
    """What is guessed in all rounds, and what came of it: prompts one after another, then two together."""
    found: list[Any] = []
    drafter: Any = llm.engine.drafter
    propose = drafter.propose

    def noting(rows: Any, num_tokens: int) -> Any:
        made = propose(rows, num_tokens)
        found.append(made.tokens.tolist())
        return made

    drafter.propose = noting
    vocab_size = llm.engine.runner.vocab_size
    first, *prompts = ([token % vocab_size for token in one] for one in (LONG, PROMPTS[1], (*LONG[:150], 5, 6)))
    for prompt in (first, *prompts, first):
        one = ask(llm, prompt, 30, speculation=7)
        found.append((one.output, one.stats.drafted, one.stats.accepted))
    pair = [submit(llm, prompt, greedy_params(30, 7))[0] for prompt in (first, [*first[:100], 7])]
    finish(llm)
    found += [(one.output, one.stats.drafted, one.stats.accepted) for one in pair]
    return found


@pytest.mark.parametrize("name", ["eagle", "eagle trees", "noisy", "lookup or noisy", "medusa", "mtp", "dflash"])
def test_guesses_after_a_hit_are_those_without_one(name: str, eagle: str, tmp_path: Path) -> None:
    """Alone (the draft's entries are copied) and beside another (they are shared)."""
    made = []
    for caching in (True, False):
        how = {"enable_prefix_caching": caching, "max_num_seqs": 2, "prefill_chunk_size": 512}
        root = tmp_path / str(caching)
        with drafting(name, eagle, **how) if name in METHODS else with_head(name, root, **how) as llm:
            made.append(guesses_of(llm))
            assert (llm.engine.figures.prefix_hits > 0) == caching
            assert llm.engine.speculator.num_failures == 0
    assert made[0] == made[1]


# --- exact mode


@pytest.mark.parametrize("chunk", [16, 40, 64])
def test_in_exact_mode_a_hit_leaves_every_bit_as_it_was(chunk: int) -> None:
    """Hits end at a chunk's border, so that each token is computed in the shape in which it is without a hit."""
    model = tiny_target().to(torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=3, ignore_eos=True)
    prompts = [LONG, LONG[:150], (*LONG[:130], 7, 7, 7), LONG]

    def run(caching: bool) -> list[tuple[Any, ...]]:
        common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "bfloat16", "device": "cpu", "exact": True}
        sizes = {"max_num_seqs": 2, "max_model_len": 256, "prefill_chunk_size": chunk}
        with LLM(model, method="ngram", enable_prefix_caching=caching, **common, **sizes) as llm:
            made = [llm.generate(prompt_token_ids=list(prompt), sampling_params=params)[0] for prompt in prompts]
            made += llm.generate(prompt_token_ids=[list(prompt) for prompt in prompts], sampling_params=params)
            hits = [one.cached_tokens for one in made]
            border = chunk if chunk % BLOCK_SIZE == 0 else chunk * 2
            assert all(hit % border == 0 for hit in hits)
            assert (sum(hits) > 0) == caching
            return [(one.token_ids, one.outputs[0].logprobs) for one in made]

    assert run(True) == run(False)


def test_in_exact_mode_what_rounds_and_reports_computed_is_not_taken_over() -> None:
    with engine(exact=True, max_num_seqs=2, max_model_len=300, prefill_chunk_size=32) as llm:
        first = ask(llm, LONG[:40], 60)
        assert ask(llm, (*LONG[:40], *first.output, 5)).stats.cached_tokens == 32
        ask(llm, LONG[100:], prompt_logprobs=1)
        assert ask(llm, LONG[100:]).stats.cached_tokens == 0


# --- streams, aborts, windows, lone rows


def test_a_stream_that_is_left_leaves_what_it_computed() -> None:
    with engine(prefill_chunk_size=32) as llm:
        stream = llm.stream(list(LONG), greedy_params(30))
        next(stream)
        stream.close()
        assert not llm.engine.busy
        chunks = list(llm.stream(list(LONG), greedy_params(10)))
        assert [token for chunk in chunks for token in chunk.token_ids] == list(base(LONG, 10))
        assert chunks[-1].stats is not None
        assert chunks[-1].stats.cached_tokens == 192


def test_a_prompt_that_is_given_up_half_way_is_found_that_far() -> None:
    with engine(prefill_chunk_size=32) as llm:
        given_up = submit(llm, LONG, greedy_params(8))[0]
        for _ in range(3):
            llm.engine.step()
        assert given_up.cached == 96
        llm.engine.abort(given_up)
        again = ask(llm, LONG)
        assert again.stats.cached_tokens == 96
        assert again.output == list(base(LONG, 8))


def test_windows_do_not_mind() -> None:
    model = tiny_sliding()
    with engine_with(None, tiny_sliding()) as llm:
        for prompt in (LONG[:100], LONG[:60], (*LONG[:90], 4, 5)):
            assert ask(llm, prompt, 30).output == greedy(model, list(prompt), 30)
        assert llm.engine.figures.prefix_hits == 48 + 80


def test_a_row_that_is_alone_lies_in_a_row_after_a_hit_too() -> None:
    """On a CPU such a row is read as one slice: it gets a copy of what it would share."""
    with engine() as llm:
        for prompt in (LONG, (*LONG[:100], 7), (*LONG[:50], 8), LONG):
            sequence = submit(llm, prompt, greedy_params(40))[0]
            while llm.engine.busy:
                llm.engine.step()
                if sequence.slot is not None:
                    begin = sequence.blocks[0]
                    assert sequence.blocks == list(range(begin, begin + len(sequence.blocks)))
                    assert llm.engine.state.gather([sequence]).start == begin * BLOCK_SIZE
            assert sequence.output == list(base(prompt, 40))
        assert llm.engine.figures.prefix_hits == 96 + 48 + 192


def test_rows_of_which_some_blocks_are_shared_are_not_read_as_a_slice() -> None:
    with engine() as llm:
        keeper = submit(llm, PROMPTS[0], greedy_params(40))[0]
        llm.engine.step()
        between = submit(llm, (65,), greedy_params(40))[0]
        llm.engine.step()
        shared = submit(llm, PROMPTS[3], greedy_params(12))[0]
        llm.engine.step()
        assert shared.blocks[:3] == keeper.blocks[:3]
        assert llm.engine.state.gather([shared]).start is None
        llm.engine.abort(keeper)
        llm.engine.abort(between)
        finish(llm)
        assert shared.output == list(base(PROMPTS[3], 12))


def test_prompts_that_share_a_pass_share_their_beginnings() -> None:
    """As on a card: of those that begin alike one is fed first, the rests of the others in one pass."""
    with engine() as llm:
        llm.engine._prompts._together = True
        passes: list[tuple[int, ...]] = []
        feed = llm.engine.runner.feed

        def counting(tokens: torch.Tensor, *more: Any) -> None:
            passes.append(tuple(tokens.shape))
            feed(tokens, *more)

        llm.engine.runner.feed = counting  # type: ignore[method-assign]
        params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
        made = submit(llm, LONG[:70], params)
        other = submit(llm, LONG[100:160], greedy_params(10))[0]
        llm.engine.step()
        assert passes == [(2, 69), (3, 5)]
        finish(llm)
        alone = plain().generate(prompt_token_ids=list(LONG[:70]), sampling_params=params)[0]
        assert [tuple(sequence.output) for sequence in made] == [one.token_ids for one in alone.outputs]
        assert tuple(other.output) == base(LONG[100:160], 10)


def test_a_copy_that_runs_out_of_memory_can_be_tried_again_and_leaks_nothing() -> None:
    with engine() as llm:
        ask(llm, LONG)
        copy, runner = llm.engine.runner.copy_blocks, llm.engine.runner
        runner.copy_blocks = _out_of_memory  # type: ignore[method-assign]
        sequence = submit(llm, LONG, greedy_params(8))[0]
        with pytest.raises(torch.OutOfMemoryError):
            llm.engine.step()
        runner.copy_blocks = copy  # type: ignore[method-assign]
        finish(llm)
        assert sequence.output == list(base(LONG, 8))
        assert sequence.stats.cached_tokens == 192


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no more")


def test_after_weights_were_changed_nothing_old_is_found() -> None:
    model = tiny_target()
    with LLM(model, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        ask(llm, LONG)
        other = tiny_target(seed=5)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        llm.reset_prefix_cache()
        made = ask(llm, LONG)
        assert made.stats.cached_tokens == 0
        assert made.output == greedy(other, list(LONG), 8)
        assert ask(llm, LONG).stats.cached_tokens == 192


def test_a_wrapped_model_may_be_trained_between_two_calls() -> None:
    model, prompt = tiny_target(), torch.tensor([LONG[:60]])
    with wrap(model, byte_tokenizer()) as wrapped:
        wrapped.generate(prompt, max_new_tokens=8, do_sample=False)
        other = tiny_target(seed=5)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        made = wrapped.generate(prompt, max_new_tokens=8, do_sample=False)
        assert made[0, 60:].tolist() == greedy(other, list(LONG[:60]), 8)


def _raise(drafter: Any, error: Exception) -> None:
    raise error


def test_a_row_that_is_drafted_for_without_being_allowed_guesses_writes_nothing() -> None:
    """As in a captured round, where all rows are drafted for: its draft may lag, and its blocks be others' too."""
    with drafting("same", "") as llm:
        for prompt in (LONG[:40], LONG[50:100]):
            submit(llm, prompt, greedy_params(30, 4))
        for _ in range(5):
            llm.engine.step()
        running = llm.engine.scheduler.running
        drafter: Any = llm.engine.drafter
        keys = drafter.runner.cache.keys[0].view(-1, BLOCK_SIZE, *drafter.runner.cache.keys[0].shape[1:])
        for allowance in ([4, 0], [0, 4]):
            rows, before = llm.engine.state.gather(running, room=5), keys.clone()
            everybody = (Drafting(drafter),)
            plan = RoundPlan(rows, torch.tensor(allowance), 4, everybody, Verification.COUPLED)
            with torch.inference_mode():
                keys[[one.blocks[-1] for one in running]] = 0
                proposal, _ = propose(plan, 320, _raise)
            assert proposal.lengths.tolist() == allowance
            emptied = [bool(before[one.blocks[-1]].any()) for one in running]
            assert emptied == [True, True]
            still = [bool((keys[one.blocks[-1]] == 0).all()) for one in running]
            assert still == [allowed == 0 for allowed in allowance]
            keys.copy_(before)
        finish(llm)
