"""The proxy: a thread per process that moves the shipments of its plans, and sleeps while there is nothing to move."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from triton import knobs

from ..backends.cpu.pool import native_code
from .shipment import Shipment

# Programs ring when they have completed a slice. They do not when a run begins: that is looked for behind a launch.
_LOOK_S = 2e-4
_STARTING_S = 2e-3
_BUSY_S = 1e-3  # how often a connection that took no more is tried again
_CLOSING_S = 1.0  # for a peer to end its side, too


class Proxy:
    """Moves shipments. All but `_…` may be called by any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        native_code().wake_by_bell(self._bell)
        self._lock = threading.Lock()  # of what follows
        self._shipments: list[Shipment] = []
        self._retiring: dict[Shipment, float] = {}  # and until when
        self._closing: dict[Shipment, float] = {}
        self._launch_s = 0.0  # when the last launch began whose run is not known to have begun
        self._thread = threading.Thread(target=self._run, name="triton_ext proxy", daemon=True)
        self._thread.start()
        knobs.runtime.launch_enter_hook.add(self._launched)

    def _launched(self, _metadata: object) -> None:
        self._launch_s = time.monotonic()
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def add(self, shipment: Shipment) -> None:
        with self._lock:
            self._shipments.append(shipment)
            for connection in shipment.connections.values():
                self._epoll.register(connection.socket, select.EPOLLIN)

    def retire(self, shipment: Shipment, timeout_s: float) -> None:
        """Send what is left of a shipment, if that can be done in time, and end it."""
        with self._lock:
            if shipment in self._shipments and shipment not in self._closing:
                self._retiring.setdefault(shipment, time.monotonic() + timeout_s)
        self.wake()

    def finish(self, shipment: Shipment | None = None) -> bool:
        """Wait until all that retires, or one shipment, has been sent. False if a shipment's time was up before."""
        while shipment in self._retiring if shipment else self._retiring:
            time.sleep(_BUSY_S)
        return shipment is None or shipment.is_whole

    def wait_until_closed(self) -> None:
        """For the end of a process: until peers have ended their side, too."""
        deadline = time.monotonic() + 2 * _CLOSING_S
        while self._closing and time.monotonic() < deadline:
            time.sleep(_BUSY_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                for shipment in self._shipments:
                    if shipment not in self._closing and shipment.pump():
                        self._launch_s = 0.0
                self._end_sent()
                pause_s = self._pause_s()
            if pause_s == _LOOK_S:
                time.sleep(_LOOK_S)
                pause_s = 0
            ready = {place for place, _ in self._epoll.poll(pause_s)}
            if self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            with self._lock:
                self._receive(ready)

    def _end_sent(self) -> None:
        now = time.monotonic()
        for shipment in [each for each, until in self._retiring.items() if each.is_sent or until < now]:
            shipment.is_whole = shipment.is_sent
            del self._retiring[shipment]
            self._closing[shipment] = now + _CLOSING_S
            shipment.leave()

    def _pause_s(self) -> float | None:
        """How long the thread may wait for a socket; None: until something happens."""
        if self._retiring or any(shipment.is_blocked for shipment in self._shipments):
            return _BUSY_S
        if time.monotonic() - self._launch_s < _STARTING_S and any(each.announces for each in self._shipments):
            return _LOOK_S
        return _CLOSING_S if self._closing else None

    def _receive(self, ready: set[int]) -> None:
        for shipment in self._shipments:
            for connection in list(shipment.connections.values()):
                if connection.socket.fileno() in ready:
                    shipment.receive(connection)
        now = time.monotonic()
        for shipment in [each for each, deadline in self._closing.items() if not each.connections or deadline < now]:
            shipment.close()
            self._shipments.remove(shipment)
            del self._closing[shipment]


_proxy: Proxy | None = None
_proxy_lock = threading.Lock()


def proxy() -> Proxy:
    """This process's proxy."""
    global _proxy
    with _proxy_lock:
        if _proxy is None:
            _proxy = Proxy()
        return _proxy


def finish(wait_until_closed: bool = False) -> None:
    """Wait until this process has sent what it has for other hosts."""
    if _proxy is not None:
        _proxy.finish()
        if wait_until_closed:
            _proxy.wait_until_closed()


def _forget() -> None:
    global _proxy, _proxy_lock
    _proxy, _proxy_lock = None, threading.Lock()  # a forked child has no proxy thread


os.register_at_fork(after_in_child=_forget)
