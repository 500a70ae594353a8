"""Loads and stores of tiles in a function that checks its accesses: at once and element by element."""

from __future__ import annotations

from llvmlite import ir

from triton_ext.backends.cpu.codegen.checks import CheckedSite
from triton_ext.backends.cpu.codegen.lltypes import PTR, is_float
from triton_ext.backends.cpu.codegen.memory import Access, nowhere
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.schedule import Scheduler
from triton_ext.backends.cpu.codegen.tiles import Buffer, Tile, from_memory, to_memory


def checked_load(scheduler: Scheduler, site: CheckedSite, access: Access, like: Tile, other: Tile | None) -> Buffer:
    """What lies at the pointers; `other`, or zero, where the load is not performed."""
    buffer = scheduler.buffer(like.shape, like)
    plan = scheduler.plan(like.shape, [other] if other is not None else [], [access], vectorize=False)

    def body(nest: Nest, point: Point) -> None:
        emit, builder = nest.emit, nest.emit.builder
        _, address = access.address(nest, point)
        mask = access.mask(nest, point, like.shape)
        instead = nest.value(other, point) if other is not None else _zero(like.lane)
        allowed = site.allows(address, mask, site.element(nest, point))
        place = builder.select(allowed, address, nowhere(emit))
        value = from_memory(emit, emit.load(place, access.stored), like.lane)
        buffer.write(nest, point, builder.select(allowed, value, instead))

    scheduler.run(plan, body)
    return buffer


def checked_store(scheduler: Scheduler, site: CheckedSite, access: Access, value: Tile) -> None:
    plan = scheduler.plan(value.shape, [value], [access], vectorize=False)

    def body(nest: Nest, point: Point) -> None:
        _, address = access.address(nest, point)
        mask = access.mask(nest, point, value.shape)
        element = to_memory(nest.emit, nest.value(value, point))
        allowed = site.allows(address, mask, site.element(nest, point))
        with nest.emit.only_if(allowed):
            nest.emit.store(element, address)

    scheduler.run(plan, body)


def _zero(type_: ir.Type) -> ir.Constant:
    return ir.Constant(type_, None if type_ == PTR else 0.0 if is_float(type_) else 0)
