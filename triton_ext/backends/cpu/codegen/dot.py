"""`tt.dot`: matrix products of tiles, accumulated in memory of this thread's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llvmlite import ir
from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Attribute

from triton_ext.backends.cpu.codegen import liveness, microkernel
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import BF16, F16, F32, is_float, scalar_of, size_bytes, with_lanes_of
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Buffer, Dims, Reshape, Tile, View
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
    left = scheduler.materialize(_converted(a, element))
    right = _packed(lowering, _converted(b, element), block.columns)

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


def _packed(lowering: FunctionLowering, tile: Tile, width: int) -> Buffer:
    """A tile of [depth, columns] as panels of [depth, width], filled row by row as the tile lies in memory."""
    depth, columns = tile.shape
    panels = Reshape(tile, (depth, columns // width, width))
    memory = lowering.arena.allocate(panels.shape, size_bytes(panels.lane))
    buffer = Buffer(memory, panels.shape, panels.element, order=(1, 0, 2))
    lowering.store_tile(panels, buffer)
    return buffer


def _converted(tile: Tile, element: Attribute) -> Tile:
    return tile if tile.element == element else Converted(tile, element)


class Converted(View):
    """An operand in the type that products are summed in."""

    def __init__(self, source: Tile, element: Attribute) -> None:
        super().__init__(source.shape, source)
        self.element = element

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.source, dims),))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        value = nest.value(self.source, point)
        return _widen(nest.emit, value, self.lane)


def _widen(emit: Emitter, value: ir.Value, element: ir.Type) -> ir.Value:
    target = with_lanes_of(element, value.type)
    if value.type == target:
        return value
    if is_float(scalar_of(value.type)):
        return emit.builder.fpext(value, target)
    return emit.builder.sext(value, target)
