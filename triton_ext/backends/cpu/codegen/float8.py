"""The 8-bit floating-point types fp8e5 and fp8e4nv: bytes in registers and in memory, computed with in float32."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from xdsl.dialects.builtin import Float8E4M3FNType, Float8E5M2Type
from xdsl.ir import Attribute

from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import F16, F32, I8, I16, I32, everywhere, with_lanes_of

_F32_MANTISSA, _F32_BIAS = 23, 127
_F16_MANTISSA, _F16_BIAS = 10, 15
_NAN = 0x7F
"""Of both formats."""


@dataclass(frozen=True)
class Format:
    mantissa: int
    bias: int
    largest: int
    """Bits of the largest finite number."""

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)


E5M2 = Format(mantissa=2, bias=15, largest=0x7B)
E4M3 = Format(mantissa=3, bias=7, largest=0x7E)


def format_of(element: Attribute) -> Format | None:
    """The format of a Triton type, if it is one of these."""
    if isinstance(element, Float8E5M2Type):
        return E5M2
    return E4M3 if isinstance(element, Float8E4M3FNType) else None


def decode(emit: Emitter, value: ir.Value, format_: Format) -> ir.Value:
    """Bytes to float32, by way of float16, which has every exponent of these formats after a shift of the bias."""
    builder = emit.builder
    byte, word, half, single = (with_lanes_of(element, value.type) for element in (I8, I16, F16, F32))
    size = builder.and_(value, everywhere(byte, 0x7F))
    magnitude = builder.shl(builder.zext(size, word), everywhere(word, _F16_MANTISSA - format_.mantissa))
    sign = builder.shl(builder.zext(builder.and_(value, everywhere(byte, 0x80)), word), everywhere(word, 8))
    result = builder.fpext(builder.bitcast(builder.or_(magnitude, sign), half), single)
    if format_.bias == _F16_BIAS:
        return result
    result = builder.fmul(result, everywhere(single, 2.0 ** (_F16_BIAS - format_.bias)))
    is_nan = builder.icmp_unsigned("==", size, everywhere(byte, _NAN))
    return builder.select(is_nan, everywhere(single, float("nan")), result)


def encode(emit: Emitter, value: ir.Value, format_: Format, *, toward_zero: bool = False) -> ir.Value:
    """Float32 to bytes, rounded to nearest even or towards zero; what is too large becomes the largest number."""
    builder = emit.builder
    byte, bits, single = (with_lanes_of(element, value.type) for element in (I8, I32, F32))
    whole = builder.bitcast(value, bits)
    size = builder.and_(whole, everywhere(bits, 0x7FFFFFFF))
    absolute = builder.bitcast(size, single)
    # Normal numbers: move the bias, then drop mantissa bits. A carry goes on into the exponent, as it should.
    dropped = _F32_MANTISSA - format_.mantissa
    normal = builder.sub(size, everywhere(bits, (_F32_BIAS - format_.bias) << _F32_MANTISSA))
    if not toward_zero:
        odd = builder.and_(builder.lshr(normal, everywhere(bits, dropped)), everywhere(bits, 1))
        normal = builder.add(normal, builder.add(odd, everywhere(bits, (1 << (dropped - 1)) - 1)))
    normal = builder.lshr(normal, everywhere(bits, dropped))
    # Subnormal numbers: multiples of the smallest one.
    steps = builder.fmul(absolute, everywhere(single, 2.0 ** (format_.bias - 1 + format_.mantissa)))
    if not toward_zero:
        steps = emit.intrinsic("roundeven", single, [steps])
    is_small = builder.fcmp_ordered("<", absolute, everywhere(single, format_.smallest_normal))
    subnormal = builder.fptoui(builder.select(is_small, steps, everywhere(single, 0.0)), bits)
    result = builder.select(is_small, subnormal, normal)
    result = emit.intrinsic("umin", bits, [result, everywhere(bits, format_.largest)])
    is_nan = builder.fcmp_unordered("uno", value, value)
    result = builder.select(is_nan, everywhere(bits, _NAN), result)
    sign = builder.and_(builder.lshr(whole, everywhere(bits, 24)), everywhere(bits, 0x80))
    return builder.trunc(builder.or_(result, sign), byte)
