"""Python's collector walks over all that it tracks, a loaded model included: a quarter of a second, in mid-text."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["only_new_garbage"]

INTERPRETERS_OWN = 1000  # objects: Python 3.12 freezes 375 of its own as it starts


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Collect garbage meanwhile among what is made meanwhile; afterwards all is looked at as before.

    Where the caller has frozen something for good, that stands, and nothing is done here: thawing cannot tell whose it
    was.
    """
    if gc.get_freeze_count() > INTERPRETERS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
