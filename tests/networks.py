"""Small clusters for tests of the planner."""

from __future__ import annotations

from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Link, Node
from triton_ext.planner.topologies import ClosLinks, two_layers

GPU = DeviceType("gpu", 1 << 30, 1e12, 1e9)


def node(name: str, devices: int = 8, fabric_bytes_per_s: float = 1e9) -> Node:
    return Node(name, ("gpu",) * devices, Fabric(fabric_bytes_per_s, 0.0))


def one_way(*links: tuple[str, str, float], nodes: tuple[str, ...]) -> Cluster:
    """Links by source, destination and bytes per second; whatever is not a node is a switch."""
    switches = sorted({end for link in links for end in link[:2]} - set(nodes))
    return Cluster(
        (GPU,),
        tuple(node(name) for name in nodes),
        tuple(switches),
        tuple(Link(a, b, width, 0.0) for a, b, width in links),
    )


def wire(bytes_per_s: float = 1.0) -> Cluster:
    """One link, from a to b."""
    return one_way(("a", "b", bytes_per_s), nodes=("a", "b"))


def line(*bytes_per_s: float) -> Cluster:
    """Nodes n0, n1, … at switches s0, s1, … that are joined one after the other, to the right only."""
    nodes = [f"n{i}" for i in range(len(bytes_per_s) + 1)]
    links = [(f"s{i}", f"s{i + 1}", width) for i, width in enumerate(bytes_per_s)]
    for i, name in enumerate(nodes):
        links += [(name, f"s{i}", 1e9), (f"s{i}", name, 1e9)]
    return one_way(*links, nodes=tuple(nodes))


def clos(
    racks: int, hosts_per_rack: int, aggregations: int, host_bytes_per_s: float, uplink_bytes_per_s: float
) -> Cluster:
    links = ClosLinks(aggregations, host_bytes_per_s, uplink_bytes_per_s, latency_s=0.0)
    return two_layers(GPU, node("host"), racks, hosts_per_rack, links)
