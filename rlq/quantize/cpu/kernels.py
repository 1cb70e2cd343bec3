"""CPU kernels (numba), bit-identical to `rlq.quantize.reference`.

One row at a time, so that everything between reading a weight and writing its code stays in the L1 cache: the largest
magnitude of each tile, its scale, then the codes, a run of 16 elements at a time (`rlq.quantize.cpu.codes`).

Importing this module needs numba.
"""

# numba gives these functions their types; to a type checker intrinsics are functions of its own first argument.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
import numpy as np
from numba import njit

from ...formats.elements import ELEMENTS
from ..reference import TINY, ZERO_BLOCK_SCALE, ZERO_TILE_SCALE
from ..rules import E4M3_BLOCKS, E8M0_BLOCKS, FP32, WHOLE
from .cache import cached_by_content
from .codes import (
    CORRECT,
    DIVIDE,
    ELEMENT_ORDER,
    EXPONENT,
    FP4,
    FP8,
    INT4,
    INT8,
    INT_MAGIC,
    MULTIPLY,
    SAFE_HIGHEST,
    SAFE_LOWEST,
    encode_runs,
)
from .simd import ABS, RUN, bits_of, float_of, runs_top, wide

F32, I32 = np.float32, np.int32
NAN = F32(np.nan)
ZERO_SCALE = F32(ZERO_TILE_SCALE)
SMALLEST = F32(TINY)
ONE = np.ones(1, np.float32)
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF
ZERO_BLOCK_CODE = int(np.flatnonzero(ELEMENTS["fp8"].values.numpy() == ZERO_BLOCK_SCALE)[0])
SMALLEST_E4M3 = F32(ELEMENTS["fp8"].min_positive)
E4M3_BIAS = I32(127 - ELEMENTS["fp8"].bias << 23)
SMALLEST_E8M0 = I32(1 << 22)  # 2^-127, a subnormal float32
ROUND_1_75 = I32(1 << 21)  # carries into the exponent from a mantissa of 1.75 on
LARGEST = np.array([ELEMENTS[name].max_finite for name in ELEMENT_ORDER], np.float32)
# Of a float format: what a magic number's exponent lies above the number's, and the exponent of the smallest normal
# number, both as bits; see `codes._float_codes`.
SHIFT = np.array([23 - ELEMENTS[name].mantissa_bits << 23 for name in ELEMENT_ORDER], np.int32)
LOWEST = np.array([128 - ELEMENTS[name].bias << 23 for name in ELEMENT_ORDER], np.int64).astype(np.int32)
SIGN = I32(-(1 << 31))

part = njit(nogil=True, error_model="numpy")  # compiled into the functions that call it


def jit(function):
    """Compile on first use and keep the result where every copy of rlq finds it."""
    with cached_by_content():
        return njit(nogil=True, cache=True, error_model="numpy")(function)


@part
def _magnitude(value):
    """Bits of |value|: they order like the magnitudes, with infinity and then NaN on top."""
    return I32(bits_of(wide(value)) & ABS)


