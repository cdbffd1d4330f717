"""The property that sells the product: with any drafter, verifier, setting, batch and draft length, the target's text.

BASE is the same request, alone, on an engine that never drafts (design, section 2); it is itself checked against
transformers. Coupled verification equals BASE token for token, sampling included; rejection and block equal it where
the target is greedy (their exactness in distribution is in test_verify.py). Engines are kept between scenarios on
purpose: whatever one run leaves behind would show in the next.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.draft.ngram import NGramDrafter
from outrider.llm import LLM
from outrider.model.kv_cache import BLOCK_SIZE
from outrider.model.prompt_graphs import PromptGraphs
from outrider.proposal import Proposal
from outrider.sampling.grammar import Grammar
from outrider.sampling.params import SamplingParams
from tests.eagle_checkpoints import write
from tests.scripted import (
    ALL,
    FAULTS,
    ScriptedDrafter,
    bushy,
    engine_with,
    generate_staggered,
    generate_together,
    greedy_params,
)
from tests.test_heads_by_name import medusa_folder
from tests.tiny import EOS_ID, FAMILIES, byte_tokenizer, greedy, tiny_draft, tiny_family, tiny_sliding, tiny_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from outrider.sequence import Sequence

LENGTH = 16  # tokens a text, unless it ends by itself
PHRASE = list(b"abcabcabcabd")
PROMPTS: dict[int, tuple[int, ...]] = {  # by length
    1: (65,),
    5: tuple(b"Hello"),
    17: tuple(b"The quick brown f"),
    40: tuple(PHRASE * 3 + [10, 200, 7, 99]),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8, "seed": 1},
    "hot nucleus": {"temperature": 1.3, "top_p": 0.9, "seed": 2},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "min_p": {"temperature": 1.5, "min_p": 0.1, "seed": 4},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    # A few tokens that repeat, so that one more of them changes what comes next within a round.
    "frequency": {"temperature": 0, "frequency_penalty": 2.0, "logit_bias": dict.fromkeys((97, 98, 99, 100), 60)},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.5, "seed": 5},
    "logit_bias": {"temperature": 0, "logit_bias": {32: 12, 101: 14, 116: 13, 65: -100}},
    "bad_words": {"temperature": 0, "logit_bias": {97: 30, 98: 31, 99: 29}, "bad_words": ["b", "ac", "ca"]},
    "min_tokens and end": {"temperature": 1.2, "seed": 6, "min_tokens": 7, "logit_bias": {EOS_ID: 16}},
    "a far seed": {"temperature": 1.0, "seed": 2**64 - 1},
    "a negative seed": {"temperature": 1.0, "seed": -(2**63)},
    "all together": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7, "presence_penalty": 0.5,
        "frequency_penalty": -0.4, "repetition_penalty": 1.2, "logit_bias": {101: 5, EOS_ID: 9}, "min_tokens": 5,
        "bad_words": ["e", "th"], "stop_token_ids": [32], "logprobs": 2,
    },
    # At their end and at their edges: a stop that the text does not show, white space that is banned, the least p.
    "a special token as stop": {
        "temperature": 1.1, "seed": 10, "ignore_eos": True, "stop": "</s>", "logit_bias": {EOS_ID: 14}, "logprobs": 1,
    },
    "white space banned": {"temperature": 0.9, "seed": 12, "bad_words": ["\n", " "], "logit_bias": {10: 12, 32: 12}},
    "the least p": {"temperature": 1.4, "seed": 11, "top_p": 1e-60, "repetition_penalty": 1e-60},
    # What these texts are is held against an oracle of its own in test_grammar.py.
    "grammar": {"temperature": 0, "grammar": Grammar.regex("[a-m ]{1,5}(:[0-9a-f]{2,6}){0,2}")},
    "json": {"temperature": 0, "grammar": Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "bc": {"enum": ["x", "yes"]}},
         "required": ["a", "bc"], "additionalProperties": False})},
    "grammar, drawn": {"temperature": 1.3, "seed": 8, "min_tokens": 6, "grammar": Grammar.regex("(ab|abc|b){2,5}d*")},
    "grammar and more": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 9, "frequency_penalty": 0.4, "presence_penalty": 0.5,
        "repetition_penalty": 1.2, "logit_bias": {101: 5, EOS_ID: 4}, "min_tokens": 3, "bad_words": ["e", "th"],
        "stop": "qz", "logprobs": 2, "ignore_eos": True, "grammar": Grammar.regex("[a-z0-9]+-[a-z]{0,4}"),
    },
}  # fmt: skip
GRAMMARS = tuple(one["grammar"] for one in SETTINGS.values() if "grammar" in one)
GREEDY_SETTINGS = tuple(name for name, one in SETTINGS.items() if one["temperature"] == 0)
BY_NAME: dict[str, dict[str, Any]] = {  # drafters as users name them; those with a draft model take a noisy one
    "suffix": {"method": "suffix"},
    "early exit": {"method": "early_exit", "exit_layer": 1},
    "lookup or draft": {"method": "ngram+draft_model"},
    "lookup and draft": {"method": "suffix+draft_model", "tree": "auto"},
    "draft trees": {"method": "draft_model", "tree": "auto"},
    "eagle": {"method": "eagle"},
    "eagle trees": {"method": "eagle", "tree": "auto"},
    "medusa trees": {"method": "medusa", "tree": "auto"},
    "lookup or eagle": {"method": "ngram+eagle"},
}
DRAFTERS = (
    "none", "ngram 1-3", "ngram 2-4", "same", "noisy", "unrelated", "all right", "all wrong", "alternating",
    "short context", "as on a card", "failing", "trees", *BY_NAME,
)  # fmt: skip
BATCHES = (
    "single", "four prompts", "mixed settings", "staggered", "n=3", "tiny cache",
    "twice", "alike", "alike, staggered", "alike, tiny cache",
)  # fmt: skip
ALIKE = tuple((*PROMPTS[40], *tail) for tail in (b"", b"one", b"another", PROMPTS[5]))  # beginnings that are shared
LENGTHS = (1, 2, 3, 5, 8, 16, "auto")


# --- the parts


@functools.cache
def target() -> Any:
    return tiny_target()


@functools.cache
def plain() -> LLM:
    return LLM(target(), tokenizer=byte_tokenizer(), dtype="float32", device="cpu")


@functools.cache
def draft_llm(kind: str) -> LLM:
    """A draft as a loaded `LLM` of its own: loaded once for every engine that drafts with it."""
    short = kind == "short context"  # T's own weights with a context of 32
    model = tiny_target(max_position_embeddings=32) if short else tiny_draft(target(), kind)  # type: ignore[arg-type]
    return LLM(model, tokenizer=byte_tokenizer(), dtype="float32", device="cpu", kv_cache_bytes=2**20)


@functools.cache
def head(kind: str) -> str | None:
    """The folder of a head with random weights; None where the method takes none."""
    root = Path(tempfile.mkdtemp(prefix="outrider-heads-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    if kind == "medusa":
        return str(medusa_folder(root))
    return str(write("eagle3", root / "head", target()).folder) if kind == "eagle" else None


@functools.cache
def scripted(kind: str) -> ScriptedDrafter:
    if kind == "failing":
        return ScriptedDrafter(fault=_fails_in_every_way)
    if kind == "trees":
        return ScriptedDrafter(pattern=(ALL, 2, 0, 1), fault=bushy)
    pattern = {"all right": (ALL,), "all wrong": (0,), "alternating": (ALL, 0, 1, 2)}[kind]
    return ScriptedDrafter(pattern=pattern, mass=0.6 if kind == "alternating" else None)


def _fails_in_every_way(proposal: Any, call: int, rows: Any) -> Any:
    return list(FAULTS.values())[call % len(FAULTS)](proposal, call, rows)


@functools.cache
def engine(drafter: str, verification: str = "coupled", tiny_cache: bool = False) -> LLM:
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu"}
    common |= {"verification": verification, "prefill_chunk_size": 16}
    models = (
        "same",
        "noisy",
        "unrelated",
        "short context",
        "as on a card",
        *(name for name in BY_NAME if "draft" in name),
    )
    if tiny_cache:
        heads = any(name in drafter for name in ("eagle", "medusa"))  # features, and keys and values of their own
        common["kv_cache_bytes"] = 8 * 16 * 512 * (2 if drafter in models or heads else 1)
    if drafter == "none":
        return LLM(target(), **common)
    if drafter.startswith("ngram"):
        low, high = map(int, drafter.split()[1].split("-"))
        return engine_with(NGramDrafter(high, low), target(), **_without(common, "dtype", "device"))
    if drafter in BY_NAME:
        draft = draft_llm("noisy") if drafter in models else head(drafter.split()[-1 if "lookup" in drafter else 0])
        return LLM(target(), draft, num_speculative_tokens=16, **BY_NAME[drafter], **common)
    if drafter == "as on a card":
        return as_on_a_card(LLM(target(), tiny_draft(target(), "noisy"), num_speculative_tokens=16, **common))
    if drafter in models:
        return LLM(target(), draft_llm(drafter), num_speculative_tokens=16, **common)
    return engine_with(scripted(drafter), target(), **_without(common, "dtype", "device"))


def as_on_a_card(llm: LLM) -> LLM:
    """Let a draft feed more in its first pass where few rows share a round, and read by captured passes: run again."""
    drafter: Any = llm.engine.drafter
    blocks = llm.engine.state.tables.shape[1]
    drafter.tune([1, 2, 4, 8], blocks * BLOCK_SIZE)
    drafter.runner._prompts = PromptGraphs(drafter.runner._feed, drafter.runner.device, lambda work: work)
    drafter.runner._prompts.capture(blocks * BLOCK_SIZE, drafter.runner.cache, blocks, (1, 2, 4, 8))
    return llm


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Drafters fail here by the dozen; one warning each is enough to know."""
    logger = logging.getLogger("outrider")
    before, logger.level = logger.level, logging.ERROR
    yield
    logger.setLevel(before)


