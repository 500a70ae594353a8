"""Element types: what Triton calls them, and how LLVM holds them in registers and in memory."""

from __future__ import annotations

import struct

from llvmlite import ir
from llvmlite.ir.types import _BaseFloatType
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IndexType,
    IntegerType,
    TensorType,
)
from xdsl.ir import Attribute

from triton_ext.errors import CompileError
from triton_ext.ir.dialect import PointerType


class _BFloatType(_BaseFloatType):
    """LLVM's `bfloat`, which llvmlite has no class for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: object) -> str:
        # 16 bits are the upper half of a float32; NaN keeps a mantissa bit that survives the cut.
        bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]  # type: ignore[arg-type]
        rounded = bits + 0x7FFF + ((bits >> 16) & 1) if (bits & 0x7FFFFFFF) <= 0x7F800000 else bits | 0x400000
        return f"0xR{(rounded >> 16) & 0xFFFF:04X}"


_BFloatType._create_instance()

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
BF16 = _BFloatType()
F32 = ir.FloatType()
F64 = ir.DoubleType()
PTR = ir.PointerType()

_FLOATS = {Float16Type: F16, BFloat16Type: BF16, Float32Type: F32, Float64Type: F64}


def register_type(type_: Attribute) -> ir.Type:
    """The LLVM type of a scalar of Triton type `type_`. A pointer inside a tile is an I64 (`lane_type`)."""
    if isinstance(type_, IntegerType):
        return ir.IntType(type_.width.data)
    if isinstance(type_, IndexType):
        return I64
    if isinstance(type_, PointerType):
        return PTR
    for known, llvm in _FLOATS.items():
        if isinstance(type_, known):
            return llvm
    if isinstance(type_, Float8E5M2Type | Float8E4M3FNType):
        return I8
    raise CompileError(f"the CPU backend has no element type {type_}")


def lane_type(type_: Attribute) -> ir.Type:
    """The LLVM type of one element of a tile: addresses are integers there, so that they add like integers."""
    llvm = register_type(type_)
    return I64 if llvm is PTR else llvm


def memory_type(register: ir.Type) -> ir.Type:
    """How an element lies in memory: a boolean takes a byte."""
    return I8 if register == I1 else register


def size_bytes(register: ir.Type) -> int:
    """Size of one element in memory."""
    if isinstance(register, ir.IntType):
        return max(register.width // 8, 1)
    return {F16: 2, BF16: 2, F32: 4, F64: 8, PTR: 8}[register]


def is_float(type_: ir.Type) -> bool:
    return scalar_of(type_) in (F16, BF16, F32, F64)


def scalar_of(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def with_lanes_of(element: ir.Type, like: ir.Type) -> ir.Type:
    """`element`, as a vector when `like` is one."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def everywhere(type_: ir.Type, number: float) -> ir.Constant:
    """A constant of `type_`, in every lane where that is a vector."""
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [ir.Constant(type_.element, number)] * type_.count)
    return ir.Constant(type_, number)


def tensor_shape(type_: Attribute) -> tuple[int, ...]:
    return tuple(type_.get_shape()) if isinstance(type_, TensorType) else ()


def element_of(type_: Attribute) -> Attribute:
    return type_.element_type if isinstance(type_, TensorType) else type_
