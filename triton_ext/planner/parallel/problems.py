"""What our search minimises, and over what: our cost, or Metis's published one, each with its space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ...errors import PlanningError
from ..cluster import Cluster
from . import space
from .cost import Estimate, estimate, of_work
from .labels import Found
from .layer_tables import LayerTables
from .lookup import Lookup
from .metis import MetisSettings
from .metis.bandwidth import Bandwidths
from .metis.cost import Evaluator
from .metis.stage import Stages
from .metis_objective import MetisFormula, metis_options
from .objectives import Objective, Pipeline, Prefixes
from .options import Choice, Kinds, Network, Options, network, options
from .plan import ParallelPlan, Settings
from .profiles import Gap, Profiles
from .result import Cost, CostedPlan
from .schedule import layer_runs
from .step_work import condensed, step_work


@dataclass(frozen=True)
class Space:
    """What a plan may be."""

    schedule: str
    max_stages: int
    allow_unused: bool


@dataclass(frozen=True, eq=False)
class Prepared:
    """A choice: what may be stages, what the layers before a stage take at least, the bound that every plan keeps and
    the objective that finds good plans (the same where the bound is exact)."""

    choice: Choice
    options: Options
    prefixes: Prefixes
    bound: Objective
    estimate: Objective


class Problem(Protocol):
    """A model and a batch on a cluster with an objective."""

    cluster: Cluster
    orders: list[space.Order]
    degrees: tuple[int, ...]  # of tensor parallelism
    exact: bool  # the bound of a plan is its cost

    def prepare(self, choice: Choice) -> Prepared | dict[str, int]:
        """Or groups that cannot be stages, counted by reason, where none can."""

    def least_s(self, prepared: Prepared) -> float:
        """No plan of the choice takes less; inf: there is none."""

    def rough_s(self, plan: ParallelPlan) -> float:
        """Close to the cost and quicker; inf for a plan that cannot be."""

    def price(self, plan: ParallelPlan) -> CostedPlan | str:
        """Or the code of the reason why the plan cannot be."""

    def bound_s(self, plan: ParallelPlan) -> float:
        """The plan takes no less, and this is quicker to tell; inf for some plans that cannot be."""


# Choices come by order, so that few of these are in use at once; many types have many orders, and tables are large.
_ORDERS, _KINDS = 64, 128


class OurProblem:
    """Our cost and memory."""

    exact = False

    def __init__(self, profiles: Profiles, cluster: Cluster, global_batch: int, within: Space) -> None:
        self.profiles, self.cluster, self._batch, self._space = profiles, cluster, global_batch, within
        self.orders = space.orders(cluster)
        self.degrees = tuple(sorted({tp for _, tp, _ in profiles.points}))
        self._tables: dict[Settings, tuple[LayerTables, space.Splits]] = {}
        self._groups = lru_cache(_ORDERS)(self._groups_of)
        self._kinds = lru_cache(_KINDS)(lambda settings, _microbatches: Kinds(cluster, self.tables(settings)[0]))

    def _groups_of(self, number: int) -> tuple[list[space.Group], Network]:
        order = self.orders[number]
        found = space.groups(self.cluster, order, self.degrees)
        return found, network(self.cluster, order, found)

    def prepare(self, choice: Choice) -> Prepared | dict[str, int]:
        groups, net = self._groups(choice.order)
        _, splits = self.tables(choice.settings)
        kinds = self._kinds(choice.settings, choice.microbatches)
        samples = self._batch // choice.microbatches
        made = options(groups, kinds, splits, samples)
        if isinstance(made, dict):
            return made
        devices, layers = len(self.cluster.devices), self.profiles.model.layers
        prefixes = Prefixes(made, devices, layers, self._space.allow_unused)

        def objective(optimistic: bool) -> Pipeline:
            return Pipeline(
                made,
                net,
                prefixes,
                self.profiles.model.activation_bytes,
                choice.microbatches,
                samples,
                self._space.schedule,
                choice.settings.shard_parameters,
                optimistic,
            )

        return Prepared(choice, made, prefixes, objective(optimistic=True), objective(optimistic=False))

    def least_s(self, prepared: Prepared) -> float:
        if self._space.schedule == "interleaved":
            return 0.0  # a stage's layers are not those of the options
        slowest, total = prepared.prefixes.whole_s
        return max(prepared.choice.microbatches * slowest, total + (prepared.choice.microbatches - 1) * slowest / 2)

    def rough_s(self, plan: ParallelPlan) -> float:
        try:
            work = step_work(plan, self.cluster, self.tables(plan.settings)[0])
            return of_work(condensed(work)).step_time_s
        except PlanningError:
            return math.inf

    def price(self, plan: ParallelPlan) -> CostedPlan | str:
        tables, _ = self.tables(plan.settings)
        try:
            cost = estimate(plan, self.cluster, self.profiles, tables)
        except PlanningError:
            return "schedule"
        return "memory" if cost.over_memory(self.cluster) else costed(plan, cost, self.cluster, tables)

    def bound_s(self, plan: ParallelPlan) -> float:
        tables, _ = self.tables(plan.settings)
        try:
            runs = layer_runs(plan)
        except PlanningError:
            return math.inf
        slowest = 0.0
        for stage, own in zip(plan.stages, runs, strict=True):
            for replica in stage.replicas:
                name = self.cluster.devices[replica.devices[0]].type
                table = tables.find((name, replica.tp, replica.samples), stage.dp)
                if isinstance(table, Gap):
                    return math.inf
                slowest = max(slowest, sum(float(table.total_s[run]) for run in own))
        return plan.microbatches * slowest

    def tables(self, settings: Settings) -> tuple[LayerTables, space.Splits]:
        if settings not in self._tables:
            tables = LayerTables(self.profiles, settings)
            self._tables[settings] = (tables, space.Splits(tables))
        return self._tables[settings]


class MetisProblem:
    """Metis's cost and data balance. Its tensor-parallel groups may be any consecutive devices, as published; memory is
    each device's."""

    exact = True

    def __init__(
        self, profiles: Profiles, cluster: Cluster, global_batch: int, within: Space, settings: MetisSettings
    ) -> None:
        self.profiles, self.cluster, self._batch, self._space = profiles, cluster, global_batch, within
        self.orders = space.orders(cluster)
        self._stages = Stages(Lookup(profiles, cluster, settings.model_missing), settings.uneven_splits)
        self._evaluator = Evaluator(self._stages, cluster, profiles, settings)
        self._settings = settings
        self.degrees = tuple(sorted({tp for _, tp, _ in profiles.points}))
        self._groups = lru_cache(_ORDERS)(
            lambda number: space.groups(cluster, self.orders[number], self.degrees, anywhere=True)
        )

    def prepare(self, choice: Choice) -> Prepared | dict[str, int]:
        order = self.orders[choice.order]
        groups = self._groups(choice.order)
        samples = self._batch // choice.microbatches
        made = metis_options(groups, self._stages, self.cluster, order, samples)
        if isinstance(made, dict):
            return made
        devices, layers = len(self.cluster.devices), self.profiles.model.layers
        prefixes = Prefixes(made.options, devices, layers, self._space.allow_unused)
        bandwidths = Bandwidths(self.cluster, self._settings.cost == "metis-upstream")
        formula = MetisFormula(
            made, prefixes, self.profiles.model, bandwidths, order, choice.microbatches, self._settings.cost
        )
        return Prepared(choice, made.options, prefixes, formula, formula)

    def least_s(self, prepared: Prepared) -> float:
        slowest, total = prepared.prefixes.whole_s
        return (prepared.choice.microbatches - 1) * slowest + total

    def rough_s(self, plan: ParallelPlan) -> float:
        return self._evaluator.cost(plan).cost.total_ms / 1e3

    def bound_s(self, plan: ParallelPlan) -> float:
        return 0.0  # the cost itself is as quick

    def price(self, plan: ParallelPlan) -> CostedPlan | str:
        try:
            costed_plan = self._evaluator.cost(plan)
        except PlanningError:
            return "profile"
        for device, need in self._evaluator.memory_bytes(plan).items():
            if need > self.cluster.device_type(self.cluster.devices[device].type).memory_bytes:
                return "memory"
        return costed_plan


