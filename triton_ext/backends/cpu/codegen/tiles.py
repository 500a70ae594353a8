"""Lazy tiles: a tensor of Triton IR as an expression, evaluated where a loop nest consumes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from llvmlite import ir
from xdsl.ir import Attribute, Operation

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import (
    I1,
    I8,
    I32,
    I64,
    PTR,
    lane_type,
    memory_type,
    scalar_of,
    size_bytes,
    with_lanes_of,
)
from triton_ext.backends.cpu.codegen.nest import At, Coordinate, Lanes, Nest, Point, Scattered

Dims = tuple[int | None, ...]
"""For each dimension of a tile, the dimension of a consumer that walks along it, if one does."""


_FEW_LANES = 4


class Tile:
    """A tensor of `shape` whose elements are of Triton type `element`."""

    def __init__(self, shape: Sequence[int], element: Attribute) -> None:
        self.shape = tuple(shape)
        self.element = element
        self.stored: Buffer | None = None
        """Where the elements are, once they have been computed."""
        self.shared = False
        """Several consumers want it and it is not cheap: compute it once."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def lane(self) -> ir.Type:
        return lane_type(self.element)

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        """The tiles that this one reads, with `dims` carried over to their dimensions."""
        return iter(())

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        """Emit the elements at `point`; called through `Nest.value`, which remembers them."""
        raise NotImplementedError


class Uniform(Tile):
    """One scalar, everywhere."""

    def __init__(self, shape: Sequence[int], element: Attribute, value: ir.Value) -> None:
        super().__init__(shape, element)
        self.value = value

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        return nest.emit.builder.ptrtoint(self.value, I64) if self.value.type == PTR else self.value


class Range(Tile):
    """start, start + 1, ..."""

    def __init__(self, element: Attribute, start: int, end: int) -> None:
        super().__init__((end - start,), element)
        self.start = start

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        builder = nest.emit.builder
        lane = self.lane
        match point[0]:
            case At(int() as index):
                return ir.Constant(lane, index + self.start)
            case At(index):
                return builder.add(builder.trunc(index, lane), ir.Constant(lane, self.start))
            case Lanes(base):
                first: ir.Value = (
                    ir.Constant(lane, base + self.start)
                    if isinstance(base, int)
                    else builder.add(builder.trunc(base, lane), ir.Constant(lane, self.start))
                )
                return builder.add(nest.emit.splat(first, nest.width), nest.emit.iota(nest.width, lane))
            case Scattered(indices):
                narrow = builder.trunc(indices, with_lanes_of(lane, indices.type))
                return builder.add(narrow, nest.emit.splat(ir.Constant(lane, self.start), nest.width))
        raise AssertionError(point)


class Map(Tile):
    """An elementwise operation on tiles of its own shape."""

    def __init__(self, shape: Sequence[int], element: Attribute, op: Operation, args: Sequence[Tile]) -> None:
        super().__init__(shape, element)
        self.op = op
        self.args = tuple(args)

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return ((arg, dims) for arg in self.args)

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        values = nest.emit.aligned_lanes([nest.value(arg, point) for arg in self.args])
        return elementwise.lower(nest.emit, self.op, values)


class Offset(Tile):
    """Pointers moved by a number of elements (`tt.addptr`)."""

    def __init__(self, base: Tile, offset: Tile, step_bytes: int) -> None:
        super().__init__(base.shape, base.element)
        self.base, self.offset, self.step_bytes = base, offset, step_bytes

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.base, dims), (self.offset, dims)))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        base, offset = nest.emit.aligned_lanes([nest.value(self.base, point), nest.value(self.offset, point)])
        builder = nest.emit.builder
        wide = with_lanes_of(I64, offset.type)
        if scalar_of(offset.type) != I64:
            offset = builder.sext(offset, wide)
        step = ir.Constant(I64, self.step_bytes)
        scale = nest.emit.splat(step, nest.width) if isinstance(wide, ir.VectorType) else step
        return builder.add(base, builder.mul(offset, scale))


class View(Tile):
    """A tile that only renames the coordinates of another one."""

    def __init__(self, shape: Sequence[int], source: Tile) -> None:
        super().__init__(shape, source.element)
        self.source = source

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.source, self.source_dims(dims)),))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        return nest.value(self.source, self.source_point(nest, point))

    def source_dims(self, dims: Dims) -> Dims:
        raise NotImplementedError

    def source_point(self, nest: Nest, point: Point) -> Point:
        raise NotImplementedError


class ExpandDims(View):
    def __init__(self, source: Tile, axis: int) -> None:
        super().__init__((*source.shape[:axis], 1, *source.shape[axis:]), source)
        self.axis = axis

    def source_dims(self, dims: Dims) -> Dims:
        return dims[: self.axis] + dims[self.axis + 1 :]

    def source_point(self, nest: Nest, point: Point) -> Point:
        return point[: self.axis] + point[self.axis + 1 :]


