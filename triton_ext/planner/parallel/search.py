"""Our search for a parallelism plan: exact over its space (space.py), or with a bound on what it may have missed.

1. For each choice of device order, micro-batches and settings, a bound that takes no search (objectives.Prefixes).
2. Some choices by that bound: a beam search finds good plans; the cost model prices them.
3. Choices whose bound is below the best plan: a label-setting dynamic program over layers and devices
   (labels.py) finds the least that any of its plans can take. Then a beam search for the others that are left.
4. Choices that are still below it: all plans whose bound is below the best plan's cost are priced, the most promising
   first. What is left when the time or the limit of priced plans ends is the gap.

With cost="metis" the objective itself is minimised exactly in step 3, from the published search's plan on. Choices are
handled in rounds of fixed size, so that a result does not depend on the number of processes, unless the time ends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait

from ...errors import PlanningError
from ...signals import exit_on_sigterm
from ..cluster import Cluster
from . import labels
from .metis import MetisSettings
from .metis import search as search_published
from .objectives import Objective
from .options import Choice, choices
from .plan import SCHEDULES, ParallelPlan, Settings
from .problems import MetisProblem, OurProblem, Prepared, Problem, Space, plan_of
from .profiles import Profiles
from .result import CostedPlan, Rejected, SearchResult
from .space import ordered_devices, ordered_nodes
from .uniform import Allowed, uniform_plans

_ROUND = 4  # choices that are handled with the same best plan
_BOUNDED = 16  # choices that are bounded before the time is looked at, unless it ends
_MANY = 64  # choices, above which there are some plans before all are bounded
_PREPARED = 256  # choices that a process keeps prepared
_FIRST = 8  # choices whose plans are looked for before all others are bounded
_BEAM = 3
_TRIED = 4  # plans of a beam search, or of a bound, whose cost is computed roughly
_TRIED_INTERLEAVED = 30  # the same, where their order says little
_NEAR = 1.1  # times what the first of them takes, by the search's own estimate
_PRICED = 2  # of these, the first ones, and the best ones by their rough cost, are priced
_ROUGH = 1.1  # if they are not more than this beyond the best plan: how far a rough cost may be too high
_EARLY_SHARE = 0.25  # of the time, for uniform plans where there are many choices
_PUBLISHED_SHARE = 0.25  # of the time, for Metis's search before ours under its cost
_MOST = 300_000  # labels of one number of stages
_GRACE_S = 60.0  # for a process that is in the middle of something when the time ends
_ALL = 50_000  # labels of one number of stages, where none is dominated


@dataclass(frozen=True)
class SearchSettings:
    """What to search and for how long.

    cost: "ours", or "metis": the published formula, with the units and splits of `metis`. plan_settings: alternatives
    that all are searched. allow_unused: plans may leave devices out. seeds: plans by
    others, which are priced too (if they fit into memory). price_limit: how many plans are priced in step 4. processes:
    1 searches in this one. Deadline and limits make a result incomplete, never wrong: `SearchResult.gap`.
    """

    cost: str = "ours"
    metis: MetisSettings = field(default_factory=MetisSettings)
    schedule: str = "1f1b"
    plan_settings: tuple[Settings, ...] = (Settings(),)
    max_stages: int | None = None
    allow_unused: bool = False
    time_limit_s: float = 30.0
    price_limit: int = 1000
    processes: int = 1
    plans: int = 10
    seeds: tuple[ParallelPlan, ...] = ()

    def __post_init__(self) -> None:
        if self.cost not in ("ours", "metis"):
            raise PlanningError(f"cost {self.cost!r}; there are ours, metis")
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
    plans: list[CostedPlan] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    complete: bool = True  # else a limit, perhaps that of time, came first
    timed_out: bool = False


class _Worker:
    """Works on choices; keeps what several steps of one need."""

    def __init__(self, profiles: Profiles, cluster: Cluster, global_batch: int, settings: SearchSettings) -> None:
        self.settings, self.batch = settings, global_batch
        self.layers, self.devices = profiles.model.layers, len(cluster.devices)
        most = min(self.layers, self.devices, settings.max_stages or self.layers)
        self.max_stages = most
        within = Space(settings.schedule, most, settings.allow_unused)
        self.problem: Problem
        if settings.cost == "metis":
            self.problem = MetisProblem(profiles, cluster, global_batch, within, settings.metis)
        else:
            self.problem = OurProblem(profiles, cluster, global_batch, within)
        self._prepared = lru_cache(_PREPARED)(self.problem.prepare)

    def run(self, task: _Task) -> _Outcome:
        if time.monotonic() > task.deadline_s:
            return _Outcome(complete=False, timed_out=True)
        prepared = self._prepared(task.choice)
        if isinstance(prepared, dict):
            return _Outcome(math.inf, rejected=prepared)
        steps = {"bound": self._bound, "beam": self._beam, "labels": self._labels, "price": self._price}
        outcome = steps[task.step](task, prepared)
        outcome.timed_out = not outcome.complete and time.monotonic() > task.deadline_s
        return outcome

    def _bound(self, task: _Task, prepared: Prepared) -> _Outcome:
        least_s = self.problem.least_s(prepared)
        rejected = dict(prepared.options.rejected)
        if math.isinf(least_s):
            rejected["memory"] = rejected.get("memory", 0) + 1
        return _Outcome(least_s, rejected=rejected)

    def _beam(self, task: _Task, prepared: Prepared) -> _Outcome:
        try:
            found = self._found(task, prepared, prepared.estimate, beam=_BEAM)
        except labels.OutOfTime:
            return _Outcome()
        return self._priced(prepared, found, task.best_s)

    def _labels(self, task: _Task, prepared: Prepared) -> _Outcome:
        try:
            found = self._found(task, prepared, prepared.bound)
        except labels.OutOfTime:
            return _Outcome(complete=False)
        outcome = self._priced(prepared, found, task.best_s)
        outcome.bound_s = found[0].total_s if found else math.inf
        return outcome

    def _price(self, task: _Task, prepared: Prepared) -> _Outcome:
        try:
            found = self._found(task, prepared, prepared.bound, dominance=False, most=_ALL)
        except labels.OutOfTime:
            return _Outcome(complete=False)
        outcome = _Outcome(math.inf)
        best_s = task.best_s
        for number, candidate in enumerate(found):
            if candidate.total_s >= best_s:
                break
            if number == task.price_limit or time.monotonic() > task.deadline_s:
                outcome.bound_s, outcome.complete = candidate.total_s, False
                break
            self._take(outcome, self._plan(prepared, candidate))
            best_s = min([best_s, *(plan.cost.total_ms / 1e3 for plan in outcome.plans[-1:])])
        return outcome

    def _found(
        self,
        task: _Task,
        prepared: Prepared,
        objective: Objective,
        beam: int = 0,
        dominance: bool = True,
        most: int = _MOST,
    ) -> list[labels.Found]:
        limits = labels.Limits(task.best_s, self.max_stages, beam, dominance, task.deadline_s, most)
        return labels.search(objective, prepared.options, self.devices, self.layers, limits, self.settings.allow_unused)

    def _priced(self, prepared: Prepared, found: Sequence[labels.Found], best_s: float) -> _Outcome:
        """The most promising of some plans, with their cost."""
        outcome = _Outcome()
        tried = _TRIED_INTERLEAVED if self.settings.schedule == "interleaved" else _TRIED
        near = [candidate for candidate in found[:tried] if candidate.total_s <= _NEAR * found[0].total_s]
        plans = [self._plan(prepared, candidate) for candidate in near]
        rough = sorted((self.problem.rough_s(plan), number) for number, plan in enumerate(plans))
        # Rough costs are too high where links are busy, the search's own estimates may be wrong either way.
        chosen = [
            (rough_s, number) for place, (rough_s, number) in enumerate(rough) if place < _PRICED or number < _PRICED
        ]
        for rough_s, number in chosen:
            if rough_s < _ROUGH * best_s or math.isinf(rough_s):  # inf: it has a reason, which is counted
                self._take(outcome, plans[number])
        return outcome

    def _plan(self, prepared: Prepared, found: labels.Found) -> ParallelPlan:
        return plan_of(prepared, found, self.batch, self.settings.schedule)

    def _take(self, outcome: _Outcome, plan: ParallelPlan) -> None:
        priced = self.problem.price(plan)
        if isinstance(priced, str):
            outcome.rejected[priced] = outcome.rejected.get(priced, 0) + 1
        else:
            outcome.plans.append(priced)


_worker: _Worker | None = None


def _start(alive: Connection, *arguments: object) -> None:
    global _worker
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    _worker = _Worker(*arguments)  # type: ignore[arg-type]


def _end_with(alive: Connection) -> None:
    """End this process, whatever it does, when the searching one closes its end of a pipe, or ends."""
    parent = multiprocessing.parent_process()
    wait([alive, parent.sentinel] if parent else [alive])
    os._exit(1)


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
        self._plans: dict[ParallelPlan, CostedPlan] = {}
        self._rejected: dict[str, int] = {}
        self._pruned: dict[str, int] = {}
        self._complete, self._timed_out = True, False
        self._pools: list[ProcessPoolExecutor] = []

    @property
    def _best_s(self) -> float:
        return min((plan.cost.total_ms for plan in self._plans.values()), default=math.inf) / 1e3

    def run(self) -> SearchResult:
        for plan in (*self._settings.seeds, *self._published()):
            self._price(plan)
        everything = choices(self._local.problem.orders, self._batch, self._settings.plan_settings)
        self._first_uniform(many=len(everything) > _MANY)
        with self._workers():
            bounds = self._steps(everything)
        return self._result(min([*bounds.values(), self._uniform_bound_s()]))

    def _price(self, plan: ParallelPlan) -> None:
        priced = self._local.problem.price(plan)
        if isinstance(priced, CostedPlan):
            self._plans[plan] = priced

    def _uniform(self, settings: Sequence[Settings]) -> Iterator[ParallelPlan]:
        """Plans as for equal devices (uniform.py), within the limits of the search."""
        profiles, cluster, batch, given = self._arguments
        allowed = Allowed(given.schedule, tuple(settings), self._local.problem.degrees, given.cost == "metis")
        for plan in uniform_plans(cluster, profiles.model.layers, batch, allowed):
            if len(plan.stages) <= self._local.max_stages:
                yield plan

    def _first_uniform(self, many: bool) -> None:
        """So that there is a plan, however short the time: the first uniform one that can be, by its bound, with the
        plainest settings that have one. Where there are many choices, the best one, if a part of the time suffices."""
        until_s = self._started + _EARLY_SHARE * self._settings.time_limit_s
        for settings in self._settings.plan_settings:
            bounded = [
                (self._local.problem.bound_s(plan), number, plan)
                for number, plan in enumerate(self._uniform([settings]))
            ]
            for bound_s, _, plan in sorted(bounded, key=lambda each: each[:2]):
                if self._plans and (not many or bound_s >= self._best_s or time.monotonic() > until_s):
                    break
                self._price(plan)
            if (self._plans and not many) or time.monotonic() > until_s:
                return

    def _uniform_bound_s(self) -> float:
        """Price the uniform plans that may be better, since some are outside of the space: with equal shares in stages
        of several types, or types in turn. Returns a bound of those that are left when time ends; inf if none is."""
        bounded = [
            (self._local.problem.bound_s(plan), number, plan)
            for number, plan in enumerate(self._uniform(self._settings.plan_settings))
        ]
        for bound_s, _, plan in sorted(bounded, key=lambda each: each[:2]):
            if bound_s >= self._best_s:
                break
            if time.monotonic() > self._deadline_s:
                self._complete, self._timed_out = False, True
                return bound_s
            self._price(plan)
        return math.inf

    def _published(self) -> tuple[ParallelPlan, ...]:
        """For Metis's cost, the plan of Metis's search: ours is never above it, even where time ends early."""
        if self._settings.cost != "metis":
            return ()
        profiles, cluster, batch, settings = self._arguments
        given = replace(
            settings.metis,
            keep=1,
            time_limit_s=_PUBLISHED_SHARE * settings.time_limit_s,
            max_stages=min((n for n in (settings.max_stages, settings.metis.max_stages) if n), default=None),
        )
        # It takes a cluster's devices in their order: in one that does not depend on a file's.
        nodes = tuple(cluster.nodes[node] for node in ordered_nodes(cluster))
        best = search_published(profiles, replace(cluster, nodes=nodes), batch, given).best
        return (best.plan.renumbered(ordered_devices(cluster)),) if best else ()

    @contextmanager
    def _workers(self) -> Iterator[None]:
        """One pool for each process: a choice stays with the process that knows it."""
        if self._settings.processes == 1:
            yield
            return
        context = multiprocessing.get_context("spawn")  # safe with threads and whatever else the caller runs
        alive, mine = context.Pipe(duplex=False)
        arguments = (alive, *self._arguments)
        with exit_on_sigterm():
            self._pools = [ProcessPoolExecutor(1, context, _start, arguments) for _ in range(self._settings.processes)]
            try:
                yield
            except BrokenProcessPool:
                raise PlanningError(
                    "a process that searched has ended unexpectedly, perhaps for lack of memory; give fewer processes"
                ) from None
            except TimeoutError:
                raise PlanningError(f"a process that searched did not end {_GRACE_S:g} s after its time") from None
            finally:
                mine.close()  # ends the processes, whatever they do
                for pool in self._pools:
                    pool.shutdown(cancel_futures=True)
                alive.close()

    def _outcomes(self, tasks: Sequence[_Task], places: Sequence[int]) -> Iterator[_Outcome]:
        if not self._pools:
            yield from map(self._local.run, tasks)
            return
        pools = [self._pools[place % len(self._pools)] for place in places]
        futures = [pool.submit(_run, task) for pool, task in zip(pools, tasks, strict=True)]
        for future in futures:
            yield future.result(max(0.0, self._deadline_s - time.monotonic()) + _GRACE_S)

    def _steps(self, everything: Sequence[Choice]) -> dict[Choice, float]:
        bounds = dict.fromkeys(everything, 0.0)
        self._early(everything, bounds)
        unknown = [choice for choice in everything if not bounds[choice]]
        for choice, outcome in self._round("bound", unknown, bounds, rounds=_BOUNDED):
            bounds[choice] = outcome.bound_s
        if self._settings.schedule == "interleaved":  # its layers are not where the bounds have them
            for _ in self._round("beam", everything, bounds):
                pass
            self._complete = self._complete and all(map(math.isinf, bounds.values()))
            return bounds
        # Some plans first, without which the bounds would not leave out much; then those of the most promising choices.
        first = [choice for choice, _ in self._round("beam", everything, bounds, most=_FIRST)]
        for choice, outcome in self._round("labels", everything, bounds):
            bounds[choice] = max(bounds[choice], outcome.bound_s)
        others = [choice for choice in everything if choice not in first]
        for _ in self._round("beam", others, bounds):
            pass
        if not self._local.problem.exact:
            for choice, outcome in self._round("price", everything, bounds):
                bounds[choice] = max(bounds[choice], outcome.bound_s)
        return bounds

    def _early(self, everything: Sequence[Choice], bounds: dict[Choice, float]) -> None:
        """Where bounds take long, or there is no plan yet: plans of some choices, spread over all of the plainest
        settings. The first of them even if there is no time."""
        if len(everything) <= _MANY and self._plans:
            return
        plain = [choice for choice in everything if choice.settings == self._settings.plan_settings[0]]
        some = plain[:: -(-len(plain) // _BOUNDED)]
        for choice in some[:_ROUND]:
            if not self._plans:
                self._take(self._local.run(_Task("beam", choice, math.inf, math.inf)))
        for choice, outcome in self._round("bound", some, bounds, rounds=_BOUNDED):
            bounds[choice] = outcome.bound_s
        for _ in self._round("beam", [choice for choice in some if bounds[choice]], bounds, most=_ROUND):
            pass

    def _round(
        self,
        step: str,
        everything: Sequence[Choice],
        bounds: dict[Choice, float],
        rounds: int = _ROUND,
        most: int | None = None,
    ) -> Iterator[tuple[Choice, _Outcome]]:
        """The outcomes of a step for (at most so many) choices whose bound is below the best plan, the lowest first."""
        numbers = {choice: number for number, choice in enumerate(bounds)}
        waiting = sorted(everything, key=lambda choice: (bounds[choice], numbers[choice]))[:most]
        total, limit = len(waiting), self._settings.price_limit
        while waiting:
            open_ones = [choice for choice in waiting if bounds[choice] < self._best_s * (1 - 1e-12)]
            self._pruned[step] = self._pruned.get(step, 0) + len(waiting) - len(open_ones)
            now, waiting = open_ones[:rounds], open_ones[rounds:]
            if now and time.monotonic() > self._deadline_s:
                self._complete, self._timed_out = False, True
                return
            part = -(-limit // max(1, len(open_ones)))  # each choice may have as many plans priced as the others
            tasks = [_Task(step, choice, self._best_s, self._deadline_s, part) for choice in now]
            outcomes = self._outcomes(tasks, [numbers[choice] for choice in now])
            for choice, outcome in zip(now, outcomes, strict=True):
                self._take(outcome)
                if step == "price":
                    limit = max(0, limit - len(outcome.plans))
                yield choice, outcome
            self._report(Progress(step, total - len(waiting), total, self._best_s * 1e3))

    def _take(self, outcome: _Outcome) -> None:
        self._plans |= {priced.plan: priced for priced in outcome.plans}
        self._complete = self._complete and outcome.complete
        self._timed_out = self._timed_out or outcome.timed_out
        for code, count in outcome.rejected.items():
            self._rejected[code] = self._rejected.get(code, 0) + count

    def _result(self, bound_s: float) -> SearchResult:
        # Ties: whatever the order in which they were found.
        ranked = sorted(self._plans.values(), key=lambda priced: (priced.cost.total_ms, repr(priced.plan)))
        best = tuple(ranked[: self._settings.plans])
        proving = best and self._settings.schedule != "interleaved"
        complete = self._complete or bool(proving and bound_s >= self._best_s)  # nothing that was left out counts
        return SearchResult(
            algorithm="ours",
            plans=best,
            costed=len(self._plans),
            rejected=tuple(Rejected(code, count, _REASONS[code]) for code, count in sorted(self._rejected.items())),
            pruned={f"choices without {step}": count for step, count in self._pruned.items() if count},
            notes=self._notes(best),
            elapsed_s=time.monotonic() - self._started,
            complete=complete,
            timed_out=self._timed_out and not complete,
            lower_bound_ms=min(bound_s, self._best_s) * 1e3 if proving else None,
        )

    def _notes(self, best: Sequence[CostedPlan]) -> tuple[str, ...]:
        notes = []
        if best:
            used = {device for stage in best[0].plan.stages for device in stage.devices}
            unused = [str(device) for device in range(self._local.devices) if device not in used]
            if unused:
                notes.append(f"the best plan leaves out devices {', '.join(unused)}")
        if self._settings.schedule == "interleaved":
            notes.append("an interleaved schedule has no bound: the best plan is not proven")
        return tuple(notes)


_REASONS = {
    "samples": "groups of devices with more replicas than a micro-batch has samples",
    "profile": "groups of devices for whose shares of a micro-batch there is no profile, nor two around it",
    "memory": "orders of devices and micro-batches for which no division of the layers fits into every device's "
    "memory, and interleaved plans that do not fit",
    "schedule": "interleaved plans whose micro-batches do not fill their rounds, or with fewer layers than chunks",
    "divisibility": "groups of devices whose replicas do not divide the samples of a micro-batch",
}
