"""`tt.dot`: matrix products of tiles, accumulated in memory of this thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir
from xdsl.dialects.builtin import Float32Type
from xdsl.ir import Attribute, OpResult, SSAValue

from triton_ext.backends.cpu.codegen import elementwise, liveness, microkernel, scaled
from triton_ext.backends.cpu.codegen.emit import Index
from triton_ext.backends.cpu.codegen.lltypes import BF16, F16, F32, element_of, with_lanes_of
from triton_ext.backends.cpu.codegen.packing import Pairs, converted, panels
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile, Uniform
from triton_ext.ir.dialect import DotOp, DotScaledOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


_NARROWEST = 4
"""Lanes of the narrowest instruction for pairs of bfloat16."""


def lower_dot(lowering: FunctionLowering, op: DotOp) -> None:
    """d = a @ b + c, for every matrix of a batch."""
    _accumulate(lowering, op, lowering.tile(op.a), lowering.tile(op.b))


def lower_dot_scaled(lowering: FunctionLowering, op: DotScaledOp) -> None:
    """d = (a * a_scale) @ (b * b_scale) + c, in float32."""
    operands = []
    for make, value, scale, kind, k_pack in (
        (scaled.left, op.a, op.a_scale, op.a_elem_type, op.lhs_k_pack),
        (scaled.right, op.b, op.b_scale, op.b_elem_type, op.rhs_k_pack),
    ):
        packed_along_depth = k_pack is None or k_pack.value.data != 0
        scales = lowering.tile(scale) if scale is not None else None
        operands.append(make(lowering.tile(value), scales, kind.data, packed_along_depth))
    _accumulate(lowering, op, *operands)


def _accumulate(lowering: FunctionLowering, op: DotOp | DotScaledOp, a: Tile, b: Tile) -> None:
    """The accumulator is updated in place where this product alone wants `c`, and wants it once."""
    c = lowering.tile(op.c)
    accumulator = _reusable(lowering, op.c, op) or lowering.scheduler.buffer(c.shape, c)
    fresh = isinstance(c, Uniform) and isinstance(c.value, ir.Constant) and c.value.constant == 0
    if not fresh and (c.stored or c) is not accumulator:
        lowering.store_tile(c, accumulator)
    _multiply(lowering, a, b, accumulator, fresh)
    lowering.define(op.result, accumulator)


def _reusable(lowering: FunctionLowering, value: SSAValue, op: DotOp | DotScaledOp) -> Buffer | None:
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
    rows, depth, columns = *a.shape[-2:], b.shape[-1]
    half = accumulator.lane in (F16, BF16)
    element: Attribute = Float32Type() if half else accumulator.element
    total = F32 if half else accumulator.lane
    block = microkernel.register_block(rows, columns, total, emit.lanes)
    operands: tuple[Tile, Tile] = converted(a, element), converted(b, element)
    if emit.bf16_dot and a.lane == b.lane == BF16 and depth > 1 and block.lanes >= _NARROWEST:
        operands = Pairs(a, len(a.shape) - 1), Pairs(b, len(b.shape) - 2)
        depth //= 2
    left = scheduler.materialize(operands[0])
    right = panels(scheduler, operands[1], block.columns)

    def load(place: ir.Value, vector: ir.Type) -> ir.Value:
        if not half:
            return emit.load(place, vector)
        return emit.builder.fpext(emit.load(place, with_lanes_of(accumulator.lane, vector)), vector)

    def store(value: ir.Value, place: ir.Value) -> None:
        if half:
            value = elementwise.to_float(emit, value, accumulator.lane)
        emit.store(value, place)

    def matrix(number: Index) -> None:
        left_matrix = emit.offset(left.pointer, emit.mul(number, left.strides[0] if batched else 0), left.lane)
        right_matrix = emit.offset(right.pointer, emit.mul(number, depth * columns), right.lane)
        result = emit.offset(accumulator.pointer, emit.mul(number, rows * columns), accumulator.lane)
        strides = left.strides[-2], left.strides[-1]
        at = microkernel.Operands(left_matrix, strides, right_matrix, result, rows, columns, depth)
        microkernel.multiply(emit, block, at, left.lane, None if fresh else load, store, total, accumulator.lane)

    batched = len(a.shape) == 3
    if not batched or a.shape[0] == 1:
        matrix(0)
        return

    def each(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        matrix(number)
        return []

    emit.loop(0, a.shape[0], 1, [], each)
