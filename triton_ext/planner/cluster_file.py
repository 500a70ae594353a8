"""Clusters in YAML and JSON files.

    device_types:                  # by name; a published device (`presets`) needs no entry here
      mine: {memory_gib: 24, peak_tflop_per_s: 71, memory_bandwidth_gb_per_s: 936}
    nodes:
      - {name: a, count: 2, devices: [{type: A100-40, count: 4}], fabric: {bandwidth_gb_per_s: 300, latency_us: 3}}
    switches: [s]
    links:                         # both directions, unless one_way is true; a0 and a1 come from `count: 2`
      - {from: a0, to: s, bandwidth_gb_per_s: 12.5, latency_us: 10}

GB are 10^9 bytes, GiB 2^30. Unknown and missing fields, wrong types and impossible numbers raise ClusterError, which
names the file and the field.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..errors import ClusterError
from . import documents, presets
from .cluster import Cluster, DeviceType, Fabric, Link, Node
from .documents import Count, Entry, Name, NotNegative, Positive

_GIB = 1 << 30


class _DeviceType(Entry):
    """Figures of one device: memory, dense 16-bit throughput and the speed of its memory."""

    memory_gib: Positive
    peak_tflop_per_s: Positive
    memory_bandwidth_gb_per_s: Positive


class _Devices(Entry):
    """Equal devices, in the order of their local indices."""

    type: Name
    count: Count = 1


class _Fabric(Entry):
    """What joins the devices of a node."""

    bandwidth_gb_per_s: Positive
    latency_us: NotNegative


class _Node(Entry):
    """A host, or several equal ones: with a count, a number from 0 follows the name."""

    name: Name
    count: Count | None = None
    devices: Annotated[list[_Devices], Field(min_length=1)]
    fabric: _Fabric


class _Link(Entry):
    """A cable between nodes or switches."""

    source: Annotated[str, Field(alias="from", min_length=1)]
    destination: Annotated[str, Field(alias="to", min_length=1)]
    bandwidth_gb_per_s: Positive
    latency_us: NotNegative
    one_way: bool = False


class _Document(Entry):
    """A cluster of devices that compute and links that carry."""

    device_types: dict[Name, _DeviceType] = Field(default_factory=dict)
    nodes: Annotated[list[_Node], Field(min_length=1)]
    switches: list[Name] = Field(default_factory=list)
    links: list[_Link] = Field(default_factory=list)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a cluster file, for editors and other programs."""
    return _Document.model_json_schema()


def load(path: Path) -> Cluster:
    """The cluster of a YAML or JSON file (JSON is YAML). Raises ClusterError."""
    return parse(documents.load(path, ClusterError), str(path))


def from_text(text: str) -> Cluster:
    """What a command's --cluster names: a cluster file, or published devices and how many (A100-40=8,V100-16=6)."""
    return presets.parse(text) if "=" in text and not Path(text).exists() else load(Path(text))


def parse(data: object, where: str) -> Cluster:
    """The cluster that a file's contents describe; `where` is named in errors."""
    document = documents.check(_Document, data, where, "cluster file", ClusterError)
    try:
        return _cluster(document)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def dump(cluster: Cluster, path: Path) -> None:
    """Write a cluster so that `load` gives it back: JSON for a name that ends in .json, YAML otherwise.

    Figures of up to 15 digits come back exactly, others within rounding.
    """
    data = _data(cluster)
    is_json = path.suffix == ".json"
    path.write_text(json.dumps(data, indent=2) if is_json else documents.dump(data), encoding="utf-8")


def _cluster(document: _Document) -> Cluster:
    types = {
        name: DeviceType(
            name,
            round(entry.memory_gib * _GIB),
            _scaled(entry.peak_tflop_per_s, 12),
            _scaled(entry.memory_bandwidth_gb_per_s, 9),
        )
        for name, entry in document.device_types.items()
    }
    nodes = []
    for entry in document.nodes:
        devices = tuple(group.type for group in entry.devices for _ in range(group.count))
        for name in devices:
            if name not in types:
                types[name] = presets.device_type(name)
        fabric = Fabric(_scaled(entry.fabric.bandwidth_gb_per_s, 9), _scaled(entry.fabric.latency_us, -6))
        names = [entry.name] if entry.count is None else [f"{entry.name}{i}" for i in range(entry.count)]
        nodes += [Node(name, devices, fabric) for name in names]
    links = []
    for cable in document.links:
        width, latency_s = _scaled(cable.bandwidth_gb_per_s, 9), _scaled(cable.latency_us, -6)
        links.append(Link(cable.source, cable.destination, width, latency_s))
        if not cable.one_way:
            links.append(Link(cable.destination, cable.source, width, latency_s))
    return Cluster(tuple(types.values()), tuple(nodes), tuple(document.switches), tuple(links))


def _data(cluster: Cluster) -> dict[str, Any]:
    return {
        "device_types": {
            kind.name: {
                "memory_gib": kind.memory_bytes / _GIB,
                "peak_tflop_per_s": _scaled(kind.peak_flop_per_s, -12),
                "memory_bandwidth_gb_per_s": _scaled(kind.memory_bandwidth_bytes_per_s, -9),
            }
            for kind in cluster.device_types
        },
        "nodes": [
            {
                "name": node.name,
                "devices": [{"type": name, "count": count} for name, count in _runs(node.device_types)],
                "fabric": _speed(node.fabric),
            }
            for node in cluster.nodes
        ],
        "switches": list(cluster.switches),
        "links": [
            {"from": link.source, "to": link.destination, **_speed(link), "one_way": True} for link in cluster.links
        ],
    }


def _speed(of: Fabric | Link) -> dict[str, float]:
    return {"bandwidth_gb_per_s": _scaled(of.bandwidth_bytes_per_s, -9), "latency_us": _scaled(of.latency_s, 6)}


def _scaled(value: float, power: int) -> float:
    """value x 10^power, of the decimal number that the value is written as: 25.99e-6 s are 25.99 us, both ways."""
    return float(Decimal(repr(value)).scaleb(power))


def _runs(names: tuple[str, ...]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs
