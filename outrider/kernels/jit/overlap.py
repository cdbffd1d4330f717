"""Programmatic dependent launch (Hopper): the next kernel starts early, prefetches weights, and waits for its inputs.

Every kernel of a forward pass is launched with ``launch_pdl=overlaps(device)`` and ``OVERLAP=overlaps(device)``, and
calls both functions: a chain is only safe when each link waits for the one before it.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.jit.device_function import device_function

__all__ = ["ask_ahead", "ask_for", "release_dependents", "wait_for_inputs"]


@device_function
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Block until all earlier kernels are done and what they wrote can be read."""
    if OVERLAP:
        gdc_wait()


@device_function
def release_dependents(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start wherever there is room."""
    if OVERLAP:
        gdc_launch_dependents()


@device_function
def ask_for(addresses, wanted):
    """Ask L2 for the lines of these addresses where `wanted` (int32) is above 0; nothing waits for them."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [addresses, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@device_function
def ask_ahead(rows, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Ask L2 for COUNT numbers (BLOCK: the next power of two) from each of these addresses; nothing waits for them."""
    if OVERLAP:
        LINE: tl.constexpr = 512 // rows.dtype.element_ty.primitive_bitwidth  # numbers in 64 bytes
        PIECES: tl.constexpr = BLOCK // LINE if BLOCK > LINE else 1
        piece = tl.arange(0, PIECES) * LINE
        there = wanted[:, None] & (piece < COUNT)[None, :]
        ask_for(rows[:, None] + piece[None, :], there.to(tl.int32))
