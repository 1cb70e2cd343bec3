"""CPU kernels (numba), bit-identical to `rlq.quantize.reference`.

One row at a time, so that everything between reading a weight and writing its code stays in the L1 cache: magnitudes
are reduced in runs of 16, the scale of each tile is spread over the row, and one flat loop per row turns quotients into
codes. Rounding to a small float is a magic addition: added to a power of two whose unit in the last place is the
format's step at that magnitude, a number is rounded by the hardware, to nearest, ties to even, and its code can be read
off the integer difference. The power comes from the exponent bits of the number itself; below the smallest normal
exponent it stays put, which gives the subnormals.

Importing this module needs numba.
"""

# numba gives these functions their types; to a type checker intrinsics are functions of its own first argument.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
import numpy as np
from numba import njit

from ..formats import ELEMENTS
from .cache import cached_by_content
from .reference import TINY, ZERO_BLOCK_SCALE, ZERO_TILE_SCALE
from .simd import ABS, RUN, at, bits_of, float_of, part, prefetch, run_fill, run_top, wide

F32, I32 = np.float32, np.int32
EXPONENT = 0x7F800000
NAN = F32(np.nan)
PIECE = 512  # elements between two bursts of prefetches
LINE = 32  # bf16 elements in a cache line
ZERO_SCALE = F32(ZERO_TILE_SCALE)
ZERO_BLOCK = F32(ZERO_BLOCK_SCALE)
SMALLEST = F32(TINY)
E4M3 = ELEMENTS["fp8"].values.numpy()
E8M0 = ELEMENTS["e8m0"].values.numpy()
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF
ELEMENT_ORDER = ("fp8", "fp8_e5m2", "fp4", "int8", "int4")
FP8, FP8_E5M2, FP4, INT8, INT4 = range(5)
LARGEST = np.array([ELEMENTS[name].max_finite for name in ELEMENT_ORDER], np.float32)
INT_MAGIC = F32(1.5 * 2**23)


def jit(function):
    """Compile on first use and keep the result where every copy of rlq finds it."""
    with cached_by_content():
        return njit(nogil=True, cache=True, error_model="numpy")(function)


@jit
def _magnitude(value):
    """Bits of |value|: they order like the magnitudes, with infinity and then NaN on top."""
    return I32(bits_of(wide(value)) & ABS)


@jit
def raise_runs(row, runs):
    """runs[b] = max(runs[b], |row[16 b : 16 b + 16]|), as bits."""
    whole = row.shape[0] // RUN
    for b in range(whole):
        runs[b] = max(runs[b], run_top(row, b * RUN))
    for j in range(whole * RUN, row.shape[0]):
        runs[whole] = max(runs[whole], _magnitude(row[j]))


@jit
def reduce_runs(runs, per_tile, tiles):
    """Largest magnitude of each tile from its runs; NaN where something is not finite."""
    for c in range(tiles.shape[0]):
        top = I32(0)
        for b in range(c * per_tile, min((c + 1) * per_tile, runs.shape[0])):
            top = I32(max(top, runs[b]))
        tiles[c] = float_of(top) if top < EXPONENT else NAN


@jit
def _spread(scales, tile, row):
    """Give every element of a row the scale of its tile."""
    if tile % RUN == 0 and row.shape[0] % RUN == 0:
        for c in range(scales.shape[0]):
            for j in range(c * tile, min((c + 1) * tile, row.shape[0]), RUN):
                run_fill(row, j, scales[c])
    else:
        for c in range(scales.shape[0]):
            row[c * tile : (c + 1) * tile] = scales[c]


@jit
def _float_codes(row, scale, words, mantissa, lowest, largest, sign_at):
    """words = nearest code of row / scale, for a float format; in 32 bits, because narrowing earlier costs shuffles.

    The difference between exponent and `lowest` is added inside the magic number: an even number of steps, below the
    256 that a byte holds.
    """
    shift = I32(23 - mantissa)
    offset = I32((shift << 23) + (-(lowest >> shift) & 0xFF))
    sign = I32(0x80 >> (sign_at - 24))
    top = bits_of(largest)
    for j in range(row.shape[0]):
        quotient = bits_of(wide(row[j]) / at(scale, j))
        size = I32(min(I32(quotient & ABS), top))
        exponent = I32(max(size, lowest) & EXPONENT)
        steps = bits_of(float_of(size) + float_of(exponent + offset))
        words[j] = I32(((steps + (exponent >> shift)) & (sign - 1)) | ((quotient >> sign_at) & sign))