class Broadcast(View):
    def source_dims(self, dims: Dims) -> Dims:
        return tuple(None if size == 1 else dim for size, dim in zip(self.source.shape, dims, strict=True))

    def source_point(self, nest: Nest, point: Point) -> Point:
        return tuple(At(0) if size == 1 else c for size, c in zip(self.source.shape, point, strict=True))


class Transpose(View):
    """Dimension i of the result is dimension `order[i]` of the source."""

    def __init__(self, source: Tile, order: Sequence[int]) -> None:
        super().__init__([source.shape[d] for d in order], source)
        self.order = tuple(order)

    def source_dims(self, dims: Dims) -> Dims:
        return tuple(dims[self.order.index(d)] for d in range(len(dims)))

    def source_point(self, nest: Nest, point: Point) -> Point:
        return tuple(point[self.order.index(d)] for d in range(len(point)))


class Part(View):
    """`source[..., which]`: one half of `tt.split`."""

    def __init__(self, source: Tile, which: int) -> None:
        super().__init__(source.shape[:-1], source)
        self.which = which

    def source_dims(self, dims: Dims) -> Dims:
        return (*dims, None)

    def source_point(self, nest: Nest, point: Point) -> Point:
        return (*point, At(self.which))


class Reshape(View):
    """The same elements in row-major order, under another shape."""

    def __init__(self, source: Tile, shape: Sequence[int]) -> None:
        super().__init__(shape, source)
        self.groups = _matching_groups(self.shape, source.shape)

    def source_dims(self, dims: Dims) -> Dims:
        result: list[int | None] = [None] * len(self.source.shape)
        for outer, inner in self.groups:
            wide = [d for d in outer if self.shape[d] > 1]
            targets = [d for d in inner if self.source.shape[d] > 1]
            if wide and targets:
                result[targets[-1]] = dims[wide[-1]]
        return tuple(result)

    def source_point(self, nest: Nest, point: Point) -> Point:
        result: list[Coordinate] = [At(0)] * len(self.source.shape)
        for outer, inner in self.groups:
            wide = [d for d in outer if self.shape[d] > 1]
            targets = [d for d in inner if self.source.shape[d] > 1]
            sizes = [self.source.shape[d] for d in targets]
            coordinates = [point[d] for d in wide]
            if not targets:
                continue
            if len(wide) == 1 and len(targets) == 1:
                result[targets[0]] = coordinates[0]
                continue
            linear = _linear(nest, coordinates, [self.shape[d] for d in wide])
            for dim, coordinate in zip(targets, _split(nest, linear, sizes), strict=True):
                result[dim] = coordinate
        return tuple(result)


