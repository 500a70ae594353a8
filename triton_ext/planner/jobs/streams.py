"""A job's flows on given paths, those that advance alike taken together as one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Path
from .job import Flow, Job

_Resource = tuple[int, int]  # (0, link) or (1, node): the fabric of a node


@dataclass(frozen=True)
class Streams:
    """Of each stream: its flows, bytes of the largest one, and what it uses. A byte is one of its largest flow.

    `flop_per_byte` says what a byte counts of F (Crux, SIGCOMM 2024, theorem 1): W over an iteration, in proportion to
    the bytes on the job's slowest link or fabric. `streams`, `links`, `weights` are entries as in `fairness.Usage`.
    `own_bytes_per_s` is the most that the fabrics, which are the job's own, and its declared time let each stream have.
    """

    flows: NDArray[np.int64]
    size_bytes: NDArray[np.float64]
    flop_per_byte: NDArray[np.float64]
    own_bytes_per_s: NDArray[np.float64]
    streams: NDArray[np.int64]
    links: NDArray[np.int64]
    weights: NDArray[np.float64]


def streams_of(cluster: Cluster, job: Job, paths: Sequence[Path]) -> Streams:
    """In lockstep all flows are one stream; else equal ones on one path are. Those in a node share its fabric.

    Alone on the network, they take the job's communication_s where it is declared: none is faster, and if the links
    are slower, each byte counts as so much less of their bandwidth. A job that declares it and has no flows has one
    stream, without a link.
    """
    if not job.flows and job.communication_s is not None:
        return _apart(job.communication_s)
    groups: dict[object, list[tuple[Flow, Path]]] = {}
    for flow, path in zip(job.flows, paths, strict=True):
        key = None if job.lockstep else (path or flow.source, flow.size_bytes)
        groups.setdefault(key, []).append((flow, path))
    sizes_bytes = np.array([max(flow.size_bytes for flow, _ in group) for group in groups.values()])
    used = [_bytes_by_resource(cluster, group) for group in groups.values()]
    total: dict[_Resource, float] = {}
    for bytes_of in used:
        for resource, amount in bytes_of.items():
            total[resource] = total.get(resource, 0.0) + amount
    modelled_s = max((amount / _bandwidth(cluster, resource) for resource, amount in total.items()), default=0.0)
    own = np.full(len(used), np.inf)
    part = 1.0  # of each byte
    if job.communication_s is not None:
        own = sizes_bytes / job.communication_s
        part = job.communication_s / modelled_s if modelled_s > job.communication_s else 1.0
    flop_per_byte = np.zeros(len(used))
    slowest = min(total, key=lambda r: (-total[r] / _bandwidth(cluster, r), r), default=None)
    for i, bytes_of in enumerate(used):
        if slowest is not None:
            flop_per_byte[i] = job.compute_flop * bytes_of.get(slowest, 0.0) / total[slowest] / sizes_bytes[i]
        for resource in bytes_of:
            if resource[0]:
                own[i] = min(own[i], sizes_bytes[i] * _bandwidth(cluster, resource) / (part * total[resource]))
    entries = [
        (i, resource[1], part * amount / sizes_bytes[i])
        for i, bytes_of in enumerate(used)
        for resource, amount in bytes_of.items()
        if not resource[0]
    ]
    return Streams(
        np.array([len(group) for group in groups.values()], dtype=np.int64),
        sizes_bytes,
        flop_per_byte,
        own,
        np.array([entry[0] for entry in entries], dtype=np.int64),
        np.array([entry[1] for entry in entries], dtype=np.int64),
        np.array([entry[2] for entry in entries], dtype=float),
    )


def _apart(communication_s: float) -> Streams:
    none, zero = np.zeros(0, dtype=np.int64), np.zeros(1)
    return Streams(np.zeros(1, dtype=np.int64), zero + 1, zero, 1 / (zero + communication_s), none, none, np.zeros(0))


def _bytes_by_resource(cluster: Cluster, group: Sequence[tuple[Flow, Path]]) -> dict[_Resource, float]:
    result: dict[_Resource, float] = {}
    for flow, path in group:
        uses = [(0, link) for link in path] or [(1, cluster.node_index(flow.source))]
        for resource in uses:
            result[resource] = result.get(resource, 0.0) + flow.size_bytes
    return result


def _bandwidth(cluster: Cluster, resource: _Resource) -> float:
    kind, index = resource
    if kind:
        return cluster.nodes[index].fabric.bandwidth_bytes_per_s
    return cluster.links[index].bandwidth_bytes_per_s
