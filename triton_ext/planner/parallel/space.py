"""The plans that our search and its oracle choose from.

- Device types in any order; the devices of a type in the cluster's order.
- A stage is a run of consecutive devices in that order, cut into replicas of tp consecutive devices: every replica
  inside one node and of one type.
- The number of micro-batches is a divisor of the global batch. A stage's replicas share a micro-batch so that the
  slowest takes least for the whole model, at least one sample each.
- Layers are cut anywhere; no stage is empty. All devices are used, unless some may be left out: then any run of them
  between, before or after the stages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cluster import Cluster
from .layer_tables import LayerTables
from .plan import ParallelPlan, Replica, Settings, Stage
from .profiles import Gap


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

    @property
    def dp(self) -> int:
        return len(self.replicas)


def orders(cluster: Cluster) -> list[Order]:
    """All orders of the types that the cluster has devices of."""
    types = sorted({device.type for device in cluster.devices})
    return [
        Order(order, tuple(d.index for name in order for d in cluster.devices if d.type == name))
        for order in itertools.permutations(types)
    ]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def groups(cluster: Cluster, order: Order, degrees: Sequence[int]) -> list[Group]:
    """Every run of devices with every tensor-parallel degree that cuts it into replicas."""
    places = [(cluster.devices[d].node, cluster.devices[d].type) for d in order.devices]
    count = len(places)
    found = []
    for tp in degrees:
        whole = [len(set(places[i : i + tp])) == 1 and i + tp <= count for i in range(count)]
        for first in range(count):
            last = first
            while last < count and whole[last]:
                last += tp
                starts = range(first, last, tp)
                found.append(
                    Group(
                        first,
                        last,
                        tp,
                        tuple(order.devices[i : i + tp] for i in starts),
                        tuple(places[i][1] for i in starts),
                    )
                )
    return sorted(found, key=lambda group: (group.first, group.last, group.tp))


class Splits:
    """How replicas share the samples of a micro-batch; each case is computed once."""

    def __init__(self, tables: LayerTables) -> None:
        self._tables = tables
        self._found: dict[tuple[tuple[tuple[str, int], ...], int, int], dict[str, list[int]] | str] = {}

    def split(self, group: Group, samples: int) -> tuple[int, ...] | str:
        """Samples of each replica, or the code of the reason why there are none. Among replicas of a type, earlier ones
        have the larger shares."""
        counts = tuple((name, group.types.count(name)) for name in sorted(set(group.types)))
        key = (counts, group.tp, samples)
        if key not in self._found:
            self._found[key] = self._shares(counts, group.tp, samples, group.dp)
        found = self._found[key]
        if isinstance(found, str):
            return found
        shares = {name: iter(values) for name, values in found.items()}
        return tuple(next(shares[name]) for name in group.types)

    def _shares(self, counts: Sequence[tuple[str, int]], tp: int, samples: int, dp: int) -> dict[str, list[int]] | str:
        if samples < dp:
            return "fewer samples than replicas"
        if len(counts) == 1:
            (name, _), (share, more) = counts[0], divmod(samples, dp)
            values = [share + 1] * more + [share] * (dp - more)
            known = all(self._time_s(name, tp, value, dp) is not None for value in set(values))
            return {name: values} if known else "no profile"
        queue: list[tuple[float, str, int, int]] = []
        shares = {name: [1] * count for name, count in counts}
        for name, count in counts:
            if self._time_s(name, tp, 1, dp) is None:
                return "no profile"
            for index in range(count):
                self._push(queue, name, tp, 2, index, dp)
        # The next sample goes where it will be finished first: the slowest replica takes as little as possible.
        for _ in range(samples - dp):
            if not queue:
                return "no profile"
            _, name, index, after = heapq.heappop(queue)
            shares[name][index] = after
            self._push(queue, name, tp, after + 1, index, dp)
        return {name: sorted(values, reverse=True) for name, values in shares.items()}

    def _push(
        self, queue: list[tuple[float, str, int, int]], name: str, tp: int, samples: int, index: int, dp: int
    ) -> None:
        time_s = self._time_s(name, tp, samples, dp)
        if time_s is not None:
            heapq.heappush(queue, (time_s, name, index, samples))

    def _time_s(self, name: str, tp: int, samples: int, dp: int) -> float | None:
        """Of all layers; None outside the profiles."""
        table = self._tables.find((name, tp, samples), dp)
        return None if isinstance(table, Gap) else float(table.total_s[0, -1])


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