def _matching_groups(left: Sequence[int], right: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both shapes with equal numbers of elements, each as short as possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        outer, inner, a, b = [], [], 1, 1
        while True:
            if i < len(left) and (a <= b or j == len(right)):
                a *= left[i]
                outer.append(i)
                i += 1
            elif j < len(right):
                b *= right[j]
                inner.append(j)
                j += 1
            if (a == b and outer and inner) or (i == len(left) and j == len(right)):
                break
        groups.append((outer, inner))
    return groups


def _linear(nest: Nest, coordinates: Sequence[Coordinate], sizes: Sequence[int]) -> Coordinate:
    """The row-major index of a point in a block of `sizes`."""
    emit = nest.emit
    level = max((c.level for c in coordinates), default=0)
    leading = [c for c in coordinates[:-1]]
    if all(isinstance(c, At) for c in leading) and coordinates and not isinstance(coordinates[-1], Scattered):
        index: Index = 0
        for coordinate, size in zip(coordinates, sizes, strict=True):
            own = coordinate.base if isinstance(coordinate, Lanes) else coordinate.value  # type: ignore[union-attr]
            index = emit.add(emit.mul(index, size), own)
        return Lanes(index, level) if isinstance(coordinates[-1], Lanes) else At(index, level)
    total: ir.Value | None = None
    stride = 1
    for coordinate, size in zip(reversed(coordinates), reversed(sizes), strict=True):
        indices = nest.indices(coordinate)
        if not isinstance(indices.type, ir.VectorType):
            indices = emit.splat(indices, nest.width)
        scaled = emit.builder.mul(indices, emit.splat(ir.Constant(I64, stride), nest.width))
        total = scaled if total is None else emit.builder.add(total, scaled)
        stride *= size
    assert total is not None
    return Scattered(total, level)


def _split(nest: Nest, linear: Coordinate, sizes: Sequence[int]) -> list[Coordinate]:
    """The inverse of `_linear`."""
    emit, level = nest.emit, linear.level
    result: list[Coordinate] = []
    if isinstance(linear, Lanes) and sizes and sizes[-1] % nest.width == 0:
        rest: Index = linear.base
        result.append(Lanes(emit.modulo(rest, sizes[-1]), level))
        rest = emit.divide(rest, sizes[-1])
        for size in reversed(sizes[:-1]):
            result.append(At(emit.modulo(rest, size), level))
            rest = emit.divide(rest, size)
        return result[::-1]
    if isinstance(linear, At):
        rest = linear.value
        for size in reversed(sizes):
            result.append(At(emit.modulo(rest, size), level))
            rest = emit.divide(rest, size)
        return result[::-1]
    indices = nest.indices(linear)
    for size in reversed(sizes):
        divisor = emit.splat(ir.Constant(I64, size), nest.width)
        result.append(Scattered(emit.builder.urem(indices, divisor), level))
        indices = emit.builder.udiv(indices, divisor)
    return result[::-1]


class Join(Tile):
    """Two tiles along a new last dimension."""

    def __init__(self, left: Tile, right: Tile) -> None:
        super().__init__((*left.shape, 2), left.element)
        self.left, self.right = left, right

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.left, dims[:-1]), (self.right, dims[:-1])))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        last = point[-1]
        if isinstance(last, At) and isinstance(last.value, int):
            return nest.value((self.left, self.right)[last.value], point[:-1])
        which = nest.indices(last)
        left, right, which = nest.emit.aligned_lanes(
            [nest.value(self.left, point[:-1]), nest.value(self.right, point[:-1]), which]
        )
        zero = ir.Constant(which.type, 0 if which.type == I64 else [ir.Constant(I64, 0)] * nest.width)
        return nest.emit.builder.select(nest.emit.builder.icmp_unsigned("==", which, zero), left, right)


class Concatenate(Tile):
    """Two one-dimensional tiles, one after the other."""

    def __init__(self, left: Tile, right: Tile) -> None:
        super().__init__((left.shape[0] + right.shape[0], *left.shape[1:]), left.element)
        self.left, self.right = left, right

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.left, dims), (self.right, dims)))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        emit, builder = nest.emit, nest.emit.builder
        first, count = point[0], self.left.shape[0]
        start = first.base if isinstance(first, Lanes) else first.value if isinstance(first, At) else None
        whole = isinstance(first, At) or count % nest.width == 0
        if isinstance(start, int) and whole:
            chosen, index = (self.left, start) if start < count else (self.right, start - count)
            return nest.value(chosen, (type(first)(index, first.level), *point[1:]))
        indices = nest.indices(first)
        limit, zero = (ir.Constant(I64, n) for n in (count, 0))
        if isinstance(indices.type, ir.VectorType):
            limit, zero = (emit.splat(constant, nest.width) for constant in (limit, zero))
        in_left = builder.icmp_signed("<", indices, limit)
        values = []
        for tile, index in (
            (self.left, builder.select(in_left, indices, zero)),
            (self.right, builder.select(in_left, zero, builder.sub(indices, limit))),
        ):
            here = Scattered(index, first.level) if isinstance(index.type, ir.VectorType) else At(index, first.level)
            values.append(nest.value(tile, (here, *point[1:])))
        return builder.select(*emit.aligned_lanes([in_left, *values]))


class Buffer(Tile):
    """Elements in memory of this thread's own; `order` lists the dimensions from outermost to innermost."""

    def __init__(
        self, pointer: ir.Value, shape: Sequence[int], element: Attribute, order: Sequence[int] | None = None
    ) -> None:
        super().__init__(shape, element)
        self.pointer = pointer
        self.order = tuple(order) if order is not None else tuple(range(len(self.shape)))
        self.strides = [0] * len(self.shape)
        stride = 1
        for dim in reversed(self.order):
            self.strides[dim] = stride
            stride *= self.shape[dim]

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        kind, address = self._address(nest, point)
        stored = memory_type(self.lane)
        if kind == "lanes":
            value = gather(nest.emit, address, stored, nest.width, None, None)
        else:
            type_ = ir.VectorType(stored, nest.width) if kind == "contiguous" else stored
            value = nest.emit.load(address, type_)
        return from_memory(nest.emit, value, self.lane)

    def write(self, nest: Nest, point: Point, value: ir.Value) -> None:
        kind, address = self._address(nest, point)
        if kind != "scalar" and not isinstance(value.type, ir.VectorType):
            value = nest.emit.splat(value, nest.width)
        value = to_memory(nest.emit, value)
        if kind == "lanes":
            scatter(nest.emit, address, value, None)
        else:
            nest.emit.store(value, address)

    def _address(self, nest: Nest, point: Point) -> tuple[str, ir.Value]:
        emit = nest.emit
        stored = memory_type(self.lane)
        offset: Index = 0
        moving: list[tuple[Coordinate, int]] = []
        for coordinate, stride, size in zip(point, self.strides, self.shape, strict=True):
            if size == 1:
                continue
            if isinstance(coordinate, At):
                offset = emit.add(offset, emit.mul(coordinate.value, stride))
            else:
                moving.append((coordinate, stride))
        if not moving:
            return "scalar", emit.offset(self.pointer, offset, stored)
        if len(moving) == 1 and isinstance(moving[0][0], Lanes) and moving[0][1] == 1:
            return "contiguous", emit.offset(self.pointer, emit.add(offset, moving[0][0].base), stored)
        builder = emit.builder
        lanes = emit.splat(builder.ptrtoint(emit.offset(self.pointer, offset, stored), I64), nest.width)
        for coordinate, stride in moving:
            scale = emit.splat(ir.Constant(I64, stride * size_bytes(stored)), nest.width)
            lanes = builder.add(lanes, builder.mul(nest.indices(coordinate), scale))
        return "lanes", lanes


