"""Every way to draft for tiny models on disk, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.eagle_checkpoints import write
from tests.test_heads_by_name import medusa_folder
from tests.tiny import tiny_target

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["WAYS", "source_of"]

WAYS: dict[str, dict[str, Any]] = {
    "draft tree": {"method": "draft_model", "tree": "auto"},
    "branches": {"method": "draft_model", "tree": "3x2x1"},
    "own layers": {"method": "early_exit", "exit_layer": 1},
    "own layers, tree": {"method": "early_exit", "exit_layer": 1, "tree": "auto"},
    "lookup or draft": {"method": "ngram+draft_model"},
    "lookup and draft": {"method": "ngram+draft_model", "tree": "auto"},
    "on the host": {"method": "suffix"},
    "host and draft": {"method": "suffix+draft_model", "tree": "auto"},
    "eagle": {"method": "eagle"},
    "eagle tree": {"method": "eagle", "tree": "auto"},
    "medusa": {"method": "medusa"},
    "medusa tree": {"method": "medusa", "tree": "auto"},
}


def source_of(name: str, draft: str, folder: Path) -> str | None:
    """Give what drafts in one of `WAYS`: `draft`, a head that is written for `tiny_target()`, or nothing of its own."""
    method = WAYS[name]["method"]
    if "draft_model" in method:
        return draft
    if method == "eagle":
        return str(write("eagle3", folder / "eagle", tiny_target()).folder)
    return str(medusa_folder(folder)) if method == "medusa" else None
