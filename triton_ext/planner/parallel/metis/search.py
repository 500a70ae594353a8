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
from .balance import Floats, Ints, balance
from .bandwidth import Bandwidths
from .cost import Evaluator
from .groups import group_vectors
from .settings import MetisSettings
from .stage import Rejection, Stages
from .tables import Batch, Layout, Tables

_BATCH = 8192  # plans costed at once
# Cost, then what tells plans apart: stages, layout, micro-batches, group sizes, degrees, edges.
_Candidate = tuple[float, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass
class _Counts:
    costed: int = 0
    tried: int = 0
    not_tried: int = 0
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


class _Search:
    def __init__(self, profiles: Profiles, cluster: Cluster, global_batch: int, settings: MetisSettings) -> None:
        self._started = time.perf_counter()
        self._profiles, self._cluster, self._batch, self._settings = profiles, cluster, global_batch, settings
        self._notes: list[str] = []
        self._lookup = Lookup(profiles, cluster, settings.model_missing)
        self._stages = Stages(self._lookup, settings.uneven_splits)
        bandwidths = Bandwidths(cluster, settings.cost == "metis-upstream")
        types = tuple(dict.fromkeys(device.type for device in cluster.devices))
        self._layouts = [Layout(cluster, order, bandwidths) for order in itertools.permutations(types)]
        devices = len(cluster.devices)
        most = min(devices, profiles.model.layers, settings.max_stages or devices)
        self._vectors = {
            stages: group_vectors(devices, stages, settings.min_group_scale_variance, settings.max_permute_len)
            for stages in range(1, most + 1)
        }
        self._batches = [count for count in range(global_batch, 0, -1) if global_batch % count == 0]
        sizes = {size for found in self._vectors.values() for vector in found.vectors for size in vector}
        self._sizes = sorted(sizes or {1})
        samples = [global_batch // count for count in self._batches]
        self._tables = Tables(
            self._layouts, self._sizes, samples, self._stages, cluster, profiles.model, settings, bandwidths
        )
        self._counts = _Counts()
        self._best: list[_Candidate] = []
        self._keep = settings.keep * len(self._layouts)  # orders of types can give the same plan

    def run(self) -> SearchResult:
        complete = True
        for stages, plans in self._plans():
            if self._late():
                complete = False
                self._notes.append(f"the time limit of {self._settings.time_limit_s:g} s ended the search")
                break
            self._strategies(stages, plans)
        layouts, orders = len(self._layouts), [found.pruned_by_order for found in self._vectors.values()]
        pruned = {
            "min_group_scale_variance": layouts * sum(found.pruned_by_size for found in self._vectors.values()),
            "max_permute_len": layouts * sum(orders),
            "least tensor parallelism first": self._counts.not_tried,
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
        )

    def _late(self) -> bool:
        limit = self._settings.time_limit_s
        return limit is not None and time.perf_counter() - self._started > limit

    def _plans(self) -> Iterator[tuple[int, Ints]]:
        """Stages, and plans: rows of layout, index of the micro-batches, then index of each group's size."""
        index = {size: number for number, size in enumerate(self._sizes)}
        for stages, found in self._vectors.items():
            if not found.vectors:
                continue
            groups = np.array([[index[size] for size in vector] for vector in found.vectors], np.int64)
            layouts, counts = len(self._layouts), len(self._batches)
            each = max(1, _BATCH // (layouts * counts))
            for first in range(0, len(groups), each):
                some = groups[first : first + each]
                layout, count, vector = np.meshgrid(
                    np.arange(layouts), np.arange(counts), np.arange(len(some)), indexing="ij"
                )
                yield stages, np.vstack((layout.ravel(), count.ravel(), some[vector.ravel()].T))

    def _strategies(self, stages: int, plans: Ints) -> None:
        tables, sizes = self._tables, np.array(self._sizes, np.int64)
        layout, count, groups = plans[0], plans[1], plans[2:]
        devices = sizes[groups]
        start = np.cumsum(devices, axis=0) - devices
        batches = np.array(self._batches, np.int64)[count]
        bandwidth = self._cut_bandwidths(layout, start, devices)
        level = np.zeros_like(groups)
        # How often each group can be halved.
        halvings = np.array([(size & -size).bit_length() - 1 for size in self._sizes], np.int64)[groups]
        free = np.full(groups.shape, np.nan)
        active = np.arange(plans.shape[1])
        tried = 0
        while active.size:
            ids = tables.ids(layout[active], start[:, active], groups[:, active], level[:, active], count[active])
            codes = tables.code[ids]
            invalid = codes.any(axis=0)
            self._reject(codes[:, invalid])
            tried += active.size
            done = np.zeros(active.size, bool)
            valid = np.flatnonzero(~invalid)
            if valid.size:
                which = active[valid]
                batch = Batch(tables, ids[:, valid], batches[which], bandwidth[:, which])
                capacity = batch.capacity / batch.capacity.sum(axis=0)
                balanced = balance(self._layer_cost, capacity, batch.memory_ratio)
                free[:, which] = (1 - balanced.ratio) * batch.memory
                fits = np.flatnonzero(balanced.attempts)
                self._reject_memory(stages, batches[which], balanced.ratio, balanced.attempts == 0)
                if fits.size:
                    cost = batch.cost(balanced.edges[:, fits], fits).sum(axis=0)
                    chosen = which[fits]
                    self._keep_best(
                        cost, stages, layout[chosen], batches[chosen], devices[:, chosen], level[:, chosen],
                        balanced.edges[:, fits],
                    )  # fmt: skip
                done[valid] = balanced.attempts == 1
            active = active[~done]
            # More tensor parallelism for the stage with the least free memory, before any attempt for the largest dp.
            halvable = level[:, active] < halvings[:, active]
            state = free[:, active]
            state = np.where(np.isnan(state), (1 << level[:, active]) / devices[:, active], state)
            state = np.where(halvable, state, np.inf)
            stage = state.argmin(axis=0)
            possible = halvable.any(axis=0)
            active, stage = active[possible], stage[possible]
            level[stage, active] += 1
        self._counts.tried += tried
        self._counts.not_tried += int(np.prod(halvings + 1, axis=0).sum()) - tried

    def _cut_bandwidths(self, layout: Ints, start: Ints, devices: Ints) -> Floats:
        found = np.empty((len(start) - 1, len(layout)))
        for number, each in enumerate(self._layouts):
            those = layout == number
            low = each.segment[start[:-1, those]]
            high = each.segment[start[1:, those] + devices[1:, those] - 1]
            found[:, those] = each.bandwidth[low, high]
        return found

    @cached_property
    def _layer_cost(self) -> Floats:
        """Relative cost of the layers: of the first device type at tp 1, one sample, or the nearest to it there is."""
        for device_type in self._layouts[0].order:
            for tp in (1, *self._profiles.degrees(device_type)):
                found = self._lookup.smallest(device_type, tp)
                if isinstance(found, Gap):
                    continue
                samples, point = found
                if (device_type, tp, samples) != (self._layouts[0].order[0], 1, 1):
                    self._notes.append(
                        f"no profile of {self._layouts[0].order[0]} at tp 1, micro-batch 1: the layers' relative cost "
                        f"is that of {device_type} at tp {tp}, micro-batch {samples}"
                    )
                return np.array(point.layer_ms)
        raise AssertionError("a configuration is valid, so there is a profile")

    def _reject(self, codes: Ints) -> None:
        """codes: of invalid plans; the first stage that is invalid counts."""
        if not codes.size:
            return
        first = codes[(codes != 0).argmax(axis=0), np.arange(codes.shape[1])]
        for code, count in zip(*np.unique(first, return_counts=True), strict=True):
            rejection = self._tables.rejections[int(code) - 1]
            self._counts.reject(rejection.code, int(count), rejection.reason)

    def _reject_memory(self, stages: int, batches: Ints, ratio: Floats, which: Ints) -> None:
        if not which.any():
            return
        plan = int(np.flatnonzero(which)[0])
        stage = int(ratio[:, plan].argmax())
        self._counts.reject(
            "memory",
            int(which.sum()),
            f"{stages} stages, {int(batches[plan])} micro-batches: stage {stage} needs "
            f"{ratio[stage, plan]:.2f} times its devices' memory after the last attempt",
        )

    def _keep_best(
        self, cost: Floats, stages: int, layout: Ints, batches: Ints, devices: Ints, level: Ints, edges: Ints
    ) -> None:
        self._counts.costed += len(cost)
        worst = self._best[-1][0] if len(self._best) >= self._keep else math.inf
        within = np.flatnonzero(cost <= worst)
        if within.size > self._keep:
            within = within[cost[within] <= np.partition(cost[within], self._keep - 1)[self._keep - 1]]
        found = [
            (
                float(cost[plan]),
                stages,
                int(layout[plan]),
                int(batches[plan]),
                tuple(devices[:, plan].tolist()),
                tuple((1 << level[:, plan]).tolist()),
                tuple(edges[:, plan].tolist()),
            )
            for plan in within
        ]
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
        plans.sort(key=lambda costed: costed.cost.total_ms)
        return tuple(plans[: self._settings.keep])

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
