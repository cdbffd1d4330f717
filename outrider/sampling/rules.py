"""Every row's sampling parameters as device tensors of fixed shape, one row a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.sampling.random import mixed_seed
from outrider.sampling.upload import put, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.sampling.params import SamplingParams

__all__ = ["Prefix", "RuleFlags", "RuleTable", "Rules"]

SMALLEST = 1e-30  # what a caller asks below it would be 0 in fp32, or make scores infinite: another rule altogether
NOTHING = -1  # fills unused places of the ragged tables


@dataclass(frozen=True)
class Prefix:
    """What precedes each choice.

    Attributes:
        tokens: ``[B, L]``: committed tokens of each row, its guesses after them.
        ends: ``[B, T]``: how many of them precede the choice; also the absolute position of the token chosen.
    """

    tokens: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class RuleFlags:
    """Which kinds of rule any row of a round needs: known to the host, and part of what a captured round is."""

    random: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False
    banned: bool = False
    held: bool = False
    masked: bool = False

    @property
    def simple(self) -> bool:
        """Whether nothing but temperature shapes the choice."""
        shaped = self.penalised or self.biased or self.banned or self.held or self.masked
        return not (self.filtered or shaped)


@dataclass(frozen=True)
class Rules:
    """The sampling parameters of B rows, and which kinds of rule any of them needs."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    seeds: torch.Tensor
    prompt_lengths: torch.Tensor
    min_tokens: torch.Tensor
    stop_ids: torch.Tensor  # [B, NS], padded with -1
    bias_ids: torch.Tensor  # [B, NB], padded with -1
    bias_values: torch.Tensor  # [B, NB]
    bad_words: torch.Tensor  # [B, NW, LW], each padded with -1 on its left
    flags: RuleFlags
    masks: torch.Tensor | None = None  # int32 [B, T, ceil(V / 32)], an id a bit: what grammars allow at each position

    def masked(self, masks: torch.Tensor) -> Rules:
        """Give the same rules with what grammars allow, for positions known by now."""
        return replace(self, masks=masks, flags=replace(self.flags, masked=True))

    def to(self, device: torch.device) -> Rules:
        """Give the same rules on another device."""
        return self._mapped(lambda column: column.to(device))

    def picked(self, members: torch.Tensor) -> Rules:
        """Give the rules of the rows `members` ``[b]``."""
        return self._mapped(lambda column: column[members])

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Rules:
        changed: dict[str, Any] = {
            name: change(column) for name, column in vars(self).items() if isinstance(column, torch.Tensor)
        }
        return replace(self, **changed)


_SCALARS = {  # what lies side by side is written with one copy
    torch.float32: ("temperature", "top_p", "min_p", "presence", "frequency", "repetition"),
    torch.long: ("top_k", "seeds", "prompt_lengths", "min_tokens"),
}
_EMPTY: dict[str, list[Any]] = {"stop_ids": [], "bias_ids": [], "bias_values": [], "bad_words": [[NOTHING]]}


