"""Programmatic dependent launch (Hopper): the next kernel starts early, prefetches weights, and waits for its inputs.

Every kernel of a forward pass is launched with ``launch_pdl=overlaps(device)`` and ``OVERLAP=overlaps(device)``, and
calls both functions: a chain is only safe when each link waits for the one before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["release_dependents", "wait_for_inputs"]


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Block until all earlier kernels are done and what they wrote can be read."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def release_dependents(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start wherever there is room."""
    if OVERLAP:
        gdc_launch_dependents()
