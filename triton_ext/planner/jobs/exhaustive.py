"""The optimum by trying everything, for clusters of a few jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ...errors import PlanningError
from ..cluster import Cluster
from .job import Job, Routes, candidates, solo_period_s, transmit_s
from .policy import Decision, Snapshot
from .simulator import Submission, simulate

MOST_CHOICES = 10_000  # of paths and levels; each is a simulation, of milliseconds with a few jobs


class Evaluation:
    """Flop per second of jobs under any paths and levels, simulated from time 0 over `periods` of the longest job.

    Jobs that share no link, directly or through others, do not touch each other: groups are simulated apart, and a
    group only once for all paths and levels that leave it in the same position.
    """

    def __init__(self, cluster: Cluster, jobs: Sequence[Job], periods: float = 20.0) -> None:
        self.cluster, self.jobs, self.periods = cluster, {job.name: job for job in jobs}, periods
        self._known: dict[tuple[object, ...], float] = {}

    @cached_property
    def end_s(self) -> float:
        first = {job.name: tuple(candidates(self.cluster, f)[0] for f in job.flows) for job in self.jobs.values()}
        return self.periods * max(
            solo_period_s(job, transmit_s(self.cluster, job, first[job.name])) for job in self.jobs.values()
        )

    def flop_per_s(self, routes: Routes, levels: Mapping[str, int]) -> float:
        return sum(self.group_flop_per_s(group, routes, levels) for group in self.groups(routes))

    def groups(self, routes: Routes) -> list[tuple[str, ...]]:
        """Names of jobs that contend, directly or through others."""
        return self._groups({name: {link for path in paths for link in path} for name, paths in routes.items()})

    def _groups(self, links_of: Mapping[str, set[int]]) -> list[tuple[str, ...]]:
        groups: list[tuple[set[str], set[int]]] = []
        for name in sorted(self.jobs):
            names, links = {name}, links_of[name]
            apart = []
            for group in groups:
                if group[1] & links:
                    names, links = names | group[0], links | group[1]
                else:
                    apart.append(group)
            groups = [*apart, (names, links)]
        return [tuple(sorted(names)) for names, _ in groups]

    def group_flop_per_s(self, group: tuple[str, ...], routes: Routes, levels: Mapping[str, int]) -> float:
        used = {name: {link for path in routes[name] for link in path} for name in group}
        order = tuple(
            (levels[one] > levels[other]) - (levels[one] < levels[other])
            for one, other in itertools.combinations(group, 2)
            if used[one] & used[other]
        )  # of jobs that share a link; of others it does not matter
        key = (group, self._position(group, routes), order)
        if key not in self._known:
            decision = Decision(routes, levels)
            submissions = [Submission(self.jobs[name]) for name in group]
            outcome = simulate(self.cluster, submissions, lambda _: decision, len(group), self.end_s)
            self._known[key] = outcome.computed_flop / self.end_s
        return self._known[key]

    def _position(self, group: tuple[str, ...], routes: Routes) -> frozenset[tuple[frozenset[tuple[str, int]], float]]:
        """Which flows meet, and the capacity there: all that the rates depend on."""
        flows: dict[int, set[tuple[str, int]]] = {}
        for name in group:
            for i, path in enumerate(routes[name]):
                for link in path:
                    flows.setdefault(link, set()).add((name, i))
        least: dict[frozenset[tuple[str, int]], float] = {}
        for link, on in flows.items():
            capacity = self.cluster.links[link].bandwidth_bytes_per_s
            least[frozenset(on)] = min(capacity, least.get(frozenset(on), math.inf))
        return frozenset(least.items())

    def best_levels(self, routes: Routes, levels: int) -> tuple[float, dict[str, int]]:
        """The most flop per second on given paths, and levels that reach it."""
        total = 0.0
        result: dict[str, int] = {}
        for group in self.groups(routes):
            tried = [dict(zip(group, choice, strict=True)) for choice in weak_orders(len(group), levels)]
            values = [self.group_flop_per_s(group, routes, candidate) for candidate in tried]
            total += max(values)
            result |= tried[values.index(max(values))]
        return total, result

    def all_routes(self) -> Iterator[Routes]:
        names = sorted(self.jobs)
        options = [[candidates(self.cluster, flow) for flow in self.jobs[name].flows] for name in names]
        for chosen in itertools.product(*(itertools.product(*job) for job in options)):
            yield dict(zip(names, chosen, strict=True))

    def _check_choices(self, levels: int) -> None:
        options = {job.name: [candidates(self.cluster, flow) for flow in job.flows] for job in self.jobs.values()}
        paths = math.prod(len(of_flow) for of_job in options.values() for of_flow in of_job)
        reach = {name: {link for paths in of for path in paths for link in path} for name, of in options.items()}
        orders = sum(count_weak_orders(len(group), levels) for group in self._groups(reach))
        if paths * orders > MOST_CHOICES:
            raise PlanningError(
                f"{paths} choices of paths and {orders} of levels are too many to try; the most is {MOST_CHOICES} "
                "together: give fewer jobs, flows or levels"
            )

    def optimum(self, levels: int) -> tuple[float, Routes, dict[str, int]]:
        """The most flop per second over all paths and levels. PlanningError above MOST_CHOICES of both."""
        self._check_choices(levels)
        best: tuple[float, Routes, dict[str, int]] | None = None
        for routes in self.all_routes():
            value, chosen = self.best_levels(routes, levels)
            if best is None or value > best[0] * (1 + 1e-12):
                best = value, routes, chosen
        assert best is not None
        return best


def weak_orders(count: int, levels: int) -> Iterator[tuple[int, ...]]:
    """Each way to put `count` jobs in at most `levels` levels, with no empty level between."""
    for choice in itertools.product(range(min(count, levels)), repeat=count):
        if set(choice) == set(range(max(choice) + 1)):
            yield choice


def count_weak_orders(count: int, levels: int) -> int:
    """How many `weak_orders` has: any of the jobs are in the first level, the others in the levels after it."""
    orders = [1] + [0] * count  # by number of jobs
    for _ in range(min(count, levels)):
        orders = [1] + [sum(math.comb(n, k) * orders[n - k] for k in range(1, n + 1)) for n in range(1, count + 1)]
    return orders[count]


def exhaustive(snapshot: Snapshot) -> Decision:
    """The paths and levels with the most computation, by simulation of all of them. Raises PlanningError for many."""
    _, routes, levels = Evaluation(snapshot.cluster, snapshot.jobs).optimum(snapshot.levels)
    return Decision(routes, levels)