_base: dict[str, list[tuple[int, ...]]] = {}


def base(prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[int, ...]]:
    """BASE: what the target alone gives to this request alone."""
    params = params.but(speculation="off")
    key = repr((prompt, params))
    if key not in _base:
        made = plain().generate(prompt_token_ids=list(prompt), sampling_params=params)[0]
        _base[key] = [one.token_ids for one in made.outputs]
    return _base[key]


def check_equal_to_base(
    llm: LLM, jobs: Seq[tuple[tuple[int, ...], SamplingParams]], *, staggered: bool = False
) -> list[list[Sequence]]:
    """The check of this file: run the jobs together, and compare each sample with its own single-request BASE."""
    wanted = [base(prompt, params) for prompt, params in jobs]
    drafter = llm.engine.drafter
    if isinstance(drafter, ScriptedDrafter):
        pairs = zip(jobs, wanted, strict=True)
        drafter.texts = [prompt + output for (prompt, _), outputs in pairs for output in outputs]
    llm.engine.speculator._failures.clear()  # one that was switched off in an earlier scenario gets another chance
    try:
        made = generate_staggered(llm, jobs) if staggered else generate_together(llm, jobs)
    except BaseException:
        engine.cache_clear()  # what broke in mid-step is no base for the next scenario
        raise
    for (prompt, params), outputs, group in zip(jobs, wanted, made, strict=True):
        got = [tuple(sequence.output) for sequence in group]
        assert got == outputs, f"{len(prompt)}-token prompt, {params}: {got} is not BASE's {outputs}"
    assert llm.engine.state.num_free == llm.engine.config.max_num_seqs, "a slot was not given back"
    assert llm.engine.scheduler.num_free_blocks == llm.engine.scheduler._pool.capacity, "a block was not given back"
    return made


