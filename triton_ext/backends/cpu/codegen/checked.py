"""Accesses of tiles in a function that checks them: every address is looked up first, then the access is performed
for the elements that are allowed, like any other masked one."""

from __future__ import annotations

from xdsl.dialects.builtin import i1

from triton_ext.backends.cpu.codegen.addressing import Bounds
from triton_ext.backends.cpu.codegen.checks import CheckedSite
from triton_ext.backends.cpu.codegen.memory import Access
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.backends.cpu.codegen.schedule import Scheduler
from triton_ext.backends.cpu.codegen.tiles import Tile


def checked(scheduler: Scheduler, site: CheckedSite, access: Access, shape: tuple[int, ...]) -> Access:
    """`access`, less the elements that are outside. Emits the check at the builder's position."""
    allowed = scheduler.buffer(shape, Tile(shape, i1))

    def body(nest: Nest, point: Point) -> None:
        _, address = access.address(nest, point)
        mask = access.mask(nest, point, shape)
        allowed.write(nest, point, site.allows(address, mask, site.element(nest, point)))

    scheduler.run(scheduler.plan(shape, [], [access], vectorize=False), body)
    return Access(access.pointers, access.form, Bounds(rest=(allowed,)), access.stored)
