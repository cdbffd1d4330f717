"""Suffix lookup: counts are true, guesses come from the right texts, bounds hold, and no token ever changes."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.draft.drafter import DraftRows
from outrider.draft.shared_texts import SharedTexts, load_corpus
from outrider.draft.suffix import SuffixDrafter
from outrider.draft.suffix_index import MOST_COUNTED, SuffixIndex
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.proposal import ROOT, Proposal
from outrider.sampling.params import SamplingParams
from tests.scripted import engine_with, generate_staggered, generate_together, greedy_params
from tests.tiny import tiny_target

PROMPTS = [[65], list(b"Hello"), list(range(60, 77)), [97, 98, 99] * 12]
REPEATING: dict[str, Any] = {"temperature": 0, "frequency_penalty": -2.0}  # the target comes to say the same again
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    REPEATING,
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {70: 4.0}},
]


def rows_of(*texts: list[int] | bytes, slots: tuple[int, ...] | None = None, room: int = 0) -> DraftRows:
    """Rows as an engine shows them, with `room` places behind the longest."""
    width = max(len(text) for text in texts) + room
    slots = tuple(range(len(texts))) if slots is None else slots
    lengths = tuple(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    rules: Any = None
    return DraftRows(
        slots=slots,
        index=torch.tensor(slots),
        tokens=tokens,
        lengths=torch.tensor(lengths),
        host_lengths=lengths,
        tables=torch.zeros(len(texts), 1, dtype=torch.long),
        start=None,
        rules=rules,
        independent=False,
    )


def chains(proposal: Proposal) -> list[list[int]]:
    return [row[:length] for row, length in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)]


def guessed(drafter: SuffixDrafter, text: list[int] | bytes, num_tokens: int = 8, slot: int = 0) -> list[int]:
    return chains(drafter.propose(rows_of(text, slots=(slot,)), num_tokens))[0]


def some_text(kind: str, size: int) -> list[int]:
    noise = random.Random(7)
    if kind == "equal":
        return [5] * size
    if kind == "period":
        return [place % 37 for place in range(size)]
    if kind == "fibonacci":  # as repetitive as a text without a period can be
        one, other = [0], [0, 1]
        while len(other) < size:
            one, other = other, other + one
        return other[:size]
    num_ids = {"binary": 2, "few": 20, "random": 2**62}[kind]
    return [noise.randrange(num_ids) for _ in range(size)]


KINDS = ["equal", "period", "fibonacci", "binary", "few", "random"]


# --- the index


def longest_suffix(text: list[int], within: list[int], *, before_end: bool) -> int:
    """How much of the end of a text stands in another (or earlier in itself), by trying."""
    for size in range(len(text), 0, -1):
        last = len(within) - size - (1 if before_end else 0)
        if any(within[place : place + size] == text[-size:] for place in range(last + 1)):
            return size
    return 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_match_is_the_longest_there_is(kind: str) -> None:
    text, index = some_text(kind, 70), SuffixIndex()
    for end in range(1, len(text) + 1):
        index.extend(text[end - 1 : end])
        assert index.match_of_end()[1] == longest_suffix(text[:end], text[:end], before_end=True)


def test_a_match_in_other_texts_is_the_longest_that_spans_no_two() -> None:
    noise = random.Random(1)
    texts = [[noise.randrange(3) for _ in range(noise.randrange(1, 25))] for _ in range(6)]
    texts += [*texts[:2], texts[0] + [1]]  # some come again, and one goes on further
    index = SuffixIndex()
    for text in texts:
        index.add(text)
    read = [noise.randrange(4) for _ in range(200)]
    state = matched = 0
    for end in range(1, len(read) + 1):
        state, matched = index.match(read[end - 1 : end], state, matched)
        assert matched == max(longest_suffix(read[:end], text, before_end=False) for text in texts)


@pytest.mark.parametrize("kind", ["few", "binary", "random"])
def test_the_preferred_guess_is_the_most_frequent_one(kind: str) -> None:
    """Among all that followed the match, wherever it stood; the latest of equals."""
    text, index = some_text(kind, 300), SuffixIndex()
    checked = 0
    for end, token in enumerate(text, 1):
        index.extend([token])
        for state, matched in list(index.shorter(*index.match_of_end(), 1))[:MOST_COUNTED]:
            places = [
                place for place in range(end - matched) if text[place : place + matched] == text[end - matched : end]
            ]
            followed = Counter(text[place + matched] for place in places)
            (guess,), expected = index.chain(state, matched, 1, 0.0)
            assert followed[guess] == max(followed.values())
            assert expected == pytest.approx(followed[guess] / (len(places) + 1 / matched))
            equals = [one for one in places if followed[text[one + matched]] == followed[guess]]
            assert text[equals[-1] + matched] == guess
            checked += 1
    assert checked > 300 or kind == "random"


@pytest.mark.parametrize("kind", KINDS)
def test_time_and_size_are_linear_whatever_the_text(kind: str) -> None:
    text = some_text(kind, 20_000)
    began = time.perf_counter()
    index = SuffixIndex()
    index.extend(text)
    _, matched = index.match(text)
    for _ in range(200):
        index.chain(*index.match_of_end(), 16, 0.0)
    assert time.perf_counter() - began < 2.0  # a tenth of it on a quiet core
    assert index.num_states <= 2 * len(text)
    assert matched == len(text)


def test_a_loop_is_followed_round_and_round() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 2, 3, 1])
    assert index.chain(*index.match_of_end(), 8, 0.0)[0] == [2, 3, 1, 2, 3, 1, 2, 3]


def test_a_tree_holds_the_likeliest_paths_first() -> None:
    index = SuffixIndex()
    index.extend([9, 1, 2, 9, 1, 2, 9, 1, 3, 9, 4, 5, 9])
    tokens, parents, expected = index.tree(*index.match_of_end(), 6, 0.0, deepest=2, branches=2)
    assert tokens[0] == 1 and parents[0] == ROOT  # came three times of four
    paths = {
        (token if parent == ROOT else (tokens[parent], token)) for token, parent in zip(tokens, parents, strict=True)
    }
    assert paths == {1, 4, (1, 2), (1, 3), (4, 5)}
    assert 0 < expected < 5
    assert all(parent < place for place, parent in enumerate(parents))
    assert index.tree(*index.match_of_end(), 2, 0.0, deepest=2, branches=2)[0] == [1, 2]
    assert index.tree(*index.match_of_end(), 6, 0.99, deepest=2, branches=2) == ([], [], 0.0)


# --- guesses


def test_length_follows_from_the_match() -> None:
    text = bytes(range(97, 117))
    for matched in (1, 2, 3):
        row = text + b"_" + text[:matched]
        assert guessed(SuffixDrafter(per_match=2), row, 16) == list(text[matched : 3 * matched])
    assert guessed(SuffixDrafter(min_match=3), text + b"_" + text[:2]) == []
    assert len(guessed(SuffixDrafter(per_match=50, min_chance=0.5), text + b"_" + text[:4], 16)) == 4  # 4 / (4 + 4)
    assert guessed(SuffixDrafter(), b"abcdefgh") == [] == guessed(SuffixDrafter(), b"a")


def test_rows_are_read_as_they_grow_and_may_be_anything() -> None:
    """Growth by one and by many, slots that change hands with and without notice, rows that shrink, huge ids."""
    drafter, noise = SuffixDrafter(), random.Random(3)
    texts = [some_text("few", 400), some_text("period", 400), some_text("random", 200) * 2]
    lengths = [1, 30, 250]
    for turn in range(150):
        if turn % 40 == 17:
            drafter.release(1)
            lengths[1] = 5
        if turn % 40 == 31:
            lengths[0], texts[0] = 20, texts[0][::-1]
        rows = rows_of(*(text[:length] for text, length in zip(texts, lengths, strict=True)), room=turn % 3)
        fresh = SuffixDrafter()
        assert chains(drafter.propose(rows, 6)) == chains(fresh.propose(rows, 6))
        lengths = [min(length + noise.choice([1, 1, 4, 9]), 400) for length in lengths]


def test_a_steady_round_reads_the_new_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, text, read = SuffixDrafter(), some_text("few", 3000), []
    drafter.propose(rows_of(text[:2900]), 4)
    take = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: read.append(one.numel()) or take(one))
    for end in range(2905, 3000, 5):
        drafter.propose(rows_of(text[:end]), 4)
    assert max(read) < 20


def test_long_prompts_are_taken_in_by_portions() -> None:
    drafter, text = SuffixDrafter(), some_text("period", 1000)
    assert drafter.missing(0, 1000) == 1000
    drafter.catch_up(rows_of(text), (600,))
    assert drafter.missing(0, 1000) == 400
    drafter.catch_up(rows_of(text), (400,))
    assert drafter.missing(0, 1000) == 0 == drafter.missing(0, 1020)
    assert guessed(drafter, text) == [(1000 + place) % 37 for place in range(8)]
    assert drafter.missing(0, 500) == 500  # shorter than what is known: another text


def test_of_a_very_long_text_the_end_is_searched() -> None:
    drafter, noise = SuffixDrafter(own_tokens=400), random.Random(5)
    old, text = list(range(1000, 1020)), [noise.randrange(500) for _ in range(3000)]
    text[:20] = old
    for end in (100, 1000, *range(1010, 3000, 10)):
        drafter.propose(rows_of(text[:end]), 4)
        assert drafter._rows[0].index.num_tokens <= 400
        assert end < 400 or drafter._rows[0].index.num_tokens >= 200
    assert guessed(drafter, text + old[:8]) == []
    recent = text[-90:-70]
    assert guessed(SuffixDrafter(own_tokens=400), text + recent[:8]) == recent[8:16]


# --- other texts


def test_outputs_are_seen_within_their_scope_alone() -> None:
    scopes: dict[int, str | None] = {0: "red", 1: "blue", 2: "red", 3: None, 4: None}
    drafter = SuffixDrafter(sharing=True, scope_of=scopes.get, min_match=3)
    prompt, output = list(b"secret prompt: "), list(b"the quick brown fox jumps")
    for slot in (0, 3):
        drafter.propose(rows_of(prompt, slots=(slot,)), 8)
        drafter.propose(rows_of(prompt + output, slots=(slot,)), 8)
        drafter.release(slot)
    asked = list(b"@@@ the quick")
    assert bytes(guessed(drafter, asked, slot=2)) == b" brown f"
    assert guessed(drafter, asked, slot=1) == [] == guessed(drafter, asked, slot=3) == guessed(drafter, asked, slot=4)
    assert guessed(drafter, list(b"@@@ secret"), slot=2) == []  # prompts stay where they are


def test_nothing_is_shared_unless_asked() -> None:
    drafter = SuffixDrafter(scope_of=lambda _: "red")
    drafter.propose(rows_of([1]), 8)
    drafter.propose(rows_of([1, *range(50, 90)]), 8)
    drafter.release(0)
    assert drafter.shared is None and guessed(drafter, [1, 50, 51, 52]) == []
    with pytest.raises(ConfigError, match="scope_of"):
        SuffixDrafter(sharing=True)


def test_what_was_accepted_last_is_kept_too() -> None:
    """A slot's last round is never shown: what is known of it are the accepted guesses."""
    drafter = SuffixDrafter(sharing=True, scope_of=lambda _: "red")
    text = list(range(30, 50))
    drafter.propose(rows_of([1, *text]), 4)
    row = [1, *text, 99, *text[:10]]
    assert guessed(drafter, row, 4) == text[10:14]
    drafter.commit((0,), (len(row),), (3,))
    drafter.release(0)
    assert guessed(drafter, [2, *text[5:10]], 8) == text[10:13]


