"""A synthetic pair whose draft agrees more or less often, depending on where in the text it stands.

`outrider.bench.pair` makes drafts of one agreement. What such a draft guesses lies in the order of its head's rows
alone. So a draft that is always right is written, and rows of its head change places: in each region of the text as
many as that region's agreement asks for. One engine then serves every agreement, and a mix: the prompt decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.round_runs import facts_of
from outrider.bench.pair import Saying, open_pair, write_draft, write_pair
from outrider.bench.saying import STRETCH
from outrider.bench.shapes import parse_shape

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MixedPair", "mixed_guesses", "mixed_pair"]

HEAD = "lm_head.weight"
MADE = "mixed.json"  # what the draft's head was made for: written last


@dataclass(frozen=True)
class MixedPair:
    """A pair on disk.

    Attributes:
        target, draft: The checkpoint folders.
        saying: What the target says.
        agreements: Of the regions, in the order in which they lie on the cycle.
    """

    target: Path
    draft: Path
    saying: Saying
    agreements: tuple[float, ...]

    @property
    def region(self) -> int:
        """Tokens of a region: whole stretches, over which agreement is exact."""
        return _region(len(self.saying.cycle), len(self.agreements))

    def prompts(self, agreement: float, count: int, length: int, room: int) -> list[list[int]]:
        """Give prompts after which `room` tokens stay within the region of an agreement, spread over it."""
        begin = self.agreements.index(agreement) * self.region
        free = self.region - room - 1
        if free <= 0:
            raise SystemExit(
                f"texts of {room} tokens do not fit into regions of {self.region}; use a larger vocabulary"
            )
        cycle, steps = self.saying.cycle, torch.arange(-length, 0)
        starts = [begin + 1 + place * free // count for place in range(count)]  # the last token given is in it, too
        return [cycle[(start + steps) % len(cycle)].tolist() for start in starts]


def mixed_pair(
    work: Path, *, target: str, draft: str, agreements: tuple[float, ...], seed: int, dtype: str, device: str
) -> MixedPair:
    """Give the pair in a folder: as an earlier run left it, or newly written."""
    shape = parse_shape(target)
    small = parse_shape(draft, shape.vocab)
    wanted = {"draft": small.record(), "seed": seed, "dtype": dtype, "agreements": list(agreements)}
    place, folder = {"seed": seed, "device": device}, work / "mixed-draft"
    known = facts_of(work / "target")
    if [known.get(name) for name in ("shape", "seed", "dtype")] != [shape, seed, dtype]:
        write_pair(
            work, target=shape, draft=small, agreement=1.0, num_prompts=1, dtype=dtype, force=True, **place  # type: ignore[arg-type]
        )  # fmt: skip
    if _made(folder) != wanted:
        (folder / MADE).unlink(missing_ok=True)
        write_draft(folder, target=work / "target", draft=small, agreement=1.0, device=device, force=True)
        saying = open_pair(work / "target", folder).saying
        _reorder(folder, saying.following, mixed_guesses(saying, seed, agreements))
        (folder / MADE).write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    return MixedPair(work / "target", folder, open_pair(work / "target", folder).saying, agreements)


def mixed_guesses(saying: Saying, seed: int, agreements: tuple[float, ...]) -> torch.Tensor:
    """Give what the mixed draft says after each token, ``[V]``: in each region it errs as one of its agreement."""
    vocab = len(saying.cycle)
    guesses = saying.following.clone()
    for number, agreement in enumerate(agreements):
        tokens = saying.cycle[number * _region(vocab, len(agreements)) :][: _region(vocab, len(agreements))]
        other = Saying.of(vocab, seed, agreement).guesses
        wrong = tokens[other[tokens] != saying.following[tokens]]
        guesses[wrong] = saying.following[wrong].roll(1)
    return guesses


def _region(vocab: int, count: int) -> int:
    return vocab // count // STRETCH * STRETCH or vocab // count


def _reorder(folder: Path, following: torch.Tensor, guesses: torch.Tensor) -> None:
    """Let the head say `guesses`: the row of the token that followed each token becomes that of its guess."""
    path, begin, shape = _head(folder)
    rows = np.memmap(path, dtype=np.uint8, mode="r+", offset=begin, shape=(shape[0], shape[1]))
    before = np.array(rows)
    rows[guesses.numpy()] = before[following.numpy()]
    rows.flush()


def _head(folder: Path) -> tuple[Path, int, tuple[int, int]]:
    """Find the head in a checkpoint: its file, its first byte, its rows and the bytes of one."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        if HEAD in header:
            begin, end = header[HEAD]["data_offsets"]
            rows = header[HEAD]["shape"][0]
            return path, 8 + size + begin, (rows, (end - begin) // rows)
    raise SystemExit(f"{folder} has no {HEAD}")


def _made(folder: Path) -> Any:
    try:
        return json.loads((folder / MADE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
