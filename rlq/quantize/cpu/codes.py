"""Elements to codes, a run of 16 at a time, as LLVM IR: division by the scale, rounding, packing. Needs numba.

The elements of even and of odd index are two vectors of 8: two bfloat16 in 32 bits fall apart into them by a shift and
a mask, and two codes that are put back side by side in 32 bits are in the order of the elements.
"""

import itertools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...formats.elements import ELEMENTS, Format
from .simd import ABS, RUN, Lanes, clamp, fetch, load_run, pointer_to, splat

ELEMENT_ORDER = ("fp8", "fp8_e5m2", "fp4", "int8", "int4")
FP8, FP8_E5M2, FP4, INT8, INT4 = range(5)
HALF = RUN // 2
EXPONENT = 0x7F800000
ONE = 127 << 23
INT_MAGIC = 1.5 * 2**23
# How a quotient is computed, all with the same result. DIVIDE takes any scale. CORRECT multiplies by the reciprocal and
# corrects the error, for scales from SAFE_LOWEST to SAFE_HIGHEST (as bits): beyond, something may underflow. MULTIPLY
# is for powers of two among those. An integer's quotient must not exceed its largest code by more than rounding errors,
# except with DIVIDE.
DIVIDE, CORRECT, MULTIPLY = range(3)
SAFE_LOWEST, SAFE_HIGHEST = (127 - 60) << 23, (127 + 60) << 23


def _split(run: Lanes) -> tuple[Lanes, Lanes, Lanes]:
    """Elements of even and of odd index, as bits of float32, and pairs of them with their signs in bits 15 and 31."""
    if run.width == 16:
        pairs = run.bits()
        return pairs << 16, pairs & -(1 << 16), pairs
    even, odd = run.pick(range(0, RUN, 2)), run.pick(range(1, RUN, 2))
    return even, odd, even >> 16 & 0xFFFF | odd & -(1 << 16)


def _quotient(x: Lanes, scale: Lanes, inverse: Lanes, corrections: int) -> Lanes:
    """x / scale, correctly rounded, from the rounded reciprocal `inverse`.

    This is Markstein's division: in an FMA the remainder is exact, and adding its quotient rounds correctly if what is
    corrected is off by less than one unit in the last place. One correction brings any product there; the product
    itself, of a bfloat16, is near enough too, which a test shows case by case.
    """
    found = x * inverse
    for _ in range(corrections):
        found = (-found).times_plus(scale, x).times_plus(inverse, found)
    return found


def _float_codes(quotients: list[Lanes], signs: Lanes, element: Format) -> Lanes:
    """Codes of two times 8 quotients without signs, in 16 bits each: to nearest, ties to even, saturating.

    Rounding is a magic addition: added to a power of two whose unit in the last place is the format's step at that
    magnitude, a number is rounded by the hardware, and the low bits count its steps. The power comes from the exponent
    bits of the number itself; below the smallest normal exponent it stays put, which gives the subnormals.
    """
    shift = 23 - element.mantissa_bits
    lowest = ONE + (1 - element.bias << 23)
    codes = []
    for quotient in quotients:
        exponent = quotient.bits().umax(lowest) & EXPONENT
        steps = exponent.floats().times_plus(2.0**shift, quotient).bits()
        codes.append(steps + (exponent >> shift))
    pairs = codes[0] & 0xFFFF | codes[1] << 16
    # What overflowed, to infinity or NaN, has steps of 0 and the largest exponent.
    largest = element.values.tolist().index(element.max_finite)
    found = (pairs.shorts() - (lowest >> shift)).umin(largest)
    sign = 1 << element.bits - 1
    return found | signs.shorts() >> (16 - element.bits) & sign


def _int_codes(quotients: list[Lanes], element: Format) -> Lanes:
    """Codes of two times 8 quotients, in 16 bits each: to nearest, ties to even."""
    even, odd = ((quotient + (INT_MAGIC + element.bias)).bits() for quotient in quotients)
    return (even & 0xFFFF | odd << 16).shorts()


