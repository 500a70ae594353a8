"""The Triton backend "cpu": stages ttir -> llir -> obj, each a plain function."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget, Language

import triton_ext.ir
from triton_ext.backends.cpu.codegen import checks, native
from triton_ext.backends.cpu.codegen.module import lower_module
from triton_ext.ir import read_module


@dataclass(frozen=True)
class CPUOptions:
    """Triton's options for one kernel. Most describe a GPU: they are accepted, and change nothing here.

    sanitize: check every access to memory; the default is what TRITON_EXT_SANITIZE says.
    """

    num_warps: int = 1
    num_ctas: int = 1
    num_stages: int = 1
    warp_size: int = 1
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    extern_libs: Any = None
    debug: bool = False
    sanitize_overflow: bool = True
    sanitize: bool = False
    ir_override: str | None = None
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    bf16_dot: bool = True
    """Let tl.dot of bfloat16 use the processor's own instructions, where it has them."""
    backend_name: str = "cpu"
    arch: str = ""
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0

    def hash(self) -> str:
        key = "_".join(f"{name}-{value}" for name, value in sorted(self.__dict__.items()))
        return hashlib.sha256(key.encode()).hexdigest()


def make_ttir(module: Any, metadata: dict[str, Any], options: CPUOptions) -> Any:
    """Triton's own passes over its IR, in place; block pointers and tensor descriptors become pointers."""
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # block pointers, up to Triton 3.7
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "make_ttir")
    return module


_one_at_a_time = threading.Lock()  # the reader of the IR is not made for threads


def make_llir(module: Any, metadata: dict[str, Any], options: CPUOptions) -> str:
    """Triton IR (a module or its text) to optimised LLVM IR; fills in `name` and `scratch_bytes`."""
    host = native.host_vectors()
    host = replace(host, bf16_dot=host.bf16_dot and options.bf16_dot)
    with _one_at_a_time:
        kernel = read_module(str(module))
        lowered = lower_module(kernel, host, enable_fp_fusion=options.enable_fp_fusion, checked=options.sanitize)
    metadata["name"] = lowered.name
    metadata["scratch_bytes"] = lowered.scratch_bytes
    metadata["shared"] = 0
    if options.sanitize:
        metadata["sites"] = lowered.sites
        return str(native.optimize(str(lowered.llvm), checks.FUNCTIONS))
    return str(native.optimize(str(lowered.llvm)))


def make_obj(llir: str, metadata: dict[str, Any], options: CPUOptions) -> bytes:
    """LLVM IR to the bytes of an object file for this machine."""
    import llvmlite.binding as llvm

    return native.object_code(llvm.parse_assembly(llir))


@cache
def _sources_hash() -> str:
    """Changes with the code of this backend, so that Triton's cache never returns what an older one made."""
    digest = hashlib.sha256(native.fingerprint().encode())
    for package in (Path(__file__).parent, Path(triton_ext.ir.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class CPUBackend(BaseBackend):
    """Compiles Triton kernels for the host's processor."""

    binary_ext = "obj"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return f"cpu-{_sources_hash()}"

    def get_target_name(self, options: CPUOptions) -> str:
        return "cpu"

    def parse_options(self, options: dict[str, Any]) -> CPUOptions:
        known = {k: v for k, v in options.items() if k in CPUOptions.__dataclass_fields__ and v is not None}
        if "enable_fp_fusion" not in known:
            known["enable_fp_fusion"] = _default_fp_fusion()
        known.setdefault("sanitize", os.environ.get("TRITON_EXT_SANITIZE") == "1")
        known["arch"] = str(self.target.arch)
        if isinstance(known.get("extern_libs"), dict):
            known["extern_libs"] = tuple(sorted(known["extern_libs"].items()))
        return CPUOptions(**known)

    def pack_metadata(self, metadata: Any) -> tuple[int, ...]:
        return (metadata.num_warps, metadata.num_ctas, metadata.shared)

    def get_codegen_implementation(self, options: CPUOptions) -> dict[str, Callable[..., Any]]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton_ext.backends.cpu import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context: Any) -> None:
        """Everything this backend reads is part of what Triton loads itself."""

    def add_stages(self, stages: dict[str, Any], options: CPUOptions, language: Language = Language.TRITON) -> None:
        stages["ttir"] = lambda src, metadata: make_ttir(src, metadata, options)
        stages["llir"] = lambda src, metadata: make_llir(src, metadata, options)
        stages["obj"] = lambda src, metadata: make_obj(src, metadata, options)
        if knobs.runtime.add_stages_inspection_hook is not None:
            knobs.runtime.add_stages_inspection_hook(self, stages, options, language, None)


def _default_fp_fusion() -> bool:
    """Contraction of multiply and add is on unless TRITON_DEFAULT_FP_FUSION says otherwise."""
    return os.environ.get("TRITON_DEFAULT_FP_FUSION", "1") != "0"
