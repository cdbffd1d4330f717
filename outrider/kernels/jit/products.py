"""Products of few rows with large weights, at the speed of memory: one launch for norm, product, gate and residual.

A program owns a tile of BLOCK_N weight rows (gated: half of them gate rows, half up rows) and a share of the inputs. It
streams the weights once through shared memory, with the tile as the left operand of the tensor cores, so that up to 16
rows of x cost what one does. The row's norm needs no pass of its own: the sum of squares is taken along the same loop
and scales the accumulator at the end. Where too few tiles exist to keep the card busy, SPLIT_K programs share a tile:
each writes its partial sums, and the one that comes last adds them in a fixed order and leaves the counter at zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.jit.device_function import device_function
from outrider.kernels.jit.overlap import ask_for, release_dependents, wait_for_inputs
from outrider.kernels.jit.unpack import unpack_bytes, unpack_nibbles

__all__ = ["product_kernel", "silu_mul_kernel"]


@device_function
def _activate(gate, ACTIVATION: tl.constexpr):
    """silu, or gelu by its tanh form, in fp32."""
    if ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate))
    else:  # tanh(z) = 2 sigmoid(2z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner))
    return result


@device_function
def _release_at(block, chosen, OVERLAP: tl.constexpr):
    """`release_dependents` when the loop comes to its chosen block: early enough to hide the next kernel's start.

    Not at once: the next kernel asks for its first weights when it starts, and what comes into L2 long before its use
    has been pushed out again by then.
    """
    if OVERLAP:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.eq.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.u32 $0, 0;}",
            "=r,r,r",
            [block, chosen],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@device_function
def _prefetch(weight_rows, first, last, BLOCK_BYTES: tl.constexpr, BLOCKS: tl.constexpr, LINE: tl.constexpr):
    """Ask L2 for the program's first blocks, LINE bytes a request; nothing waits for them.

    LINE 0: the bulk copy's prefetch, a few large requests; but its addresses go one by one through scalar registers.
    """
    WANTED: tl.constexpr = 128 // weight_rows.shape[0]  # requests a row that make one a thread, for four warps
    FEW: tl.constexpr = 1 if WANTED < 1 else (BLOCKS if WANTED > BLOCKS else WANTED)  # noqa: FURB136
    PIECES: tl.constexpr = FEW if LINE == 0 or LINE > BLOCK_BYTES else BLOCKS * BLOCK_BYTES // LINE
    LENGTH: tl.constexpr = BLOCKS * BLOCK_BYTES // PIECES
    starts = tl.arange(0, PIECES) * LENGTH
    sizes = tl.minimum((last - first) * BLOCK_BYTES - starts, LENGTH)
    addresses = (weight_rows.to(tl.pointer_type(tl.uint8)) + first * BLOCK_BYTES)[:, None] + starts[None, :]
    sizes = tl.broadcast_to(sizes[None, :], addresses.shape)
    if LINE == 0:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
            "=r,l,r",
            [addresses, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        ask_for(addresses, sizes)


@device_function
def _input_tile(x_rows, scale, block, alive, K, EVEN_K: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """One block of inputs [BLOCK_M, BLOCK] times the norm's weight, and each row's sum of squares."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = alive[:, None] if EVEN_K else alive[:, None] & (at < K)[None, :]
    tile = tl.load(x_rows[:, None] + at[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
    squares = tl.zeros([x_rows.shape[0]], tl.float32)
    if NORM:
        wide = tile.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        tile = (wide * scale.to(tl.float32)[None, :]).to(tile.dtype)
    return tile, squares


@device_function
def _norm_block(norm_weight, block, K, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """The norm's weight for one block of inputs. Loaded a block ahead of its use: Triton pipelines no narrow load."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    if NORM:
        scale = tl.load(norm_weight + at, mask=at < K, other=0.0, eviction_policy="evict_last")
    else:
        scale = tl.full([BLOCK], 1.0, tl.float32)
    return scale


@device_function
def _weight_tile(weight_rows, block, width, EVEN_K: tl.constexpr, BLOCK: tl.constexpr):
    """One block of stored weights [BLOCK_N, BLOCK]: read once, so first to leave the cache."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    if EVEN_K:
        tile = tl.load(weight_rows[:, None] + at[None, :], eviction_policy="evict_first")
    else:
        tile = tl.load(weight_rows[:, None] + at[None, :], mask=(at < width)[None, :], other=0)
    return tile


@device_function
def _accumulate(
    x_rows, weight_rows, norm_weight, first, last, release, alive, K,
    EVEN_K: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over blocks first..last-1: [BLOCK_N, BLOCK_M] products and [BLOCK_M] squares, fp32."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    scale = _norm_block(norm_weight, first, K, NORM, BLOCK_K)
    for block in range(first, last):
        _release_at(block, release, OVERLAP)
        coming = _norm_block(norm_weight, block + 1, K, NORM, BLOCK_K)
        weights = _weight_tile(weight_rows, block, K, EVEN_K, BLOCK_K)
        tile, more = _input_tile(x_rows, scale, block, alive, K, EVEN_K, NORM, BLOCK_K)
        if NORM:
            squares += more
        if KIND != "none":
            weights = unpack_bytes(weights, tile.dtype, KIND, FAST)
        total = tl.dot(weights, tl.trans(tile), total)
        scale = coming
    return total, squares


@device_function
def _accumulate_int4(
    x_rows, weight_rows, norm_weight, scales, rows, first, last, release, alive, N, K,
    EVEN_K: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for groups of BLOCK_K inputs: a byte holds an input of the group's first half and one of its second."""
    HALF: tl.constexpr = BLOCK_K // 2
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    scale = tl.load(scales + first * N + rows).to(tl.float32)
    for block in range(first, last):
        _release_at(block, release, OVERLAP)
        packed = _weight_tile(weight_rows, block, 0, True, HALF)  # rows are padded to whole groups
        coming = tl.load(scales + tl.minimum(block + 1, last - 1) * N + rows)  # ahead of its use: nothing pipelines it
        low_norm = _norm_block(norm_weight, 2 * block, K, NORM, HALF)
        high_norm = _norm_block(norm_weight, 2 * block + 1, K, NORM, HALF)
        low_x, low_squares = _input_tile(x_rows, low_norm, 2 * block, alive, K, EVEN_K, NORM, HALF)
        high_x, high_squares = _input_tile(x_rows, high_norm, 2 * block + 1, alive, K, EVEN_K, NORM, HALF)
        if NORM:
            squares += low_squares + high_squares
        low, high = unpack_nibbles(packed, low_x.dtype, FAST)
        part = tl.dot(low, tl.trans(low_x))
        part = tl.dot(high, tl.trans(high_x), part)
        total += part * scale[:, None]
        scale = coming.to(tl.float32)
    return total, squares


@device_function
def _gather_parts(
    total, squares, partials, counters, alive, tile, num_tiles,
    NORM: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave this program's part; the last to come returns the sums over all parts, and True."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N + BLOCK_M
    row, line = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    places = line[None, :] * BLOCK_N + row[:, None]
    here = partials + (tl.program_id(1) * num_tiles + tile) * SIZE
    tl.store(here + places, total, mask=alive[None, :])
    if NORM:
        tl.store(here + BLOCK_M * BLOCK_N + line, squares)
    tl.debug_barrier()  # all threads' parts are written before one thread counts
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for part in tl.static_range(SPLIT_K):
            there = partials + (part * num_tiles + tile) * SIZE
            total += tl.load(there + places, mask=alive[None, :], other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(there + BLOCK_M * BLOCK_N + line, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return total, squares, is_last


@device_function
def _finish(
    total, squares, out, bias, residual, scales, rows, tile, eps, M, N, K, stride_residual, stride_out,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scale, bias, gate and residual in fp32; one rounding; [BLOCK_N, BLOCK_M] sums to the rows of `out`."""
    if NORM:
        total *= tl.rsqrt(squares / K + eps)[None, :]
    if KIND == "int8" or KIND == "fp8":  # noqa: PLR1714 - Triton knows no sets
        total *= tl.load(scales + rows).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION == "none" else BLOCK_N // 2
    outputs = N
    if ACTIVATION != "none":
        outputs = N // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, WIDTH, BLOCK_M)), (1, 2, 0)))
        total = _activate(gate, ACTIVATION) * up
    column, line = tile * WIDTH + tl.arange(0, WIDTH), tl.arange(0, BLOCK_M)
    mask = (column < outputs)[:, None] & (line < M)[None, :]
    line = line.to(tl.int64)
    if RESIDUAL:
        place = residual + line[None, :] * stride_residual + column[:, None]
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + line[None, :] * stride_out + column[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, weight, out, bias, norm_weight, residual, scales, partials, counters, eps, M, N, K,
    stride_x, stride_weight, stride_residual, stride_out,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    FAST: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    RELEASE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[M, outputs] = epilogue(norm(x) @ weight.T); grid (tiles, SPLIT_K). N counts weight rows, K inputs."""
    tile = tl.program_id(0)
    local = tl.arange(0, BLOCK_N)
    if ACTIVATION == "none":
        rows = tl.minimum(tile * BLOCK_N + local, N - 1)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        rows = tl.minimum(tile * HALF + local % HALF, N // 2 - 1) + local // HALF * (N // 2)
    weight_rows = weight + rows.to(tl.int64) * stride_weight
    num_blocks = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_blocks, SPLIT_K)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, num_blocks)
    release = tl.maximum(first, last - RELEASE)
    if OVERLAP and PREFETCH > 0:
        WIDTH: tl.constexpr = (
            BLOCK_K // 2 if KIND == "int4" else BLOCK_K * weight.dtype.element_ty.primitive_bitwidth // 8
        )
        _prefetch(weight_rows, first, last, WIDTH, PREFETCH, LINE)
    wait_for_inputs(OVERLAP)
    line = tl.arange(0, BLOCK_M)
    alive = line < M
    x_rows = x + line.to(tl.int64) * stride_x
    if KIND == "int4":
        total, squares = _accumulate_int4(
            x_rows, weight_rows, norm_weight, scales, rows, first, last, release, alive, N, K,
            EVEN_K, NORM, OVERLAP, FAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total, squares = _accumulate(
            x_rows, weight_rows, norm_weight, first, last, release, alive, K,
            EVEN_K, NORM, OVERLAP, KIND, FAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    is_last = True
    if SPLIT_K > 1:
        total, squares, is_last = _gather_parts(
            total, squares, partials, counters, alive, tile, tl.num_programs(0), NORM, SPLIT_K, BLOCK_M, BLOCK_N
        )
    if is_last:
        _finish(
            total, squares, out, bias, residual, scales, rows, tile, eps, M, N, K, stride_residual, stride_out,
            ACTIVATION, NORM, BIAS, RESIDUAL, KIND, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def silu_mul_kernel(
    both, out, width, stride_both, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """out[m] = activation(both[m, :width]) * both[m, width:]; grid (rows, blocks of the width)."""
    release_dependents(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(both + row * stride_both + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride_both + width + at, mask=mask, other=0.0).to(tl.float32)
    result = _activate(gate, ACTIVATION) * up
    tl.store(out + row * width + at, result.to(out.dtype.element_ty), mask=mask)
