"""Runs a grid: programs are taken in ascending order from a shared counter, by the caller and by helper threads.

The caller runs programs itself and waits only for helpers that are inside a program of this very launch. So launches
never wait for one another's programs, and programs of one launch may wait, through memory, for those of another.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding as llvm
import torch

from ...errors import LaunchError
from .codegen import native

# What kernels may call, and the loop that runs programs. `work` returns when the counter is used up. A program that
# makes tx_bell non-zero wakes, when it ends or waits, who sleeps on the eventfd.
_NATIVE = r"""
@tx_assert_message = global ptr null
@tx_bell = global i64 0
@tx_bell_eventfd = global i32 -1
@one = internal constant i64 1

declare i32 @sched_yield()
declare i32 @nanosleep(ptr, ptr)
declare i64 @write(i32, ptr, i64)
declare i32 @clock_gettime(i32, ptr)
declare void @{pause}({hint_type})

@pause = internal constant {{ i64, i64 }} {{ i64 0, i64 50000 }}

define internal void @ring() {{
  %bell = load atomic i64, ptr @tx_bell monotonic, align 8
  %silent = icmp eq i64 %bell, 0
  br i1 %silent, label %done, label %take
take:
  %taken = atomicrmw xchg ptr @tx_bell, i64 0 acq_rel
  %missed = icmp eq i64 %taken, 0
  br i1 %missed, label %done, label %call
call:
  %eventfd = load i32, ptr @tx_bell_eventfd
  %ignored = call i64 @write(i32 %eventfd, ptr @one, i64 8)
  br label %done
done:
  ret void
}}

define void @tx_relax(i64 %iteration) {{
  call void @ring()
  %spins = icmp ult i64 %iteration, 64
  br i1 %spins, label %spin, label %wait
spin:
  call void @{pause}({hint})
  ret void
wait:
  %yields = icmp ult i64 %iteration, 1024
  br i1 %yields, label %yield, label %sleep
yield:
  %ignored = call i32 @sched_yield()
  ret void
sleep:
  %ignored2 = call i32 @nanosleep(ptr @pause, ptr null)
  ret void
}}

define i64 @tx_nanoseconds() {{
  %time = alloca {{ i64, i64 }}
  %ignored = call i32 @clock_gettime(i32 {monotonic}, ptr %time)
  %seconds = load i64, ptr %time
  %place = getelementptr {{ i64, i64 }}, ptr %time, i32 0, i32 1
  %rest = load i64, ptr %place
  %whole = mul i64 %seconds, 1000000000
  %sum = add i64 %whole, %rest
  ret i64 %sum
}}

define void @tx_fence() {{
  fence seq_cst
  ret void
}}

define void @tx_assert_fail(ptr %message) {{
  %first = cmpxchg ptr @tx_assert_message, ptr null, ptr %message seq_cst seq_cst
  ret void
}}

