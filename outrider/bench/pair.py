"""Synthetic pairs: a target and a draft of real sizes, whose text and whose agreement are known beforehand.

The greedy text is a random cycle through the whole vocabulary. Embedding rows are random directions, and the head's row
of the token that follows t is the embedding of t: whatever t is fed, the head finds its successor, by a wide margin.
The layers between cost what real ones cost, but their output projections are tiny, so they add only noise. The draft
has a cycle of its own that differs on a chosen share of the tokens. Both are ordinary checkpoints, so any engine can
run them, and no weights need to be downloaded to compare engines.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.bench.saying import Saying
from outrider.bench.shapes import Shape, parse_shape
from outrider.bench.shards import INDEX, PIECE_BYTES, Weight, normal, num_bytes, write_weights
from outrider.errors import CapacityError, ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    Advance = Callable[[int, int], None]

__all__ = ["Pair", "Saying", "open_pair", "read_facts", "write_draft", "write_pair"]

FACTS, PROMPTS = "meta.json", "prompt_ids.json"
NOISE = 1e-3  # of the projections back into the residual stream
LOGIT = 40.0  # of the token that follows; all others stay below half of it
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OURS = ("config.json", "generation_config.json", FACTS, PROMPTS, INDEX)


@dataclass(frozen=True)
class Pair:
    """A pair on disk, and what it says.

    Attributes:
        target, draft: The checkpoint folders.
        agreement: Share of tokens on which the draft agrees.
        saying: The cycle, the successors, the guesses.
        prompts: Token ids that lie on the cycle, as prompt_ids.json has them.
    """

    target: Path
    draft: Path
    agreement: float
    seed: int
    saying: Saying
    prompts: list[list[int]]

    @property
    def cycle(self) -> torch.Tensor:
        """The vocabulary in the order in which the target says it, ``[V]``."""
        return self.saying.cycle

    @property
    def following(self) -> torch.Tensor:
        """The token after each token, ``[V]``."""
        return self.saying.following


def write_pair(
    out: Path | str,
    *,
    target: str | Shape = "llama-3.1-8b",
    draft: str | Shape = "llama-3.2-1b",
    agreement: float = 0.8,
    seed: int = 0,
    dtype: str = "bfloat16",
    num_prompts: int = 16,
    prompt_length: int = 200,
    device: torch.device | str | None = None,
    force: bool = False,
    advance: Advance | None = None,
) -> Pair:
    """Write OUT/target and OUT/draft, and give what they say.

    The text depends on vocabulary, seed and agreement alone; the weights also on the device they were drawn on.

    Args:
        out: The folder; it is made.
        target, draft: Names or sizes (see `parse_shape`); the draft takes the target's vocabulary.
        agreement: Share of tokens on which the draft says what the target says, 0 to 1.
        dtype: "bfloat16", "float16" or "float32".
        num_prompts, prompt_length: Of prompt_ids.json in the target's folder.
        device: Where weights are drawn; by default a card where there is one.
        force: Replace a pair that is there.
        advance: Told, after each piece, the bytes written and the bytes in all.

    Raises:
        ConfigError: A bad setting, or the folder is not empty.
        CapacityError: The disk is too small; the message has both numbers.
    """
    out = Path(out).expanduser()
    shape = parse_shape(target)
    small = parse_shape(draft, shape.vocab)
    _check(agreement, num_prompts, prompt_length, shape)
    kind, place = _dtype(dtype), _device(device)
    _check_folder(out, force)
    saying = Saying.of(shape.vocab, seed, agreement)
    _make_room([(out / "target", shape), (out / "draft", small)], kind)
    tell = _Counter(num_bytes(shape.tensors(), kind) + num_bytes(small.tensors(), kind), advance)
    prompts = saying.prompts(num_prompts, prompt_length)
    facts: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": str(place)}
    _write(out / "target", shape, saying.following, facts | {"role": "target"}, tell, prompts)
    _write(out / "draft", small, saying.guesses, facts | {"role": "draft", "agreement": agreement}, tell)
    return Pair(out / "target", out / "draft", agreement, seed, saying, prompts)


def write_draft(
    folder: Path | str,
    *,
    target: Path | str,
    draft: str | Shape = "llama-3.2-1b",
    agreement: float = 0.8,
    device: torch.device | str | None = None,
    force: bool = False,
    advance: Advance | None = None,
) -> Pair:
    """Write one more draft, of another agreement or size, for the synthetic target in the folder `target`.

    Raises:
        ConfigError: A bad setting, or the folder is not empty.
        ModelLoadError: `target` was not written by `write_pair`.
        CapacityError: The disk is too small.
    """
    folder, target = Path(folder).expanduser(), Path(target).expanduser()
    known = read_facts(target)
    small = parse_shape(draft, known["shape"].vocab)
    _check(agreement, 1, 1, small)
    kind, place = _dtype(known["dtype"]), _device(device)
    _check_folder(folder, force)
    _make_room([(folder, small)], kind)
    saying = Saying.of(small.vocab, known["seed"], agreement)
    facts = {"seed": known["seed"], "dtype": known["dtype"], "device": str(place)}
    tell = _Counter(num_bytes(small.tensors(), kind), advance)
    _write(folder, small, saying.guesses, facts | {"role": "draft", "agreement": agreement}, tell)
    return open_pair(target, folder)


def open_pair(target: Path | str, draft: Path | str) -> Pair:
    """Give what a target and a draft on disk say; nothing but small files are read.

    Raises:
        ModelLoadError: They were not written here, or not for each other.
    """
    target, draft = Path(target).expanduser(), Path(draft).expanduser()
    one, other = read_facts(target), read_facts(draft)
    if (one["seed"], one["shape"].vocab) != (other["seed"], other["shape"].vocab):
        raise ModelLoadError(f"{draft} was not written for {target}: seeds or vocabularies differ")
    agreement = other.get("agreement", 1.0)
    prompts = json.loads((target / PROMPTS).read_text(encoding="utf-8"))
    return Pair(target, draft, agreement, one["seed"], Saying.of(one["shape"].vocab, one["seed"], agreement), prompts)


def read_facts(folder: Path | str) -> dict[str, Any]:
    """Give what meta.json says of a synthetic checkpoint: role, shape (a `Shape`), seed, dtype, agreement.

    Raises:
        ModelLoadError: The folder has none, or not one of ours.
    """
    path = Path(folder).expanduser() / FACTS
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts | {"shape": Shape(**facts["shape"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(
            f"{path} does not tell of a synthetic model ({type(error).__name__}); write the pair with `outrider pair`"
        ) from None


# --- one checkpoint


def _write(
    folder: Path,
    shape: Shape,
    following: torch.Tensor,
    facts: dict[str, Any],
    tell: _Counter,
    prompts: list[list[int]] | None = None,
) -> None:
    """Write one folder; meta.json comes last, so that a folder that has one is whole."""
    dtype = _DTYPES[facts["dtype"]]
    folder.mkdir(parents=True, exist_ok=True)
    for path in _replaced(folder):
        path.unlink()
    weights = _Weights(shape, following, f"{facts['seed']}/{facts['role']}", dtype, torch.device(facts["device"]))
    write_weights(folder, weights.all(), tell)
    del weights
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # whoever goes on in this process finds the card as it was
    _write_json(folder / "config.json", shape.config(facts["dtype"]))
    _write_json(folder / "generation_config.json", {"do_sample": False, "bos_token_id": None, "eos_token_id": None})
    if prompts is not None:
        (folder / PROMPTS).write_text(json.dumps(prompts) + "\n", encoding="utf-8")
    _write_json(folder / FACTS, {**facts, "shape": shape.record()})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


class _Weights:
    """Draws a model's weights piece by piece; each piece has its own seed, so their order does not matter."""

    def __init__(
        self, shape: Shape, following: torch.Tensor, seed: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._seed, self._dtype, self._device = shape, seed, dtype, device
        before = torch.empty_like(following)
        before[following] = torch.arange(shape.vocab)
        self._before = before.to(device)  # the token that each token follows
        self._embedding = self._directions()  # [V, hidden], once for the embedding and for the head

    def all(self) -> list[Weight]:
        """Give every weight, drawn when it is asked for."""
        shapes = self._shape.tensors()
        return [Weight(name, shape, self._dtype, self._drawer(name, shape)) for name, shape in shapes.items()]

    def _drawer(self, name: str, shape: tuple[int, ...]) -> Callable[[int, int], torch.Tensor]:
        if len(shape) == 1:
            return lambda start, stop: torch.ones(stop - start, dtype=self._dtype, device=self._device)
        if name == "model.embed_tokens.weight":
            return lambda start, stop: self._embedding[start:stop]
        if name == "lm_head.weight":
            scale = LOGIT / self._shape.hidden
            return lambda start, stop: self._embedding[self._before[start:stop]] * scale
        std = NOISE if name.endswith(("o_proj.weight", "down_proj.weight")) else 1 / math.sqrt(shape[1])
        return lambda start, stop: self._normal(f"{name}/{start}", (stop - start, shape[1])).mul_(std)

    def _directions(self) -> torch.Tensor:
        """Draw a random direction for each token, of the length that leaves an RMSNorm nothing to do."""
        shape, rows = self._shape, max(1, PIECE_BYTES // (4 * self._shape.hidden))
        found = torch.empty(shape.vocab, shape.hidden, dtype=self._dtype, device=self._device)
        for start in range(0, shape.vocab, rows):
            piece = self._normal(f"embed/{start}", tuple(found[start : start + rows].shape), torch.float32)
            found[start : start + rows] = piece / piece.square().mean(1, keepdim=True).sqrt()
        return found

    def _normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return normal(f"{self._seed}/{name}", shape, dtype or self._dtype, self._device)


# --- checks before anything is written


class _Counter:
    """Adds up the bytes written and tells of them; pieces come from several threads."""

    def __init__(self, total: int, advance: Advance | None) -> None:
        self._total, self._advance = total, advance
        self._done, self._lock = 0, threading.Lock()

    def __call__(self, more: int) -> None:
        with self._lock:
            self._done += more
            if self._advance is not None:
                self._advance(self._done, self._total)


def _check(agreement: float, num_prompts: int, prompt_length: int, shape: Shape) -> None:
    if not 0 <= agreement <= 1:
        raise ConfigError(f"agreement must be in [0, 1], got {agreement!r}")
    if num_prompts < 1:
        raise ConfigError(f"num_prompts must be 1 or more, got {num_prompts!r}")
    if not 1 <= prompt_length < shape.positions:
        raise ConfigError(f"prompt_length must be in [1, {shape.positions - 1}], got {prompt_length!r}")


def _check_folder(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name another folder, or replace what is there with --force")


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _device(device: torch.device | str | None) -> torch.device:
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(place)!r} was asked for, but this torch sees no CUDA GPU; use cpu")
    return place


def _replaced(folder: Path) -> list[Path]:
    """Give the files of an earlier checkpoint in `folder`; nobody else's are ever deleted."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name in _OURS or path.suffix == ".safetensors"]


def _make_room(checkpoints: list[tuple[Path, Shape]], dtype: torch.dtype) -> None:
    """Check that the disk has room for all checkpoints, counting what they replace."""
    needed = sum(num_bytes(shape.tensors(), dtype) for _, shape in checkpoints)
    there = next(path for path in (checkpoints[0][0], *checkpoints[0][0].resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    free += sum(path.stat().st_size for folder, _ in checkpoints for path in _replaced(folder))
    if needed > free:
        raise CapacityError(
            f"the checkpoints need {needed:,} bytes, but {there} has {free:,} free; "
            "choose another folder, smaller shapes, or a narrower dtype"
        )
