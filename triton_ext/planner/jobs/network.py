"""The network between hosts as immutable data: directed links, and the equal-cost paths between two nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanningError

Path = tuple[int, ...]  # indices into Network.links, from the source on; empty within a node


@dataclass(frozen=True)
class Link:
    source: str
    destination: str
    capacity_bytes_per_second: float

    def __post_init__(self) -> None:
        if not 0 < self.capacity_bytes_per_second < float("inf"):
            raise PlanningError(
                f"link {self.source} -> {self.destination}: capacity {self.capacity_bytes_per_second} bytes/s; "
                "give a positive number"
            )


@dataclass(frozen=True)
class Network:
    """Directed links between named nodes: hosts and switches alike."""

    links: tuple[Link, ...]

    def paths(self, source: str, destination: str) -> tuple[Path, ...]:
        """Every path with the fewest links, as ECMP sees them, ordered by the indices of their links.

        Raises PlanningError for a node that no link names, and where there is no way.
        """
        key = (source, destination)
        if key not in self._paths:
            self._paths[key] = self._shortest(source, destination)
        return self._paths[key]

    @cached_property
    def _paths(self) -> dict[tuple[str, str], tuple[Path, ...]]:
        return {}

    @cached_property
    def _outgoing(self) -> dict[str, list[int]]:
        outgoing: dict[str, list[int]] = {}
        for index, link in enumerate(self.links):
            outgoing.setdefault(link.source, []).append(index)
            outgoing.setdefault(link.destination, [])
        return outgoing

    def _shortest(self, source: str, destination: str) -> tuple[Path, ...]:
        for node in (source, destination):
            if node not in self._outgoing:
                raise PlanningError(f"the network has no node {node}; it has {len(self._outgoing)} others")
        if source == destination:
            return ((),)
        reached: dict[str, list[Path]] = {source: [()]}
        seen = {source}
        while reached and destination not in reached:
            following: dict[str, list[Path]] = {}
            for node, paths in reached.items():
                for index in self._outgoing[node]:
                    after = self.links[index].destination
                    if after not in seen:
                        following.setdefault(after, []).extend((*path, index) for path in paths)
            seen.update(following)
            reached = following
        if destination not in reached:
            raise PlanningError(f"no path from {source} to {destination}; add the links between them")
        return tuple(sorted(reached[destination]))


def clos(
    tors: int,
    hosts_per_tor: int,
    aggregations: int,
    host_bytes_per_second: float,
    uplink_bytes_per_second: float,
) -> Network:
    """Two layers: host<i> under tor<i // hosts_per_tor>, every ToR linked to every agg<k>, both ways."""
    if min(tors, hosts_per_tor, aggregations) < 1:
        raise PlanningError(
            f"a Clos of {tors} ToRs, {hosts_per_tor} hosts per ToR and {aggregations} aggregation switches; "
            "give at least one of each"
        )
    links = []
    for tor in range(tors):
        ends = [(f"host{tor * hosts_per_tor + h}", host_bytes_per_second) for h in range(hosts_per_tor)]
        ends += [(f"agg{a}", uplink_bytes_per_second) for a in range(aggregations)]
        for node, capacity_bytes_per_second in ends:
            links.append(Link(node, f"tor{tor}", capacity_bytes_per_second))
            links.append(Link(f"tor{tor}", node, capacity_bytes_per_second))
    return Network(tuple(links))
