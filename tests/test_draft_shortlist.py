"""Which tokens a draft with a shortened vocabulary may guess."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from outrider.draft.shortlist import coverage, frequent_ids, token_counts
from outrider.errors import ConfigError
from tests.tiny import EOS_ID, NUM_TOKENS, byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat, the cat sat on the hat\n" * 3
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("z", "z"), ("x", "x")]


def pair_tokenizer(*, shuffled: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, seven merges, </s> and two tokens in reserve; `shuffled` gives ids that say nothing of frequency."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    if shuffled:
        tokens.reverse()
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ("</s>", "<|reserved_special_token_1|>", "<unused7>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, eos_token="</s>")
    return tokenizer


def named(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(ids.tolist()))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("shuffled", [False, True])
def test_without_a_corpus_earlier_merges_count_as_more_frequent(shuffled: bool) -> None:
    tokenizer = pair_tokenizer(shuffled=shuffled)
    ids = frequent_ids(tokenizer, 256 + 1 + 3, len(tokenizer))
    assert ids.dtype == torch.int64 and ids.shape == (260,)
    assert ids.tolist() == sorted(set(ids.tolist())), "ascending, each once"
    assert {"th", "the", "Ġthe"} <= named(tokenizer, ids) and "zz" not in named(tokenizer, ids)


def test_the_end_of_text_and_every_byte_are_in() -> None:
    tokenizer = pair_tokenizer()
    ids = frequent_ids(tokenizer, 258, len(tokenizer)).tolist()
    assert tokenizer.eos_token_id in ids and set(range(256)) <= set(ids)
    assert not {"<|reserved_special_token_1|>", "<unused7>"} & named(tokenizer, torch.tensor(ids))
    assert set(frequent_ids(byte_tokenizer(), NUM_TOKENS, 320).tolist()) == set(range(NUM_TOKENS))


def test_sentencepiece_names_its_bytes() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "▁rare": 2, "▁a": 3, **{f"<0x{byte:02X}>": byte + 4 for byte in range(256)}}
    make: Any = PreTrainedTokenizerFast  # untyped
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer = make(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    assert set(frequent_ids(tokenizer, 259, 260).tolist()) == set(range(260)) - {2}


def test_a_corpus_decides_by_count(corpus: Path) -> None:
    tokenizer = pair_tokenizer()
    ids = frequent_ids(tokenizer, 257 + 3, len(tokenizer), corpus)
    assert named(tokenizer, ids) - set(MERGES[0]) >= {"Ġthe", "at", "cat"}
    by_order = frequent_ids(tokenizer, 257 + 3, len(tokenizer))
    counts = token_counts(tokenizer, len(tokenizer), corpus)
    assert coverage(ids, counts) > coverage(by_order, counts)
    assert coverage(torch.arange(len(tokenizer)), counts) == 1.0


def test_coverage_is_the_share_of_the_tokens_of_a_text() -> None:
    counts = torch.tensor([6, 0, 3, 1])
    assert coverage(torch.tensor([0, 2]), counts) == pytest.approx(0.9)
    assert coverage(torch.tensor([1]), counts) == 0.0


def test_what_is_covered_is_logged(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        frequent_ids(byte_tokenizer(), 300, 320, corpus)
    assert "300 of 320 tokens cover 100.0% of" in caplog.text


def test_counts_are_those_of_the_tokens(corpus: Path) -> None:
    counts = token_counts(byte_tokenizer(), 320, corpus)
    assert counts.shape == (320,)
    assert {token: int(count) for token, count in enumerate(counts) if count} == dict(Counter(TEXT.encode()))


def test_a_long_corpus_is_read_in_pieces_and_not_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.draft.shortlist._CHUNK", 100)
    monkeypatch.setattr("outrider.draft.shortlist.MAX_CORPUS", 1000)
    path = tmp_path / "long.txt"
    path.write_text("abcdefg\n" * 1000)
    assert token_counts(byte_tokenizer(), 320, path).sum() == 1000


def test_the_strings_of_jsonl_records_are_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    records: list[Any] = [{"messages": [{"role": "user", "content": "qq"}], "id": "zzz"}, {"text": "w"}, 7, "qw"]
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    counts = token_counts(byte_tokenizer(), 320, path)
    assert {chr(token): int(count) for token, count in enumerate(counts) if count} == {"q": 3, "w": 2}


def test_the_same_question_has_the_same_answer(corpus: Path) -> None:
    for source in (None, corpus):
        first, second = (frequent_ids(pair_tokenizer(), 100, 266, source) for _ in range(2))
        assert torch.equal(first, second)


def test_ids_beyond_the_shared_vocabulary_are_never_chosen(corpus: Path) -> None:
    assert frequent_ids(pair_tokenizer(), 200, 200, corpus).tolist() == list(range(200))


def test_a_short_list_keeps_the_end_of_text_and_says_so(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = frequent_ids(byte_tokenizer(), 4, 320, corpus, keep=(7,))
    assert EOS_ID in ids and 7 in ids and ord("t") in ids
    assert "no room" in caplog.text
    assert frequent_ids(byte_tokenizer(), 1, 320).tolist() == [EOS_ID]


@pytest.mark.parametrize("size", [0, -3, 321])
def test_a_size_out_of_range_is_refused_with_the_range(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"draft_vocab_size must be between 1 and .*320, got {size}"):
        frequent_ids(byte_tokenizer(), size, 320)


def test_without_a_tokenizer_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        frequent_ids(None, 10, 320)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("latin.txt", b"caf\xe9", "cannot be read"),
        ("empty.txt", b"", "holds no text"),
        ("empty.jsonl", b'{"role": "user"}\n', "holds no text"),
        ("broken.jsonl", b'{"text": "a"}\n{\n', "line 2 is not JSON"),
    ],
)
def test_a_corpus_that_is_none_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        frequent_ids(byte_tokenizer(), 10, 320, path)
    assert name in str(caught.value)
