"""Everything that a search may choose for a stage, as arrays: groups of devices, and what any layers cost on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from .layer_tables import Floats, LayerTables
from .plan import Settings
from .space import Group, Order, Splits, divisors, shared

Ints = NDArray[np.int64]
Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class Choice:
    """What a search fixes before it forms stages."""

    order: int  # index into `space.orders`
    microbatches: int
    settings: Settings


def choices(orders: Sequence[Order], global_batch: int, settings: Sequence[Settings]) -> list[Choice]:
    return [Choice(o, b, s) for s in settings for o in range(len(orders)) for b in divisors(global_batch)]


@dataclass(frozen=True, eq=False)
class Network:
    """Of an order's groups: bytes/s and places that boundaries and rings need. By group unless said otherwise.

    ring_s_per_byte, ring_s: one pass of a shard round the replicas, and its latency. first_node, last_node; inside:
    the group lies in one node; aligned: no device of its nodes follows it. widest: bytes/s of the fastest way
    from it to another node.
    """

    ring_s_per_byte: Floats
    ring_s: Floats
    first_node: Ints
    last_node: Ints
    inside: Masks
    aligned: Masks
    widest: Floats
    leaving: Floats  # by node: bytes/s of its links
    entering: Floats  # by node
    fabric: Floats  # by node


def network(cluster: Cluster, order: Order, found: Sequence[Group]) -> Network:
    node_of = [cluster.devices[device].node for device in order.devices]
    count = len(cluster.nodes)
    width = np.zeros((count, count))
    latency = np.zeros((count, count))
    for a, b in itertools.product(sorted(set(node_of)), repeat=2):
        width[a, b], latency[a, b] = cluster.bandwidth_bytes_per_s(a, b), cluster.latency_s(a, b)
    fabric = np.diag(width).copy()
    outside = width - np.diag(fabric)
    names = {node.name: number for number, node in enumerate(cluster.nodes)}
    leaving, entering = np.zeros(count), np.zeros(count)
    for link in cluster.links:
        if link.source in names:
            leaving[names[link.source]] += link.bandwidth_bytes_per_s
        if link.destination in names:
            entering[names[link.destination]] += link.bandwidth_bytes_per_s
    slope, delay, widest, apart = [], [], [], []
    for group in found:
        heads = node_of[group.first : group.last : group.tp]
        edges = set(zip(heads, [*heads[1:], heads[0]], strict=True)) if group.dp > 1 else set()
        # Inside a node a device sends its own shard; between nodes the shards of all a replica's devices share links.
        costs = [(group.tp if a != b else 1) / width[a, b] for a, b in edges]
        slope.append((group.dp - 1) / group.dp * max(costs, default=0.0))
        delay.append((group.dp - 1) * max((latency[a, b] for a, b in edges), default=0.0))
        widest.append(max(outside[node].max(initial=0.0) for node in set(heads)))
        apart.append(set(heads).isdisjoint(node_of[group.last :]))
    last_node = np.array([node_of[group.last - 1] for group in found])
    first_node = np.array([node_of[group.first] for group in found])
    inside = np.array([len(set(node_of[group.first : group.last])) == 1 for group in found])
    return Network(
        np.array(slope),
        np.array(delay),
        first_node,
        last_node,
        inside,
        np.array(apart),
        np.array(widest),
        leaving,
        entering,
        fabric,
    )


@dataclass(frozen=True, eq=False)
class KindTables:
    """By kind of group and layers [begin, end), each (kinds, L + 1, L + 1); times are inf where no micro-batch fits
    into a device's memory: the least and the most of all replicas; slowest: of the replica that takes longest for both.
    flights: the micro-batches in flight that fit."""

    least_forward_s: Floats
    least_backward_s: Floats
    most_forward_s: Floats
    most_backward_s: Floats
    slowest_s: Floats
    slowest_forward_s: Floats
    shard_bytes: Floats
    optimizer_s: Floats
    flights: Floats


class Kinds:
    """Groups whose replicas are of the same types, degree and shares cost the same: they are of one kind."""

    def __init__(self, cluster: Cluster, tables: LayerTables) -> None:
        self._cluster, self._tables = cluster, tables
        sharded = tables.settings.shard_optimizer or tables.settings.shard_parameters
        self._by_dp = sharded  # only then does it matter how many replicas there are
        self._index: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
        self._rows: list[list[Floats]] = []
        self._stacked: KindTables | None = None

    def number(self, dp: int, points: tuple[tuple[str, int, int], ...]) -> int:
        """Of the kind with these points, which need a profile."""
        key = (dp if self._by_dp else 1, points)
        if key not in self._index:
            self._index[key] = len(self._rows)
            self._rows.append(_kind(self._cluster, self._tables, dp, points))
            self._stacked = None
        return self._index[key]

    @property
    def tables(self) -> KindTables:
        if self._stacked is None:
            self._stacked = KindTables(*(np.array(column) for column in zip(*self._rows, strict=True)))
        return self._stacked


@dataclass(frozen=True, eq=False)
class Options:
    """The groups that can compute a micro-batch under a choice: arrays by group.

    index: into the order's groups. kind: into `kinds.tables`. most: the largest share of a replica.
    """

    groups: tuple[Group, ...]
    shares: tuple[tuple[int, ...] | dict[str, list[int]], ...]  # of each replica, or by type, the larger first
    index: Ints
    first: Ints
    last: Ints
    kind: Ints
    most: Ints
    kinds: Kinds
    rejected: dict[str, int]

    def samples(self, option: int) -> tuple[int, ...]:
        """Of each replica."""
        shares = self.shares[option]
        return shared(self.groups[option], shares) if isinstance(shares, dict) else shares


def options(found: Sequence[Group], kinds: Kinds, splits: Splits, samples: int) -> Options | dict[str, int]:
    """The options for micro-batches of so many samples; or, where there are none, groups counted by reason."""
    usable: list[int] = []
    shares, kind = [], []
    rejected: dict[str, int] = {}
    for index, group in enumerate(found):
        split = splits.split(group, samples)
        if isinstance(split, str):
            rejected[split] = rejected.get(split, 0) + 1
        else:
            usable.append(index)
            shares.append(split.shares)
            kind.append(kinds.number(group.dp, split.points))
    if not usable:
        return rejected
    groups = tuple(found[index] for index in usable)
    return Options(
        groups=groups,
        shares=tuple(shares),
        index=np.array(usable),
        first=np.array([group.first for group in groups]),
        last=np.array([group.last for group in groups]),
        kind=np.array(kind),
        most=np.array([max(values[0] for values in share.values()) for share in shares]),
        kinds=kinds,
        rejected=rejected,
    )


def _kind(cluster: Cluster, tables: LayerTables, dp: int, keys: Sequence[tuple[str, int, int]]) -> list[Floats]:
    """In the order of KindTables' fields."""
    found = [tables.get(key, dp) for key in keys]
    limits = [cluster.device_type(name).memory_bytes for name, _, _ in keys]
    forward, backward = np.array([t.forward_s for t in found]), np.array([t.backward_s for t in found])
    slowest = (forward + backward).argmax(axis=0)[None]
    flights = np.full(forward.shape[1:], np.inf)
    for table, limit in zip(found, limits, strict=True):
        room = limit + 0.5 - table.fixed_bytes  # needs are rounded to whole bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(table.flight_bytes > 0, np.floor(room / table.flight_bytes + 1e-9), np.inf)
        flights = np.minimum(flights, np.where(room < 0, 0.0, fits))
    begin, end = np.indices(flights.shape)
    impossible = (begin >= end) | (flights < 1)

    def shown(values: Floats) -> Floats:
        return np.where(impossible, np.inf, values)

    return [
        shown(forward.min(axis=0)),
        shown(backward.min(axis=0)),
        shown(forward.max(axis=0)),
        shown(backward.max(axis=0)),
        shown(np.take_along_axis(forward + backward, slowest, 0)[0]),
        shown(np.take_along_axis(forward, slowest, 0)[0]),
        np.array([t.shard_bytes for t in found]).max(axis=0),
        np.array([t.optimizer_s for t in found]).max(axis=0),
        np.where(impossible, 0.0, flights),
    ]
