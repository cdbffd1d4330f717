"""Set before torch is imported anywhere: tests run on shared cores, where spinning threads starve each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - without a card, Triton's interpreter runs the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