def params_for(setting: str, length: int | str, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "speculation": length, **SETTINGS[setting], **changes})


def run_scenario(
    drafter: str, batch: str, length: int | str, setting: str, verification: str = "coupled", shift: int = 0
) -> None:
    if drafter == "none":
        length = "auto"
    llm = engine(drafter, verification, "tiny cache" in batch)
    names = list(SETTINGS) if verification == "coupled" else list(GREEDY_SETTINGS)
    prompts = list(PROMPTS.values())
    start = names.index(setting)
    if batch == "single":
        jobs = [(prompts[shift % 4], params_for(setting, length))]
    elif batch in ("four prompts", "staggered"):
        jobs = [(prompt, params_for(setting, length)) for prompt in prompts]
    elif batch == "mixed settings":
        jobs = [(prompts[(i + shift) % 4], params_for(names[(start + i) % len(names)], length)) for i in range(4)]
    elif batch == "n=3":
        jobs = [(prompts[shift % 4], params_for(setting, length, n=3)), (prompts[1], params_for("greedy", length))]
    elif batch in ("twice", "alike", "alike, staggered"):
        jobs = [(prompt, params_for(setting, length)) for prompt in (ALIKE[-1:] if batch == "twice" else ALIKE)]
    else:
        params = params_for(setting, length, ignore_eos=True, max_tokens=26, min_tokens=0)
        jobs = [(prompt, params) for prompt in (prompts if batch == "tiny cache" else ALIKE)]
    hits = llm.engine.figures.prefix_hits
    for _ in range(1 + (batch == "twice")):
        check_equal_to_base(llm, jobs, staggered="staggered" in batch)
    if batch in ("twice", "alike", "alike, staggered"):
        assert llm.engine.figures.prefix_hits > hits


