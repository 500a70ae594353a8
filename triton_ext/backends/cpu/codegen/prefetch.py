"""Rows that a loop finds through indices which it loads are asked for some iterations ahead (the method: Ainsworth and
Jones, CGO 2017). The processor follows addresses that grow by themselves, but not those that a table names.
"""

from __future__ import annotations

from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr, IntegerType, StringAttr
from xdsl.ir import Block, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def
from xdsl.rewriter import InsertPoint, Rewriter

from triton_ext.backends.cpu.codegen.lltypes import tensor_shape
from triton_ext.ir import dialect as tt

_ITERATIONS = 12
_PURE = {"tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.splat", "tt.trans", "tt.reshape"}


@irdl_op_definition
class PrefetchOp(IRDLOperation):
    """What lies at a tile of pointers will be read soon. The pointers may lead anywhere."""

    name = "cpu.prefetch"
    ptr = operand_def()


def add_prefetches(function: tt.FuncOp) -> None:
    """Insert prefetches in the loops of a function, for tiles of rows whose addresses depend on loaded indices."""
    for loop in [op for op in function.walk() if isinstance(op, scf.ForOp)]:
        step = loop.step.owner
        if not isinstance(step, tt.ConstantOp) or "unsignedCmp" in {*loop.attributes, *loop.properties}:
            continue
        value = step.attributes["value"]
        if not isinstance(value, IntegerAttr) or not 0 < value.value.data < 1 << 16:
            continue
        for load in [op for op in loop.body.block.ops if isinstance(op, tt.LoadOp)]:
            shape = tensor_shape(load.result.type)
            needed = _slice(load.ptr, loop.body.block)
            if shape and len(shape) > 1 and needed and any(isinstance(op, tt.LoadOp) for op in needed):
                _prefetch(loop, value.value.data, load, needed)


def _slice(pointer: SSAValue, body: Block) -> list[Operation] | None:
    """What a loop's iteration computes for a pointer from its induction variable alone, in order; None if it cannot."""
    found: set[Operation] = set()
    work = [pointer]
    while work:
        value = work.pop()
        if isinstance(value.owner, Block):
            if value.owner is body and value is not body.args[0]:
                return None
            continue
        op = value.owner
        if op.parent is not body or op in found:
            continue
        is_load = isinstance(op, tt.LoadOp) and not (op.isVolatile is not None and op.isVolatile.value.data)
        if not (is_load or op.name in _PURE or op.name.startswith("arith.")):
            return None
        found.add(op)
        work.extend(op.operands)
    return [op for op in body.ops if op in found]


def _prefetch(loop: scf.ForOp, step: int, load: tt.LoadOp, needed: list[Operation]) -> None:
    """Ask for the rows of the first iterations in front of the loop, and in each for those of one that is ahead."""
    index = loop.body.block.args[0]
    first = loop.body.block.first_op
    assert first is not None and isinstance(index.type, IntegerType)

    ahead = IntegerAttr(step * _ITERATIONS, index.type)
    build = _Builder(InsertPoint.before(loop))
    distance = build.constant(ahead)
    end = build.arith("minsi", loop.ub, build.arith("addi", loop.lb, distance))
    block = Block(arg_types=[index.type])
    build.insert(scf.ForOp(loop.lb, end, loop.step, [], block))
    inside = _Builder(InsertPoint.at_end(block))
    inside.ask_for(load, needed, {index: block.args[0]})
    inside.insert(scf.YieldOp())

    build = _Builder(InsertPoint.before(first))
    goes_on = build.arith("cmpi", build.arith("subi", loop.ub, index), distance, predicate=StringAttr("sgt"))
    # Near the end, of this iteration: indices are read only where the loop reads them.
    there = build.arith("select", goes_on, build.arith("addi", index, distance), index)
    build.ask_for(load, needed, {index: there})


class _Builder:
    def __init__(self, place: InsertPoint) -> None:
        self.place = place

    def insert(self, op: Operation) -> None:
        Rewriter.insert_op(op, self.place)

    def constant(self, value: IntegerAttr) -> SSAValue:
        op = tt.ConstantOp.create(result_types=[value.type], attributes={"value": value})
        self.insert(op)
        return op.results[0]

    def arith(self, name: str, *operands: SSAValue, **attributes: StringAttr) -> SSAValue:
        [kind] = (each for each in tt.ARITH.operations if each.name == f"arith.{name}")
        type_ = IntegerType(1) if name == "cmpi" else operands[-1].type
        op = kind.create(operands=operands, result_types=[type_], attributes=attributes)
        self.insert(op)
        return op.results[0]

    def ask_for(self, load: tt.LoadOp, needed: list[Operation], values: dict[SSAValue, SSAValue]) -> None:
        """Compute the pointer of a load with another induction variable."""
        for op in needed:
            self.insert(op.clone(values))
        self.insert(PrefetchOp.create(operands=[values[load.ptr]]))