@part
def raise_tops(row, tile, tops):
    """tops[c] = max(tops[c], |row[tile c : tile (c + 1)]|), as bits."""
    columns = row.shape[0]
    whole = columns // RUN * RUN
    for c in range((columns + tile - 1) // tile):
        tops[c] = max(tops[c], runs_top(row, c * tile, min((c + 1) * tile, whole)))
    for j in range(whole, columns):
        tops[j // tile] = max(tops[j // tile], _magnitude(row[j]))


@part
def _fp32_scales(tops, scales, largest):
    for c in range(tops.shape[0]):
        scale = (float_of(tops[c]) if tops[c] < EXPONENT else NAN) / largest
        scales[c] = ZERO_SCALE if scale == F32(0) else scale


@part
def _e8m0_scales(tops, scales, stored, offset):
    for c in range(tops.shape[0]):
        finite = tops[c] < EXPONENT
        exponent = I32(max(I32(I32(tops[c] + ROUND_1_75) >> I32(23)) - I32(offset), I32(0)))
        stored[c] = np.uint8(exponent if finite else E8M0_NAN)
        scale = float_of(max(I32(exponent << I32(23)), SMALLEST_E8M0))
        scales[c] = scale if finite else NAN


@part
def _e4m3_scales(tops, scales, stored, largest, given):
    for c in range(tops.shape[0]):
        scales[c] = float_of(tops[c]) / largest * given
    encode_runs(scales, scales, scales.shape[0], ONE, ONE, MULTIPLY, stored, FP8)
    for c in range(tops.shape[0]):
        finite = tops[c] < EXPONENT
        code = I32(stored[c] if stored[c] else ZERO_BLOCK_CODE)
        stored[c] = np.uint8(code if finite else E4M3_NAN)
        normal = float_of(I32(I32(code << I32(20)) + E4M3_BIAS))
        scale = normal if code >= I32(8) else F32(code) * SMALLEST_E4M3
        scales[c] = (scale if finite else NAN) / given


@part
def tile_scales(tops, rule, element, offset, given, scales, inverses, stored):
    """Scales of tiles from the bits of their largest magnitudes.

    Args:
        tops: int32 (tiles,).
        rule, element, offset: as for `encode`.
        given: scale of the whole tensor for E4M3_BLOCKS.
        scales: out, float32 (tiles rounded up to runs,); what codes are multiplied with.
        inverses: out, float32 (tiles,); their rounded reciprocals.
        stored: out, uint8 (tiles rounded up to runs,); scales as they are stored, where that is in a byte.

    Returns:
        How to divide by the scales; see `codes.DIVIDE`.
    """
    if rule == FP32:
        _fp32_scales(tops, scales, LARGEST[element])
    elif rule == E8M0_BLOCKS:
        _e8m0_scales(tops, scales, stored, offset)
    else:
        _e4m3_scales(tops, scales, stored, LARGEST[element], given)
    if not invert(scales[: tops.shape[0]], inverses):
        return DIVIDE
    return MULTIPLY if rule == E8M0_BLOCKS else CORRECT


@part
def invert(scales, inverses):
    """inverses = 1 / scales, rounded; True if all scales are safe."""
    lowest, highest = I32(SAFE_HIGHEST), I32(SAFE_LOWEST)
    for c in range(scales.shape[0]):
        inverses[c] = F32(1) / scales[c]
        lowest, highest = min(lowest, bits_of(scales[c])), max(highest, bits_of(scales[c]))
    return lowest >= SAFE_LOWEST and highest <= SAFE_HIGHEST


@part
def given_scale(scales, inverses, element):
    """inverses = 1 / scales, for a scale that does not come from the tile; how to divide by it."""
    safe = invert(scales, inverses)
    return CORRECT if safe and element != INT8 and element != INT4 else DIVIDE


@part
def round_up(count):
    """The next multiple of RUN."""
    return (count + RUN - 1) // RUN * RUN


@part
def encode_row(row, following, tile, scales, inverses, how, codes, element, tail, tail_codes):
    """codes = nearest codes of row / scale, while `following` is fetched: its magnitudes are needed right after.

    A last run that is not whole goes through `tail` and `tail_codes`, of RUN zeros.
    """
    columns = row.shape[0]
    whole = columns // RUN * RUN
    encode_runs(row, following, tile, scales, inverses, how, codes, element)
    if whole < columns:
        last = whole // tile
        for j in range(whole, columns):
            tail[j - whole] = row[j]
        encode_runs(tail, tail, RUN, scales[last:], inverses[last:], how, tail_codes, element)
        per_byte = 2 if element in (FP4, INT4) else 1
        used = columns - whole
        if used % per_byte:
            tail_codes[used // 2] &= 0x0F
        for j in range((used + per_byte - 1) // per_byte, RUN):
            tail_codes[j] = 0
        for j in range(whole // per_byte, codes.shape[0]):
            codes[j] = tail_codes[j - whole // per_byte]


@part
def _local_global(tops, largest):
    """NVFP4's global scale of one row, from the bits of the row's own magnitudes."""
    top = I32(0)
    for c in range(tops.shape[0]):
        top = max(top, tops[c])
    amax = float_of(top) if top < EXPONENT else NAN
    scale = F32(1) / (SMALLEST if amax < SMALLEST else amax) * largest
    return F32(1) if np.isinf(scale) else scale


@jit
def amax(x):
    """Bits of the largest |x| of a (rows, columns) matrix as float32: they order like the magnitudes, NaN on top."""
    tops = np.zeros(1, np.int32)
    for i in range(x.shape[0]):
        raise_tops(x[i], x.shape[1], tops)
    return tops[0]


@jit
def encode(x, tile_rows, tile, rule, element, offset, given, scales, stored_scales, codes):
    """Quantize a (rows, columns) matrix of float32, or of bfloat16 as uint16.

    Args:
        x: the matrix.
        tile_rows: rows that share a scale.
        tile: columns that share a scale; a multiple of RUN, or at least the number of columns.
        rule: FP32, E8M0_BLOCKS, E4M3_BLOCKS or WHOLE: how the scale follows from the largest magnitude.
        element: place in ELEMENT_ORDER.
        offset: exponent of the element's largest power of two, for E8M0.
        given: float64 scale of the whole tensor for WHOLE and E4M3_BLOCKS.
        scales: out, float32 (tile rows, tiles) for FP32.
        stored_scales: out, uint8 (tile rows, tiles) for E8M0_BLOCKS and E4M3_BLOCKS.
        codes: out, uint8 (rows, bytes).
    """
    rows, columns = x.shape
    tiles = (columns + tile - 1) // tile
    tops, inverses = np.empty(tiles, np.int32), np.empty(tiles, np.float32)
    row_scales, stored = np.empty(round_up(tiles), np.float32), np.empty(round_up(tiles), np.uint8)
    tail, tail_codes = np.zeros(RUN, x.dtype), np.empty(RUN, np.uint8)
    whole = F32(given)
    row_scales[:] = whole
    how = given_scale(row_scales[:tiles], inverses, element)
    for strip in range((rows + tile_rows - 1) // tile_rows):
        first, last = strip * tile_rows, min((strip + 1) * tile_rows, rows)
        if rule != WHOLE:
            tops[:] = 0
            for i in range(first, last):
                raise_tops(x[i], tile, tops)
            how = tile_scales(tops, rule, element, offset, whole, row_scales, inverses, stored)
            if rule == FP32:
                for c in range(tiles):
                    scales[strip, c] = row_scales[c]
            else:
                for c in range(tiles):
                    stored_scales[strip, c] = stored[c]
        for i in range(first, last):
            following = x[min(i + 1, rows - 1)]
            encode_row(x[i], following, tile, row_scales, inverses, how, codes[i], element, tail, tail_codes)


@part
def _round_floats(x, scale, shift, lowest, largest, out):
    """out = x rounded to a float format under one scale: to nearest, ties to even, saturating, the sign of zero kept.

    The magic addition of `codes.py`, without the code: what is added to round is subtracted again. Written for one
    element so that LLVM makes vectors of it; a NaN scale makes everything NaN.
    """
    for j in range(x.shape[0]):
        bits = bits_of(x[j])
        size = float_of(I32(bits & ABS)) / scale
        magic = float_of(I32(I32(max(bits_of(size), lowest) & I32(EXPONENT)) + shift))
        nearest = (size + magic) - magic
        nearest = nearest if nearest < largest else largest
        out[j] = float_of(I32(bits_of(nearest * scale) | I32(bits & SIGN)))


@part
def _round_ints(x, scale, largest, out):
    """out = x rounded to an integer format under one scale; see `_round_floats`."""
    for j in range(x.shape[0]):
        nearest = (x[j] / scale + F32(INT_MAGIC)) - F32(INT_MAGIC)
        nearest = nearest if nearest < largest else largest
        nearest = nearest if nearest > -largest else -largest
        out[j] = nearest * scale


@jit
def fake_quantize_rows(x, tile, rule, element, offset, given):
    """Round every row of a float32 matrix on its own; arguments as for `encode`.

    Args:
        given: as for `encode`; 0 for NVFP4 with a global scale per row.

    Returns:
        float32 (rows, columns); NaN wherever `x` is not finite.
    """
    rows, columns = x.shape
    tiles = (columns + tile - 1) // tile
    out = np.empty((rows, columns), np.float32)
    tops, inverses = np.empty(tiles, np.int32), np.empty(tiles, np.float32)
    scales, stored = np.empty(round_up(tiles), np.float32), np.empty(round_up(tiles), np.uint8)
    scales[:] = given
    largest = LARGEST[element]
    for i in range(rows):
        if rule != WHOLE:
            tops[:] = 0
            raise_tops(x[i], tile, tops)
            per_row = rule == E4M3_BLOCKS and given == 0
            whole = _local_global(tops, LARGEST[FP8] * LARGEST[FP4]) if per_row else F32(given)
            tile_scales(tops, rule, element, offset, whole, scales, inverses, stored)
        for c in range(tiles):
            part_in, part_out = x[i, c * tile : (c + 1) * tile], out[i, c * tile : (c + 1) * tile]
            if element in (INT8, INT4):
                _round_ints(part_in, scales[c], largest, part_out)
            else:
                _round_floats(part_in, scales[c], SHIFT[element], LOWEST[element], largest, part_out)
        if rule == WHOLE:
            for j in range(columns):
                out[i, j] = out[i, j] if x[i, j] - x[i, j] == F32(0) else NAN
    return out


@part
def _decode_row(codes, half, values, tile, scales, out):
    for c in range((out.shape[0] + tile - 1) // tile):
        for j in range(c * tile, min((c + 1) * tile, out.shape[0])):
            code = codes[j >> 1] >> (4 * (j & 1)) & 0x0F if half else codes[j]
            out[j] = values[code] * scales[c]


@jit
def decode(codes, half, values, tile_rows, tile, scales, out):
    """out (rows, columns) = values of codes times the scale of their tile, out of (tile rows, tiles); float32."""
    for i in range(out.shape[0]):
        _decode_row(codes[i], half, values, tile, scales[i // tile_rows], out[i])
