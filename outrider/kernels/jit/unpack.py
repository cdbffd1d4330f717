"""Stored bytes to the numbers that tensor cores take, in registers.

A draft's quantised weights are half or a quarter of the bytes, so the same memory speed delivers two to four times the
weights: what each costs to convert decides. Triton's own casts take some five instructions a weight, too many. For bf16
these do two weights in three or four, on pairs of 16-bit lanes.
"""

from __future__ import annotations

import triton.language as tl

from outrider.kernels.jit.device_function import device_function

__all__ = ["unpack_bytes", "unpack_nibbles"]

# 0x4300 is 128 in bf16, whose last bit is worth 1 there: or-ing 7 bits in adds them. An int8's sign bit turns the 128
# that is subtracted into 256 (0x4380).
_INT8 = tl.constexpr("""{
.reg .b32 a, b, p, q;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 p, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q, a, 0x00800080, 0x43004300, 0xea;
sub.rn.bf16x2 $0, p, q;
lop3.b32 p, b, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q, b, 0x00800080, 0x43004300, 0xea;
sub.rn.bf16x2 $1, p, q;
}""")

# e4m3's exponent and mantissa, moved to where bf16 has them, are the number times 2^-120 (subnormals too): 0x7b80 is
# 2^120.
_FP8 = tl.constexpr("""{
.reg .b32 a, b, s, big;
mov.b32 big, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 s, a, 0x80008000;
and.b32 a, a, 0x7f007f00;
shr.u32 a, a, 4;
or.b32 a, a, s;
mul.rn.bf16x2 $0, a, big;
and.b32 s, b, 0x80008000;
and.b32 b, b, 0x7f007f00;
shr.u32 b, b, 4;
or.b32 b, b, s;
mul.rn.bf16x2 $1, b, big;
}""")

# 128 + q by or-ing, then minus 136 (0x4308): q in 0..15 stands for q - 8.
_INT4 = tl.constexpr("""{
.reg .b32 a, h, w, eight;
mov.b32 w, $4;
mov.b32 eight, 0x43084308;
prmt.b32 a, w, 0, 0x4140;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $0, a, eight;
prmt.b32 a, w, 0, 0x4342;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $1, a, eight;
shr.u32 h, w, 4;
prmt.b32 a, h, 0, 0x4140;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $2, a, eight;
prmt.b32 a, h, 0, 0x4342;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $3, a, eight;
}""")


@device_function
def unpack_bytes(stored, dtype: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr):
    """uint8 -> the signed integer ("int8") or e4m3 number ("fp8") it holds, exactly. FAST: bf16 on a card."""
    if FAST and KIND == "int8":
        result = tl.inline_asm_elementwise(_INT8, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif FAST and KIND == "fp8":
        result = tl.inline_asm_elementwise(_FP8, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif KIND == "int8":
        result = stored.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    else:
        result = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    return result


@device_function
def unpack_nibbles(stored, dtype: tl.constexpr, FAST: tl.constexpr):
    """uint8 -> (low nibble - 8, high nibble - 8), exactly. FAST: bf16 on a card."""
    if FAST:
        low, high = tl.inline_asm_elementwise(
            _INT4, "=r,=r,=r,=r,r", [stored], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = ((stored & 15).to(tl.float32) - 8.0).to(dtype)
        high = ((stored >> 4).to(tl.float32) - 8.0).to(dtype)
    return low, high
