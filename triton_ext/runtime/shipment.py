"""What a plan sends to ranks of other hosts, and gets from them, over TCP connections.

A rank's slices of run e leave when the ranks that they are for have said that they have begun run e (but for
all_reduce, docs/protocol.md). Where they arrive, the words change that the stores of a mapped peer would have changed.
A `Shipment` moves the slices of the ranks whose gateway it is on; the others have a `Follower`.
"""

from __future__ import annotations

import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..backends.cpu.pool import native_code
from . import trace
from .connection import BYE, LOST, READY, RING, Connection, Lost, Message
from .flows import Flow, Placement
from .transfers import Transfer

_ALWAYS = 1 << 62  # a run that never comes
_TEXT_BYTES = 4096
LEFT = "has left the plan"  # why a rank sends nothing more that has sent all


@dataclass(frozen=True)
class Box:
    """A rank's outbox of one transfer. counters: int64 per slice, which programs add to. sent: int64[1], runs that have
    left. values: the elements.
    """

    counters: np.ndarray
    sent: np.ndarray
    values: torch.Tensor


class Outgoing:
    """A flow at its sender: one outbox, or several of one shape, whose sum travels, made in acc_dtype."""

    def __init__(self, flow: Flow, transfer: Transfer, boxes: list[Box], acc_dtype: torch.dtype) -> None:
        self.flow = flow
        self.transfer = transfer
        self.boxes = boxes
        self.acc_dtype = acc_dtype
        self.run = 1  #: that is on its way
        self.needs = _elements_of_slices(transfer)
        self.queued = np.zeros(len(self.needs), bool)
        self.unsent = len(self.needs)  #: slices of this run
        self._values = boxes[0].values if len(boxes) == 1 else torch.empty_like(boxes[0].values)
        self._bytes = memoryview(cast(Any, self._values.view(torch.uint8).numpy()))

    def ready(self) -> list[tuple[int, int]]:
        """Ranges of slices that are complete and not queued, which are queued by this."""
        needs = self.run * self.needs
        complete = self.boxes[0].counters >= needs
        for box in self.boxes[1:]:
            complete &= box.counters >= needs
        fresh = np.flatnonzero(complete > self.queued).tolist()
        if not fresh:
            return []
        native_code().fence()  # what the counters count is read after them
        self.queued |= complete
        breaks = [place for place in range(1, len(fresh)) if fresh[place] > fresh[place - 1] + 1]
        bounds = itertools.pairwise([0, *breaks, len(fresh)])
        return [(fresh[begin], fresh[end - 1] + 1) for begin, end in bounds]

    def body(self, first: int, end: int) -> memoryview:
        """What travels of slices. A sum stays valid until all sources have begun another run."""
        size = self.transfer.slice_elements
        if len(self.boxes) > 1:
            rows = slice(first * size, end * size)
            total = self.boxes[0].values[rows].to(self.acc_dtype)
            for box in self.boxes[1:]:
                total += box.values[rows]
            self._values[rows] = total
        return self._bytes[first * size * self.transfer.item_bytes : end * size * self.transfer.item_bytes]

    def is_sent(self, slices: int) -> bool:
        """Count slices that have left; True, and on to the next run, if these were the last ones."""
        self.unsent -= slices
        if self.unsent:
            return False
        native_code().fence()  # what has left is read before it may be overwritten
        for box in self.boxes:
            box.sent[0] = self.run
        self.run += 1
        self.unsent = len(self.needs)
        self.queued[:] = False
        return True

    def has_more(self, source: int) -> bool:
        """Whether a program of a source has stored what has not left."""
        box = self.boxes[self.flow.sources.index(source)]
        return bool((box.counters > box.sent[0] * self.needs).any())


class Incoming:
    """A flow at its receiver. targets: for each destination an int view of the part, with its own strides, the slice
    dimension first. counters: for each int64[1], of elements that have arrived.
    """

    def __init__(self, transfer: Transfer, targets: list[np.ndarray], counters: list[np.ndarray]) -> None:
        self.transfer = transfer
        self.targets = targets
        self.counters = counters
        self.run = 1  #: that is arriving
        self.needs = _elements_of_slices(transfer)
        self.arrived = np.zeros(len(self.needs), bool)
        first = targets[0]
        self.landing = first if first.flags.c_contiguous else np.empty(first.shape, first.dtype)
        self.copied = [target for target in targets if target is not self.landing]
        self.bytes = memoryview(cast(Any, self.landing.reshape(-1).view(np.uint8)))

    def place(self, message: Message) -> memoryview:
        """Where slices are to be put. Raises Lost for those that are not expected."""
        first, end = message.first, message.first + message.slices
        if message.run != self.run:
            raise Lost(f"sent slices of run {message.run} in run {self.run}")
        if not message.slices or end > len(self.needs) or self.arrived[first:end].any():
            raise Lost(
                f"sent slices {first} to {end - 1} of {len(self.needs)} in run {message.run}, or one of them twice"
            )
        size = self.transfer.slice_elements * self.transfer.item_bytes
        return self.bytes[first * size : end * size]

    def land(self, first: int, slices: int) -> None:
        """Slices are here: put them in place, then count them."""
        rows = slice(first * self.transfer.slice_size, (first + slices) * self.transfer.slice_size)
        for target in self.copied:
            target[rows] = self.landing[rows]
        self.arrived[first : first + slices] = True
        elements = int(self.needs[first : first + slices].sum())
        if self.arrived.all():
            self.arrived[:] = False
            self.run += 1
        native_code().fence()  # what is counted is written before it counts
        for counter in self.counters:
            counter[0] += elements  # nobody else writes it


