"""A plan from profiles: which search, under which cost, with what was not measured filled in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...errors import PlanningError
from ..cluster import Cluster
from . import metis
from . import search as exact
from .completion import interpolate
from .cost import memory_bytes, of_work
from .layer_tables import LayerTables
from .lookup import Lookup
from .pipeline import simulate
from .plan import ParallelPlan, Settings
from .plan_file import Option
from .problems import costed
from .profiles import Gap, Key, Profiles
from .report import Simulated
from .result import CostedPlan, SearchResult
from .search import Progress, SearchSettings
from .step_work import StepWork, Worker, step_work
from .uniform import Evaluator

METHODS = ("ours", "metis")
ALLOWED = {
    "recompute": "recompute_activations",
    "shard-optimizer": "shard_optimizer",
    "shard-parameters": "shard_parameters",
    "sequence-parallel": "sequence_parallel",
}
_GIB = 1 << 30


@dataclass(frozen=True)
class Options:
    """How to plan.

    algorithm, cost: of METHODS; Metis's search minimises Metis's cost only. schedule, allowed: what our search may use
    beyond the plainest plan: names of ALLOWED, each of which it tries with and without. chunks: of each
    stage in an interleaved schedule. allow_unused: plans may leave devices out. model_missing: points that no
    profile reaches come from a roofline. keep: how many plans are returned. processes: that search at once.
    """

    algorithm: str = "ours"
    cost: str = "ours"
    schedule: str = "1f1b"
    allowed: tuple[str, ...] = ()
    chunks: int = 1
    allow_unused: bool = False
    model_missing: bool = False
    time_limit_s: float = 60.0
    keep: int = 5
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("algorithm", "cost"):
            if getattr(self, name) not in METHODS:
                raise PlanningError(f"{name} {getattr(self, name)!r}; there are {', '.join(METHODS)}")
        if self.algorithm == "metis" and self.cost != "metis":
            raise PlanningError("the algorithm metis minimises the cost metis only; give that, or the algorithm ours")
        if unknown := sorted(set(self.allowed) - set(ALLOWED)):
            raise PlanningError(f"allowed {unknown[0]!r}; there are {', '.join(ALLOWED)}")
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise PlanningError(f"schedule {self.schedule}, {self.chunks} chunks; interleaved has 2 or more, others 1")
        if self.algorithm == "metis" and self.allow_unused:
            raise PlanningError("the algorithm metis uses all devices; the algorithm ours may leave some out")
        if self.cost == "metis" and (self.allowed or self.schedule != "1f1b"):
            raise PlanningError("the cost metis is of the schedule 1f1b only, and has no further settings")

    def record(self) -> dict[str, Option]:
        """What a plan file says of them: all that the plan depends on."""
        return {
            "algorithm": self.algorithm,
            "cost": self.cost,
            "schedule": self.schedule,
            "allowed": ", ".join(sorted(self.allowed)),
            "chunks": self.chunks,
            "allow_unused": self.allow_unused,
            "model_missing": self.model_missing,
        }

    def plan_settings(self) -> tuple[Settings, ...]:
        """Every combination of what is allowed, the plainest first."""
        names = [ALLOWED[name] for name in sorted(set(self.allowed))]
        chosen = itertools.product((False, True), repeat=len(names))
        plain = Settings(chunks_per_stage=self.chunks)
        return tuple(replace(plain, **dict(zip(names, values, strict=True))) for values in chosen)


def search(
    profiles: Profiles,
    cluster: Cluster,
    global_batch: int,
    options: Options,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plans, and why others cannot be. Raises PlanningError for inputs that cannot be planned for at all."""
    published = metis.MetisSettings(
        model_missing=options.model_missing, keep=options.keep, time_limit_s=options.time_limit_s
    )
    if options.algorithm == "metis":
        return metis.search(profiles, cluster, global_batch, published)
    if options.model_missing:
        profiles = with_modelled(profiles, cluster)
    ours = SearchSettings(
        cost=options.cost,
        metis=published,
        schedule=options.schedule,
        plan_settings=options.plan_settings(),
        allow_unused=options.allow_unused,
        time_limit_s=options.time_limit_s,
        processes=options.processes,
        plans=options.keep,
    )
    return exact.search(profiles, cluster, global_batch, ours, progress)


