"""A plan whose ranks are on several hosts: its connections, and what travels over them, handed to the proxy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..passes import abi, dialect
from . import proxy, transfers
from .flows import Flow, Placement
from .groups import Group
from .layout import Layout
from .segment import SIGNALS, Segment
from .shipment import Box, Follower, Incoming, Member, Outgoing, Shipment, Traffic
from .transports import tcp


def ship(
    group: Group,
    spec: dialect.Spec,
    where: Layout,
    placement: Placement,
    segment: Segment,
    memories: Sequence[torch.Tensor | None],
    boxes: Sequence[transfers.Outbox],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> Traffic:
    """Connect with other hosts. Collective; raises PlanError on every rank if that fails.

    memories: of the ranks of this host. boxes: of all ranks. dtypes: of the result, of what is sent to be reduced, and
    of sums.
    """
    me, (dtype, wire, acc) = group.rank, dtypes
    flows = placement.flows(spec, where)
    members = {rank: _member(segment, memories, rank) for rank in {*placement.served(me), me}}
    members[me].begin(me, placement.far(me), flows)
    sockets = tcp.connect(group, placement.connected(me))
    announces = spec.collective != "all_reduce"

    def outgoing(flow: Flow, sources: Sequence[int]) -> Outgoing:
        kind_dtype = wire if flow.kind == abi.OF_STAGE else dtype
        transfer = boxes[sources[0]].transfers[flow.destinations[0], flow.kind]
        found = [_box(segment, memories, boxes, source, flow, kind_dtype) for source in sources]
        return Outgoing(Flow(flow.kind, tuple(sources), flow.destinations), transfer, found, acc)

    traffic: Traffic
    if placement.gateways[me] != me:
        own = [outgoing(flow, [me]) for flow in flows if me in flow.sources]
        traffic = Follower(me, placement, sockets, own, members[me])
    else:
        traffic = Shipment(
            me,
            placement,
            sockets,
            {n: outgoing(flow, flow.sources) for n, flow in enumerate(flows) if flow.sources[0] in members},
            {
                n: _incoming(spec, where, segment, memories, flow)
                for n, flow in enumerate(flows)
                if flow.destinations[0] in members
            },
            members,
            announces,
        )
    proxy.proxy().add(traffic)
    return traffic


def _member(segment: Segment, memories: Sequence[torch.Tensor | None], rank: int) -> Member:
    memory = _of_this_host(memories, rank)
    announced = memory[segment.outbox :][: segment.world * 8].view(torch.int64).numpy()
    return Member(announced, segment.signals(memory)[:, SIGNALS.index("READY")].numpy())


def _box(
    segment: Segment,
    memories: Sequence[torch.Tensor | None],
    boxes: Sequence[transfers.Outbox],
    rank: int,
    flow: Flow,
    dtype: torch.dtype,
) -> Box:
    key = (flow.destinations[0], flow.kind)
    transfer, (counters, data) = boxes[rank].transfers[key], boxes[rank].places[key]
    memory = _of_this_host(memories, rank)[segment.outbox :]
    words = memory[counters:][: (transfer.slices + 1) * 8].view(torch.int64).numpy()
    values = memory[data:][: transfer.elements * transfer.item_bytes].view(dtype)
    return Box(words[:-1], words[-1:], values)


def _incoming(
    spec: dialect.Spec, where: Layout, segment: Segment, memories: Sequence[torch.Tensor | None], flow: Flow
) -> Incoming:
    is_result = flow.kind == abi.OF_RESULT
    offset, size = (segment.result, segment.item_bytes) if is_result else (segment.stage, segment.wire_bytes)
    source = flow.sources[0]
    item_bytes = {abi.OF_RESULT: segment.item_bytes, abi.OF_STAGE: segment.wire_bytes}
    transfer = transfers.outgoing(spec, where, source, flow.destinations[0], item_bytes)[flow.kind]
    shape = [transfer.shape[dim] for dim in transfer.order]
    strides = [transfer.strides[dim] * size for dim in transfer.order]
    targets, counters = [], []
    for destination in flow.destinations:
        memory = _of_this_host(memories, destination)
        there = memory.numpy()[offset + transfer.there * size :]
        targets.append(np.ndarray(shape, np.dtype(f"i{size}"), there.data, 0, strides))
        name = "REDUCED" if is_result and spec.reduces else "ARRIVED"
        counters.append(segment.signals(memory)[source, SIGNALS.index(name)].view(1).numpy())
    return Incoming(transfer, targets, counters)


def _of_this_host(memories: Sequence[torch.Tensor | None], rank: int) -> torch.Tensor:
    memory = memories[rank]
    assert memory is not None, "ranks of one host map each other's memory"
    return memory
