"""The math library: functions of float32 and float64 lanes, as vector code that LLVM inlines.

Series with exact reductions of the argument. A float32 function other than the frequent ones (exp, exp2, log, log2)
computes in float64, where a short series and a plain formula are exact enough to be rounded once. What has no formula
here calls the C library for each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial, log, pi

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import F32, F64, I1, I8, scalar_of, size_bytes
from triton_ext.backends.cpu.codegen.real import DOUBLE, SINGLE, Integer, Real

# Constants in two parts: the first has so few digits that its product with an exponent is exact.
_LN2 = {SINGLE: (0.693145751953125, 1.4286068203094173e-06), DOUBLE: (0.6931471805601177, -1.7239444525614835e-13)}
_LOG2_E = {SINGLE: (1.44268798828125, 7.05260771340736e-06), DOUBLE: (1.4426950408889634, 2.0355273740931033e-17)}
_HALF_PI = 1.5707963267948966, 6.123233995736766e-17

_EXP_TERMS = {SINGLE: 8, DOUBLE: 14}
_LOG_TERMS = {SINGLE: 4, DOUBLE: 10}
_EXP_RANGE = {SINGLE: (-104.0, 89.0), DOUBLE: (-746.0, 710.0)}
_EXP2_RANGE = {SINGLE: (-151.0, 129.0), DOUBLE: (-1076.0, 1025.0)}
"""Beyond these, exponentials are zero or infinite."""


# -- exponentials and logarithms -----------------------------------------------------------------------------


def _round(x: Real, factor: float) -> tuple[Real, Integer]:
    """x * factor, rounded to an integer."""
    shift = x.lift(x.format.rounding_shift)
    shifted = x.fma(factor, shift)
    return shifted - shift, shifted.bits() - shift.bits()


def _to_real(number: Integer, like: Real) -> Real:
    shift = like.lift(like.format.rounding_shift)
    return (shift.bits() + number).as_real() - shift


def _scale(value: Real, exponent: Integer) -> Real:
    """value * 2^exponent. Without an instruction for it, in two factors: neither overflows, and a subnormal result is
    rounded once.
    """
    if value.emit.lanes >= 16:  # AVX-512 has one
        types = (value.value.type, exponent.value.type)
        if value.format is SINGLE:
            return Real(value.emit, value.emit.intrinsic("ldexp", types[0], [value.value, exponent.value], types))
    mantissa, bias = value.format.mantissa, value.format.bias
    half = exponent >> 1
    return value * ((half + bias) << mantissa).as_real() * ((exponent - half + bias) << mantissa).as_real()


def _exp_series(x: Real) -> Real:
    """e^x for |x| <= ln(2) / 2."""
    return x.polynomial([1.0 / factorial(k) for k in range(_EXP_TERMS[x.format])])


def _within(x: Real, low: float, high: float, function: Callable[[Real], Real]) -> Real:
    """An exponential that is zero below `low`, where computing it would take the slow path of subnormal numbers."""
    vanishes = x < low
    return vanishes.choose(0.0, function(vanishes.choose(0.0, (x > high).choose(high, x))))


def exp(x: Real) -> Real:
    def inner(x: Real) -> Real:
        rounded, exponent = _round(x, 1.0 / log(2.0))
        high, low = _LN2[x.format]
        return _scale(_exp_series(rounded.fma(-low, rounded.fma(-high, x))), exponent)

    return _within(x, *_EXP_RANGE[x.format], inner)


def exp2(x: Real) -> Real:
    def inner(x: Real) -> Real:
        rounded, exponent = _round(x, 1.0)
        return _scale(_exp_series((x - rounded) * log(2.0)), exponent)

    return _within(x, *_EXP2_RANGE[x.format], inner)


def _split(x: Real) -> tuple[Real, Real]:
    """(ln m, e) of a positive x = m * 2^e with m between sqrt(1/2) and sqrt(2)."""
    format_ = x.format
    subnormal = x < format_.smallest_normal
    scaled = subnormal.choose(x * 2.0**format_.mantissa, x)
    start = x.lift(0.5**0.5).bits()
    offset = scaled.bits() - start
    exponent = _to_real(offset >> format_.mantissa, x) - subnormal.choose(x.lift(format_.mantissa), 0.0)
    f = ((offset & ((1 << format_.mantissa) - 1)) + start).as_real() - 1.0
    # ln(1 + f) = 2 artanh(s) = 2 s + 2 s^3 / 3 + ..., where 2 s = f - s f.
    s = f / (f + 2.0)
    z = s * s
    rest = z * z.polynomial([2.0 / (2 * k + 3) for k in range(_LOG_TERMS[format_])])
    return f - s * (f - rest), exponent


def _at_edges(x: Real, result: Real) -> Real:
    """A logarithm's values where x is zero, negative, infinite or NaN."""
    result = x.equals(0.0).choose(float("-inf"), result)
    result = (x < 0.0).choose(float("nan"), result)
    return ((x < float("inf")) | (x <= 0.0)).choose(result, x)


