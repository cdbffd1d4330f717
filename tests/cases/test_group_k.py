"""Group K: the stream is the text, in whole characters, and its figures add up."""

from __future__ import annotations

import pytest

from tests.cases_support import GREEDY, PROMPTS, Scripted, base, cycling, draft, engine, guessed, lookup, script, words

CHARACTERS = "aé€😀b"  # one, two, three and four bytes, all of them different


def pieces(llm, prompt, params):
    chunks = list(llm.stream(prompt, params))
    return chunks, "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_K01_characters_split_over_tokens_and_rounds_stay_whole(k: int) -> None:
    """Accepted runs cut inside 2-, 3- and 4-byte characters: deltas add up to the decode, no replacement mark."""
    llm = cycling(CHARACTERS)
    cycle = list(CHARACTERS.encode())
    for start in ("a", "é", "b"):
        prompt = list(start.encode())
        after = (cycle.index(prompt[-1]) + 1) % len(cycle)
        ahead = [cycle[(after + at) % len(cycle)] for at in range(60)]
        whole = bytes(ahead).decode(errors="ignore")
        for budget in (22, 29):  # 22 and 29 tokens end inside a character for some of the starts
            params = GREEDY.but(
                max_tokens=budget, speculative_model=Scripted([[*prompt, *ahead]]), num_speculative_tokens=k
            )
            chunks, text, tokens = pieces(llm, prompt, params)
            assert tokens == ahead[:budget]
            assert text == words().decode(tokens) == llm.generate([prompt], params)[0].text
            assert all("\ufffd" not in chunk.text for chunk in chunks[:-1])
            assert whole.startswith(text.rstrip("\ufffd"))


def test_K01_a_broken_byte_does_not_swallow_the_character_after_it() -> None:
    """A byte that is no character, then a four-byte one: the text is the full decode, streamed or not."""
    cycle = b"\xff\xf0\x9f\x98\x80a"
    llm = cycling(cycle)
    for k in (1, 2, 5):
        params = GREEDY.but(max_tokens=12, speculative_model=lookup(1, 3), num_speculative_tokens=k)
        _, text, tokens = pieces(llm, [ord("a")], params)
        assert bytes(tokens) == cycle * 2
        assert text == words().decode(tokens)


def test_K02_every_token_of_a_round_is_streamed() -> None:
    """All accepted at k=5: the stream has the text, ids, origins, and finish_reason of the non-streamed answer."""
    for prompt in PROMPTS[:3]:
        params = GREEDY.but(speculative_model=script([prompt]), num_speculative_tokens=5, max_tokens=33)
        whole = engine().generate([prompt], params)[0].outputs[0]
        chunks, text, tokens = pieces(engine(), prompt, params)
        assert (text, tuple(tokens), chunks[-1].finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
        assert sum((chunk.origins for chunk in chunks), ()) == whole.origins
        assert max(len(chunk.token_ids) for chunk in chunks) == 6
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_K04_usage_counts_tokens_not_chunks() -> None:
    """At k=6 the counts of the chunks add up to the final figures, which are BASE's."""
    params = GREEDY.but(speculative_model=script(PROMPTS[:1]), num_speculative_tokens=6)
    chunks, _, tokens = pieces(engine(), PROMPTS[0], params)
    assert chunks[-1].stats.tokens == len(tokens) == base(PROMPTS[:1])[0].stats.tokens == 40
    assert len(chunks) < 10 and all(chunk.stats is None for chunk in chunks[:-1])


@pytest.mark.parametrize("speculative", [False, True])
def test_K09_finish_reasons_are_told_apart(speculative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, EOS and stop string, streamed or not, speculation on or off: 'length', 'stop', 'stop'."""
    llm, prompt = cycling("abcdefghijklmnopqrstuvwxyz"), list(b"xyzabc")
    monkeypatch.setattr(llm.intake, "_eos_token_ids", (ord("m"),))
    how = {"speculative_model": lookup(1, 3), "num_speculative_tokens": 4} if speculative else {"speculation": "off"}
    free = GREEDY.but(ignore_eos=False, **how)
    asked = [(free.but(max_tokens=5), "length", 5), (free, "stop", 10), (free.but(stop="gh"), "stop", 5)]
    for params, reason, tokens in asked:
        whole = llm.generate([prompt], params)[0].outputs[0]
        chunks, text, streamed = pieces(llm, prompt, params)
        assert (
            (whole.finish_reason, whole.stats.tokens) == (reason, tokens) == (chunks[-1].finish_reason, len(streamed))
        )
        assert text == whole.text


def test_J07_lookup_copies_no_token_twice_into_json() -> None:
    """An unconstrained JSON-like prompt with repeated keys and quotes, NG(1,3,5) and D~ at T=0: EQ byte for byte."""
    prompt = list(b'[{"name": "Ann", "city": "Bonn"}, {"name": "Ben", "city": "Bonn"}, {"name": "')
    plain = base([prompt])[0]
    for drafter in (lookup(1, 3), draft("noisy")):
        done = guessed([prompt], drafter, 5)[0]
        assert (done.token_ids, done.text) == (plain.token_ids, plain.text)
