"""Hidden states of the target that a drafter reads: kept for every fed token, beside its keys and values.

A head (EAGLE, Medusa, MTP, a block drafter) guesses from what the target thought of each token. Kept in pages by the
same block tables as keys and values, features obey the same rule: feed what is not cached, and rollback is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.errors import CapacityError
from outrider.model.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.model.load import LoadedModel

__all__ = ["FeatureTap", "feature_pool", "last_hidden_tap", "unchanged"]


@dataclass(frozen=True)
class FeatureTap:
    """What to keep of each token.

    Attributes:
        layers: Which hidden states, numbered as in transformers' ``hidden_states``: 0 is the embedding, i what layer i
            takes, and the number of layers what comes out of the last norm.
        width: Numbers kept a token.
        project: ``[B, T, len(layers) * hidden]``, side by side in the order of `layers`, -> ``[B, T, width]``.
    """

    layers: tuple[int, ...]
    width: int
    project: Callable[[torch.Tensor], torch.Tensor]


def unchanged(hidden: torch.Tensor) -> torch.Tensor:
    """Project nothing: a tap of hidden states as they are."""
    return hidden


def last_hidden_tap(target: LoadedModel) -> FeatureTap:
    """Keep the hidden state after the last norm, as it is: what Medusa heads and MTP modules read."""
    config = target.model.config.get_text_config()
    return FeatureTap((int(config.num_hidden_layers),), int(config.hidden_size), unchanged)


def feature_pool(tap: FeatureTap, num_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make room for every slot's features, ``[slots, width]``.

    Raises:
        CapacityError: Memory does not suffice.
    """
    slots = num_blocks * BLOCK_SIZE
    try:
        pool = torch.empty(slots, tap.width, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        wanted = slots * tap.width * dtype.itemsize / 2**30
        raise CapacityError(
            f"hidden states of {slots} tokens for the drafter ({wanted:.2f} GiB) do not fit on {device}; "
            "lower max_model_len, max_num_seqs or the KV memory budget"
        ) from error
    pool[:BLOCK_SIZE] = 0  # the null block, which may be read
    return pool