def log_e(x: Real) -> Real:
    mantissa, exponent = _split(x)
    high, low = _LN2[x.format]
    return _at_edges(x, exponent.fma(high, exponent.fma(low, mantissa)))


def log2(x: Real) -> Real:
    mantissa, exponent = _split(x)
    high, low = _LOG2_E[x.format]
    return _at_edges(x, mantissa.fma(high, mantissa.fma(low, exponent)))


def rsqrt(x: Real) -> Real:
    return 1.0 / x.sqrt()


# -- float32 functions, computed in float64 -------------------------------------------------------------------


def expm1(x: Real) -> Real:
    return (abs(x) < 1e-4).choose(x + 0.5 * x * x, exp(x) - 1.0).with_sign_of(x)


def log1p(x: Real) -> Real:
    return (abs(x) < 1e-6).choose(x - 0.5 * x * x, log_e(x + 1.0))


def log10(x: Real) -> Real:
    return log_e(x) * (1.0 / log(10.0))


def exp10(x: Real) -> Real:
    return exp(x * log(10.0))


def tanh(x: Real) -> Real:
    small = exp(-2.0 * abs(x))
    return (abs(x) < 1e-5).choose(x, ((1.0 - small) / (1.0 + small)).with_sign_of(x))


def sinh(x: Real) -> Real:
    e = exp(x)
    return (abs(x) < 1e-4).choose(x + x * x * x * (1 / 6), 0.5 * (e - 1.0 / e))


def cosh(x: Real) -> Real:
    e = exp(x)
    return 0.5 * (e + 1.0 / e)


def asinh(x: Real) -> Real:
    size = abs(x)
    far = log_e(size + (size * size + 1.0).sqrt())
    return (size < 1e-4).choose(size - size * size * size * (1 / 6), far).with_sign_of(x)


def acosh(x: Real) -> Real:
    return log_e(x + (x - 1.0).sqrt() * (x + 1.0).sqrt())


def atanh(x: Real) -> Real:
    return (abs(x) < 1e-4).choose(x + x * x * x * (1 / 3), 0.5 * log_e((1.0 + x) / (1.0 - x)))


_ERF = [
    1.12837916663, 0.636619834578, 0.102771277117, -0.0191176945815, -0.000253061958978, 0.0017993552975,
    -0.000740687169897, 0.000167481573475, -2.13547495686e-05, 1.19331454019e-06,
]  # fmt: skip
"""Of -ln(1 - erf(x)) / x on [0, 4]; erf has a relative error of 4e-10 with it."""


def erf(x: Real) -> Real:
    size = abs(x).clamp(0.0, 4.0)
    return (-expm1(-(size * size.polynomial(_ERF)))).with_sign_of(x)


_SIN = [(-1.0) ** k / factorial(2 * k + 1) for k in range(6)]
_COS = [(-1.0) ** k / factorial(2 * k) for k in range(7)]
_HUGE = 2.0**50
"""Larger angles have too many quarter turns for the reduction."""


def _quarter_turns(x: Real) -> tuple[Real, Real, Integer]:
    """sin(r), cos(r) and n with x = n pi/2 + r, |r| <= pi/4."""
    rounded, number = _round(x, 2.0 / pi)
    high, low = _HALF_PI
    r = rounded.fma(-low, rounded.fma(-high, x))
    z = r * r
    return r * z.polynomial(_SIN), z.polynomial(_COS), number


def _sine(x: Real, shift: int) -> Real:
    sine, cosine, number = _quarter_turns(x)
    number = number + shift
    value = (number & 1).nonzero().choose(cosine, sine)
    return (number & 2).nonzero().choose(-value, value)


def sin(x: Real) -> Real:
    return _unless_huge(x, "sin", _sine(x, 0))


def cos(x: Real) -> Real:
    return _unless_huge(x, "cos", _sine(x, 1))


def tan(x: Real) -> Real:
    sine, cosine, number = _quarter_turns(x)
    odd = (number & 1).nonzero()
    return _unless_huge(x, "tan", odd.choose(-cosine, sine) / odd.choose(sine, cosine))


