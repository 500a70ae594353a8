"""Pass 1, verify: a kernel that passes has one epilogue per plan, and stores that every program reaches."""

from __future__ import annotations

from triton._C.libtriton import ir

from ..errors import CompileError
from . import dialect
from .kernel import Kernel, coordinates, spec_of, symbol_of, where


def run(kernel: Kernel) -> None:
    """Raise CompileError at the first marker that breaks a rule of the language."""
    operations = kernel.operations()
    entry = kernel.entry()
    arguments = {entry.get_argument(i).id() for i in range(entry.get_num_arguments())}
    parents = {op.get_region(i).id(): op for op in operations for i in range(op.get_num_regions())}
    plans: dict[int, str] = {}
    for op in operations:
        if symbol_of(op) == dialect.EPILOGUE:
            plan = op.get_operand(0).id()
            if plan not in arguments:
                raise CompileError(f"{where(op)}: the plan of an epilogue must be an argument of the kernel itself")
            if plan in plans:
                raise CompileError(
                    f"{where(op)}: this plan already has an epilogue at {plans[plan]}; make a second plan for it"
                )
            plans[plan] = where(op)
        elif symbol_of(op) == dialect.STORE:
            _check_store(op, operations, parents, entry)


def _check_store(
    store: ir.operation, operations: list[ir.operation], parents: dict[int, ir.operation], entry: ir.block
) -> None:
    handle = store.get_operand(0).id()
    tiles = [op for op in operations if symbol_of(op) == dialect.PROGRAM_TILE]
    if spec_of(store).reduces and all(op.get_operand(0).id() != handle for op in tiles):
        raise CompileError(
            f"{where(store)}: the tile of a {spec_of(store).collective} must come from its own program_tile(): own "
            "tiles have to be computed last, and tl.program_id does not say when a program runs"
        )
    if spec_of(store).reduces and any(coord.type.is_block() for coord in coordinates(store)):
        raise CompileError(
            f"{where(store)}: a coordinate of a {spec_of(store).collective} is a tensor: it must be the start of the "
            "program's tile, whose rows have one order on all ranks"
        )
    if not tiles and not any(op.get_name() == "tt.get_program_id" for op in operations):
        raise CompileError(
            f"{where(store)}: store without program_tile() or tl.program_id: every program stores the same tile"
        )
    op = store
    while (parent := parents[op.get_block().get_parent().id()]).get_name() != "tt.func":
        if parent.get_name() != "scf.for":
            raise CompileError(
                f"{where(store)}: store inside {parent.get_name()}: a program that does not reach it leaves peers "
                "waiting; store always, and use mask= for elements that are not to be written"
            )
        op = parent
    if op.get_block().id() != entry.id():
        raise CompileError(
            f"{where(store)}: store in a function that is not inlined, or after an early return: a program that "
            "does not reach it leaves peers waiting"
        )
