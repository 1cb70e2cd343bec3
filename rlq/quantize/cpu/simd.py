"""What numba lacks for the quantizer kernels: vectors, reinterpreted bits, prefetch, as LLVM IR. Needs numba."""

# pyright: reportAttributeAccessIssue=false
from collections.abc import Sequence

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

RUN = 16  # elements that are loaded, compared and encoded at once
ABS = 0x7FFFFFFF


def _operator(name: str):
    """A method of `Lanes`: an instruction of LLVM, for floating-point numbers the one whose name begins with f."""

    def apply(self: "Lanes", other: "Lanes | float") -> "Lanes":
        instruction = f"f{name}" if self.floating else name
        return self._apply(getattr(self.builder, instruction), other)

    return apply


class Lanes:
    """A vector in LLVM IR with Python's operators: bits (int32, int16; they wrap around) or float32 numbers.

    A Python number on the right stands for a vector of it.
    """

    def __init__(self, builder, value):
        self.builder, self.value = builder, value
        self.floating = isinstance(value.type.element, ir.FloatType)
        self.width = 32 if self.floating else value.type.element.width

    __add__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = _operator("mul")
    __truediv__ = _operator("div")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")

    def __neg__(self):
        return Lanes(self.builder, self.builder.fneg(self.value))

    def smax(self, other):
        """The larger of two bit patterns, as signed numbers."""
        return self._call("smax", other)

    def umax(self, other):
        """The larger of two bit patterns, as numbers without sign."""
        return self._call("umax", other)

    def umin(self, other):
        """The smaller of two bit patterns, as numbers without sign."""
        return self._call("umin", other)

    def times_plus(self, factor, summand: "Lanes") -> "Lanes":
        """self * factor + summand, rounded once."""
        return self._call("fma", factor, summand)

    def top(self):
        """The largest of all lanes, as signed numbers; a scalar."""
        function = ir.FunctionType(self.value.type.element, [self.value.type])
        return self._intrinsic("vector.reduce.smax", function, self.value)

    def bits(self) -> "Lanes":
        """The same bits as int32."""
        return self._cast(ir.IntType(32))

    def shorts(self) -> "Lanes":
        """The same bits as int16."""
        return self._cast(ir.IntType(16))

    def floats(self) -> "Lanes":
        """The same bits as float32."""
        return self._cast(ir.FloatType())

    def low_bytes(self) -> "Lanes":
        """The low 8 bits of each lane."""
        return Lanes(self.builder, self.builder.trunc(self.value, ir.VectorType(ir.IntType(8), self.value.type.count)))

    def narrow(self, *, signed: bool) -> "Lanes":
        """Each lane in 8 bits, saturating, which CPUs do in one instruction; from lanes that are signed numbers."""
        lowest, highest = (-128, 127) if signed else (0, 255)
        return self._call("smax", lowest)._call("smin", highest).low_bytes()

    def pick(self, lanes: Sequence[int]) -> "Lanes":
        """Some of the lanes."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
        return Lanes(self.builder, self.builder.shuffle_vector(self.value, _undefined(self.value.type), mask))

    def _cast(self, element) -> "Lanes":
        width = 32 if isinstance(element, ir.FloatType) else element.width
        vector = ir.VectorType(element, self.value.type.count * self.width // width)
        return Lanes(self.builder, self.builder.bitcast(self.value, vector))

    def _vector(self, other):
        """What `other` stands for: a vector of the same type."""
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.value.type.count)

    def _apply(self, operation, other) -> "Lanes":
        return Lanes(self.builder, operation(self.value, self._vector(other)))

    def _call(self, name: str, *others) -> "Lanes":
        values = (self.value, *map(self._vector, others))
        function = ir.FunctionType(self.value.type, [self.value.type] * len(values))
        return Lanes(self.builder, self._intrinsic(name, function, *values))

    def _intrinsic(self, name: str, function, *values):
        suffix = f"v{self.value.type.count}{'f' if self.floating else 'i'}{self.width}"
        known = cgutils.get_or_insert_function(self.builder.module, function, f"llvm.{name}.{suffix}")
        return self.builder.call(known, values)


def clamp(lanes: Lanes, limit: float) -> Lanes:
    """Numbers from -limit to limit."""
    builder, bounded = lanes.builder, lanes
    for order, bound in (("<", limit), (">", -limit)):
        value, edge = bounded.value, ir.Constant(lanes.value.type, [bound] * lanes.value.type.count)
        bounded = Lanes(builder, builder.select(builder.fcmp_ordered(order, value, edge), value, edge))
    return bounded


def _undefined(vector):
    return ir.Constant(vector, ir.Undefined)


def splat(builder, scalar, count: int) -> Lanes:
    """A vector of `count` times one number."""
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(_undefined(vector), scalar, ir.Constant(ir.IntType(32), 0))
    return Lanes(builder, first).pick([0] * count)


def pointer_to(context, builder, array_type, array, index, vector=None):
    """Pointer to an element of a one-dimensional array, or to a vector that starts there."""
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    return data if vector is None else builder.bitcast(data, vector.as_pointer())


def load_run(context, builder, array_type, array, index) -> Lanes:
    """RUN elements of a row: lanes of int16 for bfloat16, which comes as uint16; lanes of int32 for float32."""
    width = array_type.dtype.bitwidth
    place = pointer_to(context, builder, array_type, array, index, ir.VectorType(ir.IntType(width), RUN))
    return Lanes(builder, builder.load(place, align=width // 8))


@intrinsic
def bits_of(typingctx, value):
    """Reinterpret float32 as int32; numba has no scalar form that LLVM vectorizes."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def float_of(typingctx, value):
    """Reinterpret the low 32 bits of an integer as float32."""

    def generate(context, builder, signature, args):
        low = args[0] if args[0].type.width == 32 else builder.trunc(args[0], ir.IntType(32))
        return builder.bitcast(low, ir.FloatType())

    return types.float32(value), generate


