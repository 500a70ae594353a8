"""Launches compiled kernels on the CPU. A launch returns when its grid is complete."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ...errors import LaunchError
from . import abi, pool, sanitizer
from .codegen import native

_ELF_SYMBOL_TABLE = 2


class _Code:
    """A kernel's code in memory, until the last reference to this goes."""

    def __init__(self, name: str, binary: bytes) -> None:
        pool.native_code()  # defines the symbols that kernels use
        for symbol in _undefined_symbols(binary):  # the linker would take the address 0
            if llvm.address_of_symbol(symbol) is None:
                raise LaunchError(f"kernel {name} calls {symbol}, which this process does not have")
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), native.target_machine())
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(binary))
        self.engine.finalize_object()
        self.address = self.engine.get_function_address(name)


def _undefined_symbols(binary: bytes) -> list[str]:
    """Names that an ELF object file leaves to the linker."""
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count = struct.unpack_from("<HH", binary, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", binary, table + i * size) for i in range(count)]
    names: list[str] = []
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == _ELF_SYMBOL_TABLE:
            strings = sections[link][4]
            for place in range(start, start + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", binary, place)
                if name and section == 0:
                    names.append(binary[strings + name : binary.index(0, strings + name)].decode())
    return names


class CPUUtils:
    """Loading of binaries, as Triton's CompiledKernel asks for it."""

    def __init__(self) -> None:
        # Threads that launch a kernel for the first time at once all load it, and only the last one's module is kept:
        # it has to be the one that the others are running.
        self._loaded: weakref.WeakValueDictionary[tuple[str, bytes], _Code] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[_Code, int, int, int, int]:
        """Object code -> (module to keep, address of the kernel, registers, spills, threads of a program)."""
        key = name, hashlib.sha256(binary).digest()
        with self._lock:
            code = self._loaded.get(key)
            if code is None:
                code = self._loaded[key] = _Code(name, binary)
        return code, code.address, 0, 0, 1 << 20

    def unload_module(self, module: Any) -> None:
        """The code goes with the last reference to `module`."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": pool.number_of_threads(), "warpSize": 1}


class CPULauncher:
    """Called by Triton for each launch of one compiled kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        signature = list(src.signature.values())
        names = [name if isinstance(name, str) else f"argument {name}" for name in src.signature]
        self.pack = abi.packer(names, signature)
        self.scratch_bytes = metadata.scratch_bytes
        self.sanitizer = None
        if metadata.sanitize:
            self.sanitizer = sanitizer.Sanitizer(metadata.name, names, signature, metadata.sites)

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *args: Any,
    ) -> None:
        packed = self.pack(args)
        if enter_hook is not None:
            enter_hook(launch_metadata)
        grid = grid_x, grid_y, grid_z
        if self.sanitizer is None:
            pool.run_grid(function, packed, grid, self.scratch_bytes)
        else:
            self._run_checked(self.sanitizer.launch(args, grid), function, packed, grid)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _run_checked(self, launch: sanitizer.Launch, function: int, packed: bytes, grid: tuple[int, int, int]) -> None:
        try:
            pool.run_grid(function, packed + launch.packed, grid, self.scratch_bytes)
        finally:  # an assertion that failed may have seen what an access outside left behind
            launch.check()


class CPUDriver(DriverBase):
    """Active where no other backend's device is, or where TRITON_DEFAULT_BACKEND=cpu asks for it."""

    launcher_cls = CPULauncher

    def __init__(self) -> None:
        self.utils = CPUUtils()

    @classmethod
    def is_active(cls) -> bool:
        from triton.backends import backends

        if os.environ.get("TRITON_DEFAULT_BACKEND") == "cpu":
            return True
        return not any(backend.driver.is_active() for backend in backends.values() if backend.driver is not cls)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", platform.machine(), 1)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("kernels on a CPU are launched without generated C++")

    def get_benchmarker(self) -> Callable[..., Any]:
        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(64 << 20, dtype=torch.int8)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Sequence[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """Time of fn() in ms, as triton.testing.do_bench gives it; warmup and rep are in ms."""
    deadline = time.perf_counter() + warmup / 1e3
    fn()
    while time.perf_counter() < deadline:
        fn()
    times: list[float] = []
    deadline = time.perf_counter() + rep / 1e3
    while not times or time.perf_counter() < deadline:
        for tensor in grad_to_none or ():
            tensor.grad = None
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    if quantiles is not None:
        found = torch.quantile(torch.tensor(times), torch.tensor(list(quantiles), dtype=torch.float)).tolist()
        return found[0] if len(found) == 1 else found
    if return_mode == "all":
        return times
    reduce: dict[str, Callable[[list[float]], float]] = {
        "min": min, "max": max, "mean": statistics.fmean, "median": statistics.median,
    }  # fmt: skip
    return reduce[return_mode](times)
