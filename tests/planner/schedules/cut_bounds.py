"""A time that no schedule can beat: for every set of ranks, what has to leave it over what can leave it per second."""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations

from triton_ext.errors import PlanningError
from triton_ext.planner.cluster import Cluster
from triton_ext.planner.schedules.request import Request

_MOST_RANKS = 12

Capacities = dict[tuple[str, str], float]


def cut_bound_s(request: Request, cluster: Cluster) -> float:
    """The maximum over all sets S of ranks of (bytes that must leave S) / (bandwidth out of S), exactly. Seconds.

    Infinite where there is no way out. Bandwidth out of S is a minimum cut of the cluster (Ford and Fulkerson), so that
    any routing is covered. Exponential in the number of ranks: raises PlanningError above 12.
    """
    if request.world > _MOST_RANKS:
        raise PlanningError(f"an exact bound for {request.world} ranks would take too long; {_MOST_RANKS} are the most")
    capacities = _capacities(request, cluster)
    best_s = 0.0
    for size in range(1, request.world):
        for chosen in combinations(range(request.world), size):
            inside = frozenset(chosen)
            leaving = _bytes_leaving(request, inside)
            if leaving:
                exit_bytes_per_s = _exit_bytes_per_s(capacities, inside, request.world)
                best_s = max(best_s, leaving / exit_bytes_per_s if exit_bytes_per_s else math.inf)
    return best_s


def _bytes_leaving(request: Request, inside: frozenset[int]) -> int:
    """At the least, however values are combined or copied on their way."""
    ranks = range(request.world)
    outside = [rank for rank in ranks if rank not in inside]
    elements, item = request.tensor_bytes // request.item_bytes, request.item_bytes
    part = -(-elements // request.world)
    parts = [max(0, min(part, elements - rank * part)) * item for rank in ranks]
    match request.collective:
        case "all_to_all":
            return len(inside) * sum(parts[rank] for rank in outside)
        case "reduce_scatter":
            return sum(parts[rank] for rank in outside)
        case "all_gather":
            return len(inside) * request.tensor_bytes
        case "broadcast":
            return request.tensor_bytes if request.root in inside else 0
        case "put":
            there = [request.destinations[rank] for rank in inside]
            return request.tensor_bytes * sum(rank is not None and rank not in inside for rank in there)
    return request.tensor_bytes


def _capacities(request: Request, cluster: Cluster) -> Capacities:
    """Bytes/s between ranks, what joins those of a node, the node's way out and in, and switches."""
    capacities: Capacities = {}
    for rank, device in enumerate(request.group):
        node = cluster.nodes[cluster.devices[device].node]
        width = node.fabric.bandwidth_bytes_per_s
        capacities[f"rank {rank}", f"fabric {node.name}"] = width
        capacities[f"fabric {node.name}", f"rank {rank}"] = width
        capacities[f"rank {rank}", f"out {node.name}"] = float("inf")
        capacities[f"in {node.name}", f"rank {rank}"] = float("inf")
    names = {node.name for node in cluster.nodes}
    for link in cluster.links:
        source = f"out {link.source}" if link.source in names else f"switch {link.source}"
        destination = f"in {link.destination}" if link.destination in names else f"switch {link.destination}"
        known = capacities.get((source, destination), 0.0)
        capacities[source, destination] = known + link.bandwidth_bytes_per_s
    return capacities


def _exit_bytes_per_s(capacities: Capacities, inside: frozenset[int], world: int) -> float:
    """The maximum flow from the ranks inside to the others (Edmonds and Karp, O(V E^2))."""
    rest = dict(capacities)
    after: dict[str, set[str]] = {}
    for rank in range(world):
        rest["source" if rank in inside else f"rank {rank}", f"rank {rank}" if rank in inside else "sink"] = float(
            "inf"
        )
    for source, destination in list(rest):
        after.setdefault(source, set()).add(destination)
        after.setdefault(destination, set()).add(source)
    flow = 0.0
    while True:
        came: dict[str, str] = {"source": ""}
        queue = deque(["source"])
        while queue and "sink" not in came:
            place = queue.popleft()
            for following in sorted(after[place]):
                if following not in came and rest.get((place, following), 0.0) > 0:
                    came[following] = place
                    queue.append(following)
        if "sink" not in came:
            return flow
        way, place = [], "sink"
        while place != "source":
            way.append((came[place], place))
            place = came[place]
        width = min(rest[edge] for edge in way)
        for source, destination in way:
            rest[source, destination] -= width
            rest[destination, source] = rest.get((destination, source), 0.0) + width
        flow += width
