"""Group O: prompt lookup proposes what stood there before, and nothing where nothing did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, ConfigError
from outrider.draft.drafter import DraftRows
from outrider.draft.ngram import NGramDrafter
from tests.cases_support import GREEDY, base, cycling, engine, guessed, ids, lookup, opened, target, words
from tests.tiny import byte_tokenizer, save, tiny_target


def proposed(text: str, k: int, smallest: int, largest: int) -> str:
    """What lookup makes of one row of text."""
    row = list(text.encode())
    tokens = torch.tensor([row + [0] * k])
    rows: Any = DraftRows(
        (0,),
        torch.zeros(1).long(),
        tokens,
        torch.tensor([len(row)]),
        (len(row),),
        torch.zeros(1, 1),
        None,
        None,
        independent=False,
    )
    proposal = NGramDrafter(largest, smallest).propose(rows, k)
    return bytes(proposal.tokens[0, : int(proposal.lengths[0])].tolist()).decode()


def test_lookup_works_on_a_text_shorter_than_what_it_matches() -> None:
    """Two tokens and room for one guess: fewer places than the longest run that is looked for."""
    assert proposed("a", 1, 1, 8) == ""
    assert proposed("aa", 1, 1, 8) == "a"


def test_O01_no_match_is_no_guess() -> None:
    """An all-distinct prompt, one token, n-grams longer than the prompt, the target fond of id 0: no proposal, EQ."""
    model = tiny_target(seed=9)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[0] *= 3
    llm = opened(model, max_model_len=64, max_num_seqs=4)
    for text in ("abcdefgh", "x", "ab", "aXbYcZ"):
        assert proposed(text, 4, 2, 4) == ""
    prompts = [list(b"abcdefgh"), [7], [3, 4]]
    plain, done = base(prompts, llm, max_tokens=3), guessed(prompts, lookup(40, 64), 4, llm, max_tokens=3)
    assert ids(done) == ids(plain)
    assert [(one.stats.drafted, one.stats.accepted, one.stats.acceptance_rate) for one in done] == [(0, 0, 0.0)] * 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer in .1, 64., got 0"),
        ({"prompt_lookup_max": -1}, "prompt_lookup_max must be an integer in .1, 64., got -1"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, r"prompt_lookup_min \(5\) must be at most"),
    ],
)
def test_O01_sizes_that_make_no_sense_are_refused_at_start(sizes: dict[str, int], message: str) -> None:
    """Zero, negative and crossed n-gram sizes: ConfigError naming field, value and range."""
    with pytest.raises(ConfigError, match=message):
        LLM(model=target(), tokenizer=words(), method="ngram", **sizes)


def test_O03_which_match_is_used() -> None:
    """The longest match wins; among equals the most recent that enough follows; generated text is searched too."""
    assert proposed("ab1 ab2 ab", 3, 2, 4) == "2 a"  # most recent of two bigrams
    assert proposed("xab1 ab2 xab", 3, 2, 4) == "1 a"  # three tokens beat two, however old
    assert proposed("ab1 ab", 3, 2, 4) == "1 a" and proposed("ab1 ab", 3, 3, 4) == ""
    assert proposed("xyxyxy", 4, 2, 4) == "xyxy"[:4] or proposed("xyxyxy", 4, 2, 4) == "xy"
    llm, prompt = cycling("abcdefgh"), [ord("a")]  # nothing repeats in the prompt: only the output can be copied
    done = guessed([prompt], lookup(2, 3), 4, llm, max_tokens=40)[0]
    assert done.stats.accepted > 15 and ids([done]) == ids(base([prompt], llm, max_tokens=40))


def test_O05_the_fifth_request_drafts_like_the_first() -> None:
    """The same request five times: equal draft counters."""
    figures = [guessed([list(b"abcabcabc")], lookup(1, 3), 4)[0].stats for _ in range(5)]
    assert len({(one.rounds, one.drafted, one.accepted) for one in figures}) == 1 and figures[0].drafted > 0


@pytest.mark.parametrize(
    "setting",
    [
        {"method": "ngram"},
        {"speculative_model": "[ngram]"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        {"method": "ngram", "exact": True},
    ],
)
@pytest.mark.parametrize("way", ["generate", "chat", "stream"])
def test_O06_speculation_that_is_set_up_does_draft(setting: dict[str, Any], way: str) -> None:
    """Every spelling and every call: num_drafts > 0 in the request's and in the engine's figures."""
    llm = LLM(model=target(), tokenizer=words(), max_num_seqs=1, max_model_len=96, **setting)
    params = GREEDY.but(max_tokens=12)
    prompt = "abcabcabcabc"
    if way == "generate":
        stats = llm.generate(prompt, params)[0].stats
    elif way == "chat":
        stats = llm.chat([{"role": "user", "content": "assistant\nwell"}], params)[0].stats
    else:
        stats = list(llm.stream(prompt, params))[-1].stats
    assert stats.drafted > 0 and llm.engine.figures.drafted == stats.drafted


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_O07_lookup_on_a_quantised_target_changes_nothing(quantization: str, tmp_path: Path) -> None:
    """8-bit (and 4-bit) weights, NG k=2, five prompts: the quantised target's own text."""
    folder = save(tiny_target(), byte_tokenizer(), tmp_path)
    llm = LLM(
        model=str(folder),
        quantization=quantization,
        method="ngram",
        device="cpu",
        exact=True,
        max_model_len=96,
        num_speculative_tokens=2,
        max_num_seqs=5,
    )
    prompts = [list(text) for text in (b"abab", b"xyz xyz", b"q", b"hello hello", b"12 12 12")]
    plain = llm.generate(prompts, GREEDY.but(speculation="off"))
    done = llm.generate(prompts, GREEDY.but(speculation=2))
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.drafted for one in done) > 0


def test_P07_no_text_of_an_earlier_request_is_proposed() -> None:
    """The same prompt twice, then another: lookup reads each row's own text alone, so the figures do not change."""
    prompt, other = list(b"abcabcabc"), list(b"wxyz1234")
    fresh = guessed([other], lookup(2, 3), 4, opened(target(), max_num_seqs=1, max_model_len=96))[0].stats
    for _ in range(2):
        guessed([prompt], lookup(2, 3), 4)
    later = guessed([other], lookup(2, 3), 4, engine())[0].stats
    assert (later.rounds, later.drafted, later.accepted) == (fresh.rounds, fresh.drafted, fresh.accepted)
