"""Atomic operations: real ones, on memory that other threads and processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from llvmlite import ir
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, SSAValue

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.backends.cpu.codegen.checks import Does
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import (
    BF16,
    F32,
    I16,
    I64,
    PTR,
    element_of,
    is_float,
    memory_type,
    register_type,
    size_bytes,
    tensor_shape,
)
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile
from triton_ext.errors import CompileError
from triton_ext.ir import dialect as tt
from triton_ext.ir import source_line

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering

# The scopes (cta, gpu, sys) are one on a CPU: every thread and process sees the same coherent memory.
_ORDERS = {"relaxed": "monotonic", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}
_RMW = {
    "and": "and", "or": "or", "xor": "xor", "add": "add", "fadd": "fadd", "max": "max", "min": "min",
    "umax": "umax", "umin": "umin", "exch": "xchg",
}  # fmt: skip


def _order(op: Operation) -> str:
    return _ORDERS[cast(StringAttr, op.attributes["sem"]).data]


def lower_rmw(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, tt.AtomicRMWOp)
    kind = op.atomic_rmw_op.data
    if kind not in _RMW:
        raise CompileError(f"{source_line(op)}: the CPU backend does not support tt.atomic_rmw {kind}")

    def perform(pointer: ir.Value, values: list[ir.Value]) -> ir.Value:
        if values[0].type == BF16 and kind == "fadd":
            return _add_bfloat(lowering.emit, pointer, values[0], _order(op))
        return lowering.emit.builder.atomic_rmw(_RMW[kind], pointer, values[0], _order(op))

    overwrites = kind == "exch" and next(iter(op.result.uses), None) is None
    does = Does.WRITES if overwrites else Does.READS | Does.WRITES
    _each_element(lowering, op, op.ptr, [op.val], op.mask, perform, does)


def _add_bfloat(emit: Emitter, pointer: ir.Value, value: ir.Value, order: str) -> ir.Value:
    """No processor adds bfloat16 in memory: compute the sum until nobody else has changed what it is a sum of."""
    builder = emit.builder
    wide = elementwise.to_float(emit, value, F32)
    first = _load(emit, pointer, I16, "monotonic")
    before = builder.block
    again, end = emit.block("add.again"), emit.block("add.end")
    builder.branch(again)
    builder.position_at_end(again)
    expected = builder.phi(I16)
    expected.add_incoming(first, before)
    total = builder.fadd(elementwise.to_float(emit, builder.bitcast(expected, BF16), F32), wide)
    bits = builder.bitcast(elementwise.to_float(emit, total, BF16), I16)
    pair = builder.cmpxchg(pointer, expected, bits, order, _failure_order(order))
    expected.add_incoming(builder.extract_value(pair, 0), again)
    builder.cbranch(builder.extract_value(pair, 1), end, again)
    builder.position_at_end(end)
    return builder.bitcast(expected, BF16)


def _failure_order(order: str) -> str:
    return "acquire" if order in ("acquire", "acq_rel") else "monotonic"


def lower_cas(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, tt.AtomicCASOp)
    order = _order(op)
    builder = lowering.emit.builder

    def perform(pointer: ir.Value, values: list[ir.Value]) -> ir.Value:
        type_ = values[0].type
        if is_float(type_):  # compared as bits
            integer = ir.IntType(8 * size_bytes(type_))
            values = [builder.bitcast(value, integer) for value in values]
        pair = builder.cmpxchg(pointer, values[0], values[1], order, _failure_order(order))
        old = builder.extract_value(pair, 0)
        return builder.bitcast(old, type_) if is_float(type_) else old

    _each_element(lowering, op, op.ptr, [op.cmp, op.val], None, perform, Does.READS | Does.WRITES)


def lower_load(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, tt.AtomicLoadOp)

    def perform(pointer: ir.Value, values: list[ir.Value]) -> ir.Value:
        return _load(lowering.emit, pointer, register_type(element_of(op.result.type)), _order(op))

    _each_element(lowering, op, op.ptr, [], op.mask, perform, Does.READS)


def _load(emit: Emitter, pointer: ir.Value, type_: ir.Type, order: str) -> ir.Value:
    size = size_bytes(type_)
    bits = emit.builder.load_atomic(pointer, order, size, typ=ir.IntType(8 * size))
    if type_ == PTR:
        return emit.builder.inttoptr(bits, PTR)
    return emit.builder.bitcast(bits, type_) if is_float(type_) else bits


def lower_store(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, tt.AtomicStoreOp)
    builder = lowering.emit.builder

    def perform(pointer: ir.Value, values: list[ir.Value]) -> None:
        (value,) = values
        if is_float(value.type):
            value = builder.bitcast(value, ir.IntType(8 * size_bytes(value.type)))
        lowering.emit.store_atomic(value, pointer, _order(op))

    _each_element(lowering, op, op.ptr, [op.val], op.mask, perform, Does.WRITES)


def lower_poll(lowering: FunctionLowering, op: Operation) -> None:
    """Read until memory holds what is expected, or the time is over; the core goes to others meanwhile."""
    assert isinstance(op, tt.AtomicPollOp)
    emit, builder = lowering.emit, lowering.emit.builder
    relax = emit.declare("tx_relax", ir.VoidType(), [I64, PTR])
    clock = emit.declare("tx_nanoseconds", I64, [])
    timeout = lowering.scalar(op.timeout) if op.timeout is not None else None
    start = builder.call(clock, []) if timeout is not None else None

    def perform(pointer: ir.Value, values: list[ir.Value]) -> ir.Value:
        (expected,) = values
        before = builder.block
        again, wait, end = (emit.block(f"poll.{name}") for name in ("again", "wait", "end"))
        builder.branch(again)
        builder.position_at_end(again)
        count = builder.phi(I64)
        count.add_incoming(ir.Constant(I64, 0), before)
        arrived = builder.icmp_unsigned("==", _load(emit, pointer, expected.type, _order(op)), expected)
        stop = arrived
        if timeout is not None:
            late = builder.icmp_unsigned(">=", builder.sub(builder.call(clock, []), start), timeout)
            stop = builder.or_(arrived, late)
        builder.cbranch(stop, end, wait)
        builder.position_at_end(wait)
        builder.call(relax, [count, pointer])
        count.add_incoming(builder.add(count, ir.Constant(I64, 1)), wait)
        builder.branch(again)
        builder.position_at_end(end)
        return arrived

    _each_element(lowering, op, op.ptr, [op.expected], None, perform, Does.READS)


def _each_element(
    lowering: FunctionLowering,
    op: Operation,
    pointer: SSAValue,
    operands: list[SSAValue],
    mask: SSAValue | None,
    perform: Callable[[ir.Value, list[ir.Value]], ir.Value | None],
    does: Does,
) -> None:
    """Do an atomic operation for a scalar, or for every element of a tile, one after the other."""
    emit, builder = lowering.emit, lowering.emit.builder
    result = op.results[0] if op.results else None
    shape = tensor_shape(pointer.type)
    element = memory_type(register_type(cast(tt.PointerType, element_of(pointer.type)).pointee))
    site = lowering.checks.site(op, "atomic", does, element, shape) if lowering.checks is not None else None

    def guarded(where: ir.Value, values: list[ir.Value], condition: ir.Value | None) -> ir.Value | None:
        if condition is None or (isinstance(condition, ir.Constant) and condition.constant):
            return perform(where, values)
        if result is None:
            with emit.only_if(condition):
                return perform(where, values)
        type_ = register_type(element_of(result.type))
        zero = ir.Constant(type_, None if type_ == PTR else 0.0 if is_float(type_) else 0)
        (old,) = emit.either(condition, lambda: [perform(where, values)], lambda: [zero])
        return old

    if not shape:
        condition = lowering.scalar(mask) if mask is not None else None
        if site is not None:
            condition = site.allows(lowering.scalar(pointer), condition)
        old = guarded(lowering.scalar(pointer), [lowering.scalar(value) for value in operands], condition)
        if result is not None:
            assert old is not None
            lowering.define(result, old)
        return
    tiles: list[Tile] = [lowering.tile(value) for value in (pointer, *operands, *([mask] if mask is not None else []))]
    plan = lowering.scheduler.plan(shape, tiles, vectorize=False)
    kept: Buffer | None = None
    if result is not None and next(iter(result.uses), None) is not None:
        kept = lowering.scheduler.buffer(
            tensor_shape(result.type), Tile(tensor_shape(result.type), element_of(result.type))
        )

    def body(nest: Nest, point: Point) -> None:
        address, *values = (nest.value(tile, point) for tile in tiles)
        condition = values.pop() if mask is not None else None
        where = builder.inttoptr(address, PTR)
        if site is not None:
            condition = site.allows(where, condition, site.element(nest, point))
        old = guarded(where, values, condition)
        if kept is not None:
            assert old is not None
            kept.write(nest, point, old)

    lowering.scheduler.run(plan, body)
    if kept is not None:
        assert result is not None
        lowering.define(result, kept)
