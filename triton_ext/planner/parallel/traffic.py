"""What a plan sends over the cluster: activations between stages, gradients among replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cluster import Cluster
from .flows import Loads, Resource
from .plan import Replica, Stage


@dataclass(frozen=True)
class Transfer:
    """From one replica to another (by their places in their stages): part of a micro-batch, or a ring's traffic.

    size: samples, or passes round the ring; loads: how many times it crosses links and ports.
    """

    source: int
    destination: int
    size: float
    loads: Loads
    latency_s: float


def boundary(cluster: Cluster, senders: Sequence[Replica], receivers: Sequence[Replica]) -> list[Transfer]:
    """What a stage sends to another for one micro-batch: replicas compute consecutive samples, in order.

    Across nodes a tensor-parallel replica's activation crosses once (each of its devices sends a part); inside a node
    it leaves through its first device's port.
    """
    transfers = []
    first = 0
    for source, sender in enumerate(senders):
        start = 0
        for destination, receiver in enumerate(receivers):
            shared = min(first + sender.samples, start + receiver.samples) - max(first, start)
            start += receiver.samples
            if shared > 0:
                resources, latency_s = _way(cluster, sender, receiver)
                loads = tuple((resource, 1.0) for resource in resources)
                transfers.append(Transfer(source, destination, shared, loads, latency_s))
        first += sender.samples
    return transfers


def ring(cluster: Cluster, stage: Stage) -> list[Transfer]:
    """The edges of a ring through a stage's replicas in order; none for one replica.

    The devices of a replica have a ring each: their traffic shares links, but not ports.
    """
    replicas, edges = stage.replicas, []
    for source, sender in enumerate(replicas if stage.dp > 1 else ()):
        destination = (source + 1) % len(replicas)
        resources, latency_s = _way(cluster, sender, replicas[destination])
        loads = tuple((resource, float(stage.tp) if resource[0] == "link" else 1.0) for resource in resources)
        edges.append(Transfer(source, destination, (stage.dp - 1) / stage.dp, loads, latency_s))
    return edges


def together(transfers: Sequence[Transfer]) -> Transfer:
    """Transfers that start at once, as one that takes as long as the last of them."""
    size = max(transfer.size for transfer in transfers)
    loads: dict[Resource, float] = {}
    for transfer in transfers:
        for resource, load in transfer.loads:
            loads[resource] = loads.get(resource, 0.0) + load * transfer.size / size
    latency_s = max(transfer.latency_s for transfer in transfers)
    return Transfer(0, 0, size, tuple(loads.items()), latency_s)


def seconds(capacity: dict[Resource, float], transfer: Transfer, size: float) -> float:
    """Of a transfer alone, of `size` bytes for each of its samples or passes, without latency."""
    busiest = max((load / capacity[resource] for resource, load in transfer.loads), default=0.0)
    return transfer.size * size * busiest


def capacities(cluster: Cluster, transfers: Iterable[Transfer]) -> dict[Resource, float]:
    """Bytes/s of the links and ports that transfers use."""
    return {resource: _capacity(cluster, resource) for transfer in transfers for resource, _ in transfer.loads}


def _capacity(cluster: Cluster, resource: Resource) -> float:
    kind, index = resource
    if kind == "link":
        return cluster.links[index].bandwidth_bytes_per_s
    return cluster.nodes[cluster.devices[index].node].fabric.bandwidth_bytes_per_s


def _way(cluster: Cluster, sender: Replica, receiver: Replica) -> tuple[tuple[Resource, ...], float]:
    source, destination = cluster.devices[sender.devices[0]], cluster.devices[receiver.devices[0]]
    latency_s = cluster.latency_s(source.node, destination.node)
    if source.node == destination.node:
        return (("out", source.index), ("in", destination.index)), latency_s
    return tuple(("link", index) for index in cluster.path(source.node, destination.node)), latency_s
