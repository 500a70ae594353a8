"""The bandwidth of a group of devices, as Metis's cost sees it: of the one node that they share, else the slowest one
between two of their nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import permutations

from ...cluster import Cluster


class Bandwidths:
    """Bytes/ms; each set of nodes is looked up once."""

    def __init__(self, cluster: Cluster, upstream_units: bool = False) -> None:
        self._cluster = cluster
        self._node = [device.node for device in cluster.devices]
        # The public implementation multiplies a bandwidth in GB/s by 2^20 to get bytes/ms.
        self._per_ms = (1 << 20) / 1e9 if upstream_units else 1e-3
        self._upstream = upstream_units
        self._pairs: dict[tuple[int, int], float] = {}
        self._sets: dict[frozenset[int], float] = {}

    def of_nodes(self, nodes: Collection[int]) -> float:
        key = frozenset(nodes)
        found = self._sets.get(key)
        if found is None:
            if len(key) == 1:
                (node,) = key
                found = self._pair(node, node)
            else:
                found = min(self._pair(a, b) for a, b in permutations(sorted(key), 2))
            self._sets[key] = found
        return found

    def of_devices(self, devices: Iterable[int]) -> float:
        return self.of_nodes({self._node[device] for device in devices})

    def between_stages(self, first: Sequence[int], second: Sequence[int]) -> float:
        return self.of_devices((*first, *second))

    def data_parallel(self, devices: Sequence[int], tp: int) -> float:
        """The slowest of a stage's all-reduce groups: the devices of one place in each replica."""
        nodes = {self._node[device] for device in devices}
        if len(nodes) == 1:
            return self.of_nodes(nodes)
        if self._upstream:  # tests the replicas instead
            groups = [devices[first : first + tp] for first in range(0, len(devices), tp)]
        else:
            groups = [devices[place::tp] for place in range(tp)]
        return min(self.of_devices(group) for group in groups)

    def _pair(self, a: int, b: int) -> float:
        found = self._pairs.get((a, b))
        if found is None:
            found = self._pairs[a, b] = self._cluster.bandwidth_bytes_per_s(a, b) * self._per_ms
        return found
