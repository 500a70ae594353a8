"""Loaded tiles that stay where they were loaded from, for as long as a check says that nothing has overwritten them.

A copy is another pass, and its stores wait behind those of the program before, which keeps the loads behind them from
running ahead.
"""

from __future__ import annotations

from llvmlite import ir

from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.lltypes import I64, PTR, size_bytes
from triton_ext.backends.cpu.codegen.memory import Load
from triton_ext.backends.cpu.codegen.schedule import STACK_BYTES, Scheduler
from triton_ext.backends.cpu.codegen.tiles import Borrowed, Buffer, Uniform


def keep(scheduler: Scheduler, load: Load, written: ir.Value, written_bytes: int) -> None:
    """Have the elements of `load` survive a write to `written`: copy them only if the write changes them."""
    emit, span = scheduler.emit, load.size * size_bytes(load.access.stored)
    place: ir.Value
    if isinstance(load.stored, Borrowed):
        place, copied = load.stored.pointer, load.stored.copied
    elif span > STACK_BYTES and _lies_in_one_piece(load):  # a smaller copy may stay in registers
        place, copied = emit.value(load.access.form.base), scheduler.buffer(load.shape, load)  # type: ignore[union-attr]
        place = place if place.type == PTR else emit.builder.inttoptr(place, PTR)
    else:
        scheduler.materialize(load)
        return
    plan = scheduler.plan(load.shape, [load])
    in_place = _apart(emit, place, span, written, written_bytes)
    if (full := plan.full_condition(plan.masks())) is not None:
        in_place = emit.builder.and_(in_place, full)

    def copy() -> list[ir.Value]:
        scheduler.write(plan, [(load, copied)])
        return [copied.pointer]

    (pointer,) = emit.either(in_place, lambda: [place], copy)
    scheduler.arena.remember(load, Borrowed(pointer, copied))


def _lies_in_one_piece(load: Load) -> bool:
    """Whether its memory looks as a buffer's does, where its mask is full."""
    form = load.access.form
    if form is None or form.columns or load.access.bounds.rest or not isinstance(load.other, Uniform | None):
        return False
    as_buffer = Buffer(form.base, load.shape, load.element)
    step = size_bytes(load.access.stored)
    return all(
        size == 1 or form.strides.get(d, 0) == step * stride
        for d, (size, stride) in enumerate(zip(load.shape, as_buffer.strides, strict=True))
    )


def _apart(emit: Emitter, a: ir.Value, a_bytes: int, b: ir.Value, b_bytes: int) -> ir.Value:
    """Whether two pieces of memory do not overlap."""
    builder = emit.builder
    distance = builder.sub(builder.ptrtoint(b, I64), builder.ptrtoint(a, I64))
    shifted = builder.add(distance, ir.Constant(I64, b_bytes - 1))
    return builder.icmp_unsigned(">=", shifted, ir.Constant(I64, a_bytes + b_bytes - 1))