class Borrowed(Buffer):
    """Elements in memory that others may write to, or in `copied` already; see `borrow.keep`."""

    def __init__(self, pointer: ir.Value, copied: Buffer) -> None:
        super().__init__(pointer, copied.shape, copied.element)
        self.copied = copied


class Gather(Tile):
    """`source` at `indices` along one axis; elsewhere the result's own coordinates."""

    def __init__(self, source: Buffer, indices: Tile, axis: int) -> None:
        super().__init__(indices.shape, source.element)
        self.source, self.indices, self.axis = source, indices, axis

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return iter(((self.indices, dims),))

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        index = nest.value(self.indices, point)
        if scalar_of(index.type) != I64:
            index = nest.emit.builder.sext(index, with_lanes_of(I64, index.type))
        level = max(c.level for c in point)
        here = Scattered(index, level) if isinstance(index.type, ir.VectorType) else At(index, level)
        return nest.value(self.source, (*point[: self.axis], here, *point[self.axis + 1 :]))


# -- memory -------------------------------------------------------------------------------------------------


def from_memory(emit: Emitter, value: ir.Value, lane: ir.Type) -> ir.Value:
    return emit.builder.trunc(value, with_lanes_of(I1, value.type)) if lane == I1 else value


def to_memory(emit: Emitter, value: ir.Value) -> ir.Value:
    return emit.builder.zext(value, with_lanes_of(I8, value.type)) if scalar_of(value.type) == I1 else value


def gather(
    emit: Emitter, addresses: ir.Value, element: ir.Type, width: int, mask: ir.Value | None, other: ir.Value | None
) -> ir.Value:
    if width <= _FEW_LANES:
        return _gather_one_by_one(emit, addresses, element, mask, other)
    type_, pointers = ir.VectorType(element, width), ir.VectorType(PTR, width)
    mask = mask if mask is not None else emit.true(type_)
    other = other if other is not None else ir.Constant(type_, ir.Undefined)
    arguments = [emit.builder.inttoptr(addresses, pointers), ir.Constant(I32, size_bytes(element)), mask, other]
    return emit.intrinsic("masked.gather", type_, arguments, (type_, pointers))


def _gather_one_by_one(
    emit: Emitter, addresses: ir.Value, element: ir.Type, mask: ir.Value | None, other: ir.Value | None
) -> ir.Value:
    """Loads of a few lanes: the instruction that gathers takes longer. What is masked off reads zeros of ours."""
    builder, width = emit.builder, addresses.type.count
    if mask is not None:
        zeros = emit.splat(builder.ptrtoint(emit.nowhere(), I64), width)
        addresses = builder.select(mask, addresses, zeros)
    result = ir.Constant(ir.VectorType(element, width), ir.Undefined)
    for lane in range(width):
        address = builder.inttoptr(builder.extract_element(addresses, ir.Constant(I32, lane)), PTR)
        result = builder.insert_element(result, emit.load(address, element), ir.Constant(I32, lane))
    return result if mask is None or other is None else builder.select(mask, result, other)


def scatter(emit: Emitter, addresses: ir.Value, value: ir.Value, mask: ir.Value | None) -> None:
    pointers = ir.VectorType(PTR, value.type.count)
    mask = mask if mask is not None else emit.true(value.type)
    align = ir.Constant(I32, size_bytes(value.type.element))
    arguments = [value, emit.builder.inttoptr(addresses, pointers), align, mask]
    emit.intrinsic("masked.scatter", ir.VoidType(), arguments, (value.type, pointers))
