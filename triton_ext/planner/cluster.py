"""A cluster as immutable data: nodes of devices, switches, and links with a latency and a bandwidth per direction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..errors import ClusterError

Path = tuple[int, ...]  # indices into Cluster.links, from the source on


def _positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ClusterError(f"{where}: {name} is {value}; give a positive number")


def _latency(where: str, latency_s: float) -> None:
    if not (math.isfinite(latency_s) and latency_s >= 0):
        raise ClusterError(f"{where}: latency_s is {latency_s}; give 0 or more")


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ClusterError(f"two {what} are named {name!r}; every name may be used once")
        seen.add(name)


@dataclass(frozen=True)
class DeviceType:
    """What one device has: bytes of memory, dense 16-bit flop/s, bytes/s of its memory."""

    name: str
    memory_bytes: int
    peak_flop_per_s: float
    memory_bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        _positive(
            f"device type {self.name}",
            memory_bytes=self.memory_bytes,
            peak_flop_per_s=self.peak_flop_per_s,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
        )


@dataclass(frozen=True)
class Fabric:
    """What joins the devices of a node: every device sends and receives this much at once, as through a crossbar."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _positive("fabric", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        _latency("fabric", self.latency_s)


@dataclass(frozen=True)
class Node:
    """A host with its devices, by type, in the order of their local indices."""

    name: str
    device_types: tuple[str, ...]
    fabric: Fabric


@dataclass(frozen=True)
class Link:
    """One direction of a cable between nodes or switches."""

    source: str
    destination: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise ClusterError(f"link {self.source} -> {self.destination}: both ends are the same; give two")
        _positive(f"link {self.source} -> {self.destination}", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        _latency(f"link {self.source} -> {self.destination}", self.latency_s)


@dataclass(frozen=True)
class Device:
    """One device: its index in the cluster, its type, the index of its node and its place there."""

    index: int
    type: str
    node: int
    local_index: int


@dataclass(frozen=True)
class Cluster:
    """Nodes in order, the switches, and the directed links between them.

    Raises ClusterError for names used twice, device types and endpoints that nothing defines, and numbers that are
    not positive.
    """

    device_types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        _unique("device types", (t.name for t in self.device_types))
        _unique("nodes or switches", [n.name for n in self.nodes] + list(self.switches))
        known = {t.name for t in self.device_types}
        for node in self.nodes:
            if not node.device_types:
                raise ClusterError(f"node {node.name} has no devices; give it one, or make it a switch")
            for name in node.device_types:
                if name not in known:
                    raise ClusterError(
                        f"node {node.name}: device type {name!r} is not defined; there are {', '.join(sorted(known))}"
                    )
        ends = {n.name for n in self.nodes} | set(self.switches)
        for link in self.links:
            for end in (link.source, link.destination):
                if end not in ends:
                    raise ClusterError(f"link {link.source} -> {link.destination}: no node or switch is named {end!r}")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, node by node."""
        found: list[Device] = []
        for number, node in enumerate(self.nodes):
            for local_index, name in enumerate(node.device_types):
                found.append(Device(len(found), name, number, local_index))
        return tuple(found)

    def device_type(self, name: str) -> DeviceType:
        for candidate in self.device_types:
            if candidate.name == name:
                return candidate
        raise ClusterError(f"no device type {name!r}; there are {', '.join(t.name for t in self.device_types)}")

    def node_index(self, name: str) -> int:
        """Of the node with this name; ClusterError if there is none."""
        if name not in self._node_indices:
            some = ", ".join([node.name for node in self.nodes[:8]] + ["…"] * (len(self.nodes) > 8))
            raise ClusterError(f"no node is named {name!r}; there are {some}")
        return self._node_indices[name]

    def paths(self, source_node: int, destination_node: int) -> tuple[Path, ...]:
        """Every path with the fewest links between two nodes, as ECMP sees them, ordered by the indices of their links.

        A packet does not pass through a third node. One empty path within a node; ClusterError where there is no way.
        """
        key = (source_node, destination_node)
        if key not in self._paths:
            self._paths[key] = self._shortest(*key)
        return self._paths[key]

    def path(self, source_node: int, destination_node: int) -> Path:
        """The widest of `paths`, the first of equally wide ones."""
        return max(
            self.paths(source_node, destination_node),
            key=lambda path: min((self.links[i].bandwidth_bytes_per_s for i in path), default=math.inf),
        )

    def bandwidth_bytes_per_s(self, source_node: int, destination_node: int) -> float:
        """Of the narrowest link of the path; within a node, of its fabric."""
        if source_node == destination_node:
            return self.nodes[source_node].fabric.bandwidth_bytes_per_s
        return min(self.links[i].bandwidth_bytes_per_s for i in self.path(source_node, destination_node))

    def latency_s(self, source_node: int, destination_node: int) -> float:
        """Summed over the links of the path; within a node, of its fabric."""
        if source_node == destination_node:
            return self.nodes[source_node].fabric.latency_s
        return sum(self.links[i].latency_s for i in self.path(source_node, destination_node))

    @cached_property
    def _paths(self) -> dict[tuple[int, int], tuple[Path, ...]]:
        return {}

    @cached_property
    def _node_indices(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def _outgoing(self) -> dict[str, list[int]]:
        outgoing: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            outgoing.setdefault(link.source, []).append(index)
        return outgoing

    def _shortest(self, source_node: int, destination_node: int) -> tuple[Path, ...]:
        if source_node == destination_node:
            return ((),)
        source, destination = self.nodes[source_node].name, self.nodes[destination_node].name
        reached: dict[str, list[Path]] = {source: [()]}  # breadth first
        seen = {source}
        while reached and destination not in reached:
            following: dict[str, list[Path]] = {}
            for place, paths in reached.items():
                for index in self._outgoing.get(place, ()):
                    after = self.links[index].destination
                    if after not in seen and (after == destination or after not in self._node_indices):
                        following.setdefault(after, []).extend((*path, index) for path in paths)
            seen.update(following)
            reached = following
        if destination not in reached:
            raise ClusterError(f"no path from node {source} to node {destination}; add the links between them")
        return tuple(sorted(reached[destination]))


def star(
    device_types: Iterable[DeviceType],
    nodes: Iterable[Node],
    bandwidth_bytes_per_s: float | dict[str, float],
    latency_s: float,
) -> Cluster:
    """Nodes that are all linked to one switch, "switch", both ways; the bandwidth is all links', or by node's name."""
    nodes = tuple(nodes)
    links = []
    for node in nodes:
        if isinstance(bandwidth_bytes_per_s, dict):
            width = bandwidth_bytes_per_s.get(node.name)
            if width is None:
                raise ClusterError(f"node {node.name} has no bandwidth to the switch; give one")
        else:
            width = bandwidth_bytes_per_s
        links += [Link(node.name, "switch", width, latency_s), Link("switch", node.name, width, latency_s)]
    return Cluster(tuple(device_types), nodes, ("switch",), tuple(links))
