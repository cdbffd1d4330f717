"""Several drafters as one: the likeliest guesses of each row are taken, or all of them verified at once as a tree.

Lookup is nearly free and very good where text repeats; a model is dear and good everywhere. Parts stand from cheap to
dear. Two ways to mix:

- *choose*: each row takes the part whose guesses are worth most: as many as it makes, but no more than were right
  lately. A dear part is not even asked where a cheap one promises as much (where the host can look).
- *merge*: guesses of all parts become branches of one tree, common beginnings shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.config import MAX_TREE_NODES
from outrider.proposal import ROOT, Proposal
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import Drafter, DraftRows

__all__ = ["MixtureDrafter", "merged"]

HOPE = 8.0  # right guesses that a part is credited with before it was seen, in a row's first rounds
RATE = 0.3  # weight of the newest round in what a part is credited with
RETURN = 0.02  # share of the way back to HOPE that a part goes in each round in which another was taken
DEAR = 0.7  # a dearer part is asked where it promises this much more: what it promises, times this, is more


class MixtureDrafter:
    """Drafts with several drafters.

    Args:
        parts: The drafters, the cheapest first.
        num_slots: Slots of the engine, the idle one included.
        device: Where the engine's rows are.
        merge: Verify all guesses as one tree; otherwise choose for each row.
    """

    def __init__(self, parts: Sequence[Drafter], num_slots: int, device: torch.device, *, merge: bool = False) -> None:
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in self.parts)
        self.part_names = tuple(part.name for part in self.parts)
        self.makes_trees = merge or any(part.makes_trees for part in self.parts)
        self.shares_blocks = all(part.shares_blocks for part in self.parts)
        self.device_side = all(part.device_side for part in self.parts)
        self._merge = merge
        self._captured = self.device_side and device.type == "cuda"  # then all parts guess for all rows
        self._worth = torch.full((num_slots, len(self.parts)), HOPE, device=device)
        self._known: dict[int, list[float]] = {}  # the same on the host
        self._asked: dict[int, set[int]] = {}  # slots that each part made its last guesses for

    @property
    def context_length(self) -> int | None:
        """As far as any part reaches; one beyond its own reach is left out, see `propose`."""
        lengths = [part.context_length for part in self.parts]
        return None if None in lengths else max(length for length in lengths if length is not None)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that the parts keep of one token."""
        return sum(part.bytes_per_slot for part in self.parts)

    def allocate(self, num_blocks: int) -> None:
        """Let the parts make their caches."""
        for part in self.parts:
            part.allocate(num_blocks)

    def tune(self, num_rows: Sequence[int], places: int) -> None:
        """Make all parts ready."""
        for part in self.parts:
            part.tune(num_rows, places)

    def missing(self, slot: int, length: int) -> int:
        """Count what the part that lacks most lacks; one that the text has outgrown lacks nothing."""
        return max((part.missing(slot, length) for part in self.parts if self._reaches(part, length)), default=0)

    def slack(self, num_rows: int) -> int:
        """Count what no part that keeps anything need be fed."""
        return min((part.slack(num_rows) for part in self.parts if part.bytes_per_slot), default=0)

    def catch_up(self, rows: DraftRows, counts: tuple[int, ...]) -> None:
        """Feed each part what it lacks, no more than `counts`."""
        for part in self.parts:
            lacking = [
                (place, min(count, part.missing(slot, length)))
                for place, (slot, length, count) in enumerate(zip(rows.slots, rows.host_lengths, counts, strict=True))
                if self._reaches(part, length)
            ]
            lacking = [(place, count) for place, count in lacking if count]
            if lacking:
                places, owed = zip(*lacking, strict=True)
                part.catch_up(rows if len(places) == len(rows.slots) else rows.picked(places), owed)

    def propose(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Let the parts guess, and take or join their guesses."""
        self._asked.clear()
        if self._merge and not rows.independent:
            return self._merged(rows, num_tokens)
        worth = self._worth[rows.index]
        best = Proposal.empty(len(rows.slots), num_tokens, worth.device)
        promised = torch.zeros_like(worth[:, 0])
        for number in range(len(self.parts)):
            better = DEAR * worth[:, number].clamp(max=num_tokens) > promised
            made = self._guesses(number, rows, num_tokens, better)
            if made is not None:
                hopes = torch.minimum(worth[:, number], made.positions_guessed().to(worth.dtype))
                best = _where(hopes > promised, made, best)
                promised = torch.maximum(hopes, promised)
        return best

    def _merged(self, rows: DraftRows, num_tokens: int) -> Proposal:
        """Join the parts' guesses, the dearest first: its nodes come before the others' where room is short."""
        room, tree = min(num_tokens, MAX_TREE_NODES), Proposal.empty(len(rows.slots), 0, rows.lengths.device)
        for left in range(len(self.parts), 0, -1):
            width = -(-room // left)
            room -= width
            made = self._guesses(left - 1, rows, width) if width else None
            tree = tree if made is None else merged(tree, made)
        return tree.widened(num_tokens)

    def _guesses(
        self, number: int, rows: DraftRows, num_tokens: int, wanted: torch.Tensor | None = None
    ) -> Proposal | None:
        """One part's guesses for the rows that it reaches, of those `wanted` ``[B]``; None where there are none."""
        part = self.parts[number]
        if self._captured:  # the host sees nothing of these rows: all are guessed for
            return _sourced(part.propose(rows, num_tokens), number)
        members = [place for place, length in enumerate(rows.host_lengths) if self._reaches(part, length + num_tokens)]
        if wanted is not None:
            chosen = wanted.tolist()
            members = [place for place in members if chosen[place]]
        if not members:
            return None
        self._asked[number] = {rows.slots[place] for place in members}
        if len(members) == len(rows.slots):
            return _sourced(part.propose(rows, num_tokens), number)
        made = _sourced(part.propose(rows.picked(members), num_tokens), number)
        nothing = Proposal.empty(len(rows.slots), num_tokens, rows.lengths.device)
        return nothing.with_rows(upload(members, rows.lengths.device), made)

    def commit(self, slots: tuple[int, ...], lengths: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        """Tell the parts that guessed; whether by their own guesses is not known, so as if none had been right."""
        for number, part in enumerate(self.parts):
            asked = set(slots) if self._captured else self._asked.get(number, set())
            rows = [(slot, length, 0) for slot, length in zip(slots, lengths, strict=True) if slot in asked]
            if rows:
                part.commit(*zip(*rows, strict=True))

    def credit(self, slots: tuple[int, ...], accepted: tuple[tuple[int, ...], ...]) -> None:
        """Learn how many guesses of each part were accepted, row by row; -1 where it had none among them."""
        for slot, counts in zip(slots, accepted, strict=True):
            known = self._known.setdefault(slot, [HOPE] * len(self.parts))
            for number, count in enumerate(counts):
                aim, rate = (HOPE, RETURN) if count < 0 else (float(count), RATE)
                known[number] += rate * (aim - known[number])
                self._worth[slot, number] = known[number]

    def kept(self, slot: int) -> int:
        """Count what all parts with a cache have."""
        return min((part.kept(slot) for part in self.parts if part.bytes_per_slot), default=0)

    def adopt(self, slot: int, num_tokens: int) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.adopt(slot, num_tokens)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Let all parts copy."""
        for part in self.parts:
            part.copy_blocks(source, target)

    def release(self, slot: int) -> None:
        """Forget a slot."""
        for part in self.parts:
            part.release(slot)
        self._known.pop(slot, None)
        self._worth[slot] = HOPE

    @staticmethod
    def _reaches(part: Drafter, length: int) -> bool:
        return part.context_length is None or length <= part.context_length


def merged(first: Proposal, second: Proposal) -> Proposal:
    """Join two proposals into trees of both: the second's guesses branch off where they differ from the first's.

    The second must be a chain; of the first, when it is a tree, the first path that it lists is followed. Rows' nodes
    stay a prefix: the second's begin where the first's end.
    """
    rows, width = second.tokens.shape
    shared = min(first.num_tokens, width)
    chain = first.parents_or_chain() == torch.arange(first.num_tokens, device=first.tokens.device) - 1
    same = (first.tokens[:, :shared] == second.tokens[:, :shared]) & chain[:, :shared].cumprod(1).bool()
    same &= first.within()[:, :shared] & second.within()[:, :shared]
    common = same.long().cumprod(1).sum(1, keepdim=True)
    added = torch.arange(width, device=common.device).expand(rows, -1)
    counts = (second.lengths[:, None] - common).clamp(min=0)
    tokens = second.tokens.gather(1, (added + common).clamp(max=width - 1))
    begin = first.lengths[:, None]
    parents = torch.where(added == 0, torch.where(common == 0, ROOT, common - 1), begin + added - 1)
    place = (begin + added).where(added < counts, first.num_tokens + width)  # one more column takes the rest

    def joined(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        room = mine.new_zeros(rows, width + 1)
        return torch.cat([mine, room], 1).scatter(1, place, theirs)[:, :-1]

    sources = joined(first.sources_or(0), second.sources_or(0))
    nodes = joined(first.tokens, tokens), joined(first.parents_or_chain(), parents)
    return Proposal(nodes[0], begin[:, 0] + counts[:, 0], None, nodes[1], sources)


def _sourced(proposal: Proposal, number: int) -> Proposal:
    sources = torch.full_like(proposal.tokens, number)
    return Proposal(proposal.tokens, proposal.lengths, proposal.probs, proposal.parents, sources)


def _where(taken: torch.Tensor, one: Proposal, other: Proposal) -> Proposal:
    """Rows of the one where `taken` ``[B]``, else of the other."""
    probs = parents = None
    if one.probs is not None or other.probs is not None:
        size = next(p.shape[-1] for p in (one.probs, other.probs) if p is not None)
        probs = torch.where(taken[:, None, None], one.probs_or_certain(size), other.probs_or_certain(size))
    if one.parents is not None or other.parents is not None:
        parents = torch.where(taken[:, None], one.parents_or_chain(), other.parents_or_chain())
    return Proposal(
        torch.where(taken[:, None], one.tokens, other.tokens),
        torch.where(taken, one.lengths, other.lengths),
        probs,
        parents,
        torch.where(taken[:, None], one.sources_or(0), other.sources_or(0)),
    )
