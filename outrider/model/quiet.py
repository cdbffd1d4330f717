"""Hush transformers while it loads: its progress bars and reports are not ours to show."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet_transformers"]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only errors, no bars; the former state comes back whatever happens."""
    from functools import partial

    import transformers.modeling_gguf_pytorch_utils as reader  # this one keeps a bar of its own
    from transformers.utils import logging as theirs

    logging: Any = theirs  # partly untyped

    bar: Any = getattr(reader, "tqdm", None)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if bar is not None:
        reader.tqdm = partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar  # type: ignore[attr-defined]
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
