"""`tt.reduce` and `tt.scan` with any combine region and any number of operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, SSAValue

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.backends.cpu.codegen.constants import scalar_constant
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import is_float
from triton_ext.backends.cpu.codegen.nest import At, Coordinate, Lanes, Nest, Point
from triton_ext.backends.cpu.codegen.schedule import Scheduler
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile
from triton_ext.errors import CompileError
from triton_ext.ir import source_line
from triton_ext.ir.dialect import ConstantOp, ReduceOp, ScanOp

Outer = Callable[[SSAValue], ir.Value]
"""Finds the scalar of a value defined outside the combine region."""


def combine(
    emit: Emitter, region: Block, outer: Outer, left: Sequence[ir.Value], right: Sequence[ir.Value]
) -> list[ir.Value]:
    """Emit the combine region on scalars or on vectors of any one width."""
    known: dict[SSAValue, ir.Value] = dict(zip(region.args, [*left, *right], strict=True))

    def operand(value: SSAValue) -> ir.Value:
        return known[value] if value in known else outer(value)

    for op in region.ops:
        if op.name in ("tt.reduce.return", "tt.scan.return"):
            results = [operand(value) for value in op.operands]
            return emit.aligned_lanes([*results, *left])[: len(results)]
        if isinstance(op, ConstantOp):
            known[op.result] = scalar_constant(op)
        elif elementwise.is_elementwise(op):
            values = emit.aligned_lanes([operand(value) for value in op.operands])
            known[op.results[0]] = elementwise.lower(emit, op, values)
        else:
            raise CompileError(f"{source_line(op)}: the CPU backend does not support {op.name} in a reduction")
    raise CompileError("a combine region has no terminator")


_NEUTRAL: dict[str, Callable[[ir.Type], object]] = {
    "arith.addf": lambda t: -0.0, "arith.mulf": lambda t: 1.0,
    "arith.maxnumf": lambda t: float("nan"), "arith.minnumf": lambda t: float("nan"),
    "arith.maximumf": lambda t: float("-inf"), "arith.minimumf": lambda t: float("inf"),
    "arith.addi": lambda t: 0, "arith.muli": lambda t: 1, "arith.andi": lambda t: -1, "arith.ori": lambda t: 0,
    "arith.xori": lambda t: 0, "arith.maxui": lambda t: 0, "arith.minui": lambda t: -1,
    "arith.maxsi": lambda t: -(1 << (t.width - 1)), "arith.minsi": lambda t: (1 << (t.width - 1)) - 1,
}  # fmt: skip


def _neutral(region: Block, lanes: Sequence[ir.Type]) -> list[ir.Value] | None:
    """The neutral elements of the combination, where it is a single known operation."""
    ops = list(region.ops)
    if len(ops) != 2 or len(lanes) != 1 or ops[0].name not in _NEUTRAL:
        return None
    if set(ops[0].operands) != set(region.args) or is_float(lanes[0]) != ops[0].name.endswith("f"):
        return None
    return [ir.Constant(lanes[0], _NEUTRAL[ops[0].name](lanes[0]))]


def reduce(scheduler: Scheduler, op: ReduceOp, sources: Sequence[Tile], outer: Outer) -> list[Tile | ir.Value]:
    """Reduce along one axis: scalars for one-dimensional operands, else tiles in memory."""
    emit = scheduler.emit
    axis = op.axis.value.data
    region = op.combine.block
    shape = sources[0].shape
    plan = scheduler.plan(shape, sources)
    rest = tuple(d for d in range(len(shape)) if d != axis)
    horizontal = plan.vector_dim == axis
    buffers: list[Buffer] = []
    if rest:
        innermost = rest.index(plan.vector_dim) if plan.vector_dim in rest else None
        reduced = [shape[d] for d in rest]
        buffers = [scheduler.buffer(reduced, source, innermost) for source in sources]
    step = plan.width if horizontal else 1
    neutral = _neutral(region, [source.lane for source in sources])

    def along(nest: Nest, point: Point) -> list[ir.Value]:
        """Combine everything along the axis at a point of the other dimensions."""

        def values(index: int | ir.Value) -> list[ir.Value]:
            here: Coordinate = At(index, nest.level) if step == 1 else Lanes(index, nest.level)
            if isinstance(index, int):
                here = At(index) if step == 1 else Lanes(index)
            full = (*point[:axis], here, *point[axis + 1 :])
            nest.arrive(full)
            width = nest.width if horizontal or plan.vector_dim is not None else 1
            found = [nest.value(source, full) for source in sources]
            return [emit.splat(v, width) if width > 1 and not isinstance(v.type, ir.VectorType) else v for v in found]

        count = shape[axis] // step
        if count <= plan.unroll_limit:
            accumulated = values(0)
            for i in range(1, count):
                accumulated = combine(emit, region, outer, accumulated, values(i * step))
            return accumulated
        if neutral is None:
            start, initial = step, values(0)
        else:
            start, width = 0, nest.width if plan.vector_dim is not None else 1
            initial = [emit.splat(value, width) if width > 1 else value for value in neutral]

        def each(index: ir.Value, so_far: list[ir.Value]) -> list[ir.Value]:
            with nest.deeper():
                return combine(emit, region, outer, so_far, values(index))

        nest.enter_loop()
        return emit.loop(start, shape[axis], step, initial, each)

    def body(nest: Nest) -> list[ir.Value]:
        results: list[ir.Value] = []

        def at(point: Point) -> None:
            accumulated = along(nest, point)
            if horizontal:
                accumulated = _across_lanes(emit, region, outer, accumulated)
            if not buffers:
                results.extend(accumulated)
            for buffer, value in zip(buffers, accumulated, strict=False):
                buffer.write(nest, tuple(point[d] for d in rest), value)

        outer_shape = [1 if d == axis else size for d, size in enumerate(shape)]
        nest.run(outer_shape, None if horizontal else plan.vector_dim, at, unroll_limit=plan.unroll_limit)
        return results

    scalars = plan.emit(body)
    return list(buffers) if buffers else list(scalars)


def _across_lanes(emit: Emitter, region: Block, outer: Outer, values: list[ir.Value]) -> list[ir.Value]:
    """Combine the lanes of vectors, in halves."""
    width = values[0].type.count if isinstance(values[0].type, ir.VectorType) else 1
    while width > 1:
        width //= 2
        low = [emit.lane_slice(value, 0, width) for value in values]
        high = [emit.lane_slice(value, width, width) for value in values]
        values = combine(emit, region, outer, low, high)
    return [
        emit.builder.extract_element(value, ir.Constant(ir.IntType(32), 0))
        if isinstance(value.type, ir.VectorType)
        else value
        for value in values
    ]


def scan(scheduler: Scheduler, op: ScanOp, sources: Sequence[Tile], outer: Outer) -> list[Tile]:
    """Inclusive scan along one axis, in order; the other dimensions run as vectors."""
    emit = scheduler.emit
    axis = op.axis.value.data
    reverse = isinstance(op.reverse, IntegerAttr) and bool(op.reverse.value.data)
    region = op.combine.block
    kept = [scheduler.materialize(source) for source in sources]
    shape = sources[0].shape
    across = [1 if d == axis else size for d, size in enumerate(shape)]
    plan = scheduler.plan(across, [])
    buffers = [scheduler.buffer(shape, source, plan.vector_dim) for source in sources]
    first, last = (shape[axis] - 1, 0) if reverse else (0, shape[axis] - 1)

    def at(nest: Nest, point: Point) -> None:
        def values(index: int | ir.Value) -> tuple[Point, list[ir.Value]]:
            level = 0 if isinstance(index, int) else nest.level
            full = (*point[:axis], At(index, level), *point[axis + 1 :])
            return full, [nest.value(source, full) for source in kept]

        full, initial = values(first)
        for buffer, value in zip(buffers, initial, strict=True):
            buffer.write(nest, full, value)
        if first == last:
            return

        def each(index: ir.Value, so_far: list[ir.Value]) -> list[ir.Value]:
            with nest.deeper():
                position = emit.builder.sub(emit.value(shape[axis] - 1), index) if reverse else index
                here, following = values(position)
                combined = combine(emit, region, outer, so_far, following)
                for buffer, value in zip(buffers, combined, strict=True):
                    buffer.write(nest, here, value)
                return combined

        nest.enter_loop()
        emit.loop(1, shape[axis], 1, initial, each)

    scheduler.run(plan, at)
    return list(buffers)
