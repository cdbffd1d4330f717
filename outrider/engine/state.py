"""The engine's rows on the device: token buffers, lengths, block tables and sampling rules, one row a slot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.draft.drafter import DraftRows
from outrider.model.kv_cache import BLOCK_SIZE, TRASH_BLOCK, blocks_for
from outrider.sampling.rules import RuleFlags, Rules, RuleTable
from outrider.sampling.upload import put, upload

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from outrider.sequence import Sequence

__all__ = ["DeviceState", "Rows"]


@dataclass(frozen=True)
class Rows:
    """B rows of the state, gathered for one pass.

    Attributes:
        slots: Their slots; the idle slot stands in where a pass is padded.
        index: The same on the device, ``[B]``.
        tokens: ``[B, L]``, a copy: a lone drafter may put its guesses behind the rows' lengths.
        lengths: Committed tokens, ``[B]``.
        host_lengths: The most they can be, as far as the host knows: it may lag a round behind.
        tables: Blocks, ``[B, blocks]``.
        start: First cache slot of the only row, where its blocks lie in order and its length is known.
        rules: Sampling parameters.
        features: See `DraftRows`.
    """

    slots: tuple[int, ...]
    index: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    host_lengths: tuple[int, ...]
    tables: torch.Tensor
    start: int | None
    rules: Rules
    features: torch.Tensor | None = None

    def drafting(self, independent: bool, members: tuple[int, ...] = ()) -> DraftRows:
        """Give what a drafter sees of these rows, or of some `members`, by their places."""
        seen = DraftRows(
            slots=self.slots,
            index=self.index,
            tokens=self.tokens,
            lengths=self.lengths,
            host_lengths=self.host_lengths,
            tables=self.tables,
            start=self.start,
            rules=self.rules,
            independent=independent,
            features=self.features,
        )
        return seen.picked(members) if 0 < len(members) < len(self.slots) else seen


class DeviceState:
    """Fixed-shape tensors, the source of truth between rounds.

    Args:
        num_slots: Rows that sequences can hold; one more is kept idle, to pad passes with.
        max_length: Longest sequence.
        lookahead: Guesses a round at most: each row has room for them behind its last token.
        device: Where the state lives.
        features: What the target keeps of hidden states; None where no drafter asked.
    """

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        lookahead: int,
        device: torch.device,
        features: torch.Tensor | None = None,
    ) -> None:
        self.features = features
        self.idle = num_slots
        width = max_length + lookahead + 1
        self.tokens = torch.zeros(num_slots + 1, width, dtype=torch.long, device=device)
        self.lengths = torch.ones(num_slots + 1, dtype=torch.long, device=device)
        self.limits = torch.ones(num_slots + 1, dtype=torch.long, device=device)
        self.tables = torch.full((num_slots + 1, blocks_for(width)), TRASH_BLOCK, dtype=torch.long, device=device)
        self.rules = RuleTable(num_slots + 1, device)
        self.device = device
        self._free = list(range(num_slots - 1, -1, -1))
        self._holders: dict[int, Sequence] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def holder(self, slot: int) -> Sequence | None:
        """The sequence in a slot."""
        return self._holders.get(slot)

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a slot and write its tokens and rules there."""
        slot = self._free.pop()
        sequence.slot = slot
        self._holders[slot] = sequence
        put(sequence.tokens, self.tokens[slot, : len(sequence)])
        self._measure(slot, len(sequence), sequence.limit)
        request = sequence.request
        self.rules.write(
            slot,
            request.params,
            sample=sequence.index,
            prompt_length=sequence.prompt_length,
            stop_ids=sorted(request.end_ids),
            bad_words=request.bad_words,
        )

    def dismiss(self, sequence: Sequence) -> None:
        """Take the slot back; its blocks are no longer written."""
        assert sequence.slot is not None
        self.tables[sequence.slot] = TRASH_BLOCK
        self._measure(sequence.slot, 1, 1)
        del self._holders[sequence.slot]
        self._free.append(sequence.slot)
        sequence.slot = None

    def _measure(self, slot: int, length: int, limit: int) -> None:
        """Set a slot's length and limit. Not by assignment: to a single number on a card that waits for the card."""
        self.lengths[slot].fill_(length)
        self.limits[slot].fill_(limit)

    def extend(self, sequence: Sequence, blocks: Seq[int]) -> None:
        """Append blocks to a sequence's table."""
        self.replace(sequence, len(sequence.blocks), blocks)

    def replace(self, sequence: Sequence, begin: int, blocks: Seq[int]) -> None:
        """Put other blocks into a sequence's table, from its block `begin` on."""
        end = begin + len(blocks)
        put(blocks, self.tables[sequence.slot, begin:end])
        sequence.blocks[begin:end] = blocks

    def gather(self, sequences: Seq[Sequence], *, pad_to: int = 0, room: int = 0) -> Rows:
        """Gather the rows of some sequences, idle ones after them up to `pad_to`.

        On a CPU tokens are copied as far as the longest row and `room` more columns reach; on a card all are, so that
        shapes stay the same.
        """
        slots, lengths = self.places(sequences, pad_to), [sequence.reach for sequence in sequences]
        lengths += [1] * (len(slots) - len(lengths))
        width = self.tokens.shape[1] if self.device.type == "cuda" else min(self.tokens.shape[1], max(lengths) + room)
        index = upload(slots, self.device)
        return Rows(
            tuple(slots),
            index,
            self.tokens[index, :width],
            self.lengths[index],
            tuple(lengths),
            self.tables[index],
            _start(sequences[0]) if len(slots) == len(sequences) == 1 and not sequences[0].ahead else None,
            self.rules.select(slots),
            self.features,
        )

    def places(self, sequences: Seq[Sequence], pad_to: int) -> list[int]:
        """Give the slots of some sequences, and the idle one after them up to `pad_to`."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        padding = max(0, pad_to - len(slots))
        if padding:
            self._write_idle_rules()
        return slots + [self.idle] * padding

    def gather_at(self, index: torch.Tensor, flags: RuleFlags) -> Rows:
        """Gather whatever rows `index` ``[B]`` names when this runs: all on the device, for a captured round."""
        num_rows, width = len(index), self.tokens.shape[1]
        return Rows(
            (self.idle,) * num_rows,
            index,
            self.tokens[index],
            self.lengths[index],
            (width,) * num_rows,
            self.tables[index],
            None,
            self.rules.gather(index, flags),
            self.features,
        )

    def _write_idle_rules(self) -> None:
        from outrider.sampling.params import SamplingParams

        if not self.rules.holds(self.idle):
            self.rules.write(self.idle, SamplingParams(temperature=0, seed=0), prompt_length=1)


def _start(sequence: Sequence) -> int | None:
    """Give the first cache slot of a sequence whose blocks lie in order."""
    blocks = sequence.blocks
    if blocks and blocks[-1] - blocks[0] == len(blocks) - 1 and all(a < b for a, b in itertools.pairwise(blocks)):
        return blocks[0] * BLOCK_SIZE
    return None
