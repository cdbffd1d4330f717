"""Finding what the cache holds already: the blocks of a prompt's beginning that some sequence has computed before.

A full block of committed tokens is registered, once the target's cache holds it, under a hash of all tokens up to its
end. A sequence that is still to be fed takes over the longest run of such blocks. Hashes only find candidates: a block
is taken over where its tokens are the same and the block before it was taken over too, so a collision costs nothing
but a hit.

Two rules make sharing safe. What is registered lies before the last committed token, and whatever a round writes
(guesses, trees, kept paths, padding) lies at that token's place or behind it: a shared block is never written. And a
block counts together with the one token behind it, for heads make their entry of a place from the token after it: what
any draft keeps in a block is then the same for all who share it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from outrider.model.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.engine.block_pool import BlockPool
    from outrider.sequence import Sequence

__all__ = ["CachedBlock", "PrefixCache", "SharingDrafts", "block_digest"]


class SharingDrafts(Protocol):
    """What drafts for sequences, as far as sharing blocks concerns it."""

    def shares_blocks(self, sequence: Sequence) -> bool:
        """Whether what drafts for a sequence allows that its first blocks are another's too."""

    def kept(self, sequence: Sequence) -> tuple[object, int]:
        """Say what drafts for a sequence, and how many of its first tokens that one has cached."""

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """Tell what drafts for a sequence that so many of its first tokens are cached already."""

    def copy_blocks(self, sequence: Sequence, source: list[int], target: list[int]) -> None:
        """Copy what target and draft keep in some blocks to others."""


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A block that others may take over.

    Attributes:
        block: Its number.
        digest: What it is found by.
        tokens: Its own tokens, and the one after them.
        scope: Whose texts may take it over.
        before: The block before it; None for a text's first.
        after: Blocks that follow it, in one text or another.
        drafts: What drafts have their entries there, too.
    """

    block: int
    digest: bytes
    tokens: tuple[int, ...]
    scope: str
    before: CachedBlock | None
    after: set[CachedBlock] = field(default_factory=set)
    drafts: tuple[object, ...] = ()


@dataclass
class _Chain:
    """A sequence's registered blocks, its own or somebody's who was first; and of how many its draft's are noted."""

    blocks: list[CachedBlock] = field(default_factory=list)
    num_noted: int = 0