@jit
def _int_codes(row, scale, codes, largest, bias):
    """codes = nearest integer of row / scale, plus bias."""
    for j in range(row.shape[0]):
        quotient = wide(row[j]) / at(scale, j)
        quotient = largest if quotient > largest else quotient
        quotient = -largest if quotient < -largest else quotient
        codes[j] = np.uint8(bits_of(quotient + INT_MAGIC) + bias)


@jit
def encode_row(row, following, scale, codes, words, element):
    """codes = nearest codes of row / scale, while `following` is fetched: its magnitudes are needed right after.

    The numbers of `rlq.formats` are constants here, which the compiler folds.
    """
    for start in range(0, row.shape[0], PIECE):
        stop = min(start + PIECE, row.shape[0])
        for j in range(start, stop, LINE):
            prefetch(following, j)
        piece, scales, target = row[start:stop], part(scale, start, stop), codes[start:stop]
        if element == INT8:
            _int_codes(piece, scales, target, F32(127), 0)
            continue
        if element == INT4:
            _int_codes(piece, scales, target, F32(7), 8)
            continue
        if element == FP8:
            _float_codes(piece, scales, words, 3, I32((127 - 6) << 23), F32(448), 24)
        elif element == FP8_E5M2:
            _float_codes(piece, scales, words, 2, I32((127 - 14) << 23), F32(57344), 24)
        else:
            _float_codes(piece, scales, words, 1, I32(127 << 23), F32(6), 28)
        for j in range(target.shape[0]):
            target[j] = np.uint8(words[j])


@jit
def store_row(codes, stored):
    """Write one row of 4-bit codes, two to a byte, low half first."""
    pairs = codes.view(np.uint16)
    for j in range(stored.shape[0]):
        stored[j] = np.uint8((pairs[j] & 0x0F) | (pairs[j] >> 4))


@jit
def _decode_row(codes, values, scale, out):
    for j in range(out.shape[0]):
        out[j] = values[codes[j]] * at(scale, j)


@jit
def fp32_scales(tiles, largest):
    for c in range(tiles.shape[0]):
        scale = tiles[c] / largest
        tiles[c] = ZERO_SCALE if scale == F32(0) else scale


@jit
def e8m0_scales(tiles, stored, offset):
    for c in range(tiles.shape[0]):
        bits = bits_of(tiles[c])
        exponent = max(((bits + (1 << 21)) >> 23) - offset, 0)
        code = np.uint8(exponent if bits < EXPONENT else E8M0_NAN)
        stored[c] = code
        tiles[c] = E8M0[code]


@jit
def e4m3_scales(tiles, stored, largest, given, words):
    for c in range(tiles.shape[0]):
        tiles[c] = tiles[c] / largest * given
    encode_row(tiles, tiles, F32(1), stored, words, FP8)
    for c in range(tiles.shape[0]):
        if np.isnan(tiles[c]):
            stored[c] = E4M3_NAN
        scale = E4M3[stored[c]]
        if scale == F32(0):
            scale = ZERO_BLOCK
            stored[c] = 0x20
        tiles[c] = scale / given


@jit
def _local_global(runs, largest):
    """NVFP4's global scale of one row, from the row's own magnitudes."""
    top = I32(0)
    for b in range(runs.shape[0]):
        top = I32(max(top, runs[b]))
    amax = float_of(top) if top < EXPONENT else NAN
    scale = F32(1) / (SMALLEST if amax < SMALLEST else amax) * largest
    return F32(1) if np.isinf(scale) else scale


