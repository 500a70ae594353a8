"""What a plan sends to ranks of other hosts, and gets from them, over its TCP connections.

A message is a header and, for slices, their elements: straight from the outbox, and straight into place where a slice
is contiguous there. A rank's slices of run e leave when its peer has said that it has begun run e (but for all_reduce,
docs/protocol.md). Where they arrive, the words change that the stores of a mapped peer would have changed.
"""

from __future__ import annotations

import collections
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ..backends.cpu.pool import native_code
from . import trace
from .transfers import Transfer

_HEADER = struct.Struct("<IIqIIq")  # magic, kind, run, first slice, slices, bytes that follow
_MAGIC = 0x74786331
_READY, _BYE = 0, 1  # kinds; the others are those of transfers
_WAKE_BYTES = 1 << 18  # a wake-up for less than this of a long message costs more than it brings


@dataclass
class Outgoing:
    """A transfer as its sender has it. counters: int64 per slice, which programs add to. data: the outbox, in bytes."""

    transfer: Transfer
    counters: np.ndarray
    data: memoryview
    run: int = 1  #: that is on its way
    queued: np.ndarray = field(init=False)
    unsent: int = field(init=False)  #: slices of this run

    def __post_init__(self) -> None:
        self.needs = _elements_of_slices(self.transfer)
        self.queued = np.zeros(len(self.needs), bool)
        self.unsent = len(self.needs)

    def ready(self) -> list[tuple[int, int]]:
        """Ranges of slices that are complete and not queued, which are queued by this."""
        found = (self.counters >= self.run * self.needs) & ~self.queued
        if not found.any():
            return []
        native_code().fence()  # what the counters count is read after them
        self.queued |= found
        edges = np.flatnonzero(np.diff(found, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def bytes_of(self, first: int, end: int) -> memoryview:
        size = self.transfer.slice_elements * self.transfer.item_bytes
        return self.data[first * size : end * size]

    def is_sent(self, slices: int) -> bool:
        """Count slices that have left; True, and on to the next run, if these were the last ones."""
        self.unsent -= slices
        if self.unsent:
            return False
        self.run += 1
        self.unsent = len(self.needs)
        self.queued[:] = False
        return True

    @property
    def has_more(self) -> bool:
        """Whether a program has stored what has not left."""
        return bool((self.counters > (self.run - 1) * self.needs).any())


@dataclass
class Incoming:
    """A transfer as its receiver has it. target: int or bytes view of the part, with its own strides, the slice
    dimension first. counter: int64[1], of elements that have arrived.
    """

    transfer: Transfer
    target: np.ndarray
    counter: np.ndarray
    run: int = 1  #: that is arriving

    def __post_init__(self) -> None:
        self.needs = _elements_of_slices(self.transfer)
        self.arrived = np.zeros(len(self.needs), bool)
        self.in_place = self.target.flags.c_contiguous
        landing = self.target if self.in_place else np.empty(self.target.shape, self.target.dtype)
        self.landing = landing
        self.bytes = memoryview(cast(Any, landing.reshape(-1).view(np.uint8)))

    def problem(self, run: int, first: int, slices: int, nbytes: int) -> str | None:
        """What is wrong with a message's header."""
        if run != self.run:
            return f"sent slices of run {run} in run {self.run}"
        if first + slices > len(self.needs) or self.arrived[first : first + slices].any():
            return (
                f"sent slices {first} to {first + slices - 1} of {len(self.needs)} in run {run}, or one of them twice"
            )
        if nbytes != len(self.place(first, slices)):
            return f"sent {nbytes} bytes for slices that have {len(self.place(first, slices))}"
        return None

    def place(self, first: int, slices: int) -> memoryview:
        size = self.transfer.slice_elements * self.transfer.item_bytes
        return self.bytes[first * size : (first + slices) * size]

    def land(self, first: int, slices: int) -> None:
        """Slices are here: put them in place, then count them."""
        if not self.in_place:
            rows = slice(first * self.transfer.slice_size, (first + slices) * self.transfer.slice_size)
            self.target[rows] = self.landing[rows]
        self.arrived[first : first + slices] = True
        elements = int(self.needs[first : first + slices].sum())
        if self.arrived.all():
            self.arrived[:] = False
            self.run += 1
        native_code().fence()  # what is counted is written before it counts
        self.counter[0] += elements  # nobody else writes it


def _elements_of_slices(transfer: Transfer) -> np.ndarray:
    needs = np.full(transfer.slices, transfer.slice_elements, np.int64)
    if len(needs):
        needs[-1] = transfer.elements - (len(needs) - 1) * transfer.slice_elements
    return needs


class Connection:
    """A plan's connection to a peer: messages that wait to leave, and the one that is arriving."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.socket = sock
        self.waiting: collections.deque[tuple[list[memoryview], Callable[[], None]]] = collections.deque()
        self.header = bytearray(_HEADER.size)
        self.rest = memoryview(self.header)  # of what is arriving
        self.message: tuple[int, int, int, int, int] | None = None  # its header, once it is here
        self.since_ns = 0  # when its header was here
        self.is_leaving = False

    def queue(self, kind: int, run: int, first: int, slices: int, body: memoryview, sent: Callable[[], None]) -> None:
        header = _HEADER.pack(_MAGIC, kind, run, first, slices, len(body))
        self.waiting.append(([memoryview(header), body] if len(body) else [memoryview(header)], sent))

    def send(self) -> None:
        """Send what the socket takes."""
        while self.waiting:
            parts, sent = self.waiting[0]
            try:
                count = self.socket.sendmsg(parts)
            except BlockingIOError:
                return
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]
            else:
                self.waiting.popleft()
                sent()

    @property
    def is_empty(self) -> bool:
        """Whether all that was to be sent has reached the peer's host: a process that ends may take the rest along."""
        if self.socket.fileno() < 0:  # closed meanwhile
            return True
        unacknowledged = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not self.waiting and not any(unacknowledged)


class Shipment:
    """A plan's traffic with other hosts, moved by the proxy's thread alone.

    outgoing, incoming: by peer and kind of transfer. announced: int64 per rank, runs that this rank's kernels have
    begun, as the peer is to know. may_store: int64 per rank, runs whose outbox for the peer may be written. announces:
    whether slices for a peer wait for its word that it has begun.
    """

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        outgoing: dict[tuple[int, int], Outgoing],
        incoming: dict[tuple[int, int], Incoming],
        announced: np.ndarray,
        may_store: np.ndarray,
        announces: bool,
    ) -> None:
        self.connections = {peer: Connection(peer, sock) for peer, sock in sockets.items()}
        self.incoming = incoming
        self.announced = announced
        self.may_store = may_store
        self.announces = announces
        self.is_whole = True  #: False if it ended before all that it had was sent
        self.lost: dict[int, str] = {}  #: peers that send nothing more, and why
        self._said = dict.fromkeys(sockets, 0)
        self._begun = dict.fromkeys(sockets, 0)
        self._outgoing = {
            peer: [(kind, each) for (to, kind), each in outgoing.items() if to == peer and len(each.needs)]
            for peer in sockets
        }
        for peer, transfers in self._outgoing.items():
            may_store[peer] = 1 if transfers else 1 << 62

    def pump(self) -> bool:
        """Queue what programs have completed since, and send. True if a run has begun."""
        begins = False
        for peer, connection in list(self.connections.items()):
            if (begun := int(self.announced[peer])) > self._said[peer]:
                self._said[peer] = begun
                begins = True
                connection.queue(_READY, begun, 0, 0, memoryview(b""), _nothing)
            for kind, transfer in self._outgoing[peer]:
                if not self.announces or self._begun[peer] >= transfer.run:
                    for first, end in transfer.ready():
                        sent = self._when_sent(peer, transfer, first, end - first)
                        connection.queue(kind, transfer.run, first, end - first, transfer.bytes_of(first, end), sent)
            if connection.waiting:
                self._guarded(connection, connection.send)
        return begins

    def _when_sent(self, peer: int, transfer: Outgoing, first: int, slices: int) -> Callable[[], None]:
        run, queued_ns, nbytes = transfer.run, time.monotonic_ns(), len(transfer.bytes_of(first, first + slices))

        def sent() -> None:
            if recorded := trace.current():
                recorded.message("send", queued_ns, peer=peer, run=run, first=first, slices=slices, bytes=nbytes)
            if transfer.is_sent(slices):
                native_code().fence()  # what has left is read before it may be overwritten
                self.may_store[peer] = transfer.run

        return sent

    def receive(self, connection: Connection) -> None:
        """Take what has arrived from a peer."""
        self._guarded(connection, lambda: self._receive(connection))

    def _receive(self, connection: Connection) -> None:
        while connection.peer in self.connections:
            try:
                count = connection.socket.recv_into(connection.rest)
            except BlockingIOError:
                return
            if not count:
                self._lose(connection, "has closed its connection")
                return
            connection.rest = connection.rest[count:]
            if not len(connection.rest):
                self._next(connection)
            elif connection.message:
                lowest = min(len(connection.rest), _WAKE_BYTES)
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
                return

    def _next(self, connection: Connection) -> None:
        """A header is here, or the body that it announced."""
        if connection.message is None:
            magic, kind, run, first, slices, nbytes = _HEADER.unpack(connection.header)
            transfer = self.incoming.get((connection.peer, kind))
            if magic != _MAGIC or (kind not in (_READY, _BYE) and transfer is None):
                self._lose(connection, f"sent what is not a message (magic {magic:#x}, kind {kind})")
            elif kind == _READY:
                self._begun[connection.peer] = run
            elif kind == _BYE:
                connection.is_leaving = True
            elif transfer is not None:
                if problem := transfer.problem(run, first, slices, nbytes):
                    self._lose(connection, problem)
                    return
                connection.message = (kind, run, first, slices, nbytes)
                connection.rest = transfer.place(first, slices)
                connection.since_ns = time.monotonic_ns()
                return
        else:
            kind, run, first, slices, nbytes = connection.message
            self.incoming[connection.peer, kind].land(first, slices)
            if recorded := trace.current():
                about = {"run": run, "first": first, "slices": slices, "bytes": nbytes}
                recorded.message("arrive", connection.since_ns, peer=connection.peer, **about)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        connection.message = None
        connection.rest = memoryview(connection.header)

    def _guarded(self, connection: Connection, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._lose(connection, f"cannot be reached any more ({error})")

    def _lose(self, connection: Connection, reason: str) -> None:
        self.lost[connection.peer] = "has left the plan" if connection.is_leaving else reason
        del self.connections[connection.peer]
        connection.socket.close()

    @property
    def is_blocked(self) -> bool:
        """Whether a connection has not taken all that waits for it."""
        return any(each.waiting for each in self.connections.values())

    @property
    def is_sent(self) -> bool:
        """Whether everything that programs have stored for peers that are still there has reached their hosts."""
        return not any(
            not self.connections[peer].is_empty or any(transfer.has_more for _, transfer in transfers)
            for peer, transfers in list(self._outgoing.items())
            if peer in self.connections
        )

    def leave(self) -> None:
        """Say that nothing more comes; what peers say is still read, so that nothing on its way to them is lost."""
        for connection in list(self.connections.values()):
            connection.queue(_BYE, 0, 0, 0, memoryview(b""), _nothing)
            self._guarded(connection, connection.send)
            self._guarded(connection, lambda each=connection: each.socket.shutdown(socket.SHUT_WR))  # type: ignore[misc]

    def close(self) -> None:
        for connection in list(self.connections.values()):
            self._lose(connection, "was closed here")


def _nothing() -> None:
    """For messages whose sender need not know when they have left."""