def test_a_match_follows_an_index_that_grows_meanwhile() -> None:
    """Texts are added while others write; every row sees them from its next round on, and never a wrong place."""
    noise = random.Random(2)
    drafter = SuffixDrafter(sharing=True, scope_of=lambda _: "red", shared_tokens=2000)
    phrases = [[noise.randrange(40) for _ in range(12)] for _ in range(10)]
    text: list[int] = [41]
    for _ in range(120):
        text += noise.choice(phrases)[: noise.randrange(1, 12)]
        made = chains(drafter.propose(rows_of(text), 5))
        drafter.remember("red", noise.choice(phrases) + noise.choice(phrases))
        fresh = SuffixDrafter(sharing=True, scope_of=lambda _: "red")
        fresh.shared = drafter.shared
        assert chains(drafter.propose(rows_of(text), 5)) == chains(fresh.propose(rows_of(text), 5))
        assert made


def test_shared_texts_are_bounded_and_the_oldest_go() -> None:
    shared, noise = SharedTexts(1000), random.Random(4)
    texts = [[noise.randrange(10**6) for _ in range(noise.choice([5, 30, 90, 700]))] for _ in range(300)]
    for number, text in enumerate(texts):
        shared.add(f"key {number % 3}", text)
        assert shared.num_tokens <= 1000
        kept = [index for key in range(3) for index in shared.of(f"key {key}")]
        assert (
            sum(index.num_tokens for index in kept)
            == shared.num_tokens
            == sum(one.num_tokens for one in shared._scopes)
        )
        if len(text) > 8:
            assert max(index.match(text)[1] for index in shared.of(f"key {number % 3}")) == min(len(text), 250)
    assert shared.num_tokens > 500
    assert all(index.match(texts[0])[1] <= 1 for index in kept)


