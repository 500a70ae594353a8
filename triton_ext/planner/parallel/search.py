"""Our search for a parallelism plan: exact over its space (space.py), or with a bound on what it may have missed.

1. For each choice of device order, micro-batches and settings, a bound that takes no search (objectives.Prefixes).
2. Choices by that bound: a beam search finds good plans; the cost model prices them.
3. Choices whose bound is below the best plan: a label-setting dynamic program over layers and devices
   (labels.py) finds the least that any of its plans can take.
4. Choices that are still below it: all plans whose bound is below the best plan's cost are priced, the most promising
   first. What is left when the time or the limit of priced plans ends is the gap.

With cost="metis" the objective itself is minimised exactly in step 3. Choices are handled in rounds of fixed size, so
that a result does not depend on the number of processes, unless the time ends.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ...errors import PlanningError
from ..cluster import Cluster
from . import labels, space
from .cost import Estimate, estimate
from .layer_tables import LayerTables
from .objectives import Objective, Pipeline, Prefixes
from .options import Choice, Kinds, Network, Options, choices, network, options
from .plan import SCHEDULES, ParallelPlan, Settings
from .profiles import Profiles
from .result import Cost, CostedPlan, Rejected, SearchResult

_ROUND = 8  # choices that are handled with the same best plan
_BEAM = 3
_BEAM_SHARE = 0.5  # of the time
_PRICED = 3  # plans of a beam search, or of a bound, that the cost model prices
_ALL = 50_000  # labels of one number of stages, where none is dominated


@dataclass(frozen=True)
class SearchSettings:
    """What to search and for how long.

    plan_settings: alternatives that all are searched. allow_unused: plans may leave devices out. seeds: plans by
    others, which are priced too (if they fit into memory). price_limit: how many plans are priced in step 4. processes:
    1 searches in this one. Deadline and limits make a result incomplete, never wrong: `SearchResult.gap`.
    """

    schedule: str = "1f1b"
    plan_settings: tuple[Settings, ...] = (Settings(),)
    max_stages: int | None = None
    allow_unused: bool = False
    time_limit_s: float = 30.0
    price_limit: int = 300
    processes: int = 1
    plans: int = 10
    seeds: tuple[ParallelPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanningError(f"schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if not self.plan_settings:
            raise PlanningError("plan_settings is empty; give at least one")
        for name in ("time_limit_s", "processes", "plans"):
            if not getattr(self, name) > 0:
                raise PlanningError(f"{name} is {getattr(self, name)}; give more than 0")
        if self.max_stages is not None and self.max_stages < 1:
            raise PlanningError(f"max_stages is {self.max_stages}; give at least 1")


@dataclass(frozen=True)
class Progress:
    """Where a search stands: its step, how many choices of it are done, and the best plan's cost (inf: none yet)."""

    step: str
    done: int
    total: int
    best_ms: float


