"""What is known about a tile of integers, pointers or booleans without evaluating it.

- `separate`: index = base + a sum of terms that depend on one dimension each, so that a row of addresses is
  contiguous where the code says so and a tile of pointers costs no memory.
- `bounds`: a mask as an interval per dimension, so that whole tiles run unmasked.

32-bit index arithmetic is taken not to wrap here: it becomes an address or a bound, and Triton's own address
arithmetic would be wrong as well if it did. Values that a kernel stores are never computed from these forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from llvmlite import ir
from xdsl.dialects.builtin import StringAttr

from triton_ext.backends.cpu.codegen.elementwise import compare_integers
from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import I1, I8, I64, PTR, with_lanes_of
from triton_ext.backends.cpu.codegen.nest import At, Nest, Point
from triton_ext.backends.cpu.codegen.tiles import (
    Broadcast,
    Buffer,
    Dims,
    ExpandDims,
    Map,
    Offset,
    Range,
    Tile,
    Transpose,
    Uniform,
)


@dataclass(frozen=True, eq=False)
class Column:
    """An index vector in memory, used along one dimension, times `scale`."""

    values: Buffer
    scale: Index
    contiguous: ir.Value | None = None
    """Whether the vector counts up by one (i1), where that has been computed."""


@dataclass(frozen=True, eq=False)
class Separable:
    """base + sum over dimensions d of strides[d] * i_d + columns[d][i_d] * scale.

    Of pointers, `base` is a pointer and everything else is in bytes.
    """

    base: Index
    strides: dict[int, Index] = field(default_factory=dict)
    columns: dict[int, tuple[Column, ...]] = field(default_factory=dict)

    @property
    def uniform(self) -> bool:
        return not self.strides and not self.columns

    def moved(self, dims: Callable[[int], int]) -> Separable:
        """The same terms along renamed dimensions."""
        return Separable(
            self.base,
            {dims(d): s for d, s in self.strides.items()},
            {dims(d): c for d, c in self.columns.items()},
        )


class SeparableTile(Tile):
    """Indices or pointers that are only kept in symbolic form: those that a loop carries."""

    def __init__(self, like: Tile, form: Separable) -> None:
        super().__init__(like.shape, like.element)
        self.form = form

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        for d, columns in self.form.columns.items():
            for column in columns:
                yield column.values, (dims[d],)

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        emit, builder = nest.emit, nest.emit.builder
        base = emit.value(self.form.base)
        total = builder.ptrtoint(base, I64) if base.type == PTR else base
        for d, coordinate in enumerate(point):
            terms = []
            if (stride := self.form.strides.get(d, 0)) != 0:
                terms.append((nest.indices(coordinate), stride))
            for column in self.form.columns.get(d, ()):
                values = nest.value(column.values, (coordinate,))
                wide = with_lanes_of(I64, values.type)
                terms.append((values if values.type == wide else builder.sext(values, wide), column.scale))
            for values, scale in terms:
                values, factor, total = emit.aligned_lanes([values, emit.value(scale), total])
                total = builder.add(total, builder.mul(values, factor))
        return total if self.lane == I64 else builder.trunc(total, with_lanes_of(self.lane, total.type))


class Analysis:
    """Finds separable forms and bounds; emits the scalar arithmetic that they need at the builder's position."""

    def __init__(self, emit: Emitter, materialize: Callable[[Tile], Buffer], contiguity: Callable[[Buffer], ir.Value]):
        self.emit = emit
        self._materialize = materialize
        self._contiguity = contiguity

    # -- separable forms ------------------------------------------------------------------------------------

    def separate(self, tile: Tile, nested: bool = False) -> Separable | None:
        """The separable form of a tile, or None. `nested`: the tile is spread over more dimensions afterwards."""
        emit = self.emit
        match tile:
            case _ if tile.stored is not None:
                return self._column(tile, nested)
            case SeparableTile():
                return tile.form
            case Uniform():
                return Separable(tile.value if tile.value.type == PTR else emit.index(tile.value))
            case Range():
                return Separable(tile.start, {0: 1})
            case ExpandDims():
                inner = self.separate(tile.source, True)
                return inner and inner.moved(lambda d: d + (d >= tile.axis))
            case Broadcast():
                return self.separate(tile.source, True)
            case Transpose():
                inner = self.separate(tile.source, nested)
                return inner and inner.moved(tile.order.index)
            case Offset():
                base = self.separate(tile.base, nested)
                offset = self.separate(tile.offset, nested) if base else None
                return base and offset and self._add(base, self._scale(offset, tile.step_bytes))
            case Map():
                return self._separate_map(tile, nested)
        return self._column(tile, nested)

    def _separate_map(self, tile: Map, nested: bool) -> Separable | None:
        name = tile.op.name
        if name in ("arith.extsi", "arith.index_cast", "tt.bitcast"):
            return self.separate(tile.args[0], nested)
        if name in ("arith.addi", "arith.subi", "arith.muli"):
            left, right = (self.separate(arg, nested) for arg in tile.args)
            if left is not None and right is not None:
                if name == "arith.addi":
                    return self._add(left, right)
                if name == "arith.subi":
                    return self._add(left, self._scale(right, -1))
                if right.uniform or left.uniform:
                    return self._scale(left, right.base) if right.uniform else self._scale(right, left.base)
        return self._column(tile, nested)

    def _column(self, tile: Tile, nested: bool) -> Separable | None:
        wide = [d for d, size in enumerate(tile.shape) if size > 1]
        if not wide and tile.lane != I1:
            value = Nest(self.emit, 1).value(tile, (At(0),) * len(tile.shape))
            return Separable(self.emit.index(value))
        if len(wide) != 1 or (len(tile.shape) == 1 and not nested) or tile.lane == I1:
            return None
        vector = self._materialize(tile)
        flat = Buffer(vector.pointer, (tile.shape[wide[0]],), tile.element)
        return Separable(0, {}, {wide[0]: (Column(flat, 1, self._contiguity(flat)),)})

    def _add(self, a: Separable, b: Separable) -> Separable | None:
        emit = self.emit
        if _is_pointer(b.base):
            a, b = b, a
        if _is_pointer(b.base):
            return None
        strides = dict(a.strides)
        for d, stride in b.strides.items():
            strides[d] = emit.add(strides[d], stride) if d in strides else stride
        columns = {d: a.columns.get(d, ()) + b.columns.get(d, ()) for d in {**a.columns, **b.columns}}
        if _is_pointer(a.base):
            return Separable(emit.offset(cast(ir.Value, a.base), b.base, I8), strides, columns)
        return Separable(emit.add(a.base, b.base), strides, columns)

    def _scale(self, form: Separable, factor: Index) -> Separable:
        emit = self.emit
        return Separable(
            emit.mul(form.base, factor),
            {d: emit.mul(stride, factor) for d, stride in form.strides.items()},
            {
                d: tuple(replace(column, scale=emit.mul(column.scale, factor)) for column in columns)
                for d, columns in form.columns.items()
            },
        )

    # -- masks ------------------------------------------------------------------------------------------------

    def bounds(self, mask: Tile) -> Bounds:
        """The mask as intervals, scalar conditions and whatever is left."""
        found = self._find_bounds(mask)
        return found if found.rest else replace(found, settled=(*found.settled, mask))

    def _find_bounds(self, mask: Tile) -> Bounds:
        match mask:
            case Uniform():
                if isinstance(mask.value, ir.Constant) and mask.value.constant:
                    return Bounds()
                return Bounds(conditions=(mask.value,))
            case ExpandDims():
                return self._lifted(mask, mask.source, lambda d: d + (d >= mask.axis))
            case Broadcast():
                return self._lifted(mask, mask.source, lambda d: d)
            case Transpose():
                return self._lifted(mask, mask.source, mask.order.index)
            case Map() if mask.op.name == "arith.andi":
                return self._both(self.bounds(mask.args[0]), self.bounds(mask.args[1]))
            case Map() if mask.op.name == "arith.cmpi" and mask.stored is None:
                return self._compared(mask) or Bounds(rest=(mask,))
        return Bounds(rest=(mask,))

    def _lifted(self, mask: Tile, source: Tile, dims: Callable[[int], int]) -> Bounds:
        inner = self.bounds(source)
        if inner.rest:
            return Bounds(rest=(mask,))
        intervals = {dims(d): interval for d, interval in inner.intervals.items()}
        return replace(inner, intervals=intervals)

    def _both(self, a: Bounds, b: Bounds) -> Bounds:
        intervals = dict(a.intervals)
        for d, (low, high) in b.intervals.items():
            if d in intervals:
                other_low, other_high = intervals[d]
                intervals[d] = self._extreme("smax", low, other_low), self._extreme("smin", high, other_high)
            else:
                intervals[d] = low, high
        return Bounds(intervals, a.conditions + b.conditions, a.rest + b.rest, a.settled + b.settled)

    def _extreme(self, name: str, a: Index | None, b: Index | None) -> Index | None:
        if a is None or b is None:
            return a if b is None else b
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b) if name == "smax" else min(a, b)
        return self.emit.intrinsic(name, I64, [self.emit.value(a), self.emit.value(b)])

    def _compared(self, mask: Map) -> Bounds | None:
        emit = self.emit
        predicate = cast(StringAttr, mask.op.attributes["predicate"]).data
        if not predicate.startswith("s") and predicate != "eq":
            return None
        left, right = (self._affine(arg) for arg in mask.args)
        if left is None or right is None:
            return None
        difference = self._add(left, self._scale(right, -1))
        if difference is None or difference.columns or _is_pointer(difference.base):
            return None
        strides = {d: s for d, s in difference.strides.items() if s != 0}
        if not strides:
            zero = ir.Constant(I64, 0)
            return Bounds(conditions=(compare_integers(emit, predicate, emit.value(difference.base), zero),))
        ((dim, stride), *others) = strides.items()
        if others or stride not in (1, -1):
            return None
        if stride == -1:
            difference = self._scale(difference, -1)
            predicate = {"slt": "sgt", "sle": "sge", "sgt": "slt", "sge": "sle", "eq": "eq"}[predicate]
        edge = emit.mul(difference.base, -1)  # i < edge, i <= edge, ...
        after = emit.add(edge, 1)
        interval: dict[str, tuple[Index | None, Index | None]] = {
            "slt": (None, edge), "sle": (None, after), "sgt": (after, None), "sge": (edge, None), "eq": (edge, after),
        }  # fmt: skip
        return Bounds({dim: interval[predicate]})

    def _affine(self, tile: Tile) -> Separable | None:
        """A separable form without columns: bounds need no index vector in memory."""
        match tile:
            case _ if tile.stored is not None:
                return None
            case SeparableTile():
                return None if tile.form.columns else tile.form
            case Uniform() | Range():
                return None if tile.lane == I1 else self.separate(tile)
            case ExpandDims():
                inner = self._affine(tile.source)
                return inner and inner.moved(lambda d: d + (d >= tile.axis))
            case Broadcast():
                return self._affine(tile.source)
            case Transpose():
                inner = self._affine(tile.source)
                return inner and inner.moved(tile.order.index)
            case Map() if tile.op.name == "arith.extsi":
                return self._affine(tile.args[0])
            case Map() if tile.op.name in ("arith.addi", "arith.subi", "arith.muli"):
                left, right = (self._affine(arg) for arg in tile.args)
                if left is None or right is None:
                    return None
                if tile.op.name == "arith.addi":
                    return self._add(left, right)
                if tile.op.name == "arith.subi":
                    return self._add(left, self._scale(right, -1))
                if right.uniform or left.uniform:
                    return self._scale(left, right.base) if right.uniform else self._scale(right, left.base)
        return None


@dataclass(frozen=True, eq=False)
class Bounds:
    """A mask: low <= i_d < high for each dimension d, and scalar conditions, and the tiles `rest`."""

    intervals: dict[int, tuple[Index | None, Index | None]] = field(default_factory=dict)
    conditions: tuple[ir.Value, ...] = ()
    rest: tuple[Tile, ...] = ()
    settled: tuple[Tile, ...] = ()
    """The tiles of booleans that are true everywhere if the intervals are full and the conditions hold."""


def _is_pointer(base: Index) -> bool:
    return not isinstance(base, int) and base.type == PTR
