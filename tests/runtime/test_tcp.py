"""Connections between hosts: whoever else connects is turned away, and keeps nobody waiting."""

import os
import socket
import struct
import time

import pytest

import triton_ext as tx
from triton_ext.errors import PlanError
from triton_ext.runtime import groups
from triton_ext.runtime.transports import tcp


def connect(meanwhile):
    """Connect two virtual ranks on two hosts, and say a byte each way; `meanwhile(offer)` gets what rank 1 offers
    (address, port, token) before rank 0 connects, and returns what rank 0 is told instead.
    """

    def rank_main(rank):
        me = groups.virtual_rank()
        exchange = me.exchange

        def overheard(value):
            values = exchange(value)
            if rank == 0:
                me.exchange = exchange
                values[1] = meanwhile(values[1])
            return values

        me.exchange = overheard
        [(peer, connection)] = tcp.connect(me, [1 - rank]).items()
        with connection:
            connection.setblocking(True)
            connection.settimeout(10)
            connection.sendall(bytes([rank]))
            assert (peer, connection.recv(8)) == (1 - rank, bytes([1 - rank]))

    start = time.monotonic()
    tx.testing.World(2, hosts=[0, 1]).run(rank_main)
    return time.monotonic() - start


def is_closed(stranger):
    stranger.settimeout(5)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "says",
    [
        lambda token: b"",
        lambda token: token[:7],
        lambda token: os.urandom(16) + struct.pack("I", 0),
        lambda token: token + struct.pack("I", 1),
        lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nothing", "half a token", "another token", "a rank that is none of the peers", "something else"],
)
def test_a_stranger(says):
    strangers = []

    def meanwhile(offer):
        for _ in range(3):
            strangers.append(socket.create_connection(offer[:2]))
            strangers[-1].sendall(says(offer[2]))
        return offer

    assert connect(meanwhile) < groups.timeout_s() / 3
    assert all(map(is_closed, strangers))


def test_a_stranger_that_resets_its_connection():
    def meanwhile(offer):
        with socket.create_connection(offer[:2]) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(b"x")
        return offer

    assert connect(meanwhile) < groups.timeout_s() / 3


def test_a_peer_that_cannot_listen(monkeypatch):
    """Nobody waits for it: all hear of it at once."""

    def address(group):
        if group.rank == 1:
            raise OSError(24, "Too many open files")
        return "127.0.0.1"

    def rank_main(rank):
        with pytest.raises(PlanError, match=r"^rank 1 cannot listen for other hosts: .*Too many open files$"):
            tcp.connect(groups.virtual_rank(), [peer for peer in range(3) if peer != rank])

    monkeypatch.setattr(tcp, "_address", address)
    start = time.monotonic()
    tx.testing.World(3, hosts=[0, 1, 2]).run(rank_main)
    assert time.monotonic() - start < groups.timeout_s() / 4


def test_a_peer_with_a_wrong_token(monkeypatch):
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "1")
    with pytest.raises(PlanError, match=r"rank 1 has no connection with ranks \[0\] on other hosts: timed out"):
        connect(lambda offer: (*offer[:2], os.urandom(16)))
