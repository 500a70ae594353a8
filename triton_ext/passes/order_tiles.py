"""Pass 2, order tiles: programs get their tiles by ticket, so tiles are computed in the schedule's order."""

from __future__ import annotations

import triton.language as tl

from . import dialect, protocol
from .kernel import Kernel, block_shape, spec_of, tensor


def run(kernel: Kernel) -> None:
    """Take a ticket per plan at the kernel's start, and replace `txl.program_tile` by the ticket's tile."""
    for epilogue in kernel.markers(dialect.EPILOGUE):
        table = tensor(epilogue.get_operand(0))
        handle = epilogue.get_result(0)
        tiles = [op for op in kernel.markers(dialect.PROGRAM_TILE) if op.get_operand(0).id() == handle.id()]
        kernel.at_start()
        ticket = kernel.call(protocol.take_ticket, table)
        if tiles:
            spec = spec_of(tiles[0])
            split_dim = tl.constexpr(spec.split_dim if spec.splits else -1)
            slice_dim = tl.constexpr(spec.slice_dim if spec.transport else -1)
            tile = kernel.call(protocol.tile_of_ticket, table, ticket, block_shape(spec), split_dim, slice_dim)
            for op in tiles:
                op.get_result(0).replace_all_uses_with(tile[int(op.get_str_attr("libpath"))].handle)
        handle.replace_all_uses_with(table.handle)