def block_digest(before: bytes, tokens: Seq[int]) -> bytes:
    """Hash a block: the hash of all before it, and its tokens (SHA-256, so that nobody can make two alike)."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """Knows which blocks hold which beginnings.

    Args:
        pool: The blocks; nobody else may listen to what it evicts.
        drafts: What drafts for whom; None where nothing does.
        across_scopes: Let texts of different scopes (API keys) share. Hits can be told by their time, so one caller
            could find out what another asked.
        chunk: Exact mode: the size of the prompt chunks whose arithmetic must not change. Blocks are shared by whole
            chunks, and only what such chunks computed.

    Attributes:
        queries: Tokens that were looked for.
        hits: Tokens that were found.
    """

    def __init__(
        self,
        pool: BlockPool,
        drafts: SharingDrafts | None = None,
        *,
        across_scopes: bool = False,
        chunk: int | None = None,
    ) -> None:
        self.queries = self.hits = 0
        self._pool, self._drafts, self._across, self._chunk = pool, drafts, across_scopes, chunk
        self._found: dict[bytes, CachedBlock] = {}
        self._of_block: dict[int, CachedBlock] = {}
        self._chains: WeakKeyDictionary[Sequence, _Chain] = WeakKeyDictionary()
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._found)

    def at(self, block: int) -> CachedBlock | None:
        """What is registered of a block."""
        return self._of_block.get(block)

    def known(self, sequence: Sequence) -> int:
        """How many of a sequence's first tokens lie in blocks that are registered."""
        return len(self._chain(sequence).blocks) * BLOCK_SIZE

    def may_take(self, sequence: Sequence) -> bool:
        """Whether a sequence may start from what others computed: nothing is left to be said of its prompt then."""
        if sequence.lacks_prompt_logprobs:
            return False
        return self._drafts is None or self._drafts.shares_blocks(sequence)

    def beginning(self, sequence: Sequence) -> bytes | None:
        """Name a sequence's first block; None where it has none that it could share."""
        if len(sequence) <= BLOCK_SIZE or not self.may_take(sequence):
            return None
        return self._digest(sequence, None, _tokens(sequence, 0))

    def find(self, sequence: Sequence) -> list[CachedBlock]:
        """Find the blocks that hold what comes after a sequence's registered ones; its last token is always left."""
        if not self.may_take(sequence):
            return []
        chain, found = self._chain(sequence).blocks, list[CachedBlock]()
        for place in range(len(chain), (len(sequence) - 1) // BLOCK_SIZE):
            before = found[-1] if found else chain[-1] if chain else None
            tokens = _tokens(sequence, place)
            one = self._found.get(self._digest(sequence, before, tokens))
            if one is None or not self._is(one, sequence, before, tokens):
                break
            found.append(one)
        if self._chunk is not None:  # up to a chunk's border
            while found and (len(chain) + len(found)) * BLOCK_SIZE % self._chunk:
                found.pop()
        return found

    def take(self, sequence: Sequence, found: list[CachedBlock], *, copied: bool = False) -> None:
        """Note that a sequence goes on from blocks that were found for it, or from copies of them."""
        chain = self._chain(sequence).blocks
        chain.extend(found)
        self.hits += len(found) * BLOCK_SIZE
        if self._drafts is None:
            return
        drafter, _ = self._drafts.kept(sequence)
        held = 0
        for one, block in zip(chain, sequence.blocks, strict=False):
            if drafter is None or drafter not in one.drafts or (one.block != block and not copied):
                break
            held += BLOCK_SIZE
        if held:
            self._drafts.adopt(sequence, held)

    def register(self, sequence: Sequence) -> None:
        """Let others find the full blocks that a sequence has by now."""
        chain, ready = self._chain(sequence).blocks, self._shareable(sequence) // BLOCK_SIZE
        while len(chain) < ready:
            before, tokens = chain[-1] if chain else None, _tokens(sequence, len(chain))
            digest = self._digest(sequence, before, tokens)
            one = self._found.get(digest)
            if one is None:
                one = CachedBlock(sequence.blocks[len(chain)], digest, tokens, self._scope(sequence), before)
                self._found[digest] = self._of_block[one.block] = one
                self._pool.keep(one.block)
                if before is not None:
                    before.after.add(one)
            elif not self._is(one, sequence, before, tokens):
                break  # two texts of one hash: the first keeps the place
            chain.append(one)
        self._note_draft(sequence)

    def _note_draft(self, sequence: Sequence) -> None:
        """Note in which of a sequence's blocks its draft's entries are by now."""
        if self._drafts is None:
            return
        chain = self._chain(sequence)
        drafter, kept = self._drafts.kept(sequence)
        end = min(kept // BLOCK_SIZE, len(chain.blocks))
        for place in range(chain.num_noted, end):
            one = chain.blocks[place]
            if one.block == sequence.blocks[place] and drafter not in one.drafts:
                one.drafts += (drafter,)
        chain.num_noted = max(chain.num_noted, end)

    def release(self, sequence: Sequence) -> None:
        """A sequence gives its blocks back."""
        self._chains.pop(sequence, None)

    def distrust(self, sequence: Sequence) -> None:
        """Forget the blocks of a sequence whose entries may be wrong, and all that was computed after them."""
        for block in sequence.blocks:
            self._drop(block)

    def clear(self) -> None:
        """Forget everything."""
        for block in list(self._of_block):
            self._drop(block)

    # --- how it is done

    def _chain(self, sequence: Sequence) -> _Chain:
        """A sequence's registered blocks, as far as they still are."""
        chain = self._chains.setdefault(sequence, _Chain())
        while chain.blocks and self._found.get(chain.blocks[-1].digest) is not chain.blocks[-1]:
            chain.blocks.pop()
        chain.num_noted = min(chain.num_noted, len(chain.blocks))
        return chain

    def _shareable(self, sequence: Sequence) -> int:
        """Count the tokens whose entries others may take over."""
        if self._chunk is None:
            return sequence.cached
        if sequence.request.params.prompt_logprobs is not None:
            return 0  # fed in chunks of another size
        return min(sequence.cached, (sequence.prompt_length - 1) // self._chunk * self._chunk)

    def _scope(self, sequence: Sequence) -> str:
        return "" if self._across else sequence.request.scope

    def _digest(self, sequence: Sequence, before: CachedBlock | None, tokens: tuple[int, ...]) -> bytes:
        if before is not None:
            return block_digest(before.digest, tokens)
        scope = hashlib.sha256(self._scope(sequence).encode("utf-8", "surrogatepass")).digest()
        return block_digest(scope, tokens)

    def _is(self, one: CachedBlock, sequence: Sequence, before: CachedBlock | None, tokens: tuple[int, ...]) -> bool:
        return one.before is before and one.tokens == tokens and one.scope == self._scope(sequence)

    def _drop(self, block: int) -> None:
        """Forget a block and all that follow it: nobody could find them any more."""
        one = self._of_block.get(block)
        lost = [] if one is None else [one]
        if one is not None and one.before is not None:
            one.before.after.discard(one)
        while lost:
            gone = lost.pop()
            lost.extend(gone.after)
            del self._found[gone.digest], self._of_block[gone.block]
            self._pool.forget(gone.block)


def _tokens(sequence: Sequence, place: int) -> tuple[int, ...]:
    """A block's tokens, and the one after them."""
    return tuple(sequence.tokens[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE + 1])
