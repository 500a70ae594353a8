"""Random small clusters, as in Crux's micro-benchmark, and how near to the optimum each of its algorithms comes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster, DeviceType, Fabric, Node
from ..topologies import ClosLinks, two_layers
from .assignment import order_of, priorities
from .baselines import hashed_paths
from .compression import compress, contention_graph
from .exhaustive import Evaluation
from .job import Flow, Job, Routes
from .path_selection import select_paths
from .policy import Snapshot

LEVELS = 3
PERIODS = 10
_GPU = DeviceType("gpu", 1 << 30, 1e12, 1e9)


@dataclass(frozen=True)
class Nearness:
    """Shares of the enumerated optimum, each algorithm's with the two others optimal; and what would do without it."""

    paths: float
    priorities: float
    compression: float
    hashed_paths: float
    reversed_priorities: float
    one_level: float


def random_cluster(seed: int) -> tuple[Cluster, list[Job]]:
    """2 to 4 ToRs of 2 to 5 hosts, 2 aggregation switches, 5 jobs of 2 hosts each, that send one way.

    One flow a job keeps the enumeration of paths complete. Hosts are shared, so host links are contended too.
    """
    random = np.random.default_rng(seed)
    tors, hosts_per_tor = int(random.integers(2, 5)), int(random.integers(2, 6))
    uplink_bytes_per_s = float(random.choice([0.5, 1.0]))
    host = Node("host", ("gpu",) * 8, Fabric(1e3, 0.0))
    cluster = two_layers(_GPU, host, tors, hosts_per_tor, ClosLinks(2, 1.0, uplink_bytes_per_s))
    jobs = []
    for i in range(5):
        source, destination = random.choice(tors * hosts_per_tor, 2, replace=False)
        flow = Flow(f"host{source}", f"host{destination}", float(random.uniform(0.2, 2)))
        gpus = int(random.integers(2, 7))
        compute_s = float(random.uniform(0.2, 2))
        flop = gpus * compute_s * float(random.uniform(0.5, 1))
        jobs.append(Job(f"j{i}", gpus, flop, compute_s, (flow,), float(random.uniform(0.5, 1))))
    return cluster, jobs


def nearness(seed: int) -> Nearness:
    cluster, jobs = random_cluster(seed)
    evaluation = Evaluation(cluster, jobs, periods=PERIODS)
    optimum, routes, _ = evaluation.optimum(LEVELS)

    hashed = hashed_paths(Snapshot(cluster, tuple(jobs), LEVELS, seed))
    by_paths, by_hash = (evaluation.best_levels(r, LEVELS)[0] for r in (select_paths(cluster, jobs), hashed))

    order = order_of(priorities(cluster, jobs, routes))
    best_order: list[str] = []  # group by group
    for group in evaluation.groups(routes):
        best_order += max(itertools.permutations(group), key=lambda p: in_order(evaluation, routes, list(p)))
    best, by_priorities, in_reverse = (in_order(evaluation, routes, o) for o in (best_order, order, order[::-1]))

    levels = compress(contention_graph(cluster, jobs, routes, best_order), LEVELS)
    by_compression, flat = (evaluation.flop_per_s(routes, given) for given in (levels, dict.fromkeys(levels, 0)))
    return Nearness(
        by_paths / optimum,
        by_priorities / best,
        by_compression / optimum,
        by_hash / optimum,
        in_reverse / best,
        flat / optimum,
    )


def in_order(evaluation: Evaluation, routes: Routes, order: Sequence[str]) -> float:
    """Flop per second of these jobs when each has a level of its own."""
    groups = [tuple(n for n in group if n in order) for group in evaluation.groups(routes)]
    levels = {name: level for level, name in enumerate(order)}
    return sum(evaluation.group_flop_per_s(group, routes, levels) for group in groups if group)
