"""`tt.histogram`: counts of the values 0, 1, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

from triton_ext.backends.cpu.codegen.lltypes import I64, element_of, tensor_shape
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Tile, Uniform
from triton_ext.ir.dialect import HistogramOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


def lower_histogram(lowering: FunctionLowering, op: HistogramOp) -> None:
    """Count one element after the other; values without a bin are left out."""
    emit, builder = lowering.emit, lowering.emit.builder
    shape, element = tensor_shape(op.result.type), element_of(op.result.type)
    counts = lowering.scheduler.buffer(shape, Tile(shape, element))
    lane = counts.lane
    lowering.store_tile(Uniform(shape, element, ir.Constant(lane, 0)), counts)
    tiles = [lowering.tile(value) for value in op.operands]

    def count(nest: Nest, point: Point) -> None:
        value, *mask = (nest.value(tile, point) for tile in tiles)
        counted = builder.icmp_unsigned("<", value, ir.Constant(value.type, shape[0]))
        if mask:
            counted = builder.and_(counted, mask[0])
        with emit.only_if(counted):
            place = emit.offset(counts.pointer, builder.zext(value, I64), lane)
            emit.store(builder.add(emit.load(place, lane), ir.Constant(lane, 1)), place)

    lowering.scheduler.run(lowering.scheduler.plan(tiles[0].shape, tiles, vectorize=False), count)
    lowering.define(op.result, counts)