def search(
    profiles: Profiles,
    cluster: Cluster,
    global_batch: int,
    settings: SearchSettings | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plans, best first, with a bound that no plan of the space goes below; no plans where none is feasible,
    and why. Raises PlanningError for settings, a batch or profiles that nothing can be planned with."""
    settings = settings or SearchSettings()
    if global_batch < 1:
        raise PlanningError(f"global_batch is {global_batch}; give at least 1")
    if not cluster.devices:
        raise PlanningError("the cluster has no devices; give at least one")
    return _Search(profiles, cluster, global_batch, settings, progress or (lambda _: None)).run()


# --- one choice, in whichever process ---


@dataclass(frozen=True)
class _Task:
    """What to do with a choice, how far (a plan's time to go below), and until when."""

    step: str  # "bound", "beam", "labels" or "price"
    choice: Choice
    best_s: float
    deadline_s: float
    price_limit: int = 0


@dataclass
class _Outcome:
    bound_s: float = 0.0  # of the choice; inf: nothing is left below best_s
    plans: dict[ParallelPlan, Estimate] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    in_time: bool = True


class _Worker:
    """One model, cluster and space; keeps what several steps of a choice need."""

    def __init__(self, profiles: Profiles, cluster: Cluster, global_batch: int, settings: SearchSettings) -> None:
        self.profiles, self.cluster, self.batch, self.settings = profiles, cluster, global_batch, settings
        self.orders = space.orders(cluster)
        self.degrees = sorted({tp for _, tp, _ in profiles.points})
        self.layers = profiles.model.layers
        self.devices = len(cluster.devices)
        self._tables: dict[Settings, tuple[LayerTables, space.Splits]] = {}
        self._networks: dict[int, tuple[list[space.Group], Network]] = {}
        self._kinds: dict[tuple[Settings, int], Kinds] = {}
        self._options: dict[Choice, tuple[Options, Prefixes] | dict[str, int]] = {}

    @property
    def max_stages(self) -> int:
        return min(self.layers, self.devices, self.settings.max_stages or self.layers)

    def tables(self, settings: Settings) -> tuple[LayerTables, space.Splits]:
        if settings not in self._tables:
            tables = LayerTables(self.profiles, settings)
            self._tables[settings] = (tables, space.Splits(tables))
        return self._tables[settings]

    def run(self, task: _Task) -> _Outcome:
        if task.choice not in self._options:
            self._options[task.choice] = self._prepare(task.choice)
        found = self._options[task.choice]
        if isinstance(found, dict):
            return _Outcome(math.inf, rejected=found)
        if task.step == "bound":
            bound_s = self._least_s(task.choice, found[1])
            rejected = dict(found[0].rejected)
            if math.isinf(bound_s):
                rejected["memory"] = rejected.get("memory", 0) + 1
            return _Outcome(bound_s, rejected=rejected)
        step = {"beam": self._beam, "labels": self._labels, "price": self._price}[task.step]
        return step(task, *found)

    def _prepare(self, choice: Choice) -> tuple[Options, Prefixes] | dict[str, int]:
        if choice.order not in self._networks:
            order = self.orders[choice.order]
            found = space.groups(self.cluster, order, self.degrees)
            self._networks[choice.order] = (found, network(self.cluster, order, found))
        tables, splits = self.tables(choice.settings)
        found = self._networks[choice.order][0]
        at = (choice.settings, choice.microbatches)
        if at not in self._kinds:
            self._kinds[at] = Kinds(self.cluster, tables)
        made = options(found, self._kinds[at], splits, self.batch // choice.microbatches)
        if isinstance(made, dict):
            return made
        return made, Prefixes(made, self.devices, self.layers, self.settings.allow_unused)

    def _least_s(self, choice: Choice, prefixes: Prefixes) -> float:
        slowest = float(prefixes.slowest_s[self.devices, self.layers])
        total = float(prefixes.sum_s[self.devices, self.layers])
        return max(choice.microbatches * slowest, total + (choice.microbatches - 1) * slowest / 2)

    def _objective(self, choice: Choice, made: Options, prefixes: Prefixes, optimistic: bool) -> Objective:
        return Pipeline(
            made,
            self._networks[choice.order][1],
            prefixes,
            self.profiles.model.activation_bytes,
            choice.microbatches,
            self.batch // choice.microbatches,
            self.settings.schedule,
            choice.settings.shard_parameters,
            optimistic,
        )

    def _search(
        self, task: _Task, made: Options, prefixes: Prefixes, optimistic: bool, **limits: int
    ) -> list[labels.Found]:
        return labels.search(
            self._objective(task.choice, made, prefixes, optimistic),
            made,
            self.devices,
            self.layers,
            labels.Limits(task.best_s, self.max_stages, deadline_s=task.deadline_s, **limits),  # type: ignore[arg-type]
            self.settings.allow_unused,
        )

    def _beam(self, task: _Task, made: Options, prefixes: Prefixes) -> _Outcome:
        try:
            found = self._search(task, made, prefixes, optimistic=False, beam=_BEAM)
        except labels.OutOfTime:
            return _Outcome()
        return _Outcome(plans=self._priced(task, made, found[:_PRICED]))

    def _labels(self, task: _Task, made: Options, prefixes: Prefixes) -> _Outcome:
        try:
            found = self._search(task, made, prefixes, optimistic=True)
        except labels.OutOfTime:
            return _Outcome(in_time=False)
        return _Outcome(found[0].total_s if found else math.inf, self._priced(task, made, found[:_PRICED]))

    def _price(self, task: _Task, made: Options, prefixes: Prefixes) -> _Outcome:
        try:
            found = self._search(task, made, prefixes, optimistic=True, dominance=False, labels=_ALL)
        except labels.OutOfTime:
            return _Outcome(in_time=False)
        outcome = _Outcome(math.inf)
        best_s = task.best_s
        for number, candidate in enumerate(found):
            if candidate.total_s >= best_s:
                break
            if number == task.price_limit or time.monotonic() > task.deadline_s:
                outcome.bound_s, outcome.in_time = candidate.total_s, False
                break
            priced = self._priced(task, made, [candidate])
            outcome.plans |= priced
            best_s = min([best_s, *(cost.step_time_s for cost in priced.values())])
        return outcome

    def _priced(self, task: _Task, made: Options, found: Sequence[labels.Found]) -> dict[ParallelPlan, Estimate]:
        priced = {}
        for candidate in found:
            stages = [(made.groups[o], made.samples(o), a, b) for o, a, b in candidate.stages]
            choice = task.choice
            plan = space.plan(stages, choice.microbatches, self.batch, self.settings.schedule, choice.settings)
            priced[plan] = self.estimate(plan)
        return priced

    def estimate(self, plan: ParallelPlan) -> Estimate:
        return estimate(plan, self.cluster, self.profiles, self.tables(plan.settings)[0])


_worker: _Worker | None = None


def _start(*arguments: object) -> None:
    global _worker
    _worker = _Worker(*arguments)  # type: ignore[arg-type]


def _run(task: _Task) -> _Outcome:
    assert _worker is not None  # set by the pool's initializer
    return _worker.run(task)


# --- all choices ---


class _Search:
    def __init__(
        self,
        profiles: Profiles,
        cluster: Cluster,
        global_batch: int,
        settings: SearchSettings,
        progress: Callable[[Progress], None],
    ) -> None:
        self._started = time.monotonic()
        self._deadline_s = self._started + settings.time_limit_s
        self._arguments = (profiles, cluster, global_batch, settings)
        self._local = _Worker(*self._arguments)
        self._settings, self._report, self._batch = settings, progress, global_batch
        self._plans: dict[ParallelPlan, Estimate] = {}
        self._rejected: dict[str, int] = {}
        self._pruned: dict[str, int] = {}
        self._complete = True
        self._pools: list[ProcessPoolExecutor] = []

    @property
    def _best_s(self) -> float:
        return min((cost.step_time_s for cost in self._plans.values()), default=math.inf)

    def run(self) -> SearchResult:
        for plan in self._settings.seeds:
            cost = self._local.estimate(plan)
            if not cost.over_memory(self._local.cluster):
                self._plans[plan] = cost
        with self._workers():
            bounds = self._steps()
        return self._result(min(bounds.values(), default=math.inf))

    @contextmanager
    def _workers(self) -> Iterator[None]:
        """One pool for each process: a choice stays with the process that knows it."""
        context = multiprocessing.get_context("spawn")  # safe with threads and whatever else the caller runs
        count = self._settings.processes if self._settings.processes > 1 else 0
        with ExitStack() as stack:
            for _ in range(count):
                self._pools.append(stack.enter_context(ProcessPoolExecutor(1, context, _start, self._arguments)))
            try:
                yield
            finally:
                for pool in self._pools:
                    pool.shutdown(wait=False, cancel_futures=True)

    def _outcomes(self, tasks: Sequence[_Task], places: Sequence[int]) -> Iterator[_Outcome]:
        if not self._pools:
            yield from map(self._local.run, tasks)
            return
        pools = [self._pools[place % len(self._pools)] for place in places]
        futures = [pool.submit(_run, task) for pool, task in zip(pools, tasks, strict=True)]
        for future in futures:
            yield future.result()

    def _steps(self) -> dict[Choice, float]:
        everything = choices(self._local.orders, self._batch, self._settings.plan_settings)
        bounds = dict.fromkeys(everything, 0.0)
        for choice, outcome in self._round("bound", everything, bounds, rounds=len(everything)):
            bounds[choice] = outcome.bound_s
        deadline_s = self._started + _BEAM_SHARE * self._settings.time_limit_s
        for _ in self._round("beam", everything, bounds, deadline_s=deadline_s):
            pass
        for choice, outcome in self._round("labels", everything, bounds):
            bounds[choice] = max(bounds[choice], outcome.bound_s)
        for choice, outcome in self._round("price", everything, bounds):
            bounds[choice] = max(bounds[choice], outcome.bound_s)
        return bounds

    def _round(
        self,
        step: str,
        everything: Sequence[Choice],
        bounds: dict[Choice, float],
        rounds: int = _ROUND,
        deadline_s: float | None = None,
    ) -> Iterator[tuple[Choice, _Outcome]]:
        """The outcomes of a step for all choices whose bound is below the best plan, the lowest first. A step with a
        deadline of its own is one that nothing depends on."""
        numbers = {choice: number for number, choice in enumerate(everything)}
        waiting = sorted(everything, key=lambda choice: (bounds[choice], numbers[choice]))
        total, limit = len(waiting), self._settings.price_limit
        while waiting:
            open_ones = [choice for choice in waiting if bounds[choice] < self._best_s * (1 - 1e-12)]
            self._pruned[step] = self._pruned.get(step, 0) + len(waiting) - len(open_ones)
            now, waiting = open_ones[:rounds], open_ones[rounds:]
            until_s = deadline_s if deadline_s and self._plans else self._deadline_s
            if now and time.monotonic() > until_s:
                self._complete = self._complete and bool(deadline_s)
                return
            tasks = [_Task(step, choice, self._best_s, until_s, limit) for choice in now]
            outcomes = self._outcomes(tasks, [numbers[choice] for choice in now])
            for choice, outcome in zip(now, outcomes, strict=True):
                self._take(outcome)
                if step == "price":
                    limit = max(0, limit - len(outcome.plans))
                yield choice, outcome
            self._report(Progress(step, total - len(waiting), total, self._best_s * 1e3))

    def _take(self, outcome: _Outcome) -> None:
        self._plans |= outcome.plans
        self._complete = self._complete and outcome.in_time
        for code, count in outcome.rejected.items():
            self._rejected[code] = self._rejected.get(code, 0) + count

    def _result(self, bound_s: float) -> SearchResult:
        # Ties: whatever the order in which they were found.
        ranked = sorted(self._plans.items(), key=lambda entry: (entry[1].step_time_s, repr(entry[0])))
        best = tuple(self._costed(plan, cost) for plan, cost in ranked[: self._settings.plans])
        return SearchResult(
            algorithm="ours",
            plans=best,
            costed=len(self._plans),
            rejected=tuple(Rejected(code, count, _REASONS[code]) for code, count in sorted(self._rejected.items())),
            pruned={f"choices without {step}": count for step, count in self._pruned.items() if count},
            elapsed_s=time.monotonic() - self._started,
            complete=self._complete,
            lower_bound_ms=min(bound_s, self._best_s) * 1e3 if best else None,
        )

    def _costed(self, plan: ParallelPlan, cost: Estimate) -> CostedPlan:
        return costed(plan, cost, self._local.cluster, self._local.tables(plan.settings)[0])


_REASONS = {
    "fewer samples than replicas": "groups of devices with more replicas than a micro-batch has samples",
    "no profile": "groups of devices for whose shares of a micro-batch there is no profile, nor two around it",
    "memory": "device orders and micro-batches for which no division of the layers fits into every device's memory",
}


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
        modelled=tuple(sorted(sources["modelled"])),
        interpolated=tuple(sorted(sources["interpolated"])),
    )
