"""Plans as one makes them for equal devices: what planning for unequal ones is compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import PlanningError
from ..cluster import Cluster
from .plan import ParallelPlan, Replica, Settings, Stage
from .profiles import Profiles
from .result import CostedPlan
from .space import divisors, ordered_devices


class Evaluator(Protocol):
    """Of plans on clusters. `cost` and `bound_ms` raise PlanningError for a plan that cannot be."""

    @property
    def allowed(self) -> Allowed:
        """What its plans may be."""

    def cost(self, plan: ParallelPlan, cluster: Cluster) -> CostedPlan: ...

    def bound_ms(self, plan: ParallelPlan, cluster: Cluster) -> float:
        """The plan costs no less; quicker to tell than its cost."""


@dataclass(frozen=True)
class Allowed:
    """What plans may be: their schedule and settings (alternatives), tensor-parallel degrees (None: any), and whether
    a replica may lie in several nodes or have several types (`anywhere`)."""

    schedule: str = "1f1b"
    settings: tuple[Settings, ...] = (Settings(),)
    degrees: tuple[int, ...] | None = None
    anywhere: bool = False


def uniform_plans(
    cluster: Cluster, layers: int, global_batch: int, allowed: Allowed | None = None
) -> Iterator[ParallelPlan]:
    """Every plan with one data- and one tensor-parallel degree, as many layers in each stage (the first ones have one
    more where they do not divide), equal shares, and all devices in `space.ordered_devices`."""
    allowed = allowed or Allowed()
    devices = ordered_devices(cluster)
    places = [(cluster.devices[device].node, cluster.devices[device].type) for device in devices]
    for settings, stages in itertools.product(allowed.settings, divisors(len(devices))):
        for tp in divisors(len(devices) // stages) if stages <= layers else ():
            if allowed.degrees is not None and tp not in allowed.degrees:
                continue
            if not allowed.anywhere and any(len(set(places[i : i + tp])) > 1 for i in range(0, len(devices), tp)):
                continue
            dp = len(devices) // stages // tp
            for samples in divisors(global_batch):  # of a micro-batch
                if samples % dp == 0:
                    made = _stages(devices, stages, dp, tp, layers, samples)
                    yield ParallelPlan(made, global_batch // samples, global_batch, allowed.schedule, settings)


def best_uniform(profiles: Profiles, cluster: Cluster, global_batch: int, evaluator: Evaluator) -> CostedPlan | None:
    """The cheapest uniform plan; None where none is feasible."""
    plans = uniform_plans(cluster, profiles.model.layers, global_batch, evaluator.allowed)
    return _best(_bounded(plans, cluster, evaluator), cluster, evaluator)


def best_as_if_slowest(
    profiles: Profiles, cluster: Cluster, global_batch: int, evaluator: Evaluator
) -> CostedPlan | None:
    """The uniform plan that would be the cheapest if all devices were of the slowest type, at its real cost.

    The slowest type is the one for which the least bound of a plan is the highest. None where a cluster of that type
    alone, or the real one, cannot run the plan.
    """
    plans = list(uniform_plans(cluster, profiles.model.layers, global_batch, evaluator.allowed))
    equal = []
    for name in sorted({device.type for device in cluster.devices}):
        nodes = [dataclasses.replace(node, device_types=(name,) * len(node.device_types)) for node in cluster.nodes]
        equal.append(dataclasses.replace(cluster, nodes=tuple(nodes)))
    bounded = [_bounded(plans, each, evaluator) for each in equal]
    slowest = max(range(len(equal)), key=lambda index: bounded[index][0][0] if bounded[index] else math.inf)
    chosen = _best(bounded[slowest], equal[slowest], evaluator)
    return _best(_bounded([chosen.plan], cluster, evaluator), cluster, evaluator) if chosen else None


_Bounded = list[tuple[float, int, ParallelPlan]]  # by bound


def _bounded(plans: Iterable[ParallelPlan], cluster: Cluster, evaluator: Evaluator) -> _Bounded:
    """The plans that can be, with the least that they cost, ascending."""
    found: _Bounded = []
    for number, plan in enumerate(plans):
        with contextlib.suppress(PlanningError):
            found.append((evaluator.bound_ms(plan, cluster), number, plan))
    return sorted(found, key=lambda each: each[:2])


def _best(bounded: _Bounded, cluster: Cluster, evaluator: Evaluator) -> CostedPlan | None:
    best: CostedPlan | None = None
    for bound_ms, _, plan in bounded:
        if best is not None and bound_ms >= best.cost.total_ms:
            break
        found = evaluator.cost(plan, cluster)
        if best is None or found.cost.total_ms < best.cost.total_ms:
            best = found
    return best


def _stages(devices: Sequence[int], stages: int, dp: int, tp: int, layers: int, samples: int) -> tuple[Stage, ...]:
    made, begin, first = [], 0, 0
    for number in range(stages):
        replicas = []
        for _ in range(dp):
            replicas.append(Replica(tuple(devices[first : first + tp]), samples // dp))
            first += tp
        end = begin + layers // stages + (number < layers % stages)
        made.append(Stage(begin, end, tuple(replicas)))
        begin = end
    return tuple(made)
