"""LLVM IR to optimised object code for the processor that this process runs on."""

from __future__ import annotations

from functools import cache

import llvmlite
import llvmlite.binding as llvm

from triton_ext.backends.cpu.codegen.module import HostVectors


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def host_features() -> str:
    """The processor's features in LLVM's notation. Wide registers are preferred where they exist."""
    features = llvm.get_host_cpu_features()
    return features.flatten()


@cache
def host_vectors() -> HostVectors:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        return HostVectors(lanes=16, bf16_dot=bool(features.get("avx512bf16")))
    return HostVectors(lanes=8 if features.get("avx2") else 4)


@cache
def fingerprint() -> str:
    """What besides its source decides a kernel's machine code."""
    return f"llvmlite-{llvmlite.__version__} {llvm.get_host_cpu_name()} {host_features()}"


def target_machine() -> llvm.TargetMachine:
    _initialize()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features(), opt=3, reloc="pic", codemodel="small"
    )


def optimize(ir_text: str, library: str | None = None) -> llvm.ModuleRef:
    """Parse, add the functions of `library`, and optimise.

    The code generator has vectorised already, so LLVM's vectorisers stay off.
    """
    machine = target_machine()
    module = llvm.parse_assembly(ir_text)
    if library is not None:
        module.link_in(llvm.parse_assembly(library))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def object_code(module: llvm.ModuleRef) -> bytes:
    return target_machine().emit_object(module)
