"""Triton IR to Python: every function of a module becomes a generator that gives way before each shared access.

A statement for an operation, in order, so that the code can be read beside the IR. Memory is reached through `m`, the
program that runs (machine.py): m.load, m.store, m.rmw, m.cas, m.barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, ModuleOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from ..errors import SimulationError
from ..ir import source_line
from ..ir.dialect import PointerType
from . import values
from .values import Element, element_of, shape_of

Program = Generator[Any, None, None]


@dataclass
class Code:
    """A translated module. start(m, *arguments) makes a program of the kernel; sites: operations by number."""

    name: str
    start: Callable[..., Program]
    sites: list[Operation]
    parameters: list[Attribute]
    source: str


def translate(module: ModuleOp) -> Code:
    """Raises SimulationError, at the author's line, for an operation that is not simulated."""
    writer = _Writer()
    functions = [op for op in module.body.block.ops if op.name == "tt.func"]
    for function in functions:
        writer.function(function)
    source = "\n".join(writer.lines)
    scope: dict[str, Any] = {"np": np, "v": values, "K": writer.constants, "E": writer.elements}
    exec(compile(source, "<simulated kernel>", "exec"), scope)
    [kernel] = (f for f in functions if _text(f, "sym_visibility") == "public")
    name = _text(kernel, "sym_name")
    parameters = [argument.type for argument in kernel.regions[0].blocks[0].args]
    return Code(name, scope[_identifier(name)], writer.sites, parameters, source)


def _text(op: Operation, name: str) -> str:
    attribute = op.attributes.get(name)
    return str(attribute.data) if attribute is not None else ""  # type: ignore[attr-defined]


def _number(op: Operation, name: str) -> int:
    attribute = op.attributes[name] if name in op.attributes else op.properties[name]
    assert isinstance(attribute, IntegerAttr)
    return attribute.value.data


def _identifier(symbol: str) -> str:
    return "f_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in symbol)


_INFIX = {
    "arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.andi": "&", "arith.ori": "|", "arith.xori": "^",
    "arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/", "tt.precise_divf": "/",
}  # fmt: skip
_BOOLEAN = {"arith.addi": "^", "arith.subi": "^", "arith.muli": "&"}
_DIVISIONS = {
    "arith.divsi": ("trunc", False), "arith.remsi": ("trunc", True), "arith.floordivsi": ("floor", False),
    "arith.ceildivsi": ("ceil", False), "arith.divui": ("floor", False), "arith.remui": ("floor", True),
}  # fmt: skip
_SHIFTS = {"arith.shli": "left", "arith.shrui": "logical", "arith.shrsi": "arithmetic"}
_EXTREMES = {
    "arith.maxsi": ("max", "np.maximum"), "arith.minsi": ("min", "np.minimum"),
    "arith.maxui": ("max", "np.maximum"), "arith.minui": ("min", "np.minimum"),
    "arith.maximumf": ("np.maximum", "np.maximum"), "arith.minimumf": ("np.minimum", "np.minimum"),
    "arith.maxnumf": ("np.fmax", "np.fmax"), "arith.minnumf": ("np.fmin", "np.fmin"),
}  # fmt: skip
_CASTS = {"arith.extsi", "arith.extui", "arith.trunci", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui",
          "arith.extf", "arith.truncf", "tt.fp_to_fp"}  # fmt: skip
