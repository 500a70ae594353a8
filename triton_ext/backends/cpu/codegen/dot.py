"""`tt.dot`: matrix products of tiles, accumulated in memory of this thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir
from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Attribute, OpResult, SSAValue

from triton_ext.backends.cpu.codegen import elementwise, liveness, microkernel
from triton_ext.backends.cpu.codegen.lltypes import BF16, F16, F32, element_of, with_lanes_of
from triton_ext.backends.cpu.codegen.packing import converted, panels
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile, Uniform
from triton_ext.errors import CompileError
from triton_ext.ir import source_line
from triton_ext.ir.dialect import DotOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


def lower_dot(lowering: FunctionLowering, op: DotOp) -> None:
    """d = a @ b + c. The accumulator is updated in place where this product alone wants `c`, and wants it once."""
    a, b, c = (lowering.tile(value) for value in (op.a, op.b, op.c))
    if len(a.shape) != 2:
        raise CompileError(f"{source_line(op)}: the CPU backend supports tt.dot of two dimensions only")
    accumulator = _reusable(lowering, op.c, op) or lowering.scheduler.buffer(c.shape, c)
    fresh = isinstance(c, Uniform) and isinstance(c.value, ir.Constant) and c.value.constant == 0
    if not fresh and (c.stored or c) is not accumulator:
        lowering.store_tile(c, accumulator)
    _multiply(lowering, a, b, accumulator, fresh)
    lowering.define(op.result, accumulator)


def _reusable(lowering: FunctionLowering, value: SSAValue, op: DotOp) -> Buffer | None:
    """The buffer that holds `value`, or whose elements it is computed from one by one, if nobody else wants it."""
    tile = lowering.tile(value)
    memory = tile.stored or tile
    # A value from outside of this block may be wanted again, by the next round of a loop.
    if len(list(value.uses)) != 1 or liveness.block_of(value) is not op.parent_block():
        return None
    if isinstance(memory, Buffer):
        row_major = memory.order == tuple(range(len(memory.shape)))
        return memory if row_major and memory.element == element_of(op.result.type) else None
    if not isinstance(value, OpResult) or not elementwise.is_elementwise(value.op):
        return None
    return next(filter(None, (_reusable(lowering, operand, op) for operand in value.op.operands)), None)


def _multiply(lowering: FunctionLowering, a: Tile, b: Tile, accumulator: Buffer, fresh: bool) -> None:
    """accumulator += a @ b, or = where it is `fresh`; summed in its type, but float32 for half precision."""
    emit, scheduler = lowering.emit, lowering.scheduler
    (rows, depth), columns = a.shape, b.shape[1]
    half = accumulator.lane in (F16, BF16)
    element: Attribute = Float32Type() if half else accumulator.element
    block = microkernel.register_block(rows, columns, F32 if half else accumulator.lane, emit.lanes)
    left = scheduler.materialize(converted(a, element))
    right = panels(scheduler, converted(b, element), block.columns)

    def load(place: ir.Value, vector: ir.Type) -> ir.Value:
        if not half:
            return emit.load(place, vector)
        return emit.builder.fpext(emit.load(place, with_lanes_of(accumulator.lane, vector)), vector)

    def store(value: ir.Value, place: ir.Value) -> None:
        if half:
            value = emit.builder.fptrunc(value, with_lanes_of(accumulator.lane, value.type))
        emit.store(value, place)

    at = microkernel.Operands(
        left.pointer, (left.strides[0], left.strides[1]), right.pointer, accumulator.pointer, rows, columns, depth
    )
    microkernel.multiply(emit, block, at, left.lane, None if fresh else load, store, accumulator.lane)
