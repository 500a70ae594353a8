"""Values of simulated programs, and the operations on them that Python and numpy do not have as they are.

A scalar integer is a Python int in its signed range, an i1 a bool, a pointer an int, a scalar float a numpy scalar. A
tensor is a numpy array; bfloat16 is kept as float32 that is rounded after every operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, Float64Type, IntegerType, TensorType
from xdsl.ir import Attribute

from ..ir.dialect import PointerType


@dataclass(frozen=True)
class Element:
    """A scalar type: how it is kept (`dtype`) and how it lies in memory (`stored`, little endian)."""

    kind: str  # "int", "float" or "pointer"
    bits: int
    dtype: np.dtype[Any]
    stored: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        return self.stored.itemsize

    @property
    def is_bf16(self) -> bool:
        return self.kind == "float" and self.stored.kind == "u"

    def decode(self, raw: Any) -> Any:
        """Memory -> value."""
        if self.is_bf16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw != 0 if self.bits == 1 else raw

    def encode(self, value: Any) -> Any:
        """Value -> memory, as an array."""
        if self.is_bf16:
            return (bf16(np.asarray(value, np.float32)).view(np.uint32) >> 16).astype(np.uint16)
        return np.asarray(value, self.dtype).astype(self.stored)

    def scalar(self, value: Any) -> Any:
        """An element of an array as a scalar."""
        if self.kind == "float":
            return self.dtype.type(value)
        return bool(value) if self.bits == 1 else int(value)


_POINTER = Element("pointer", 64, np.dtype(np.int64), np.dtype(np.int64))
_FLOATS: dict[type[Attribute], Element] = {
    Float16Type: Element("float", 16, np.dtype(np.float16), np.dtype(np.float16)),
    BFloat16Type: Element("float", 16, np.dtype(np.float32), np.dtype(np.uint16)),
    Float32Type: Element("float", 32, np.dtype(np.float32), np.dtype(np.float32)),
    Float64Type: Element("float", 64, np.dtype(np.float64), np.dtype(np.float64)),
}
_INTEGERS = {bits: Element("int", bits, np.dtype(f"int{bits}"), np.dtype(f"int{bits}")) for bits in (8, 16, 32, 64)} | {
    1: Element("int", 1, np.dtype(np.bool_), np.dtype(np.int8))
}


def element_of(type_: Attribute) -> Element | None:
    """The scalar type of a value, or of the elements of a tensor; None for a type that is not simulated."""
    if isinstance(type_, TensorType):
        return element_of(type_.element_type)
    if isinstance(type_, PointerType):
        return _POINTER
    if isinstance(type_, IntegerType):
        return _INTEGERS.get(type_.width.data)
    return _FLOATS.get(type(type_))


def shape_of(type_: Attribute) -> tuple[int, ...] | None:
    """Of a tensor; None for a scalar."""
    return tuple(type_.get_shape()) if isinstance(type_, TensorType) else None


def wrap(value: int, bits: int) -> int:
    """A Python int in the signed range of `bits`."""
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


def bf16(value: Any) -> Any:
    """float32 rounded to the nearest bfloat16, ties to even."""
    array = np.asarray(value, np.float32)
    bits = array.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)
    result = np.where(np.isnan(array), np.float32(np.nan), rounded)
    return result if array.ndim else np.float32(result)


def unsigned(value: Any, bits: int) -> Any:
    """The same bits as an unsigned number."""
    if isinstance(value, np.ndarray):
        return value.view(f"uint{bits}") if bits > 1 else value.astype(np.uint8)
    return value & ((1 << bits) - 1)


def signed(value: Any, bits: int) -> Any:
    """The inverse of `unsigned`."""
    return value.view(f"int{bits}") if isinstance(value, np.ndarray) else wrap(value, bits)


def divide(a: Any, b: Any, rounding: str, remainder: bool, bits: int) -> Any:
    """Integer division: "trunc", "floor" or "ceil". By zero it gives 0, as lanes that a mask hides may do."""
    if isinstance(a, np.ndarray):
        safe = np.where(b == 0, 1, b)
        floor = a // safe
        exact = floor * safe == a
        up = {"floor": False, "ceil": True, "trunc": (a < 0) != (safe < 0)}[rounding]
        quotient = np.where(up & ~exact, floor + 1, floor).astype(a.dtype)
        return np.where(b == 0, 0, a - quotient * safe if remainder else quotient).astype(a.dtype)
    if b == 0:
        return 0
    quotient = a // b
    if quotient * b != a and (rounding == "ceil" or (rounding == "trunc" and (a < 0) != (b < 0))):
        quotient += 1
    return wrap(a - quotient * b if remainder else quotient, bits)


def shift(a: Any, b: Any, direction: str, bits: int) -> Any:
    """shli, shrui, shrsi; a count beyond the width is undefined, and masked here."""
    count = b & (bits - 1)
    if direction == "left":
        return a << count if isinstance(a, np.ndarray) else wrap(a << count, bits)
    if direction == "logical":
        return signed(unsigned(a, bits) >> unsigned(count, bits), bits)
    return a >> count


def multiply_high(a: Any, b: Any, bits: int) -> Any:
    """The upper half of an unsigned product."""
    if isinstance(a, np.ndarray):
        wide = unsigned(a, bits).astype(object) * unsigned(b, bits).astype(object)
        return signed((wide >> bits).astype(f"uint{bits}"), bits)
    return wrap((unsigned(a, bits) * unsigned(b, bits)) >> bits, bits)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def compare_floats(predicate: str, a: Any, b: Any) -> Any:
    """arith.cmpf: "o" predicates are false, "u" predicates true for NaN."""
    unordered = np.isnan(a) | np.isnan(b)
    if predicate in ("ord", "uno"):
        return _as_bool(~unordered if predicate == "ord" else unordered)
    found = _COMPARISONS[predicate[1:]](a, b)
    return _as_bool(found & ~unordered if predicate[0] == "o" else found | unordered)


def _as_bool(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else bool(value)


def cast(value: Any, source: Element, target: Element, is_signed: bool = True) -> Any:
    """A number of one type as the nearest of another; integers are extended or cut."""
    is_array = isinstance(value, np.ndarray)
    if source.kind == "int" and not is_signed:
        value = unsigned(value, source.bits)
    elif source.bits == 1 and source.kind == "int":
        value = -value.astype(np.int8) if is_array else -int(value)
    if target.kind == "float":
        number = value.astype(target.dtype) if is_array else target.dtype.type(value)
        return bf16(number) if target.is_bf16 else number
    if source.kind == "float":
        value = np.trunc(value)
        if is_array:
            return np.where(np.isfinite(value), value, 0).astype(np.int64).astype(target.dtype)
        value = int(value) if math.isfinite(value) else 0
    if is_array:
        return (value & 1).astype(np.bool_) if target.bits == 1 else value.astype(target.dtype)
    return bool(value & 1) if target.bits == 1 else wrap(int(value), target.bits)


def bitcast(value: Any, source: Element, target: Element) -> Any:
    if source.kind == "pointer" or target.kind == "pointer" or source == target:
        return value
    raw = source.encode(value)
    found = target.decode(raw.view(target.stored))
    return found if isinstance(value, np.ndarray) else target.scalar(found)


MATH: dict[str, Callable[..., Any]] = {
    "absf": np.abs, "absi": np.abs, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": np.vectorize(math.erf), "fma": lambda a, b, c: a * b + c, "copysign": np.copysign,
    "roundeven": np.rint,
}  # fmt: skip


def tensor(value: Any, dtype: np.dtype[Any]) -> Any:
    """A result of numpy in the dtype that the IR says."""
    return value.astype(dtype, copy=False) if isinstance(value, np.ndarray) else dtype.type(value)


def reduce(combine: Callable[..., tuple[Any, ...]], axis: int, *sources: Any) -> tuple[Any, ...]:
    """Combine along an axis of a power of two, by halves, in the order of elements."""
    parts = [np.moveaxis(source, axis, 0) for source in sources]
    while parts[0].shape[0] > 1:
        pairs = combine(*(part[0::2] for part in parts), *(part[1::2] for part in parts))
        parts = [np.asarray(part) for part in pairs]
    return tuple(part[0] for part in parts)


def scan(combine: Callable[..., tuple[Any, ...]], axis: int, reverse: bool, *sources: Any) -> tuple[Any, ...]:
    """The running combination along an axis, inclusive."""
    parts = [np.moveaxis(source, axis, 0) for source in sources]
    parts = [part[::-1] if reverse else part for part in parts]
    running = tuple(part[0] for part in parts)
    rows = [running]
    for index in range(1, parts[0].shape[0]):
        running = combine(*running, *(part[index] for part in parts))
        rows.append(running)
    found = [np.stack([row[i] for row in rows]) for i in range(len(parts))]
    return tuple(np.moveaxis(part[::-1] if reverse else part, 0, axis) for part in found)


def dot(a: Any, b: Any, c: Any) -> Any:
    """a @ b + c in the type of c."""
    return np.matmul(a.astype(c.dtype), b.astype(c.dtype)) + c


def histogram(values: Any, bins: int, mask: Any = None) -> Any:
    kept = values[mask] if mask is not None else values
    return np.bincount(kept[(kept >= 0) & (kept < bins)], minlength=bins).astype(np.int32)
