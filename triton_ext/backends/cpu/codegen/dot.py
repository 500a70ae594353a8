"""`tt.dot`: matrix products of tiles, accumulated in memory of this thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir
from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Attribute

from triton_ext.backends.cpu.codegen import liveness, microkernel
from triton_ext.backends.cpu.codegen.lltypes import BF16, F16, F32, with_lanes_of
from triton_ext.backends.cpu.codegen.packing import converted, panels
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile
from triton_ext.errors import CompileError
from triton_ext.ir import source_line
from triton_ext.ir.dialect import DotOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


def lower_dot(lowering: FunctionLowering, op: DotOp) -> None:
    """d = a @ b + c. The accumulator is updated in place where this product alone wants `c`, and wants it once."""
    a, b = lowering.tile(op.a), lowering.tile(op.b)
    if len(a.shape) != 2:
        raise CompileError(f"{source_line(op)}: the CPU backend supports tt.dot of two dimensions only")
    accumulator = _accumulator(lowering, op)
    _multiply(lowering, a, b, accumulator)
    lowering.define(op.result, accumulator)


def _accumulator(lowering: FunctionLowering, op: DotOp) -> Buffer:
    c = lowering.tile(op.c)
    owned = c.stored or c
    # A loop around this product alone would read a `c` from outside of it again.
    last_use = len(list(op.c.uses)) == 1 and liveness.block_of(op.c) is op.parent_block()
    if last_use and isinstance(owned, Buffer) and owned.order == tuple(range(len(c.shape))):
        return owned
    buffer = lowering.scheduler.buffer(c.shape, c)
    lowering.store_tile(c, buffer)
    return buffer


def _multiply(lowering: FunctionLowering, a: Tile, b: Tile, accumulator: Buffer) -> None:
    """accumulator += a @ b, in the accumulator's type, but float32 for half precision."""
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
    microkernel.multiply(emit, block, at, left.lane, load, store, accumulator.lane)