def _unless_huge(x: Real, name: str, result: Real) -> Real:
    huge = abs(x) >= _HUGE
    emit, flag = x.emit, huge.value
    if isinstance(flag.type, ir.VectorType):
        flag = emit.intrinsic("vector.reduce.or", I1, [flag], (flag.type,))
    exact = [lambda: [_each_lane(emit, name, scalar_of(x.value.type), [x.value])], lambda: [result.value]]
    (value,) = emit.either(flag, *exact)
    return huge.choose(Real(emit, value), result)


_ATAN = [(-1.0) ** k / (2 * k + 1) for k in range(12)]


def _atan_of_ratio(y: Real, x: Real) -> Real:
    """atan(y / x) for y, x >= 0, not both zero or infinite."""
    steep = y > x
    t = steep.choose(x, y) / steep.choose(y, x)
    far = t > 2.0**0.5 - 1.0  # tan(pi / 8)
    t = far.choose((t - 1.0) / (t + 1.0), t)
    angle = t * (t * t).polynomial(_ATAN) + far.choose(t.lift(pi / 4), 0.0)
    return steep.choose(pi / 2 - angle, angle)


def atan(x: Real) -> Real:
    return _atan_of_ratio(abs(x), x.lift(1.0)).with_sign_of(x)


def atan2(y: Real, x: Real) -> Real:
    infinity = float("inf")
    both = abs(x).equals(abs(y)) & (abs(x).equals(0.0) | abs(x).equals(infinity))
    zero = both & x.equals(0.0)  # as if y were 0 and x were 1
    angle = _atan_of_ratio(zero.choose(0.0, both.choose(1.0, abs(y))), both.choose(1.0, abs(x)))
    left = x.lift(1.0).with_sign_of(x) < 0.0
    return left.choose(pi - angle, angle).with_sign_of(y)


def asin(x: Real) -> Real:
    return atan2(x, ((1.0 - x) * (1.0 + x)).sqrt())


def acos(x: Real) -> Real:
    return atan2(((1.0 - x) * (1.0 + x)).sqrt(), x)


def pow_(x: Real, y: Real) -> Real:
    size = abs(x)
    result = exp2(y * log2(size))
    half = 0.5 * y
    whole, odd = y.floor().equals(y), ~half.floor().equals(half)
    negative = x < 0.0
    result = (negative & ~whole & (size < float("inf"))).choose(float("nan"), result)
    result = (whole & odd & (abs(y) < float("inf"))).choose(result.with_sign_of(x), result)
    certain = y.equals(0.0) | x.equals(1.0) | (x.equals(-1.0) & abs(y).equals(float("inf")))
    return certain.choose(1.0, result)


_BESSEL_SERIES_END = 30.0


def _bessel_far(size: Real, order: int) -> Real:
    """I_order(size) for large arguments. e^x in two factors: the result is finite where e^x is not."""
    terms = [1.0]
    for k in range(1, 21):
        terms.append(-terms[-1] * (4.0 * order**2 - (2 * k - 1) ** 2) / (8.0 * k))
    most = size.clamp(0.0, 700.0)
    value = exp(most) * ((1.0 / size).polynomial(terms) / (size * (2.0 * pi)).sqrt()) * exp(size - most)
    return size.equals(float("inf")).choose(size, value)


def _bessel_near(size: Real, order: int) -> Real:
    """The power series of I_order(size) / (size / 2)^order in size^2, whose terms are all positive; its derivative is
    a quarter of the next order's series, and takes the rounding error of size^2 along.
    """
    x = size.clamp(0.0, _BESSEL_SERIES_END)
    square = x * x
    series, next_series = (
        square.polynomial([0.25**k / (factorial(k) * factorial(k + n)) for k in range(46)]) for n in (order, order + 1)
    )
    return series + x.fma(x, -square) * 0.25 * next_series


def bessel_i0(x: Real) -> Real:
    size = abs(x)
    result = (size <= _BESSEL_SERIES_END).choose(_bessel_near(size, 0), _bessel_far(size, 0))
    return x.is_nan().choose(x, result)


def bessel_i1(x: Real) -> Real:
    size = abs(x)
    result = (size <= _BESSEL_SERIES_END).choose(0.5 * size * _bessel_near(size, 1), _bessel_far(size, 1))
    return x.is_nan().choose(x, result.with_sign_of(x))


