"""Everything that a search may choose for a stage, as arrays: groups of devices, and what any layers cost on them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from .layer_tables import Floats, LayerTables
from .plan import Settings
from .space import Group, Order, Splits, divisors

Ints = NDArray[np.int64]
Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class Choice:
    """What a search fixes before it forms stages."""

    order: int  # index into `space.orders`
    microbatches: int
    settings: Settings


def choices(orders: Sequence[Order], global_batch: int, settings: Sequence[Settings]) -> list[Choice]:
    return [Choice(o, b, s) for s in settings for b in divisors(global_batch) for o in range(len(orders))]


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
class Options:
    """The groups that can compute a micro-batch under a choice.

    By group: first, last, tp, dp, kind (an index into the tables), samples (of each replica), least and most (samples
    of a replica), even (all have the same). Tables by kind and layers [begin, end), each (L + 1, L + 1), inf where no
    device has room for one micro-batch: least and largest forward and backward over the replicas; slowest_s and its
    forward_share; shard_bytes; optimizer_s; flights: the micro-batches in flight that fit.
    """

    groups: tuple[Group, ...]
    samples: tuple[tuple[int, ...], ...]
    index: Ints  # into the order's groups
    first: Ints
    last: Ints
    tp: Ints
    dp: Ints
    kind: Ints
    most: Ints
    even: Masks
    least_forward_s: Floats
    least_backward_s: Floats
    most_forward_s: Floats
    most_backward_s: Floats
    slowest_s: Floats
    slowest_forward_s: Floats
    shard_bytes: Floats
    optimizer_s: Floats
    flights: Floats
    rejected: dict[str, int] = field(default_factory=dict)


KindKey = tuple[int, frozenset[tuple[str, int, int]]]  # dp, and the points of the replicas


def options(
    cluster: Cluster,
    found: Sequence[Group],
    tables: LayerTables,
    splits: Splits,
    samples: int,
    known: dict[KindKey, list[Floats]],
) -> Options | dict[str, int]:
    """The options for micro-batches of so many samples; or, where there are none, groups counted by reason. `known`
    keeps what is computed for a kind of group, for other orders of the same devices."""
    usable: list[tuple[int, Group, tuple[int, ...]]] = []
    rejected: dict[str, int] = {}
    for index, group in enumerate(found):
        shares = splits.split(group, samples)
        if isinstance(shares, str):
            rejected[shares] = rejected.get(shares, 0) + 1
        else:
            usable.append((index, group, shares))
    if not usable:
        return rejected
    kinds: dict[KindKey, int] = {}
    kind = []
    for _, group, shares in usable:
        keys = frozenset((name, group.tp, share) for name, share in zip(group.types, shares, strict=True))
        kind.append(kinds.setdefault((group.dp, keys), len(kinds)))
    for key in kinds:
        if key not in known:
            known[key] = _kind(cluster, tables, key[0], sorted(key[1]))
    columns = [known[key] for key in kinds]
    stacked = [np.array(column) for column in zip(*columns, strict=True)]
    return Options(
        tuple(group for _, group, _ in usable),
        tuple(shares for *_, shares in usable),
        np.array([index for index, *_ in usable]),
        np.array([group.first for _, group, _ in usable]),
        np.array([group.last for _, group, _ in usable]),
        np.array([group.tp for _, group, _ in usable]),
        np.array([group.dp for _, group, _ in usable]),
        np.array(kind),
        np.array([max(shares) for *_, shares in usable]),
        np.array([min(shares) == max(shares) for *_, shares in usable]),
        *stacked,  # type: ignore[arg-type]
        rejected=rejected,
    )


def _kind(cluster: Cluster, tables: LayerTables, dp: int, keys: Sequence[tuple[str, int, int]]) -> list[Floats]:
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
