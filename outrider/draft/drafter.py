"""What every drafter is: something that sees rows of tokens and guesses what comes next.

A drafter never sees the engine, does not choose how far it drafts, and may be wrong in any way: it can cost time,
never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from outrider.proposal import Proposal
    from outrider.sampling.rules import Rules

__all__ = ["DraftRows", "Drafter", "PartedDrafter", "WithCache", "WithoutCache"]


@dataclass(frozen=True)
class DraftRows:
    """B rows to draft for.

    Attributes:
        slots: Each row's slot in the engine: a drafter's own state is kept by slot.
        index: The same on the device, ``[B]``: what a captured round goes by.
        tokens: ``[B, L]``, this round's own copy: committed tokens, free to hold guesses after them.
        lengths: Committed tokens of each row, ``[B]``.
        host_lengths: The most that the lengths can be: the host may know of all rounds but the last.
        tables: Cache blocks of each row, ``[B, blocks]``.
        start: First cache slot of the only row, where its blocks lie in order.
        rules: Sampling parameters of each row.
        features: What is kept of the target's hidden states, ``[slots, width]``, by the same tables as keys and
            values: those of all tokens but the last committed one are right. None where no drafter asked for any.
        independent: Whether guesses must be drawn independently of the target's choice, with their q.
    """

    slots: tuple[int, ...]
    index: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    host_lengths: tuple[int, ...]
    tables: torch.Tensor
    start: int | None
    rules: Rules
    independent: bool
    features: torch.Tensor | None = None

    def picked(self, members: Sequence[int]) -> DraftRows:
        """Give some of the rows, by their places in this."""
        index = upload(members, self.lengths.device)
        return DraftRows(
            slots=tuple(self.slots[member] for member in members),
            index=self.index[index],
            tokens=self.tokens[index],
            lengths=self.lengths[index],
            host_lengths=tuple(self.host_lengths[member] for member in members),
            tables=self.tables[index],
            start=self.start,
            rules=self.rules.picked(index),
            independent=self.independent,
            features=self.features,
        )


class Drafter(Protocol):
    """Guesses next tokens. Rows come and go by slot; `release` says that a slot is somebody else's from now on."""

    @property
    def name(self) -> str:
        """What statistics call it."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence it can draft for; None: any."""

    @property
    def device_side(self) -> bool:
        """Whether guesses depend on device tensors alone, `slots` and `host_lengths` only bounding the work.

        Rounds may then start before the host has read the one before, and on a card be captured.
        """

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that it keeps of one token, beside what the target keeps; 0 without a cache."""

    @property
    def makes_trees(self) -> bool:
        """Whether guesses may branch: how many there are then says little about how many can be right."""

    @property
    def shares_blocks(self) -> bool:
        """Whether sequences that begin alike may have their first blocks in common.

        What it keeps in a full block must then be a function of the tokens up to the one after that block, so that
        whoever feeds them anew changes nothing.
        """

    def allocate(self, num_blocks: int) -> None:
        """Make its cache, with as many blocks as the target's: both go by one block table."""

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Make ready to draft for so many rows at once, of tables of so many places, before rounds are captured."""

    def missing(self, slot: int, length: int) -> int:
        """Count the tokens to feed before it can draft for a slot whose row has `length` tokens; 0 without a cache."""

    def slack(self, num_rows: int) -> int:
        """Count the missing tokens that a row need not be fed before a round of so many rows: guessing feeds them."""

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed the next `counts` of the tokens that each row's cache is missing."""

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Guess up to `num_tokens` tokens for every row; always ``[B, num_tokens]``, lengths as they turn out.

        In a tree, all its nodes count.
        """

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Learn how the last proposal fared: each row's length before the round, and its accepted guesses."""

    def release(self, slot: int) -> None:
        """Forget a slot."""

    def kept(self, slot: int) -> int:
        """Count the first tokens of a slot's row whose entries its cache holds for sure; 0 without a cache."""

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Learn that the blocks of a slot's first tokens are another row's (or copies), and hold their entries."""

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what its cache keeps in some blocks to others."""


class _CachedDraft(Protocol):
    """What makes the guesses: a model's runner, a head."""

    @property
    def context_length(self) -> int: ...

    @property
    def bytes_per_slot(self) -> int: ...

    def allocate(self, num_blocks: int) -> None: ...

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None: ...


class WithCache:
    """What a drafter says whose draft has a cache of its own: how far it reaches, and what it keeps of each slot.

    Args:
        draft: It.
    """

    shares_blocks = True

    def __init__(self, draft: _CachedDraft) -> None:
        self._keeper = draft
        self._cached: dict[int, int] = {}  # of each slot, how many first tokens' entries the cache holds

    @property
    def context_length(self) -> int | None:
        """Positions that the draft was made for."""
        return self._keeper.context_length

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that the draft's cache takes for one token of the target's."""
        return self._keeper.bytes_per_slot

    def allocate(self, num_blocks: int) -> None:
        """Make the draft's cache, for `num_blocks` of the target's blocks."""
        self._keeper.allocate(num_blocks)

    def kept(self, slot: int) -> int:
        """Count the first tokens of a slot's row whose entries the cache holds."""
        return self._cached.get(slot, 0)

    def slack(self, num_rows: int) -> int:
        """Whatever is missing is fed first."""
        return 0

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Take the entries of a slot's first tokens as they are."""
        self._cached[slot] = max(num_tokens, self.kept(slot))

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy what the draft's cache keeps in some blocks to others."""
        self._keeper.copy_blocks(source, target)

    def release(self, slot: int) -> None:
        """Forget a slot's cache."""
        self._cached.pop(slot, None)


class WithoutCache:
    """What a drafter says that keeps nothing on the device: there is nothing to make, to tune or to catch up with."""

    bytes_per_slot = 0
    shares_blocks = True

    def allocate(self, num_blocks: int) -> None:
        """Nothing is cached."""

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Nothing to make ready."""

    def missing(self, slot: int, length: int) -> int:
        """Nothing is cached, so nothing is missing."""
        return 0

    def slack(self, num_rows: int) -> int:
        """Nothing is missing."""
        return 0

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed nothing."""

    def kept(self, slot: int) -> int:
        """Nothing is cached."""
        return 0

    def adopt(self, slot: int, num_tokens: int) -> None:
        """There is nothing to take over."""

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """There is nothing to copy."""


@runtime_checkable
class PartedDrafter(Drafter, Protocol):
    """A drafter made of several, which is told of each part's fortune."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """What statistics call the parts; `Proposal.sources` counts them so."""

    def credit(self, slots: tuple[int, ...], accepted: tuple[tuple[int, ...], ...]) -> None:
        """Learn how many guesses of each part were accepted, row by row; -1 where it had none among them."""
