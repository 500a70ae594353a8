"""Structured control flow: `scf.for`, `scf.while`, `scf.if`.

A scalar that a loop carries is a phi. A tile is a buffer that every iteration overwrites, except tiles of
pointers or indices that move as a whole: those stay symbolic, and only their base is carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llvmlite import ir
from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from triton_ext.backends.cpu.codegen import liveness
from triton_ext.backends.cpu.codegen.addressing import Separable, SeparableTile
from triton_ext.backends.cpu.codegen.lltypes import I64, PTR, tensor_shape
from triton_ext.backends.cpu.codegen.tiles import Buffer, Dims, Tile

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


class _Carried:
    """One value that a loop carries."""

    def __init__(self, lowering: FunctionLowering, initial: SSAValue, symbolic: bool) -> None:
        self.lowering = lowering
        value = lowering.env[initial]
        self.form: Separable | None = None
        self.buffer: Buffer | None = None
        self.phi: ir.PhiInstr | None = None
        if not isinstance(value, Tile):
            self.start: ir.Value | None = value
            return
        self.tile = value
        self.form = lowering.scheduler.analysis.separate(value) if symbolic else None
        if self.form is not None:
            self.start = lowering.emit.value(self.form.base)
        else:
            self.start = None
            self.buffer = lowering.scheduler.buffer(value.shape, value, _innermost(value))
            lowering.store_tile(value, self.buffer)

    def make_phi(self, before: ir.Block) -> None:
        if self.start is not None:
            self.phi = self.lowering.emit.builder.phi(self.start.type)
            self.phi.add_incoming(self.start, before)

    def value(self) -> ir.Value | Tile:
        """The carried value, inside the loop and after it."""
        if self.buffer is not None:
            return self.buffer
        assert self.phi is not None
        if self.form is not None:
            return SeparableTile(self.tile, Separable(self.phi, self.form.strides, self.form.columns))
        return self.phi

    def following(self, yielded: SSAValue) -> ir.Value | None:
        """What the phi is in the next iteration."""
        if self.form is not None:
            form = self.lowering.scheduler.analysis.separate(self.lowering.tile(yielded))
            assert form is not None
            return self.lowering.emit.value(form.base, PTR if self.phi.type == PTR else I64)  # type: ignore[union-attr]
        return None if self.buffer is not None else self.lowering.scalar(yielded)


def _innermost(tile: Tile) -> int | None:
    source = tile.stored or tile
    return source.order[-1] if isinstance(source, Buffer) else None


def overwrite(lowering: FunctionLowering, moves: Sequence[tuple[Tile, Buffer]]) -> None:
    """Write tiles over buffers that the tiles may read themselves."""
    waiting = [(tile, buffer) for tile, buffer in moves if (tile.stored or tile) is not buffer]
    while waiting:
        for i, (tile, buffer) in enumerate(waiting):
            others = [other for j, (other, _) in enumerate(waiting) if j != i]
            if not any(_reads(other, buffer, None) for other in others):
                if _reads(tile, buffer, tuple(range(len(tile.shape)))):
                    tile = lowering.scheduler.materialize(tile)
                lowering.store_tile(tile, buffer)
                del waiting[i]
                break
        else:
            tile, buffer = waiting[0]
            copy = lowering.scheduler.buffer(tile.shape, tile, _innermost(tile))
            lowering.store_tile(tile, copy)
            waiting[0] = copy, buffer


def _reads(tile: Tile, buffer: Buffer, harmless: Dims | None) -> bool:
    """Whether evaluating the tile reads `buffer`, other than element by element along `harmless`."""
    work: list[tuple[Tile, Dims]] = [(tile, harmless or (None,) * len(tile.shape))]
    seen = set()
    while work:
        current, dims = work.pop()
        current = current.stored or current
        if (id(current), dims) in seen:
            continue
        seen.add((id(current), dims))
        if isinstance(current, Buffer) and current.pointer is buffer.pointer and dims != harmless:
            return True
        work.extend(current.inputs(dims))
    return False


def lower_for(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, scf.ForOp)
    builder = lowering.emit.builder
    body = op.body.block
    yielded = cast(Operation, body.last_op).operands
    carried = [
        _Carried(lowering, initial, bool(tensor_shape(arg.type)) and liveness.steps_uniformly(arg, value))
        for initial, arg, value in zip(op.iter_args, body.args[1:], yielded, strict=True)
    ]
    lower, upper, step = (lowering.scalar(value) for value in (op.lb, op.ub, op.step))
    unsigned = "unsignedCmp" in op.attributes or "unsignedCmp" in op.properties
    before = builder.block
    head, inside, after = (lowering.emit.block(f"for.{name}") for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(lower.type)
    index.add_incoming(lower, before)
    for each in carried:
        each.make_phi(before)
    compare = builder.icmp_unsigned if unsigned else builder.icmp_signed
    builder.cbranch(compare("<", index, upper), inside, after)

    builder.position_at_end(inside)
    with lowering.region():
        for arg, value in zip(body.args, [index, *(each.value() for each in carried)], strict=True):
            lowering.define(arg, value)

        def finish(terminator: Operation) -> None:
            following = [each.following(value) for each, value in zip(carried, terminator.operands, strict=True)]
            overwrite(
                lowering,
                [
                    (lowering.tile(value), each.buffer)
                    for each, value in zip(carried, terminator.operands, strict=True)
                    if each.buffer is not None
                ],
            )
            index.add_incoming(builder.add(index, step), builder.block)
            for each, value in zip(carried, following, strict=True):
                if value is not None:
                    assert each.phi is not None
                    each.phi.add_incoming(value, builder.block)
            builder.branch(head)

        lowering.lower_ops(body, finish)
    builder.position_at_end(after)
    for result, each in zip(op.results, carried, strict=True):
        lowering.define(result, each.value())


def lower_while(lowering: FunctionLowering, op: Operation) -> None:
    """`before` decides and passes values on; `after` makes the next round's. A polling loop yields the core, and says
    which word it watches.
    """
    assert isinstance(op, scf.WhileOp)
    builder = lowering.emit.builder
    decide, again = op.before_region.block, op.after_region.block
    carried = [_Carried(lowering, initial, False) for initial in op.arguments]
    polled = _polled(op)
    watched = _watched_word(lowering, op, polled)
    before = builder.block
    head, inside, after = (lowering.emit.block(f"while.{name}") for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    for each in carried:
        each.make_phi(before)
    count = builder.phi(I64)
    count.add_incoming(ir.Constant(I64, 0), before)
    passed: list[ir.Value | Tile] = [
        lowering.scheduler.buffer(result.type.get_shape(), Tile(tensor_shape(result.type), result.type.element_type))  # type: ignore[attr-defined]
        if tensor_shape(result.type)
        else ir.Constant(I64, 0)
        for result in op.results
    ]

    def test(terminator: Operation) -> None:
        condition, *values = terminator.operands
        flag = lowering.scalar(condition)
        for i, value in enumerate(values):
            if isinstance(place := passed[i], Buffer):
                lowering.store_tile(lowering.tile(value), place)
            else:
                passed[i] = lowering.scalar(value)
        if lowering.checks is not None:  # what it waits for may be what was not accessed
            flag = builder.and_(flag, builder.not_(lowering.checks.is_over()))
        builder.cbranch(flag, inside, after)

    with lowering.region():
        for arg, each in zip(decide.args, carried, strict=True):
            lowering.define(arg, each.value())
        lowering.lower_ops(decide, test)

    def repeat(terminator: Operation) -> None:
        following = [each.following(value) for each, value in zip(carried, terminator.operands, strict=True)]
        overwrite(
            lowering,
            [
                (lowering.tile(value), each.buffer)
                for each, value in zip(carried, terminator.operands, strict=True)
                if each.buffer is not None
            ],
        )
        for each, value in zip(carried, following, strict=True):
            if value is not None:
                assert each.phi is not None
                each.phi.add_incoming(value, builder.block)
        count.add_incoming(builder.add(count, ir.Constant(I64, 1)), builder.block)
        builder.branch(head)

    builder.position_at_end(inside)
    if polled:
        relax = lowering.emit.declare("tx_relax", ir.VoidType(), [I64, PTR])
        builder.call(relax, [count, watched or ir.Constant(PTR, None)])
    with lowering.region():
        for arg, value in zip(again.args, passed, strict=True):
            lowering.define(arg, value)
        lowering.lower_ops(again, repeat)
    builder.position_at_end(after)
    for result, value in zip(op.results, passed, strict=True):
        lowering.define(result, value)


def _polled(op: scf.WhileOp) -> list[Operation]:
    """What a loop reads of memory that others change, if that decides whether it ends, and it does no work on tiles."""
    watching = []
    for inner in (*op.before_region.walk(), *op.after_region.walk()):
        if any(tensor_shape(value.type) for value in (*inner.operands, *inner.results)):
            return []
        if inner.name.startswith("tt.atomic_") or (
            inner.name == "tt.load"
            and isinstance(v := inner.attributes.get("isVolatile"), IntegerAttr)
            and v.value.data != 0
        ):
            watching.append(inner)
    deciding = _deciding(op) if watching else set()
    return [each for each in watching if each in deciding]


def _deciding(op: scf.WhileOp) -> set[Operation]:
    """The operations in a loop that its condition depends on, in the same iteration or an earlier one."""
    before, after = op.before_region.block, op.after_region.block
    passed, carried = cast(Operation, before.last_op).operands, cast(Operation, after.last_op).operands
    deciding: set[Operation] = set()
    seen: set[SSAValue] = set()
    pending = [passed[0]]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value, BlockArgument):
            if value.owner is before:
                pending.append(carried[value.index])
            elif value.owner is after:
                pending.append(passed[1 + value.index])
        elif op.is_ancestor(value.owner):
            for inner in value.owner.walk():  # with what the regions of a branch or of another loop compute
                deciding.add(inner)
                pending += inner.operands
    return deciding


def _watched_word(lowering: FunctionLowering, op: scf.WhileOp, polled: Sequence[Operation]) -> ir.Value | None:
    """The address that a polling loop reads with an atomic operation, if it is the same in all rounds."""
    for inner in polled:
        if inner.name.startswith("tt.atomic_"):
            pointer = inner.operands[0]
            return None if op.is_ancestor(pointer.owner) else lowering.scalar(pointer)
    return None


def lower_if(lowering: FunctionLowering, op: Operation) -> None:
    assert isinstance(op, scf.IfOp)
    results = list(op.results)
    buffers = {
        i: lowering.scheduler.buffer(tensor_shape(r.type), Tile(tensor_shape(r.type), r.type.element_type))  # type: ignore[attr-defined]
        for i, r in enumerate(results)
        if tensor_shape(r.type)
    }

    def branch(block: Block | None) -> Sequence[ir.Value]:
        scalars: list[ir.Value] = []

        def finish(terminator: Operation) -> None:
            for i, value in enumerate(terminator.operands):
                if i in buffers:
                    lowering.store_tile(lowering.tile(value), buffers[i])
                else:
                    scalars.append(lowering.scalar(value))

        if block is not None and block.last_op is not None:
            with lowering.region():
                lowering.lower_ops(block, finish)
        return scalars

    merged = iter(
        lowering.emit.either(
            lowering.scalar(op.cond),
            lambda: branch(op.true_region.blocks.first),
            lambda: branch(op.false_region.blocks.first),
        )
    )
    for i, result in enumerate(results):
        lowering.define(result, buffers[i] if i in buffers else next(merged))
