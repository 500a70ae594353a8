"""Hosts without a shared network card library: one TCP connection for each peer of a plan on another host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from typing import cast

from ..groups import Group, ThreadRanks, raise_together, timeout_s

_HELLO = struct.Struct("<16sI")  # the listener's token, and who connects
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def connect(group: Group, peers: list[int]) -> dict[int, socket.socket]:
    """A connection to each peer, not blocking; `peers` is symmetric among ranks. Collective.

    Raises PlanError, on every rank, if one cannot reach another within half of TRITON_EXT_TIMEOUT_S: for the other
    half, those that have reached all of theirs wait to hear of it.
    """
    connections: dict[int, socket.socket] = {}
    problem, listener, offer = None, None, None
    try:
        if peers:
            listener = socket.create_server((_address(group), 0), backlog=len(peers) + 16)
            offer = (*listener.getsockname()[:2], secrets.token_bytes(16))
    except OSError as error:
        problem = f"rank {group.rank} cannot listen for other hosts: {error}"
    try:
        offers = group.exchange(offer)
        deadline = time.monotonic() + timeout_s() / 2
        peers = [peer for peer in peers if offers[peer] is not None]  # the others say why below
        try:
            for peer in peers if listener else ():
                if peer > group.rank:
                    host, port, token = offers[peer]
                    connections[peer] = socket.create_connection((host, port), _left(deadline))
                    connections[peer].sendall(_HELLO.pack(token, group.rank))
            if listener:
                _accept(listener, offer[2] if offer else b"", peers, connections, deadline)
        except OSError as error:
            missing = [peer for peer in peers if peer not in connections]
            problem = f"rank {group.rank} has no connection with ranks {missing} on other hosts: {error}"
        raise_together(group, problem)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        if listener:
            listener.close()
    for connection in connections.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s() * 1000))
    return connections


def _accept(
    listener: socket.socket, token: bytes, peers: list[int], connections: dict[int, socket.socket], deadline: float
) -> None:
    """Take connections until all peers have one. Those of strangers are closed, and keep nobody waiting."""
    hellos: dict[socket.socket, bytes] = {}  # what they have said so far, of those who are not known yet
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(connections) < len(peers):
                for key, _ in selector.select(_left(deadline)):
                    if key.fileobj is listener:
                        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it is gone again
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            hellos[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    connection = cast(socket.socket, key.fileobj)
                    try:
                        more = connection.recv(_HELLO.size - len(hellos[connection]))
                    except ConnectionError:
                        more = b""
                    hellos[connection] += more
                    if more and len(hellos[connection]) < _HELLO.size:
                        continue
                    selector.unregister(connection)
                    hello = hellos.pop(connection)
                    said, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
                    if secrets.compare_digest(said, token) and peer in peers and peer not in connections:
                        connections[peer] = connection
                    else:
                        connection.close()
        finally:
            for connection in hellos:
                connection.close()


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError behind it."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out (TRITON_EXT_TIMEOUT_S sets the limit)")
    return seconds


def _address(group: Group) -> str:
    """This rank's address as other hosts see it: of GLOO_SOCKET_IFNAME, as torch takes it, or where MASTER_ADDR is."""
    if isinstance(group, ThreadRanks):
        return "127.0.0.1"
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24])
    if master := os.environ.get("MASTER_ADDR"):
        family, kind, protocol, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing: asks for the way there
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
