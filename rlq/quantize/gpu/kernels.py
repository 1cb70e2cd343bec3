"""GPU kernels (Triton), bit-identical to `rlq.quantize.reference`; `cuda.py` launches them.

One kernel encodes every scheme. A program holds a strip of tiles in registers: it reads each element once, reduces the
magnitudes of each tile, turns them into a scale by one of four rules, and rounds. What a format is comes in as numbers
of `rlq.formats.elements`, which the compiler folds, so that there is one piece of code for all of them.

Rounding to a small float is a magic addition, as in `kernels.py`: added to a power of two whose unit in the last place
is the format's step at that magnitude, a number is rounded by the hardware, to nearest, ties to even. No instruction
for FP8 is used, so a GPU without any computes the same codes. Divisions are `div_rn`, IEEE division: Triton's `/` is
an approximation.

Importing this module needs Triton, which comes with a CUDA build of PyTorch.
"""

# Triton gives these functions their types, and a CPU installation has no Triton.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
import triton
import triton.language as tl

from .. import rules
from ..reference import ZERO_BLOCK_SCALE, ZERO_TILE_SCALE

ABS = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
INT_MAGIC = tl.constexpr(1.5 * 2**23)
ZERO_SCALE = tl.constexpr(ZERO_TILE_SCALE)
ZERO_BLOCK = tl.constexpr(ZERO_BLOCK_SCALE)
ZERO_BLOCK_CODE, E4M3_NAN, E8M0_NAN = tl.constexpr(0x20), tl.constexpr(0x7F), tl.constexpr(0xFF)
E8M0_SMALLEST = tl.constexpr(0x00400000)  # 2^-127, subnormal in fp32
E4M3_LARGEST = tl.constexpr(448.0)
FP32, WHOLE = tl.constexpr(rules.FP32), tl.constexpr(rules.WHOLE)
E8M0_BLOCKS, E4M3_BLOCKS = tl.constexpr(rules.E8M0_BLOCKS), tl.constexpr(rules.E4M3_BLOCKS)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(places, inside):
    """fp32 values; bfloat16 comes as int16, so that neither the GPU nor the interpreter has to know it."""
    value = tl.load(places, mask=inside, other=0)
    if places.dtype.element_ty == tl.int16:
        return _float(value.to(tl.int32) << 16)
    else:
        return value.to(tl.float32)


@triton.jit
def _store(places, value, inside):
    """Inverse of `_load`: fp32 rounded to nearest, ties to even."""
    if places.dtype.element_ty == tl.int16:
        bits = _bits(value)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where((bits & ABS) > EXPONENT, NAN_BITS >> 16, half)
        tl.store(places, half.to(tl.int16), mask=inside)
    else:
        tl.store(places, value.to(places.dtype.element_ty), mask=inside)


@triton.jit
def _nearest_integer(quotient, LARGEST: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr):
    """Code and value, saturating."""
    quotient = tl.where(quotient > LARGEST, LARGEST, quotient)
    quotient = tl.where(quotient < -LARGEST, -LARGEST, quotient)
    moved = quotient + INT_MAGIC
    return (_bits(moved) + BIAS) & ((1 << BITS) - 1), moved - INT_MAGIC