class RuleTable:
    """Holds the rules of every slot; a request's are written once, when it enters a slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._scalars = {
            dtype: torch.zeros(num_slots, len(names), dtype=dtype, device=device) for dtype, names in _SCALARS.items()
        }
        self._columns = {
            name: self._scalars[dtype][:, place]
            for dtype, names in _SCALARS.items()
            for place, name in enumerate(names)
        }
        self._ragged = {
            "stop_ids": torch.full((num_slots, 1), NOTHING, device=device),
            "bias_ids": torch.full((num_slots, 1), NOTHING, device=device),
            "bias_values": torch.zeros(num_slots, 1, device=device),
            "bad_words": torch.full((num_slots, 1, 1), NOTHING, device=device),
        }
        # What lies in the ragged ones is not written again; None where that is not known.
        self._written: dict[tuple[str, int], list[Any] | None] = {}
        self._params: dict[int, SamplingParams] = {}
        self._recent: tuple[tuple[int, ...], Rules] | None = None

    def write(
        self,
        slot: int,
        params: SamplingParams,
        *,
        sample: int = 0,
        prompt_length: int = 0,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Let `slot` follow `params` from now on.

        Args:
            slot: The row of the table.
            params: What was asked for; ``params.seed`` must be set.
            sample: Which of the request's n samples this is.
            prompt_length: Tokens of the prompt; what comes after counts as generated.
            stop_ids: Ids not to be chosen before ``params.min_tokens``.
            bad_words: Token sequences that must not be completed.
        """
        self._recent = None
        self._params[slot] = params
        values = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": max(params.top_p, SMALLEST),
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": max(params.repetition_penalty, SMALLEST),
            "seeds": mixed_seed(params.seed or 0, sample),
            "prompt_lengths": prompt_length,
            "min_tokens": params.min_tokens,
        }
        for dtype, names in _SCALARS.items():
            put([values[name] for name in names], self._scalars[dtype][slot])
        self._write_ragged("stop_ids", slot, list(stop_ids))
        self._write_ragged("bias_ids", slot, list(params.logit_bias))
        self._write_ragged("bias_values", slot, list(params.logit_bias.values()))
        width = max(map(len, bad_words), default=1)
        self._write_ragged(
            "bad_words", slot, [[NOTHING] * (width - len(word)) + list(word) for word in bad_words] or [[NOTHING]]
        )

    def _write_ragged(self, name: str, slot: int, value: list[Any]) -> None:
        if self._written.get((name, slot), _EMPTY[name]) == value:
            return
        self._written[name, slot] = None  # should it fail halfway
        table = self._ragged[name]
        fill = 0.0 if table.is_floating_point() else NOTHING
        row = upload(value, self._device, table.dtype)
        wanted = tuple(max(have, need) for have, need in zip(table.shape[1:], row.shape, strict=True))
        if wanted != tuple(table.shape[1:]):
            grown = torch.full((table.shape[0], *wanted), fill, dtype=table.dtype, device=self._device)
            _place(grown, slice(None), table)
            self._ragged[name] = table = grown
        table[slot] = fill
        _place(table, slice(slot, slot + 1), row[None])
        self._written[name, slot] = value

    def holds(self, slot: int) -> bool:
        """Whether rules were ever written for `slot`."""
        return slot in self._params

    def select(self, slots: Sequence[int]) -> Rules:
        """Gather the rules of the rows in `slots`; asked again for the same rows, give the same value."""
        key = tuple(slots)
        if self._recent is None or self._recent[0] != key:
            index = upload(key, self._device, torch.long)
            self._recent = (key, self.gather(index, self.flags(key)))
        return self._recent[1]

    def flags(self, slots: Sequence[int]) -> RuleFlags:
        """Say which kinds of rule the rows in `slots` need."""
        params = [self._params[slot] for slot in slots]
        drawn = [one for one in params if not one.greedy]
        return RuleFlags(
            random=bool(drawn),
            filtered=any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in drawn),
            penalised=any(
                one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1 for one in params
            ),
            biased=any(one.logit_bias for one in params),
            banned=any(one.bad_words for one in params),
            held=any(one.min_tokens for one in params),
        )

    def gather(self, index: torch.Tensor, flags: RuleFlags) -> Rules:
        """Gather rules on the device alone: rows ``[B]``. What a simple round does not read is left ungathered."""
        tables = self._columns | self._ragged
        read = ("temperature", "seeds") if flags.simple else tuple(tables)
        columns: dict[str, Any] = {name: table[index] if name in read else table for name, table in tables.items()}
        return Rules(**columns, flags=flags)

    def shapes(self, flags: RuleFlags) -> tuple[torch.Size, ...]:
        """Shapes of the ragged tables that `gather` reads: while they stay, so does the memory of a captured round."""
        return () if flags.simple else tuple(table.shape for table in self._ragged.values())


def _place(table: torch.Tensor, rows: slice, values: torch.Tensor) -> None:
    """Write the last columns of `table` (the first, where it is flat): bad words are padded on their left."""
    if table.dim() == 3:
        table[rows, : values.shape[1], table.shape[2] - values.shape[2] :] = values
    else:
        table[rows, : values.shape[1]] = values