# --- the matrix


def pairwise(axes: Seq[Seq[Any]], seed: int) -> list[tuple[Any, ...]]:
    """A small covering array: every pair of values of every two axes meets in some row."""
    luck = random.Random(seed)
    pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(axes[i], axes[j])
    }
    rows = []
    while pairs:
        i, a, j, b = min(pairs, key=repr)
        best, covered = None, set()
        for _ in range(30):
            row = [luck.choice(axis) for axis in axes]
            row[i], row[j] = a, b
            hits = {(x, row[x], y, row[y]) for x, y in itertools.combinations(range(len(axes)), 2)} & pairs
            if len(hits) > len(covered):
                best, covered = row, hits
        assert best is not None
        rows.append(tuple(best))
        pairs -= covered
    return rows


def scenarios(axes: Seq[Seq[Any]], seed: int) -> list[Any]:
    """Give the rows of a covering array as pytest parameters with readable names."""
    return [pytest.param(place, row, id=", ".join(map(str, row))) for place, row in enumerate(pairwise(axes, seed))]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_meets_every_setting_in_one_mixed_batch(drafter: str) -> None:
    """E01-E09, F12, A11: one row for each setting, draft lengths mixed too; each equals its own single-request BASE."""
    lengths = itertools.cycle(LENGTHS if drafter != "none" else ("auto",))
    prompts = itertools.cycle(PROMPTS.values())
    rows = zip(SETTINGS, prompts, lengths, strict=False)
    jobs = [(prompt, params_for(name, length)) for name, prompt, length in rows]
    check_equal_to_base(engine(drafter), jobs)


HOMOGENEOUS = (
    "greedy",
    "warm",
    "hot nucleus",
    "top_k",
    "repetition",
    "min_tokens and end",
    "all together",
    "json",
    "grammar, drawn",
)


@pytest.mark.parametrize(("place", "row"), scenarios([DRAFTERS[1:], BATCHES, LENGTHS, HOMOGENEOUS], 1))
def test_coupled_verification_gives_the_targets_own_text(place: int, row: tuple[Any, ...]) -> None:
    """A04, D07, D14, R04 and the rest: drafter x batch x draft length x setting, every pair of values."""
    drafter, batch, length, setting = row
    run_scenario(drafter, batch, length, setting, shift=place)


@pytest.mark.parametrize(
    ("place", "row"), scenarios([DRAFTERS[1:], (*BATCHES[1:4], *BATCHES[6:9]), (1, 3, 8), ("rejection", "block")], 2)
)
def test_rejection_and_block_give_the_targets_own_text_where_it_is_greedy(place: int, row: tuple[Any, ...]) -> None:
    """A14: with a greedy target nothing is left to chance, whatever q the drafter states."""
    drafter, batch, length, verification = row
    run_scenario(drafter, batch, length, GREEDY_SETTINGS[place % len(GREEDY_SETTINGS)], verification, shift=place)


