"""CPU kernels (numba), bit-identical to the reference in `rlq.quantize.reference`.

Rounding to a small float format is a magic addition: adding and subtracting a power of two whose unit in the last
place is the format's step at that magnitude makes the hardware round to nearest, ties to even. The power is read off
the exponent bits of the value itself; below the smallest normal exponent it stays put, which gives the subnormals.
Importing this module needs numba; `rlq.quantize.dispatch` falls back to the reference without it.
"""

# pyright: reportOptionalMemberAccess=false, reportCallIssue=false
import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.extending import intrinsic

F32 = np.float32
ABS = 0x7FFFFFFF
EXPONENT = 0x7F800000
SIGN = -0x80000000
E4M3_MAX = F32(448.0)
E4M3_MIN_EXPONENT = np.int32((127 - 6) << 23)
E4M3_MAGIC = np.int32((23 - 3) << 23)
ZERO_SCALE = F32(2.0**-23)


@intrinsic
def bits(typingctx, value):
    """Reinterpret float32 as int32; numba has no scalar form that LLVM vectorizes."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def from_bits(typingctx, value):
    """Reinterpret the low 32 bits of an integer as float32."""

    def generate(context, builder, signature, args):
        low = args[0] if args[0].type.width == 32 else builder.trunc(args[0], ir.IntType(32))
        return builder.bitcast(low, ir.FloatType())

    return types.float32(value), generate


@njit(nogil=True, cache=True, error_model="numpy")
def fake_quantize_fp8_token(x):
    """Round each row of fp32 `x` (M, K) to E4M3 times its scale amax / 448; NaN or infinity makes a row NaN."""
    rows, columns = x.shape
    out = np.empty((rows, columns), np.float32)
    for i in range(rows):
        # Bit patterns of magnitudes order like the magnitudes, with infinity and then NaN on top.
        top = np.int32(0)
        for j in range(columns):
            top = np.int32(max(top, np.int32(bits(x[i, j]) & ABS)))
        scale = from_bits(top) / E4M3_MAX
        if scale == F32(0):
            scale = ZERO_SCALE
        for j in range(columns):
            quotient = x[i, j] / scale
            magnitude = from_bits(bits(quotient) & ABS)
            magnitude = E4M3_MAX if magnitude > E4M3_MAX else magnitude
            exponent = np.int32(max(np.int32(bits(magnitude) & EXPONENT), E4M3_MIN_EXPONENT))
            magic = from_bits(exponent + E4M3_MAGIC)
            rounded = (magnitude + magic) - magic
            out[i, j] = from_bits(bits(rounded) | (bits(quotient) & SIGN)) * scale
    return out
