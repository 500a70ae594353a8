"""A plan from profiles: which search, under which cost, with what was not measured filled in."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PlanningError
from ..cluster import Cluster
from . import metis
from .completion import interpolate
from .cost import estimate
from .layer_tables import LayerTables
from .lookup import Lookup
from .pipeline import simulate
from .plan import ParallelPlan
from .plan_file import Option
from .profiles import Gap, Key, Profiles
from .report import Simulated
from .result import Cost, CostedPlan, SearchResult
from .step_work import step_work
from .uniform import Evaluate

METHODS = ("ours", "metis")
_GIB = 1 << 30


@dataclass(frozen=True)
class Options:
    """How to plan. algorithm, cost: of METHODS; Metis's search minimises Metis's cost only. model_missing: points that
    no profile reaches come from a roofline. keep: how many plans are returned."""

    algorithm: str = "ours"
    cost: str = "ours"
    model_missing: bool = False
    time_limit_s: float = 60.0
    keep: int = 5

    def __post_init__(self) -> None:
        for name in ("algorithm", "cost"):
            if getattr(self, name) not in METHODS:
                raise PlanningError(f"{name} {getattr(self, name)!r}; there are {', '.join(METHODS)}")
        if self.algorithm == "metis" and self.cost != "metis":
            raise PlanningError("the algorithm metis minimises the cost metis only; give it that cost, or ours both")

    def record(self) -> dict[str, Option]:
        """What a plan file says of them: all that the plan depends on."""
        return {"algorithm": self.algorithm, "cost": self.cost, "model_missing": self.model_missing}


def search(profiles: Profiles, cluster: Cluster, global_batch: int, options: Options) -> SearchResult:
    """The best plans, and why others cannot be. Raises PlanningError for inputs that cannot be planned for at all."""
    settings = metis.MetisSettings(
        model_missing=options.model_missing, keep=options.keep, time_limit_s=options.time_limit_s
    )
    return metis.search(profiles, cluster, global_batch, settings)


def evaluator(profiles: Profiles, options: Options) -> Evaluate:
    """The cost of any plan under the options' cost; it raises PlanningError for a plan that does not fit into memory or
    needs a point that is not there."""

    def evaluate(plan: ParallelPlan, cluster: Cluster) -> CostedPlan:
        if options.cost == "metis":
            settings = metis.MetisSettings(model_missing=options.model_missing)
            found = metis.evaluate(plan, profiles, cluster, settings)
        else:
            found = our_cost(plan, cluster, completed(plan, profiles, cluster, options.model_missing))
        _check_memory(found, cluster)
        return found

    return evaluate


def simulated(costed: CostedPlan, cluster: Cluster, profiles: Profiles) -> Simulated:
    """A costed plan, run by the simulator. Modelled points are made again where the plan uses them."""
    filled = completed(costed.plan, profiles, cluster, bool(costed.modelled))
    return Simulated(costed, simulate(costed.plan, cluster, filled))


def completed(plan: ParallelPlan, profiles: Profiles, cluster: Cluster, model_missing: bool) -> Profiles:
    """The profiles with the points that a plan needs and no measured ones surround, if they may be modelled."""
    missing = [key for key in _keys(plan, cluster) if isinstance(interpolate(profiles, key), Gap)]
    if not missing or not model_missing:
        return profiles
    lookup = Lookup(profiles, cluster, model_missing)
    points = dict(profiles.points)
    for key in missing:
        found = lookup.get(*key)
        if not isinstance(found, Gap):
            points[key] = found
    return Profiles(profiles.model, points)


def our_cost(plan: ParallelPlan, cluster: Cluster, profiles: Profiles) -> CostedPlan:
    """A plan under our cost model."""
    tables = LayerTables(profiles, plan.settings)
    found = estimate(plan, cluster, profiles, tables)
    work = step_work(plan, cluster, tables)
    cost = Cost(
        execution_ms=found.compute_s * 1e3,
        pipeline_ms=found.pipeline_s * 1e3,
        data_parallel_ms=found.all_reduce_s * 1e3,
        update_ms=found.optimizer_s * 1e3,
    )
    stage_ms = [max(sum(w.forward_s) + sum(w.backward_s) for w in stage) * 1e3 for stage in work.workers]
    memory = [max(found.memory_bytes[device] for device in stage.devices) for stage in plan.stages]
    sources: dict[str, list[str]] = {"interpolated": [], "modelled": []}
    for key in _keys(plan, cluster):
        point = interpolate(profiles, key)
        if not isinstance(point, Gap) and point.source in sources:
            sources[point.source].append("{} tp {} micro-batch {}".format(*key))
    return CostedPlan(
        plan, cost, tuple(stage_ms), tuple(memory), tuple(sources["modelled"]), tuple(sources["interpolated"])
    )


def _keys(plan: ParallelPlan, cluster: Cluster) -> list[Key]:
    """The profile points that a plan needs."""
    keys = {
        (cluster.devices[device].type, replica.tp, replica.samples)
        for stage in plan.stages
        for replica in stage.replicas
        for device in replica.devices
        if replica.samples
    }
    return sorted(keys)


def _check_memory(costed: CostedPlan, cluster: Cluster) -> None:
    for number, (stage, needed) in enumerate(zip(costed.plan.stages, costed.memory_bytes, strict=True)):
        for device in stage.devices:
            name = cluster.devices[device].type
            limit = cluster.device_type(name).memory_bytes
            if needed > limit:
                raise PlanningError(
                    f"stage {number} needs {needed / _GIB:.1f} GiB on device {device}, a {name} of {limit / _GIB:.0f}"
                )