def with_modelled(profiles: Profiles, cluster: Cluster) -> Profiles:
    """The profiles with a point on each of the cluster's device types for every degree and micro-batch that some type
    has; from the roofline where measured points do not surround it."""
    grid = sorted({(tp, samples) for _, tp, samples in profiles.points})
    types = sorted({device.type for device in cluster.devices})
    return _filled(profiles, cluster, [(name, tp, samples) for name in types for tp, samples in grid])


def evaluator(profiles: Profiles, options: Options) -> Evaluator:
    """The cost of any plan under the options' cost: a plan that does not fit into memory, or needs a point that is not
    there, is refused."""
    return (_MetisCost if options.cost == "metis" else _OurCost)(profiles, options.model_missing)


@dataclass
class _MetisCost:
    profiles: Profiles
    model_missing: bool

    def cost(self, plan: ParallelPlan, cluster: Cluster) -> CostedPlan:
        settings = metis.MetisSettings(model_missing=self.model_missing)
        found = metis.evaluate(plan, self.profiles, cluster, settings)
        _check_memory(plan, cluster, found.memory_bytes)
        return found

    def bound_ms(self, plan: ParallelPlan, cluster: Cluster) -> float:
        return self.cost(plan, cluster).cost.total_ms


@dataclass
class _OurCost:
    profiles: Profiles
    model_missing: bool
    tables: dict[Settings, LayerTables] = field(default_factory=dict)

    def cost(self, plan: ParallelPlan, cluster: Cluster) -> CostedPlan:
        tables, work = self._work(plan, cluster)
        return costed(plan, of_work(work), cluster, tables)

    def bound_ms(self, plan: ParallelPlan, cluster: Cluster) -> float:
        """All that a stage computes, after the first forward has come to it and before the last backward has left."""
        work = self._work(plan, cluster)[1]
        bounds, before_ms = [], 0.0
        for stage, stage_ms in zip(work.workers, _stage_ms(work), strict=True):
            bounds.append(before_ms + plan.microbatches * stage_ms)
            before_ms += min(_microbatch_s(worker) for worker in stage) * 1e3
        return max(bounds)

    def _work(self, plan: ParallelPlan, cluster: Cluster) -> tuple[LayerTables, StepWork]:
        filled = completed(plan, self.profiles, cluster, self.model_missing)
        if filled is self.profiles:
            tables = self.tables.setdefault(plan.settings, LayerTables(filled, plan.settings))
        else:
            tables = LayerTables(filled, plan.settings)
        work = step_work(plan, cluster, tables)
        needs = memory_bytes(work)
        _check_memory(plan, cluster, [max(needs[device] for device in stage.devices) for stage in plan.stages])
        return tables, work


def _stage_ms(work: StepWork) -> tuple[float, ...]:
    """One micro-batch, forward and backward, by stage."""
    return tuple(max(map(_microbatch_s, stage)) * 1e3 for stage in work.workers)


def _microbatch_s(worker: Worker) -> float:
    return sum(worker.forward_s) + sum(worker.backward_s)


def simulated(costed: CostedPlan, cluster: Cluster, profiles: Profiles) -> Simulated:
    """A costed plan, run by the simulator. Modelled points are made again where the plan uses them."""
    filled = completed(costed.plan, profiles, cluster, bool(costed.modelled))
    return Simulated(costed, simulate(costed.plan, cluster, filled))


def completed(plan: ParallelPlan, profiles: Profiles, cluster: Cluster, model_missing: bool) -> Profiles:
    """The profiles with the points that a plan needs and no measured ones surround, if they may be modelled."""
    return _filled(profiles, cluster, _keys(plan, cluster)) if model_missing else profiles


def _filled(profiles: Profiles, cluster: Cluster, keys: Iterable[Key]) -> Profiles:
    lookup = Lookup(profiles, cluster, model_missing=True)
    points = dict(profiles.points)
    for key in keys:
        if isinstance(interpolate(profiles, key), Gap):
            found = lookup.get(*key)
            if not isinstance(found, Gap):
                points[key] = found
    return Profiles(profiles.model, points) if len(points) > len(profiles.points) else profiles


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


def _check_memory(plan: ParallelPlan, cluster: Cluster, memory_bytes: Sequence[int]) -> None:
    """memory_bytes: the largest need of a device, by stage."""
    for number, (stage, needed) in enumerate(zip(plan.stages, memory_bytes, strict=True)):
        for device in stage.devices:
            name = cluster.devices[device].type
            limit = cluster.device_type(name).memory_bytes
            if needed > limit:
                raise PlanningError(
                    f"stage {number} needs {needed / _GIB:.1f} GiB on device {device}, a {name} of {limit / _GIB:.0f}"
                )
