"""`arith.constant`: scalars and tensors of one repeated value."""

from __future__ import annotations

from llvmlite import ir
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr

from triton_ext.backends.cpu.codegen.lltypes import element_of, is_float, register_type
from triton_ext.errors import CompileError
from triton_ext.ir import source_line


def scalar_constant(op: ConstantOp) -> ir.Constant:
    """The value of a scalar constant, or the one value that fills a constant tensor."""
    type_ = register_type(element_of(op.result.type))
    attribute = op.value
    if isinstance(attribute, DenseIntOrFPElementsAttr):
        values = set(attribute.get_values())
        if len(values) != 1 and not all(value != value for value in values):
            raise CompileError(f"{source_line(op)}: the CPU backend supports only constant tensors of one value")
        value = next(iter(values))
    elif isinstance(attribute, (IntegerAttr, FloatAttr)):
        value = attribute.value.data
    else:
        raise CompileError(f"{source_line(op)}: the CPU backend does not support the constant {attribute}")
    if is_float(type_):
        return ir.Constant(type_, float(value))
    return ir.Constant(type_, int(value) & 1 if type_.width == 1 else int(value))
