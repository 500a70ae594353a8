"""Pass 3, lower epilogue: an annotated store becomes stores of each row in its owner's memory."""

from __future__ import annotations

import triton.language as tl

from . import dialect, protocol
from .kernel import Kernel, block_shape, coordinates, spec_of, tensor


def run(kernel: Kernel) -> None:
    """Insert the stores of every `txl.store` marker behind it, and turn the original `tt.store` off."""
    tiles = {op.get_operand(0).id(): op for op in kernel.calls(protocol.tile_of_ticket)}
    for store in kernel.markers(dialect.STORE):
        spec = spec_of(store)
        coords = coordinates(store)
        first = 1 + spec.ndim
        kernel.after(store)
        has_mask = store.get_num_operands() > first + 1
        mask = tensor(store.get_operand(first + 1)) if has_mask else kernel.full([], True)
        block, split_dim = block_shape(spec), tl.constexpr(spec.split_dim if spec.splits else -1)
        alignment = tl.constexpr(spec.alignment)
        args = (tensor(store.get_operand(0)), coords, tensor(store.get_operand(first)), mask, block, split_dim)
        if spec.collective == dialect.ONE_SHOT:
            kernel.call(protocol.stage_tile, *args, alignment)
        elif spec.reduces:
            tile = tensor(tiles[store.get_operand(0).id()].get_result(spec.split_dim))
            kernel.call(protocol.check_tile, args[0], coords[spec.split_dim], tile, block[spec.split_dim])
            kernel.call(protocol.store_partial, *args, alignment)
            to_all = tl.constexpr(spec.collective == "all_reduce")
            acc, dtype = tl.constexpr(tl.dtype(spec.acc_dtype)), tl.constexpr(tl.dtype(spec.dtype))
            kernel.call(protocol.reduce_tile, *args, alignment, acc, dtype, to_all)
        else:
            kernel.call(protocol.store_tile, *args, alignment)
        store.get_result(0).replace_all_uses_with(kernel.full(spec.block_shape, False).handle)
