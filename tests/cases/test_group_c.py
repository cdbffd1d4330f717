"""Group C: a text ends at its first end, wherever in an accepted run that falls."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM
from tests.cases_support import (
    GREEDY,
    PROMPTS,
    Scripted,
    base,
    cycling,
    draft,
    engine,
    guessed,
    ids,
    lookup,
    opened,
    script,
    truth,
)
from tests.tiny import EOS_ID, tiny_target

ALPHABET = "abcdefghijklmnopqrstuvwxyz"  # cycling(ALPHABET) writes it for ever
UNIQUE = list(b"distinct")


def first_places(text: list[int], last: int) -> list[int]:
    """Places up to `last` whose token did not come before: an end declared there is met there first."""
    return [at for at in range(last + 1) if text[at] not in text[:at]]


def alphabet_script(prompt: bytes, num_tokens: int = 130) -> Scripted:
    start = ALPHABET.index(chr(prompt[-1])) + 1
    return Scripted([[*prompt, *(ord(ALPHABET[(start + at) % 26]) for at in range(num_tokens))]])


@pytest.mark.parametrize("place", range(8))
def test_C01_eos_inside_an_accepted_run_ends_the_text_there(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS at every offset of a round of six right guesses: nothing after it in ids, text, stream, logprobs, usage."""
    llm, prompt = cycling(ALPHABET), b"a"
    end = ord(ALPHABET[1 + place])
    monkeypatch.setattr(llm.intake, "_eos_token_ids", (end,))
    params = GREEDY.but(ignore_eos=False, logprobs=0)
    drafter = alphabet_script(prompt)
    done = guessed([list(prompt)], drafter, 6, llm, params=[params])[0]
    assert done.token_ids == tuple(ALPHABET[1 : 2 + place].encode())
    assert done.text == ALPHABET[1 : 2 + place]  # this EOS is a letter, not a special token that would be skipped
    assert (done.finish_reason, done.stop_reason) == ("stop", None)
    assert len(done.logprobs) == len(done.origins) == done.stats.tokens == place + 1
    chunks = list(llm.stream(list(prompt), params.but(speculative_model=drafter, num_speculative_tokens=6)))
    assert sum((list(chunk.token_ids) for chunk in chunks), []) == list(done.token_ids)
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert sum(len(chunk.logprobs) for chunk in chunks) == place + 1


def test_C02_ignore_eos_goes_on_to_exactly_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an EOS accepted in mid-run: false stops at it, true gives BASE's text of exactly max_tokens."""
    end = truth(PROMPTS[0], 6)[5]
    monkeypatch.setattr(engine().intake, "_eos_token_ids", (end,))
    stop = truth(PROMPTS[0], 40).index(end)
    params = [GREEDY.but(ignore_eos=True), GREEDY.but(ignore_eos=False)]
    for drafter in (script(PROMPTS[:1]), draft("noisy")):
        through, ended = guessed([PROMPTS[0]] * 2, drafter, 6, params=params)
        assert list(through.token_ids) == truth(PROMPTS[0], 40) and through.finish_reason == "length"
        assert list(ended.token_ids) == truth(PROMPTS[0], stop + 1) and ended.finish_reason == "stop"


@pytest.mark.parametrize("begin", [0, 1, 11, 12, 13])
def test_C03_a_stop_string_early_in_a_long_run_is_found(begin: int) -> None:
    """Two characters of the first tokens of a round of twelve right guesses: the text is cut before them."""
    llm, prompt = cycling(ALPHABET), b"a"
    stop = ALPHABET[1 + begin : 3 + begin]
    done = guessed([list(prompt)], alphabet_script(prompt), 12, llm, stop=stop)[0]
    assert done.text == ALPHABET[1 : 1 + begin]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert done.token_ids == tuple(ALPHABET[1 : 3 + begin].encode()), "ids end with the token that completed it"


