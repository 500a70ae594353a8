"""Loads and stores of tiles through pointers: contiguous, masked, gathered or scattered."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from xdsl.ir import Attribute

from triton_ext.backends.cpu.codegen.addressing import Bounds, Separable, SeparableTile
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import I1, I8, I32, I64, PTR, memory_type, scalar_of, size_bytes
from triton_ext.backends.cpu.codegen.nest import At, Lanes, Nest, Point, Scattered
from triton_ext.backends.cpu.codegen.tiles import (
    Dims,
    Tile,
    from_memory,
    gather,
    scatter,
    to_memory,
)

_AHEAD_BYTES = 512


class Access:
    """Where a load or a store goes, and under which mask."""

    def __init__(self, pointers: Tile, form: Separable | None, bounds: Bounds, lane: ir.Type) -> None:
        self.pointers, self.form, self.bounds = pointers, form, bounds
        self.stored = memory_type(lane)

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        if self.form is None:
            yield self.pointers, dims
        for tile in self.bounds.rest:
            yield tile, dims

    def vote(self, dims: Dims, votes: dict[int, int]) -> None:
        """Count the consumer's dimension along which this access is contiguous."""
        if self.form is None:
            return
        step = size_bytes(self.stored)
        for d, dim in enumerate(dims):
            columns = self.form.columns.get(d, ())
            by_stride = self.form.strides.get(d, 0) == step and not columns
            by_column = len(columns) == 1 and columns[0].scale == step and d not in self.form.strides
            if dim is not None and (by_stride or by_column):
                votes[dim] = votes.get(dim, 0) + 1

    def address(self, nest: Nest, point: Point) -> tuple[str, ir.Value]:
        """("scalar" | "contiguous", pointer) or ("lanes", one address per lane as i64)."""
        emit = nest.emit
        if self.form is None:
            value = nest.value(self.pointers, point)
            if isinstance(value.type, ir.VectorType):
                return "lanes", value
            return "scalar", emit.builder.inttoptr(value, PTR)
        step = size_bytes(self.stored)
        base = emit.value(self.form.base)
        pointer = base if base.type == PTR else emit.builder.inttoptr(base, PTR)
        moving: list[int] = []
        for d, coordinate in enumerate(point):
            stride, columns = self.form.strides.get(d, 0), self.form.columns.get(d, ())
            if not columns and stride == 0:
                continue
            if not isinstance(coordinate, At):
                moving.append(d)
                continue
            pointer = emit.offset(pointer, emit.mul(coordinate.value, stride), I8)
            for column in columns:
                index = emit.index(nest.value(column.values, (coordinate,)))
                pointer = emit.offset(pointer, emit.mul(index, column.scale), I8)
        if not moving:
            return "scalar", pointer
        if len(moving) == 1 and isinstance(along := point[moving[0]], Lanes):
            stride, columns = self.form.strides.get(moving[0], 0), self.form.columns.get(moving[0], ())
            if stride == step and not columns:
                return "contiguous", emit.offset(pointer, emit.mul(along.base, step), I8)
            if stride == 0 and len(columns) == 1 and columns[0].scale == step and nest.assume.contiguous:
                start = emit.index(nest.value(columns[0].values, (At(along.base, along.level),)))
                return "contiguous", emit.offset(pointer, emit.mul(start, step), I8)
        return "lanes", self._lanes(nest, point, moving, pointer)

    def _lanes(self, nest: Nest, point: Point, moving: list[int], pointer: ir.Value) -> ir.Value:
        assert self.form is not None
        emit, builder, width = nest.emit, nest.emit.builder, nest.width
        total = emit.splat(builder.ptrtoint(pointer, I64), width)
        for d in moving:
            terms = []
            if (stride := self.form.strides.get(d, 0)) != 0:
                terms.append((nest.indices(point[d]), stride))
            for column in self.form.columns.get(d, ()):
                values = nest.value(column.values, (point[d],))
                if scalar_of(values.type) != I64:
                    values = builder.sext(values, ir.VectorType(I64, width))
                terms.append((values, column.scale))
            for values, scale in terms:
                total = builder.add(total, builder.mul(values, emit.splat(emit.value(scale), width)))
        return total

    def mask(self, nest: Nest, point: Point, shape: tuple[int, ...]) -> ir.Value | None:
        """i1, or a vector of i1, or None where everything is inside."""
        emit, builder = nest.emit, nest.emit.builder
        parts: list[ir.Value] = []
        if not nest.assume.full:
            parts.extend(self.bounds.conditions)
            for d, (low, high) in self.bounds.intervals.items():
                for limit, signed_op, everything in ((low, ">=", 0), (high, "<", shape[d])):
                    if limit is None or (
                        isinstance(limit, int) and (limit <= 0 if signed_op == ">=" else limit >= everything)
                    ):
                        continue
                    coordinate = point[d]
                    if isinstance(coordinate, Lanes):
                        # Compare lane numbers in 32 bits: the limit relative to this vector, clamped.
                        relative = emit.value(emit.sub(limit, coordinate.base))
                        for name, clamp in (("smax", 0), ("smin", nest.width)):
                            relative = emit.intrinsic(name, I64, [relative, ir.Constant(I64, clamp)])
                        edge = emit.splat(builder.trunc(relative, I32), nest.width)
                        parts.append(builder.icmp_signed(signed_op, emit.iota(nest.width, I32), edge))
                        continue
                    indices = nest.indices(coordinate)
                    edge = emit.value(limit)
                    if isinstance(coordinate, Scattered):
                        edge = emit.splat(edge, nest.width)
                    parts.append(builder.icmp_signed(signed_op, indices, edge))
        parts.extend(nest.value(tile, point) for tile in self.bounds.rest)
        if not parts:
            return None
        mask, *others = emit.aligned_lanes(parts)
        for other in others:
            mask = builder.and_(mask, other)
        return mask


