"""A plan from profiles: which search, under which cost, with what was not measured filled in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...errors import PlanningError
from ..cluster import Cluster
from . import metis
from . import search as exact
from .completion import interpolate
from .cost import memory_bytes, of_work
from .layer_tables import LayerTables
from .pipeline import simulate
from .plan import ParallelPlan, Settings
from .plan_file import Option
from .problems import costed
from .profiles import Gap, Key, Profiles
from .report import Simulated
from .result import CostedPlan, SearchResult
from .roofline import add_modelled
from .search import Progress, SearchSettings
from .step_work import StepWork, Worker, step_work
from .uniform import Allowed

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
        if self.algorithm == "metis" and self.processes > 1:
            raise PlanningError(f"the algorithm metis searches in one process, not in {self.processes}")
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
        profiles = with_modelled(profiles, cluster, global_batch)
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


def including(result: SearchResult, others: Iterable[CostedPlan | None], keep: int) -> SearchResult:
    """A result that ended early, with plans found otherwise: one of them may be better. Others stay as they are."""
    if not result.plans or not result.timed_out or result.algorithm == "metis":
        return result
    plans = {each.plan: each for each in (*result.plans, *others) if each is not None}
    ranked = sorted(plans.values(), key=lambda each: each.cost.total_ms)
    return replace(result, plans=tuple(ranked[:keep]))


def with_modelled(profiles: Profiles, cluster: Cluster, global_batch: int) -> Profiles:
    """The profiles with a point on each of the cluster's device types for every degree that some type has, and every
    micro-batch that some type has, or that is a power of two, up to the batch; from the roofline where measured points
    do not surround it. What lies between is interpolated: search, baselines and simulation use the same points."""
    degrees = sorted({tp for _, tp, _ in profiles.points})
    powers = {1 << bit for bit in range(global_batch.bit_length())}
    sizes = sorted({samples for _, _, samples in profiles.points} | powers | {global_batch})
    types = sorted({device.type for device in cluster.devices})
    return _filled(profiles, cluster, itertools.product(types, degrees, sizes))


def evaluator(profiles: Profiles, options: Options) -> _OurCost | _MetisCost:
    """The cost of any plan under the options' cost: a plan that does not fit into memory, or needs a point that is not
    there, is refused."""
    return (_MetisCost if options.cost == "metis" else _OurCost)(profiles, options)


@dataclass
class _Cost:
    """What both costs share: the profiles that a search with these options sees."""

    profiles: Profiles
    options: Options
    filled: dict[tuple[tuple[str, ...], int], Profiles] = field(default_factory=dict)

    @property
    def allowed(self) -> Allowed:
        degrees = tuple(sorted({tp for _, tp, _ in self.profiles.points}))
        return Allowed(self.options.schedule, self.options.plan_settings(), degrees, self.options.cost == "metis")

    def points(self, plan: ParallelPlan, cluster: Cluster) -> Profiles:
        if not self.options.model_missing or self.options.algorithm == "metis":
            return self.profiles
        key = (tuple(sorted({device.type for device in cluster.devices})), plan.global_batch)
        if key not in self.filled:
            self.filled[key] = with_modelled(self.profiles, cluster, plan.global_batch)
        return _filled(self.filled[key], cluster, _keys(plan, cluster))


@dataclass
class _MetisCost(_Cost):
    def cost(self, plan: ParallelPlan, cluster: Cluster) -> CostedPlan:
        settings = metis.MetisSettings(model_missing=self.options.model_missing)
        found, needs = metis.evaluate_with_memory(plan, self.points(plan, cluster), cluster, settings)
        _check_memory(plan, cluster, needs)
        return found

    def bound_ms(self, plan: ParallelPlan, cluster: Cluster) -> float:
        return self.cost(plan, cluster).cost.total_ms


@dataclass
class _OurCost(_Cost):
    tables: dict[tuple[int, Settings], LayerTables] = field(default_factory=dict)  # by the profiles' id

    def cost(self, plan: ParallelPlan, cluster: Cluster) -> CostedPlan:
        tables, work = self._work(plan, cluster)
        return costed(plan, of_work(work), cluster, tables)

    def bound_ms(self, plan: ParallelPlan, cluster: Cluster) -> float:
        """All that a stage computes, after the first forward has come to it and before the last backward has left: with
        several chunks, those of the first one."""
        work = self._work(plan, cluster)[1]
        bounds, before_ms = [], 0.0
        for stage, stage_ms in zip(work.workers, _stage_ms(work), strict=True):
            bounds.append(before_ms + plan.microbatches * stage_ms)
            before_ms += min(worker.forward_s[0] + worker.backward_s[0] for worker in stage) * 1e3
        return max(bounds)

    def _work(self, plan: ParallelPlan, cluster: Cluster) -> tuple[LayerTables, StepWork]:
        points = self.points(plan, cluster)
        tables = self.tables.setdefault((id(points), plan.settings), LayerTables(points, plan.settings))
        work = step_work(plan, cluster, tables)
        _check_memory(plan, cluster, memory_bytes(work))
        return tables, work


def _stage_ms(work: StepWork) -> tuple[float, ...]:
    """One micro-batch, forward and backward, by stage."""
    return tuple(max(map(_microbatch_s, stage)) * 1e3 for stage in work.workers)


def _microbatch_s(worker: Worker) -> float:
    return sum(worker.forward_s) + sum(worker.backward_s)


def simulated(costed: CostedPlan, cluster: Cluster, profiles: Profiles, model_missing: bool | None = None) -> Simulated:
    """A costed plan, run by the simulator. model_missing: as in the options that it was searched with; by default,
    whether it has modelled points."""
    missing = bool(costed.modelled) if model_missing is None else model_missing
    return Simulated(costed, simulate(costed.plan, cluster, completed(costed.plan, profiles, cluster, missing)))


def completed(plan: ParallelPlan, profiles: Profiles, cluster: Cluster, model_missing: bool) -> Profiles:
    """The profiles that a plan is priced with: with `with_modelled`, if points may be modelled, and what else the plan
    needs (as Metis's search finds plans of any degree)."""
    if not model_missing:
        return profiles
    return _filled(with_modelled(profiles, cluster, plan.global_batch), cluster, _keys(plan, cluster))


def _filled(profiles: Profiles, cluster: Cluster, keys: Iterable[Key]) -> Profiles:
    """The profiles with those keys that no measured points surround."""
    missing = [key for key in keys if isinstance(interpolate(profiles, key), Gap)]
    figures = {device_type.name: device_type for device_type in cluster.device_types}
    return add_modelled(profiles, figures, missing) if missing else profiles


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


def _check_memory(plan: ParallelPlan, cluster: Cluster, memory_bytes: Mapping[int, int]) -> None:
    """memory_bytes: by device."""
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            name, needed = cluster.devices[device].type, memory_bytes[device]
            limit = cluster.device_type(name).memory_bytes
            if needed > limit:
                raise PlanningError(
                    f"stage {number} needs {needed / _GIB:.1f} GiB on device {device}, a {name} of {limit / _GIB:.0f}"
                )
