"""The proxy: a thread per process that moves what its plans send to other hosts, and sleeps otherwise."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time

from ..backends.cpu.pool import native_code
from . import scheduling
from .shipment import Traffic

_BUSY_S = 1e-3  # how often what is to end is looked at
_STOP_S = 5.0
_CLOSING_S = 1.0  # for a peer to end its side, too


class Proxy:
    """Moves the traffic of plans. All but `_…` may be called by any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        native_code().wake_by_bell(self._bell)
        self._lock = threading.Lock()  # of what follows
        self._traffics: list[Traffic] = []
        self._retiring: dict[Traffic, float] = {}  # and until when
        self._closing: dict[Traffic, float] = {}
        self._dropped: collections.deque[tuple[Traffic, float]] = collections.deque()  # not of the lock's: see drop()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="triton_ext proxy", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def add(self, traffic: Traffic) -> None:
        with self._lock:
            self._traffics.append(traffic)
            for connection in traffic.connections.values():
                self._epoll.register(connection.socket, select.EPOLLIN)

    def retire(self, traffic: Traffic, timeout_s: float) -> None:
        """Send what is left of a plan's traffic, if that can be done in time, and end it."""
        with self._lock:
            self._retire(traffic, time.monotonic() + timeout_s)
        self.wake()

    def drop(self, traffic: Traffic, timeout_s: float) -> None:
        """What retire() does, a little later: for finalizers, which may run in a thread that holds the lock."""
        self._dropped.append((traffic, time.monotonic() + timeout_s))
        self.wake()

    def finish(self, traffic: Traffic) -> bool:
        """Wait until what this rank has for other hosts has been sent. False if the time for that was up before."""
        while True:
            with self._lock:  # or a connection could be closed while it is asked
                until = self._retiring.get(traffic)
                if until is None:
                    return traffic.is_whole
                if traffic.is_sent or until < time.monotonic():
                    return traffic.is_sent
            time.sleep(_BUSY_S)

    def finish_all(self, timeout_s: float) -> None:
        """For the end of a process: until all that retires has ended; a gateway also waits for its followers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not (self._dropped or self._retiring):
                    return
            time.sleep(_BUSY_S)

    def wait_until_closed(self) -> None:
        """For the end of a process: until peers have ended their side, too."""
        deadline = time.monotonic() + 2 * _CLOSING_S
        while self._closing and time.monotonic() < deadline:
            time.sleep(_BUSY_S)

    def stop(self) -> None:
        """End the thread: before the interpreter does it, wherever it is, in C++ of torch, too, which aborts."""
        self._ends = True
        self.wake()
        self._thread.join(_STOP_S)

    def disown(self) -> None:
        """In a forked child: the thread, the bell and the connections are the parent's."""
        native_code().wake_by_bell(-1)
        self._epoll.close()
        os.close(self._bell)
        for traffic in self._traffics:
            for connection in traffic.connections.values():
                connection.socket.close()  # or peers would not see the parent end, nor its epoll that it closed them

    def _run(self) -> None:
        scheduling.preempt_at_wakeup()
        while not self._ends:
            with self._lock:
                self._take_dropped()
                self._pump()
                self._end_sent()
                self._watch_blocked()
                pause_s = self._pause_s()
            ready = {place for place, _ in self._epoll.poll(pause_s)}
            if self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            with self._lock:
                self._receive(ready)

    # Methods, so that no variable of a thread that sleeps keeps a traffic, and the memory behind it.

    def _retire(self, traffic: Traffic, until: float) -> None:
        if traffic in self._traffics and traffic not in self._closing:
            self._retiring.setdefault(traffic, until)

    def _take_dropped(self) -> None:
        while self._dropped:
            self._retire(*self._dropped.popleft())

    def _pump(self) -> None:
        for traffic in self._traffics:
            if traffic not in self._closing:
                traffic.pump()

    def _end_sent(self) -> None:
        now = time.monotonic()
        over = [each for each, until in self._retiring.items() if each.is_sent or until < now]
        for traffic in [each for each in over if not each.has_followers]:
            traffic.is_whole = traffic.is_sent
            del self._retiring[traffic]
            self._closing[traffic] = now + _CLOSING_S
            traffic.leave()

    def _watch_blocked(self) -> None:
        """Wake up when a connection that took no more has room again: for a good part of its buffer, not for each byte,
        since what wakes this thread takes the core from the programs."""
        for traffic in self._traffics:
            for connection in list(traffic.connections.values()):
                is_blocked = bool(connection.waiting) and traffic not in self._closing
                if connection.is_watched != is_blocked:
                    connection.is_watched = is_blocked
                    self._epoll.modify(connection.socket, select.EPOLLIN | (select.EPOLLOUT if is_blocked else 0))

    def _pause_s(self) -> float | None:
        """How long the thread may wait for a socket; None: until something happens."""
        followed = [each.has_followers for each in self._retiring]
        if not all(followed):
            return _BUSY_S
        return _CLOSING_S if self._closing else None

    def _receive(self, ready: set[int]) -> None:
        for traffic in self._traffics:
            for connection in list(traffic.connections.values()):
                if connection.socket.fileno() in ready:
                    traffic.receive(connection)
        now = time.monotonic()
        for traffic in [each for each, deadline in self._closing.items() if not each.connections or deadline < now]:
            traffic.close()
            self._traffics.remove(traffic)
            del self._closing[traffic]


_proxy: Proxy | None = None
_proxy_lock = threading.Lock()


def proxy() -> Proxy:
    """This process's proxy."""
    global _proxy
    with _proxy_lock:
        if _proxy is None:
            _proxy = Proxy()
        return _proxy


def drop(traffic: Traffic, timeout_s: float) -> None:
    """A plan is no longer referred to: nobody waits, but what it has for other hosts goes there. For finalizers: takes
    no lock, and starts no thread."""
    if (mine := _proxy) is not None:
        mine.drop(traffic, timeout_s)


def finish(timeout_s: float) -> None:
    """At the end of a process: send what it has for other hosts, and end in order."""
    if _proxy is not None:
        _proxy.finish_all(timeout_s)
        _proxy.wait_until_closed()


def stop() -> None:
    """At the end of a process, behind finish()."""
    global _proxy
    with _proxy_lock:
        if _proxy is not None:
            _proxy.stop()
            _proxy = None


def _forget() -> None:
    global _proxy, _proxy_lock
    parents, _proxy, _proxy_lock = _proxy, None, threading.Lock()
    if parents is not None:
        parents.disown()


os.register_at_fork(after_in_child=_forget)
