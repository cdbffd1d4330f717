"""What every engine under measurement looks like to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.summary import Run

__all__ = ["Contestant", "Entry", "Prompt", "Setting"]


@dataclass(frozen=True)
class Prompt:
    """A prompt, as the ids that every engine is given."""

    name: str
    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What all engines share.

    Attributes:
        gguf: The model's file: llama.cpp reads it as it is.
        folder: The same weights unpacked to bf16 safetensors.
        num_threads: CPU threads each engine may use.
        max_length: Longest sequence, prompt and output together.
    """

    gguf: Path
    folder: Path
    num_threads: int
    max_length: int


class Contestant(Protocol):
    """An engine with fixed settings: generates greedily, past any end-of-sequence, one prompt at a time."""

    def generate(self, prompt: Prompt, num_tokens: int) -> Run:
        """Generate exactly `num_tokens` tokens; the benchmark fills in engine and repeat."""

    def describe(self) -> dict[str, Any]:
        """Give the settings that matter, for the record."""

    def close(self) -> None:
        """Let go of the model."""


@dataclass(frozen=True)
class Entry:
    """A line of the programme: a name and how to make its engine."""

    name: str
    make: Callable[[Setting], Contestant]


Entries = Sequence[Entry]
