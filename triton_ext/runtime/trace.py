"""Recording of a process's programs and messages, where TRITON_EXT_TRACE names a directory; docs/trace.md.

Each process writes `rank-<n>.json` there at its end, or when shutdown() is called. What a process records behind a
shutdown() goes to the directory `2` there, then to `3`.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from triton import knobs

from ..backends.cpu import pool
from ..passes import abi
from ..passes.dialect import REDUCTIONS

_CAPACITY = 1 << 18  # programs and waits; 12 MiB, of which only what is used is touched
_RECORD_WORDS = 6


class Trace:
    """What a process has recorded. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self, directory: Path, rank: int, world: int, capacity: int = _CAPACITY) -> None:
        self._path = directory / f"rank-{rank}.json"
        self._about = {"rank": rank, "world": world, "pid": os.getpid()}
        self._buffer = np.zeros(2 + _RECORD_WORDS * capacity, np.int64)
        self._buffer[0] = capacity
        self.records = self._buffer.ctypes.data
        self._launches: list[list[Any]] = []
        self._messages: list[dict[str, Any]] = []
        self._words: list[tuple[int, dict[int, tuple[str, int]]]] = []
        self._pids = {rank: os.getpid()}
        self._lock = threading.Lock()
        self._local = threading.local()
        directory.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        knobs.runtime.launch_enter_hook.add(self._enter)
        knobs.runtime.launch_exit_hook.add(self._leave)
        pool.record(self)

    def end(self) -> None:
        """Stop recording."""
        pool.record(None)
        knobs.runtime.launch_enter_hook.remove(self._enter)
        knobs.runtime.launch_exit_hook.remove(self._leave)

    def stop(self) -> None:
        """Stop recording, and write the file."""
        self.end()
        taken, capacity = int(self._buffer[1]), int(self._buffer[0])
        programs = self._buffer[2:].reshape(-1, _RECORD_WORDS)[: min(taken, capacity)]
        programs = programs[programs[:, 5] != pool.native_code().bell]  # only how the proxy is woken
        is_wait = programs[:, 5] != 0
        end_ns = time.monotonic_ns()  # of a launch that raised an error
        with self._lock:
            content = self._about | {
                "pids": self._pids,
                "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
                "dropped": max(0, taken - capacity),
                "launches": [
                    {"name": name, "begin_ns": begin, "end_ns": end or end_ns} for name, begin, end in self._launches
                ],
                "programs": programs[~is_wait, :5].tolist(),
                "waits": [[*wait, *self._reason(wait[0], address)] for *wait, address in programs[is_wait].tolist()],
                "messages": self._messages,
            }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.replace(self._path)

    def add_plan(self, words: dict[int, tuple[str, int]], pids: dict[int, int]) -> None:
        """A plan is there: of each word that its kernels wait for, the cause and the rank; its ranks' processes."""
        with self._lock:
            self._words.append((len(self._launches), words))
            self._pids |= pids

    def _reason(self, launch: int, address: int) -> tuple[str, int | None]:
        """Why a program polled a word, and for which rank; memory of plans that are gone may serve again."""
        known = [words[address] for since, words in self._words if since <= launch and address in words]
        return known[-1] if known else ("other", None)

    def _enter(self, metadata: Any) -> None:
        name = str(metadata.get()["name"])
        with self._lock:
            self._local.launch = len(self._launches)
            self._launches.append([name, time.monotonic_ns(), 0])

    def _leave(self, _metadata: Any) -> None:
        if (launch := self.launch()) is not None:
            self._launches[launch][2] = time.monotonic_ns()
            self._local.launch = None

    def launch(self) -> int | None:
        """None for a launch that began before this trace did."""
        return getattr(self._local, "launch", None)

    def message(self, kind: str, begin_ns: int, **numbers: int) -> None:
        """Record what has just been sent, or has just arrived, since begin_ns. kind: "send" or "arrive"."""
        with self._lock:
            self._messages.append({"kind": kind, "begin_ns": begin_ns, "end_ns": time.monotonic_ns(), **numbers})


_trace: Trace | None = None
_started = 0  # traces of this process, and of the one that it was forked from
_lock = threading.Lock()  # of these two


def current() -> Trace | None:
    """The trace that this process records, if it does."""
    return _trace


def start_if_asked(rank: int, world: int) -> None:
    """Begin to record, if TRITON_EXT_TRACE asks for it and nothing is recorded yet."""
    global _trace, _started
    with _lock:
        if _trace is None and (asked := os.environ.get("TRITON_EXT_TRACE")):
            directory = Path(asked, str(_started + 1)) if _started else Path(asked)
            _trace = Trace(directory, rank, world)
            _trace.start()
            _started += 1


def add_plan(collective: str, table: np.ndarray, pids: dict[int, int]) -> None:
    """Tell the trace, if there is one, of a plan: its table (passes/abi.py), and its ranks in order with processes."""
    if (trace := _trace) is None:
        return
    arrival = "partial values" if collective in REDUCTIONS else "arrival"
    causes = {abi.READY_HERE: "ready", abi.ARRIVED_HERE: arrival, abi.REDUCED_HERE: "reduced values"}
    words = {}
    for peer, rank in enumerate(pids):
        for word, cause in causes.items():
            words[int(table[abi.PEERS + peer * abi.PEER_WORDS + word])] = (cause, rank)
    trace.add_plan(words, pids)


def stop() -> None:
    """End the recording, if there is one, and write it."""
    global _trace
    with _lock:
        trace, _trace = _trace, None
        if trace is not None:
            trace.stop()


def _forget() -> None:
    """In a forked child: the file is the parent's."""
    global _trace, _lock
    _lock = threading.Lock()  # a thread of the parent may hold it
    if _trace is not None:
        _trace.end()
        _trace = None


atexit.register(stop)
os.register_at_fork(after_in_child=_forget)
