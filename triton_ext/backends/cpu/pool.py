"""Runs a grid: programs are taken in ascending order from a shared counter, by the caller and by helper threads.

The caller runs programs itself and waits only for helpers that are inside a program of this very launch. So launches
never wait for one another's programs, and programs of one launch may wait, through memory, for those of another.

A launch can be recorded, if somebody gives it a ring: when each program ran, and which word in memory it polled how
long. The loop that records is another one, so a launch that is not recorded costs nothing more.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
import torch

from ...errors import LaunchError
from .codegen import native

# What kernels may call, and the loops that run programs; they return when the counter is used up.
#
# In the recorded loop, a thread's %tx_thread says where its waits go: kernels do not carry it, so it is the value of a
# pthread key. A wait begins with iteration 0 of its loop; each further one moves its end.
_NATIVE = r"""
@tx_assert_message = global ptr null

declare i32 @sched_yield()
declare i32 @nanosleep(ptr, ptr)
declare i32 @clock_gettime(i32, ptr)
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare void @{pause}({hint_type})

@pause = internal constant {{ i64, i64 }} {{ i64 0, i64 50000 }}

%tx_thread = type {{ ptr, i64, i64, i64, ptr }} ; ring, launch, thread, program, the wait that goes on or null
%tx_ring = type {{ i64, i64, [6 x i64] }} ; events offered, capacity, up to a cache line
%tx_event = type {{ i64, i64, i64, i64, i64, i64 }} ; begin, end, launch, thread, program, address

define void @tx_relax(i64 %iteration, ptr %address) {{
  %thread = call ptr @pthread_getspecific(i32 {key})
  %is_recorded = icmp ne ptr %thread, null
  br i1 %is_recorded, label %recorded, label %relax
recorded:
  %is_first = icmp eq i64 %iteration, 0
  br i1 %is_first, label %begin, label %relax
begin:
  %begin_ns = call i64 @tx_nanoseconds()
  %new = call ptr @event(ptr %thread, i64 %begin_ns, i64 %begin_ns, ptr %address)
  %current = getelementptr %tx_thread, ptr %thread, i32 0, i32 4
  store ptr %new, ptr %current
  br label %relax
relax:
  call void @relax(i64 %iteration)
  br i1 %is_recorded, label %end, label %done
end:
  %place = getelementptr %tx_thread, ptr %thread, i32 0, i32 4
  %event = load ptr, ptr %place
  %is_kept = icmp ne ptr %event, null
  br i1 %is_kept, label %keep, label %done
keep:
  %end_ns = call i64 @tx_nanoseconds()
  %end_place = getelementptr %tx_event, ptr %event, i32 0, i32 1
  store i64 %end_ns, ptr %end_place
  br label %done
done:
  ret void
}}

define internal ptr @event(ptr %thread, i64 %begin_ns, i64 %end_ns, ptr %address) {{
  %state = load %tx_thread, ptr %thread
  %ring = extractvalue %tx_thread %state, 0
  %number = atomicrmw add ptr %ring, i64 1 monotonic
  %capacity_place = getelementptr %tx_ring, ptr %ring, i32 0, i32 1
  %capacity = load i64, ptr %capacity_place
  %fits = icmp ult i64 %number, %capacity
  br i1 %fits, label %keep, label %drop
drop:
  ret ptr null
keep:
  %launch = extractvalue %tx_thread %state, 1
  %id = extractvalue %tx_thread %state, 2
  %program = extractvalue %tx_thread %state, 3
  %word = ptrtoint ptr %address to i64
  %e0 = insertvalue %tx_event undef, i64 %begin_ns, 0
  %e1 = insertvalue %tx_event %e0, i64 %end_ns, 1
  %e2 = insertvalue %tx_event %e1, i64 %launch, 2
  %e3 = insertvalue %tx_event %e2, i64 %id, 3
  %e4 = insertvalue %tx_event %e3, i64 %program, 4
  %e5 = insertvalue %tx_event %e4, i64 %word, 5
  %events = getelementptr %tx_ring, ptr %ring, i32 1
  %place = getelementptr %tx_event, ptr %events, i64 %number
  store %tx_event %e5, ptr %place, align 8
  ret ptr %place
}}

define internal void @relax(i64 %iteration) {{
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
  br label %take
done:
  ret void
}}

