"""Every plan of a space, one after another: what a search is held to where this ends."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import PlanningError
from ..cluster import Cluster
from . import space
from .cost import estimate
from .layer_tables import LayerTables
from .plan import ParallelPlan, Settings
from .profiles import Profiles


@dataclass(frozen=True)
class Oracle:
    """The best plan (None where none is feasible), its cost, how many were costed, and whether all were."""

    plan: ParallelPlan | None
    cost_ms: float
    costed: int
    complete: bool


def plans(
    cluster: Cluster,
    profiles: Profiles,
    global_batch: int,
    schedule: str = "1f1b",
    settings: Settings | None = None,
    allow_unused: bool = False,
    max_stages: int | None = None,
) -> Iterator[ParallelPlan]:
    """Every plan of the space (space.py) for which there are profiles, whether it fits into memory or not."""
    settings = settings or Settings()
    splits = space.Splits(LayerTables(profiles, settings))
    degrees = sorted({tp for _, tp, _ in profiles.points})
    layers = profiles.model.layers
    most = min(layers, max_stages or layers)
    seen = set()
    for order, microbatches in itertools.product(space.orders(cluster), space.divisors(global_batch)):
        found = space.groups(cluster, order, degrees)
        shares = {group: splits.split(group, global_batch // microbatches) for group in found}
        usable = [group for group in found if not isinstance(shares[group], str)]
        for chain in space.chains(usable, len(order.devices), most, allow_unused):
            samples = [space.shared(group, shares[group].shares) for group in chain]  # type: ignore[union-attr]
            for cuts in itertools.combinations(range(1, layers), len(chain) - 1):
                edges = (0, *cuts, layers)
                stages = [(g, s, a, b) for g, s, a, b in zip(chain, samples, edges[:-1], edges[1:], strict=True)]
                candidate = space.plan(stages, microbatches, global_batch, schedule, settings)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate


def exhaustive(
    candidates: Iterator[ParallelPlan] | Sequence[ParallelPlan],
    cost_ms: Callable[[ParallelPlan], float],
    time_limit_s: float = math.inf,
) -> Oracle:
    """The cheapest of candidates; `cost_ms` is inf for a plan that does not fit into memory."""
    started = time.perf_counter()
    best, least, count = None, math.inf, 0
    for candidate in candidates:
        if time.perf_counter() - started > time_limit_s:
            return Oracle(best, least, count, complete=False)
        count += 1
        cost = cost_ms(candidate)
        if cost < least:
            best, least = candidate, cost
    return Oracle(best, least, count, complete=True)


def our_cost_ms(
    cluster: Cluster, profiles: Profiles, settings: Settings | None = None
) -> Callable[[ParallelPlan], float]:
    """Our cost model as a function of plans with one setting; inf for one that does not fit into memory or whose
    schedule is impossible."""
    tables = LayerTables(profiles, settings or Settings())

    def cost_ms(plan: ParallelPlan) -> float:
        try:
            found = estimate(plan, cluster, profiles, tables)
        except PlanningError:
            return math.inf
        return math.inf if found.over_memory(cluster) else found.step_time_s * 1e3

    return cost_ms
