"""A thin layer over llvmlite's builder: index arithmetic that folds, loops, lanes, intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from llvmlite import ir

from triton_ext.backends.cpu.codegen.lltypes import (
    I1,
    I32,
    I64,
    PTR,
    scalar_of,
    size_bytes,
    with_lanes_of,
)

# An index known at compile time stays a Python integer, so that arithmetic on it folds.
Index: TypeAlias = int | ir.Value


class Emitter:
    """The builder of one LLVM function, with the helpers that every part of the code generator needs."""

    def __init__(
        self, module: ir.Module, function: ir.Function, *, fast_fma: bool, lanes: int, bf16_dot: bool = False
    ) -> None:
        self.module = module
        self.function = function
        self.entry = function.append_basic_block("entry")
        self.builder = ir.IRBuilder(self.entry)
        self.lanes = lanes
        """32-bit lanes of one hardware vector."""
        self.bf16_dot = bf16_dot
        """Products of pairs of bfloat16 have instructions of their own."""
        self.flags = ("contract",) if fast_fma else ()

    # -- indices ------------------------------------------------------------------------------------------

    def value(self, index: Index, type_: ir.Type = I64) -> ir.Value:
        return ir.Constant(type_, index) if isinstance(index, int) else index

    @staticmethod
    def fold(value: ir.Value) -> Index:
        """The Python integer of a constant, else the value."""
        if isinstance(value, ir.Constant) and isinstance(value.constant, int) and value.type != I1:
            return value.constant
        return value

    def index(self, value: ir.Value) -> Index:
        """A scalar integer of any width as a signed 64-bit index."""
        folded = self.fold(value)
        if isinstance(folded, int) or value.type == I64:
            return folded
        return self.builder.trunc(value, I64) if value.type.width > 64 else self.builder.sext(value, I64)

    def add(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(a, int):
            a, b = b, a
        if isinstance(b, int) and b == 0:
            return a
        return self.builder.add(self.value(a), self.value(b))

    def sub(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        if isinstance(b, int) and b == 0:
            return a
        return self.builder.sub(self.value(a), self.value(b))

    def mul(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if isinstance(a, int):
            a, b = b, a
        if isinstance(b, int) and b in (0, 1):
            return a if b else 0
        return self.builder.mul(self.value(a), self.value(b))

    def divide(self, a: Index, b: int) -> Index:
        """Quotient of an index that is not negative."""
        if isinstance(a, int):
            return a // b
        return a if b == 1 else self.builder.udiv(a, self.value(b))

    def modulo(self, a: Index, b: int) -> Index:
        """Remainder of an index that is not negative."""
        if isinstance(a, int):
            return a % b
        return 0 if b == 1 else self.builder.urem(a, self.value(b))

    # -- control flow -------------------------------------------------------------------------------------

    def block(self, name: str) -> ir.Block:
        return self.function.append_basic_block(name)

    def loop(
        self,
        start: Index,
        stop: Index,
        step: Index,
        carried: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """`for i in range(start, stop, step)` that runs at least once; returns the carried values at its end."""
        builder = self.builder
        before = builder.block
        head = self.block("loop")
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        phis = [builder.phi(value.type) for value in carried]
        index.add_incoming(self.value(start), before)
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        results = list(body(index, list(phis)))
        following = builder.add(index, self.value(step))
        done = self.block("done")
        latch = builder.block
        builder.cbranch(builder.icmp_signed("<", following, self.value(stop)), head, done)
        index.add_incoming(following, latch)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, latch)
        builder.position_at_end(done)
        return results

    def either(
        self,
        condition: ir.Value,
        then: Callable[[], Sequence[ir.Value]],
        otherwise: Callable[[], Sequence[ir.Value]],
    ) -> list[ir.Value]:
        """`then()` if condition else `otherwise()`; their values merge in phis."""
        builder = self.builder
        yes, no, end = self.block("then"), self.block("else"), self.block("end")
        builder.cbranch(condition, yes, no)
        incoming = []
        for block, emit in ((yes, then), (no, otherwise)):
            builder.position_at_end(block)
            values = list(emit())
            incoming.append((values, builder.block))
            builder.branch(end)
        builder.position_at_end(end)
        merged = []
        for left, right in zip(incoming[0][0], incoming[1][0], strict=True):
            phi = builder.phi(left.type)
            phi.add_incoming(left, incoming[0][1])
            phi.add_incoming(right, incoming[1][1])
            merged.append(phi)
        return merged

    @contextmanager
    def only_if(self, condition: ir.Value) -> Iterator[None]:
        yes, end = self.block("if"), self.block("endif")
        self.builder.cbranch(condition, yes, end)
        self.builder.position_at_end(yes)
        yield
        self.builder.branch(end)
        self.builder.position_at_end(end)

    @contextmanager
    def at_end_of(self, block: ir.Block) -> Iterator[None]:
        """Emit in front of a block's terminator. Nests, unlike llvmlite's `goto_block`."""
        current = self.builder.block
        self._position(block)
        yield
        self._position(current)

    def _position(self, block: ir.Block) -> None:
        if block.terminator is None:
            self.builder.position_at_end(block)
        else:
            self.builder.position_before(block.terminator)

    # -- lanes --------------------------------------------------------------------------------------------

    def iota(self, width: int, element: ir.Type) -> ir.Constant:
        return ir.Constant(ir.VectorType(element, width), [ir.Constant(element, i) for i in range(width)])

    def splat(self, scalar: ir.Value, width: int) -> ir.Value:
        vector = ir.VectorType(scalar.type, width)
        if isinstance(scalar, ir.Constant) and scalar.constant is not ir.Undefined:
            return ir.Constant(vector, [scalar] * width)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, width), [ir.Constant(I32, 0)] * width)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def aligned_lanes(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """The values with scalars spread over lanes where any of them is a vector."""
        width = next((v.type.count for v in values if isinstance(v.type, ir.VectorType)), None)
        if width is None:
            return list(values)
        return [v if isinstance(v.type, ir.VectorType) else self.splat(v, width) for v in values]

    def lane_slice(self, vector: ir.Value, start: int, width: int) -> ir.Value:
        mask = ir.Constant(ir.VectorType(I32, width), [ir.Constant(I32, start + i) for i in range(width)])
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def true(self, like: ir.Type = I1) -> ir.Constant:
        type_ = with_lanes_of(I1, like)
        return ir.Constant(type_, 1) if type_ is I1 else ir.Constant(type_, [ir.Constant(I1, 1)] * type_.count)

    # -- memory -------------------------------------------------------------------------------------------

    def offset(self, pointer: ir.Value, elements: Index, element: ir.Type) -> ir.Value:
        if isinstance(elements, int) and elements == 0:
            return pointer
        return self.builder.gep(pointer, [self.value(elements)], source_etype=element)

    def nowhere(self) -> ir.Value:
        """The address of eight constant zero bytes."""
        known = self.module.globals.get("nowhere")
        if known is None:
            known = ir.GlobalVariable(self.module, I64, "nowhere")
            known.initializer = ir.Constant(I64, 0)
            known.linkage = "internal"
            known.global_constant = True
        return known

    def load(self, pointer: ir.Value, type_: ir.Type) -> ir.Value:
        """A load aligned as the element is."""
        return self.builder.load(pointer, typ=type_, align=size_bytes(scalar_of(type_)))

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.builder.store(value, pointer, align=size_bytes(scalar_of(value.type)))

    def store_atomic(self, value: ir.Value, pointer: ir.Value, order: str) -> None:
        """An atomic store of an integer; llvmlite's own method does not know pointers without a type."""
        place = ir.instructions.StoreAtomicInstr(self.builder.block, value, pointer, order, size_bytes(value.type))
        self.builder._insert(place)

    # -- calls --------------------------------------------------------------------------------------------

    def declare(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def intrinsic(
        self, name: str, result: ir.Type, arguments: Sequence[ir.Value], overload: Sequence[ir.Type] = ()
    ) -> ir.Value:
        """Call `llvm.<name>.<overload types>`; the result's type is the overload unless others are given."""
        full = ".".join(["llvm." + name, *(_mangled(type_) for type_ in (overload or (result,)))])
        function = self.declare(full, result, [argument.type for argument in arguments])
        return self.builder.call(function, arguments)


def _mangled(type_: ir.Type) -> str:
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_mangled(type_.element)}"
    if isinstance(type_, ir.IntType):
        return f"i{type_.width}"
    return "p0" if type_ == PTR else type_.intrinsic_name
