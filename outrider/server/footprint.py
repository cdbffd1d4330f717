"""What keeps a server that runs for weeks from growing with all the requests it ever saw.

Nothing here may import torch: bounds on native code are read when that is first used.
"""

from __future__ import annotations

import gc
import os

__all__ = ["bound_native_stores", "settle"]

# oneDNN keeps what it made for each shape of a product, 0.5 MB and more for each; torch keeps, in a store of its own,
# what led there, a quarter of a megabyte each. Both hold 1024 by default, and nearly every number of rows is a shape.
# One shape takes two places of the first store and one of the second. These hold what a few rounds need; to make it
# anew takes half a millisecond.
STORES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "64"}


def bound_native_stores() -> None:
    """Bound what native code remembers of shapes, unless the environment says otherwise; before the first product."""
    for name, capacity in STORES.items():
        os.environ.setdefault(name, capacity)


def settle() -> None:
    """Take all that is there now out of later garbage collections: walking over it stops every thread for long.

    The last collection finds nothing, and counts it: a full collection comes when what is new exceeds a quarter of what
    the last one found. Without it that would be a quarter of all that was loaded, and garbage would pile up to there.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
