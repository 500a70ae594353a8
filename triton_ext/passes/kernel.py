"""A kernel as the passes see it: one function, its markers in order, and a way to insert calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.jit import JITFunction

from ..errors import CompileError
from . import dialect, protocol

_SCALARS = {
    "i1": tl.int1,
    "i8": tl.int8,
    "i16": tl.int16,
    "i32": tl.int32,
    "i64": tl.int64,
    "f16": tl.float16,
    "bf16": tl.bfloat16,
    "f32": tl.float32,
    "f64": tl.float64,
}


def tensor(value: ir.value) -> tl.tensor:
    """A value of the IR as the language's tensor. Raises CompileError for a type that no marker can have."""
    text = str(value.get_type())
    shape: list[int] = []
    if match := re.fullmatch(r"tensor<((?:\d+x)+)(.+)>", text):
        shape = [int(size) for size in match[1].split("x")[:-1]]
        text = match[2]
    pointer = re.fullmatch(r"!tt\.ptr<(\w+)>", text)
    name = pointer[1] if pointer else text
    if name not in _SCALARS:
        raise CompileError(f"a value of type {value.get_type()} cannot be sent")
    element = tl.pointer_type(_SCALARS[name]) if pointer else _SCALARS[name]
    return tl.tensor(value, tl.block_type(element, shape) if shape else element)


class Kernel:
    """The single function of a module after inlining, and the calls that passes insert into it.

    backend and options are those of the compilation: inserted functions are compiled as the kernel's own code is.
    """

    def __init__(self, module: ir.module, backend: Any, options: Any) -> None:
        self.module = module
        self._generator = CodeGenerator(
            module.context,
            None,
            {},
            "txl",
            protocol.finish,  # whose source an error in an inserted function would quote
            options=options,
            codegen_fns=backend.get_codegen_implementation(options),
            module_map=backend.get_module_map(),
            is_gluon=False,
            module=module,
            file_name="txl",
        )
        self.builder = self._generator.builder

    def operations(self) -> list[ir.operation]:
        """All operations, an operation after those in its regions."""
        found: list[ir.operation] = []
        self.module.walk(found.append)
        return found

    def markers(self, symbol: str) -> list[ir.operation]:
        return [op for op in self.operations() if symbol_of(op) == symbol]

    def calls(self, *functions: JITFunction) -> list[ir.operation]:
        """Calls of the protocol's functions, in order."""
        names = tuple(f"{function.module}.{function.__name__}__" for function in functions)
        return [
            op
            for op in self.operations()
            if op.get_name() == "tt.call" and op.get_flat_symbol_ref_attr("callee").startswith(names)
        ]

    def entry(self) -> ir.block:
        """The kernel's first block."""
        name = self.module.get_entry_func_name()
        operations = self.operations()
        [kernel] = (op for op in operations if op.get_name() == "tt.func" and op.get_str_attr("sym_name") == name)
        body = kernel.get_region(0).id()
        return next(block for op in operations if (block := block_of(op)) and block.get_parent().id() == body)

    def at_start(self) -> None:
        """Insert from here on at the kernel's first line."""
        self.builder.set_insertion_point_to_start(self.entry())

    def after(self, op: ir.operation) -> None:
        """Insert from here on after an operation."""
        self.builder.set_insertion_point_after(op)

    def at_end(self) -> None:
        """Insert from here on before the kernel's return."""
        entry = self.entry().id()
        inside = (op for op in self.operations() if (block := block_of(op)) and block.id() == entry)
        *_, last, _return = inside
        self.builder.set_insertion_point_after(last)

    def call(self, function: JITFunction, *args: Any) -> Any:
        """Insert a call, and return its results as the language's values."""
        return self._generator.call_JitFunction(function, list(args), {})

    def full(self, shape: Sequence[int], value: bool) -> tl.tensor:
        return tl.full(list(shape), value, tl.int1, _semantic=self._generator.semantic)


def block_of(op: ir.operation) -> ir.block | None:
    """The block that an operation is in; None for the module."""
    return None if op.get_name() == "builtin.module" else op.get_block()


def symbol_of(op: ir.operation) -> str | None:
    """The marker's symbol, or None for any other operation."""
    symbol = op.get_str_attr("symbol") if op.get_name() == "tt.extern_elementwise" else None
    return symbol if symbol in (dialect.EPILOGUE, dialect.PROGRAM_TILE, dialect.STORE) else None


def spec_of(marker: ir.operation) -> dialect.Spec:
    return dialect.Spec.decode(marker.get_str_attr("libname"))


def where(op: ir.operation) -> str:
    """The author's line: of the kernel, if the operation was inlined into it."""
    lines = re.findall(r'"([^"]+)":(\d+)', str(op.get_result(0).get_loc()))
    return ":".join(lines[-1]) if lines else "unknown line"


def block_shape(spec: dialect.Spec) -> tl.tuple:
    return tl.tuple([tl.constexpr(size) for size in spec.block_shape])


def coordinates(marker: ir.operation) -> Sequence[tl.tensor]:
    """Of a store marker."""
    return tl.tuple([tensor(marker.get_operand(1 + dim)) for dim in range(spec_of(marker).ndim)])