define void @tx_work_recorded(ptr %kernel, ptr %args, i32 %gx, i32 %gy, i32 %gz, ptr %counter, ptr %scratch,
                              ptr %ring, i64 %launch, i64 %id) {{
  %thread = alloca %tx_thread
  %t0 = insertvalue %tx_thread undef, ptr %ring, 0
  %t1 = insertvalue %tx_thread %t0, i64 %launch, 1
  %t2 = insertvalue %tx_thread %t1, i64 %id, 2
  store %tx_thread %t2, ptr %thread
  %program_place = getelementptr %tx_thread, ptr %thread, i32 0, i32 3
  %ignored = call i32 @pthread_setspecific(i32 {key}, ptr %thread)
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
  store i64 %program, ptr %program_place
  %begin_ns = call i64 @tx_nanoseconds()
  call void %kernel(ptr %args, i32 %x32, i32 %y32, i32 %z32, i32 %gx, i32 %gy, i32 %gz, ptr %scratch)
  %end_ns = call i64 @tx_nanoseconds()
  %event = call ptr @event(ptr %thread, i64 %begin_ns, i64 %end_ns, ptr null)
  br label %take
done:
  %ignored2 = call i32 @pthread_setspecific(i32 {key}, ptr null)
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
        key = ctypes.c_uint32()
        if code := ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None):
            raise LaunchError(f"pthread_key_create failed: {os.strerror(code)}")
        text = _NATIVE.format(
            pause=pause, hint=hint, hint_type=hint.split(" ")[0], monotonic=time.CLOCK_MONOTONIC, key=key.value
        )
        module = llvm.parse_assembly(text)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        for name in ("tx_relax", "tx_nanoseconds", "tx_assert_fail"):
            llvm.add_symbol(name, self._engine.get_function_address(name))
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        work = [None, pointer, pointer, i32, i32, i32, pointer, pointer]
        recorded = [*work, pointer, i64, i64]
        # These release the GIL.
        self.work = ctypes.CFUNCTYPE(*work)(self._engine.get_function_address("tx_work"))
        self.work_recorded = ctypes.CFUNCTYPE(*recorded)(self._engine.get_function_address("tx_work_recorded"))
        self.assert_message = ctypes.c_char_p.from_address(self._engine.get_global_value_address("tx_assert_message"))

    def raise_failed_assert(self) -> None:
        if self.assert_message.value is not None:
            message = self.assert_message.value.decode(errors="replace")
            self.assert_message.value = None
            raise LaunchError(f"device_assert failed: {message}")


@cache
def native_code() -> _Native:
    return _Native()


class Ring:
    """Memory for the events of recorded launches. One that is full keeps what it has, and counts the rest."""

    #: Columns of `events`. address: 0 for a program that ran from begin to end (CLOCK_MONOTONIC); otherwise the program
    #: polled the word there. thread: as the system numbers them.
    COLUMNS = ("begin_ns", "end_ns", "launch", "thread", "program", "address")
    _HEAD = 8

    def __init__(self, capacity: int) -> None:
        self._words = np.zeros(self._HEAD + capacity * len(self.COLUMNS), np.int64)
        self._words[self._HEAD :] = -1  # touched now, so that no program pays for a page fault
        self._words[1] = capacity
        self.address = self._words.ctypes.data

    def events(self) -> np.ndarray:
        """int64[events, COLUMNS], in no order."""
        count = min(int(self._words[0]), int(self._words[1]))
        table = self._words[self._HEAD :].reshape(-1, len(self.COLUMNS))[:count]
        return table[table[:, 0] >= 0]  # one that is being written may be empty

    @property
    def dropped(self) -> int:
        return max(0, int(self._words[0] - self._words[1]))


class Recording(NamedTuple):
    """Where the events of one launch go, and its number there."""

    ring: Ring
    launch: int


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


def run_grid(
    kernel: int, args: bytes, grid: tuple[int, int, int], scratch_bytes: int, recording: Recording | None = None
) -> None:
    """Run all programs of a grid and return when they are done.

    kernel: address of the kernel's function. args: its packed arguments, 8 bytes each. Python's signal handlers run
    when it returns: a Ctrl-C takes effect after the programs have ended.
    """
    code = native_code()
    counter = ctypes.c_int64(0)
    place = ctypes.addressof(counter)

    def work() -> None:
        scratch = _scratch.of(scratch_bytes)
        if recording is None:
            code.work(kernel, args, *grid, place, scratch)
        else:
            where = recording.ring.address, recording.launch, threading.get_native_id()
            code.work_recorded(kernel, args, *grid, place, scratch, *where)

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