def test_a_scope_that_rests_is_forgotten_before_one_that_is_used() -> None:
    shared = SharedTexts(400)
    shared.add("idle", list(range(50)))
    shared.add("busy", list(range(100, 150)))
    for begin in range(1000, 1350, 10):
        shared.add("busy", list(range(begin, begin + 10)))
    assert shared.of("idle") == () and shared.of(None) == () and shared.of("nobody") == ()
    assert "idle" not in shared._indexes


def test_memory_is_bounded_by_tokens() -> None:
    """Adversarial outputs for ever: what is kept stays within some 400 bytes a token."""
    drafter, noise = SuffixDrafter(sharing=True, scope_of=lambda _: "red", shared_tokens=8000), random.Random(6)
    tracemalloc.start()
    try:
        for _ in range(120):
            drafter.remember("red", [noise.randrange(noise.choice([2, 50, 10**9])) for _ in range(200)])
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert drafter.shared is not None and 6000 <= drafter.shared.num_tokens <= 8000
    assert size < 400 * 8000


def test_everybody_may_copy_from_the_corpus(tmp_path: Path) -> None:
    text = "It was the best of times, it was the worst of times.\n"
    (tmp_path / "book.txt").write_text(text)
    records = [{"role": "user", "content": text[:25]}, text[25:], None, {"n": [1, text]}]
    (tmp_path / "book.jsonl").write_text("\n".join(json.dumps(one) for one in records) + "\n\n")
    for name in ("book.txt", "book.jsonl"):
        drafter = SuffixDrafter(corpus=str(tmp_path / name), tokenize=lambda text: list(text.encode()))
        assert bytes(guessed(drafter, b"### it was the w")) == b"orst of "