class Load(Tile):
    """What lies at the pointers; `other`, or anything, where the mask does not hold."""

    def __init__(self, element: Attribute, access: Access, shape: tuple[int, ...], other: Tile | None) -> None:
        super().__init__(shape, element)
        self.access, self.other = access, other

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        yield from self.access.inputs(dims)
        if self.other is not None:
            yield self.other, dims

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        emit, builder, stored = nest.emit, nest.emit.builder, self.access.stored
        kind, address = self.access.address(nest, point)
        mask = self.access.mask(nest, point, self.shape)
        vector_mask = mask is not None and isinstance(mask.type, ir.VectorType)
        if kind == "contiguous" and mask is None:
            if self._goes_on():
                # Ask for what lies a bit further along the row.
                _ask_for(emit, emit.offset(address, _AHEAD_BYTES, I8), size_bytes(stored) * nest.width)
            return from_memory(emit, emit.load(address, ir.VectorType(stored, nest.width)), self.lane)
        other = nest.value(self.other, point) if self.other is not None and mask is not None else None
        if other is not None:
            other = to_memory(emit, other)
        if kind == "scalar":
            value = self._load_scalar(emit, address, mask)
            if other is not None:
                assert mask is not None
                value = (
                    builder.select(*emit.aligned_lanes([mask, value, other]))
                    if (vector_mask or isinstance(other.type, ir.VectorType))
                    else builder.select(mask, value, other)
                )
            return from_memory(emit, value, self.lane)
        type_ = ir.VectorType(stored, nest.width)
        if other is None:
            other = _zeros(type_)
        elif not isinstance(other.type, ir.VectorType):
            other = emit.splat(other, nest.width)
        if mask is not None and not vector_mask:
            mask = emit.splat(mask, nest.width)
        if kind == "contiguous":
            align = ir.Constant(I32, size_bytes(stored))
            value = emit.intrinsic("masked.load", type_, [address, align, mask, other], (type_, PTR))
        else:
            value = gather(emit, address, stored, nest.width, mask, other)
        return from_memory(emit, value, self.lane)

    def _goes_on(self) -> bool:
        """Whether a loop walks along short rows: too many streams for the hardware to follow across pages."""
        form, step = self.access.form, size_bytes(self.access.stored)
        if form is None or not isinstance(self.access.pointers, SeparableTile) or len(self.shape) < 2:
            return False
        rows = [d for d, stride in form.strides.items() if stride == step]
        return bool(rows) and self.shape[rows[0]] * step < _AHEAD_BYTES

    def _load_scalar(self, emit: Emitter, address: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Without a branch: a load that is masked off reads a zero of ours instead."""
        if mask is not None:
            if isinstance(mask.type, ir.VectorType):
                mask = emit.intrinsic("vector.reduce.or", I1, [mask], (mask.type,))
            address = emit.builder.select(mask, address, emit.nowhere())
        return emit.load(address, self.access.stored)


def prefetch(nest: Nest, point: Point, access: Access) -> None:
    """Ask for what `point`'s lanes will read, if it lies in a row."""
    kind, address = access.address(nest, point)
    if kind != "lanes":
        _ask_for(nest.emit, address, size_bytes(access.stored) * (nest.width if kind == "contiguous" else 1))


def _ask_for(emit: Emitter, address: ir.Value, size_in_bytes: int) -> None:
    for start in range(0, size_in_bytes, 64):
        place = emit.offset(address, start, I8)
        flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]  # for reading, into all levels, data
        emit.intrinsic("prefetch", ir.VoidType(), [place, *flags], (PTR,))


def _zeros(type_: ir.VectorType) -> ir.Constant:
    zero = ir.Constant(type_.element, 0 if isinstance(type_.element, ir.IntType) else 0.0)
    return ir.Constant(type_, [zero] * type_.count)


def store(nest: Nest, point: Point, access: Access, shape: tuple[int, ...], value: ir.Value) -> None:
    """Store the value of `point`'s lanes."""
    emit = nest.emit
    kind, address = access.address(nest, point)
    mask = access.mask(nest, point, shape)
    value = to_memory(emit, value)
    lanes = any(isinstance(c, (Lanes, Scattered)) for c in point)
    if not lanes:
        if mask is None:
            emit.store(value, address)
        else:
            with emit.only_if(mask):
                emit.store(value, address)
        return
    if not isinstance(value.type, ir.VectorType):
        value = emit.splat(value, nest.width)
    if kind == "contiguous" and mask is None:
        emit.store(value, address)
        return
    if mask is not None and not isinstance(mask.type, ir.VectorType):
        mask = emit.splat(mask, nest.width)
    if kind == "contiguous":
        arguments = [value, address, ir.Constant(I32, size_bytes(access.stored)), mask]
        emit.intrinsic("masked.store", ir.VoidType(), arguments, (value.type, PTR))
        return
    if kind == "scalar":
        address = emit.splat(emit.builder.ptrtoint(address, I64), nest.width)
    scatter(emit, address, value, mask)