@triton.jit
def _nearest_float(quotient, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr):
    """Code and value, saturating, the sign of zero kept; NaN becomes the largest value."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    LOWEST: tl.constexpr = (128 - BIAS) << 23  # exponent of the smallest normal number
    bits = _bits(quotient)
    size = bits & ABS
    sign = bits ^ size
    size = tl.where(size > EXPONENT, EXPONENT, size)
    magnitude = _float(size)
    magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
    exponent = tl.maximum(_bits(magnitude), LOWEST) & EXPONENT
    magic = _float(exponent + (SHIFT << 23))
    moved = magnitude + magic
    code = (_bits(moved) - _bits(magic)) + ((exponent - LOWEST) >> SHIFT)
    code = code | tl.where(sign != 0, 1 << (BITS - 1), 0)
    return code, _float(_bits(moved - magic) | sign)


@triton.jit
def _tile_scale(top, given, RULE: tl.constexpr, LARGEST: tl.constexpr, OFFSET: tl.constexpr):
    """What to store for each tile and what its codes are multiplied with, from the bits of its largest magnitude."""
    finite = top < EXPONENT
    amax = _float(tl.where(finite, top, NAN_BITS))
    if RULE == E8M0_BLOCKS:
        stored = tl.maximum(((top + (1 << 21)) >> 23) - OFFSET, 0)
        stored = tl.where(finite, stored, E8M0_NAN)
        power = tl.where(stored == 0, E8M0_SMALLEST, stored << 23)
        scale = _float(tl.where(finite, power, NAN_BITS))
    elif RULE == E4M3_BLOCKS:
        wanted = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)) * given
        stored, value = _nearest_float(wanted, E4M3_LARGEST, 3, 7, 8)
        value = _float(tl.where(finite, _bits(value), NAN_BITS))
        stored = tl.where(finite, stored, E4M3_NAN)
        stored = tl.where(value == 0, ZERO_BLOCK_CODE, stored)
        value = tl.where(value == 0, ZERO_BLOCK, value)
        scale = tl.div_rn(value, tl.zeros(value.shape, tl.float32) + given)
    else:
        scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        scale = tl.where(scale == 0, ZERO_SCALE, scale)
        stored = scale
    return stored, scale


@triton.jit
def encode(
    x,
    rows,
    columns,
    row_stride,
    column_stride,
    given,
    given_stride,
    scales,
    tiles_per_row,
    out,
    out_columns,
    RULE: tl.constexpr,
    INTEGER: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    VALUES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize TILE_ROWS rows of TILES neighbouring tiles, each of TILE columns.

    Args:
        x: (rows, columns) bf16 as int16, fp16 or fp32, any strides.
        given: fp32; the scale that spans the tensor, or one per row at `given_stride`; for WHOLE and E4M3_BLOCKS.
        scales: out, (strips, tiles_per_row): fp32, or bytes of E8M0 or E4M3. Not written under WHOLE and with VALUES.
        out: (rows, out_columns), contiguous: bytes of codes, two 4-bit codes to a byte, low half first; with VALUES the
            rounded values in a dtype like that of `x`, NaN where `x` is not finite.
        LARGEST, MANTISSA, BIAS, BITS: of the element, see `rlq.formats.elements.Format`; INTEGER: it is one.
        OFFSET: exponent of the element's largest power of two.
    """
    strip, chunk = tl.program_id(0), tl.program_id(1)
    row = strip * TILE_ROWS + tl.arange(0, TILE_ROWS)
    tile = chunk * TILES + tl.arange(0, TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows)[:, None, None] & (column < columns)[None, :, :]
    places = row.to(tl.int64)[:, None, None] * row_stride + column.to(tl.int64)[None, :, :] * column_stride
    value = _load(x + places, inside)
    if RULE == WHOLE:
        divisor = tl.zeros(value.shape, tl.float32) + tl.load(given)
    else:
        shared = tl.load(given + strip * given_stride) if RULE == E4M3_BLOCKS else 1.0
        top = tl.max(tl.max(_bits(value) & ABS, axis=2), axis=0)
        stored, scale = _tile_scale(top, shared, RULE, LARGEST, OFFSET)
        if not VALUES:
            where = scales + strip.to(tl.int64) * tiles_per_row + tile
            tl.store(where, stored.to(scales.dtype.element_ty), mask=tile < tiles_per_row)
        divisor = tl.zeros(value.shape, tl.float32) + scale[None, :, None]
    quotient = tl.div_rn(value, divisor)
    if INTEGER:
        code, nearest = _nearest_integer(quotient, LARGEST, BIAS, BITS)
    else:
        code, nearest = _nearest_float(quotient, LARGEST, MANTISSA, BIAS, BITS)
    if VALUES:
        product = nearest * divisor
        product = _float(tl.where((_bits(value) & ABS) < EXPONENT, _bits(product), NAN_BITS))
        places = row.to(tl.int64)[:, None, None] * out_columns + column.to(tl.int64)[None, :, :]
        _store(out + places, product, inside)
    elif BITS == 8:
        places = row.to(tl.int64)[:, None, None] * out_columns + column.to(tl.int64)[None, :, :]
        tl.store(out + places, code.to(tl.uint8), mask=inside)
    else:
        pairs = tl.reshape(tl.where(inside, code, 0), (TILE_ROWS, TILES * TILE // 2, 2))
        packed = tl.sum(pairs << (4 * tl.arange(0, 2))[None, None, :], axis=2)
        place = chunk * (TILES * TILE // 2) + tl.arange(0, TILES * TILE // 2)
        places = row.to(tl.int64)[:, None] * out_columns + place.to(tl.int64)[None, :]
        tl.store(out + places, packed.to(tl.uint8), mask=(row < rows)[:, None] & (place < out_columns)[None, :])


@triton.jit
def decode(
    codes, code_columns, values, scales, tile_rows, tile, tiles_per_row, out, columns, PACK, BLOCK: tl.constexpr
):
    """out (rows, columns) = values[code] times the scale of its tile; one program takes BLOCK columns of a row."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    code = tl.load(codes + row.to(tl.int64) * code_columns + column // PACK, mask=inside, other=0).to(tl.int32)
    if PACK == 2:
        code = (code >> (column % 2 * 4)) & 15
    scale = tl.load(scales + (row // tile_rows).to(tl.int64) * tiles_per_row + column // tile, mask=inside, other=0.0)
    product = tl.load(values + code) * scale
    _store(out + row.to(tl.int64) * columns + column, product, inside)


@triton.jit
def raise_to_largest(x, rows, columns, row_stride, column_stride, top, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """top (1,) int32 = max(top, bits of |x|): they order like the magnitudes, with infinity and then NaN on top."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    value = _load(x + row * row_stride + column * column_stride, inside)
    tl.atomic_max(top, tl.max(tl.max(_bits(value) & ABS, axis=1), axis=0))
