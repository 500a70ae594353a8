"""The watch: a thread per process that keeps the clock kernels read, and notices peers that are gone."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import Protocol

import torch

from ..backends.cpu import ranges

_TICK_S = 0.02
_STOP_S = 5.0


class Watched(Protocol):
    """A plan in use."""

    def look(self) -> None:
        """Called at every tick: end a run that waits for a peer that is gone."""


class Watch:
    """Ticks while there is something to watch. `clock_ms` counts milliseconds in memory that kernels can read."""

    def __init__(self, device: torch.device) -> None:
        self.clock_ms = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        ranges.add(self.clock_ms, "the clock of plans")
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._ends.clear()
                self._thread = threading.Thread(target=self._run, name="triton_ext watch", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        clock = self.clock_ms.numpy()
        start = time.monotonic()
        while True:
            clock[0] = int((time.monotonic() - start) * 1000) + 1
            with self._lock:
                watched = list(self._watched)
                if not watched or self._ends.is_set():
                    self._thread = None
                    return
            while watched:  # no variable of a thread that sleeps keeps a plan
                self._look_at(watched.pop())
            self._ends.wait(_TICK_S)

    def _look_at(self, watched: Watched) -> None:
        """A look that fails is reported, and is the last one at this plan; the clock goes on for all."""
        try:
            watched.look()
        except Exception as error:
            with self._lock:
                self._watched.discard(watched)
            thread = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

    def stop(self) -> None:
        """End the thread. The next add() starts another one."""
        self._ends.set()
        if thread := self._thread:
            thread.join(_STOP_S)


_watches: dict[str, Watch] = {}
_watches_lock = threading.Lock()


def watch_for(device: torch.device) -> Watch:
    """The watch of this process for plans on a kind of device."""
    with _watches_lock:
        if device.type not in _watches:
            _watches[device.type] = Watch(device)
        return _watches[device.type]


def stop_watches() -> None:
    """Before the interpreter ends: it would end their threads wherever they are, in C++ of torch, too, which aborts."""
    for watch in list(_watches.values()):
        watch.stop()


def _forget() -> None:
    global _watches_lock
    _watches.clear()  # a forked child has no watch thread
    _watches_lock = threading.Lock()  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_forget)


class Peers:
    """The processes of the other ranks of this host; None for a rank of another one."""

    def __init__(self, pids: list[int | None]) -> None:
        self.pids = pids
        self._descriptors: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if pid not in (None, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    self._descriptors[rank] = os.pidfd_open(pid or 0)

    def dead(self) -> list[int]:
        """Ranks whose process has ended."""
        poll = select.poll()  # its own: the watch asks while the owner of the plan may
        for descriptor in list(self._descriptors.values()):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        others = (rank for rank, pid in enumerate(self.pids) if pid not in (None, os.getpid()))
        gone = [rank for rank in others if rank not in self._descriptors]
        return gone + [rank for rank, descriptor in list(self._descriptors.items()) if descriptor in ready]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()
