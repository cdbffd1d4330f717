"""From a `Grammar` to what may follow a text by it: llguidance over the target's tokenizer, compiled once for many.

A grammar comes from a stranger. So its text is bounded when it is made, the library works within limits, it compiles
on a stack that no chain of references can exhaust, and the first steps are tried before a request is taken.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outrider.sampling.grammar import Grammar

__all__ = ["CompiledGrammar", "GrammarCompiler", "Words"]

MOST_KEPT = 32  # compiled grammars; each may grow to MOST_STATES states of 1 to 2 kB
MOST_STATES = 30_000
MOST_SYMBOLS = 100_000
STACK_BYTES = 256 << 20  # of address space; only what is used is taken
MOST_SECONDS = 10.0
MOST_AT_ONCE = 2  # compiling; the library cannot be stopped, only no longer waited for
END = "<|outrider-end|>"  # stands for the text's end inside the library; no id of the model's
PROBED = 2  # first tokens that are tried


class Words:
    """The target's vocabulary as the library sees it.

    Args:
        tokenizer: A fast transformers tokenizer.
        vocab_size: Ids of the target, padding included.

    Raises:
        InvalidRequestError: The library is missing, or cannot tell the tokens' bytes.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError:
            raise InvalidRequestError("a grammar needs llguidance: pip install 'outrider[server]'") from None
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequestError(
                "a grammar needs a tokenizer that can tell its tokens' bytes, and this model has "
                f"{'none' if tokenizer is None else type(tokenizer).__name__}; leave the grammar out"
            )
        copy = Tokenizer.from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        copy.add_special_tokens([AddedToken(END, special=True)])
        end = copy.token_to_id(END)
        assert end is not None
        try:
            self._table = llguidance.LLTokenizer(copy.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=end)
        except ValueError as error:
            raise InvalidRequestError(f"a grammar cannot be followed with this model's tokenizer: {error}") from None
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MOST_STATES, max_grammar_size=MOST_SYMBOLS, verbose_errors=False
        )
        self._library, self._end = llguidance, end
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.bits = lru_cache(64)(self._bits)

    def matcher(self, grammar: Grammar) -> Any:
        """Compile; a fault is the matcher's `get_error`."""
        make = self._library.LLMatcher
        text = grammar.text
        if grammar.kind == "json_schema":
            text = make.grammar_from_json_schema(text)
        elif grammar.kind == "regex":
            text = make.grammar_from_regex(text)
        elif grammar.kind == "choice":
            # A terminal: as a rule each option would be a parse of its own, and there may be 2000 at most.
            text = "start: ONE\nONE: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return make(self._table, text, log_level=0, limits=self._limits)

    def _bits(self, ids: frozenset[int]) -> torch.Tensor:
        """Give a mask of `ids` and no others, int32 ``[W]``."""
        mask = torch.zeros(self.num_words * 32, dtype=torch.bool)
        mask[[one for one in ids if 0 <= one < self.vocab_size]] = True
        return packed(mask)

    def next_bits(self, matcher: Any) -> torch.Tensor:
        """Ask a matcher which ids may follow, int32 ``[W]``; its end is left out. See its `is_error` afterwards."""
        found = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)[: self.num_words]
        return found & ~self.bits(frozenset({self._end}))


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool ``[32 W]`` into int32 ``[W]``, the lowest id in the lowest bit."""
    weights = torch.tensor([1 << bit for bit in range(32)])
    return (mask.view(-1, 32).long() * weights).sum(1).to(torch.int32)


class CompiledGrammar:
    """One grammar over one vocabulary, ready to be followed by any number of texts.

    Args:
        words: The vocabulary.
        grammar: What it was made from.

    Raises:
        InvalidRequestError: It cannot be compiled, is too large, or allows no text.
    """

    def __init__(self, words: Words, grammar: Grammar) -> None:
        self.words, self._grammar = words, grammar
        self._first = self.renewed()
        fault = self._first.get_error() or self._fault_of_first_steps()
        if fault:
            raise InvalidRequestError(f"the grammar ({grammar.kind}) cannot be followed: {_short(fault)}")

    def matcher(self) -> Any:
        """A matcher at its beginning; what it learns of the grammar is shared with the others."""
        return self._first.deep_copy()

    def renewed(self) -> Any:
        """A matcher at its beginning that shares nothing: others may have used up the limits of what is shared."""
        return _on_large_stack(lambda: self.words.matcher(self._grammar))

    def _fault_of_first_steps(self) -> str:
        matcher = self.matcher()
        for step in range(PROBED):
            if matcher.is_stopped():
                break
            bits = self.words.next_bits(matcher)
            if matcher.is_accepting():
                break
            if matcher.is_error() or not bits.any():
                return str(matcher.get_error()) if step else "no token of the vocabulary can begin a text by it"
            word = int(bits.nonzero()[0, 0])
            value = int(bits[word]) & 0xFFFFFFFF
            matcher.consume_token(word * 32 + (value & -value).bit_length() - 1)
        return str(matcher.get_error())


class GrammarCompiler:
    """Compiles grammars over one tokenizer and keeps the last few, in memory alone. Any thread may ask it.

    Args:
        tokenizer: The target's; None or one without bytes makes every grammar an error.
        vocab_size: Ids of the target, padding included.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words: Words | None = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or give what was compiled before.

        Raises:
            InvalidRequestError: See `Words` and `CompiledGrammar`.
        """
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            if self._words is None:
                self._words = Words(self._tokenizer, self._vocab_size)
            words = self._words
        compiled = CompiledGrammar(words, grammar)  # not under the lock: a slow one holds up nobody else
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled


_starting = threading.Lock()  # the stack's size is a setting of the whole process
_compiling = threading.BoundedSemaphore(MOST_AT_ONCE)


def _on_large_stack(work: Callable[[], Any]) -> Any:
    """Do some work that may call itself very deeply, but not for long."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(work())
        finally:
            _compiling.release()  # not when it is given up: it goes on until it is done

    thread = threading.Thread(target=run, daemon=True)
    if _compiling.acquire(timeout=MOST_SECONDS):
        with _starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            except BaseException:
                _compiling.release()
                raise
            finally:
                threading.stack_size(usual)
        thread.join(MOST_SECONDS)
    if not made:
        raise InvalidRequestError(f"the grammar does not compile within {MOST_SECONDS:g} seconds; make it simpler")
    return made[0]


def _short(fault: str) -> str:
    """Give the telling part of the library's message."""
    lines: Iterable[str] = (line.strip() for line in fault.replace("<non-verbose/>", "").splitlines())
    return " ".join(line for line in lines if line)[:300]
