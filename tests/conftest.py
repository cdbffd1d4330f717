"""Set before torch is imported anywhere: tests run on shared cores, where spinning threads starve each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
