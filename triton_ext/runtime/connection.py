"""Messages between ranks on different hosts: a header, and for slices and texts a body.

Bodies go straight from and into the memory that the two sides name.
"""

from __future__ import annotations

import collections
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

_HEADER = struct.Struct("<IiqIIq")  # magic, and the fields of Message
_MAGIC = 0x74786332
_WAKE_BYTES = 1 << 18  # a wake-up for less than this of a long message costs more than it brings

# What a message is, if it is not slices of a flow
READY = -1  # rank `first` has begun a run
BYE = -2  # nothing more comes from here
LOST = -3  # rank `first` sends nothing more; the body says why
RING = -4  # look at the outbox of who sends this


class Message(NamedTuple):
    """A header. about: the number of a flow, or one of the above."""

    about: int
    run: int = 0
    first: int = 0
    slices: int = 0
    nbytes: int = 0


class Lost(Exception):
    """A connection ends, or what comes over it does not fit; the text says which."""


class Receiver(Protocol):
    """Who takes what arrives."""

    def place(self, connection: Connection, message: Message) -> memoryview:
        """Where a body is to be put. Raises Lost for a message that does not fit."""

    def arrived(self, connection: Connection, message: Message) -> None:
        """A message is here, its body in place."""


class Connection:
    """One end: messages that wait to leave, and the one that is arriving."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.socket = sock
        self.waiting: collections.deque[tuple[list[memoryview], Callable[[], None]]] = collections.deque()
        self.since_ns = 0  #: when the header of what has arrived was here
        self.text = bytearray()  #: that arrived last, or is arriving
        self.is_leaving = False
        self.is_watched = False  #: whether the proxy waits until the socket takes more
        self._header = bytearray(_HEADER.size)
        self._rest = memoryview(self._header)  # of what is arriving
        self._message: Message | None = None  # its header, once it is here

    def queue(self, message: Message, body: memoryview | bytes = b"", sent: Callable[[], None] | None = None) -> None:
        header = _HEADER.pack(_MAGIC, *message._replace(nbytes=len(body)))
        parts = [memoryview(header), memoryview(body)] if len(body) else [memoryview(header)]
        self.waiting.append((parts, sent or _nothing))

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

    def receive(self, receiver: Receiver) -> None:
        """Take what the socket has. Raises Lost."""
        while True:
            try:
                count = self.socket.recv_into(self._rest)
            except BlockingIOError:
                return
            if not count:
                raise Lost("has closed its connection")
            self._rest = self._rest[count:]
            if not len(self._rest):
                self._next(receiver)
            elif self._message:
                self._wake_for(min(len(self._rest), _WAKE_BYTES))
                return

    def _next(self, receiver: Receiver) -> None:
        """A header is here, or the body that it announced."""
        if self._message is None:
            magic, *fields = _HEADER.unpack(self._header)
            message = Message(*fields)
            if magic != _MAGIC:
                raise Lost(f"sent what is not a message (magic {magic:#x})")
            place = receiver.place(self, message)
            if len(place) != message.nbytes:
                raise Lost(f"sent {message.nbytes} bytes where {len(place)} belong")
            self.since_ns = time.monotonic_ns()
            if len(place):
                self._message, self._rest = message, place
                return
        else:
            message = self._message
            self._wake_for(1)
        self._message, self._rest = None, memoryview(self._header)
        receiver.arrived(self, message)

    def _wake_for(self, nbytes: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    @property
    def is_empty(self) -> bool:
        """Whether all that was to be sent has reached the peer's host: a process that ends may take the rest along."""
        unacknowledged = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not self.waiting and not any(unacknowledged)


def _nothing() -> None:
    """For messages whose sender need not know when they have left."""
