"""A tokenizer seen by bytes: what bytes each id means, and which ids spell given bytes.

Two vocabularies name one token differently: GPT-2's alphabet writes " the" as "Ġthe", SentencePiece as "▁the", and a
lone byte as "<0x0A>". Bytes are what they have in common, half characters included.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from outrider.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

__all__ = ["Speller"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's name for a byte
_RAW = re.compile("([\udc80-\udcff]+)")  # what surrogateescape makes of bytes that are no text
_BLANK = "▁"  # SentencePiece's space
_OPAQUE = {"WordPiece", "BPEDecoder", "CTC"}  # decoders that add or drop spaces by rules of their own
_ROLES = ("bos", "eos", "pad")
# Text set before what is to be spelled, where a tokenizer treats the beginning of a text in its own way.
_GUARDS = ("", "\n", ".", "a")


class Speller:
    """Both ways between one tokenizer's ids and bytes.

    Args:
        tokenizer: A transformers tokenizer.
        vocab_size: Rows of the model's head; ids at or above it do not exist.
        name: What to call the model in an error.

    Attributes:
        pieces: The bytes that each id means, ``[vocab_size]``; None for special tokens, padding and unknown ids.
        ids: The id that means given bytes. Where several do, an ordinary token goes before a byte's fallback.
        specials: Special tokens, and what each is called.
        roles: Which ids are bos, eos and pad.
        leads: Whether it puts a space before every text, as SentencePiece does.
        bos: What it begins every text with, if anything.

    Raises:
        VocabularyMismatchError: Its tokens cannot be told by bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, name: str) -> None:
        self._tokenizer: Any = tokenizer  # untyped
        self.name = name
        self.pieces: list[bytes | None] = [None] * vocab_size
        self.ids: dict[bytes, int] = {}
        self.specials = _specials(tokenizer, vocab_size)
        self.roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
        self._read_pieces()
        self._longest = max(map(len, self.ids), default=0)
        begun = self._encoded(["a"], special=True)[0][:1]
        self.bos = begun[0] if begun and begun[0] == self.roles["bos"] else None
        self.leads = self.meaning(self._encoded(["a"])[0]) == b" a"

    def _read_pieces(self) -> None:
        added = {
            index: getattr(token, "content", token)
            for index, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()
        }
        vocabulary = self._tokenizer.get_vocab()
        alphabet = _byte_alphabet() if _is_byte_level(self._tokenizer, vocabulary, self.name) else None
        fallbacks = []
        for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
            if not 0 <= index < len(self.pieces) or index in self.specials:
                continue
            byte = None if alphabet or index in added else _BYTE.fullmatch(token)
            piece = bytes([int(byte[1], 16)]) if byte else _piece(token, None if index in added else alphabet)
            self.pieces[index] = piece
            if byte:
                fallbacks.append((piece, index))
            elif piece:
                self.ids.setdefault(piece, index)
        for piece, index in fallbacks:
            self.ids.setdefault(piece, index)

    @property
    def num_known(self) -> int:
        """Ids that mean anything."""
        return sum(1 for piece in self.pieces if piece) + len(self.specials)

    # --- ids to bytes

    def meaning(self, ids: Iterable[int]) -> bytes:
        """Join what ids mean; special tokens mean nothing."""
        return b"".join(self.pieces[index] or b"" for index in ids if index < len(self.pieces))

    # --- bytes to ids

    def spell(self, data: bytes, before: bytes = b"") -> list[int | None]:
        """Spell bytes as the tokenizer would, as far as they are text; where they are not, longest tokens first.

        The ids mean exactly `data`; a byte that no token has is None.

        Args:
            data: What to spell.
            before: What stands before it, which is not spelled but may shape what is.
        """
        ids: list[int | None] = []
        for part, is_text in _parts(data):
            ids += self._spelled_text(part, before) if is_text else self._spelled_bytes(part)
            before = part
        return ids

    def spell_each(self, many: Sequence[bytes]) -> list[list[int | None]]:
        """Spell many short pieces, each by itself: what `spell` gives, in a few calls of the tokenizer."""
        spelled: list[list[int | None] | None] = [None] * len(many)
        texts = {}
        for place, data in enumerate(many):
            try:
                texts[place] = data.decode()
            except UnicodeDecodeError:
                spelled[place] = self.spell(data)
        for guard in _GUARDS:
            places = [place for place in texts if spelled[place] is None]
            if not places:
                break
            for place, ids in zip(places, self._encoded([guard + texts[place] for place in places]), strict=True):
                spelled[place] = self._behind(ids, many[place])
        return [self._spelled_bytes(data) if ids is None else ids for data, ids in zip(many, spelled, strict=True)]

    def _spelled_text(self, data: bytes, before: bytes) -> list[int | None]:
        text, context = data.decode(), before.decode(errors="ignore")
        for guard in (context, *_GUARDS) if context else _GUARDS:
            ids = self._behind(self._encoded([guard + text])[0], data)
            if ids is not None:
                return ids
        return self._spelled_bytes(data)

    def _behind(self, ids: list[int], data: bytes) -> list[int | None] | None:
        """Cut off the ids that mean exactly `data` at the end; None where there is no such border."""
        begin, size = len(ids), 0
        while begin > 0 and size < len(data):
            begin -= 1
            piece = self.pieces[ids[begin]] if ids[begin] < len(self.pieces) else None
            if piece is None:
                return None
            size += len(piece)
        return list(ids[begin:]) if size == len(data) and self.meaning(ids[begin:]) == data else None

    def _spelled_bytes(self, data: bytes) -> list[int | None]:
        ids: list[int | None] = []
        begin = 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in self.ids), begin + 1)
            ids.append(self.ids.get(data[begin:end]))
            begin = end
        return ids

    def _encoded(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.padding is None and backend.truncation is None:  # ten times as fast
            return [one.ids for one in backend.encode_batch(texts, add_special_tokens=special)]
        made = self._tokenizer(
            texts,
            add_special_tokens=special,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = made.input_ids
        return ids

    def encode(self, text: str) -> list[int]:
        """Encode a text as the tokenizer does, without special tokens around it."""
        return self._encoded([text])[0]


def _specials(tokenizer: Any, vocab_size: int) -> dict[int, str]:
    """Special tokens by id, and what each is called."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {index: token.content for index, token in added.items() if getattr(token, "special", False)}
    for index, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False):
        special.setdefault(index, str(token))
    return {index: token for index, token in sorted(special.items()) if 0 <= index < vocab_size}


def _is_byte_level(tokenizer: Any, vocabulary: dict[str, int], name: str) -> bool:
    """Whether tokens are written in GPT-2's alphabet: by the decoder, or by the looks where there is none to ask."""
    kinds = _decoder_kinds(getattr(tokenizer, "backend_tokenizer", None))
    if kinds & _OPAQUE:
        raise VocabularyMismatchError(
            f"the tokenizer of {name} joins tokens by rules of {', '.join(sorted(kinds & _OPAQUE))}, so they cannot be "
            "told by bytes; use a model with a byte-level or SentencePiece tokenizer, or a drafter without a model"
        )
    if kinds & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"}:
        return "ByteLevel" in kinds
    return any(token.startswith("Ġ") for token in vocabulary) and not any(_BLANK in token for token in vocabulary)


def _decoder_kinds(backend: Any) -> set[str]:
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _piece(token: str, alphabet: dict[int, int] | None) -> bytes:
    """What a token's name means; what is not written in the alphabet is meant as it stands."""
    if alphabet is not None:
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()
    return token.replace(_BLANK, " ").encode()


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's character for each byte: itself where it can be printed, else one from 256 up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + place: byte for place, byte in enumerate(hidden)}


def _parts(data: bytes) -> list[tuple[bytes, bool]]:
    """Cut bytes into text and what is none, in turns: each part, and whether it is text."""
    parts = _RAW.split(data.decode(errors="surrogateescape"))
    return [(part.encode(errors="surrogateescape"), not place % 2) for place, part in enumerate(parts) if part]
