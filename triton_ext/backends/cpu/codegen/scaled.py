"""`tt.dot_scaled`: the operands of a microscaled product, as lazy tiles of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir
from xdsl.dialects.builtin import Float32Type, IntegerType

from triton_ext.backends.cpu.codegen import elementwise, float8
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import F32, I32, everywhere, with_lanes_of
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Broadcast, Dims, ExpandDims, Join, Reshape, Tile, Transpose

_E2M1 = float8.Format(mantissa=1, bias=1, largest=7)
_F32_MANTISSA = 23


class _Computed(Tile):
    """A function of the elements of tiles of one shape, as float32."""

    def __init__(self, function: Callable[..., ir.Value], *args: Tile) -> None:
        super().__init__(args[0].shape, Float32Type())
        self.function, self.args = function, args

    def inputs(self, dims: Dims) -> Iterator[tuple[Tile, Dims]]:
        return ((arg, dims) for arg in self.args)

    def emit(self, nest: Nest, point: Point) -> ir.Value:
        values = nest.emit.aligned_lanes([nest.value(arg, point) for arg in self.args])
        return self.function(nest.emit, *values)


def left(tile: Tile, scale: Tile | None, kind: str, k_pack: bool) -> Tile:
    """[..., rows, depth] of `kind`, which may be two numbers in a byte, times its scales of [..., rows, groups]."""
    rank = len(tile.shape)
    return _scaled(_numbers(tile, kind, rank - 1 if k_pack else rank - 2), scale, rank - 1)


def right(tile: Tile, scale: Tile | None, kind: str, k_pack: bool) -> Tile:
    """[..., depth, columns] times its scales, which are [..., columns, groups]."""
    rank = len(tile.shape)
    if scale is not None:
        scale = Transpose(scale, (*range(rank - 2), rank - 1, rank - 2))
    return _scaled(_numbers(tile, kind, rank - 2 if k_pack else rank - 1), scale, rank - 2)


def _numbers(tile: Tile, kind: str, packed_axis: int) -> Tile:
    if kind != "e2m1":
        return _Computed(
            lambda emit, x: elementwise.to_float(emit, elementwise.decoded(emit, x, tile.element), F32), tile
        )
    pairs = Join(_Computed(_low_number, tile), _Computed(_high_number, tile))
    rank = len(tile.shape)
    order = (*range(packed_axis + 1), rank, *range(packed_axis + 1, rank))
    shape = [2 * size if d == packed_axis else size for d, size in enumerate(tile.shape)]
    return Reshape(Transpose(pairs, order), shape)


def _low_number(emit: Emitter, byte: ir.Value) -> ir.Value:
    """The number in bits 0 to 3: a sign above three bits."""
    builder = emit.builder
    sign = builder.shl(builder.and_(byte, everywhere(byte.type, 8)), everywhere(byte.type, 4))
    return float8.decode(emit, builder.or_(sign, builder.and_(byte, everywhere(byte.type, 7))), _E2M1)


def _high_number(emit: Emitter, byte: ir.Value) -> ir.Value:
    return _low_number(emit, emit.builder.lshr(byte, everywhere(byte.type, 4)))


def _scaled(tile: Tile, scale: Tile | None, axis: int) -> Tile:
    """Each run of elements along `axis` times the scale of that run."""
    if scale is None:
        return tile
    factors = _Computed(_factor if isinstance(scale.element, IntegerType) else _decoded_factor(scale), scale)
    groups, run = scale.shape[axis], tile.shape[axis] // scale.shape[axis]
    shape: Sequence[int] = (*tile.shape[:axis], groups, run, *tile.shape[axis + 1 :])
    spread = Reshape(Broadcast(shape, ExpandDims(factors, axis + 1)), tile.shape)
    return _Computed(lambda emit, x, factor: emit.builder.fmul(x, factor), tile, spread)


def _decoded_factor(scale: Tile) -> Callable[[Emitter, ir.Value], ir.Value]:
    return lambda emit, byte: elementwise.decoded(emit, byte, scale.element)


def _factor(emit: Emitter, byte: ir.Value) -> ir.Value:
    """2^(byte - 127), and NaN for 255: the exponent of a float32, of which 0 is a subnormal number."""
    builder = emit.builder
    bits, single = with_lanes_of(I32, byte.type), with_lanes_of(F32, byte.type)
    exponent = builder.shl(builder.zext(byte, bits), everywhere(bits, _F32_MANTISSA))
    smallest = builder.icmp_unsigned("==", byte, everywhere(byte.type, 0))
    is_nan = builder.icmp_unsigned("==", byte, everywhere(byte.type, 255))
    exponent = builder.select(smallest, everywhere(bits, 1 << (_F32_MANTISSA - 1)), exponent)
    return builder.bitcast(builder.select(is_nan, everywhere(bits, 0x7FC00000), exponent), single)
