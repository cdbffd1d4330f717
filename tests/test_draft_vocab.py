"""Cases M01 and M02: padded vocabularies are one vocabulary, permuted ones are not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.draft.vocab import SharedVocabulary, check_vocabulary
from outrider.errors import VocabularyMismatchError
from tests.tiny import EOS_ID, byte_tokenizer


@dataclass(frozen=True)
class Named:
    tokenizer: Any
    vocab_size: int
    name: str = "model"


class Words:
    """Only what the check asks of a tokenizer."""

    def __init__(self, tokens: list[str], eos: int = 0) -> None:
        self.tokens, self.bos_token_id, self.eos_token_id = tokens, 0, eos

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def swapped(words: list[str], one: int, other: int) -> list[str]:
    words = list(words)
    words[one], words[other] = words[other], words[one]
    return words


@pytest.mark.parametrize(("target", "draft"), [(320, 288), (288, 320)])
def test_padding_rows_may_differ_either_way(target: int, draft: int) -> None:
    shared = check_vocabulary(Named(byte_tokenizer(), target), Named(byte_tokenizer(), draft))
    assert shared == SharedVocabulary(size=288, padded=True)


def test_equal_sizes_are_not_padded() -> None:
    assert check_vocabulary(Named(byte_tokenizer(), 320), Named(byte_tokenizer(), 320)) == SharedVocabulary(320, False)


def test_permuted_strings_are_refused_with_the_first_id_and_both_strings() -> None:
    words = [f"w{index}" for index in range(100)]
    target, draft = Named(Words(words), 100, "big"), Named(Words(swapped(words, 17, 42)), 100, "small")
    with pytest.raises(VocabularyMismatchError) as caught:
        check_vocabulary(target, draft)
    message = str(caught.value)
    assert "token id 17 is 'w17' to the target and 'w42' to the draft" in message
    assert "2 of 100" in message and "big" in message and "small" in message and "use a draft" in message


def test_an_id_only_one_tokenizer_knows_does_no_harm() -> None:
    target, draft = Named(Words(["a", "b"]), 4), Named(Words(["a", "b", "c"]), 4)
    assert check_vocabulary(target, draft) == check_vocabulary(draft, target) == SharedVocabulary(4, False)


def test_differences_above_the_shared_size_do_not_matter() -> None:
    assert check_vocabulary(Named(Words(["a", "b", "c"]), 3), Named(Words(["a", "b"]), 2)).size == 2


def test_a_family_member_with_one_more_special_token_is_welcome() -> None:
    other = byte_tokenizer()
    other.add_tokens(["<think>"])
    assert check_vocabulary(Named(byte_tokenizer(), 320), Named(other, 320)) == SharedVocabulary(320, False)


@pytest.mark.parametrize("missing", ["target", "draft", "both"])
def test_without_tokenizers_only_sizes_count(missing: str) -> None:
    target = Named(None if missing != "draft" else byte_tokenizer(), 320)
    draft = Named(None if missing != "target" else byte_tokenizer(), 300)
    assert check_vocabulary(target, draft) == SharedVocabulary(300, True)


def test_another_eos_is_noted_and_allowed(caplog: pytest.LogCaptureFixture) -> None:
    other = byte_tokenizer()
    other.eos_token = "<pad>"
    shared = check_vocabulary(Named(byte_tokenizer(), 320), Named(other, 320))
    assert shared.size == 320
    assert shared.notes == (f"their eos ids differ (target {EOS_ID}, draft 256)",)
    assert "eos ids differ" in caplog.text


def test_a_mismatch_names_the_special_ids_too() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"their eos ids differ \(target 1, draft 0\)"):
        check_vocabulary(Named(Words(["a", "b"], eos=1), 2), Named(Words(["b", "a"]), 2))


def test_a_large_vocabulary_is_compared_quickly() -> None:
    words = [f"token{index}" for index in range(150_000)]
    target, draft = Named(Words(words), 151_936), Named(Words(swapped(words, 149_998, 149_999)), 151_936)
    start = time.perf_counter()
    with pytest.raises(VocabularyMismatchError, match="149998"):
        check_vocabulary(target, draft)
    assert time.perf_counter() - start < 1.0  # 0.1 s when the machine is quiet
