"""How soon the kernel lets a thread run that wakes up."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call, which the C library does not have
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_SLICE_NS = 100_000  # the least that the kernel takes


def preempt_at_wakeup() -> None:
    """Ask for short time slices of this thread. A thread with shorter ones than what runs gets the core when it wakes,
    another one when those are used up: after 3 ms and more. No right is needed; no effect before Linux 6.12.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, wanted, 0)
