"""Compiler passes over Triton IR: from an annotated store to remote stores and their synchronisation.

`lower` runs at the start of stage "ttir", in place, over Triton's own IR; `install` hooks it into every backend.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, passes

from ..errors import CompileError
from . import dialect, insert_sync, lower_epilogue, nvshmem, order_tiles, verify
from .kernel import Kernel, spec_of, symbol_of, where

PIPELINE = (verify, order_tiles, lower_epilogue, insert_sync)


@functools.cache
def version() -> str:
    """A hash of the passes' own code: part of the cache key of every kernel with an epilogue, and of no other."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def lower(module: ir.module, backend: Any, options: Any) -> bool:
    """Lower the markers of a module, in place. A module without markers stays as it is.

    Returns whether the kernel calls NVSHMEM. Raises CompileError, at the author's line, for a kernel that breaks a rule
    of the language.
    """
    symbols: list[tuple[str, ir.operation]] = []
    module.walk(lambda op: symbols.append((s, op)) if (s := symbol_of(op)) else None)
    if not symbols:
        return False
    if not any(symbol == dialect.STORE for symbol, _ in symbols):
        raise CompileError(f"{where(symbols[0][1])}: an epilogue without a store: peers would wait for it")
    _run(module, "inliner")
    kernel = Kernel(module, backend, options)
    calls_nvshmem = any(spec_of(op).calls_nvshmem for symbol, op in symbols if symbol == dialect.STORE)
    for step in PIPELINE:
        step.run(kernel)
    _run(module, "canonicalizer")  # removes the markers, whose results nobody uses now
    return calls_nvshmem


def _run(module: ir.module, name: str) -> None:
    """Run one of Triton's own passes."""
    manager = ir.pass_manager(module.context)
    getattr(passes.common, f"add_{name}")(manager)
    manager.run(module, name)


def install() -> None:
    """Hook `lower` into the "ttir" stage of every backend, once, and keep whatever hook was there before."""
    previous = knobs.runtime.add_stages_inspection_hook
    if getattr(previous, "lowers_epilogues", False):
        return

    def hook(
        backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
    ) -> tuple[str, str] | None:
        if backend is None:  # asked for a cache key: kernels with an epilogue carry version() themselves
            return previous() if previous else ("", "''")
        if previous:
            previous(backend, stages, options, language, capability)
        if "ttir" in stages:
            first = stages["ttir"]

            def ttir(module: ir.module, metadata: dict[str, Any]) -> ir.module:
                if lower(module, backend, options):
                    nvshmem.mark(metadata, capability)
                return first(module, metadata)

            stages["ttir"] = ttir
        if capability is not None and "llir" in stages:
            to_llvm = stages["llir"]

            def llir(module: ir.module, metadata: dict[str, Any]) -> str:
                nvshmem.link(options, metadata, capability)
                return to_llvm(module, metadata)

            stages["llir"] = llir
        return None

    hook.lowers_epilogues = True  # type: ignore[attr-defined]
    knobs.runtime.add_stages_inspection_hook = hook
