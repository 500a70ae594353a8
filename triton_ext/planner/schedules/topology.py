"""What a group of devices shares: the links that each pair of ranks takes through the cluster."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import PlanningError
from ..cluster import Cluster


class Route(NamedTuple):
    """From one rank to another: indices into Topology.bandwidths_bytes_per_s, and the latency of the way."""

    links: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, eq=False)
class Topology:
    """A group's ranks, numbered by their devices' indices, so that those of a node follow each other.

    A link here is whatever can be busy: for each rank what it sends into its node's fabric and what it takes from
    there, and each cable between nodes. bandwidths_bytes_per_s: of each. Between nodes, only the cables count, as in
    Cluster.bandwidth_bytes_per_s.
    """

    nodes: tuple[int, ...]
    bandwidths_bytes_per_s: tuple[float, ...]
    routes: dict[tuple[int, int], Route]

    @property
    def world(self) -> int:
        return len(self.nodes)


def topology_of(cluster: Cluster, devices: tuple[int, ...]) -> Topology:
    """The topology of distinct devices; kept for as long as the cluster lives, for the groups asked for last."""
    key = (id(cluster), devices)
    found = _known.get(key)
    if found is not None and found[0]() is cluster:
        _known.move_to_end(key)
        return found[1]
    topology = _topology(cluster, tuple(sorted(devices)))
    _known[key] = (weakref.ref(cluster), topology)
    _known.move_to_end(key)  # it may have been there, of a cluster that is gone
    while len(_known) > _CAPACITY:
        _known.popitem(last=False)
    return topology


_CAPACITY = 256
_known: OrderedDict[tuple[int, tuple[int, ...]], tuple[weakref.ref[Cluster], Topology]] = OrderedDict()


def _topology(cluster: Cluster, devices: tuple[int, ...]) -> Topology:
    last = len(cluster.devices) - 1
    if not devices or len(set(devices)) < len(devices) or not 0 <= devices[0] <= devices[-1] <= last:
        raise PlanningError(f"group {devices}: give distinct indices of the cluster's devices, 0 to {last}")
    nodes = tuple(cluster.devices[device].node for device in devices)
    world = len(devices)
    bandwidths: list[float] = []
    for node in nodes:
        bandwidths += [cluster.nodes[node].fabric.bandwidth_bytes_per_s] * 2
    cables: dict[int, int] = {}  # index in the cluster -> here
    routes = {}
    for source in range(world):
        for destination in range(world):
            ends = nodes[source], nodes[destination]
            if ends[0] == ends[1]:
                links: tuple[int, ...] = (2 * source, 2 * destination + 1)
            else:
                path = cluster.path(*ends)
                links = tuple(cables.setdefault(index, 2 * world + len(cables)) for index in path)
            routes[source, destination] = Route(links, cluster.latency_s(*ends))
    bandwidths += [cluster.links[index].bandwidth_bytes_per_s for index in cables]
    return Topology(nodes, tuple(bandwidths), routes)