def test_the_corpus_is_cut_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("abc " * 50_000)
    with pytest.warns(UserWarning, match="first 1000 tokens"):
        index = load_corpus(tmp_path / "long.txt", lambda text: list(text.encode()), 1000)
    assert index.num_tokens == 1000


def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": "b"}\n{"a": \n')
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    for name, words in (("bad.jsonl", "line 2 is not JSON"), ("bad.txt", "UTF-8"), ("none.txt", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            SuffixDrafter(corpus=tmp_path / name, tokenize=lambda text: list(text.encode()))
    with pytest.raises(ConfigError, match="tokenize"):
        SuffixDrafter(corpus=tmp_path / "bad.txt")


@pytest.mark.parametrize(
    "wrong", [{"per_match": 0}, {"min_chance": 1.5}, {"min_match": 0}, {"branches": 0}, {"shared_tokens": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SuffixDrafter(**wrong)


def test_the_better_source_is_taken() -> None:
    """Own text against the scope's: whichever matches longer and says one thing."""
    drafter = SuffixDrafter(sharing=True, scope_of=lambda _: "red")
    drafter.remember("red", list(b"alpha beta gamma delta epsilon"))
    assert bytes(guessed(drafter, b"gamma ray; beta gamma")) == b" delta e"
    drafter.release(0)
    assert bytes(guessed(drafter, b"so beta gamma rays, so beta gamma")) == b" rays, s"


# --- in an engine


def all_jobs(max_tokens: int = 60) -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=11 + place, speculation=6, **one))
        for place, one in enumerate(SETTINGS)
        for prompt in PROMPTS
    ]


def plainly(jobs: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, params.but(speculation="off")) for prompt, params in jobs]


def outputs(made: list[list[Any]]) -> list[list[int]]:
    return [sequence.output for group in made for sequence in group]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with engine_with(None, tiny_target(), max_num_seqs=6) as llm:
        return outputs(generate_together(llm, plainly(all_jobs())))


@pytest.mark.parametrize("run", [generate_together, generate_staggered], ids=["together", "staggered"])
@pytest.mark.parametrize("branches", [1, 3])
def test_no_token_changes(branches: int, run: Any, wanted: list[list[int]]) -> None:
    drafter = SuffixDrafter(branches=branches, sharing=True, scope_of=lambda slot: "red" if slot % 2 else "blue")
    with engine_with(drafter, tiny_target(), max_num_seqs=6) as llm:
        assert outputs(run(llm, all_jobs())) == wanted
        assert llm.engine.speculator.num_failures == 0
        assert llm.engine.figures.accepted > 100
        assert set(drafter._rows) <= {llm.engine.state.idle}


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("branches", [1, 2])
def test_no_greedy_token_changes_under_other_verifiers(verification: str, branches: int) -> None:
    with engine_with(SuffixDrafter(branches=branches), tiny_target(), verification=verification, max_num_seqs=4) as llm:
        params = SamplingParams(max_tokens=60, ignore_eos=True, speculation=6, **REPEATING)
        plain = llm.generate(PROMPTS, params.but(speculation="off"))
        done = llm.generate(PROMPTS, params)
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
        assert llm.engine.figures.accepted > 50


def test_no_token_changes_where_rows_are_sent_away(wanted: list[list[int]]) -> None:
    jobs = all_jobs()[:8]
    drafter = SuffixDrafter(sharing=True, scope_of=lambda _: "red")
    with engine_with(drafter, tiny_target(), max_num_seqs=4, kv_cache_bytes=11 * 16 * 512, max_model_len=128) as llm:
        assert outputs(generate_together(llm, jobs)) == wanted[:8]
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.speculator.num_failures == 0


def rounds_of(llm: LLM, prompt: list[int], params: SamplingParams) -> int:
    return llm.generate(prompt_token_ids=[prompt], sampling_params=params)[0].stats.rounds


def test_a_text_that_repeats_takes_few_rounds() -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, speculation=8, **REPEATING)
    with engine_with(SuffixDrafter(), tiny_target(), max_num_seqs=1) as llm:
        assert rounds_of(llm, [65], params) < 80
    with engine_with(SuffixDrafter(branches=2), tiny_target(), max_num_seqs=1) as llm:
        assert rounds_of(llm, [65], params.but(speculation=16)) < 60


