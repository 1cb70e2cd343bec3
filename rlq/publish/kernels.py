"""Kernels of `rlq.publish.codec`, which says what they do. Importing this module needs numba."""

# numba gives these functions their types; to a type checker intrinsics are functions of its own first argument.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
import numpy as np
from numba import types
from numba.extending import intrinsic

from ..quantize.cpu.kernels import jit
from ..quantize.cpu.simd import RUN, run_differs

U64 = np.uint64


@intrinsic
def leading_zeros(typingctx, word):
    """Zeros above the highest set bit of a positive int64."""

    def generate(context, builder, signature, args):
        return builder.ctlz(args[0], context.get_constant(types.boolean, True))

    return types.int64(types.int64), generate


@jit
def find(old, new, where, values):
    """Positions at which two flat arrays differ, and their differences; both outputs one longer than the arrays.

    Returns:
        How many there are.
    """
    count = 0
    whole = new.shape[0] // RUN
    for b in range(whole):
        if run_differs(old, new, b * RUN):
            for j in range(b * RUN, (b + 1) * RUN):  # without a branch that would be mispredicted at every change
                where[count] = j
                values[count] = new[j] - old[j]
                count += np.int64(new[j] != old[j])
    for j in range(whole * RUN, new.shape[0]):
        where[count] = j
        values[count] = new[j] - old[j]
        count += np.int64(new[j] != old[j])
    return count


@jit
def pack(where, flags, classes, fields):
    """Fill the classes (uint8, one per position) and the fields (uint8, room for the longest that they can become).

    Returns:
        Bytes of the fields.
    """
    last = np.int64(-1)
    word, held, byte = U64(0), 0, 0
    for i in range(where.shape[0]):
        number = np.int64(where[i]) - last + 1
        last = np.int64(where[i])
        low = 62 - leading_zeros(number)
        classes[i] = np.uint8(low << 1 | (number >> low & 1))
        word |= U64((number & ((1 << low) - 1)) << 1 | np.int64(flags[i])) << U64(held)
        held += low + 1
        while held >= 8:
            fields[byte] = np.uint8(word & U64(255))
            word >>= U64(8)
            held -= 8
            byte += 1
    if held:
        fields[byte] = np.uint8(word)
        byte += 1
    return byte


@jit
def unpack(classes, fields, begin, last, where, flags):
    """Fill `where` and `flags` from the classes and the fields, as 64-bit words with one to spare."""
    position, bit = np.int64(last), np.int64(begin)
    for i in range(where.shape[0]):
        low = np.int64(classes[i] >> 1)
        shift = bit & 63
        # Two shifts, because one by 64 does nothing.
        field = fields[bit >> 6] >> U64(shift) | fields[(bit >> 6) + 1] << U64(63 - shift) << U64(1)
        bit += low + 1
        rest = np.int64(field >> U64(1)) & ((1 << low) - 1)
        position += ((2 | np.int64(classes[i] & 1)) << low | rest) - 1
        where[i] = position
        flags[i] = np.uint8(field & U64(1))
