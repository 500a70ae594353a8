"""`arith.constant`: scalars and tensors of one repeated value."""

from __future__ import annotations

from llvmlite import ir
from xdsl.dialects.builtin import FloatAttr, IntegerAttr

from triton_ext.backends.cpu.codegen import float8
from triton_ext.backends.cpu.codegen.lltypes import element_of, is_float, register_type
from triton_ext.ir.dialect import ConstantOp


def scalar_constant(op: ConstantOp) -> ir.Constant:
    """The value of a scalar constant, or the one value that fills a constant tensor."""
    type_, attribute = register_type(element_of(op.result.type)), op.value
    assert isinstance(attribute, IntegerAttr | FloatAttr)
    value = attribute.value.data
    if float8.format_of(attribute.type):
        return ir.Constant(type_, attribute.type.pack([value])[0])
    if is_float(type_):
        return ir.Constant(type_, float(value))
    return ir.Constant(type_, int(value) & 1 if type_.width == 1 else int(value))
