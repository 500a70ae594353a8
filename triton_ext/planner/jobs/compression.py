"""From unique priorities to the few levels that switches have: Max-K-Cut on the graph of who contends with whom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanningError
from ..cluster import Cluster
from .job import Job, Routes, intensity_flop_per_s

SAMPLES = 10  # topological orders in a row without an improvement, after which the search ends
MOST_SAMPLES = 1000
EXACT_JOBS = 8  # up to here the optimum itself is found


@dataclass(frozen=True)
class ContentionGraph:
    """Jobs in order of priority, highest first, and the loss (flop per second) if two of them share a level.

    An edge (i, j), i < j, joins two jobs that share a link; its loss is the intensity of i.
    """

    names: tuple[str, ...]
    edges: Mapping[tuple[int, int], float]

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        weights = np.zeros((len(self.names), len(self.names)))
        for (high, low), loss in self.edges.items():
            weights[high, low] = loss
        return weights

    def parts(self) -> list[list[int]]:
        """Jobs that contend, directly or through others."""
        parts: list[list[int]] = []
        part_of: dict[int, list[int]] = {}
        for i, j in self.edges:
            one, other = part_of.get(i, [i]), part_of.get(j, [j])
            if one is not other:
                one.extend(other)
            part_of.update(dict.fromkeys(one, one))
        for i in range(len(self.names)):
            part = part_of.get(i, [i])
            if i == min(part):
                parts.append(sorted(part))
        return parts

    def only(self, part: Sequence[int]) -> ContentionGraph:
        """The graph of some of the jobs, in the same order."""
        place = {i: at for at, i in enumerate(part)}
        edges = {(place[i], place[j]): loss for (i, j), loss in self.edges.items() if i in place and j in place}
        return ContentionGraph(tuple(self.names[i] for i in part), edges)

    def loss_flop_per_s(self, levels: Mapping[str, int]) -> float:
        """The weight of the edges within a level."""
        return sum(loss for (i, j), loss in self.edges.items() if levels[self.names[i]] == levels[self.names[j]])

    def is_valid(self, levels: Mapping[str, int]) -> bool:
        """No job is below a job of lower priority that it shares a link with. Level 0 goes first."""
        return all(levels[self.names[i]] <= levels[self.names[j]] for i, j in self.edges)


def contention_graph(cluster: Cluster, jobs: Sequence[Job], routes: Routes, order: Sequence[str]) -> ContentionGraph:
    by_name = {job.name: job for job in jobs}
    users: dict[int, list[int]] = {}  # by link, in order of priority
    for i, name in enumerate(order):
        for link in {link for path in routes[name] for link in path}:
            users.setdefault(link, []).append(i)
    intensity = [intensity_flop_per_s(cluster, by_name[name], routes[name]) for name in order]
    pairs = sorted({pair for jobs_on_link in users.values() for pair in itertools.combinations(jobs_on_link, 2)})
    edges = {(i, j): intensity[i] for i, j in pairs}
    return ContentionGraph(tuple(order), edges)


def compress(graph: ContentionGraph, levels: int, seed: int = 0) -> dict[str, int]:
    """A level in 0 … levels - 1 (0 first) for each job, with the most weight between levels.

    Jobs that do not contend, even through others, are cut apart. Of up to EXACT_JOBS jobs it is the optimum; beyond,
    the best cut of the order of priority and of random topological orders, each cut optimally (Crux, SIGCOMM 2024,
    section 4.3), until SAMPLES orders in a row are no better. Each part's levels have no gap and begin with 0.
    """
    check_levels(levels)
    result: dict[str, int] = {}
    for part in graph.parts():
        inner = graph.only(part)
        chosen = _exact(inner, levels) if len(part) <= EXACT_JOBS else _sampled(inner, levels, seed)
        used = sorted(set(chosen))
        result |= {name: used.index(level) for name, level in zip(inner.names, chosen, strict=True)}
    assert graph.is_valid(result), "a cut of a topological order is valid"
    return result


def _sampled(graph: ContentionGraph, levels: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    most, best = cut_order(graph, list(range(len(graph.names))), levels)
    fruitless = 0
    for _ in range(MOST_SAMPLES):
        weight, candidate = cut_order(graph, topological_order(graph, random), levels)
        fruitless += 1
        if weight > most * (1 + 1e-12):
            most, best, fruitless = weight, candidate, 0
        if fruitless == SAMPLES:
            break
    return best


def compress_top(graph: ContentionGraph, levels: int) -> dict[str, int]:
    """Sincronia's way (SIGCOMM 2018): the first jobs have a level each, all others share the last."""
    check_levels(levels)
    return {name: min(i, levels - 1) for i, name in enumerate(graph.names)}


def check_levels(levels: int) -> None:
    if levels < 1:
        raise PlanningError(f"{levels} priority levels; give at least 1")


def topological_order(graph: ContentionGraph, random: np.random.Generator) -> list[int]:
    """Kahn's algorithm with a random choice among the jobs whose betters are all placed."""
    above = (graph.weights > 0).sum(axis=0)
    free = [int(i) for i in np.flatnonzero(above == 0)]
    order = []
    while free:
        i = free.pop(int(random.integers(len(free))))
        order.append(i)
        for j in np.flatnonzero(graph.weights[i] > 0):
            above[j] -= 1
            if above[j] == 0:
                free.append(int(j))
    return order


def cut_order(graph: ContentionGraph, order: Sequence[int], levels: int) -> tuple[float, list[int]]:
    """The best cut of one order into consecutive blocks: the weight between levels, and the level of each job.

    value[i] is the best weight of the first i jobs with the levels so far; one more level adds the weight from the
    first j to those after them, C(j, i) = S(j, i) - S(j, j), S being 2-D prefix sums. O(n^2 K).
    """
    count = len(order)
    sums = np.zeros((count + 1, count + 1))
    sums[1:, 1:] = graph.weights[np.ix_(order, order)].cumsum(0).cumsum(1)
    between = sums - np.diag(sums)[:, None]
    between[np.tril_indices(count + 1, -1)] = -np.inf  # j <= i
    value = np.zeros(count + 1)
    starts = []
    for _ in range(levels - 1):
        totals = value[:, None] + between
        starts.append(totals.argmax(axis=0))
        value = totals.max(axis=0)
    result = [0] * count
    end = count
    for level in range(levels - 1, 0, -1):
        start = int(starts[level - 1][end])
        for i in order[start:end]:
            result[i] = level
        end = start
    return float(value[count]), result


def _exact(graph: ContentionGraph, levels: int) -> list[int]:
    """Over sets of jobs closed upwards, one level at a time: each level takes a superset's rest."""
    count = len(graph.names)
    above = [sum(1 << i for i in range(count) if (i, j) in graph.edges) for j in range(count)]
    closed = [s for s in range(1 << count) if all(not s >> j & 1 or above[j] & ~s == 0 for j in range(count))]
    inside = {
        s: sum(loss for (i, j), loss in graph.edges.items() if s >> i & 1 and s >> j & 1) for s in range(1 << count)
    }
    least = {s: (inside[s], [s]) for s in closed}  # the loss with one level, and the blocks
    for _ in range(min(levels, count) - 1):
        following = {}
        for whole in closed:
            candidates = ((least[part][0] + inside[whole & ~part], part) for part in closed if part & ~whole == 0)
            loss, part = min(candidates)
            following[whole] = (loss, [*least[part][1], whole & ~part])
        least = following
    blocks = least[(1 << count) - 1][1]
    return [next(level for level, block in enumerate(blocks) if block >> i & 1) for i in range(count)]