def _elements_of_slices(transfer: Transfer) -> np.ndarray:
    needs = np.full(transfer.slices, transfer.slice_elements, np.int64)
    if len(needs):
        needs[-1] = transfer.elements - (len(needs) - 1) * transfer.slice_elements
    return needs


@dataclass(frozen=True)
class Member:
    """A rank whose slices a shipment moves. announced: int64 per rank, runs that its kernels have begun, as that rank
    is to know. may_store: int64 per rank, runs whose outbox for that rank may be written.
    """

    announced: np.ndarray
    may_store: np.ndarray

    def begin(self, rank: int, far: list[int], flows: Iterable[Flow]) -> None:
        """Before the first run: every outbox may be written once, and always where nothing is sent."""
        self.may_store[far] = _ALWAYS
        for flow in flows:
            if rank in flow.sources:
                self.may_store[list(flow.destinations)] = 1


class _Traffic(ABC):
    """What shipments and followers share: connections that end. All is called under the proxy's
    lock; any thread may read `lost`."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self.connections = {peer: Connection(peer, sock) for peer, sock in sockets.items()}
        self.is_whole = True  #: False if it ended before all that it had was sent
        self.lost: dict[int, str] = {}  #: ranks of other hosts that send nothing more, and why

    def receive(self, connection: Connection) -> None:
        """Take what has arrived."""
        self._guarded(connection, lambda: connection.receive(self))

    def _send(self, connection: Connection) -> None:
        if connection.waiting:
            self._guarded(connection, connection.send)

    def place(self, connection: Connection, message: Message) -> memoryview:
        """Of a message that is not about a flow."""
        if message.about not in (READY, BYE, LOST, RING):
            raise Lost(f"sent what is not a message (about {message.about})")
        if message.nbytes > _TEXT_BYTES:
            raise Lost(f"sent a text of {message.nbytes} bytes; at most {_TEXT_BYTES} are one")
        connection.text = bytearray(message.nbytes)
        return memoryview(connection.text)

    @abstractmethod
    def arrived(self, connection: Connection, message: Message) -> None:
        """A message is here, its body in place."""

    def _guarded(self, connection: Connection, action: Callable[[], None]) -> None:
        try:
            action()
        except Lost as error:
            self._lose(connection, str(error))
        except OSError as error:
            self._lose(connection, f"cannot be reached any more ({error})")

    def _lose(self, connection: Connection, reason: str) -> None:
        if self.connections.pop(connection.peer, None):
            connection.socket.close()
            self._is_lost(connection.peer, LEFT if connection.is_leaving else reason)

    @abstractmethod
    def _is_lost(self, peer: int, reason: str) -> None:
        """A connection has ended."""

    def leave(self) -> None:
        """Say that nothing more comes; what peers say is still read, so that nothing on its way to them is lost."""
        for connection in list(self.connections.values()):
            connection.queue(Message(BYE))
            self._guarded(connection, connection.send)
            self._guarded(connection, lambda each=connection: each.socket.shutdown(socket.SHUT_WR))  # type: ignore[misc]

    def close(self) -> None:
        for connection in list(self.connections.values()):
            self._lose(connection, "was closed here")


class Shipment(_Traffic):
    """The traffic of the ranks that a gateway serves: itself, and the followers that it has connections with.

    outgoing, incoming: by the number of the flow. members: by rank. announces: whether slices for a rank wait for its
    word that it has begun.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        sockets: dict[int, socket.socket],
        outgoing: dict[int, Outgoing],
        incoming: dict[int, Incoming],
        members: dict[int, Member],
        announces: bool,
    ) -> None:
        super().__init__(sockets)
        self.rank = rank
        self.outgoing = outgoing
        self.incoming = incoming
        self.members = members
        self._announces = announces
        self._behind = {
            peer: [other for other in placement.served(peer) if other not in members]
            for peer in sockets
            if peer not in members
        }
        gateway_of = placement.gateways
        self._outgoing: dict[int, list[tuple[int, Outgoing]]] = {peer: [] for peer in self._behind}
        for number, each in outgoing.items():
            self._outgoing[gateway_of[each.flow.destinations[0]]].append((number, each))
        self._said = {(rank, peer): 0 for rank in members for peer in self._behind}
        self._begun = {rank: 0 for ranks in self._behind.values() for rank in ranks}

    @property
    def has_followers(self) -> bool:
        return any(peer in self.members for peer in list(self.connections))

    def pump(self) -> None:
        """Queue what programs have completed since, and send."""
        for peer, connection in list(self.connections.items()):
            if peer in self._behind:
                self._announce(peer, connection)
            self._send(connection)
            if peer in self._behind and not connection.waiting:  # else it takes no more: later, together
                for number, each in self._outgoing[peer]:
                    self._queue_ready(connection, number, each)
                self._send(connection)

    def _announce(self, peer: int, connection: Connection) -> None:
        for rank, member in self.members.items():
            if (run := int(member.announced[peer])) > self._said[rank, peer]:
                self._said[rank, peer] = run
                connection.queue(Message(READY, run, rank))

    def _queue_ready(self, connection: Connection, number: int, each: Outgoing) -> None:
        if self._announces and any(self._begun[rank] < each.run for rank in each.flow.destinations):
            return
        for first, end in each.ready():
            body = each.body(first, end)
            sent = self._when_sent(each, first, end - first, len(body))
            connection.queue(Message(number, each.run, first, end - first), body, sent)

    def _when_sent(self, each: Outgoing, first: int, slices: int, nbytes: int) -> Callable[[], None]:
        run, queued_ns, flow = each.run, time.monotonic_ns(), each.flow

        def sent() -> None:
            if recorded := trace.current():
                about = {"peer": flow.destinations[0], "run": run, "first": first, "slices": slices, "bytes": nbytes}
                recorded.message("send", queued_ns, **about)
            if each.is_sent(slices):
                for source in flow.sources:
                    self.members[source].may_store[list(flow.destinations)] = each.run

        return sent

    def place(self, connection: Connection, message: Message) -> memoryview:
        if message.about < 0:
            return super().place(connection, message)
        each = self.incoming.get(message.about)
        if each is None or connection.peer not in self._behind:
            raise Lost(f"sent slices of flow {message.about}, which is not one for here")
        return each.place(message)

    def arrived(self, connection: Connection, message: Message) -> None:
        if message.about == READY:
            self._begun[message.first] = message.run
        elif message.about == BYE:
            connection.is_leaving = True
        elif message.about == LOST:
            self._are_lost([message.first], connection.text.decode(errors="replace"))
        elif message.about >= 0:
            self.incoming[message.about].land(message.first, message.slices)
            if recorded := trace.current():
                _, run, first, slices, nbytes = message
                about = {"peer": connection.peer, "run": run, "first": first, "slices": slices, "bytes": nbytes}
                recorded.message("arrive", connection.since_ns, **about)

    def _is_lost(self, peer: int, reason: str) -> None:
        if peer in self._behind:
            self._are_lost(self._behind[peer], reason)
        else:  # a follower: other hosts are to know
            self._tell(self._behind, peer, reason if reason == LEFT else "its process has ended")

    def _are_lost(self, ranks: list[int], reason: str) -> None:
        for rank in ranks:
            if rank not in self.lost:
                self.lost[rank] = reason
                self._tell(self.members, rank, reason)

    def _tell(self, peers: Iterable[int], rank: int, reason: str) -> None:
        for peer in peers:
            if connection := self.connections.get(peer):
                connection.queue(Message(LOST, first=rank), reason.encode()[:_TEXT_BYTES])
                self._send(connection)

    @property
    def is_sent(self) -> bool:
        """Whether what this rank's programs have stored for ranks that are still there has reached their hosts."""
        return not any(
            not self.connections[peer].is_empty or any(self._has_more(each) for _, each in flows)
            for peer, flows in self._outgoing.items()
            if peer in self.connections
        )

    def _has_more(self, each: Outgoing) -> bool:
        return self.rank in each.flow.sources and each.has_more(self.rank)


