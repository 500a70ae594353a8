"""The plans that our search and its oracle choose from.

- Device types in any order; the devices of a type node by node, in an order that follows from what the nodes are and
  not from where a file lists them (`ordered_devices`).
- A stage is a run of consecutive devices in that order, cut into replicas of tp consecutive devices: every replica
  inside one node and of one type.
- The number of micro-batches is a divisor of the global batch. A stage's replicas share a micro-batch so that the
  slowest takes least for the whole model; each has at least one sample, and as many as the smallest profiled
  micro-batch of its type and degree.
- Layers are cut anywhere; no stage is empty. All devices are used, unless some may be left out: then any run of them
  between, before or after the stages.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from .layer_tables import LayerTables
from .plan import ParallelPlan, Replica, Settings, Stage
from .profiles import Gap

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Device types in one order, and the devices, indices into the cluster's, that follow from it."""

    types: tuple[str, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Devices [first, last) of an order, as replicas of tp devices."""

    first: int
    last: int
    tp: int
    replicas: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]  # of each replica
    counts: tuple[tuple[str, int], ...]  # of replicas by type

    @property
    def dp(self) -> int:
        return len(self.replicas)


def ordered_nodes(cluster: Cluster) -> tuple[int, ...]:
    """The nodes by their device types, then those with more devices first, with faster fabric, with wider links, and
    by name, whose numbers count as such."""
    widths: Counter[str] = Counter()
    for link in cluster.links:
        for end in (link.source, link.destination):
            widths[end] += link.bandwidth_bytes_per_s  # type: ignore[assignment]

    def key(index: int) -> tuple[object, ...]:
        node = cluster.nodes[index]
        name = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", node.name)]
        fabric = (-node.fabric.bandwidth_bytes_per_s, node.fabric.latency_s)
        return (sorted(set(node.device_types)), -len(node.device_types), *fabric, -widths[node.name], name)

    return tuple(sorted(range(len(cluster.nodes)), key=key))


def ordered_devices(cluster: Cluster) -> tuple[int, ...]:
    """All devices, in the order of their nodes."""
    return tuple(d.index for node in ordered_nodes(cluster) for d in cluster.devices if d.node == node)


def orders(cluster: Cluster) -> list[Order]:
    """All orders of the types that the cluster has devices of."""
    devices = ordered_devices(cluster)
    types = sorted({device.type for device in cluster.devices})
    return [
        Order(order, tuple(d for name in order for d in devices if cluster.devices[d].type == name))
        for order in itertools.permutations(types)
    ]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def groups(cluster: Cluster, order: Order, degrees: Sequence[int], anywhere: bool = False) -> list[Group]:
    """Every run of devices with every tensor-parallel degree that cuts it into replicas. Anywhere: replicas may lie in
    several nodes and have several types."""
    places = [(cluster.devices[d].node, cluster.devices[d].type) for d in order.devices]
    count = len(places)
    found = []
    for tp in degrees:
        whole = [i + tp <= count and (anywhere or len(set(places[i : i + tp])) == 1) for i in range(count)]
        for first in range(count):
            last = first
            while last < count and whole[last]:
                last += tp
                starts = range(first, last, tp)
                types = tuple(places[i][1] for i in starts)
                counts = tuple((name, types.count(name)) for name in sorted(set(types)))
                found.append(Group(first, last, tp, tuple(order.devices[i : i + tp] for i in starts), types, counts))
    return sorted(found, key=lambda group: (group.first, group.last, group.tp))


@dataclass(frozen=True)
class Split:
    """Samples of the replicas of each type, the larger shares first, and the profile points that they need."""

    shares: dict[str, list[int]]
    points: tuple[tuple[str, int, int], ...]


def shared(group: Group, shares: dict[str, list[int]]) -> tuple[int, ...]:
    """Samples of each replica: among those of a type, earlier ones have the larger shares."""
    rest = {name: iter(values) for name, values in shares.items()}
    return tuple(next(rest[name]) for name in group.types)


class Splits:
    """How replicas share the samples of a micro-batch; what does not depend on their number is computed once."""

    def __init__(self, tables: LayerTables) -> None:
        self._tables = tables
        self._times_s: dict[tuple[str, int], tuple[int, list[float]]] = {}
        self._steps: dict[tuple[tuple[str, ...], int, int], tuple[Ints, Ints] | None] = {}
        self._found: dict[tuple[tuple[tuple[str, int], ...], int, int], Split | str] = {}

    def split(self, group: Group, samples: int) -> Split | str:
        """Of a micro-batch of so many samples; or the code of the reason why there is none."""
        key = (group.counts, group.tp, samples)
        if key not in self._found:
            self._found[key] = self._shared(group.counts, group.tp, samples, group.dp)
        return self._found[key]

    def _shared(self, counts: tuple[tuple[str, int], ...], tp: int, samples: int, dp: int) -> Split | str:
        if samples < dp:
            return "samples"
        names = tuple(name for name, _ in counts)
        steps = self._ordered(names, tp, samples)
        if steps is None:
            return "profile"
        # Everyone has the fewest samples that have a profile. Each step gives one more to all replicas of a type, the
        # quickest to finish it first; the last step is for some of them.
        least, owners = steps
        numbers = np.array([count for _, count in counts])
        start = int(numbers @ least)
        given = start + np.cumsum(numbers[owners])
        until = int(np.searchsorted(given, samples))
        if samples < start or (samples > start and until == len(owners)):
            return "profile"
        whole = np.bincount(owners[:until], minlength=len(names)) + least
        rest = samples - int(numbers @ whole)
        shares = {name: [int(share)] * count for (name, count), share in zip(counts, whole, strict=True)}
        for index in range(rest):
            shares[names[owners[until]]][index] += 1
        points = {(name, tp, share) for name, values in shares.items() for share in values}
        if any(isinstance(self._tables.total_s(point), Gap) for point in points):
            return "profile"
        return Split(shares, tuple(sorted(points)))

    def _ordered(self, names: tuple[str, ...], tp: int, samples: int) -> tuple[Ints, Ints] | None:
        """The fewest samples of each type, and whose share then grows by one, step by step: by the time that the whole
        model takes with it. None where a type has no profile of so few samples."""
        key = (names, tp, samples)
        if key not in self._steps:
            rows = [self._times(name, tp) for name in names]
            times = [row[: max(0, samples - least + 1)] for least, row in rows]
            steps = sorted((time_s, owner) for owner, row in enumerate(times) for time_s in row[1:])
            owners = np.array([owner for _, owner in steps], dtype=np.int64)
            self._steps[key] = (np.array([least for least, _ in rows]), owners) if all(times) else None
        return self._steps[key]

    def _times(self, name: str, tp: int) -> tuple[int, list[float]]:
        """The fewest samples with a profile, and the time of all layers for so many, one more and so on, as far as
        profiles reach; never less than with fewer samples. What is missing in between takes as long as fewer."""
        key = (name, tp)
        if key not in self._times_s:
            profiles = self._tables.profiles
            most = max((samples for kind, _, samples in profiles.points if kind == name), default=0)
            found = ((n, self._tables.total_s((name, tp, n))) for n in range(1, most + 1))
            there = {n: total_s for n, total_s in found if not isinstance(total_s, Gap)}
            least = min(there, default=1)
            filled = (there.get(n, 0.0) for n in range(least, max(there, default=0) + 1))
            self._times_s[key] = (least, list(itertools.accumulate(filled, max)))
        return self._times_s[key]


def plan(
    stages: Sequence[tuple[Group, tuple[int, ...], int, int]],
    microbatches: int,
    global_batch: int,
    schedule: str,
    settings: Settings,
) -> ParallelPlan:
    """Of groups, their samples, and their layers [begin, end)."""
    return ParallelPlan(
        tuple(
            Stage(begin, end, tuple(Replica(d, s) for d, s in zip(group.replicas, samples, strict=True)))
            for group, samples, begin, end in stages
        ),
        microbatches,
        global_batch,
        schedule,
        settings,
    )


def chains(found: Sequence[Group], devices: int, most: int, allow_unused: bool) -> Iterator[tuple[Group, ...]]:
    """Every sequence of at most `most` groups that follow each other over all devices (over any of them, in order, if
    some may be unused)."""
    by_first: dict[int, list[Group]] = {}
    for group in found:
        by_first.setdefault(group.first, []).append(group)

    def after(place: int, chain: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
        if chain and (place == devices or allow_unused):
            yield chain
        if len(chain) == most:
            return
        for first in range(place, devices if allow_unused else min(place + 1, devices)):
            for group in by_first.get(first, ()):
                yield from after(group.last, (*chain, group))

    return after(0, ())
