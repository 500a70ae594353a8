"""The cluster model of a group that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ..errors import ClusterError
from .cluster import Cluster, DeviceType, Fabric, Link, Node
from .measurements import Measurements, Transport

_SAME_DEVICE = 0.15  # ranks' devices of one name whose throughputs differ by less are of one type
_STAR_ERROR = 0.15  # by which a bandwidth through one switch may differ from the measured one


def cluster(measured: Measurements, within_host: Transport = "messages") -> Cluster:
    """Hosts as nodes, ranks as devices in the order of their ranks; `within_host` is what the nodes' fabrics carry.

    A device's peak is its bfloat16 throughput. A fabric's bandwidth is what one rank sends while all do, and its
    latency a message's alone. Hosts meet at one switch, each link as wide as the host's ranks could fill it, if that
    explains every measured pair of hosts within 15 %; else there is a link of its own for each pair. Figures are
    rounded to four digits. Raises ClusterError where a rank of a fabric, or a pair of hosts, has no transfer alone.
    """
    types = _device_types(measured)
    nodes = [
        Node(host, tuple(types[rank].name for rank in ranks), _fabric(measured, ranks, within_host))
        for host, ranks in measured.hosts
    ]
    distinct = {kind.name: kind for kind in types}.values()
    if len(nodes) == 1:
        return Cluster(tuple(distinct), tuple(nodes))
    return _through_a_switch(measured, distinct, nodes) or _directly(measured, distinct, nodes)


def _device_types(measured: Measurements) -> list[DeviceType]:
    """Each rank's. Devices of one name may be of several types: of other speed, or with another share of memory. These
    have a number behind the name: cpu.1, cpu.2."""
    classes: list[list[int]] = []
    order = sorted(range(len(measured.ranks)), key=lambda rank: (_static(measured, rank), _peak(measured, rank)))
    for rank in order:
        first = classes[-1][0] if classes else rank
        same = classes and _static(measured, first) == _static(measured, rank)
        if same and _peak(measured, rank) <= _peak(measured, first) * (1 + _SAME_DEVICE):
            classes[-1].append(rank)
        else:
            classes.append([rank])
    classes.sort(key=min)
    names = [measured.ranks[min(members)].device_type for members in classes]
    kinds: dict[int, DeviceType] = {}
    for number, members in enumerate(classes):
        figures = [measured.ranks[rank] for rank in members]
        kind = DeviceType(
            names[number] + (f".{names[: number + 1].count(names[number])}" if names.count(names[number]) > 1 else ""),
            figures[0].memory_bytes,
            _rounded(statistics.median(each.bfloat16_flop_per_s for each in figures)),
            _rounded(statistics.median(each.memory_bandwidth_bytes_per_s for each in figures)),
        )
        kinds |= dict.fromkeys(members, kind)
    return [kinds[rank] for rank in range(len(measured.ranks))]


def _static(measured: Measurements, rank: int) -> tuple[str, int, int]:
    figures = measured.ranks[rank]
    return figures.device_type, figures.threads, figures.memory_bytes


def _peak(measured: Measurements, rank: int) -> float:
    return measured.ranks[rank].bfloat16_flop_per_s


def _rounded(value: float) -> float:
    """To four digits: no measurement has more."""
    return float(f"{value:.4g}")


def _fabric(measured: Measurements, ranks: tuple[int, ...], transport: Transport) -> Fabric:
    if len(ranks) == 1:  # nobody to send to: a copy in its own memory
        return Fabric(_rounded(measured.ranks[ranks[0]].memory_bandwidth_bytes_per_s), 0.0)
    sent, latencies = [], []
    for source in ranks:
        pairs = [(source, destination) for destination in ranks if destination != source]
        alone = [one.line for pair in pairs if (one := measured.transfer(*pair, transport)) is not None]
        if not alone:
            raise ClusterError(
                f"{transport} from rank {source} to rank {pairs[0][1]}, both on host {measured.ranks[source].host}, "
                "were not measured alone; measure them, or take the other transport for what is within a host"
            )
        latencies += [line.latency_s for line in alone]
        together = _together(measured, pairs, transport)
        sent.append(together or max(line.bandwidth_bytes_per_s for line in alone))
    return Fabric(_rounded(statistics.median(sent)), _rounded(statistics.median(latencies)))


def _between(measured: Measurements, source: int, destination: int) -> tuple[float, float]:
    """From one host to another: the widest pair's bandwidth, and the median latency of all."""
    lines = [
        transfer.line
        for a in measured.hosts[source][1]
        for b in measured.hosts[destination][1]
        if (transfer := measured.transfer(a, b)) is not None
    ]
    if not lines:
        (from_host, from_ranks), (to_host, to_ranks) = measured.hosts[source], measured.hosts[destination]
        raise ClusterError(
            f"messages from host {from_host} (rank {from_ranks[0]}) to host {to_host} (rank {to_ranks[0]}) were not "
            "measured alone; measure them"
        )
    return max(line.bandwidth_bytes_per_s for line in lines), statistics.median(line.latency_s for line in lines)


def _together(measured: Measurements, pairs: Iterable[tuple[int, int]], transport: Transport = "messages") -> float:
    """Bytes/s of these pairs together while all ranks send to all, until the last one is done; 0 if not measured."""
    found = [measured.transfer(*pair, transport, "all_pairs") for pair in pairs]
    largest = [max(each.points, key=lambda point: point.bytes) for each in found if each is not None]
    return sum(point.bytes for point in largest) / max(point.seconds for point in largest) if largest else 0.0


def _through_a_switch(measured: Measurements, kinds: Iterable[DeviceType], nodes: list[Node]) -> Cluster | None:
    count = range(len(nodes))
    pairs = {(a, b): _between(measured, a, b) for a in count for b in count if a != b}
    ranks = [set(members) for _, members in measured.hosts]
    everyone = set(range(len(measured.ranks)))
    alone, widths, latencies = {}, {}, {}
    for host in count:
        for direction in (0, 1):  # out of the host, and into it
            own = [speed for pair, speed in pairs.items() if pair[direction] == host]
            crossing = [(a, b) for a in ranks[host] for b in everyone - ranks[host]]
            together = _together(measured, crossing if direction == 0 else [(b, a) for a, b in crossing])
            alone[host, direction] = max(bandwidth for bandwidth, _ in own)
            widths[host, direction] = max(alone[host, direction], together)
            latencies[host, direction] = statistics.median(latency_s for _, latency_s in own) / 2
    if any(min(alone[a, 0], alone[b, 1]) > pairs[a, b][0] * (1 + _STAR_ERROR) for a, b in pairs):
        return None
    switch = "switch"
    while switch in {node.name for node in nodes}:
        switch += "-"
    links = []
    for host, node in enumerate(nodes):
        links.append(Link(node.name, switch, _rounded(widths[host, 0]), _rounded(latencies[host, 0])))
        links.append(Link(switch, node.name, _rounded(widths[host, 1]), _rounded(latencies[host, 1])))
    return Cluster(tuple(kinds), tuple(nodes), (switch,), tuple(links))


def _directly(measured: Measurements, kinds: Iterable[DeviceType], nodes: list[Node]) -> Cluster:
    links = []
    for a, source in enumerate(nodes):
        for b, destination in enumerate(nodes):
            if a != b:
                bandwidth, latency_s = _between(measured, a, b)
                links.append(Link(source.name, destination.name, _rounded(bandwidth), _rounded(latency_s)))
    return Cluster(tuple(kinds), tuple(nodes), (), tuple(links))