def test_what_was_written_before_takes_few_rounds_for_its_owner() -> None:
    """The same request again: 9 tokens a round once it is under way; for another scope as many rounds as ever."""
    holder = ["red"]
    with engine_with(
        SuffixDrafter(sharing=True, scope_of=lambda _: holder[0], min_match=2), tiny_target(), max_num_seqs=2
    ) as llm:
        params = greedy_params(120, speculation=8)
        first = rounds_of(llm, [65, 66], params)
        assert rounds_of(llm, [65, 66], params) < 25 < 60 < first
        holder[0] = "blue"
        assert rounds_of(llm, [65, 66], params) == first


def test_a_corpus_takes_few_rounds_from_the_first_request_on(tmp_path: Path) -> None:
    with engine_with(None, tiny_target(), max_num_seqs=2) as llm:
        text = llm.generate(prompt_token_ids=[[65, 66]], sampling_params=greedy_params(120))[0].token_ids
    (tmp_path / "corpus.txt").write_text(" ".join(map(str, text)))
    drafter = SuffixDrafter(corpus=tmp_path / "corpus.txt", tokenize=lambda text: [int(one) for one in text.split()])
    with engine_with(drafter, tiny_target(), max_num_seqs=2) as llm:
        assert rounds_of(llm, [65, 66], greedy_params(120, speculation=8)) < 25


@pytest.mark.parametrize("kind", ["equal", "random"])
def test_adversarial_prompts_change_nothing(kind: str) -> None:
    prompts = [[token % 256 for token in some_text(kind, size)] for size in (3, 65, 300)]
    with engine_with(SuffixDrafter(), tiny_target(), max_num_seqs=4) as llm:
        params = greedy_params(30, speculation=12)
        plain = llm.generate(prompt_token_ids=prompts, sampling_params=params.but(speculation="off"))
        done = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