def _encode_run(builder, run: Lanes, scale: Lanes, inverse: Lanes, element: Format, how: int) -> Lanes:
    """RUN elements, from `load_run`, to the bytes of their codes; `scale` and its reciprocal 8 times."""
    even, odd, signs = _split(run)
    corrections = 0 if how == MULTIPLY else 1 if run.width == 16 else 2
    quotients = []
    for half in (even, odd):
        x = (half if element.kind == "int" else half & ABS).floats()
        quotient = x / scale if how == DIVIDE else _quotient(x, scale, inverse, corrections)
        if element.kind == "int" and how == DIVIDE:
            quotient = clamp(quotient, element.max_finite)
        quotients.append(quotient)
    codes = _float_codes(quotients, signs, element) if element.kind == "float" else _int_codes(quotients, element)
    if element.bits == 8:
        return codes.narrow(signed=element.kind == "int")
    pairs = codes.bits()
    return (pairs | pairs >> 12).low_bytes()


class _Encoder:
    """Emits the loops of an intrinsic, once per element format and way to divide."""

    def __init__(self, context, builder, types_, values):
        """Types and values of the row, the scales, their reciprocals, the way to divide, the codes and the element."""
        self.context, self.builder = context, builder
        self.row, self.scales, self.inverses, self.how, self.codes, self.element = zip(types_, values, strict=True)

    def cases(self):
        """Yields a format and a way to divide for each branch; what is emitted meanwhile goes there."""
        builder, (_, how), (_, element) = self.builder, self.how, self.element
        done = builder.append_basic_block("encoded")
        case = builder.add(builder.mul(how, how.type(len(ELEMENT_ORDER))), element)
        switch = builder.switch(case, done)
        for number, (way, name) in enumerate(itertools.product((DIVIDE, CORRECT, MULTIPLY), ELEMENT_ORDER)):
            block = builder.append_basic_block(name)
            switch.add_case(case.type(number), block)
            builder.position_at_end(block)
            yield ELEMENTS[name], way
            builder.branch(done)
        builder.position_at_end(done)

    def scale(self, tile) -> tuple[Lanes, Lanes]:
        """The scale of a tile and its reciprocal."""
        places = (pointer_to(self.context, self.builder, *array, tile) for array in (self.scales, self.inverses))
        scale, inverse = (splat(self.builder, self.builder.load(place), HALF) for place in places)
        return scale, inverse

    def run(self, start, scale: tuple[Lanes, Lanes], element: Format, how: int):
        """Encodes and stores the run that begins at element `start`."""
        builder = self.builder
        found = _encode_run(builder, load_run(self.context, builder, *self.row, start), *scale, element, how).value
        place = builder.udiv(start, start.type(8 // element.bits))
        builder.store(found, pointer_to(self.context, builder, *self.codes, place, found.type), align=1)


@intrinsic
def encode_runs(typingctx, row, following, tile, scales, inverses, how, codes, element):
    """codes = nearest codes of row / scales; whole runs only.

    Args:
        row: float32, or bfloat16 as uint16.
        following: of the same type and length; fetched from memory meanwhile.
        tile: elements that share a scale; a multiple of RUN, or at least the length.
        scales: float32 (tiles,).
        inverses: float32 (tiles,), their rounded reciprocals.
        how: DIVIDE, CORRECT or MULTIPLY.
        codes: uint8, two codes of 4 bits to a byte, low half first.
        element: place in ELEMENT_ORDER.
    """

    def generate(context, builder, signature, args):
        row, following, tile, *rest = args
        encoder = _Encoder(context, builder, (signature.args[0], *signature.args[3:]), (row, *rest))
        length = cgutils.unpack_tuple(builder, context.make_array(signature.args[0])(context, builder, row).shape)[0]
        length = builder.and_(length, length.type(-RUN))
        for case in encoder.cases():
            with cgutils.for_range_slice(builder, length.type(0), length, tile) as (start, c):
                scale, stop = encoder.scale(c), builder.add(start, tile)
                stop = builder.select(builder.icmp_signed("<", stop, length), stop, length)
                with cgutils.for_range_slice(builder, start, stop, start.type(RUN)) as (j, _):
                    fetch(context, builder, signature.args[1], following, j)
                    encoder.run(j, scale, *case)
        return context.get_dummy_value()

    whole = types.intp
    return types.void(row, row, whole, scales, scales, whole, codes, whole), generate
