"""Mutants of a lowered kernel: each lacks one piece of what the passes inserted. The simulator has to report them all.

A piece is found by where an operation comes from: the functions of passes/protocol.py that were inlined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ..ir.dialect import ARITH, ConstantOp
from ..passes import protocol
from .report import Finding, functions_of, place_of
from .simulate import Simulation, residents
from .translate import translate

OWN_LAST = "own tiles last"
_ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas")
_BARRIERS = ("gpu.barrier", "ttg.barrier")
_WITHOUT_RELEASE = {"release": "relaxed", "acq_rel": "acquire"}
_WITHOUT_ACQUIRE = {"acquire": "relaxed", "acq_rel": "release"}


@dataclass(frozen=True)
class Mutant:
    """kind: what was taken away. function: of the protocol that inserted it. place: where it was."""

    kind: str
    function: str
    place: str
    module: ModuleOp

    def __str__(self) -> str:
        return f"no {self.kind} in {self.function}: {self.place}"


Change = Callable[[Operation], None]


def hunt(simulation: Simulation, seeds: int = 40, runs: int = 2) -> Iterator[tuple[Mutant, Finding | None]]:
    """Every mutant of a kernel, with the first fault that the simulator finds in it; None if there is none."""
    for text, module in simulation.modules.items():
        for mutant in mutants(module):
            codes = {**simulation.codes, text: translate(mutant.module)}
            found = (simulation.run(seed, runs, residents(seed), codes=codes)[0] for seed in range(seeds))
            yield mutant, next((finding for finding in found if finding is not None), None)


def mutants(module: ModuleOp) -> Iterator[Mutant]:
    """All mutants of a lowered kernel, as Simulation.modules has it."""
    reduces = any("reduce_shared" in functions_of(op) for op in module.walk())
    for index, op in enumerate(module.walk()):
        inside = [name for name in functions_of(op) if hasattr(protocol, name)]
        if not inside or inside[0] in ("_fail", "_look"):  # they order nothing
            continue
        for kind, change in _changes(op, inside):
            if kind == OWN_LAST and not reduces:
                continue  # who only stores waits for no data: the order of tiles is for speed
            changed = module.clone()
            change(next(other for i, other in enumerate(changed.walk()) if i == index))
            yield Mutant(kind, inside[-1], place_of(op), changed)


def _changes(op: Operation, inside: list[str]) -> Iterator[tuple[str, Change]]:
    """What can be taken from an operation. inside: the protocol's functions that it is part of, the innermost first."""
    if op.name in _BARRIERS:
        yield "barrier", _erase
    if op.name in _ATOMICS:
        sem = _text(op, "sem")
        if sem in _WITHOUT_RELEASE:
            yield "release", lambda op: _set(op, "sem", _WITHOUT_RELEASE[_text(op, "sem")])
        if sem in _WITHOUT_ACQUIRE:
            yield "acquire", lambda op: _set(op, "sem", _WITHOUT_ACQUIRE[_text(op, "sem")])
        if _text(op, "scope") == "sys":
            yield "system scope", lambda op: _set(op, "scope", "gpu")
        if inside[0] in ("arrive", "_arrive_reduced", "announce_ready"):
            yield {"announce_ready": "announcement"}.get(inside[0], "arrival"), _mask_off
    if op.name == "scf.if" and inside[0] == "_wait" and any(each.name == "scf.while" for each in op.walk()):
        yield f"wait ({_waits_for(inside)})", lambda op: _replace_operand(op, 0, 0)
    yield from _owner_changes(op, inside)


def _owner_changes(op: Operation, inside: list[str]) -> Iterator[tuple[str, Change]]:
    if inside[0] == "_owned" and op.name == "arith.cmpi":
        yield "owner of a row", lambda op: _replace(op, 1)
    if inside[0] == "_destinations" and op.name == "arith.divsi":
        is_end = any(use.operation.name == "arith.addi" for use in op.results[0].uses)
        yield f"{'last' if is_end else 'first'} owner of a tile", lambda op: _add(op, -1 if is_end else 1)
    if inside[0] == "_destinations" and op.name == "tt.load" and _is_unsplit(op):
        yield "first or last receiver", lambda op: _add(op, 1)
    if inside[0] == "_nth" and op.name == "arith.remsi" and not _feeds_remainder(op):
        yield "choice of a receiver", lambda op: _add(op, 1)
    if inside[0] == "_count" and op.name == "arith.muli" and _is_last_in(op, "_count"):
        yield "count of an arrival", lambda op: _add(op, 1)
    if inside[0] == "_is_own" and op.name == "arith.cmpi":
        is_end = any(isinstance(each.owner, Operation) and each.owner.name == "arith.addi" for each in op.operands)
        yield f"other owner at the {'end' if is_end else 'start'} of a tile", lambda op: _replace(op, 1)
    if inside[0] == "_own_tiles" and op.name == "arith.maxsi":
        yield OWN_LAST, lambda op: _replace(op, 0)


def _waits_for(inside: list[str]) -> str:
    return {"wait_ready": "ready", "_wait_partials": "partial values"}.get(inside[1], "tail")


def _is_unsplit(op: Operation) -> bool:
    """Whether a load is of DESTINATION_BEGIN or _END: its users are casts to i32 only."""
    return all(use.operation.name == "arith.trunci" for use in op.results[0].uses)


def _feeds_remainder(op: Operation) -> bool:
    """Of the two remainders that `_nth` takes, the first one."""
    users = [use.operation for use in op.results[0].uses]
    return any(
        user.name == "arith.addi" and any(next_.operation.name == "arith.remsi" for next_ in user.results[0].uses)
        for user in users
    )


def _is_last_in(op: Operation, function: str) -> bool:
    return all(function not in functions_of(use.operation)[:1] for use in op.results[0].uses)


# -- changes ----------------------------------------------------------------------------------------------------


def _text(op: Operation, name: str) -> str:
    attribute = op.attributes[name]
    assert isinstance(attribute, StringAttr)
    return attribute.data


def _set(op: Operation, name: str, value: str) -> None:
    op.attributes[name] = StringAttr(value)


def _erase(op: Operation) -> None:
    Rewriter.erase_op(op)


def _constant(before: Operation, value: int, type_: Attribute) -> SSAValue:
    element = type_.element_type if isinstance(type_, TensorType) else type_
    assert isinstance(element, IntegerType)
    constant = ConstantOp.create(result_types=[type_], attributes={"value": IntegerAttr(value, element)})
    Rewriter.insert_op(constant, InsertPoint.before(before))
    return constant.results[0]


def _replace(op: Operation, value: int) -> None:
    op.results[0].replace_all_uses_with(_constant(op, value, op.results[0].type))


def _replace_operand(op: Operation, index: int, value: int) -> None:
    op.operands[index] = _constant(op, value, op.operands[index].type)


def _mask_off(op: Operation) -> None:
    _replace_operand(op, 2, 0)


def _add(op: Operation, value: int) -> None:
    [addition] = (each for each in ARITH.operations if each.name == "arith.addi")
    result = op.results[0]
    uses = list(result.uses)
    more = addition.create(operands=[result, _constant(op, value, result.type)], result_types=[result.type])
    Rewriter.insert_op(more, InsertPoint.after(op))
    for use in uses:
        use.operation.operands[use.index] = more.results[0]
