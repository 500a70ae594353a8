"""What arrives from another host: whole slices in their place, counted once; anything else loses the peer."""

import itertools
import socket

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.passes import abi
from triton_ext.runtime import connection
from triton_ext.runtime.flows import Flow, Placement
from triton_ext.runtime.shipment import Box, Follower, Incoming, Member, Outgoing, Shipment
from triton_ext.runtime.transfers import Transfer

KIND = abi.OF_RESULT
# 8 rows of 5, in the middle of rows of 9: 8 slices of a row.
PART = Transfer((0, 0), (8, 5), 2, (9, 1), 4, 0, 8)


class End:
    """A shipment on one end of a socket pair; the test has the other end, or another shipment has."""

    def __init__(self, sock, rank=0, announces=False):
        sock.setblocking(False)
        self.peer = 1 - rank
        words, values = np.zeros(9, np.int64), torch.arange(40, dtype=torch.int32)
        self.counters = words[:8]
        self.result, self.arrived = np.full((8, 9), -1, np.int32), np.zeros(1, np.int64)
        self.announced, self.may_store = np.zeros(2, np.int64), np.zeros(2, np.int64)
        # Flow 0 goes from rank 0 to rank 1, flow 1 back.
        flows = [Flow(abi.OF_RESULT, (0,), (1,)), Flow(abi.OF_RESULT, (1,), (0,))]
        member = Member(self.announced, self.may_store)
        member.begin(rank, [self.peer], flows)
        out = Outgoing(flows[rank], PART, [Box(self.counters, words[8:], values)], torch.int32)
        self.shipment = Shipment(
            rank,
            Placement.of("direct", ["a", "b"]),
            {self.peer: sock},
            {rank: out},
            {self.peer: Incoming(PART, [self.result[:, 2:7]], [self.arrived])},
            {rank: member},
            announces,
        )

    def receive(self):
        for each in list(self.shipment.connections.values()):
            self.shipment.receive(each)

    def is_right(self):
        inside = self.result[:, 2:7]
        return (inside == np.arange(40).reshape(8, 5)).all() and (self.result[:, :2] == -1).all()


def pair(announces=False):
    left, right = socket.socketpair()
    return End(left, 0, announces), End(right, 1, announces)


def message(run=1, first=0, slices=1, nbytes=None, about=0, magic=connection._MAGIC):
    """From rank 0 to rank 1."""
    body = np.arange(first * 5, (first + slices) * 5, dtype=np.int32).tobytes()
    header = (magic, about, run, first, slices, len(body) if nbytes is None else nbytes)
    return connection._HEADER.pack(*header) + body


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(1, 300), max_size=12))
def test_messages_split_anywhere_and_slices_in_any_order(order, cuts):
    here, there = socket.socketpair()
    with here, there:
        end = End(there, 1)
        data = b"".join(message(first=first) for first in order)
        edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
        for begin, stop in itertools.pairwise(edges):
            here.sendall(data[begin:stop])
            end.receive()
        assert end.is_right() and end.arrived[0] == 40 and not end.shipment.lost


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 3))
def test_slices_leave_when_they_are_complete_and_runs_follow_each_other(order, runs):
    sender, receiver = pair()
    for run in range(1, runs + 1):
        receiver.result[:, 2:7] = -1
        for number, index in enumerate(order):
            sender.counters[index] += 4
            sender.shipment.pump()
            receiver.receive()
            assert receiver.arrived[0] == 40 * (run - 1) + 5 * number, "a slice that is not complete does not leave"
            sender.counters[index] += 1
            sender.shipment.pump()
            receiver.receive()
        assert receiver.is_right() and receiver.arrived[0] == 40 * run
        assert sender.may_store[1] == run + 1
    sender.shipment.close()
    receiver.shipment.close()


def test_nothing_leaves_before_the_peer_has_begun():
    sender, receiver = pair(announces=True)
    sender.counters += 5
    sender.shipment.pump()
    receiver.receive()
    assert receiver.arrived[0] == 0 and sender.may_store[1] == 1
    receiver.announced[0] = 1
    receiver.shipment.pump()
    sender.receive()
    sender.shipment.pump()
    receiver.receive()
    assert receiver.is_right() and receiver.arrived[0] == 40 and sender.may_store[1] == 2
    sender.shipment.close()
    receiver.shipment.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (message(run=2), "sent slices of run 2 in run 1"),
        (message(first=7, slices=2), "sent slices 7 to 8 of 8"),
        (message() + message(), "or one of them twice"),
        (message(nbytes=21), "sent 21 bytes where 20 belong"),
        (message(about=9), "slices of flow 9, which is not one for here"),
        (message(about=-9), "not a message"),
        (message(magic=1), "not a message .magic 0x1"),
    ],
)
def test_what_does_not_fit_loses_the_peer(data, reason):
    here, there = socket.socketpair()
    with here:
        end = End(there, 1)
        here.sendall(data)
        end.receive()
        assert reason.replace(".", "(") in end.shipment.lost[0] or reason in end.shipment.lost[0]
        assert end.arrived[0] in (0, 5), "and it is not counted"
        assert not end.shipment.connections


def test_a_truncated_message_is_not_counted():
    here, there = socket.socketpair()
    end = End(there, 1)
    here.sendall(message()[:-1])
    end.receive()
    here.close()
    end.receive()
    assert end.arrived[0] == 0 and "closed" in end.shipment.lost[0]


def test_a_peer_that_leaves():
    sender, receiver = pair()
    sender.counters += 5
    sender.shipment.pump()
    sender.shipment.leave()
    receiver.receive()
    assert receiver.is_right(), "what it sent before arrives"
    assert receiver.shipment.lost == {0: "has left the plan"}
    sender.shipment.close()


def test_a_text_that_arrives_in_parts_while_others_speak():
    (near_1, far_1), (near_2, far_2) = socket.socketpair(), socket.socketpair()
    for each in (near_1, near_2):
        each.setblocking(False)
    follower = Follower(0, Placement.of("direct", ["a", "b", "b"]), {1: near_1, 2: near_2}, [], None)
    header = connection._HEADER.pack(connection._MAGIC, connection.LOST, 0, 2, 0, 11)
    ring = connection._HEADER.pack(connection._MAGIC, connection.RING, 0, 0, 0, 0)
    for sender, data in ((far_1, header + b"it "), (far_2, ring), (far_1, b"has "), (far_2, ring), (far_1, b"died")):
        sender.sendall(data)
        for each in list(follower.connections.values()):
            follower.receive(each)
    assert follower.lost == {2: "it has died"}
    follower.close()
    far_1.close()
    far_2.close()