@jit
def amax(x):
    """Largest |x| of a (rows, columns) matrix; NaN if something is not finite."""
    runs = np.zeros((x.shape[1] + RUN - 1) // RUN, np.int32)
    for i in range(x.shape[0]):
        raise_runs(x[i], runs)
    tiles = np.zeros(1, np.float32)
    reduce_runs(runs, max(runs.shape[0], 1), tiles)
    return tiles[0]


FP32, E8M0_BLOCKS, E4M3_BLOCKS, WHOLE = range(4)


@jit
def encode(x, tile_rows, tile, rule, element, offset, given, scales, stored_scales, codes, half):
    """Quantize a (rows, columns) matrix of float32, or of bfloat16 as uint16.

    Args:
        x: the matrix.
        tile_rows: rows that share a scale.
        tile: columns that share a scale; a multiple of RUN, or at least the number of columns.
        rule: FP32, E8M0_BLOCKS, E4M3_BLOCKS or WHOLE: how the scale follows from the largest magnitude.
        element: place in ELEMENT_ORDER.
        offset: exponent of the element's largest power of two, for E8M0.
        given: float32 (1,) scale of the whole tensor for WHOLE and E4M3_BLOCKS.
        scales: out, float32 (tile rows, tiles) for FP32.
        stored_scales: out, uint8 (tile rows, tiles) for E8M0_BLOCKS and E4M3_BLOCKS.
        codes: out, uint8 (rows, bytes).
        half: two codes to a byte.
    """
    rows, columns = x.shape
    runs = np.empty((columns + RUN - 1) // RUN, np.int32)
    tiles = np.empty(max((columns + tile - 1) // tile, 1), np.float32)
    words = np.empty(PIECE, np.int32)
    spread = np.empty(columns, np.float32)
    row_codes = np.zeros((columns + 7) // 8 * 8, np.uint8)
    per_tile = max((tile + RUN - 1) // RUN, 1)
    if rule == WHOLE:
        tiles[0] = given[0]
    for strip in range((rows + tile_rows - 1) // tile_rows):
        first, last = strip * tile_rows, min((strip + 1) * tile_rows, rows)
        if rule != WHOLE:
            runs[:] = 0
            for i in range(first, last):
                raise_runs(x[i], runs)
            reduce_runs(runs, per_tile, tiles)
            if rule == FP32:
                fp32_scales(tiles, LARGEST[element])
                scales[strip, :] = tiles
            elif rule == E8M0_BLOCKS:
                e8m0_scales(tiles, stored_scales[strip], offset)
            else:
                e4m3_scales(tiles, stored_scales[strip], LARGEST[element], given[0], words)
            if tiles.shape[0] > 1:
                _spread(tiles, tile, spread)
        for i in range(first, last):
            target = row_codes[:columns] if half else codes[i]
            following = x[min(i + 1, rows - 1)]
            if tiles.shape[0] > 1:
                encode_row(x[i], following, spread, target, words, element)
            else:
                encode_row(x[i], following, tiles[0], target, words, element)
            if half:
                store_row(row_codes, codes[i])


@jit
def fake_quantize_rows(x, tile, rule, element, offset, given, values):
    """Round every row of a float32 matrix on its own; arguments as for `encode`, `given` may be empty for E4M3_BLOCKS.

    Returns:
        float32 (rows, columns); NaN wherever `x` is not finite.
    """
    rows, columns = x.shape
    out = np.empty((rows, columns), np.float32)
    runs = np.empty((columns + RUN - 1) // RUN, np.int32)
    tiles = np.empty(max((columns + tile - 1) // tile, 1), np.float32)
    words = np.empty(PIECE, np.int32)
    stored = np.empty(tiles.shape[0], np.uint8)
    spread = np.empty(columns, np.float32)
    codes = np.empty(columns, np.uint8)
    per_tile = max((tile + RUN - 1) // RUN, 1)
    if rule == WHOLE:
        spread[:] = given[0]
    for i in range(rows):
        if rule != WHOLE:
            runs[:] = 0
            raise_runs(x[i], runs)
            reduce_runs(runs, per_tile, tiles)
            if rule == FP32:
                fp32_scales(tiles, LARGEST[element])
            elif rule == E8M0_BLOCKS:
                e8m0_scales(tiles, stored, offset)
            else:
                whole = given[0] if given.shape[0] else _local_global(runs, LARGEST[FP8] * LARGEST[FP4])
                e4m3_scales(tiles, stored, LARGEST[element], whole, words)
            _spread(tiles, tile, spread)
        encode_row(x[i], x[i], spread, codes, words, element)
        _decode_row(codes, values, spread, out[i])
        if rule == WHOLE:
            for j in range(columns):
                out[i, j] = out[i, j] if x[i, j] - x[i, j] == F32(0) else NAN
    return out


@jit
def decode(codes, half, values, tile_rows, tile, scales, out):
    """out (rows, columns) = values of codes times the scale of their tile, out of (tile rows, tiles); float32."""
    rows, columns = out.shape
    spread = np.empty(columns, np.float32)
    pairs = np.empty((columns + 7) // 8 * 8, np.uint8)
    for i in range(rows):
        if i % tile_rows == 0:
            _spread(scales[i // tile_rows], tile, spread)
        if half:
            for j in range(codes.shape[1]):
                pairs[2 * j] = codes[i, j] & 0x0F
                pairs[2 * j + 1] = codes[i, j] >> 4
            _decode_row(pairs, values, spread, out[i])
        else:
            _decode_row(codes[i], values, spread, out[i])