class Follower(_Traffic):
    """A rank whose slices its gateway moves: it rings there when there is something to move.

    flows: what leaves from this rank.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        sockets: dict[int, socket.socket],
        flows: list[Outgoing],
        member: Member,
    ) -> None:
        super().__init__(sockets)
        self._rank = rank
        self._far = placement.far(rank)
        self._flows = flows
        self._member = member
        self._rung = 0

    has_followers = False

    def pump(self) -> None:
        """Ring if there is something new."""
        begun = int(self._member.announced[self._far[0]])
        stored = sum(int(each.boxes[0].counters.sum()) for each in self._flows) + begun
        for connection in list(self.connections.values()):
            if stored != self._rung:
                connection.queue(Message(RING))
            self._send(connection)
        self._rung = stored

    def arrived(self, connection: Connection, message: Message) -> None:
        if message.about == BYE:
            connection.is_leaving = True
        elif message.about == LOST:
            self.lost.setdefault(message.first, connection.text.decode(errors="replace"))

    def _is_lost(self, peer: int, reason: str) -> None:
        for rank in self._far:
            self.lost.setdefault(rank, f"rank {peer}, through which it is reached, {reason}")

    @property
    def is_sent(self) -> bool:
        return not self.connections or not any(each.has_more(self._rank) for each in self._flows)


Traffic = Shipment | Follower
