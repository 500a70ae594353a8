"""Metis's search for a parallelism plan (USENIX ATC 2024).

For every order of the device types, number of stages, vector of group sizes and number of micro-batches: starting with
data parallelism alone, stages are given more tensor parallelism, the one with the least free memory first, until a plan
fits without moving layers for memory's sake. Many plans are balanced and costed at once (`balance`, `tables`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ....errors import PlanningError
from ...cluster import Cluster
from ..lookup import Lookup
from ..plan import ParallelPlan, Replica, Stage
from ..profiles import Gap, Profiles
from ..result import CostedPlan, Rejected, SearchResult
from .balance import Balanced, Floats, Ints, balance
from .bandwidth import Bandwidths
from .cost import Evaluator
from .groups import groups
from .settings import MetisSettings
from .stage import Rejection, Stages
from .tables import Batch, Layout, Tables

_BATCH = 8192  # plans costed at once
_LAYOUTS = 6  # orders of device types searched at once
_SAME = 24  # orders of device types that may give one plan, at most, of those kept
# Cost, then what tells plans apart: stages, layout, micro-batches, group sizes, degrees, edges.
_Candidate = tuple[float, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass
class _Counts:
    costed: int = 0
    tried: int = 0
    space: int = 0  # strategies of the choices that were searched
    sizes: int = 0  # vectors of group sizes that min_group_scale_variance left out
    orders: int = 0  # and max_permute_len
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def reject(self, code: str, count: int, example: str) -> None:
        self.rejected[code] = self.rejected.get(code, 0) + count
        self.examples.setdefault(code, example)


def search(
    profiles: Profiles, cluster: Cluster, global_batch: int, settings: MetisSettings | None = None
) -> SearchResult:
    """The plans of Metis's space that use all devices, best first.

    Raises PlanningError for a batch below 1 and a cluster without devices. No plan is no error: the result says why.
    """
    settings = settings or MetisSettings()
    if global_batch < 1:
        raise PlanningError(f"global_batch is {global_batch}; give at least 1")
    if not cluster.devices:
        raise PlanningError("the cluster has no devices; give at least one")
    return _Search(profiles, cluster, global_batch, settings).run()


@dataclass
class _Choices:
    """Choices of device groups and micro-batches, and where the search of their strategies stands.

    By choice: layout, count (index of the micro-batches), batches. By stage and choice: groups (index of the size),
    devices, start (first rank), halvings (how often the data-parallel degree can be halved), runnable (exponents of
    valid tensor-parallel degrees, as bits), level (exponent of the current one), free (bytes left in the last balance;
    NaN before). bandwidth: of the cuts.
    """

    layout: Ints
    count: Ints
    groups: Ints
    devices: Ints
    start: Ints
    batches: Ints
    bandwidth: Floats
    halvings: Ints
    runnable: Ints
    level: Ints
    free: Floats

    def ids(self, tables: Tables, which: Ints) -> Ints:
        return tables.ids(
            self.layout[which], self.start[:, which], self.groups[:, which], self.level[:, which], self.count[which]
        )

    def advance(self, which: Ints) -> Ints:
        """More tensor parallelism for the stage with the least free memory, before any balance for the one with the
        largest dp; returns the choices that had one."""
        level = self.level[:, which]
        halvable = level < self.halvings[:, which]
        state = self.free[:, which]
        state = np.where(np.isnan(state), (1 << level) / self.devices[:, which], state)
        stage = np.where(halvable, state, np.inf).argmin(axis=0)
        possible = halvable.any(axis=0)
        self.level[stage[possible], which[possible]] += 1
        return which[possible]


class _Search:
    def __init__(self, profiles: Profiles, cluster: Cluster, global_batch: int, settings: MetisSettings) -> None:
        self._started = time.perf_counter()
        self._profiles, self._cluster, self._batch, self._settings = profiles, cluster, global_batch, settings
        self._notes: list[str] = []
        self._lookup = Lookup(profiles, cluster, settings.model_missing)
        self._stages = Stages(self._lookup, settings.uneven_splits)
        self._bandwidths = Bandwidths(cluster, settings.cost == "metis-upstream")
        self._types = tuple(dict.fromkeys(device.type for device in cluster.devices))
        self._layouts: list[Layout] = []  # so far; the last ones are those that are searched
        devices = len(cluster.devices)
        most = min(devices, profiles.model.layers, settings.max_stages or devices)
        self._groups = [
            groups(devices, stages, settings.min_group_scale_variance, settings.max_permute_len)
            for stages in range(1, most + 1)
        ]
        self._batches = [count for count in range(global_batch, 0, -1) if global_batch % count == 0]
        self._sizes = sorted({size for each in self._groups for size in each.sizes} or {1})
        self._tables = self._next_tables(())
        self._counts = _Counts()
        self._best: list[_Candidate] = []
        # Orders of types can give the same plan.
        self._keep = settings.keep * min(math.factorial(len(self._types)), _SAME)

    def run(self) -> SearchResult:
        complete = True
        for stages, plans in self._plans():
            if self._late():
                complete = False
                self._notes.append(f"the time limit of {self._settings.time_limit_s:g} s ended the search")
                break
            self._strategies(stages, plans)
        pruned = {
            "min_group_scale_variance": self._counts.sizes,
            "max_permute_len": self._counts.orders,
            "least tensor parallelism first": self._counts.space - self._counts.tried,
        }
        found = self._costed_plans()
        return SearchResult(
            algorithm="metis",
            plans=found,
            costed=self._counts.costed,
            rejected=tuple(
                Rejected(code, count, self._counts.examples[code])
                for code, count in sorted(self._counts.rejected.items())
            ),
            pruned=pruned,
            notes=(*self._notes, *self._point_notes(found)),
            elapsed_s=time.perf_counter() - self._started,
            complete=complete,
            timed_out=not complete,
        )

    def _late(self) -> bool:
        limit = self._settings.time_limit_s
        return limit is not None and time.perf_counter() - self._started > limit

    def _plans(self) -> Iterator[tuple[int, Ints]]:
        """Stages, and plans: rows of layout, index of the micro-batches, then index of each group's size."""
        orders = itertools.permutations(self._types)
        sizes = np.array(self._sizes, np.int64)
        while some_orders := tuple(itertools.islice(orders, _LAYOUTS)):
            self._tables = self._next_tables(some_orders)
            layouts, counts = len(some_orders), len(self._batches)
            at_once = max(1, _BATCH // (layouts * counts))
            for each in self._groups:
                vectors, found = each.vectors(), 0
                while some := list(itertools.islice(vectors, at_once)):
                    found += len(some)
                    groups = np.searchsorted(sizes, np.array(some, np.int64))
                    layout, count, vector = np.meshgrid(
                        np.arange(layouts), np.arange(counts), np.arange(len(some)), indexing="ij"
                    )
                    yield each.stages, np.vstack((layout.ravel(), count.ravel(), groups[vector.ravel()].T))
                self._counts.orders += layouts * (each.ordered - found)
                self._counts.sizes += layouts * each.pruned_by_size

    def _next_tables(self, orders: Sequence[tuple[str, ...]]) -> Tables:
        """Of the next orders of the types."""
        layouts = [Layout(self._cluster, order, self._bandwidths) for order in orders]
        self._layouts += layouts
        samples = [self._batch // count for count in self._batches]
        return Tables(
            layouts, self._sizes, samples, self._stages, self._cluster, self._profiles.model, self._settings,
            self._bandwidths,
        )  # fmt: skip

    def _strategies(self, stages: int, plans: Ints) -> None:
        choices = self._choices(plans)
        active = np.arange(plans.shape[1])
        while True:
            active = self._valid(choices, active)
            if not active.size:
                break
            batch = Batch(
                self._tables, choices.ids(self._tables, active), choices.batches[active], choices.bandwidth[:, active]
            )
            capacity = batch.capacity / batch.capacity.sum(axis=0)
            balanced = balance(self._layer_cost, capacity, batch.memory_ratio)
            choices.free[:, active] = (1 - balanced.ratio) * batch.memory
            self._reject_memory(stages, choices.batches[active], balanced)
            fits = np.flatnonzero(balanced.attempts)
            if fits.size:
                edges = balanced.edges[:, fits]
                self._keep_best(batch.cost(edges, fits).sum(axis=0), choices, active[fits], edges)
            self._counts.tried += active.size
            active = choices.advance(active[balanced.attempts != 1])
        self._counts.space += int(np.prod(choices.halvings + 1.0, axis=0).sum())  # exact to 2^53

    def _valid(self, choices: _Choices, active: Ints) -> Ints:
        """The plans that can be balanced, each with its next valid strategy. A choice of groups and micro-batches ends
        where a stage has no degree left with which it can run."""
        valid = [active[:0]]
        while active.size:
            left = choices.runnable[:, active] >> choices.level[:, active]
            hopeless, invalid = (left == 0).any(axis=0), (left & 1 == 0).any(axis=0)
            if invalid.any():
                # The stage that ends the choice, or else the first invalid one, is the reason.
                codes = self._tables.code[choices.ids(self._tables, active[invalid])]
                ending = np.where(hopeless[invalid], left[:, invalid] == 0, codes != 0)
                self._reject(codes[ending.argmax(axis=0), np.arange(codes.shape[1])])
                self._counts.tried += int(invalid.sum())
            valid.append(active[~invalid])
            active = choices.advance(active[invalid & ~hopeless])
        return np.sort(np.concatenate(valid))

    def _choices(self, plans: Ints) -> _Choices:
        sizes = np.array(self._sizes, np.int64)
        layout, count, groups = plans[0], plans[1], plans[2:]
        devices = sizes[groups]
        start = np.cumsum(devices, axis=0) - devices
        halvings = np.array([(size & -size).bit_length() - 1 for size in self._sizes], np.int64)
        return _Choices(
            layout,
            count,
            groups,
            devices,
            start,
            batches=np.array(self._batches, np.int64)[count],
            bandwidth=self._cut_bandwidths(layout, start, devices),
            halvings=halvings[groups],
            runnable=self._tables.levels(layout, start, groups, count),
            level=np.zeros_like(groups),
            free=np.full(groups.shape, np.nan),
        )

    def _cut_bandwidths(self, layout: Ints, start: Ints, devices: Ints) -> Floats:
        found = np.empty((len(start) - 1, len(layout)))
        for number, each in enumerate(self._tables.layouts):
            those = layout == number
            low = each.segment[start[:-1, those]]
            high = each.segment[start[1:, those] + devices[1:, those] - 1]
            found[:, those] = each.bandwidth[low, high]
        return found

    @cached_property
    def _layer_cost(self) -> Floats:
        """Relative cost of the layers: of the first device type at tp 1, one sample, or the nearest to it there is."""
        for device_type in self._types:
            for tp in (1, *self._profiles.degrees(device_type)):
                found = self._lookup.smallest(device_type, tp)
                if isinstance(found, Gap):
                    continue
                samples, point = found
                if (device_type, tp, samples) != (self._types[0], 1, 1):
                    self._notes.append(
                        f"no profile of {self._types[0]} at tp 1, micro-batch 1: the layers' relative cost "
                        f"is that of {device_type} at tp {tp}, micro-batch {samples}"
                    )
                return np.array(point.layer_ms)
        raise AssertionError("a configuration is valid, so there is a profile")

    def _reject(self, codes: Ints) -> None:
        counts = np.bincount(codes)
        for code in np.flatnonzero(counts).tolist():
            rejection = self._tables.rejections[code - 1]
            self._counts.reject(rejection.code, int(counts[code]), rejection.reason)

    def _reject_memory(self, stages: int, batches: Ints, balanced: Balanced) -> None:
        failed = np.flatnonzero(balanced.attempts == 0)
        if failed.size:
            plan = int(failed[0])
            stage = int(balanced.ratio[:, plan].argmax())
            self._counts.reject(
                "memory",
                int(failed.size),
                f"{stages} stages, {int(batches[plan])} micro-batches: stage {stage} needs "
                f"{balanced.ratio[stage, plan]:.2f} times its devices' memory after the last attempt",
            )

    def _keep_best(self, cost: Floats, choices: _Choices, plans: Ints, edges: Ints) -> None:
        self._counts.costed += len(cost)
        worst = self._best[-1][0] if len(self._best) >= self._keep else math.inf
        within = np.flatnonzero(cost <= worst)
        if within.size > self._keep:
            within = within[cost[within] <= np.partition(cost[within], self._keep - 1)[self._keep - 1]]
        found, first = [], len(self._layouts) - len(self._tables.layouts)
        for index in within.tolist():
            plan = plans[index]
            found.append(
                (
                    float(cost[index]),
                    len(choices.devices),
                    first + int(choices.layout[plan]),
                    int(choices.batches[plan]),
                    tuple(choices.devices[:, plan].tolist()),
                    tuple((1 << choices.level[:, plan]).tolist()),
                    tuple(edges[:, index].tolist()),
                )
            )
        self._best = heapq.nsmallest(self._keep, [*self._best, *found])

    def _costed_plans(self) -> tuple[CostedPlan, ...]:
        evaluator = Evaluator(self._stages, self._cluster, self._profiles, self._settings)
        plans: list[CostedPlan] = []
        seen = set()
        for candidate in sorted(self._best):
            plan = self._plan(candidate)
            same = (
                plan.microbatches,
                tuple(
                    (s.begin, s.end, s.tp, frozenset((r.devices, r.samples) for r in s.replicas)) for s in plan.stages
                ),
            )
            if same not in seen:
                seen.add(same)
                plans.append(evaluator.cost(plan))
                if len(plans) == self._settings.keep:
                    break
        plans.sort(key=lambda costed: costed.cost.total_ms)
        return tuple(plans)

    def _plan(self, candidate: _Candidate) -> ParallelPlan:
        _, _, number, batches, groups, degrees, edges = candidate
        layout, stages, start = self._layouts[number], [], 0
        for size, tp, begin, end in zip(groups, degrees, edges, edges[1:], strict=False):
            ranks = range(start, start + size)
            cost = self._stages.cost([layout.types[rank] for rank in ranks], tp, self._batch // batches)
            assert not isinstance(cost, Rejection)  # it has been costed
            replicas = tuple(
                Replica(layout.devices[start + tp * replica : start + tp * (replica + 1)], share)
                for replica, share in enumerate(cost.shares)
            )
            stages.append(Stage(begin, end, replicas))
            start += size
        return ParallelPlan(tuple(stages), batches, self._batch)

    def _point_notes(self, plans: Sequence[CostedPlan]) -> list[str]:
        notes = []
        for what in ("interpolated", "modelled"):
            points = sorted({name for costed in plans for name in getattr(costed, what)})
            if points:
                notes.append(f"{what} points in the plans: {', '.join(points)}")
        return notes
