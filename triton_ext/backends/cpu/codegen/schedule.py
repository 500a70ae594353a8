"""Decides how a consumer's loop nest runs: along which dimension, how wide, in which versions, and what is
computed once and kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

from llvmlite import ir

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.backends.cpu.codegen.addressing import Analysis, Bounds
from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import I1, I8, PTR, memory_type, scalar_of, size_bytes
from triton_ext.backends.cpu.codegen.memory import Access, Load
from triton_ext.backends.cpu.codegen.nest import Assumptions, At, Lanes, Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Borrowed, Broadcast, Buffer, Dims, Gather, Join, Map, Tile

EXPENSIVE = 8
"""Elements that cost more than this many additions are computed once, not once per consumer."""
_MAX_COST = 10_000
STACK_BYTES = 2048
_UNROLLED_STEPS = 8
_WIDE = 4


class Arena:
    """Memory of one program: small buffers on the stack (LLVM turns them into registers), the rest in scratch.

    What a region (a loop body, a branch) allocates is free again at its end.
    """

    def __init__(self, emit: Emitter, scratch: ir.Value) -> None:
        self.emit = emit
        self.scratch = scratch
        self.used_bytes = 0
        self.peak_bytes = 0
        self._stored: list[tuple[Tile, Buffer | None]] = []

    def allocate(self, shape: Sequence[int], element_bytes: int) -> ir.Value:
        size = prod(shape) * element_bytes
        if size <= STACK_BYTES:
            with self.emit.at_end_of(self.emit.entry):
                memory = self.emit.builder.alloca(ir.ArrayType(I8, size))
                memory.align = 64
                memory.type = PTR  # llvmlite gives it a pointer type of the old kind
                return memory
        return self.take_scratch(size)

    def take_scratch(self, size_in_bytes: int) -> ir.Value:
        pointer = self.emit.offset(self.scratch, self.used_bytes, I8)
        self.used_bytes += -(-size_in_bytes // 64) * 64
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return pointer

    def remember(self, tile: Tile, buffer: Buffer) -> None:
        """`tile`'s elements are in `buffer`, until the current region ends."""
        self._stored.append((tile, tile.stored))
        tile.stored = buffer

    @contextmanager
    def region(self) -> Iterator[None]:
        used, count = self.used_bytes, len(self._stored)
        yield
        self.used_bytes = used
        for tile, before in reversed(self._stored[count:]):
            tile.stored = before
        del self._stored[count:]


class Plan:
    """One consumer's nest: made by `Scheduler.plan`, emitted once per version by `emit`."""

    def __init__(self, scheduler: Scheduler, shape: tuple[int, ...]) -> None:
        self.scheduler = scheduler
        self.shape = shape
        self.vector_dim: int | None = None
        self.width = 1
        self.unroll_limit = _UNROLLED_STEPS
        self.captures: dict[Tile, Buffer] = {}
        self.accesses: list[tuple[Access, Dims, tuple[int, ...]]] = []
        self.conditions: list[Tile] = []
        """What the tiles select by."""

    def emit(self, body: Callable[[Nest], Sequence[ir.Value]]) -> list[ir.Value]:
        """Emit the nest, in a fast version where a check in front of it allows that, and its values."""
        emit = self.scheduler.emit
        masks = self.masks()
        full = self.full_condition(masks)
        settled = frozenset(tile for bounds, _ in masks for tile in bounds.settled)
        contiguous = self._contiguity_condition()

        def version(assumptions: Assumptions) -> Sequence[ir.Value]:
            nest = Nest(emit, self.width, assumptions)
            nest.captures = dict(self.captures)
            nest.settled = settled if assumptions.full else frozenset()
            return body(nest)

        def masked() -> Sequence[ir.Value]:
            if contiguous is None:
                return version(Assumptions())
            return emit.either(
                contiguous, lambda: version(Assumptions(contiguous=True)), lambda: version(Assumptions())
            )

        if full is None and contiguous is None:
            values = list(version(Assumptions(full=True)))
        elif full is None:
            assert contiguous is not None
            values = emit.either(
                contiguous,
                lambda: version(Assumptions(full=True, contiguous=True)),
                lambda: version(Assumptions(full=True)),
            )
        else:
            fast = emit.builder.and_(full, contiguous) if contiguous is not None else full
            values = emit.either(
                fast, lambda: version(Assumptions(full=True, contiguous=contiguous is not None)), masked
            )
        for tile, buffer in self.captures.items():
            self.scheduler.arena.remember(tile, buffer)
        return values

    def masks(self) -> list[tuple[Bounds, tuple[int, ...]]]:
        """The bounds that the nest's versions are about, and the shapes of their tiles."""
        masks = [(access.bounds, shape) for access, _, shape in self.accesses]
        if any(bounds.intervals or bounds.conditions for bounds, _ in masks):
            return masks
        # Only values are masked. A version for them must be possible, or it is code that never runs.
        found = [(self.scheduler.analysis.bounds(tile), tile.shape) for tile in self.conditions]
        return [(bounds, shape) for bounds, shape in found if bounds.intervals and _can_be_full(bounds, shape)]

    def full_condition(self, masks: Sequence[tuple[Bounds, tuple[int, ...]]]) -> ir.Value | None:
        """Whether every mask made of bounds holds on the whole tile; None where that is certain."""
        emit = self.scheduler.emit
        parts: dict[object, ir.Value] = {}
        for bounds, shape in masks:
            if not _can_be_full(bounds, shape):
                return ir.Constant(I1, 0)
            for condition in bounds.conditions:
                parts[id(condition)] = condition
            for d, (low, high) in bounds.intervals.items():
                for limit, operator, edge in ((low, "<=", 0), (high, ">=", shape[d])):
                    if limit is None or isinstance(limit, int):
                        continue
                    key = (id(limit), operator, edge)
                    if key not in parts:
                        parts[key] = emit.builder.icmp_signed(operator, limit, emit.value(edge))
        result: ir.Value | None = None
        for part in parts.values():
            result = part if result is None else emit.builder.and_(result, part)
        return result

    def _contiguity_condition(self) -> ir.Value | None:
        result: ir.Value | None = None
        seen: set[int] = set()
        for access, dims, _ in self.accesses:
            if access.form is None:
                continue
            for d, columns in access.form.columns.items():
                flag = columns[0].contiguous
                usable = len(columns) == 1 and d not in access.form.strides
                usable = usable and columns[0].scale == size_bytes(access.stored)
                if dims[d] == self.vector_dim and usable and flag is not None and id(flag) not in seen:
                    seen.add(id(flag))
                    result = flag if result is None else self.scheduler.emit.builder.and_(result, flag)
        return result


