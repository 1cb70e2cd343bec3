"""What numba lacks for the quantizer kernels: reinterpreting bits, vectors of 16, prefetch. Needs numba."""

# pyright: reportAttributeAccessIssue=false
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

RUN = 16  # elements that `run_top` and `run_fill` take at once
ABS = 0x7FFFFFFF


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


def _run_pointer(context, builder, array_type, array, index):
    """Pointer to RUN consecutive elements of a one-dimensional array, as one vector."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, RUN).as_pointer())


@intrinsic
def run_top(typingctx, row, index):
    """Bits of the largest |row[index : index + RUN]|. LLVM unrolls a loop of 16 before it would vectorize it."""

    def generate(context, builder, signature, args):
        vector = builder.load(_run_pointer(context, builder, signature.args[0], *args))
        vector.align = signature.args[0].dtype.bitwidth // 8
        wide = ir.VectorType(ir.IntType(32), RUN)
        if signature.args[0].dtype == types.uint16:
            bits = builder.shl(builder.zext(vector, wide), ir.Constant(wide, [16] * RUN))
        else:
            bits = builder.bitcast(vector, wide)
        bits = builder.and_(bits, ir.Constant(wide, [ABS] * RUN))
        largest = ir.FunctionType(ir.IntType(32), [wide])
        name = f"llvm.vector.reduce.smax.v{RUN}i32"
        return builder.call(cgutils.get_or_insert_function(builder.module, largest, name), [bits])

    return types.int32(row, types.intp), generate


@intrinsic
def run_fill(typingctx, row, index, value):
    """row[index : index + RUN] = value, for a float32 row."""

    def generate(context, builder, signature, args):
        vector = ir.VectorType(ir.FloatType(), RUN)
        splat = ir.Constant(vector, ir.Undefined)
        for lane in range(RUN):
            splat = builder.insert_element(splat, args[2], ir.Constant(ir.IntType(32), lane))
        store = builder.store(splat, _run_pointer(context, builder, signature.args[0], *args[:2]))
        store.align = 4
        return context.get_dummy_value()

    return types.void(row, types.intp, types.float32), generate


@intrinsic
def prefetch(typingctx, row, index):
    """Ask for the cache line of row[index], to be read soon."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, prefetch, "llvm.prefetch.p0i8")
        pointer = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(row, types.intp), generate


def at(scale, j):
    """Scale of element j, where `scale` is an array or one number for all."""


def part(scale, start, stop):
    """Scales of elements start to stop."""


@overload(at)
def _at_typed(scale, j):
    return (lambda scale, j: scale[j]) if isinstance(scale, types.Array) else (lambda scale, j: scale)


@overload(part)
def _part_typed(scale, start, stop):
    if isinstance(scale, types.Array):
        return lambda scale, start, stop: scale[start:stop]
    return lambda scale, start, stop: scale


@intrinsic
def run_differs(typingctx, row, other, index):
    """True if row[index : index + RUN] and the same run of `other` differ in any bit."""

    def generate(context, builder, signature, args):
        runs = []
        for array_type, array in zip(signature.args[:2], args[:2], strict=True):
            run = builder.load(_run_pointer(context, builder, array_type, array, args[2]))
            run.align = array_type.dtype.bitwidth // 8
            bits = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), RUN)
            runs.append(builder.bitcast(run, bits))
        width = RUN * signature.args[0].dtype.bitwidth
        changed = builder.bitcast(builder.xor(*runs), ir.IntType(width))
        return builder.icmp_unsigned("!=", changed, ir.Constant(ir.IntType(width), 0))

    return types.boolean(row, other, types.intp), generate


@intrinsic
def run_copy(typingctx, target, at_target, source, at_source):
    """target[at_target : at_target + RUN] = source[at_source : at_source + RUN], of one element type."""

    def generate(context, builder, signature, args):
        run = builder.load(_run_pointer(context, builder, signature.args[2], args[2], args[3]))
        run.align = signature.args[2].dtype.bitwidth // 8
        store = builder.store(run, _run_pointer(context, builder, signature.args[0], args[0], args[1]))
        store.align = run.align
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate
