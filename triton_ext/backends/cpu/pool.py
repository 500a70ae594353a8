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
from typing import Protocol

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
@key = global i32 0

declare i32 @sched_yield()
declare i32 @nanosleep(ptr, ptr)
declare i64 @write(i32, ptr, i64)
declare i32 @pthread_key_create(ptr, ptr)
declare i32 @pthread_setspecific(i32, ptr)
declare ptr @pthread_getspecific(i32)
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

; What is recorded: {{ i64 capacity, i64 taken, records }}. The address of a program's own record is 0; that of a wait
; is the word that the program polled. A thread that records has %thread, as the value of a key: kernels do not pass it.
; A wait's record is made when its loop goes round for the first time, and each further round moves its end.
%record = type {{ i64, i64, i64, i64, i64, i64 }} ; launch, program, thread, begin, end, address
%thread = type {{ ptr, i64, i64, i64, ptr }} ; records, launch, program, thread, the wait's record or null

define internal ptr @take_record(ptr %of, i64 %begin, i64 %end, ptr %address) {{
  %state = load %thread, ptr %of
  %records = extractvalue %thread %state, 0
  %taken_at = getelementptr i64, ptr %records, i32 1
  %place = atomicrmw add ptr %taken_at, i64 1 monotonic
  %capacity = load i64, ptr %records
  %fits = icmp ult i64 %place, %capacity
  br i1 %fits, label %keep, label %drop
drop:
  ret ptr null
keep:
  %launch = extractvalue %thread %state, 1
  %program = extractvalue %thread %state, 2
  %number = extractvalue %thread %state, 3
  %word = ptrtoint ptr %address to i64
  %r0 = insertvalue %record undef, i64 %launch, 0
  %r1 = insertvalue %record %r0, i64 %program, 1
  %r2 = insertvalue %record %r1, i64 %number, 2
  %r3 = insertvalue %record %r2, i64 %begin, 3
  %r4 = insertvalue %record %r3, i64 %end, 4
  %r5 = insertvalue %record %r4, i64 %word, 5
  %first = getelementptr i64, ptr %records, i32 2
  %at = getelementptr %record, ptr %first, i64 %place
  store %record %r5, ptr %at, align 8
  ret ptr %at
}}

define internal void @begin_wait(ptr %of, ptr %address) {{
  %now = call i64 @tx_nanoseconds()
  %record = call ptr @take_record(ptr %of, i64 %now, i64 %now, ptr %address)
  %wait_at = getelementptr %thread, ptr %of, i32 0, i32 4
  store ptr %record, ptr %wait_at
  ret void
}}

define internal void @prolong_wait(ptr %of) {{
  %wait_at = getelementptr %thread, ptr %of, i32 0, i32 4
  %record = load ptr, ptr %wait_at
  %dropped = icmp eq ptr %record, null
  br i1 %dropped, label %done, label %move
move:
  %now = call i64 @tx_nanoseconds()
  %end_at = getelementptr %record, ptr %record, i32 0, i32 4
  store i64 %now, ptr %end_at
  br label %done
done:
  ret void
}}

define i32 @tx_make_key() {{
  %status = call i32 @pthread_key_create(ptr @key, ptr null)
  ret i32 %status
}}

define void @tx_work_recorded(ptr %kernel, ptr %args, i32 %gx, i32 %gy, i32 %gz, ptr %counter, ptr %scratch,
                              ptr %records, i64 %launch, i64 %number) {{
  %state = alloca %thread
  %s0 = insertvalue %thread undef, ptr %records, 0
  %s1 = insertvalue %thread %s0, i64 %launch, 1
  %s2 = insertvalue %thread %s1, i64 %number, 3
  store %thread %s2, ptr %state
  %program_at = getelementptr %thread, ptr %state, i32 0, i32 2
  %key = load i32, ptr @key
  %set = call i32 @pthread_setspecific(i32 %key, ptr %state)
  %xy = mul i32 %gx, %gy
  %x64 = zext i32 %xy to i64
  %z64 = zext i32 %gz to i64
  %gx64 = zext i32 %gx to i64
  %total = mul i64 %x64, %z64
  br label %take
take:
  %program = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp ult i64 %program, %total
  br i1 %more, label %run, label %done
run:
  %z = udiv i64 %program, %x64
  %in_plane = urem i64 %program, %x64
  %y = udiv i64 %in_plane, %gx64
  %x = urem i64 %in_plane, %gx64
  %x32 = trunc i64 %x to i32
  %y32 = trunc i64 %y to i32
  %z32 = trunc i64 %z to i32
  store i64 %program, ptr %program_at
  %begin = call i64 @tx_nanoseconds()
  call void %kernel(ptr %args, i32 %x32, i32 %y32, i32 %z32, i32 %gx, i32 %gy, i32 %gz, ptr %scratch)
  %end = call i64 @tx_nanoseconds()
  %record = call ptr @take_record(ptr %state, i64 %begin, i64 %end, ptr null)
  call void @ring()
  br label %take
done:
  %unset = call i32 @pthread_setspecific(i32 %key, ptr null)
  ret void
}}

define void @tx_relax(i64 %iteration, ptr %address) {{
  call void @ring()
  %key = load i32, ptr @key
  %thread = call ptr @pthread_getspecific(i32 %key)
  %is_recorded = icmp ne ptr %thread, null
  %is_first = icmp eq i64 %iteration, 0
  %begins = and i1 %is_recorded, %is_first
  br i1 %begins, label %begin, label %relax
begin:
  call void @begin_wait(ptr %thread, ptr %address)
  br label %relax
relax:
  call void @pass_time(i64 %iteration)
  br i1 %is_recorded, label %prolong, label %done
prolong:
  call void @prolong_wait(ptr %thread)
  br label %done
done:
  ret void
}}

define internal void @pass_time(i64 %iteration) {{
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
        recorded = ctypes.CFUNCTYPE(
            None, pointer, pointer, i32, i32, i32, pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int64
        )
        self.work_recorded = recorded(self._engine.get_function_address("tx_work_recorded"))
        if code := ctypes.CFUNCTYPE(i32)(self._engine.get_function_address("tx_make_key"))():
            raise LaunchError(f"this process has no pthread key left for triton_ext: {os.strerror(code)}")
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


class Recorder(Protocol):
    """Who wants to know when programs began and ended, and when they waited for which word in memory.

    A record: launch, program, thread, begin and end in ns, and 0, or the address that the program polled meanwhile.
    """

    records: int  #: address of int64[2 + 6 * capacity]: capacity, records taken (more than fit, perhaps), records

    def launch(self) -> int | None:
        """The number of the launch that the calling thread is about to make; None if it is not to be recorded."""


_recorder: Recorder | None = None


def record(recorder: Recorder | None) -> None:
    """Let a recorder have all programs and waits from now on."""
    global _recorder
    _recorder = recorder


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

    recorder = _recorder
    launch = recorder.launch() if recorder else None

    def work() -> None:
        if recorder and launch is not None:
            scratch, thread = _scratch.of(scratch_bytes), threading.get_native_id()
            code.work_recorded(kernel, args, *grid, place, scratch, recorder.records, launch, thread)
        else:
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
