"""Rows' texts on the host, read as they grow: a round reads the tokens that are new to it, not the whole text again."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.proposal import Proposal
from outrider.sampling.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.draft.drafter import DraftRows

__all__ = ["News", "padded", "read_news"]

CHECKED = 8  # known tokens that are read again, to notice a slot that changed hands unannounced
TOGETHER = 128  # rows that have no more to read are read in one transfer


class News(NamedTuple):
    """What one row has to tell: whether the known text still stands, and the tokens after it (else the whole text)."""

    stands: bool
    tokens: list[int]


def read_news(rows: DraftRows, known: Sequence[array[int]], lengths: Sequence[int]) -> list[News]:
    """Read what each row says beyond what is known of it.

    Args:
        rows: The rows, `host_lengths` exact: those of a drafter that is not `device_side`.
        known: What was read of each row so far; empty for nothing.
        lengths: How far to read each row, at most its length.
    """
    begins = [max(0, len(text) - CHECKED) if len(text) <= end else 0 for text, end in zip(known, lengths, strict=True)]
    short = [row for row, (begin, end) in enumerate(zip(begins, lengths, strict=True)) if end - begin <= TOGETHER]
    found = dict(zip(short, _windows(rows, [(begins[row], lengths[row]) for row in short], short), strict=True))
    news = []
    for row, text in enumerate(known):
        begin, end = begins[row], lengths[row]
        read = found[row] if row in found else rows.tokens[row, begin:end].tolist()
        checked = len(text) - begin
        if len(text) <= end and array("q", read[:checked]) == text[begin:]:
            news.append(News(True, read[checked:]))
        else:
            news.append(News(False, read if begin == 0 else rows.tokens[row, :end].tolist()))
    return news


def _windows(rows: DraftRows, spans: list[tuple[int, int]], members: list[int]) -> list[list[int]]:
    """Read a stretch of each of some rows, all in one transfer."""
    width = max((end - begin for begin, end in spans), default=0)
    if not width:
        return [[] for _ in spans]
    device = rows.tokens.device
    begins = upload([begin for begin, _ in spans], device)
    places = (begins[:, None] + torch.arange(width, device=device)).clamp(max=rows.tokens.shape[1] - 1)
    index = None if len(members) == len(rows.slots) else upload(members, device)
    read = (rows.tokens if index is None else rows.tokens[index]).gather(1, places).tolist()
    return [window[: end - begin] for window, (begin, end) in zip(read, spans, strict=True)]


def padded(guesses: Sequence[Sequence[int]], num_tokens: int, device: torch.device) -> Proposal:
    """Give chains that were guessed on the host as a proposal ``[B, num_tokens]``; they are no longer than that."""
    filled = [[*chain, *[0] * (num_tokens - len(chain))] for chain in guesses]
    tokens = torch.tensor(filled, dtype=torch.long).view(len(filled), num_tokens)
    return Proposal(tokens, torch.tensor([len(chain) for chain in guesses], dtype=torch.long)).to(device)