@pytest.mark.parametrize("drafter", ["ngram 1-3", "noisy", "draft trees", "early exit", "eagle"])
def test_a_scope_finds_nothing_of_anothers_and_gives_the_targets_own_text(drafter: str) -> None:
    llm, prompt, params = engine(drafter), ALIKE[-1], params_for("greedy", 3)
    found = []
    for scope in ("one key", "another key", "one key"):
        sequence = llm.intake.sequences(llm.intake.request(list(prompt), params, scope=scope))[0]
        llm.engine.add(sequence)
        while llm.engine.busy:
            llm.engine.step()
        assert [tuple(sequence.output)] == base(prompt, params)
        found.append(sequence.stats.cached_tokens)
    assert found == [0, 0, 32]


@pytest.mark.parametrize("drafter", ["noisy", "as on a card", "trees", *BY_NAME])
def test_what_drafters_read_is_timed_for_several_rows_at_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card does at start: where a drafter refused it, rounds would be weighed by costs that nobody knows."""
    llm = engine.__wrapped__(drafter)
    speculator, read = llm.engine.speculator, []
    monkeypatch.setattr(speculator._profiler, "_together", True)
    catch_up = speculator.drafter.catch_up
    monkeypatch.setattr(
        speculator.drafter, "catch_up", lambda rows, counts: (read.append(counts), catch_up(rows, counts))
    )
    call, token = speculator._profiler.feed(speculator.drafter)
    assert call >= 0 and token >= 0
    assert not read or call + token > 0
    assert not read or not speculator.drafter.device_side or max(map(len, read)) > 1
    check_equal_to_base(llm, [(PROMPTS[40], params_for("greedy", 3))])


def test_the_tiny_cache_is_tight_enough_to_send_rows_away() -> None:
    """R04: what the scenarios with a tiny cache rest on."""
    scheduler = engine("all wrong", "coupled", True).engine.scheduler
    before = scheduler.num_preemptions
    run_scenario("all wrong", "tiny cache", 1, "greedy")
    assert scheduler.num_preemptions > before


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_requests_gives_the_targets_own_texts(data: st.DataObject) -> None:
    """Any prompts, settings and draft lengths, in any number, on any drafter, at once or one after another."""
    drafter = data.draw(st.sampled_from(DRAFTERS))
    jobs = []
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=24))
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0, 0.3, 1.0, 2.0])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            top_k=data.draw(st.sampled_from([0, 1, 20])),
            min_p=data.draw(st.sampled_from([0.0, 0.05])),
            presence_penalty=data.draw(st.sampled_from([0.0, -1.0, 1.0])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.7])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.8, 1.3])),
            seed=data.draw(st.integers(-(2**63), 2**64 - 1)),
            n=data.draw(st.sampled_from([1, 1, 2])),
            max_tokens=data.draw(st.integers(1, 24)),
            grammar=data.draw(st.sampled_from([None, None, None, *GRAMMARS])),
            speculation="auto" if drafter == "none" else data.draw(st.sampled_from([0, *LENGTHS, "off"])),
        )
        jobs.append((tuple(prompt), params))
    check_equal_to_base(engine(drafter), jobs, staggered=data.draw(st.booleans()))


# --- BASE itself


def transformers_greedy(prompt: tuple[int, ...], num_tokens: int, **more: Any) -> tuple[int, ...]:
    model = tiny_target()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, **more
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("prompt", list(PROMPTS.values()), ids=len)
def test_the_target_alone_is_what_transformers_generates(prompt: tuple[int, ...]) -> None:
    assert base(prompt, greedy_params(LENGTH)) == [transformers_greedy(prompt, LENGTH)]
    assert base(prompt, greedy_params(LENGTH, repetition_penalty=1.7)) == [
        transformers_greedy(prompt, LENGTH, repetition_penalty=1.7)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_what_transformers_does_plain_and_speculative(family: str) -> None:
    """Sliding windows, soft caps, parallel residuals, learned positions: one tiny random model each."""
    model = tiny_family(family)
    prompt = [5, 9, 17, 9, 17, 33, 40, 41, 42, 43, 44, 9, 17]  # longer than the windows
    wanted = tuple(greedy(model, prompt, 24))
    drafter = ScriptedDrafter([(*prompt, *wanted)], pattern=(2, 0, ALL, 1), vocab_size=96)
    with engine_with(drafter, model, tokenizer=None) as llm:
        for speculation in ("off", 4):
            got = llm.generate(prompt_token_ids=prompt, sampling_params=greedy_params(24, speculation))[0]
            assert got.token_ids == wanted, f"speculation={speculation}"
        assert got.stats.accepted > 0


def test_a_sliding_window_is_crossed_in_the_middle_of_a_draft() -> None:
    """B06, B09: window 16, prompts before, at and beyond the border, D~ of the same kind."""
    model = tiny_sliding()
    draft = tiny_draft(model, "noisy")
    prompts = [list(prompt) for prompt in (PROMPTS[5] * 2, PROMPTS[17][:14], PROMPTS[40])]
    wanted = [tuple(greedy(model, prompt, 30)) for prompt in prompts]
    with LLM(model, draft, 4, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        for speculation in ("off", 4):
            made = llm.generate(prompt_token_ids=prompts, sampling_params=greedy_params(30, speculation))
            assert [one.token_ids for one in made] == wanted


# --- samples and seeds


def test_samples_are_coupled_to_their_seed_and_index_not_to_the_drafter() -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=LENGTH)
    three = base(PROMPTS[5], params)
    assert len(set(three)) == 3, "samples of one request must differ"
    assert base(PROMPTS[5], params.but(n=1)) == three[:1], "the first sample does not depend on n"
    assert base(PROMPTS[5], params.but(seed=12)) != three
    for drafter in ("noisy", "alternating"):
        check_equal_to_base(engine(drafter), [(PROMPTS[5], params.but(speculation=4))])


def check_seed_matters() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    many = [params.but(seed=seed) for seed in (1, 1, 2)]
    texts = [one.token_ids for one in plain().generate(prompt_token_ids=[[65]] * 3, sampling_params=many)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_seed_alone_decides() -> None:
    check_seed_matters()


def test_greedy_wins_over_every_filter() -> None:
    """A11: temperature 0 with top_p 0.5, top_k 3 and min_p 0.2 in every combination."""
    wanted = base(PROMPTS[17], greedy_params(LENGTH))
    jobs = []
    for top_p, top_k, min_p in itertools.product((1.0, 0.5), (0, 3), (0.0, 0.2)):
        params = greedy_params(LENGTH, 5, top_p=top_p, top_k=top_k, min_p=min_p)
        assert base(PROMPTS[17], params) == wanted
        jobs.append((PROMPTS[17], params))
    check_equal_to_base(engine("noisy"), jobs)


def test_a_one_token_prompt_is_an_ordinary_prompt() -> None:
    """A01: twenty different single ids, k=5."""
    params = greedy_params(12, 5)
    check_equal_to_base(engine("noisy"), [((token,), params) for token in range(0, 260, 13)])


def test_a_draft_of_short_context_guesses_as_far_as_it_reaches_and_no_further() -> None:
    """D07, D08: context 32; one text crosses it, one prompt is beyond it from the start, one stays within."""
    llm = engine("short context")
    stops = llm.engine.speculator.num_limited
    jobs = [(PROMPTS[length], greedy_params(LENGTH + 8, 4)) for length in (17, 40, 5)]
    crossing, beyond, within = (group[0] for group in check_equal_to_base(llm, jobs))
    assert crossing.stats.accepted == crossing.stats.drafted == 12, "guesses up to place 32, all of them right"
    assert beyond.stats.drafted == 0
    assert within.stats.tokens_per_round > 4
    assert llm.engine.speculator.num_limited == stops + 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_a_drafter_that_fails_costs_no_token(fault: str, verification: str) -> None:
    prompt, params = PROMPTS[17], greedy_params(LENGTH, 4)
    text = prompt + base(prompt, params)[0]
    drafter = ScriptedDrafter([text], pattern=(ALL, 1), fault=FAULTS[fault])
    check_equal_to_base(engine_with(drafter, target(), verification=verification), [(prompt, params)])


class _Clumsy(ScriptedDrafter):
    """Raises where it is only told something."""

    def __init__(self, where: str, texts: list[tuple[int, ...]]) -> None:
        super().__init__(texts)
        self._where = where

    def missing(self, slot: int, length: int) -> int:
        self._stumble("missing")
        return 1 if self._where == "catch_up" else 0

    def catch_up(self, rows: Any, counts: tuple[int, ...]) -> None:
        self._stumble("catch_up")

    def commit(self, *told: Any) -> None:
        self._stumble("commit")

    def release(self, slot: int) -> None:
        self._stumble("release")

    def _stumble(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError(f"{where} failed")


@pytest.mark.parametrize("where", ["missing", "catch_up", "commit", "release"])
def test_a_drafter_that_raises_where_it_is_told_something_costs_no_token(where: str) -> None:
    prompt, params = PROMPTS[17], greedy_params(LENGTH, 4)
    wanted = base(prompt, params)[0]
    llm = engine_with(_Clumsy(where, [prompt + wanted]), target())
    assert llm.generate(prompt_token_ids=list(prompt), sampling_params=params)[0].token_ids == wanted


def test_a_q_over_another_vocabulary_costs_no_token() -> None:
    def narrow(proposal: Proposal, call: int, rows: Any) -> Proposal:
        return Proposal(proposal.tokens, proposal.lengths, torch.full((*proposal.tokens.shape, 5), 0.2))

    prompt, params = PROMPTS[17], greedy_params(LENGTH, 4)
    wanted = base(prompt, params)[0]
    llm = engine_with(ScriptedDrafter([prompt + wanted], fault=narrow), target(), verification="rejection")
    assert llm.generate(prompt_token_ids=list(prompt), sampling_params=params)[0].token_ids == wanted


def test_negative_lengths_count_as_no_guesses() -> None:
    def below_zero(proposal: Proposal, call: int, rows: Any) -> Proposal:
        return Proposal(proposal.tokens, torch.full_like(proposal.lengths, -1))

    llm = engine_with(ScriptedDrafter(fault=below_zero), target())
    check_equal_to_base(llm, [(PROMPTS[17], greedy_params(LENGTH, 4))])
    assert llm.engine.figures.drafted == 0


# --- engines side by side


def test_closing_one_engine_leaves_another_over_the_same_model_alone() -> None:
    model = tiny_target()
    first, second = (LLM(model, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") for _ in range(2))
    first.close()
    params = greedy_params(8)
    got = second.generate(prompt_token_ids=list(PROMPTS[17]), sampling_params=params)[0].token_ids
    assert [got] == base(PROMPTS[17], params)


def test_a_model_that_drafts_for_itself_gets_its_own_attention_back() -> None:
    model = tiny_target()
    before = model.config._attn_implementation
    with LLM(model, model, 3, tokenizer=byte_tokenizer(), dtype="float32", device="cpu") as llm:
        made = llm.generate(prompt_token_ids=list(PROMPTS[17]), sampling_params=greedy_params(8, 3))[0]
        assert made.stats.acceptance_rate == 1.0
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_exact_mode_gives_the_same_text_with_guesses_and_without(kind: str) -> None:
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "bfloat16", "device": "cpu", "exact": True}
    model = tiny_target().to(torch.bfloat16)
    draft = tiny_draft(target(), kind).to(torch.bfloat16)  # type: ignore[arg-type]
    with LLM(model, draft, 3, max_num_seqs=2, max_model_len=128, **common) as llm:
        for setting in ("greedy", "warm"):
            jobs = [list(PROMPTS[5]), list(PROMPTS[17])]
            off, on = (
                llm.generate(prompt_token_ids=jobs, sampling_params=params_for(setting, how, max_tokens=40))
                for how in ("off", 3)
            )
            assert [one.token_ids for one in on] == [one.token_ids for one in off]