def plan_of(prepared: Prepared, found: Found, global_batch: int, schedule: str) -> ParallelPlan:
    """The plan of options and layers."""
    made, choice = prepared.options, prepared.choice
    stages = [(made.groups[option], made.samples(option), begin, end) for option, begin, end in found.stages]
    return space.plan(stages, choice.microbatches, global_batch, schedule, choice.settings)


def costed(plan: ParallelPlan, cost: Estimate, cluster: Cluster, tables: LayerTables) -> CostedPlan:
    """A plan with our cost. `tables` are of its settings."""
    sources: dict[str, set[str]] = {"modelled": set(), "interpolated": set(), "measured": set()}
    stage_ms, memory = [], []
    for stage in plan.stages:
        times = []
        for replica in stage.replicas:
            name = cluster.devices[replica.devices[0]].type
            table = tables.get((name, replica.tp, replica.samples), stage.dp)
            sources[table.source].add(f"{name} tp {replica.tp} micro-batch {replica.samples}")
            times.append(float(table.total_s[stage.begin, stage.end]) * 1e3)
        stage_ms.append(max(times))
        memory.append(max(cost.memory_bytes[device] for device in stage.devices))
    return CostedPlan(
        plan,
        Cost(
            execution_ms=cost.compute_s * 1e3,
            pipeline_ms=cost.pipeline_s * 1e3,
            data_parallel_ms=cost.all_reduce_s * 1e3,
            update_ms=cost.optimizer_s * 1e3,
        ),
        tuple(stage_ms),
        tuple(memory),
        modelled=_sorted(sources["modelled"]),
        interpolated=_sorted(sources["interpolated"]),
    )


def _sorted(names: Sequence[str] | set[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
