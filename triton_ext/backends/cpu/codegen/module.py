"""Lowers a module of Triton IR to one LLVM module with the kernel's entry point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from triton_ext.backends.cpu.codegen.checks import Checks, Site
from triton_ext.backends.cpu.codegen.emit import Emitter
from triton_ext.backends.cpu.codegen.function import FunctionLowering, Value
from triton_ext.backends.cpu.codegen.liveness import Liveness
from triton_ext.backends.cpu.codegen.lltypes import (
    I8,
    I32,
    PTR,
    memory_type,
    register_type,
)
from triton_ext.backends.cpu.codegen.prefetch import add_prefetches
from triton_ext.backends.cpu.codegen.tiles import from_memory, to_memory
from triton_ext.errors import CompileError
from triton_ext.ir import dialect as tt
from triton_ext.ir import source_line


@dataclass(frozen=True)
class HostVectors:
    """What the code generator needs to know of the machine."""

    lanes: int
    """32-bit lanes of one vector register."""
    bf16_dot: bool = False
    """Has instructions that add products of pairs of bfloat16 to float32 (AVX512-BF16, for vectors of every size)."""


@dataclass(frozen=True)
class LoweredKernel:
    name: str
    llvm: ir.Module
    scratch_bytes: int
    """Memory that the caller passes for each running program."""
    sites: list[Site]
    """The checked accesses, by number."""


def lower_module(
    module: ModuleOp, host: HostVectors, *, enable_fp_fusion: bool, checked: bool = False
) -> LoweredKernel:
    """Lower the kernel (the public function) and the functions that it calls.

    checked: behind its arguments the kernel takes the table of `codegen/checks.py`, and checks its accesses.
    """
    return ModuleLowering(module, host, enable_fp_fusion, checked).lower()


class ModuleLowering:
    def __init__(self, module: ModuleOp, host: HostVectors, enable_fp_fusion: bool, checked: bool) -> None:
        self.llvm = ir.Module("kernel")
        self._host = host
        self._fp_fusion = enable_fp_fusion
        self._checked = checked
        self._sites: list[Site] = []
        self._sources = {op.sym_name.data: op for op in module.ops if isinstance(op, tt.FuncOp)}
        self._functions: dict[str, ir.Function] = {}
        self._scratch: dict[str, int] = {}
        self._strings: dict[str, ir.GlobalVariable] = {}
        self.liveness: Liveness

    def lower(self) -> LoweredKernel:
        kernels = [
            f for f in self._sources.values() if f.sym_visibility is not None and f.sym_visibility.data == "public"
        ]
        if len(kernels) != 1:
            raise CompileError(f"a module of Triton IR has one public function, this one has {len(kernels)}")
        (kernel,) = kernels
        name = kernel.sym_name.data
        pids = [I32] * 6
        function = ir.Function(self.llvm, ir.FunctionType(ir.VoidType(), [PTR, *pids, PTR]), name)
        emit = self._emitter(function)
        slots, *program, scratch = function.args
        arguments: dict[SSAValue, Value] = {}
        for i, arg in enumerate(kernel.body.blocks[0].args):
            type_ = register_type(arg.type)
            place = emit.offset(slots, 8 * i, I8)
            stored = memory_type(type_)
            value = emit.builder.load(place, typ=stored, align=8)
            arguments[arg] = emit.builder.trunc(value, type_) if stored != type_ else value
        table = None
        if self._checked:
            table = emit.load(emit.offset(slots, 8 * len(arguments), I8), PTR)
        self._lower_function(kernel, emit, arguments, table, program, scratch)
        return LoweredKernel(name, self.llvm, self._scratch[name], self._sites)

    def call(self, caller: FunctionLowering, name: str, arguments: Sequence[ir.Value], op: Operation) -> None:
        """Call a function that was not inlined; Triton passes only scalars to one, and gets only scalars."""
        if name not in self._functions:
            self._lower_callee(name)
        emit = caller.emit
        places = [caller.arena.allocate((1,), 8) for _ in op.results]
        # The callee's scratch lies behind everything that the caller may hold at this point.
        scratch = caller.arena.take_scratch(self._scratch[name])
        table = [caller.checks.table] if caller.checks is not None else []
        emit.builder.call(self._functions[name], [*arguments, *places, *table, *caller.program, scratch])
        for result, place in zip(op.results, places, strict=True):
            type_ = register_type(result.type)
            caller.define(result, from_memory(emit, emit.load(place, memory_type(type_)), type_))

    def string(self, text: str) -> ir.Value:
        """The address of a constant C string."""
        if text not in self._strings:
            data = bytearray(text.encode() + b"\0")
            constant = ir.GlobalVariable(self.llvm, ir.ArrayType(I8, len(data)), f"text.{len(self._strings)}")
            constant.initializer = ir.Constant(constant.value_type, data)
            constant.linkage = "internal"
            constant.global_constant = True
            self._strings[text] = constant
        return self._strings[text]

    def _emitter(self, function: ir.Function) -> Emitter:
        scratch = function.args[-1]
        scratch.add_attribute("noalias")
        function.attributes.add("nounwind")
        return Emitter(
            self.llvm, function, fast_fma=self._fp_fusion, lanes=self._host.lanes, bf16_dot=self._host.bf16_dot
        )

    def _lower_callee(self, name: str) -> None:
        source = self._sources[name]
        inputs = [register_type(t) for t in source.function_type.inputs]
        outputs = [PTR for _ in source.function_type.outputs]
        table_type = [PTR] if self._checked else []
        type_ = ir.FunctionType(ir.VoidType(), [*inputs, *outputs, *table_type, *[I32] * 6, PTR])
        function = ir.Function(self.llvm, type_, f"tt.{name}")
        function.linkage = "internal"
        function.attributes.add("noinline")
        self._functions[name] = function
        emit = self._emitter(function)
        arguments: dict[SSAValue, Value] = dict(
            zip(source.body.blocks[0].args, function.args[: len(inputs)], strict=True)
        )
        places = function.args[len(inputs) : len(inputs) + len(outputs)]
        table = function.args[-8] if self._checked else None
        outer = self.liveness
        self._lower_function(source, emit, arguments, table, function.args[-7:-1], function.args[-1], places)
        self.liveness = outer

    def _lower_function(
        self,
        source: tt.FuncOp,
        emit: Emitter,
        arguments: dict[SSAValue, Value],
        table: ir.Value | None,
        program: Sequence[ir.Value],
        scratch: ir.Value,
        places: Sequence[ir.Value] = (),
    ) -> None:
        if not self._checked:
            add_prefetches(source)
        self.liveness = Liveness(source)
        checks = Checks(emit, table, program, self._sites) if table is not None else None
        lowering = FunctionLowering(self, emit, arguments, program, scratch, checks)

        def finish(op: Operation) -> None:
            if op.name != "tt.return":
                raise CompileError(f"{source_line(op)}: the CPU backend does not support {op.name}")
            for value, place in zip(op.operands, places, strict=True):
                emit.store(to_memory(emit, lowering.scalar(value)), place)
            emit.builder.ret_void()

        # Allocas go to the entry block, which therefore ends before the body begins.
        start = emit.block("start")
        emit.builder.branch(start)
        emit.builder.position_at_end(start)
        lowering.lower_body(list(source.body.blocks), finish)
        self._scratch[source.sym_name.data] = lowering.arena.peak_bytes
