"""Pass 4, insert sync: no store before its peer is ready, a release behind every tile, no end before all arrived."""

from __future__ import annotations

import triton.language as tl

from . import abi, dialect, protocol, shipping
from .kernel import Kernel, block_shape, coordinates, spec_of, tensor


def run(kernel: Kernel) -> None:
    """Insert the ready-waits, the releases and the tail around what `lower_epilogue` inserted."""
    tickets = {op.get_operand(0).id(): op for op in kernel.calls(protocol.take_ticket)}
    with_tiles = {op.get_operand(0).id() for op in kernel.calls(protocol.tile_of_ticket)}
    specs = {op.get_operand(0).id(): spec_of(op) for op in kernel.markers(dialect.STORE)}
    reductions = {plan: spec for plan, spec in specs.items() if spec.reduces}
    collectives = {plan: spec.collective for plan, spec in specs.items()}
    for plan, op in tickets.items():
        table, ticket = tensor(op.get_operand(0)), tensor(op.get_result(0))
        kernel.after(op)
        if collectives.get(plan) != "all_reduce":  # whose end means that every rank has read what it was sent
            spec = specs.get(plan)
            announces = shipping if spec and spec.calls_nvshmem else protocol
            kernel.call(announces.announce_ready, table, ticket)
            if spec and spec.transport == dialect.PROXY:
                kernel.call(shipping.ring, table, ticket)
        if plan in with_tiles:
            kernel.call(protocol.check_grid, table, ticket, block_shape(specs[plan]))

    sends = kernel.calls(protocol.store_tile, protocol.stage_tile, protocol.store_partial)
    reduces = iter(kernel.calls(protocol.reduce_tile))
    for store, send in zip(kernel.markers(dialect.STORE), sends, strict=True):
        spec = spec_of(store)
        split_dim = tl.constexpr(spec.split_dim if spec.splits else -1)
        tile = (tensor(store.get_operand(0)), coordinates(store), block_shape(spec), split_dim)
        to_all = spec.collective == "all_reduce"
        kernel.after(store)
        if not to_all:
            kernel.call(protocol.wait_ready, *tile)
        kernel.after(send)
        if spec.transport:
            kernel.call(shipping.arrive, *tile, _transfer(spec, of_stage=spec.reduces))
        else:
            kernel.call(protocol.arrive, *tile)
        if spec.reduces and spec.splits:
            kernel.call(protocol.wait_partials, *tile)
            if spec.calls_nvshmem:
                kernel.call(shipping.receive_partials, *tile)
        if to_all:
            kernel.after(next(reduces))
            kernel.call(protocol.arrive_reduced, *tile, *_arrive_reduced(spec))

    kernel.at_end()
    for plan, op in tickets.items():
        table = tensor(op.get_operand(0))
        last = kernel.call(protocol.leave, table)
        arrivals = {"all_reduce": "reduced", "reduce_scatter": "none", dialect.ONE_SHOT: "none"}.get(
            collectives.get(plan, ""), "stored"
        )
        if plan in reductions:
            spec = reductions[plan]
            if spec.calls_nvshmem:
                kernel.call(shipping.receive_shared, table, last)
            types = [tl.constexpr(tl.dtype(name)) for name in (spec.wire_dtype, spec.acc_dtype, spec.dtype)]
            alignment = tl.constexpr(spec.alignment)
            if spec.collective == dialect.ONE_SHOT:
                kernel.call(protocol.reduce_all, table, last, block_shape(spec), alignment, *types)
            else:
                to_all = tl.constexpr(spec.collective == "all_reduce")
                part = (block_shape(spec), tl.constexpr(spec.split_dim), alignment)
                kernel.call(protocol.reduce_shared, table, last, *part, *types, to_all, *_arrive_reduced(spec))
        kernel.call(protocol.finish, table, last, tl.constexpr(arrivals))
        if arrivals != "none" and plan in specs and specs[plan].calls_nvshmem:
            words = ("REDUCED_HERE", "EXPECTED_REDUCED") if arrivals == "reduced" else ("ARRIVED_HERE", "EXPECTED")
            kernel.call(shipping.receive_last, table, last, *(tl.constexpr(getattr(abi, name)) for name in words))


def _transfer(spec: dialect.Spec, of_stage: bool) -> tl.constexpr:
    """What shipping.py must know of a transfer: of partial values to the owners' staging areas, or of results."""
    dtype = tl.dtype(spec.wire_dtype if of_stage else spec.dtype)
    kind = abi.OF_STAGE if of_stage else abi.OF_RESULT
    return tl.constexpr((spec.slice_dim, kind, dtype.primitive_bitwidth // 8, spec.calls_nvshmem))


def _arrive_reduced(spec: dialect.Spec) -> tuple[tl.constexpr, tl.constexpr]:
    """How an all_reduce tells ranks that reduced rows were stored at them."""
    if spec.transport:
        return tl.constexpr(shipping.arrive_reduced_rows), _transfer(spec, of_stage=False)
    return tl.constexpr(protocol.arrive_reduced_rows), tl.constexpr(None)
