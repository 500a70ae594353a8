"""Loop nests that evaluate lazy tiles: one nest per consumer, explicit vectors along one dimension.

A tile is evaluated at a tuple of coordinates, one per dimension. A value is emitted at the loop level that its
coordinates depend on, once, so whatever belongs to a row is computed once per row without relying on LLVM to
prove that the row's stores leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import I64

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile


@dataclass(frozen=True)
class At:
    """One index for all lanes."""

    value: Index
    level: int = 0


@dataclass(frozen=True)
class Lanes:
    """Consecutive indices, one per lane: base, base + 1, ..."""

    base: Index
    level: int = 0


@dataclass(frozen=True)
class Scattered:
    """Any index per lane, a vector of i64."""

    indices: ir.Value
    level: int = 0


Coordinate = At | Lanes | Scattered
Point = tuple[Coordinate, ...]


def _key(coordinate: Coordinate) -> tuple[type, int, bool]:
    match coordinate:
        case At(value) | Lanes(value):
            constant = isinstance(value, int)
            return type(coordinate), value if isinstance(value, int) else id(value), constant
        case Scattered(indices):
            return Scattered, id(indices), False


@dataclass
class _Frame:
    """The code of one loop level, and what has been computed there."""

    block: ir.Block | None = None
    memo: dict[tuple[object, ...], tuple[ir.Value, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Assumptions:
    """What a version of a nest takes for granted, after a check in front of it."""

    full: bool = False
    """Every mask made of bounds holds on the whole tile."""
    contiguous: bool = False
    """Every index vector along the vector dimension counts up by one."""


class Nest:
    """The loops over one consumer's domain, while they are being emitted."""

    def __init__(self, emit: Emitter, width: int, assumptions: Assumptions = Assumptions()) -> None:
        self.emit = emit
        self.width = width
        self.assume = assumptions
        self.captures: dict[Tile, Buffer] = {}
        """Tiles to be written to a buffer when they are evaluated at the nest's own point."""
        self.settled: frozenset[Tile] = frozenset()
        """Tiles of booleans that the assumptions make true everywhere."""
        self._point: Point | None = None
        self._frames = [_Frame()]

    @property
    def level(self) -> int:
        return len(self._frames) - 1

    # -- loops --------------------------------------------------------------------------------------------

    def run(
        self,
        shape: Sequence[int],
        vector_dim: int | None,
        body: Callable[[Point], None],
        *,
        unroll_limit: int,
    ) -> None:
        """Call `body` at every point of `shape`, `width` lanes at a time along `vector_dim`."""
        steps = [self.width if d == vector_dim else 1 for d in range(len(shape))]
        trips = 1
        for size, step in zip(shape, steps, strict=True):
            trips *= size // step
        order = [d for d in range(len(shape)) if d != vector_dim]
        if vector_dim is not None:
            order.append(vector_dim)
        unroll = trips <= unroll_limit

        def descend(depth: int, point: dict[int, Coordinate]) -> None:
            if depth == len(order):
                self.arrive(tuple(point[d] for d in range(len(shape))))
                assert self._point is not None
                body(self._point)
                return
            dim = order[depth]
            wide = dim == vector_dim and self.width > 1
            if unroll or shape[dim] == steps[dim]:
                for start in range(0, shape[dim], steps[dim]):
                    descend(depth + 1, {**point, dim: Lanes(start) if wide else At(start)})
                return

            def each(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                with self.deeper():
                    here = Lanes(index, self.level) if wide else At(index, self.level)
                    descend(depth + 1, {**point, dim: here})
                return []

            self.enter_loop()
            self.emit.loop(0, shape[dim], steps[dim], [], each)

        descend(0, {})

    def arrive(self, point: Point) -> None:
        """The consumer is at `point` of its domain: tiles to capture are complete where evaluated at it."""
        self._point = point

    def enter_loop(self) -> None:
        """Called before a loop is emitted: what depends on this level only goes in front of it from now on."""
        self._frames[-1].block = self.emit.builder.block

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self._frames.append(_Frame())
        yield
        self._frames.pop()

    # -- evaluation ---------------------------------------------------------------------------------------

    def value(self, tile: Tile, point: Point) -> ir.Value:
        """The tile's elements at `point`: a vector of `width` lanes, or a scalar where all lanes are equal."""
        settled = tile in self.settled
        tile = tile.stored or tile
        level = max((coordinate.level for coordinate in point), default=0)
        memo = self._frames[level].memo
        key = (id(tile), *map(_key, point))
        if (known := memo.get(key)) is not None:
            return known[0]
        with self.positioned(level):
            value = self.emit.true() if settled else tile.emit(self, point)
            if tile in self.captures and point == self._point:
                self.captures[tile].write(self, point, value)
        memo[key] = value, (tile, point)  # the key holds addresses: keep their objects alive
        return value

    @contextmanager
    def positioned(self, level: int) -> Iterator[None]:
        """Emit where values of `level` belong, for all that is nested deeper to use."""
        block = self._frames[level].block
        if level == self.level or block is None:
            yield
        else:
            with self.emit.at_end_of(block):
                yield

    def indices(self, coordinate: Coordinate) -> ir.Value:
        """A coordinate as i64: a scalar, or a vector with one index per lane."""
        match coordinate:
            case At(value):
                return self.emit.value(value)
            case Lanes(base):
                iota = self.emit.iota(self.width, I64)
                if isinstance(base, int) and base == 0:
                    return iota
                return self.emit.builder.add(self.emit.splat(self.emit.value(base), self.width), iota)
            case Scattered(indices):
                return indices