_SAME = {"tt.int_to_ptr", "tt.ptr_to_int"}
_PREDICATES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass
class _Writer:
    lines: list[str] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    sites: list[Operation] = field(default_factory=list)
    names: dict[SSAValue, str] = field(default_factory=dict)
    depth: int = 0
    in_combination: bool = False  # scalars of the IR are arrays there: the region of a reduction or scan

    # -- text -------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def name(self, value: SSAValue) -> str:
        return self.names.setdefault(value, f"x{len(self.names)}")

    def operands(self, op: Operation) -> list[str]:
        return [self.name(operand) for operand in op.operands]

    def assign(self, targets: Sequence[SSAValue], sources: Sequence[str]) -> None:
        if targets:
            self.line(f"{', '.join(map(self.name, targets))} = {', '.join(sources)}")

    def element(self, op: Operation, type_: Attribute) -> Element:
        found = element_of(type_)
        if found is None:
            raise SimulationError(f"{source_line(op)}: values of type {type_} are not simulated ({op.name})")
        return found

    def element_index(self, element: Element) -> str:
        if element not in self.elements:
            self.elements.append(element)
        return f"E[{self.elements.index(element)}]"

    def constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"K[{len(self.constants) - 1}]"

    def is_array(self, value: SSAValue) -> bool:
        return self.in_combination or shape_of(value.type) is not None

    # -- structure --------------------------------------------------------------------------------------------

    def function(self, op: Operation) -> None:
        blocks = list(op.regions[0].blocks)
        if not blocks:
            return
        arguments = ", ".join(["m", *(self.name(argument) for argument in blocks[0].args)])
        self.line(f"def {_identifier(_text(op, 'sym_name'))}({arguments}):")
        self.depth += 1
        self.line("if False: yield")
        if len(blocks) == 1:
            self.block(blocks[0])
        else:  # an early return leaves a graph of blocks
            self.line("block = 0")
            self.line("while True:")
            for number, block in enumerate(blocks):
                self.depth += 1
                self.line(f"if block == {number}:")
                self.depth += 1
                self.numbers = {each: i for i, each in enumerate(blocks)}
                self.block(block)
                self.depth -= 2
        self.depth -= 1

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.operation(op)

    def nested(self, block: Block) -> None:
        self.depth += 1
        start = len(self.lines)
        self.block(block)
        if len(self.lines) == start:
            self.line("pass")
        self.depth -= 1

    def operation(self, op: Operation) -> None:
        method = getattr(self, "op_" + op.name.replace(".", "_"), None)
        if method is not None:
            method(op)
            return
        expression = self.expression(op)
        if expression is None:
            raise SimulationError(f"{source_line(op)}: {op.name} is not simulated")
        self.assign(op.results, [expression])

    # -- values -----------------------------------------------------------------------------------------------

    def expression(self, op: Operation) -> str | None:
        """Of an operation with one result that touches no memory; None for one that is unknown."""
        args, name = self.operands(op), op.name
        result = self.element(op, op.results[0].type) if op.results else None
        if result is None:
            return None
        is_array = self.is_array(op.results[0]) or (bool(op.operands) and self.is_array(op.operands[0]))
        if name in _INFIX:
            symbol = _BOOLEAN.get(name, _INFIX[name]) if result.bits == 1 else _INFIX[name]
            text = f"{args[0]} {symbol} {args[1]}"
            if result.kind == "int" and result.bits > 1 and not is_array and symbol in "+-*":
                return f"v.wrap({text}, {result.bits})"
            return f"v.bf16({text})" if result.is_bf16 else text
        if name in _DIVISIONS:
            rounding, remainder = _DIVISIONS[name]
            if name.endswith("ui"):
                args = [f"v.unsigned({arg}, {result.bits})" for arg in args]
                return f"v.signed(v.divide({args[0]}, {args[1]}, {rounding!r}, {remainder}, 65), {result.bits})"
            return f"v.divide({args[0]}, {args[1]}, {rounding!r}, {remainder}, {result.bits})"
        if name in _SHIFTS:
            return f"v.shift({args[0]}, {args[1]}, {_SHIFTS[name]!r}, {result.bits})"
        if name in _EXTREMES:
            function = _EXTREMES[name][is_array]
            if name.endswith("ui"):
                args = [f"v.unsigned({arg}, {result.bits})" for arg in args]
                return f"v.signed({function}({args[0]}, {args[1]}), {result.bits})"
            return f"{function}({args[0]}, {args[1]})"
        if name == "arith.cmpi":
            predicate, bits = _text(op, "predicate"), self.element(op, op.operands[0].type).bits
            if predicate[0] == "u":
                args = [f"v.unsigned({arg}, {bits})" for arg in args]
            return f"{args[0]} {_PREDICATES[predicate.lstrip('su')]} {args[1]}"
        if name == "arith.cmpf":
            return f"v.compare_floats({_text(op, 'predicate')!r}, {args[0]}, {args[1]})"
        if name == "arith.select":
            if self.is_array(op.operands[0]):
                return f"np.where({args[0]}, {args[1]}, {args[2]})"
            return f"({args[1]} if {args[0]} else {args[2]})"
        if name in _CASTS:
            source = self.element_index(self.element(op, op.operands[0].type))
            signed = name not in ("arith.extui", "arith.uitofp")
            return f"v.cast({args[0]}, {source}, {self.element_index(result)}, {signed})"
        if name in ("tt.bitcast", "arith.bitcast"):
            source = self.element_index(self.element(op, op.operands[0].type))
            return f"v.bitcast({args[0]}, {source}, {self.element_index(result)})"
        if name in _SAME:
            return args[0]
        if name == "arith.negf":
            return f"-{args[0]}"
        if name == "tt.precise_sqrt":
            return f"np.sqrt({args[0]})"
        if name == "tt.clampf":
            return f"np.minimum(np.maximum({args[0]}, {args[1]}), {args[2]})"
        if name == "tt.mulhiui":
            return f"v.multiply_high({args[0]}, {args[1]}, {result.bits})"
        if name.startswith("math.") and name[5:] in values.MATH:
            text = f"v.tensor(v.MATH[{name[5:]!r}]({', '.join(args)}), {self.element_index(result)}.dtype)"
            return f"v.bf16({text})" if result.is_bf16 else text
        return self.shaped(op, args, result)

    def shaped(self, op: Operation, args: list[str], result: Element) -> str | None:
        """Operations on the shape of a tensor."""
        shape, name = shape_of(op.results[0].type), op.name
        if name == "tt.splat":
            return f"np.full({shape}, {args[0]}, {self.element_index(result)}.dtype)"
        if name == "tt.unsplat":
            return f"{self.element_index(result)}.scalar({args[0]}.reshape(-1)[0])"
        if name == "tt.broadcast":
            return f"np.broadcast_to({args[0]}, {shape})"
        if name in ("tt.expand_dims", "tt.reshape"):
            return f"{args[0]}.reshape({shape})"
        if name == "tt.trans":
            return f"np.transpose({args[0]}, {_order(op)})"
        if name == "tt.make_range":
            return self.constant(np.arange(_number(op, "start"), _number(op, "end"), dtype=np.int32))
        if name == "tt.cat":
            return f"np.concatenate(({args[0]}, {args[1]}))"
        if name == "tt.join":
            return f"np.stack(({args[0]}, {args[1]}), -1)"
        if name == "tt.gather":
            return f"np.take_along_axis({args[0]}, {args[1]}.astype(np.int64), {_number(op, 'axis')})"
        if name == "tt.histogram":
            assert shape is not None
            return f"v.histogram({args[0]}, {shape[0]}{''.join(', ' + mask for mask in args[1:])})"
        if name == "tt.dot":
            return f"v.dot({', '.join(args)})"
        return None

    def op_arith_constant(self, op: Operation) -> None:
        result = self.element(op, op.results[0].type)
        attribute = op.attributes["value"]
        assert isinstance(attribute, IntegerAttr | FloatAttr)
        value: Any = attribute.value.data
        shape = shape_of(op.results[0].type)
        if result.kind == "int":
            value = bool(value) if result.bits == 1 else values.wrap(int(value), result.bits)
        elif result.kind == "float":
            value = result.dtype.type(value)
        if shape is not None:
            value = np.full(shape, value, result.dtype)
        self.names[op.results[0]] = str(value) if isinstance(value, int) else self.constant(value)

    def op_tt_addptr(self, op: Operation) -> None:
        pointer, offset = self.operands(op)
        type_ = op.operands[0].type
        pointee = getattr(type_, "element_type", type_)
        assert isinstance(pointee, PointerType)
        size = self.element(op, pointee.pointee).size_bytes
        if self.is_array(op.operands[1]):
            offset = f"{offset}.astype(np.int64)"
        self.assign(op.results, [f"{pointer} + {offset} * {size}"])

    def op_arith_mulsi_extended(self, op: Operation) -> None:
        raise SimulationError(f"{source_line(op)}: {op.name} is not simulated")

    op_arith_mului_extended = op_arith_mulsi_extended

    def op_tt_split(self, op: Operation) -> None:
        [source] = self.operands(op)
        self.assign(op.results, [f"{source}[..., 0]", f"{source}[..., 1]"])

    def op_tt_get_program_id(self, op: Operation) -> None:
        self.assign(op.results, [f"m.program_id[{'xyz'.index(_text(op, 'axis'))}]"])

    def op_tt_get_num_programs(self, op: Operation) -> None:
        self.assign(op.results, [f"m.num_programs[{'xyz'.index(_text(op, 'axis'))}]"])

    def op_tt_assert(self, op: Operation) -> None:
        self.line(f"m.check({self.site(op)}, {self.operands(op)[0]}, {_text(op, 'message')!r})")

    def op_tt_print(self, op: Operation) -> None:
        """What a kernel prints is not part of what is checked."""

    def op_llvm_intr_assume(self, op: Operation) -> None:
        """A promise to an optimiser."""

    # -- memory -----------------------------------------------------------------------------------------------

    def site(self, op: Operation) -> int:
        self.sites.append(op)
        return len(self.sites) - 1

    def pointee(self, op: Operation) -> Element:
        type_ = op.operands[0].type
        pointer = getattr(type_, "element_type", type_)
        if not isinstance(pointer, PointerType):
            raise SimulationError(f"{source_line(op)}: {op.name} on {type_} is not simulated")
        return self.element(op, pointer.pointee)

    def give_way(self, op: Operation, mask: str | None) -> None:
        self.line(f"if m.is_shared({self.operands(op)[0]}, {mask}): yield")

    def op_tt_load(self, op: Operation) -> None:
        args = self.operands(op)
        mask, other = [*args[1:], None, None][:2]
        self.give_way(op, mask)
        volatile = "isVolatile" in op.attributes and bool(_number(op, "isVolatile"))
        element = self.element_index(self.pointee(op))
        self.assign(
            op.results, [f"m.load({self.site(op)}, {element}, {args[0]}, {mask}, {other}, volatile={volatile})"]
        )

    def op_tt_store(self, op: Operation) -> None:
        args = self.operands(op)
        mask = args[2] if len(args) > 2 else None
        self.give_way(op, mask)
        self.line(f"m.store({self.site(op)}, {self.element_index(self.pointee(op))}, {args[0]}, {args[1]}, {mask})")

    def op_tt_atomic_rmw(self, op: Operation) -> None:
        args = self.operands(op)
        mask = args[2] if len(args) > 2 else None
        self.give_way(op, mask)
        how = ", ".join(repr(_text(op, key)) for key in ("atomic_rmw_op", "sem", "scope"))
        used = bool(op.results[0].uses)
        element = self.element_index(self.pointee(op))
        call = f"m.rmw({self.site(op)}, {element}, {how}, {args[0]}, {args[1]}, {mask}, used={used})"
        self.assign(op.results, [call])

    def op_tt_atomic_cas(self, op: Operation) -> None:
        args = self.operands(op)
        self.give_way(op, None)
        how = ", ".join(repr(_text(op, key)) for key in ("sem", "scope"))
        element = self.element_index(self.pointee(op))
        self.assign(op.results, [f"m.cas({self.site(op)}, {element}, {how}, {', '.join(args)})"])

    def op_tt_extern_elementwise(self, op: Operation) -> None:
        symbol = _text(op, "symbol")
        if not symbol.startswith("nvshmem"):
            raise SimulationError(f"{source_line(op)}: {op.name} of {symbol} is not simulated")
        self.line("yield")
        self.assign(op.results, [f"m.nvshmem({self.site(op)}, {symbol!r}, {', '.join(self.operands(op))})"])

    def op_tt_elementwise_inline_asm(self, op: Operation) -> None:
        text = _text(op, "asm_string")
        if "%tid.x" not in text:
            raise SimulationError(f"{source_line(op)}: {op.name} of {text!r} is not simulated")
        self.assign(op.results, ["0"])  # a program's scalars are those of its first thread

    def op_gpu_barrier(self, op: Operation) -> None:
        self.line(f"m.barrier({self.site(op)})")

    op_ttg_barrier = op_gpu_barrier

    # -- reductions -------------------------------------------------------------------------------------------

    def combination(self, op: Operation) -> str:
        """The region of a reduction or scan as a function on arrays."""
        block = op.regions[0].blocks[0]
        name = f"combine{len(self.names)}"
        self.line(f"def {name}({', '.join(map(self.name, block.args))}):")
        outer, self.in_combination = self.in_combination, True
        self.nested(block)
        self.in_combination = outer
        return name

    def op_tt_reduce_return(self, op: Operation) -> None:
        self.line(f"return ({', '.join(self.operands(op))},)")

    op_tt_scan_return = op_tt_reduce_return

    def op_tt_reduce(self, op: Operation) -> None:
        combine = self.combination(op)
        found = f"v.reduce({combine}, {_number(op, 'axis')}, {', '.join(self.operands(op))})"
        self.line(f"{', '.join(map(self.name, op.results))}, = {found}")
        for result in op.results:
            if shape_of(result.type) is None:
                name, element = self.name(result), self.element_index(self.element(op, result.type))
                self.line(f"{name} = {element}.scalar({name})")

    def op_tt_scan(self, op: Operation) -> None:
        combine = self.combination(op)
        reverse = bool(_number(op, "reverse"))
        found = f"v.scan({combine}, {_number(op, 'axis')}, {reverse}, {', '.join(self.operands(op))})"
        self.line(f"{', '.join(map(self.name, op.results))}, = {found}")

    # -- control ----------------------------------------------------------------------------------------------

    def op_scf_for(self, op: Operation) -> None:
        low, high, step, *initial = self.operands(op)
        body = op.regions[0].blocks[0]
        counter, *carried = body.args
        self.assign(op.results, initial)
        self.line(f"for {self.name(counter)} in range({low}, {high}, {step}):")
        self.depth += 1
        self.assign(carried, [self.name(result) for result in op.results])
        self.depth -= 1
        self.nested(body)

    def op_scf_if(self, op: Operation) -> None:
        self.line(f"if {self.operands(op)[0]}:")
        self.nested(op.regions[0].blocks[0])
        if op.regions[1].blocks:
            self.line("else:")
            self.nested(op.regions[1].blocks[0])

    def op_scf_while(self, op: Operation) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        self.assign(before.args, self.operands(op))
        self.line("m.begin_iteration()")
        self.line("while True:")
        self.nested(before)  # ends with the condition, which breaks
        self.depth += 1
        self.line("if m.spins(): yield m.polled")  # the last iteration only looked, and would look again
        self.line("m.begin_iteration()")
        self.depth -= 1
        self.nested(after)

    def op_scf_condition(self, op: Operation) -> None:
        condition, *passed = self.operands(op)
        loop = op.parent_op()
        assert loop is not None
        self.assign(loop.results, passed)
        self.line(f"if not {condition}: break")
        self.assign(loop.regions[1].blocks[0].args, passed)

    def op_scf_yield(self, op: Operation) -> None:
        parent = op.parent_op()
        assert parent is not None
        if parent.name == "scf.while":
            self.assign(parent.regions[0].blocks[0].args, self.operands(op))
        else:
            self.assign(parent.results, self.operands(op))

    def op_tt_call(self, op: Operation) -> None:
        callee = op.attributes["callee"].root_reference.data  # type: ignore[attr-defined]
        call = f"yield from {_identifier(callee)}({', '.join(['m', *self.operands(op)])})"
        self.line(f"{', '.join(map(self.name, op.results))}, = {call}" if op.results else call)

    def op_tt_return(self, op: Operation) -> None:
        self.line(f"return ({''.join(arg + ', ' for arg in self.operands(op))})")

    def _jump(self, block: Block, args: Sequence[str]) -> None:
        self.assign(block.args, args)
        self.line(f"block = {self.numbers[block]}; continue")

    def op_cf_br(self, op: Operation) -> None:
        self._jump(op.successors[0], self.operands(op))

    def op_cf_cond_br(self, op: Operation) -> None:
        condition, *args = self.operands(op)
        count = len(op.successors[0].args)
        self.line(f"if {condition}:")
        self.depth += 1
        self._jump(op.successors[0], args[:count])
        self.depth -= 1
        self._jump(op.successors[1], args[count:])

    def op_ub_poison(self, op: Operation) -> None:
        result = self.element(op, op.results[0].type)
        shape = shape_of(op.results[0].type)
        value = np.zeros(shape or (), result.dtype)
        self.assign(op.results, [self.constant(value if shape else result.scalar(value))])


def _order(op: Operation) -> tuple[int, ...]:
    order = op.attributes["order"]
    found = order.get_values() if hasattr(order, "get_values") else [item.value.data for item in order.data]  # type: ignore[attr-defined]
    return tuple(int(i) for i in found)
