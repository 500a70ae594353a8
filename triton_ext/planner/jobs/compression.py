"""From unique priorities to the few levels that switches have: Max-K-Cut on the graph of who contends with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanningError
from .job import Job, Routes, intensity_flop_per_s
from .network import Network

SAMPLES = 10
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

    def loss_flop_per_s(self, levels: Mapping[str, int]) -> float:
        """The weight of the edges within a level."""
        return sum(loss for (i, j), loss in self.edges.items() if levels[self.names[i]] == levels[self.names[j]])

    def is_valid(self, levels: Mapping[str, int]) -> bool:
        """No job is below a job of lower priority that it shares a link with. Level 0 goes first."""
        return all(levels[self.names[i]] <= levels[self.names[j]] for i, j in self.edges)


def contention_graph(network: Network, jobs: Sequence[Job], routes: Routes, order: Sequence[str]) -> ContentionGraph:
    by_name = {job.name: job for job in jobs}
    used = [{link for path in routes[name] for link in path} for name in order]
    edges = {}
    for i, name in enumerate(order):
        intensity = intensity_flop_per_s(network, by_name[name], routes[name])
        for j in range(i + 1, len(order)):
            if used[i] & used[j]:
                edges[i, j] = intensity
    return ContentionGraph(tuple(order), edges)


def compress(graph: ContentionGraph, levels: int, seed: int = 0, samples: int = SAMPLES) -> dict[str, int]:
    """A level in 0 … levels - 1 (0 first) for each job, with the most weight between levels.

    The optimum for up to EXACT_JOBS jobs; beyond, the best cut of `samples` random topological orders, each cut
    optimally (Crux, SIGCOMM 2024, section 4.3), and of the order of priority itself.
    Levels in use have no gap; jobs that contend with none are in level 0.
    """
    check_levels(levels)
    count = len(graph.names)
    if count == 0:
        return {}
    if count <= EXACT_JOBS:
        best = _exact(graph, levels)
    else:
        random = np.random.default_rng(seed)
        orders = [list(range(count)), *(topological_order(graph, random) for _ in range(samples))]
        cuts = [cut_order(graph, order, levels) for order in orders]
        best = max(cuts, key=lambda cut: cut[0])[1]
    contending = {i for edge in graph.edges for i in edge}
    used = sorted({best[i] for i in contending})
    result = {name: used.index(best[i]) if i in contending else 0 for i, name in enumerate(graph.names)}
    assert graph.is_valid(result), "a cut of a topological order is valid"
    return result


def compress_top(graph: ContentionGraph, levels: int) -> dict[str, int]:
    """Sincronia's way (SIGCOMM 2018): the first jobs have a level each, all others share the last."""
    check_levels(levels)
    return {name: min(i, levels - 1) for i, name in enumerate(graph.names)}


def compress_even(graph: ContentionGraph, levels: int) -> dict[str, int]:
    """Varys' way (SIGCOMM 2014): blocks of the order with as many jobs each."""
    check_levels(levels)
    return {name: i * levels // len(graph.names) for i, name in enumerate(graph.names)}


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
    for _ in range(levels - 1):
        following = {}
        for whole in closed:
            candidates = ((least[part][0] + inside[whole & ~part], part) for part in closed if part & ~whole == 0)
            loss, part = min(candidates)
            following[whole] = (loss, [*least[part][1], whole & ~part])
        least = following
    blocks = least[(1 << count) - 1][1]
    return [next(level for level, block in enumerate(blocks) if block >> i & 1) for i in range(count)]
