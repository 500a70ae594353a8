"""Schedules between hosts: which ranks' slices travel together, and through which rank. The same on every rank.

direct: each rank exchanges its slices with each rank of other hosts. hierarchical: inside a host first, then one stream
for each pair of hosts, between their gateways. What several ranks of a host have for one rank is summed on the way,
and what is the same for all ranks of a host travels once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..passes import abi, dialect
from . import transfers
from .layout import Layout

DIRECT, HIERARCHICAL = "direct", "hierarchical"
SCHEDULES = (DIRECT, HIERARCHICAL)


@dataclass(frozen=True)
class Flow:
    """Slices from ranks of one host for ranks of another. The first of each stands for all: from several sources come
    sums of their partial values, at several destinations the same values land.

    kind: the transfer, abi.OF_RESULT or abi.OF_STAGE.
    """

    kind: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """hosts, gateways: of each rank its host, and the rank through which its slices leave and come in."""

    hosts: tuple[str, ...]
    gateways: tuple[int, ...]

    @staticmethod
    def of(name: str, hosts: Sequence[str]) -> Placement:
        first = tuple(hosts.index(host) for host in hosts)
        return Placement(tuple(hosts), first if name == HIERARCHICAL else tuple(range(len(hosts))))

    @property
    def is_hierarchical(self) -> bool:
        return any(gateway != rank for rank, gateway in enumerate(self.gateways))

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    def far(self, rank: int) -> list[int]:
        """Ranks on other hosts."""
        return [other for other, host in enumerate(self.hosts) if host != self.hosts[rank]]

    def served(self, gateway: int) -> list[int]:
        """Ranks whose slices a rank moves, itself among them."""
        return [rank for rank, other in enumerate(self.gateways) if other == gateway]

    def connected(self, rank: int) -> list[int]:
        """Ranks that a rank has a connection with: symmetric."""
        if self.gateways[rank] != rank:
            return [self.gateways[rank]]
        others = {self.gateways[other] for other in self.far(rank)} | set(self.served(rank))
        return sorted(others - {rank})

    def sender(self, rank: int, destination: int) -> int:
        """In whose name partial values of a rank arrive at another one."""
        if not self.is_hierarchical or self.hosts[rank] == self.hosts[destination]:
            return rank
        return self.on_host_of(rank)[0]

    def flows(self, spec: dialect.Spec, where: Layout) -> list[Flow]:
        """All of a plan."""
        item_bytes = {abi.OF_RESULT: 1, abi.OF_STAGE: 1}
        found: dict[Flow, None] = {}
        for source in range(len(self.hosts)):
            for destination in self.far(source):
                for kind, transfer in transfers.outgoing(spec, where, source, destination, item_bytes).items():
                    if transfer.elements:
                        found[self._flow(spec, kind, source, destination)] = None
        return list(found)

    def _flow(self, spec: dialect.Spec, kind: int, source: int, destination: int) -> Flow:
        sources: tuple[int, ...] = (source,)
        destinations: tuple[int, ...] = (destination,)
        if self.is_hierarchical and kind == abi.OF_STAGE:
            sources = self.on_host_of(source)
        if self.is_hierarchical and kind == abi.OF_RESULT and spec.collective in _SAME_FOR_ALL:
            destinations = self.on_host_of(destination)
        return Flow(kind, sources, destinations)

    def expectations(self, where: Layout) -> Layout:
        """The layout with what each rank is to wait for: of ranks whose values come in a sum, only of the first."""
        if not (self.is_hierarchical and where.stage_elements):
            return where
        routes = [
            [
                route if self.sender(source, destination) == source else replace(route, expected=0)
                for destination, route in enumerate(row)
            ]
            for source, row in enumerate(where.routes)
        ]
        return replace(where, routes=routes)


_SAME_FOR_ALL = ("all_reduce", "all_gather", "broadcast")


def check(name: str, collective: str) -> None:
    """Raise PlanError for a schedule that is none, or not one for a collective."""
    if name not in SCHEDULES:
        raise PlanError(f"schedule={name!r}; there are {', '.join(SCHEDULES)}")
    if name == HIERARCHICAL and collective in (dialect.ONE_SHOT, "put"):
        raise PlanError(
            f"{collective} has no hierarchical schedule"
            + (": ranks would sum in different orders; use shots=2" if collective == dialect.ONE_SHOT else "")
        )
