"""The communication epilogue: a kernel stores its tiles through it, and each row reaches the rank that owns it."""

# No `from __future__ import annotations` here: Triton 3.6 reads an aggregate's annotations as types.

from typing import Any

import triton
import triton.language as tl
from triton.language import core as tl_core

from ..passes import dialect, version

_PASSES = tl.constexpr(version())  # part of the cache key of every kernel that calls epilogue()


@tl_core._aggregate
class Epilogue:
    """Where a kernel's tiles go. Made by `epilogue`; its methods are called inside the kernel."""

    handle: tl.tensor
    spec: tl.constexpr

    @tl_core.builtin
    def __init__(self, plan: Any, block_shape: Any, passes: Any = None, _semantic: Any = None) -> None:
        if not (hasattr(plan, "table") and hasattr(plan, "spec")):
            raise TypeError("epilogue() takes a plan: make one with tx.all_to_all(...) and pass it to the kernel")
        spec = dialect.Spec.decode(tl_core._unwrap_if_constexpr(plan.spec))
        block = tuple(tl_core._unwrap_if_constexpr(size) for size in block_shape)
        if len(block) != spec.ndim:
            raise ValueError(f"block_shape has {len(block)} sizes, the plan's tensor has {spec.ndim} dimensions")
        self.spec = tl.constexpr(spec.with_block(block).encode())
        self.handle = _marker(dialect.EPILOGUE, self.spec, "", [plan.table], plan.table.dtype, _semantic)

    @tl_core.builtin
    def program_tile(self, _semantic: Any = None) -> Any:
        """This program's tile, a tuple of one index per dimension, in units of the block.

        Programs get their tiles in the schedule's order: remote tiles first, own tiles last. The indices of a program
        beyond the last tile lie outside the tensor, so loads that are masked by the shape stay inside.
        """
        spec = dialect.Spec.decode(self.spec.value)
        return tl.tuple(
            [
                _marker(dialect.PROGRAM_TILE, self.spec, str(dim), [self.handle], tl.int32, _semantic)
                for dim in range(spec.ndim)
            ]
        )

    @tl_core.builtin
    def store(self, coords: Any, value: Any, mask: Any = None, _semantic: Any = None) -> None:
        """Store a block of the collective's tensor.

        coords: one coordinate per dimension, in logical indices: the block's start (a scalar; elements outside the
            tensor are left out), or a tensor with the index of each row (column, ...) of the block. A reduction takes
            starts only, those of the program's tile.
        value: a block of block_shape, or anything that broadcasts to it; cast to the plan's dtype.
        mask: elements to write, of block_shape. The others keep what they were, or add nothing to a reduction.
        """
        spec = dialect.Spec.decode(self.spec.value)
        coords = list(coords)
        if len(coords) != spec.ndim:
            raise ValueError(f"store() got {len(coords)} coordinates, the plan's tensor has {spec.ndim} dimensions")
        shape = list(spec.block_shape)
        value = _semantic.to_tensor(value)
        if value.dtype.is_ptr() or str(value.dtype) not in dialect.DTYPES:
            raise TypeError(f"a value of type {value.dtype} cannot be sent; can be: {', '.join(dialect.DTYPES)}")
        sent = tl.dtype(spec.wire_dtype if spec.reduces else spec.dtype)
        value = tl.cast(_broadcast(value, shape, _semantic), sent, _semantic=_semantic)
        operands = [self.handle, *_coordinates(coords, shape, _semantic), value]
        if tl_core._unwrap_if_constexpr(mask) is not None:
            operands.append(_broadcast(_semantic.to_tensor(mask), shape, _semantic))
        stored = tl.block_type(tl.int1, shape)
        mask = _marker(dialect.STORE, self.spec, "", operands, stored, _semantic)
        base = tl.cast(self.handle, tl.pointer_type(sent), bitcast=True, _semantic=_semantic)
        tl.store(_broadcast(base, shape, _semantic), value, mask=mask, _semantic=_semantic)


@triton.jit
def epilogue(plan, block_shape: tl.constexpr):
    """The epilogue over a plan (the kernel argument), for blocks of `block_shape`, one size per dimension."""
    return Epilogue(plan, block_shape, _PASSES)


def _marker(symbol: str, spec: Any, detail: str, operands: list[Any], result: Any, semantic: Any) -> Any:
    builder = semantic.builder
    handles = [operand.handle for operand in operands]
    value = builder.create_extern_elementwise(spec.value, detail, symbol, handles, result.to_ir(builder), True)
    return tl.tensor(value, result)


def _broadcast(value: Any, shape: list[int], semantic: Any) -> Any:
    if not value.type.is_block():
        return semantic.splat(value, shape)
    return semantic.broadcast_impl_shape(value, shape)


def _coordinates(coords: list[Any], shape: list[int], semantic: Any) -> list[Any]:
    """Block starts as scalars, if all are; otherwise an index tensor of the block's shape for each dimension."""
    coords = [semantic.to_tensor(coord) for coord in coords]
    for dim, coord in enumerate(coords):
        if not coord.dtype.is_int():
            raise TypeError(f"coordinate {dim} is {coord.dtype}; coordinates are integers")
    if not any(coord.type.is_block() for coord in coords):
        return coords
    indices = []
    for dim, coord in enumerate(coords):
        if not coord.type.is_block():
            coord = tl.arange(0, shape[dim], _semantic=semantic).__add__(coord, _semantic=semantic)
        if len(coord.shape) == 1:
            for axis in range(len(shape)):
                if axis != dim:
                    coord = tl.expand_dims(coord, axis, _semantic=semantic)
        indices.append(_broadcast(coord, shape, semantic))
    return indices
