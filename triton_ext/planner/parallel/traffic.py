"""What a plan sends over the cluster: activations between stages, gradients among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cluster import Cluster
from .flows import Resource
from .plan import Replica


@dataclass(frozen=True)
class Transfer:
    """Part of a micro-batch, from one replica to another; or a ring's traffic between neighbours."""

    source: int  # replicas, by their place in the stage
    destination: int
    samples: int
    resources: tuple[Resource, ...]
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
                transfers.append(Transfer(source, destination, shared, resources, latency_s))
        first += sender.samples
    return transfers


def ring(cluster: Cluster, replicas: Sequence[Replica]) -> list[Transfer]:
    """The edges of a ring through a stage's replicas in order; `samples` is 0."""
    edges = []
    for source, sender in enumerate(replicas):
        destination = (source + 1) % len(replicas)
        resources, latency_s = _way(cluster, sender, replicas[destination])
        edges.append(Transfer(source, destination, 0, resources, latency_s))
    return edges


def capacity(cluster: Cluster, resource: Resource) -> float:
    """Bytes/s of a link or of a device's port."""
    kind, index = resource  # type: ignore[misc]
    if kind == "link":
        return cluster.links[index].bandwidth_bytes_per_s
    return cluster.nodes[cluster.devices[index].node].fabric.bandwidth_bytes_per_s


def inside_node(transfer: Transfer) -> bool:
    return transfer.resources[0][0] != "link"  # type: ignore[index]


def _way(cluster: Cluster, sender: Replica, receiver: Replica) -> tuple[tuple[Resource, ...], float]:
    source, destination = cluster.devices[sender.devices[0]], cluster.devices[receiver.devices[0]]
    latency_s = cluster.latency_s(source.node, destination.node)
    if source.node == destination.node:
        return (("out", source.index), ("in", destination.index)), latency_s
    return tuple(("link", index) for index in cluster.path(source.node, destination.node)), latency_s
