"""Published figures of devices and of the nodes that they are sold in.

Sources: NVIDIA's data sheets and architecture papers of the V100, A100, H100, GH200, T4, P100, Titan RTX, GeForce RTX
2080 Ti, GeForce RTX 3090 and RTX A4000, A5000 and A6000 (half of the throughput that they print for sparse matrices),
and AMD's of the MI300X. `peak_flop_per_s` is dense 16-bit matrix throughput (float16 with accumulation in float32 on
GeForce, where the data sheets distinguish; the P100, here the PCIe card, has no matrix units). A fabric's bandwidth is
one device's, in one direction: half of what data sheets print for NVLink, and PCIe 3.0 x16 without (4.0 for the RTX A);
of the MI300X, the one of its seven links that a pair of devices has. The RTX 2080 of the public Metis profiles has 11
GiB: it is the Ti.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ClusterError
from .cluster import Cluster, DeviceType, Fabric, Node, star

_GIB = 1 << 30


def _device(name: str, memory_gib: int, peak_tflop_per_s: float, memory_bandwidth_gb_per_s: float) -> DeviceType:
    return DeviceType(name, memory_gib * _GIB, peak_tflop_per_s * 1e12, memory_bandwidth_gb_per_s * 1e9)


DEVICE_TYPES: dict[str, DeviceType] = {
    device.name: device
    for device in (
        _device("A100-40", 40, 312, 1555),
        _device("A100-80", 80, 312, 2039),
        _device("GH-96", 96, 989, 4000),
        _device("H100-80", 80, 989, 3350),
        _device("MI300X", 192, 1307, 5300),
        _device("P100-16", 16, 18.7, 732),
        _device("RTX-2080", 11, 53.8, 616),
        _device("RTX-3090", 24, 71, 936),
        _device("RTX-A4000", 16, 76.7, 448),
        _device("RTX-A5000", 24, 111.1, 768),
        _device("RTX-A6000", 48, 154.8, 768),
        _device("T4", 16, 65, 320),
        _device("Titan-RTX", 24, 130.5, 672),
        _device("V100-16", 16, 125, 900),
    )
}

_PCIE3 = Fabric(12e9, 5e-6)  # of 15.75e9 on paper
_PCIE4 = Fabric(24e9, 5e-6)  # of 31.5e9 on paper
# The fabric of a device type's usual node, and what that node's network cards carry together (or one: see below).
_NODES: dict[str, tuple[Fabric, float]] = {
    "A100-40": (Fabric(300e9, 3e-6), 12.5e9),
    "A100-80": (Fabric(300e9, 3e-6), 25e9),
    "GH-96": (Fabric(450e9, 3e-6), 25e9),
    "H100-80": (Fabric(450e9, 3e-6), 50e9),
    "MI300X": (Fabric(64e9, 3e-6), 50e9),
    "P100-16": (_PCIE3, 1.25e9),
    "RTX-2080": (_PCIE3, 1.25e9),
    "RTX-3090": (_PCIE3, 1.25e9),
    "RTX-A4000": (_PCIE4, 1.25e9),
    "RTX-A5000": (_PCIE4, 1.25e9),
    "RTX-A6000": (_PCIE4, 1.25e9),
    "T4": (_PCIE3, 1.25e9),
    "Titan-RTX": (_PCIE3, 1.25e9),
    "V100-16": (Fabric(150e9, 3e-6), 12.5e9),
}
_CARD_PER_DEVICE = {"H100-80", "MI300X"}  # whose nodes have a network card of 400 Gbit/s for each device


# Processes on CPUs, assumed: what one rank stores to shared memory while the others do, and a socket over 1 Gbit/s, by
# a switch. They stand in until `triton-ext probe` has measured; the planning of jobs has no use for them.
_CPU = DeviceType("CPU", 8 * _GIB, 100e9, 10e9)
_SHARED_MEMORY, _SOCKET_BYTES_PER_S, _SOCKET_S = Fabric(6e9, 1e-6), 0.118e9, 50e-6


def device_type(name: str) -> DeviceType:
    """A published device by name; ClusterError with all names for one that is not there."""
    if name not in DEVICE_TYPES:
        raise ClusterError(f"no published device {name!r}; there are {', '.join(sorted(DEVICE_TYPES))}")
    return DEVICE_TYPES[name]


def cluster(counts: dict[str, int], devices_per_node: int = 4, network_latency_s: float = 10e-6) -> Cluster:
    """A cluster of published devices, e.g. {"A100-40": 8, "V100-16": 6}: nodes of `devices_per_node` devices of one
    type (the last one may have fewer), all linked to one switch with the bandwidth that is usual for the type."""
    if devices_per_node < 1:
        raise ClusterError(f"{devices_per_node} devices per node; give at least 1")
    nodes, widths = [], {}
    for name, count in counts.items():
        device_type(name)
        if count < 1:
            raise ClusterError(f"{count} devices of type {name}; give at least 1")
        fabric, width = _NODES[name]
        for first in range(0, count, devices_per_node):
            size = min(devices_per_node, count - first)
            node = Node(f"{name}.{first // devices_per_node}", (name,) * size, fabric)
            nodes.append(node)
            widths[node.name] = width * size if name in _CARD_PER_DEVICE else width
    return star([DEVICE_TYPES[name] for name in counts], nodes, widths, network_latency_s)


def cpu_hosts(ranks_per_host: Sequence[int]) -> Cluster:
    """Hosts whose ranks are processes on CPUs: shared memory within each, 1 Gbit/s to one switch."""
    nodes = [Node(f"host{i}", (_CPU.name,) * ranks, _SHARED_MEMORY) for i, ranks in enumerate(ranks_per_host)]
    return star([_CPU], nodes, _SOCKET_BYTES_PER_S, _SOCKET_S)


def gpu_hosts(ranks_per_host: Sequence[int]) -> Cluster:
    """Hosts with an A100-80 for each rank, and the network of its usual node."""
    kind = DEVICE_TYPES["A100-80"]
    fabric, width = _NODES[kind.name]
    nodes = [Node(f"host{i}", (kind.name,) * ranks, fabric) for i, ranks in enumerate(ranks_per_host)]
    return star([kind], nodes, width, 10e-6)


def parse(text: str) -> Cluster:
    """The cluster of published devices that a text like "A100-40=8,V100-16=6" names."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, separator, number = part.strip().partition("=")
        if not separator or not number.isdecimal():
            raise ClusterError(f"{part.strip()!r}: write devices as TYPE=COUNT with commas, as in A100-40=8,V100-16=6")
        if name in counts:
            raise ClusterError(f"device type {name} is there twice; give one count")
        counts[name] = int(number)
    return cluster(counts)
