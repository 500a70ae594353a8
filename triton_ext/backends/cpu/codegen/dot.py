"""`tt.dot`: matrix products of tiles, accumulated in memory of this thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import BF16, F16, F32, is_float, scalar_of, with_lanes_of
from triton_ext.backends.cpu.codegen.nest import At, Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile, Uniform
from triton_ext.errors import CompileError
from triton_ext.ir import source_line
from triton_ext.ir.dialect import DotOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


def lower_dot(lowering: FunctionLowering, op: DotOp) -> None:
    """d = a @ b + c. The accumulator is updated in place where nobody else wants `c`."""
    a, b = lowering.tile(op.a), lowering.tile(op.b)
    if len(a.shape) != 2:
        raise CompileError(f"{source_line(op)}: the CPU backend supports tt.dot of two dimensions only")
    accumulator = _accumulator(lowering, op)
    _multiply(lowering, a, b, accumulator)
    lowering.define(op.result, accumulator)


def _accumulator(lowering: FunctionLowering, op: DotOp) -> Buffer:
    c = lowering.tile(op.c)
    owned = c.stored or c
    row_major = isinstance(owned, Buffer) and owned.order == tuple(range(len(c.shape)))
    if row_major and len(list(op.c.uses)) == 1 and not isinstance(c, Uniform):
        assert isinstance(owned, Buffer)
        return owned
    buffer = lowering.scheduler.buffer(c.shape, c)
    lowering.store_tile(c, buffer)
    return buffer


def _multiply(lowering: FunctionLowering, a: Tile, b: Tile, accumulator: Buffer) -> None:
    """The plain product, for the types that have no micro-kernel: vectors along a row of the result."""
    emit, scheduler = lowering.emit, lowering.scheduler
    left, right = scheduler.materialize(a), scheduler.materialize(b)
    depth = a.shape[1]
    element = accumulator.lane
    plan = scheduler.plan(accumulator.shape, [accumulator])

    def body(nest: Nest, point: Point) -> None:
        row, column = point

        def each(k: ir.Value, so_far: list[ir.Value]) -> list[ir.Value]:
            with nest.deeper():
                here = At(k, nest.level)
                x = nest.value(left, (row, here))
                y = nest.value(right, (here, column))
                x, y, total = emit.aligned_lanes([_widen(emit, x, element), _widen(emit, y, element), so_far[0]])
                return [_multiply_add(emit, x, y, total)]

        initial = nest.value(accumulator, point)
        if _is_half(element):
            initial = _widen(emit, initial, element)
        nest.enter_loop()
        (total,) = emit.loop(0, depth, 1, [initial], each)
        if _is_half(element):
            total = emit.builder.fptrunc(total, with_lanes_of(element, total.type))
        accumulator.write(nest, point, total)

    scheduler.run(plan, body)


def _is_half(element: ir.Type) -> bool:
    return element in (F16, BF16)


def _widen(emit: Emitter, value: ir.Value, accumulator: ir.Type) -> ir.Value:
    """An operand in the type that products are summed in."""
    target = with_lanes_of(F32 if _is_half(accumulator) else accumulator, value.type)
    source = scalar_of(value.type)
    if value.type == target:
        return value
    if is_float(source):
        return emit.builder.fpext(value, target)
    return emit.builder.sext(value, target)


def _multiply_add(emit: Emitter, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    if is_float(total.type):
        return emit.intrinsic("fma", total.type, [x, y, total])
    return emit.builder.add(total, emit.builder.mul(x, y))