_NATIVE: dict[str, Callable[..., Real]] = {"exp": exp, "exp2": exp2, "log": log_e, "log2": log2, "rsqrt": rsqrt}
_THROUGH_DOUBLE: dict[str, Callable[..., Real]] = {
    "acos": acos, "acosh": acosh, "asin": asin, "asinh": asinh, "atan": atan, "atan2": atan2, "atanh": atanh,
    "cos": cos, "cosh": cosh, "erf": erf, "exp10": exp10, "expm1": expm1, "log10": log10, "log1p": log1p, "pow": pow_,
    "sin": sin, "sinh": sinh, "tan": tan, "tanh": tanh,
}  # fmt: skip
_ALWAYS_DOUBLE: dict[str, Callable[..., Real]] = {"cyl_bessel_i0": bessel_i0, "cyl_bessel_i1": bessel_i1}
"""Formulas in float64 for what the C library does not have."""
_C_LIBRARY = frozenset(_THROUGH_DOUBLE) | {
    "cbrt", "erfc", "fdim", "fmod", "hypot", "ilogb", "j0", "j1", "ldexp", "lgamma", "llrint", "llround", "logb",
    "nextafter", "remainder", "tgamma", "y0", "y1",
}  # fmt: skip


# -- functions of a module -----------------------------------------------------------------------------------


def supports(name: str) -> bool:
    return name in _NATIVE or name in _ALWAYS_DOUBLE or name in _C_LIBRARY


def call(emit: Emitter, name: str, arguments: Sequence[ir.Value], result: ir.Type) -> ir.Value:
    """Call a supported function of float32 or float64 lanes whose result has elements of type `result`."""
    element = scalar_of(arguments[0].type)
    through_double = name in _ALWAYS_DOUBLE or (element == F32 and name in _THROUGH_DOUBLE)
    if not through_double and name not in _NATIVE:
        return _each_lane(emit, name, result, arguments)
    formula = (_THROUGH_DOUBLE | _ALWAYS_DOUBLE | _NATIVE)[name]
    format_ = DOUBLE if through_double or element == F64 else SINGLE

    def body(inner: Emitter, values: Sequence[ir.Value]) -> ir.Value:
        reals = [Real(inner, value).in_format(format_) for value in values]
        return formula(*reals).in_format(SINGLE if element == F32 else DOUBLE).value

    return _call_defined(emit, name, arguments, arguments[0].type, body, "alwaysinline")


def _each_lane(emit: Emitter, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    """Call the C library's function; for a vector out of line, lane after lane."""
    element = scalar_of(arguments[0].type)
    c_name = name + "f" if element == F32 else name
    first = arguments[0].type
    if not isinstance(first, ir.VectorType):
        return emit.builder.call(emit.declare(c_name, result, [v.type for v in arguments]), arguments)

    def body(inner: Emitter, values: Sequence[ir.Value]) -> ir.Value:
        builder, count = inner.builder, first.count

        def memory(type_: ir.Type) -> ir.Value:
            place = builder.alloca(ir.ArrayType(I8, count * size_bytes(type_)))
            place.align = 64
            place.type = ir.PointerType()
            return place

        places = [memory(scalar_of(value.type)) for value in values]
        target = memory(result)
        for value, place in zip(values, places, strict=True):
            inner.store(value, place)

        def lane(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            scalars = []
            for value, place in zip(values, places, strict=True):
                scalar = scalar_of(value.type)
                scalars.append(inner.load(inner.offset(place, index, scalar), scalar))
            inner.store(_each_lane(inner, name, result, scalars), inner.offset(target, index, result))
            return []

        inner.loop(0, count, 1, [], lane)
        return inner.load(target, ir.VectorType(result, count))

    return _call_defined(emit, f"{c_name}.lanes", arguments, ir.VectorType(result, first.count), body, "noinline")


def _call_defined(
    emit: Emitter,
    name: str,
    arguments: Sequence[ir.Value],
    result: ir.Type,
    body: Callable[[Emitter, Sequence[ir.Value]], ir.Value],
    inlining: str,
) -> ir.Value:
    """Call a function of this module, defined by `body` at its first use."""
    first = arguments[0].type
    lanes = f".v{first.count}" if isinstance(first, ir.VectorType) else ""
    full = f"tx.{name}{lanes}.{scalar_of(first).intrinsic_name}"
    function = emit.module.globals.get(full)
    if function is None:
        function = ir.Function(emit.module, ir.FunctionType(result, [value.type for value in arguments]), full)
        function.linkage = "internal"
        function.attributes.add(inlining)
        function.attributes.add("nounwind")
        inner = Emitter(emit.module, function, fast_fma=False, lanes=emit.lanes)
        inner.builder.ret(body(inner, function.args))
    return emit.builder.call(function, arguments)
