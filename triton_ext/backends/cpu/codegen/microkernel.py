"""The inner loops of a matrix product: a block of the result in registers, operands packed for reading in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import BF16, F32, I32, everywhere, is_float, scalar_of, size_bytes

_UNROLLED_DEPTH = 4


@dataclass(frozen=True)
class RegisterBlock:
    """rows x (vectors of `lanes` columns) of the result: what the registers hold while the depth is walked."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes


def register_block(rows: int, columns: int, element: ir.Type, lanes: int) -> RegisterBlock:
    """The block for a product of `rows` x `columns`, all powers of two; lanes: 32-bit lanes of a vector register.

    8 x 2 vectors of the 32 registers of AVX-512: a step along the depth loads 2 vectors and 8 scalars for 16
    multiply-adds, which leaves load ports to spare. Half of that for the 16 registers of other targets.
    """
    width = min(columns, max(1, lanes * 4 // size_bytes(element)))
    return RegisterBlock(min(rows, 8 if lanes >= 16 else 4), min(2, columns // width), width)


@dataclass(frozen=True)
class Operands:
    """Where a product's operands are. Strides count elements.

    left: [rows, depth] with any strides. right: panels of [depth, block.columns], one behind the other, contiguous.
    result: [rows, columns], rows contiguous; added to or written.
    """

    left: ir.Value
    left_strides: tuple[int, int]
    right: ir.Value
    result: ir.Value
    rows: int
    columns: int
    depth: int


def multiply(
    emit: Emitter,
    block: RegisterBlock,
    at: Operands,
    element: ir.Type,
    load: Callable[[ir.Value, ir.Type], ir.Value] | None,
    store: Callable[[ir.Value, ir.Value], None],
    total: ir.Type,
    result_element: ir.Type,
) -> None:
    """result += left @ right, or = without `load`; operands of `element`, summed in `total`.

    Operands of words are pairs of bfloat16 where the sums are floats: depth counts pairs. load and store move a vector
    of the result, whose elements may be narrower.
    """
    vector = ir.VectorType(total, block.lanes) if block.lanes > 1 else total
    zero = everywhere(vector, 0.0 if is_float(total) else 0)

    def panel(column: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        right = emit.offset(at.right, emit.mul(column, at.depth), element)

        def rows(row: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            places = [
                emit.offset(
                    at.result,
                    emit.add(emit.mul(emit.add(row, r), at.columns), emit.add(column, v * block.lanes)),
                    result_element,
                )
                for r in range(block.rows)
                for v in range(block.vectors)
            ]
            left = emit.offset(at.left, emit.mul(row, at.left_strides[0]), element)
            # The result is added last, so that the first multiplications do not wait for its loads.
            sums = _walk_depth(emit, block, at, element, left, right, [zero] * len(places))
            for place, value in zip(places, sums, strict=True):
                store(_add(emit, load(place, vector), value) if load else value, place)
            return []

        _loop(emit, at.rows, block.rows, rows)
        return []

    _loop(emit, at.columns, block.columns, panel)


def _loop(emit: Emitter, stop: int, step: int, body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]) -> None:
    if stop == step:
        body(emit.value(0), [])
    else:
        emit.loop(0, stop, step, [], body)


def _walk_depth(
    emit: Emitter,
    block: RegisterBlock,
    at: Operands,
    element: ir.Type,
    left: ir.Value,
    right: ir.Value,
    totals: list[ir.Value],
) -> list[ir.Value]:
    """One register block over the whole depth."""
    unroll = min(at.depth, _UNROLLED_DEPTH)
    vector = ir.VectorType(element, block.lanes) if block.lanes > 1 else element

    def steps(k: Index, sums: list[ir.Value]) -> list[ir.Value]:
        for step in range(unroll):
            here = emit.add(k, step)
            row = emit.offset(right, emit.mul(here, block.columns), element)
            columns = [emit.load(emit.offset(row, v * block.lanes, element), vector) for v in range(block.vectors)]
            for r in range(block.rows):
                place = emit.add(r * at.left_strides[0], emit.mul(here, at.left_strides[1]))
                scalar = emit.load(emit.offset(left, place, element), element)
                factor = emit.splat(scalar, block.lanes) if block.lanes > 1 else scalar
                for v in range(block.vectors):
                    i = r * block.vectors + v
                    sums = [*sums[:i], multiply_add(emit, factor, columns[v], sums[i]), *sums[i + 1 :]]
        return sums

    if at.depth == unroll:
        return steps(0, totals)
    return emit.loop(0, at.depth, unroll, totals, steps)


def _add(emit: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return emit.builder.fadd(x, y) if is_float(scalar_of(x.type)) else emit.builder.add(x, y)


def multiply_add(emit: Emitter, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    """x * y + total; rounded once for floats. Words times floats are pairs of bfloat16."""
    if scalar_of(x.type) == I32 and scalar_of(total.type) == F32:
        bits = 32 * total.type.count
        name = f"llvm.x86.avx512bf16.dpbf16ps.{bits}"
        pairs = ir.VectorType(BF16, bits // 16)
        function = emit.declare(name, total.type, [total.type, pairs, pairs])
        return emit.builder.call(function, [total, *(emit.builder.bitcast(words, pairs) for words in (x, y))])
    if is_float(scalar_of(total.type)):
        return emit.intrinsic("fma", total.type, [x, y, total])
    return emit.builder.add(total, emit.builder.mul(x, y))
