"""The caller's prediction: few rounds where it is right, found again where it is not, and never a changed token."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from outrider.draft.drafter import DraftRows
from outrider.draft.prediction import PredictionDrafter
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from tests.scripted import engine_with, generate_staggered, generate_together, greedy_params
from tests.tiny import tiny_target

PROMPT = [65, 66, 67]
CODE = b"""\
def area(width, height):
    # both in metres
    return width * height


def volume(w, h, d):
    return w * h * d
"""


def rows_of(*texts: list[int], slots: tuple[int, ...] | None = None) -> DraftRows:
    slots = tuple(range(len(texts))) if slots is None else slots
    lengths, width = tuple(map(len, texts)), max(map(len, texts))
    rules: Any = None
    return DraftRows(
        slots=slots,
        index=torch.tensor(slots),
        tokens=torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]),
        lengths=torch.tensor(lengths),
        host_lengths=lengths,
        tables=torch.zeros(len(texts), 1, dtype=torch.long),
        start=None,
        rules=rules,
        independent=False,
    )


def guessed(drafter: PredictionDrafter, text: list[int], num_tokens: int = 8, slot: int = 0) -> list[int]:
    proposal = drafter.propose(rows_of(text, slots=(slot,)), num_tokens)
    return proposal.tokens[0, : int(proposal.lengths[0])].tolist()


def rounds(prediction: bytes, output: bytes, num_tokens: int = 8, min_match: int = 3) -> tuple[int, int]:
    """Play a request whose target writes `output`: how many rounds it takes, and how many guesses are wrong."""
    drafter = PredictionDrafter(prediction, len(PROMPT), min_match=min_match)
    text, num_rounds, wrong = list(PROMPT), 0, 0
    whole = PROMPT + list(output)
    while len(text) < len(whole):
        guesses = guessed(drafter, text, num_tokens)
        right = 0
        while right < len(guesses) and [guesses[right]] == whole[len(text) + right : len(text) + right + 1]:
            right += 1
        num_rounds, wrong = num_rounds + 1, wrong + len(guesses) - right
        text = whole[: len(text) + right + 1]
    return num_rounds, wrong


LEAST = -(-len(CODE) // 9)  # rounds if all of 8 guesses are right


def test_a_right_prediction_takes_the_fewest_rounds() -> None:
    assert rounds(CODE, CODE) == (LEAST, 0)
    assert rounds(CODE, CODE + b"!")[0] <= LEAST + 1


@pytest.mark.parametrize(
    ("output", "more"),
    [
        (CODE.replace(b"    # both in metres\n", b""), 2),  # a line left out
        (
            CODE.replace(b"    return width", b"    check(width, height)\n    return width"),
            28,
        ),  # one put in: written plainly
        (CODE.replace(b" metres", b" inches"), 10),
        (CODE.replace(b"*", b"+"), 6),  # three single tokens replaced
        (CODE.replace(b"def volume(w, h, d)", b"def volume(a, b, c)"), 10),
        (b"Here you are:\n" + CODE, 17),
        (CODE[50:] + CODE[:50], 8),  # the other way round
    ],
)
def test_the_place_is_found_again_after_an_edit(output: bytes, more: int) -> None:
    taken, wrong = rounds(CODE, output)
    assert taken <= -(-len(output) // 9) + more
    assert wrong <= 8 * 8


def test_an_unrelated_prediction_is_soon_left_alone() -> None:
    taken, wrong = rounds(CODE.upper(), bytes(range(130, 250)))
    assert (taken, wrong) == (120, 8)  # one round's guesses, and no more
    assert rounds(b"", CODE) == (len(CODE), 0)


def test_nothing_is_guessed_beyond_the_end() -> None:
    drafter = PredictionDrafter(b"abcdef", 1)
    assert guessed(drafter, [0]) == list(b"abcdef")
    assert guessed(drafter, [0, *b"abcd"]) == list(b"ef")
    assert guessed(drafter, [0, *b"abcdef"]) == []
    assert guessed(drafter, [0, *b"abcdefg"]) == []
    assert guessed(drafter, [0, *b"abcdefgabc"]) == list(b"def")  # said once more


def test_of_equal_matches_the_nearest_ahead_is_taken() -> None:
    drafter = PredictionDrafter(b"[item one] [item two] [item six]", 0)
    assert guessed(drafter, list(b"[item one]X")) == []
    assert guessed(drafter, list(b"[item one]XXXX[item")) == list(b" two] [i")
    assert guessed(drafter, list(b"[item one]XXXX[item two] YYYYYY[item s")) == list(b"ix]")
    assert guessed(drafter, list(b"[item one]XXXX[item two] YYYYYY[item sZZZZZZ[item on")) == list(
        b"e] [item"
    )  # behind


def test_near_an_edit_one_token_tells_the_place_and_is_not_trusted_far() -> None:
    drafter = PredictionDrafter(bytes(range(97, 123)), 0)
    assert guessed(drafter, list(b"abc")) == list(b"defghijk")
    assert guessed(drafter, list(b"abcX")) == []
    assert guessed(drafter, list(b"abcXe")) == list(b"fghi")  # d was replaced
    assert guessed(drafter, list(b"abcXef")) == list(b"ghijklmn")
    assert guessed(drafter, list(b"abcXefgXXXXXXXXh")) == []  # too far for one token


def test_each_slot_has_its_own_place_and_a_slot_may_change_hands() -> None:
    drafter = PredictionDrafter(CODE, len(PROMPT))
    text = PROMPT + list(CODE)
    proposal = drafter.propose(rows_of(text[:10], text[:30], text[:3]), 4)
    assert [bytes(one) for one in proposal.tokens.tolist()] == [CODE[7:11], CODE[27:31], CODE[:4]]
    drafter.release(1)
    assert bytes(guessed(drafter, PROMPT, 4, slot=1)) == CODE[:4]
    assert bytes(guessed(drafter, text[:20], 4, slot=0)) == CODE[17:21]
    assert bytes(guessed(drafter, text[:8], 4, slot=0)) == CODE[5:9]  # shrunk, without notice


def test_a_row_that_was_sent_away_is_found_again() -> None:
    text = PROMPT + list(CODE)
    for known in (len(PROMPT), None):
        drafter = PredictionDrafter(CODE, known)
        guessed(drafter, PROMPT, slot=0)
        guessed(drafter, text[:40], slot=0)
        drafter.release(0)
        if known is None:  # the round is lost, the next one is not
            guessed(drafter, text[:40], slot=5)
        assert bytes(guessed(drafter, text[:41], slot=5)) == CODE[38:46]


def test_a_row_shorter_than_the_prompt_is_nothing_to_follow() -> None:
    """A drafter is timed on rows that nobody holds."""
    assert bytes(guessed(PredictionDrafter(CODE, 200), [0] * 128)) == CODE[:8]


@pytest.mark.parametrize("kind", ["equal", "random", "two"])
def test_time_is_linear_whatever_the_texts(kind: str) -> None:
    noise = random.Random(5)
    num_ids = {"equal": 1, "random": 10**12, "two": 2}[kind]
    prediction, output = ([noise.randrange(num_ids) for _ in range(20_000)] for _ in range(2))
    output[1::50] = [77] * len(output[1::50])
    began = time.perf_counter()
    drafter = PredictionDrafter(prediction, 0)
    drafter.propose(rows_of(output), 8)
    assert time.perf_counter() - began < 3.0


def test_a_match_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_match"):
        PredictionDrafter([1, 2], min_match=0)


# --- in an engine


def written(params: SamplingParams, num_tokens: int = 90) -> list[int]:
    with engine_with(None, tiny_target(), max_num_seqs=1) as llm:
        output = llm.generate(prompt_token_ids=[PROMPT], sampling_params=params.but(max_tokens=num_tokens))[0]
    return list(output.token_ids)


@pytest.fixture(scope="module")
def true_text() -> list[int]:
    return written(greedy_params(90))


def edited(text: list[int], how: str) -> list[int]:
    noise = random.Random(3)
    foreign = [noise.randrange(256) for _ in range(15)]
    return {
        "right": text,
        "a sentence too many": text[:30] + foreign + text[30:],
        "a sentence too few": text[:30] + text[45:],
        "words replaced": [noise.randrange(256) if place % 20 == 10 else token for place, token in enumerate(text)],
        "wrong": foreign * 6,
        "empty": [],
        "too short": text[:20],
        "ids that do not exist": [10**9, -3, *text],
    }[how]


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ("right", 10),
        ("a sentence too many", 16),
        ("a sentence too few", 28),
        ("words replaced", 26),
        ("wrong", 90),
        ("empty", 90),
        ("too short", 74),
        ("ids that do not exist", 16),
    ],
)
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_greedy_text_stays_and_rounds_fall(how: str, most: int, verification: str, true_text: list[int]) -> None:
    drafter = PredictionDrafter(edited(true_text, how), len(PROMPT))
    with engine_with(drafter, tiny_target(), verification=verification, max_num_seqs=2) as llm:
        output = llm.generate(prompt_token_ids=[PROMPT], sampling_params=greedy_params(90, speculation=9))[0]
        assert list(output.token_ids) == true_text
        assert output.stats.rounds <= most
        assert llm.engine.speculator.num_failures == 0


@pytest.mark.parametrize("run", [generate_together, generate_staggered], ids=["together", "staggered"])
@pytest.mark.parametrize("preempted", [False, True])
def test_samples_of_one_request_each_follow_it(preempted: bool, run: Any) -> None:
    """n samples and a greedy one, of one drafter: all as without it, also where some are sent away and come back."""
    sampled = SamplingParams(temperature=0.6, seed=5, n=3, max_tokens=60, ignore_eos=True, speculation=7)
    jobs = [(PROMPT, sampled), (PROMPT, greedy_params(60, speculation=7))]
    plain = [(prompt, params.but(speculation="off")) for prompt, params in jobs]
    with engine_with(None, tiny_target(), max_num_seqs=4) as llm:
        wanted = [one.output for group in generate_together(llm, plain) for one in group]
    drafter = PredictionDrafter(wanted[1], len(PROMPT))
    room = {"kv_cache_bytes": 13 * 16 * 512, "max_model_len": 96} if preempted else {}
    with engine_with(drafter, tiny_target(), max_num_seqs=4, **room) as llm:
        done = [one for group in run(llm, jobs) for one in group]
        assert [one.output for one in done] == wanted
        assert (llm.engine.scheduler.num_preemptions > 0) == preempted
        assert done[1].ledger.rounds <= (14 if preempted else 8)
        assert max(one.ledger.rounds for one in done) > 20  # the others' texts are not what was predicted
        assert set(drafter._rows) <= {llm.engine.state.idle}
