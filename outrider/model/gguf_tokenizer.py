"""Repair what transformers gets wrong or drops when it builds a tokenizer from a GGUF.

Both 5.17 and 5.24 split every byte-level vocabulary by GPT-2's rule whatever `tokenizer.ggml.pre` says; 5.17 also
decodes with SentencePiece rules, takes SmolLM2's bos for its eos and cleans up spaces.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["repair_tokenizer"]

logger = logging.getLogger(__name__)

# Our spelling -> GGUF's, in tokenizer.ggml.<spelling>_token_id.
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"qwen2": _SPLIT.replace("DIGITS", ""), "llama-bpe": _SPLIT.replace("DIGITS", "{1,3}")}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


def repair_tokenizer(metadata: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Set special tokens and, for byte-level vocabularies, splitting and decoding to what the GGUF's metadata says."""
    tokenizer.clean_up_tokenization_spaces = False
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    for name, spelling in _SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{spelling}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            setattr(tokenizer, f"{name}_token", tokens[token_id])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and metadata.get("tokenizer.ggml.model") == "gpt2":
        _repair_byte_level(backend, str(metadata.get("tokenizer.ggml.pre", "default")))


def _repair_byte_level(backend: Any, rule: str) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC() if rule == "qwen2" else None
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[rule]), behavior="isolated")
        unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, unsplit])
        backend.model.ignore_merges = rule == "llama-bpe"
    elif rule in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        backend.pre_tokenizer = whole
        if rule not in ("default", "gpt-2", "gpt2"):
            logger.warning("text is split by GPT-2's rule, not by %r: rare strings may get other tokens", rule)
