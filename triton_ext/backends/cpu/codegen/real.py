"""Floating-point values under construction, with operators: what the formulas of the math library are written in."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import F32, F64, I32, I64, scalar_of, with_lanes_of


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    type: ir.Type
    bits: ir.Type
    mantissa: int
    bias: int

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def rounding_shift(self) -> float:
        """Adding it rounds to an integer and leaves that in the low bits: there is no conversion to overflow."""
        return 1.5 * 2.0**self.mantissa


SINGLE = Format(F32, I32, 23, 127)
DOUBLE = Format(F64, I64, 52, 1023)
_FORMATS = {F32: SINGLE, F64: DOUBLE}


@dataclass(frozen=True, eq=False)
class Integer:
    """Integer lanes of a float's width."""

    emit: Emitter
    value: ir.Value

    def _constant(self, number: int) -> ir.Value:
        element = scalar_of(self.value.type)
        return _everywhere(ir.Constant(element, number), self.value.type)

    def _apply(self, operation: str, other: Integer | int) -> Integer:
        right = other.value if isinstance(other, Integer) else self._constant(other)
        return Integer(self.emit, getattr(self.emit.builder, operation)(self.value, right))

    def __add__(self, other: Integer | int) -> Integer:
        return self._apply("add", other)

    def __sub__(self, other: Integer | int) -> Integer:
        return self._apply("sub", other)

    def __and__(self, other: Integer | int) -> Integer:
        return self._apply("and_", other)

    def __or__(self, other: Integer | int) -> Integer:
        return self._apply("or_", other)

    def __lshift__(self, other: int) -> Integer:
        return self._apply("shl", other)

    def __rshift__(self, other: int) -> Integer:
        return self._apply("ashr", other)

    def nonzero(self) -> Truth:
        return Truth(self.emit, self.emit.builder.icmp_unsigned("!=", self.value, self._constant(0)))

    def as_real(self) -> Real:
        """The float with these bits."""
        return Real(self.emit, self.emit.builder.bitcast(self.value, with_lanes_of(_float_of(self), self.value.type)))

    def to_real(self) -> Real:
        """The float of this value."""
        return Real(self.emit, self.emit.builder.sitofp(self.value, with_lanes_of(_float_of(self), self.value.type)))


def _float_of(value: Integer) -> ir.Type:
    return F32 if scalar_of(value.value.type) == I32 else F64


@dataclass(frozen=True, eq=False)
class Truth:
    """A condition for each lane."""

    emit: Emitter
    value: ir.Value

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.emit, self.emit.builder.and_(self.value, other.value))

    def __or__(self, other: Truth) -> Truth:
        return Truth(self.emit, self.emit.builder.or_(self.value, other.value))

    def __invert__(self) -> Truth:
        return Truth(self.emit, self.emit.builder.not_(self.value))

    def choose(self, yes: Real | float, no: Real | float) -> Real:
        like = yes if isinstance(yes, Real) else no
        assert isinstance(like, Real)
        return Real(self.emit, self.emit.builder.select(self.value, like.lift(yes).value, like.lift(no).value))


@dataclass(frozen=True, eq=False)
class Real:
    """A float32 or float64, or a vector of them. Comparisons with NaN are false, except `!=`."""

    emit: Emitter
    value: ir.Value

    @property
    def format(self) -> Format:
        return _FORMATS[scalar_of(self.value.type)]

    def lift(self, number: Real | float) -> Real:
        """`number` in this value's type and lanes."""
        if isinstance(number, Real):
            return number
        return Real(self.emit, _everywhere(ir.Constant(self.format.type, float(number)), self.value.type))

    def _apply(self, operation: str, left: Real | float, right: Real | float) -> Real:
        function = getattr(self.emit.builder, operation)
        return Real(self.emit, function(self.lift(left).value, self.lift(right).value))

    def __add__(self, other: Real | float) -> Real:
        return self._apply("fadd", self, other)

    def __radd__(self, other: float) -> Real:
        return self._apply("fadd", other, self)

    def __sub__(self, other: Real | float) -> Real:
        return self._apply("fsub", self, other)

    def __rsub__(self, other: float) -> Real:
        return self._apply("fsub", other, self)

    def __mul__(self, other: Real | float) -> Real:
        return self._apply("fmul", self, other)

    def __rmul__(self, other: float) -> Real:
        return self._apply("fmul", other, self)

    def __truediv__(self, other: Real | float) -> Real:
        return self._apply("fdiv", self, other)

    def __rtruediv__(self, other: float) -> Real:
        return self._apply("fdiv", other, self)

    def __neg__(self) -> Real:
        return Real(self.emit, self.emit.builder.fneg(self.value))

    def __abs__(self) -> Real:
        return self._intrinsic("fabs")

    def _compare(self, operator: str, other: Real | float) -> Truth:
        return Truth(self.emit, self.emit.builder.fcmp_ordered(operator, self.value, self.lift(other).value))

    def __lt__(self, other: Real | float) -> Truth:
        return self._compare("<", other)

    def __le__(self, other: Real | float) -> Truth:
        return self._compare("<=", other)

    def __gt__(self, other: Real | float) -> Truth:
        return self._compare(">", other)

    def __ge__(self, other: Real | float) -> Truth:
        return self._compare(">=", other)

    def equals(self, other: Real | float) -> Truth:
        return self._compare("==", other)

    def is_nan(self) -> Truth:
        return Truth(self.emit, self.emit.builder.fcmp_unordered("uno", self.value, self.value))

    def _intrinsic(self, name: str, *others: Real) -> Real:
        values = [self.value, *(other.value for other in others)]
        return Real(self.emit, self.emit.intrinsic(name, self.value.type, values))

    def fma(self, factor: Real | float, term: Real | float) -> Real:
        """self * factor + term, rounded once."""
        return self._intrinsic("fma", self.lift(factor), self.lift(term))

    def floor(self) -> Real:
        return self._intrinsic("floor")

    def sqrt(self) -> Real:
        return self._intrinsic("sqrt")

    def with_sign_of(self, other: Real) -> Real:
        return self._intrinsic("copysign", other)

    def clamp(self, low: float, high: float) -> Real:
        """Within [low, high]; NaN stays."""
        above = (self < low).choose(low, self)
        return (above > high).choose(high, above)

    def polynomial(self, coefficients: list[float]) -> Real:
        """c[0] + c[1] x + c[2] x^2 + ..., by Horner's rule."""
        result = self.lift(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = result.fma(self, coefficient)
        return result

    def bits(self) -> Integer:
        return Integer(
            self.emit, self.emit.builder.bitcast(self.value, with_lanes_of(self.format.bits, self.value.type))
        )

    def in_format(self, format_: Format) -> Real:
        if self.format is format_:
            return self
        convert = self.emit.builder.fpext if format_ is DOUBLE else self.emit.builder.fptrunc
        return Real(self.emit, convert(self.value, with_lanes_of(format_.type, self.value.type)))


def _everywhere(scalar: ir.Constant, like: ir.Type) -> ir.Constant:
    return ir.Constant(like, [scalar] * like.count) if isinstance(like, ir.VectorType) else scalar
