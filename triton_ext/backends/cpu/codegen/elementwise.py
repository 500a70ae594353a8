"""Operations of the arith, math and tt dialects that act element by element, on scalars and vectors alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from llvmlite import ir
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Operation

from triton_ext.backends.cpu.codegen import float8, mathlib
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    element_of,
    everywhere,
    is_float,
    lane_type,
    scalar_of,
    size_bytes,
    with_lanes_of,
)
from triton_ext.errors import CompileError
from triton_ext.ir import source_line

Values = Sequence[ir.Value]
Lowering = Callable[[Emitter, Operation, Values], ir.Value]

_LOWERINGS: dict[str, Lowering] = {}


def lower(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    """Emit `op` on operands that are all scalars or all vectors of one width."""
    if op.name in _MOVES:
        return _LOWERINGS[op.name](emit, op, values)
    values = [decoded(emit, value, element_of(v.type)) for value, v in zip(values, op.operands, strict=True)]
    result = _LOWERINGS[op.name](emit, op, values)
    format_ = float8.format_of(element_of(op.results[0].type))
    if format_ is None or scalar_of(result.type) == I8:
        return result
    return float8.encode(emit, result, format_)


_MOVES = {"arith.select", "arith.bitcast", "tt.bitcast"}
"""Operations that look at no element."""


def decoded(emit: Emitter, value: ir.Value, element: Attribute) -> ir.Value:
    """A value to compute with: of a type that the processor has."""
    format_ = float8.format_of(element)
    return value if format_ is None else float8.decode(emit, value, format_)


def is_elementwise(op: Operation) -> bool:
    return op.name in _LOWERINGS


def cost(op: Operation) -> int:
    """Rough cost of one element relative to an addition."""
    name = op.name
    if name in _CHEAP_MATH or not (name.startswith("math.") or name in _DIVISIONS or name == "tt.extern_elementwise"):
        return 1
    return 12


_CHEAP_MATH = {"math.absf", "math.absi", "math.fma", "math.floor", "math.ceil", "math.copysign", "math.trunc"}
_DIVISIONS = {
    "arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.divf", "arith.remf", "tt.precise_divf",
}  # fmt: skip


def _define(*names: str) -> Callable[[Lowering], Lowering]:
    def register(lowering: Lowering) -> Lowering:
        _LOWERINGS.update(dict.fromkeys(names, lowering))
        return lowering

    return register


def _result_type(op: Operation, values: Values) -> ir.Type:
    """The type of the result, or of what is encoded as the result."""
    element = element_of(op.results[0].type)
    computed = F32 if float8.format_of(element) and op.name not in _MOVES else lane_type(element)
    return with_lanes_of(computed, values[0].type)


# -- integer and float arithmetic -----------------------------------------------------------------------------

_INTEGER = {
    "arith.addi": "add", "arith.subi": "sub", "arith.muli": "mul", "arith.andi": "and_", "arith.ori": "or_",
    "arith.xori": "xor",
}  # fmt: skip
_FLOAT = {"arith.addf": "fadd", "arith.subf": "fsub", "arith.mulf": "fmul", "arith.divf": "fdiv", "arith.remf": "frem"}


@_define(*_INTEGER)
def _integer(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return getattr(emit.builder, _INTEGER[op.name])(*values)


@_define(*_FLOAT)
def _float(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    element = scalar_of(values[0].type)
    # LLVM would call a library to round to bfloat16, or use an instruction that loses subnormals.
    wide = [to_float(emit, value, F32) for value in values] if element == BF16 else values
    return to_float(emit, getattr(emit.builder, _FLOAT[op.name])(*wide, flags=emit.flags), element)


@_define("tt.precise_divf")
def _precise_division(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return emit.builder.fdiv(*values)


@_define("arith.negf")
def _negate(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return emit.builder.fneg(values[0])


_SHIFTS = {"arith.shli": "shl", "arith.shrui": "lshr", "arith.shrsi": "ashr"}


@_define(*_SHIFTS)
def _shift(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return getattr(emit.builder, _SHIFTS[op.name])(*values)


@_define("arith.divsi", "arith.divui", "arith.remsi", "arith.remui")
def _division(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    """Integer division that cannot trap: lanes that a mask hides may hold a zero divisor."""
    builder = emit.builder
    signed, remainder = op.name.endswith("si"), "rem" in op.name
    a, b = values
    type_ = a.type
    width = scalar_of(type_).width
    if not _is_safe_divisor(b):
        unsafe = builder.icmp_unsigned("==", b, everywhere(type_, 0))
        if signed:
            smallest = builder.icmp_unsigned("==", a, everywhere(type_, -(1 << (width - 1))))
            minus_one = builder.icmp_unsigned("==", b, everywhere(type_, -1))
            unsafe = builder.or_(unsafe, builder.and_(smallest, minus_one))
        b = builder.select(unsafe, everywhere(type_, 1), b)
        if isinstance(type_, ir.VectorType) and width <= 32:
            # No vector unit divides integers; a double holds every 32-bit quotient exactly.
            double = with_lanes_of(F64, type_)
            widen = builder.sitofp if signed else builder.uitofp
            quotient = builder.fdiv(widen(a, double), widen(b, double))
            exact = (builder.fptosi if signed else builder.fptoui)(quotient, type_)
            return builder.sub(a, builder.mul(exact, b)) if remainder else exact
    divide = {
        (True, False): builder.sdiv, (False, False): builder.udiv,
        (True, True): builder.srem, (False, True): builder.urem,
    }[signed, remainder]  # fmt: skip
    return divide(a, b)


def _is_safe_divisor(value: ir.Value) -> bool:
    if not isinstance(value, ir.Constant):
        return False
    lanes = value.constant if isinstance(value.constant, (list, tuple)) else [value]
    return all(isinstance(lane.constant, int) and lane.constant not in (0, -1) for lane in lanes)


_EXTREMES = {
    "arith.minsi": "smin", "arith.maxsi": "smax", "arith.minui": "umin", "arith.maxui": "umax",
    "arith.minnumf": "minnum", "arith.maxnumf": "maxnum",
    "arith.minimumf": "minimum", "arith.maximumf": "maximum",
}  # fmt: skip


@_define(*_EXTREMES)
def _extreme(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return _call_intrinsic(emit, _EXTREMES[op.name], values)


def _call_intrinsic(emit: Emitter, name: str, values: Values) -> ir.Value:
    """Call an LLVM intrinsic; half precisions, for which it may need a library, compute in float32."""
    element = scalar_of(values[0].type)
    wide = [to_float(emit, value, F32) for value in values] if element in (F16, BF16) else values
    result = emit.intrinsic(name, wide[0].type, wide)
    return to_float(emit, result, element) if wide is not values else result


@_define("tt.clampf")
def _clamp(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    x, low, high = (to_float(emit, value, F32) if scalar_of(value.type) in (F16, BF16) else value for value in values)
    keep_nan = cast(StringAttr, op.attributes["propagateNan"]).data == "all"
    upper, lower_ = ("minimum", "maximum") if keep_nan else ("minnum", "maxnum")
    inner = emit.intrinsic(lower_, x.type, [x, low])
    return to_float(emit, emit.intrinsic(upper, x.type, [inner, high]), scalar_of(values[0].type))


@_define("arith.mulsi_extended", "arith.mului_extended")
def _unsupported_pair(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    raise CompileError(f"{source_line(op)}: the CPU backend does not support {op.name}")


@_define("tt.mulhiui")
def _multiply_high(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    builder = emit.builder
    type_ = values[0].type
    width = scalar_of(type_).width
    double = with_lanes_of(ir.IntType(2 * width), type_)
    product = builder.mul(builder.zext(values[0], double), builder.zext(values[1], double))
    return builder.trunc(builder.lshr(product, everywhere(double, width)), type_)


# -- comparison and choice ----------------------------------------------------------------------------------

_SIGNED = {"slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
_UNSIGNED = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">=", "eq": "==", "ne": "!="}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@_define("arith.cmpi")
def _compare_integers(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return compare_integers(emit, cast(StringAttr, op.attributes["predicate"]).data, *values)


def compare_integers(emit: Emitter, predicate: str, a: ir.Value, b: ir.Value) -> ir.Value:
    if predicate in _SIGNED:
        return emit.builder.icmp_signed(_SIGNED[predicate], a, b)
    return emit.builder.icmp_unsigned(_UNSIGNED[predicate], a, b)


@_define("arith.cmpf")
def _compare_floats(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    predicate = cast(StringAttr, op.attributes["predicate"]).data
    builder = emit.builder
    if predicate in ("ord", "uno"):
        return (builder.fcmp_ordered if predicate == "ord" else builder.fcmp_unordered)(predicate, *values)
    if predicate in ("false", "true"):
        return everywhere(with_lanes_of(I1, values[0].type), predicate == "true")
    compare = builder.fcmp_ordered if predicate[0] == "o" else builder.fcmp_unordered
    return compare(_COMPARE[predicate[1:]], *values)


@_define("arith.select")
def _select(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return emit.builder.select(*values)


# -- conversion --------------------------------------------------------------------------------------------

_CASTS = {
    "arith.extsi": "sext", "arith.extui": "zext", "arith.trunci": "trunc", "arith.fptosi": "fptosi",
    "arith.fptoui": "fptoui", "arith.bitcast": "bitcast",
}  # fmt: skip


@_define(*_CASTS)
def _cast(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return getattr(emit.builder, _CASTS[op.name])(values[0], _result_type(op, values))


@_define("arith.sitofp", "arith.uitofp")
def _from_integer(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    (value,) = values
    element = scalar_of(_result_type(op, values))
    signed = op.name == "arith.sitofp"
    convert = emit.builder.sitofp if signed else emit.builder.uitofp
    if element == BF16:
        if scalar_of(value.type).width > 32:
            value = _fitting_double(emit, value, signed)
        return to_float(emit, convert(value, with_lanes_of(F64, value.type)), BF16)
    # Integers that float32 does not hold are beyond the range of float16.
    exact = convert(value, with_lanes_of(F32 if element == F16 else element, value.type))
    return to_float(emit, exact, element)


def _fitting_double(emit: Emitter, value: ir.Value, signed: bool) -> ir.Value:
    """A 64-bit integer that a double holds and that rounds to a short format as `value` does.

    One bit stands for all of the lowest bits of a large integer.
    """
    builder, type_ = emit.builder, value.type
    lowest = (1 << 12) - 1
    size = emit.intrinsic("abs", type_, [value, ir.Constant(I1, 0)]) if signed else value
    is_large = builder.icmp_unsigned(">", size, everywhere(type_, 1 << 52))
    is_inexact = builder.icmp_unsigned("!=", builder.and_(value, everywhere(type_, lowest)), everywhere(type_, 0))
    sticky = builder.select(is_inexact, everywhere(type_, 1 << 11), everywhere(type_, 0))
    return builder.select(is_large, builder.or_(builder.and_(value, everywhere(type_, ~lowest)), sticky), value)


@_define("arith.extf", "arith.truncf", "tt.fp_to_fp")
def _convert_float(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    rounding = op.attributes.get("rounding") or op.attributes.get("roundingmode")
    toward_zero = isinstance(rounding, StringAttr) and rounding.data in ("rtz", "toward_zero")
    if isinstance(rounding, StringAttr) and not toward_zero and rounding.data not in ("rtne", "to_nearest_even"):
        raise CompileError(f"{source_line(op)}: the CPU backend does not round '{rounding.data}' in {op.name}")
    value, format_ = values[0], float8.format_of(element_of(op.results[0].type))
    if format_ is not None:
        single = _to_odd(emit, value) if scalar_of(value.type) == F64 else to_float(emit, value, F32)
        return float8.encode(emit, single, format_, toward_zero=toward_zero)
    result = to_float(emit, value, scalar_of(_result_type(op, values)))
    return _stepped_back(emit, result, value) if toward_zero else result


def _stepped_back(emit: Emitter, rounded: ir.Value, value: ir.Value) -> ir.Value:
    """`value` rounded towards zero, given it rounded to nearest in a narrower type."""
    builder, element = emit.builder, scalar_of(rounded.type)
    bits = with_lanes_of(ir.IntType(8 * size_bytes(element)), rounded.type)
    sizes = [_call_intrinsic(emit, "fabs", [x]) for x in (to_float(emit, rounded, scalar_of(value.type)), value)]
    too_far = builder.zext(builder.fcmp_ordered(">", *sizes), bits)
    return builder.bitcast(builder.sub(builder.bitcast(rounded, bits), too_far), rounded.type)


def to_float(emit: Emitter, value: ir.Value, element: ir.Type) -> ir.Value:
    """Between float types, rounded once."""
    order = {F16: 1, BF16: 1, F32: 2, F64: 3}
    source = scalar_of(value.type)
    if source == element:
        return value
    target = with_lanes_of(element, value.type)
    if source == F64 and order[element] == 1:  # not every processor has it, and there is no library to call
        return to_float(emit, _to_odd(emit, value), element)
    if order[source] == order[element]:  # half to bfloat and back
        return to_float(emit, to_float(emit, value, F32), element)
    if element == BF16:
        return _to_bfloat(emit, value)
    return (emit.builder.fpext if order[source] < order[element] else emit.builder.fptrunc)(value, target)


def _to_bfloat(emit: Emitter, value: ir.Value) -> ir.Value:
    """The upper half of a float32, rounded to nearest even."""
    builder, bits = emit.builder, with_lanes_of(I32, value.type)
    whole = builder.bitcast(value, bits)
    odd = builder.and_(builder.lshr(whole, everywhere(bits, 16)), everywhere(bits, 1))
    nearest = builder.add(whole, builder.add(odd, everywhere(bits, 0x7FFF)))
    quiet = builder.or_(whole, everywhere(bits, 0x400000))
    result = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
    upper = builder.trunc(builder.lshr(result, everywhere(bits, 16)), with_lanes_of(I16, value.type))
    return builder.bitcast(upper, with_lanes_of(BF16, value.type))


def _to_odd(emit: Emitter, value: ir.Value) -> ir.Value:
    """A double as a float that is odd where it is inexact, so that rounding it further rounds the double once."""
    builder, single, bits = emit.builder, with_lanes_of(F32, value.type), with_lanes_of(I32, value.type)
    nearest = builder.fptrunc(value, single)
    back = builder.fpext(nearest, value.type)
    sizes = [emit.intrinsic("fabs", value.type, [x]) for x in (back, value)]
    beyond = builder.zext(builder.fcmp_ordered(">", *sizes), bits)
    inexact = builder.zext(builder.fcmp_ordered("!=", back, value), bits)
    return builder.bitcast(builder.or_(builder.sub(builder.bitcast(nearest, bits), beyond), inexact), single)


@_define("arith.index_cast")
def _index_cast(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    target = _result_type(op, values)
    source, wanted = scalar_of(values[0].type).width, scalar_of(target).width
    if source == wanted:
        return values[0]
    return (emit.builder.sext if source < wanted else emit.builder.trunc)(values[0], target)


@_define("tt.bitcast")
def _bitcast(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    value, target = values[0], _result_type(op, values)
    if value.type == PTR or value.type == target:
        return value
    return emit.builder.bitcast(value, target)


@_define("tt.int_to_ptr")
def _int_to_ptr(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    value = values[0]  # the lanes of a tile of pointers are integers already
    return value if isinstance(value.type, ir.VectorType) else emit.builder.inttoptr(value, PTR)


@_define("tt.ptr_to_int")
def _ptr_to_int(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    value = values[0]
    return emit.builder.ptrtoint(value, I64) if value.type == PTR else value


# -- math ----------------------------------------------------------------------------------------------------

_INTRINSICS = {
    "math.absf": "fabs", "math.floor": "floor", "math.ceil": "ceil", "math.sqrt": "sqrt", "math.trunc": "trunc",
    "math.roundeven": "roundeven", "math.round": "round", "math.copysign": "copysign", "tt.precise_sqrt": "sqrt",
    "math.ctpop": "ctpop", "math.fma": "fma",
}  # fmt: skip
_LIBRARY = {
    f"math.{name}": name
    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "tanh", "erf", "rsqrt", "log1p", "expm1", "log10", "tan")
} | {"math.powf": "pow"}


@_define(*_INTRINSICS)
def _intrinsic(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return _call_intrinsic(emit, _INTRINSICS[op.name], values)


@_define("math.absi")
def _absolute(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return emit.intrinsic("abs", values[0].type, [values[0], ir.Constant(I1, 0)])


@_define("math.ctlz", "math.cttz")
def _count_zeros(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return emit.intrinsic(op.name.removeprefix("math."), values[0].type, [values[0], ir.Constant(I1, 0)])


@_define(*_LIBRARY)
def _library(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    return call_math(emit, op, _LIBRARY[op.name], values)


@_define("tt.extern_elementwise")
def _extern(emit: Emitter, op: Operation, values: Values) -> ir.Value:
    symbol = cast(StringAttr, op.attributes["symbol"]).data
    return call_math(emit, op, symbol.removeprefix("cpu."), values)


def call_math(emit: Emitter, op: Operation, name: str, values: Values) -> ir.Value:
    """Call a function of the math library by name; half precisions compute in float32."""
    element = scalar_of(values[0].type)
    result = scalar_of(_result_type(op, values))
    if name in _MATH_INTRINSICS and is_float(element):
        return _call_intrinsic(emit, _MATH_INTRINSICS[name], values)
    wide = [to_float(emit, v, F32) if scalar_of(v.type) in (F16, BF16) else v for v in values]
    if name in _BITWISE and not is_float(element):
        return _resized(emit, _BITWISE[name](emit, values[0]), result)
    if name in _PREDICATES and is_float(element):
        return emit.builder.zext(_PREDICATES[name](emit, wide[0]), with_lanes_of(result, values[0].type))
    if name == "fdiv":
        return to_float(emit, emit.builder.fdiv(*wide), element)
    if not mathlib.supports(name) or not is_float(element):
        raise CompileError(f"{source_line(op)}: the CPU backend has no function {name} of {element}")
    computed = mathlib.call(emit, name, wide, scalar_of(wide[0].type) if is_float(result) else result)
    return to_float(emit, computed, result) if is_float(result) else computed


_MATH_INTRINSICS = {
    "abs": "fabs", "fabs": "fabs", "floor": "floor", "ceil": "ceil", "sqrt": "sqrt", "trunc": "trunc",
    "rint": "roundeven", "nearbyint": "roundeven", "round": "round", "copysign": "copysign", "fma": "fma",
    "fmin": "minnum", "fmax": "maxnum",
}  # fmt: skip


def _is_infinite(emit: Emitter, x: ir.Value) -> ir.Value:
    size = emit.intrinsic("fabs", x.type, [x])
    return emit.builder.fcmp_ordered("==", size, everywhere(x.type, float("inf")))


def _is_finite(emit: Emitter, x: ir.Value) -> ir.Value:
    size = emit.intrinsic("fabs", x.type, [x])
    return emit.builder.fcmp_ordered("<", size, everywhere(x.type, float("inf")))


def _has_sign(emit: Emitter, x: ir.Value) -> ir.Value:
    one = emit.intrinsic("copysign", x.type, [everywhere(x.type, 1.0), x])
    return emit.builder.fcmp_ordered("<", one, everywhere(x.type, 0.0))


_PREDICATES: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "isnan": lambda emit, x: emit.builder.fcmp_unordered("uno", x, x),
    "isinf": _is_infinite, "finitef": _is_finite, "signbit": _has_sign,
}  # fmt: skip


def _first_set(emit: Emitter, x: ir.Value) -> ir.Value:
    """One more than the lowest set bit's number; 0 without one."""
    number = emit.intrinsic("cttz", x.type, [x, ir.Constant(I1, 0)])
    zero, one = (everywhere(x.type, n) for n in (0, 1))
    return emit.builder.select(emit.builder.icmp_unsigned("==", x, zero), zero, emit.builder.add(number, one))


_BITWISE: dict[str, Callable[[Emitter, ir.Value], ir.Value]] = {
    "abs": lambda emit, x: emit.intrinsic("abs", x.type, [x, ir.Constant(I1, 0)]),
    "brev": lambda emit, x: emit.intrinsic("bitreverse", x.type, [x]),
    "clz": lambda emit, x: emit.intrinsic("ctlz", x.type, [x, ir.Constant(I1, 0)]),
    "popc": lambda emit, x: emit.intrinsic("ctpop", x.type, [x]),
    "ffs": _first_set,
}


def _resized(emit: Emitter, value: ir.Value, element: ir.Type) -> ir.Value:
    return value if scalar_of(value.type) == element else emit.builder.trunc(value, with_lanes_of(element, value.type))
