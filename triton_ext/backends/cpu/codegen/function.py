"""Lowers one function of Triton IR: straight-line operations become lazy tiles, their consumers loop nests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from llvmlite import ir
from xdsl.dialects.builtin import DenseArrayBase, IntegerType, StringAttr, SymbolRefAttr
from xdsl.dialects.cf import BranchOp, ConditionalBranchOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from triton_ext.backends.cpu.codegen import atomics, elementwise, liveness
from triton_ext.backends.cpu.codegen.addressing import Bounds
from triton_ext.backends.cpu.codegen.borrow import keep
from triton_ext.backends.cpu.codegen.checked import checked
from triton_ext.backends.cpu.codegen.checks import Checks, Does
from triton_ext.backends.cpu.codegen.constants import scalar_constant
from triton_ext.backends.cpu.codegen.control import lower_for, lower_if, lower_while
from triton_ext.backends.cpu.codegen.dot import lower_dot, lower_dot_scaled
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.histogram import lower_histogram
from triton_ext.backends.cpu.codegen.lltypes import (
    BF16,
    I1,
    I16,
    I32,
    I64,
    PTR,
    element_of,
    lane_type,
    memory_type,
    register_type,
    size_bytes,
    tensor_shape,
)
from triton_ext.backends.cpu.codegen.mapping import lower_map
from triton_ext.backends.cpu.codegen.memory import Access, Load, prefetch, store
from triton_ext.backends.cpu.codegen.nest import At, Nest, Point
from triton_ext.backends.cpu.codegen.prefetch import PrefetchOp
from triton_ext.backends.cpu.codegen.reduction import reduce, scan
from triton_ext.backends.cpu.codegen.schedule import EXPENSIVE, Arena, Scheduler
from triton_ext.backends.cpu.codegen.tiles import (
    Borrowed,
    Broadcast,
    Buffer,
    Concatenate,
    ExpandDims,
    Gather,
    Join,
    Map,
    Offset,
    Part,
    Range,
    Reshape,
    Tile,
    Transpose,
    Uniform,
    from_memory,
    to_memory,
)
from triton_ext.errors import CompileError
from triton_ext.ir import dialect as tt
from triton_ext.ir import source_line

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.module import ModuleLowering

Value: TypeAlias = ir.Value | Tile
_DEEPEST = 40
"""Longer chains of lazy operations are cut by computing the tile, which bounds Python's recursion."""


