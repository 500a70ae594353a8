"""Ahead-of-time compilation: a kernel and the types of its arguments, for a target that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from .errors import CompileError
from .passes import dialect, nvshmem
from .runtime.collectives import signature

TARGETS = ("cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950", "cpu")


def target_of(name: str) -> GPUTarget:
    """cuda:<compute capability>, hip:<architecture>, or cpu."""
    backend, _, arch = name.partition(":")
    if backend == "cuda" and arch.isdecimal():
        return GPUTarget("cuda", int(arch), 32)
    if backend == "hip" and arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    if name == "cpu":
        return GPUTarget("cpu", "", 1)
    raise CompileError(f"target {name!r} is unknown; known are for instance {', '.join(TARGETS)}")


def compile_for(kernel: JITFunction, arguments: Mapping[str, Any], target: str) -> Any:
    """Compile a kernel, and return Triton's compiled kernel: `.asm` has every stage.

    arguments: for each parameter, its type as Triton writes it ("*fp32", "i32", "*bf16:16" for a multiple of 16), a
        plan as "collective:dimensions:dtype" ("all_to_all:2:fp32"), ":nvshmem" behind it if the plan has peers that
        NVSHMEM reaches, or the value of a constexpr.
    Raises CompileError for a parameter without one, and for what a kernel does wrong.
    """
    kinds: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    unknown = set(arguments) - set(kernel.arg_names)
    missing = [p.name for p in kernel.params if p.name not in arguments and not (p.is_constexpr and p.has_default)]
    if unknown or missing:
        problems = [f"no type for {', '.join(missing)}"] if missing else []
        problems += [f"no parameter {', '.join(sorted(unknown))}"] if unknown else []
        raise CompileError(
            f"{kernel.__name__}: {'; '.join(problems)} (a type is *fp32 or i32, a plan all_to_all:2:fp32; a constexpr "
            "needs its value)"
        )
    for index, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name, parameter.default if parameter.has_default else None)
        if parameter.is_constexpr:
            kinds[parameter.name], constants[(index,)] = "constexpr", value
        elif str(value).split(":")[0] in dialect.COLLECTIVES:
            collective, ndim, dtype, transport = _plan(str(value))
            kinds[parameter.name], constants[(index, 1)] = signature(collective, ndim, dtype, transport=transport)
        else:
            kind, _, multiple = str(value).partition(":")
            kinds[parameter.name] = kind
            if multiple:
                attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target_of(target), options={"enable_fp_fusion": True})


def _plan(text: str) -> tuple[str, int, str, str]:
    collective, ndim, dtype, transport, *rest = [*text.split(":"), *["", "", ""][text.count(":") :]]
    ndim, dtype = ndim or "2", dtype or "fp32"
    if rest or not ndim.isdecimal() or dtype not in dialect.DTYPES or transport not in ("", nvshmem.LIBRARY):
        raise CompileError(
            f"plan {text!r}: write it as collective:dimensions:dtype, for instance all_to_all:2:fp32, or "
            "all_to_all:2:fp32:nvshmem with peers that NVSHMEM reaches"
        )
    return collective, int(ndim), dtype, nvshmem.transport() if transport else ""


def write_stages(kernel: JITFunction, arguments: Mapping[str, Any], target: str, directory: Path) -> list[Path]:
    """Compile, and write every stage to directory/kernel.target.stage. Returns the paths, in the compiler's order."""
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True  # a cached kernel has only some of its stages
        stages = compile_for(kernel, arguments, target).asm
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for stage, code in stages.items():
        path = directory / f"{kernel.__name__}.{target.replace(':', '-')}.{stage}"
        path.write_bytes(code if isinstance(code, bytes) else str(code).encode())
        paths.append(path)
    return paths