define void @tx_work(ptr %kernel, ptr %args, i32 %gx, i32 %gy, i32 %gz, ptr %counter, ptr %scratch) {{
  %xy = mul i32 %gx, %gy
  %x64 = zext i32 %xy to i64
  %z64 = zext i32 %gz to i64
  %total = mul i64 %x64, %z64
  br label %take
take:
  %program = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp ult i64 %program, %total
  br i1 %more, label %run, label %done
run:
  %z = udiv i64 %program, %x64
  %in_plane = urem i64 %program, %x64
  %gx64 = zext i32 %gx to i64
  %y = udiv i64 %in_plane, %gx64
  %x = urem i64 %in_plane, %gx64
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  call void %kernel(ptr %args, i32 %x32, i32 %y32, i32 %z32, i32 %gx, i32 %gy, i32 %gz, ptr %scratch)
  call void @ring()
  br label %take
done:
  ret void
}}
"""

# What tells a core that this is a spin loop.
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ""), "aarch64": ("llvm.aarch64.hint", "i32 1")}


class _Native:
    """The machine code of `_NATIVE`."""

    def __init__(self) -> None:
        machine = native.target_machine()
        pause, hint = _PAUSE.get(os.uname().machine, ("llvm.donothing", ""))
        text = _NATIVE.format(pause=pause, hint=hint, hint_type=hint.split(" ")[0], monotonic=time.CLOCK_MONOTONIC)
        module = llvm.parse_assembly(text)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        for name in ("tx_relax", "tx_nanoseconds", "tx_assert_fail"):
            llvm.add_symbol(name, self._engine.get_function_address(name))
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        work = ctypes.CFUNCTYPE(None, pointer, pointer, i32, i32, i32, pointer, pointer)  # releases the GIL
        self.work = work(self._engine.get_function_address("tx_work"))
        self.bell = self._engine.get_global_value_address("tx_bell")
        self._bell_eventfd = ctypes.c_int32.from_address(self._engine.get_global_value_address("tx_bell_eventfd"))
        self.fence = ctypes.CFUNCTYPE(None)(self._engine.get_function_address("tx_fence"))
        self.assert_message = ctypes.c_char_p.from_address(self._engine.get_global_value_address("tx_assert_message"))

    def wake_by_bell(self, eventfd: int) -> None:
        """Let programs that ring the bell wake who sleeps on an eventfd."""
        self._bell_eventfd.value = eventfd

    def raise_failed_assert(self) -> None:
        if self.assert_message.value is not None:
            message = self.assert_message.value.decode(errors="replace")
            self.assert_message.value = None
            raise LaunchError(f"device_assert failed: {message}")


_native: _Native | None = None
_native_lock = threading.Lock()


def native_code() -> _Native:
    """One for the process: kernels keep addresses in it."""
    global _native
    if _native is None:
        with _native_lock:
            if _native is None:
                _native = _Native()
    return _native


class _Scratch(threading.local):
    """Each thread's memory for the tiles of a program, aligned to 64 bytes; it grows and stays."""

    def __init__(self) -> None:
        self.size = -1
        self.address = 0

    def of(self, size: int) -> int:
        if size > self.size:
            self._buffer = ctypes.create_string_buffer(size + 64)
            self.address = -(-ctypes.addressof(self._buffer) // 64) * 64
            self.size = size
        return self.address


_scratch = _Scratch()
_helpers: ThreadPoolExecutor | None = None
_helpers_lock = threading.Lock()


def _forget_helpers() -> None:
    global _helpers, _helpers_lock
    _helpers = None  # a forked child has no threads but its own
    _helpers_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_helpers)


def _helper_threads() -> ThreadPoolExecutor:
    global _helpers
    with _helpers_lock:
        if _helpers is None:
            _helpers = ThreadPoolExecutor(os.cpu_count() or 1, "triton_ext program")
        return _helpers


def number_of_threads() -> int:
    """Threads of a launch: TRITON_EXT_NUM_THREADS, or as many as torch uses (OMP_NUM_THREADS; 1 under torchrun)."""
    text = os.environ.get("TRITON_EXT_NUM_THREADS")
    if text is None:
        return torch.get_num_threads()
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"TRITON_EXT_NUM_THREADS={text!r} is not a positive number")
    return int(text)


def run_grid(kernel: int, args: bytes, grid: tuple[int, int, int], scratch_bytes: int) -> None:
    """Run all programs of a grid and return when they are done.

    kernel: address of the kernel's function. args: its packed arguments, 8 bytes each. Python's signal handlers run
    when it returns: a Ctrl-C takes effect after the programs have ended.
    """
    code = native_code()
    counter = ctypes.c_int64(0)
    place = ctypes.addressof(counter)

    def work() -> None:
        code.work(kernel, args, *grid, place, _scratch.of(scratch_bytes))

    programs = grid[0] * grid[1] * grid[2]
    helpers = min(number_of_threads(), programs) - 1 if programs > 1 else 0
    if helpers > 0:
        futures = [_helper_threads().submit(work) for _ in range(helpers)]
        work()
        for future in futures:
            if not future.cancel():  # one that has not begun finds nothing left to do
                future.result()
    elif programs > 0:
        work()
    if code.assert_message.value is not None:
        code.raise_failed_assert()
