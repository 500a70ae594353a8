"""Clos networks as clusters: of equal racks, and of the racks that a public list of hosts names."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ClusterError
from .cluster import Cluster, DeviceType, Link, Node

_LINGJUN_COLUMNS = ("ip", "DSW", "PSW", "ASW")


@dataclass(frozen=True)
class ClosLinks:
    """Bandwidths, each way, of a Clos network's cables, the latency of each, and how many ways lead up.

    Every aggregation switch of a pod has a link to each rack's switch. With several pods, each has a link to a core
    switch of its own number too.
    """

    aggregation_switches: int  # of a pod
    node_bandwidth_bytes_per_s: float
    uplink_bandwidth_bytes_per_s: float  # between a rack's switch and one aggregation switch
    core_bandwidth_bytes_per_s: float = 0.0  # between an aggregation switch and its core switch
    latency_s: float = 1e-6


def clos(
    device_types: Iterable[DeviceType], pods: Mapping[str, Mapping[str, Sequence[Node]]], links: ClosLinks
) -> Cluster:
    """Nodes by pod and rack; in one pod two layers of switches, in several three.

    Two nodes of one rack have one path, others as many as there are aggregation switches in a pod.
    Raises ClusterError for an empty network, and for several pods without bandwidth to the cores.
    """
    if links.aggregation_switches < 1:
        raise ClusterError(f"{links.aggregation_switches} aggregation switches; give at least one")
    if not any(nodes for racks in pods.values() for nodes in racks.values()):
        raise ClusterError("a Clos network without nodes; give at least one rack with one node")
    three_layers = len(pods) > 1
    switches: list[str] = [f"core{i}" for i in range(links.aggregation_switches if three_layers else 0)]
    cables: list[tuple[str, str, float]] = []
    for pod, racks in pods.items():
        aggregation = [f"{pod}-agg{i}" if three_layers else f"agg{i}" for i in range(links.aggregation_switches)]
        switches += [*racks, *aggregation]
        for rack, nodes in racks.items():
            cables += [(node.name, rack, links.node_bandwidth_bytes_per_s) for node in nodes]
            cables += [(rack, switch, links.uplink_bandwidth_bytes_per_s) for switch in aggregation]
        if three_layers:
            cables += [(a, f"core{i}", links.core_bandwidth_bytes_per_s) for i, a in enumerate(aggregation)]
    return Cluster(
        tuple(device_types),
        tuple(node for racks in pods.values() for nodes in racks.values() for node in nodes),
        tuple(switches),
        tuple(
            Link(source, destination, width, links.latency_s)
            for low, high, width in cables
            for source, destination in ((low, high), (high, low))
        ),
    )


def two_layers(device_type: DeviceType, node: Node, racks: int, nodes_per_rack: int, links: ClosLinks) -> Cluster:
    """Equal racks tor0, tor1, … in one pod, of nodes like `node`, numbered through."""
    pod = {
        f"tor{rack}": [
            Node(f"{node.name}{number}", node.device_types, node.fabric)
            for number in range(rack * nodes_per_rack, (rack + 1) * nodes_per_rack)
        ]
        for rack in range(racks)
    }
    return clos((device_type,), {"pod": pod}, links)


def lingjun(file: Path, device_type: DeviceType, node: Node, links: ClosLinks) -> Cluster:
    """The 847 hosts of Alibaba's GPU cluster dataset 2023 (topo.csv), each like `node`.

    A row names a host's core (DSW), its pod's aggregation layer (PSW) and its rack's switch in that pod (ASW). Counts
    of switches, cables and speeds are not published: `links` says what is assumed of them. Hosts are named by pod, rack
    and number, P10-S14-h0, and do not depend on the order of the rows. Raises ClusterError for another file.
    """
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            rows = [_lingjun_host(row, f"{file}: line {reader.line_num}") for row in reader]
    except csv.Error as error:
        raise ClusterError(f"{file}: line {reader.line_num}: it is not CSV: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file}: it cannot be read: {error}") from None
    except KeyError as error:
        raise ClusterError(f"{file}: no column {error}; the file needs {', '.join(_LINGJUN_COLUMNS)}") from None
    pods: dict[str, dict[str, list[Node]]] = {}
    for _host, _core, pod, rack in sorted(rows, key=lambda row: (row[2], row[3], row[0])):
        name = f"{pod}-{rack}"
        nodes = pods.setdefault(pod, {}).setdefault(name, [])
        nodes.append(Node(f"{name}-h{len(nodes)}", node.device_types, node.fabric))
    return clos((device_type,), pods, links)


def _lingjun_host(row: Mapping[str | None, str | None], where: str) -> tuple[str, ...]:
    """The cells that are needed of a row; KeyError if the file has no such column."""
    cells = [row[column] for column in _LINGJUN_COLUMNS]
    if None in row or not all(cells):
        raise ClusterError(f"{where}: a row has a cell for each column, and none empty; this one: {list(row.values())}")
    return tuple(cell for cell in cells if cell)
