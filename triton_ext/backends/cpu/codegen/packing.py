"""The operands of a product in memory of this thread's own, in the order in which the micro-kernel reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Attribute

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import I16, I32, everywhere, is_float, scalar_of, size_bytes, with_lanes_of
from triton_ext.backends.cpu.codegen.nest import At, Coordinate, Lanes, Nest, Point, Scattered
from triton_ext.backends.cpu.codegen.schedule import Plan, Scheduler
from triton_ext.backends.cpu.codegen.tiles import Buffer, Dims, Reshape, Tile, View

_NARROWEST = 4
"""Blocks smaller than this many elements squared are not worth transposing in registers."""


class Converted(View):
    """An operand in the type that products are summed in."""

    def __init__(self, source: Tile, element: Attribute) -> None:
        super().__init__(source.shape, source)
        self.element = element

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.source, dims),))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        value = elementwise.decoded(nest.emit, nest.value(self.source, point), self.source.element)
        return _widen(nest.emit, value, self.lane)


def converted(tile: Tile, element: Attribute) -> Tile:
    return tile if tile.element == element else Converted(tile, element)


class Pairs(Tile):
    """Neighbours along `axis` of a tile of 16-bit numbers, as one 32-bit word each: the even one in its lower half."""

    def __init__(self, source: Tile, axis: int) -> None:
        super().__init__([size // 2 if d == axis else size for d, size in enumerate(source.shape)], IntegerType(32))
        self.source, self.axis = source, axis

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.source, dims),))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        emit, builder = nest.emit, nest.emit.builder
        along = point[self.axis]
        with nest.positioned(along.level):
            places = _both(nest, along)
        halves = [nest.value(self.source, (*point[: self.axis], here, *point[self.axis + 1 :])) for here in places]
        if isinstance(along, Lanes):
            # Twice as many numbers as there are lanes: they lie in memory as the words do.
            numbers = ir.Constant(ir.VectorType(I32, 2 * nest.width), list(range(2 * nest.width)))
            both = builder.shuffle_vector(*(_spread(emit, half, nest.width) for half in halves), numbers)
            return builder.bitcast(both, ir.VectorType(I32, nest.width))
        low, high = emit.aligned_lanes(halves)
        words = [
            builder.zext(builder.bitcast(half, with_lanes_of(I16, half.type)), with_lanes_of(I32, half.type))
            for half in (low, high)
        ]
        return builder.or_(words[0], builder.shl(words[1], everywhere(words[1].type, 16)))


def _both(nest: Nest, pair: Coordinate) -> tuple[Coordinate, Coordinate]:
    """Where the two halves of a pair are; of lanes of pairs, the first and the second half of their numbers."""
    emit = nest.emit
    match pair:
        case At(value):
            first = emit.mul(value, 2)
            return At(first, pair.level), At(emit.add(first, 1), pair.level)
        case Lanes(base):
            first = emit.mul(base, 2)
            return Lanes(first, pair.level), Lanes(emit.add(first, nest.width), pair.level)
        case Scattered(indices):
            first = emit.builder.shl(indices, everywhere(indices.type, 1))
            second = emit.builder.add(first, everywhere(indices.type, 1))
            return Scattered(first, pair.level), Scattered(second, pair.level)
    raise AssertionError(pair)


def _widen(emit: Emitter, value: ir.Value, element: ir.Type) -> ir.Value:
    target = with_lanes_of(element, value.type)
    if value.type == target:
        return value
    if is_float(scalar_of(value.type)):
        return emit.builder.fpext(value, target)
    return emit.builder.sext(value, target)


def panels(scheduler: Scheduler, tile: Tile, width: int) -> Buffer:
    """A tile of [depth, columns] as panels of [depth, width], one behind the other; computed in one pass.

    The panels of a batch of such tiles lie one tile behind the other.
    """
    *batch, depth, columns = tile.shape
    shape = (*batch, depth, columns // width, width)
    memory = scheduler.arena.allocate(shape, size_bytes(tile.lane))
    buffer = Buffer(memory, shape, tile.element, order=(0, 2, 1, 3) if batch else (1, 0, 2))
    plan = scheduler.plan(tile.shape, [tile])
    lanes = min(depth, width, scheduler.emit.lanes * 4 // size_bytes(tile.lane))
    if not batch and plan.vector_dim == 0 and not plan.captures and lanes >= _NARROWEST:
        _write_transposed(plan, tile, buffer, lanes)
    else:
        # Row by row, as the tile lies in memory, rather than panel by panel.
        view = Reshape(tile, shape)
        scheduler.write(scheduler.plan(shape, [view]), [(view, buffer)])
    return buffer


def _write_transposed(plan: Plan, tile: Tile, buffer: Buffer, lanes: int) -> None:
    """Fill panels from a tile that is contiguous along the depth: blocks of lanes x lanes, turned in registers."""
    depth, columns = tile.shape
    width = buffer.shape[2]
    plan.width = lanes

    def body(nest: Nest) -> list[ir.Value]:
        emit = nest.emit

        def turn(point: Point) -> None:
            along, block = point
            assert isinstance(along, Lanes) and isinstance(block, At)
            first = emit.mul(block.value, lanes)
            here = [At(emit.add(first, i), nest.level) for i in range(lanes)]
            rows = [_spread(emit, nest.value(tile, (along, column)), lanes) for column in here]
            panel, column = emit.divide(first, width), emit.modulo(first, width)
            start = emit.add(emit.mul(panel, depth * width), column)
            for i, row in enumerate(_transpose(emit, rows)):
                offset = emit.add(start, emit.mul(emit.add(along.base, i), width))
                emit.store(row, emit.offset(buffer.pointer, offset, tile.lane))

        nest.run((depth, columns // lanes), 0, turn, unroll_limit=1)
        return []

    plan.emit(body)


def _spread(emit: Emitter, value: ir.Value, lanes: int) -> ir.Value:
    return value if isinstance(value.type, ir.VectorType) else emit.splat(value, lanes)


def _transpose(emit: Emitter, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """n vectors of n lanes, n a power of two, the other way round: swap ever larger off-diagonal blocks."""
    rows, count = list(rows), len(rows)
    distance = 1
    while distance < count:
        upper = [count + i - distance if i & distance else i for i in range(count)]
        lower = [count + i if i & distance else i + distance for i in range(count)]
        masks = [ir.Constant(ir.VectorType(I32, count), [ir.Constant(I32, i) for i in m]) for m in (upper, lower)]
        for i in range(count):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = (emit.builder.shuffle_vector(*pair, mask) for mask in masks)
        distance *= 2
    return rows