def test_C05_lookup_heeds_the_stop_list() -> None:
    """NG(2,5,32) over a prompt that holds the whole answer and its end marker: cut at the marker, as BASE is."""
    llm, prompt = cycling("the_ansWEr; #xyz"), list(b"the_ansWEr; #xyzthe")
    for stop in ("; ", "#", "Er;"):
        plain = base([prompt], llm, stop=stop, max_tokens=60)[0]
        copied = guessed([prompt], lookup(2, 5), 32, llm, stop=stop, max_tokens=60)[0]
        assert (copied.text, copied.token_ids, copied.stop_reason) == (plain.text, plain.token_ids, stop)
        assert copied.stats.accepted > 0 and copied.text == "_ansWEr; #"[: "_ansWEr; #".index(stop)]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_C07_an_eos_that_only_the_draft_wants_ends_nothing(offset: int) -> None:
    """The proposer plants EOS in each round, which the target never says: EQ, no end."""
    wrong = script(PROMPTS[:2], lambda chain: offset, wrong=lambda token: EOS_ID)
    done = guessed(PROMPTS[:2], wrong, 4, ignore_eos=False)
    assert ids(done) == [truth(prompt, 40) for prompt in PROMPTS[:2]]
    assert ({one.finish_reason for one in done} == {"length"} and done[0].stats.accepted == 0) or offset


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 16])
def test_C08_where_it_stops_depends_neither_on_k_nor_on_the_offset(k: int) -> None:
    """A stop id at each of the first sixteen places, all in one batch."""
    prompt = PROMPTS[0]
    text = truth(prompt, 40)
    places = first_places(text, k)
    params = [GREEDY.but(stop_token_ids=[text[at]]) for at in places]
    done = guessed([prompt] * len(places), script([prompt]), k, params=params)
    assert ids(done) == [text[: at + 1] for at in places]
    assert [one.stop_reason for one in done] == [text[at] for at in places]


def test_C09_of_several_ends_in_one_run_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop id before EOS names itself; EOS before the stop id names nothing; a stop string before both wins."""
    llm, prompt = cycling(ALPHABET), b"a"
    monkeypatch.setattr(llm.intake, "_eos_token_ids", (ord("f"),))
    asked: list[dict[str, Any]] = [
        {"stop_token_ids": [ord("d")]},
        {"stop_token_ids": [ord("h")]},
        {"stop_token_ids": [ord("h")], "stop": ["cd"]},
        {"stop_token_ids": [ord("d")], "stop": ["cd"]},
    ]
    params = [GREEDY.but(ignore_eos=False, **one) for one in asked]
    done = guessed([list(prompt)] * 4, alphabet_script(prompt), 10, llm, params=params)
    plain = base([list(prompt)] * 4, llm, params=params)
    assert [(one.text, one.stop_reason) for one in done] == [
        ("bcd", ord("d")),
        ("bcdef", None),
        ("b", "cd"),
        ("b", "cd"),
    ]
    assert [(one.text, one.token_ids, one.stop_reason) for one in done] == [
        (one.text, one.token_ids, one.stop_reason) for one in plain
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("include", [False, True])
def test_C11_a_stop_string_across_rounds_never_leaks(k: int, include: bool) -> None:
    """stop='jkl' falls on every border: the stream holds it back until it is settled, and gives it once or never."""
    llm = cycling(ALPHABET)
    for start in "abcdefgh"[: k + 2]:
        prompt = start.encode()
        params = GREEDY.but(
            stop=["jkl", "jxx"],
            include_stop_str_in_output=include,
            speculative_model=alphabet_script(prompt),
            num_speculative_tokens=k,
        )
        chunks = list(llm.stream(list(prompt), params))
        wanted = ALPHABET[ALPHABET.index(start) + 1 : 12 if include else 9]
        seen = ""
        for chunk in chunks:
            seen += chunk.text
            assert wanted.startswith(seen)
        assert seen == wanted and chunks[-1].stop_reason == "jkl"


def test_C12_no_eos_anywhere_is_no_error() -> None:
    """T with eos None in every config, no tokenizer: NG(1,2,3) and D~ give BASE's fifteen tokens."""
    model = tiny_target()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    llm = opened(model, tokenizer=None, max_model_len=64, max_num_seqs=3)
    assert llm.loaded.eos_token_ids == ()
    params = GREEDY.but(ignore_eos=False, max_tokens=15)
    prompts = [list(b"abab"), PROMPTS[0]]
    plain = base(prompts, llm, params=[params] * 2)
    other = LLM(model=tiny_target(), max_num_seqs=1)
    for drafter in (lookup(1, 2), other):
        done = guessed(prompts, drafter, 3, llm, params=[params] * 2)
        assert ids(done) == ids(plain) and all(len(one.token_ids) == 15 for one in done)