class FunctionLowering:
    """The lowering of one function's body, after its LLVM function and arguments exist."""

    def __init__(
        self,
        parent: ModuleLowering,
        emit: Emitter,
        arguments: dict[SSAValue, Value],
        program: Sequence[ir.Value],
        scratch: ir.Value,
        checks: Checks | None = None,
    ) -> None:
        self.parent = parent
        self.emit = emit
        self.env: dict[SSAValue, Value] = dict(arguments)
        self.program = tuple(program)
        """Program ids and numbers of programs along x, y, z."""
        self.checks = checks
        """In a function whose accesses are checked."""
        self.arena = Arena(emit, scratch)
        self.scheduler = Scheduler(emit, self.arena)
        self.load_origins: dict[Load, SSAValue | None] = {}
        self._depth: dict[Tile, int] = {}
        self._defined: list[list[SSAValue]] = []
        self.callee_scratch: list[str] = []

    # -- values ---------------------------------------------------------------------------------------------

    def scalar(self, value: SSAValue) -> ir.Value:
        found = self.env[value]
        assert isinstance(found, ir.Value)
        return found

    def tile(self, value: SSAValue) -> Tile:
        found = self.env[value]
        assert isinstance(found, Tile)
        return found

    def define(self, result: SSAValue, value: Value) -> None:
        self.env[result] = value
        if isinstance(value, Tile) and self._defined:
            self._defined[-1].append(result)

    def _lazy(self, result: SSAValue, tile: Tile) -> None:
        """Define a result as an expression, computed at once where the expression has become too long."""
        sources = [source for source, _ in tile.inputs((None,) * len(tile.shape))]
        depth = 1 + max((self._depth.get(source, 0) for source in sources if source.stored is None), default=0)
        self._depth[tile] = depth
        tile.shared = self.parent.liveness.shared(result)
        self.define(result, tile)
        if depth > _DEEPEST:
            self.scheduler.materialize(tile)
            self._depth[tile] = 0

    # -- blocks and regions ---------------------------------------------------------------------------------

    def lower_body(self, blocks: Sequence[Block], finish: Callable[[Operation], None]) -> None:
        """Lower a function's body, which early returns may have split into several blocks."""
        if len(blocks) == 1:
            with self._scope():
                self.lower_ops(blocks[0], finish)
            return
        here = self.emit.builder.block
        labels = {block: self.emit.block("bb") for block in blocks[1:]}
        carried: dict[Block, list[ir.PhiInstr | Buffer]] = {}
        for block, label in labels.items():
            self.emit.builder.position_at_end(label)
            carried[block] = [
                self.scheduler.buffer(tensor_shape(arg.type), Tile(tensor_shape(arg.type), element_of(arg.type)))
                if tensor_shape(arg.type)
                else self.emit.builder.phi(register_type(arg.type))
                for arg in block.args
            ]
        self.emit.builder.position_at_end(here)

        def jump(target: Block, values: Sequence[SSAValue]) -> ir.Block:
            for place, value in zip(carried[target], values, strict=True):
                if isinstance(place, Buffer):
                    self.store_tile(self.tile(value), place)
            for place, value in zip(carried[target], values, strict=True):
                if not isinstance(place, Buffer):
                    place.add_incoming(self.scalar(value), self.emit.builder.block)
            return labels[target]

        def terminate(op: Operation) -> None:
            builder = self.emit.builder
            if isinstance(op, BranchOp):
                builder.branch(jump(op.successors[0], op.arguments))
            elif isinstance(op, ConditionalBranchOp):
                ways = [self.emit.block("edge") for _ in range(2)]
                builder.cbranch(self.scalar(op.cond), *ways)
                edges = ((op.then_block, op.then_arguments), (op.else_block, op.else_arguments))
                for way, (target, values) in zip(ways, edges, strict=True):
                    builder.position_at_end(way)
                    with self.arena.region():
                        label = jump(target, values)
                    builder.branch(label)
            else:
                finish(op)

        with self._scope():
            for block in blocks:
                if block in labels:
                    self.emit.builder.position_at_end(labels[block])
                    for arg, place in zip(block.args, carried[block], strict=True):
                        self.define(arg, place)
                self.lower_ops(block, terminate, keep_loads=True)

    def lower_ops(self, block: Block, finish: Callable[[Operation], None], keep_loads: bool = False) -> None:
        """Lower a block; its terminator goes to `finish`."""
        for op in block.ops:
            if op.next_op is None and liveness.is_terminator(op):
                if keep_loads:
                    self._settle(op, everything=True)
                finish(op)
                return
            if liveness.has_side_effect(op) or liveness.is_loop(op):
                self._settle(op)
            self.lower_op(op)

    @contextmanager
    def region(self) -> Iterator[None]:
        """A nested region: what it computes and allocates ends with it."""
        with self.arena.region(), self._scope():
            yield

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._defined.append([])
        yield
        self._defined.pop()

    def _settle(self, op: Operation, everything: bool = False) -> None:
        """Perform pending loads whose results are still wanted after `op` has changed memory.

        A loop also wants what it uses computed in front of it, rather than in every iteration.
        """
        changes_memory = everything or liveness.has_side_effect(op)
        loads: dict[Load, None] = {}
        costly: list[Tile] = []
        for value in self._defined[-1]:
            tile = self.env[value]
            assert isinstance(tile, Tile)
            used_inside, used_later = self.parent.liveness.uses_from(value, op)
            if everything:
                used_inside = used_later = self.parent.liveness.leaves_block(value)
            if (changes_memory and (used_later or used_inside)) or used_inside:
                loads.update(dict.fromkeys(_pending_loads(tile)))
            if used_inside and liveness.is_loop(op) and tile.shared and self.scheduler.cost(tile) >= EXPENSIVE:
                costly.append(tile)
        for load in loads:
            if isinstance(op, tt.StoreOp) and not tensor_shape(op.ptr.type):
                keep(self.scheduler, load, self.scalar(op.ptr), size_bytes(memory_type(self.scalar(op.value).type)))
            else:
                self.scheduler.materialize(load)
        for tile in costly:
            self.scheduler.materialize(tile)
        self._protect_aliases(op)

    def _protect_aliases(self, op: Operation) -> None:
        """A store of values loaded from elsewhere in the same memory happens after all of those loads."""
        if not isinstance(op, tt.StoreOp) or not tensor_shape(op.ptr.type):
            return
        target = self.tile(op.ptr)
        origin = liveness.pointer_origin(op.ptr)
        for load in _pending_loads(self.tile(op.value)):
            if load.access.pointers is not target and self.load_origins.get(load) is origin:
                self.scheduler.materialize(load)

    def store_tile(self, tile: Tile, buffer: Buffer) -> None:
        """Evaluate a tile into a buffer."""
        self.scheduler.write(self.scheduler.plan(tile.shape, [tile]), [(tile, buffer)])

    # -- operations -----------------------------------------------------------------------------------------

    def lower_op(self, op: Operation) -> None:
        method = _LOWERINGS.get(op.name)
        if method is not None:
            method(self, op)
        elif elementwise.is_elementwise(op):
            self._elementwise(op)
        else:
            raise CompileError(f"{source_line(op)}: the CPU backend does not support {op.name}")

    def _elementwise(self, op: Operation) -> None:
        (result,) = op.results
        shape = tensor_shape(result.type)
        if shape:
            self._lazy(result, Map(shape, element_of(result.type), op, [self.tile(v) for v in op.operands]))
        else:
            self.define(result, elementwise.lower(self.emit, op, [self.scalar(value) for value in op.operands]))

    def _constant(self, op: tt.ConstantOp) -> None:
        shape, value = tensor_shape(op.result.type), scalar_constant(op)
        element = element_of(op.result.type)
        self.define(op.result, Uniform(shape, element, value) if shape else value)

    def _poison(self, op: Operation) -> None:
        result = op.results[0]
        shape, element = tensor_shape(result.type), element_of(result.type)
        type_ = lane_type(element) if shape else register_type(element)
        zero = ir.Constant(type_, None if type_ == PTR else 0.0 if not isinstance(type_, ir.IntType) else 0)
        self.define(result, Uniform(shape, element, zero) if shape else zero)

    def _program(self, op: Operation) -> None:
        axis = "xyz".index(cast(StringAttr, op.attributes["axis"]).data)
        self.define(op.results[0], self.program[axis + (3 if op.name == "tt.get_num_programs" else 0)])

    def _range(self, op: tt.MakeRangeOp) -> None:
        tile = Range(element_of(op.result.type), op.start.value.data, op.end.value.data)
        self.define(op.result, tile)

    def _splat(self, op: tt.SplatOp) -> None:
        shape, element = tensor_shape(op.result.type), element_of(op.result.type)
        self.define(op.result, Uniform(shape, element, self.scalar(op.src)))

    def _unsplat(self, op: tt.UnsplatOp) -> None:
        source = self.tile(op.src)
        value = Nest(self.emit, 1).value(source, (At(0),) * len(source.shape))
        self.define(op.result, value)

    def _view(self, op: Operation) -> None:
        (result,) = op.results
        source = self.tile(op.operands[0])
        shape = tensor_shape(result.type)
        tile: Tile
        if isinstance(source, Uniform):
            self.define(result, Uniform(shape, source.element, source.value))
            return
        match op:
            case tt.ExpandDimsOp():
                tile = ExpandDims(source, op.axis.value.data)
            case tt.BroadcastOp():
                tile = Broadcast(shape, source)
            case tt.TransOp():
                tile = Transpose(source, cast(DenseArrayBase[IntegerType], op.order).get_values())
            case _:
                tile = Reshape(source, shape)
        self._lazy(result, tile)

    def _join(self, op: tt.JoinOp) -> None:
        self._lazy(op.result, Join(self.tile(op.lhs), self.tile(op.rhs)))

    def _cat(self, op: tt.CatOp) -> None:
        self._lazy(op.result, Concatenate(self.tile(op.lhs), self.tile(op.rhs)))

    def _split(self, op: tt.SplitOp) -> None:
        for which, result in enumerate(op.results):
            self._lazy(result, Part(self.tile(op.src), which))

    def _addptr(self, op: tt.AddPtrOp) -> None:
        element = register_type(cast(tt.PointerType, element_of(op.ptr.type)).pointee)
        step = size_bytes(memory_type(element))
        if tensor_shape(op.result.type):
            self._lazy(op.result, Offset(self.tile(op.ptr), self.tile(op.offset), step))
        else:
            offset = self.emit.index(self.scalar(op.offset))
            self.define(op.result, self.emit.offset(self.scalar(op.ptr), offset, memory_type(element)))

    # -- memory ---------------------------------------------------------------------------------------------

    def _access(self, pointer: SSAValue, mask: SSAValue | None, lane: ir.Type) -> Access:
        pointers = self.tile(pointer)
        analysis = self.scheduler.analysis
        form = analysis.separate(pointers)
        bounds = analysis.bounds(self.tile(mask)) if mask is not None else Bounds()
        return Access(pointers, form, bounds, lane)

    def _load(self, op: tt.LoadOp) -> None:
        shape, element = tensor_shape(op.result.type), element_of(op.result.type)
        if not shape:
            self._load_scalar(op)
            return
        access = self._access(op.ptr, op.mask, lane_type(element))
        if self.checks is not None:
            site = self.checks.site(op, "load", Does.READS, access.stored, shape)
            access = checked(self.scheduler, site, access, shape)
        load = Load(element, access, shape, self.tile(op.other) if op.other is not None else None)
        self.load_origins[load] = liveness.pointer_origin(op.ptr)
        self._lazy(op.result, load)
        if self.checks is not None:  # now: indices, for instance, must not change between a check and its access
            self.scheduler.materialize(load)

    def _load_scalar(self, op: tt.LoadOp) -> None:
        emit, type_ = self.emit, register_type(op.result.type)
        address = self.scalar(op.ptr)
        volatile = op.isVolatile is not None and op.isVolatile.value.data != 0
        mask = self.scalar(op.mask) if op.mask is not None else None
        if self.checks is not None:
            site = self.checks.site(op, "load", Does.READS, memory_type(type_))
            mask = site.allows(address, mask)
        if mask is not None:
            address = emit.builder.select(mask, address, emit.nowhere())
        stored = memory_type(type_)
        if volatile:
            # A relaxed atomic: read afresh every time, whole, and never merged with another.
            bits = ir.IntType(8 * size_bytes(stored))
            value = emit.builder.load_atomic(address, "monotonic", size_bytes(stored), typ=bits)
            if type_ == PTR:
                value = emit.builder.inttoptr(value, PTR)
            elif bits != stored:
                value = emit.builder.bitcast(value, stored)
        else:
            value = emit.load(address, stored)
        value = from_memory(emit, value, type_)
        if mask is not None and op.other is not None:
            value = emit.builder.select(mask, value, self.scalar(op.other))
        self.define(op.result, value)

    def _store(self, op: tt.StoreOp) -> None:
        shape = tensor_shape(op.ptr.type)
        if not shape:
            value = to_memory(self.emit, self.scalar(op.value))
            mask = self.scalar(op.mask) if op.mask is not None else None
            if self.checks is not None:
                site = self.checks.site(op, "store", Does.WRITES, value.type)
                mask = site.allows(self.scalar(op.ptr), mask)
                if value.type == BF16:  # LLVM keeps it as a float32 over a call, and loses denormal numbers
                    value = self.emit.builder.bitcast(value, I16)
            if mask is None:
                self.emit.store(value, self.scalar(op.ptr))
            else:
                with self.emit.only_if(mask):
                    self.emit.store(value, self.scalar(op.ptr))
            return
        value_tile = self.tile(op.value)
        access = self._access(op.ptr, op.mask, value_tile.lane)
        if self.checks is not None:
            site = self.checks.site(op, "store", Does.WRITES, access.stored, shape)
            access = checked(self.scheduler, site, access, shape)
        plan = self.scheduler.plan(shape, [value_tile], [access])
        self.scheduler.run(plan, lambda nest, point: store(nest, point, access, shape, nest.value(value_tile, point)))

    def _prefetch(self, op: PrefetchOp) -> None:
        pointer = element_of(op.ptr.type)
        assert isinstance(pointer, tt.PointerType)
        access = self._access(op.ptr, None, lane_type(pointer.pointee))
        plan = self.scheduler.plan(tensor_shape(op.ptr.type), [], [access])
        self.scheduler.run(plan, lambda nest, point: prefetch(nest, point, access))

    # -- consumers ------------------------------------------------------------------------------------------

    def _reduce(self, op: tt.ReduceOp) -> None:
        results = reduce(self.scheduler, op, [self.tile(value) for value in op.srcs], self.scalar)
        for result, value in zip(op.results, results, strict=True):
            self.define(result, value)

    def _scan(self, op: tt.ScanOp) -> None:
        results = scan(self.scheduler, op, [self.tile(value) for value in op.srcs], self.scalar)
        for result, value in zip(op.results, results, strict=True):
            self.define(result, value)

    def _gather(self, op: tt.GatherOp) -> None:
        source = self.scheduler.materialize(self.tile(op.src))
        self._lazy(op.result, Gather(source, self.tile(op.indices), op.axis.value.data))

    def _barrier(self, op: Operation) -> None:
        """One thread runs a program: only the compiler must keep the order."""
        self.emit.builder.fence("acq_rel", "singlethread")

    def _assume(self, op: tt.AssumeOp) -> None:
        if self.checks is None:  # an access that was not performed leaves values that nobody assumed
            self.emit.builder.assume(self.scalar(op.condition))

    def _assert(self, op: tt.AssertOp) -> None:
        message = self.parent.string(f"{source_line(op)}: {op.message.data}")
        fail = self.emit.declare("tx_assert_fail", ir.VoidType(), [PTR])
        builder = self.emit.builder

        def check(condition: ir.Value) -> None:
            with self.emit.only_if(builder.not_(condition)):
                builder.call(fail, [message])

        if not tensor_shape(op.condition.type):
            check(self.scalar(op.condition))
            return
        tile = self.tile(op.condition)

        def body(nest: Nest, point: Point) -> None:
            value = nest.value(tile, point)
            if isinstance(value.type, ir.VectorType):
                value = self.emit.intrinsic("vector.reduce.and", I1, [value], (value.type,))
            check(value)

        self.scheduler.run(self.scheduler.plan(tile.shape, [tile]), body)

    def _print(self, op: tt.PrintOp) -> None:
        emit, builder = self.emit, self.emit.builder
        printf = self.emit.module.globals.get("printf") or ir.Function(
            emit.module, ir.FunctionType(I32, [PTR], var_arg=True), "printf"
        )

        def show(value: ir.Value, element: Attribute, signed: bool, where: Sequence[ir.Value]) -> None:
            value = elementwise.decoded(emit, value, element)
            type_ = value.type
            if type_ == PTR:
                text = "%p"
            elif isinstance(type_, ir.IntType):
                text = f"0x%0{size_bytes(type_) * 2}llx" if in_hex else "%lld" if signed else "%llu"
                if type_.width < 64:
                    value = (builder.sext if signed and not in_hex else builder.zext)(value, I64)
            else:
                text, value = "%f", elementwise.to_float(emit, value, ir.DoubleType())
            index = "".join(", idx (" + ", ".join(["%lld"] * len(where)) + ")" for _ in where[:1])
            form = f"pid (%d, %d, %d){index}{prefix}{text}\n"
            builder.call(printf, [self.parent.string(form), *self.program[:3], *where, value])

        prefix = op.prefix.data.replace("%", "%%")
        in_hex = op.hex is not None and op.hex.value.data != 0
        signs = op.isSigned.get_values() if op.isSigned is not None else [1] * len(op.args)
        for operand, signed in zip(op.args, signs, strict=True):
            element = element_of(operand.type)
            if not tensor_shape(operand.type):
                show(self.scalar(operand), element, bool(signed), ())
                continue
            tile = self.tile(operand)
            plan = self.scheduler.plan(tile.shape, [tile], vectorize=False)
            self.scheduler.run(
                plan,
                lambda nest, point, tile=tile, element=element, signed=signed: show(  # type: ignore[misc]
                    nest.value(tile, point), element, bool(signed), [nest.indices(c) for c in point]
                ),
            )
        if not op.args:
            builder.call(printf, [self.parent.string(prefix + "\n")])

    def _call(self, op: tt.CallOp) -> None:
        callee = cast(SymbolRefAttr, op.attributes["callee"]).string_value()
        arguments = [self.scalar(value) for value in op.args]
        self.parent.call(self, callee, arguments, op)


