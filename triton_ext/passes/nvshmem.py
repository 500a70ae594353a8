"""NVSHMEM from the device: the calls that the passes insert for peers whose memory no store reaches.

The functions take addresses as int64, as seen by this rank: an object at a peer is named by this rank's own address of
it, and by the peer's processing element (PE). All calls are those of one thread, and return at once.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

from ..errors import CompileError

LIBRARY = "nvshmem"  # the name of the device library among the extern_libs of a kernel that calls it

_IS_CALLED = "calls_nvshmem"  # in the metadata of such a kernel while it is compiled

# Of NVSHMEM's headers
SIGNAL_ADD = tl.constexpr(10)
CMP_GE = tl.constexpr(5)


@tl.core.builtin
def _call(symbol: Any, result: Any, args: Any, _semantic: Any = None) -> tl.tensor:
    """Call a device function with scalars. NVSHMEM's pointers are int64 here: that is what Triton can pass."""
    builder = _semantic.builder
    handles = [_semantic.to_tensor(arg).handle for arg in args]
    symbol, result = tl.core._unwrap_if_constexpr(symbol), tl.core._unwrap_if_constexpr(result)
    return tl.tensor(builder.create_extern_elementwise("", "", symbol, handles, result.to_ir(builder), False), result)


@tl.core.builtin
def _thread(_semantic: Any = None) -> tl.tensor:
    """The thread of the program: a call is made by all of them, unless a branch leaves one."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1, _semantic=_semantic
    )


@triton.jit
def put_signal(destination, source, nbytes, signal, count, pe):
    """Start to copy nbytes from here to a PE; `count` is added to the PE's word `signal` when they are there."""
    if _thread() == 0:
        _call("nvshmem_putmem_signal_nbi", tl.int32, (destination, source, nbytes, signal, count, SIGNAL_ADD, pe))


@triton.jit
def add_signal(signal, count, pe):
    """Start to add `count` to a PE's word `signal`."""
    if _thread() == 0:
        _call("nvshmemx_signal_op", tl.int32, (signal, count, SIGNAL_ADD, pe))


@triton.jit
def receive(signal, count):
    """What came before this rank's word `signal` reached `count`, which it has, is in memory when this returns. (A wait
    that has nothing to wait for: NVSHMEM's waits know what the platform needs, our acquire load does not.)
    """
    if _thread() == 0:
        _call("nvshmem_signal_wait_until", tl.int64, (signal, CMP_GE, count))


def library(capability: int) -> Path | None:
    """NVSHMEM's device functions as LLVM bitcode, for a compute capability (90, 100); None if not installed."""
    try:
        package = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    for place in package.submodule_search_locations or () if package else ():
        directory = Path(place) / "lib"
        known = {int(path.stem.rpartition("_")[2]): path for path in directory.glob("libnvshmem_device_sm_*.bc")}
        if fitting := [arch for arch in known if arch <= capability]:
            return known[max(fitting)]
        if (only := directory / "libnvshmem_device.bc").exists():  # releases that have one for all
            return only
    return None


def transport() -> str:
    """What a plan's Spec says of peers that NVSHMEM reaches: the version is part of a kernel's cache key."""
    for name in ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"):
        try:
            return f"nvshmem-{metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "nvshmem"


def mark(about: dict[str, Any], capability: int | None) -> None:
    """Note in the metadata of a kernel that it calls NVSHMEM. Raises CompileError if it is not compiled for CUDA."""
    if capability is None:
        raise CompileError("a plan that uses NVSHMEM is for CUDA; this kernel is compiled for another target")
    about[_IS_CALLED] = True


def link(options: Any, about: dict[str, Any], capability: int) -> None:
    """Have a kernel that was marked linked with NVSHMEM's device functions. Raises CompileError without them."""
    if not about.get(_IS_CALLED):
        return
    path = library(capability)
    if path is None:
        raise CompileError(
            "this kernel's plan uses NVSHMEM, whose device library is not installed: pip install nvidia-nvshmem-cu12 "
            "(or -cu13)"
        )
    # The options of this one compilation. Their hash was taken: the library's version is in the plan's Spec instead.
    object.__setattr__(options, "extern_libs", (*options.extern_libs, (LIBRARY, str(path))))
    about["extern_libs"] = options.extern_libs
