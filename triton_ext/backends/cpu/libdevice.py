"""What `triton.language.extra.libdevice` means on the CPU: functions by name, from codegen/mathlib.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.language import core, math

_FLOATS = (core.float32, core.float64, core.float16, core.bfloat16)
_INTEGERS = (core.int32, core.int64)

_UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "ceil", "cos", "cosh",
    "cyl_bessel_i0", "cyl_bessel_i1", "erf", "erfc", "exp",
    "exp10", "exp2", "expm1", "fabs", "floor", "j0", "j1", "lgamma", "log", "log10", "log1p", "log2", "logb",
    "nearbyint", "rint", "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "tgamma", "trunc", "y0", "y1",
)  # fmt: skip
_BINARY = ("atan2", "copysign", "fdim", "fmax", "fmin", "fmod", "hypot", "nextafter", "pow", "remainder")
_OTHER_NAMES = {
    "div_rn": "fdiv", "fast_cosf": "cos", "fast_exp10f": "exp10", "fast_expf": "exp", "fast_log10f": "log10",
    "fast_log2f": "log2", "fast_logf": "log", "fast_powf": "pow", "fast_sinf": "sin", "fast_tanf": "tan",
    "fast_tanhf": "tanh", "fast_dividef": "fdiv", "fma_rn": "fma", "sqrt_rn": "sqrt",
}  # fmt: skip


def _function(symbol: str, types: dict[tuple[core.dtype, ...], core.dtype]) -> Callable[..., Any]:
    """A function of Triton's language. `types`: the result's type for each tuple of the arguments' types."""
    table = {arguments: (f"cpu.{symbol}", result) for arguments, result in types.items()}

    @core.extern
    def function(*args: Any, _semantic: Any = None) -> Any:
        tensors = [_semantic.to_tensor(arg) for arg in args]
        if tuple(tensor.dtype for tensor in tensors) not in table:
            tensors = _promoted(tensors, _semantic)
        return core.extern_elementwise("", "", tensors, table, is_pure=True, _semantic=_semantic)

    function.__name__ = function.__qualname__ = symbol
    return function


def _promoted(tensors: list[Any], semantic: Any) -> list[Any]:
    """The arguments in one floating-point type, the widest among them (float32 if there is none)."""
    floats = [t.dtype for t in tensors if t.dtype.is_floating()]
    wide = max(floats, key=lambda t: t.primitive_bitwidth, default=core.float32)
    return [semantic.cast(t, wide) for t in tensors]


def _of_floats(count: int) -> dict[tuple[core.dtype, ...], core.dtype]:
    return {(t,) * count: t for t in _FLOATS}


_functions = {name: _function(name, _of_floats(1)) for name in _UNARY}
_functions |= {name: _function(name, _of_floats(2)) for name in _BINARY}
_functions |= {
    "abs": _function("abs", _of_floats(1) | {(t,): t for t in _INTEGERS}),
    "brev": _function("brev", {(t,): t for t in _INTEGERS}),
    "clz": _function("clz", {(t,): core.int32 for t in _INTEGERS}),
    "fdiv": _function("fdiv", _of_floats(2)),
    "ffs": _function("ffs", {(t,): core.int32 for t in _INTEGERS}),
    "fma": _function("fma", _of_floats(3)),
    "ilogb": _function("ilogb", {(t,): core.int32 for t in _FLOATS}),
    "ldexp": _function("ldexp", {(t, core.int32): t for t in _FLOATS}),
    "llrint": _function("llrint", {(t,): core.int64 for t in _FLOATS}),
    "llround": _function("llround", {(t,): core.int64 for t in _FLOATS}),
    "popc": _function("popc", {(t,): core.int32 for t in _INTEGERS}),
    **{name: _function(name, {(t,): core.int32 for t in _FLOATS}) for name in ("isnan", "isinf", "finitef", "signbit")},
}
_functions |= {alias: _functions[name] for alias, name in _OTHER_NAMES.items() if name in _functions}
_functions["isfinited"] = _functions["finitef"]
globals().update(_functions)

_fma, _exp, _erf, _erfc, _log, _sqrt = (_functions[name] for name in ("fma", "exp", "erf", "erfc", "log", "sqrt"))


@triton.jit
def mul_rn(x, y):  # type: ignore[no-untyped-def]
    """x * y, rounded on its own: never contracted with an addition that follows."""
    return _fma(x, y, -0.0)


@triton.jit
def erfcx(x):  # type: ignore[no-untyped-def]
    """exp(x^2) erfc(x), computed in float64; the rounding error of x^2 is carried along."""
    a = x.to(core.float64)
    square = a * a
    rest = _fma(a, a, -square)
    near = _erfc(a) * _exp(square) * (1.0 + rest)
    near = core.where(a < -26.7, float("inf"), near)
    t = 0.5 / square
    series = 1.0 - t * (1.0 - 3.0 * t * (1.0 - 5.0 * t * (1.0 - 7.0 * t * (1.0 - 9.0 * t * (1.0 - 11.0 * t)))))
    return core.where(a > 25.0, 0.5641895835477563 / a * series, near).to(x.dtype)


@triton.jit
def erfinv(x):  # type: ignore[no-untyped-def]
    """The inverse of erf: Winitzki's approximation, then Halley steps in float64, on erfc where erf is close to 1."""
    v = x.to(core.float64)
    a = math.abs(v)
    logarithm = _log((1.0 - a) * (1.0 + a))
    middle = 4.330746750799873 + 0.5 * logarithm
    squared = _sqrt(middle * middle - logarithm / 0.147) - middle
    y = _sqrt(core.where(squared < 0, 0.0, squared))
    for _ in core.static_range(3):
        error = core.where(a > 0.5, (1.0 - a) - _erfc(y), _erf(y) - a)
        step = error * 0.8862269254527580 * _exp(y * y)
        y -= step / (1.0 + y * step)
    y = core.where(a == 1.0, float("inf"), y)
    return core.where(v < 0, -y, core.where(v == 0, v, y)).to(x.dtype)


__all__ = [*_functions, "erfcx", "erfinv", "mul_rn"]