def _pending_loads(tile: Tile) -> Iterator[Load]:
    """Loads that evaluating the tile would perform, or whose elements are still where others may write."""
    work, seen = [tile], set()
    while work:
        current = work.pop()
        if current in seen or not isinstance(current.stored, Borrowed | None):
            continue
        seen.add(current)
        if isinstance(current, Load):
            yield current
        work.extend(source for source, _ in current.inputs((None,) * len(current.shape)))


_LOWERINGS: dict[str, Callable[[FunctionLowering, Any], None]] = {
    "arith.constant": FunctionLowering._constant,
    "ub.poison": FunctionLowering._poison,
    "tt.get_program_id": FunctionLowering._program,
    "tt.get_num_programs": FunctionLowering._program,
    "tt.make_range": FunctionLowering._range,
    "tt.splat": FunctionLowering._splat,
    "tt.unsplat": FunctionLowering._unsplat,
    "tt.expand_dims": FunctionLowering._view,
    "tt.broadcast": FunctionLowering._view,
    "tt.trans": FunctionLowering._view,
    "tt.reshape": FunctionLowering._view,
    "tt.join": FunctionLowering._join,
    "tt.cat": FunctionLowering._cat,
    "tt.split": FunctionLowering._split,
    "tt.addptr": FunctionLowering._addptr,
    "tt.load": FunctionLowering._load,
    "cpu.prefetch": FunctionLowering._prefetch,
    "tt.store": FunctionLowering._store,
    "tt.reduce": FunctionLowering._reduce,
    "tt.scan": FunctionLowering._scan,
    "tt.gather": FunctionLowering._gather,
    "tt.dot": lower_dot,
    "tt.dot_scaled": lower_dot_scaled,
    "tt.histogram": lower_histogram,
    "tt.map_elementwise": lower_map,
    "tt.atomic_rmw": atomics.lower_rmw,
    "tt.atomic_cas": atomics.lower_cas,
    "tt.atomic_load": atomics.lower_load,
    "tt.atomic_store": atomics.lower_store,
    "tt.atomic_poll": atomics.lower_poll,
    "tt.assert": FunctionLowering._assert,
    "tt.print": FunctionLowering._print,
    "tt.call": FunctionLowering._call,
    "gpu.barrier": FunctionLowering._barrier,
    "ttg.barrier": FunctionLowering._barrier,
    "llvm.intr.assume": FunctionLowering._assume,
    "scf.for": lower_for,
    "scf.while": lower_while,
    "scf.if": lower_if,
}