@intrinsic
def wide(typingctx, value):
    """An input element as float32: float32 itself, or bfloat16 given as its uint16 bits."""
    if value == types.float32:
        return types.float32(value), lambda context, builder, signature, args: args[0]

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


class _Top:
    """Emits code that finds the largest magnitude among runs."""

    def __init__(self, context, builder, row_type, row):
        self.context, self.builder, self.row = context, builder, (row_type, row)
        self.width = row_type.dtype.bitwidth
        zeros = ir.Constant(ir.VectorType(ir.IntType(self.width), RUN), [0] * RUN)
        self.so_far = cgutils.alloca_once_value(builder, zeros)

    def raise_by(self, start):
        """Take the run in that begins at `start`."""
        magnitudes = load_run(self.context, self.builder, *self.row, start) & (ABS >> (32 - self.width))
        self.builder.store(magnitudes.smax(self._lanes()).value, self.so_far)

    def bits(self):
        """The largest of all, as bits of float32."""
        word = ir.IntType(32)
        return self.builder.shl(self.builder.zext(self._lanes().top(), word), word(32 - self.width))

    def _lanes(self) -> Lanes:
        return Lanes(self.builder, self.builder.load(self.so_far))


@intrinsic
def runs_top(typingctx, row, start, stop):
    """Bits of the largest |row[start:stop]| as float32, for a whole number of runs."""

    def generate(context, builder, signature, args):
        top = _Top(context, builder, signature.args[0], args[0])
        with cgutils.for_range_slice(builder, args[1], args[2], args[1].type(RUN)) as (start, _):
            top.raise_by(start)
        return top.bits()

    return types.int32(row, types.intp, types.intp), generate


def fetch(context, builder, array_type, array, index):
    """Ask for the cache line of array[index], to be read soon."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    pointer = builder.bitcast(pointer_to(context, builder, array_type, array, index, ir.IntType(8)), byte)
    prefetch = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, prefetch, "llvm.prefetch.p0i8")
    builder.call(function, [pointer, word(0), word(3), word(1)])


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of array[index], to be read soon."""

    def generate(context, builder, signature, args):
        fetch(context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