def _can_be_full(bounds: Bounds, shape: tuple[int, ...]) -> bool:
    """Whether no limit known at compile time excludes a part of the tile."""
    return not any(
        (isinstance(low, int) and low > 0) or (isinstance(high, int) and high < shape[d])
        for d, (low, high) in bounds.intervals.items()
    )


class Scheduler:
    """Plans nests and keeps tiles in memory, for one function."""

    def __init__(self, emit: Emitter, arena: Arena) -> None:
        self.emit = emit
        self.arena = arena
        self.analysis = Analysis(emit, self.materialize, self._counts_up)
        self._costs: dict[Tile, int] = {}
        self._contiguity: dict[ir.Value, ir.Value] = {}

    # -- tiles in memory ------------------------------------------------------------------------------------

    def buffer(self, shape: Sequence[int], like: Tile, innermost: int | None = None) -> Buffer:
        """A new buffer of `shape` for elements as `like` has; `innermost` is its contiguous dimension."""
        pointer = self.arena.allocate(shape, size_bytes(memory_type(like.lane)))
        order = [d for d in range(len(shape)) if d != innermost]
        return Buffer(pointer, shape, like.element, order if innermost is None else [*order, innermost])

    def materialize(self, tile: Tile) -> Buffer:
        """Compute the whole tile now, into memory of this thread's own, unless that has been done."""
        if isinstance(tile, Buffer):
            return tile
        if tile.stored is None or isinstance(tile.stored, Borrowed):
            plan = self.plan(tile.shape, [tile])
            buffer = tile.stored.copied if tile.stored is not None else self.buffer(tile.shape, tile, plan.vector_dim)
            self.write(plan, [(tile, buffer)])
            self.arena.remember(tile, buffer)
        assert tile.stored is not None
        return tile.stored

    def write(self, plan: Plan, targets: Sequence[tuple[Tile, Buffer]]) -> None:
        """Evaluate tiles of the plan's shape into buffers, in one nest."""
        for tile, _ in targets:
            plan.captures.pop(tile, None)

        def body(nest: Nest, point: Point) -> None:
            values = [nest.value(tile, point) for tile, _ in targets]
            for (_, buffer), value in zip(targets, values, strict=True):
                buffer.write(nest, point, value)

        self.run(plan, body)

    def run(self, plan: Plan, body: Callable[[Nest, Point], None]) -> None:
        """Emit `body` at every point of the plan's shape."""

        def nest_body(nest: Nest) -> list[ir.Value]:
            nest.run(plan.shape, plan.vector_dim, lambda point: body(nest, point), unroll_limit=plan.unroll_limit)
            return []

        plan.emit(nest_body)

    # -- plans ------------------------------------------------------------------------------------------------

    def plan(
        self,
        shape: Sequence[int],
        inputs: Sequence[Tile],
        accesses: Sequence[Access] = (),
        *,
        vectorize: bool = True,
    ) -> Plan:
        """Plan a nest over `shape` that evaluates `inputs`, all of that shape, and stores through `accesses`."""
        plan = Plan(self, tuple(shape))
        identity: Dims = tuple(range(len(plan.shape)))
        votes: dict[int, int] = {}
        widest = 4
        costly = False
        seen: set[tuple[int, Dims]] = set()
        work: list[tuple[Tile, Dims]] = [(tile, identity) for tile in inputs]
        for access in accesses:
            plan.accesses.append((access, identity, plan.shape))
            access.vote(identity, votes)
            work.extend(access.inputs(identity))
        while work:
            tile, dims = work.pop()
            tile = tile.stored or tile
            if (id(tile), dims) in seen:
                continue
            seen.add((id(tile), dims))
            if self._belongs_in_memory(tile):
                if dims == identity and tile.shape == plan.shape and vectorize:
                    if tile not in plan.captures:
                        plan.captures[tile] = self.buffer(tile.shape, tile)
                else:
                    tile = self.materialize(tile)
            elif isinstance(tile, Broadcast):
                source = tile.source
                if source.stored is None and 1 < source.size < tile.size and self.cost(source) >= EXPENSIVE:
                    self.materialize(source)
            if not isinstance(tile, Buffer):
                widest = max(widest, size_bytes(memory_type(tile.lane)))
            match tile:
                case Load():
                    plan.accesses.append((tile.access, dims, tile.shape))
                    tile.access.vote(dims, votes)
                case Buffer():
                    inner = dims[tile.order[-1]]
                    if inner is not None and tile.shape[tile.order[-1]] > 1:
                        votes[inner] = votes.get(inner, 0) + 1
                case Join():
                    last = dims[-1]
                    if last is not None:
                        votes[last] = votes.get(last, 0) - 2
                case Map():
                    costly |= elementwise.cost(tile.op) >= EXPENSIVE
                    if tile.op.name == "arith.select":
                        plan.conditions.append(tile.args[0])
            work.extend(tile.inputs(dims))
        if vectorize:
            self._choose_vector(plan, votes, widest, costly)
        if len(seen) > 60:
            plan.unroll_limit = 2
        # A capture is written along the vector dimension.
        for tile, buffer in list(plan.captures.items()):
            if plan.vector_dim is not None and buffer.order[-1] != plan.vector_dim:
                order = [d for d in buffer.order if d != plan.vector_dim]
                plan.captures[tile] = Buffer(buffer.pointer, buffer.shape, buffer.element, [*order, plan.vector_dim])
        return plan

    def _belongs_in_memory(self, tile: Tile) -> bool:
        return tile.shared and tile.stored is None and self.cost(tile) >= EXPENSIVE

    def _choose_vector(self, plan: Plan, votes: dict[int, int], widest: int, costly: bool) -> None:
        candidates = [d for d, size in enumerate(plan.shape) if size > 1]
        if not candidates:
            return
        plan.vector_dim = max(candidates, key=lambda d: (votes.get(d, 0), d))
        lanes = self.emit.lanes * (_WIDE // 2 if costly else _WIDE)
        lanes = max(lanes * 4 // widest, 1)
        plan.width = min(plan.shape[plan.vector_dim], lanes)

    def cost(self, tile: Tile) -> int:
        """Additions that one element takes, with nothing of its operands at hand."""
        if isinstance(tile.stored or tile, Buffer):
            return 1
        if tile not in self._costs:
            total = {Map: 0, Load: 2, Gather: 4}.get(type(tile), 0)
            if isinstance(tile, Map):
                total += elementwise.cost(tile.op)
            total += sum(self.cost(source) for source, _ in tile.inputs((None,) * len(tile.shape)))
            self._costs[tile] = min(total, _MAX_COST)
        return self._costs[tile]

    def _counts_up(self, vector: Buffer) -> ir.Value:
        """Whether a one-dimensional index vector goes up by one at every step."""
        if vector.pointer in self._contiguity:
            return self._contiguity[vector.pointer]
        emit, builder = self.emit, self.emit.builder
        count = vector.shape[0]
        width = min(count, emit.lanes)
        nest = Nest(emit, width)
        first = nest.value(vector, (At(0),))
        lane = first.type

        def agree(index: Index) -> ir.Value:
            values = vector.emit(nest, (Lanes(index),)) if width > 1 else vector.emit(nest, (At(index),))
            start = builder.trunc(emit.value(index), lane) if lane.width < 64 else emit.value(index)
            expected = emit.splat(builder.add(first, start), width) if width > 1 else builder.add(first, start)
            if width > 1:
                expected = builder.add(expected, emit.iota(width, lane))
            return builder.icmp_unsigned("==", values, expected)

        result = agree(0)
        if count > width:
            (result,) = emit.loop(width, count, width, [result], lambda i, so_far: [builder.and_(so_far[0], agree(i))])
        if width > 1:
            result = emit.intrinsic("vector.reduce.and", scalar_of(result.type), [result], (result.type,))
        self._contiguity[vector.pointer] = result
        return result
