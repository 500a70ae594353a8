"""Processes started for a network, their output and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARKER = "TRITON_EXT_HOSTS"  # environment variable: the network that a process, and all it starts, belongs to
_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_STREAM_END_S = 5.0
_print_lock = threading.Lock()


def stream(process: subprocess.Popen[bytes], prefix: str) -> Callable[[], None]:
    """Print each line of the process's output, prefixed. Returns a function that waits for its end."""

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with _print_lock:
                print(prefix + line.decode(errors="replace").rstrip("\n"), flush=True)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return lambda: thread.join(_STREAM_END_S)  # a process left in the background may hold the pipe


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes that lead a group of their own, with their groups: SIGTERM, then SIGKILL."""
    running = [process for process in processes if process.poll() is None]
    _end(lambda: [process.pid for process in running if process.poll() is None], os.killpg)


def end_marked(network: str) -> None:
    """End whatever a network's processes have left running, wherever it went: SIGTERM, then SIGKILL."""
    _end(lambda: _marked(network), os.kill)


def _end(running: Callable[[], list[int]], send: Callable[[int, int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running():
            with suppress(ProcessLookupError):
                send(pid, number)
        deadline = time.monotonic() + _GRACE_S
        while running() and time.monotonic() < deadline:
            time.sleep(0.02)


def _marked(network: str) -> list[int]:
    """Processes whose environment names the network. A zombie's environment is empty."""
    entry = f"{MARKER}={network}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) != os.getpid():
            with suppress(OSError):
                if entry in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
    return found
