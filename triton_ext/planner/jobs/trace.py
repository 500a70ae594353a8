"""Generated jobs that come, hold hosts and leave: what the policies are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import PlanningError
from ..cluster import Cluster
from .job import Flow, Job
from .simulator import Submission


@dataclass(frozen=True)
class Model:
    """What data-parallel training of a model does per iteration. Assumed orders of magnitude, not measurements."""

    name: str
    hosts: tuple[int, ...]  # sizes of its jobs
    compute_s: float
    flop_per_gpu_s: float
    ring_bytes: float  # what an all-reduce of a host's gradients is over
    overlap_start: float


MODELS = (
    Model("gpt-large", (8, 16, 32, 64), 1.2, 1.2e14, 24e9, 0.5),
    Model("gpt-small", (4, 8, 16), 0.6, 1.1e14, 12e9, 0.5),
    Model("experts", (2, 4, 8, 16), 0.4, 8e13, 8e9, 0.3),
    Model("bert", (2, 4, 8), 0.25, 7e13, 3.5e9, 0.6),
    Model("resnet", (2, 2, 4), 0.15, 2.5e13, 0.8e9, 0.7),
)


@dataclass(frozen=True)
class Load:
    """How many jobs there are at the start, how many more come a second, and for how long they hold their hosts.

    A job of n hosts gets any n of the next `fragmentation` times n that are free, from a random one on.
    """

    initial_jobs: int
    arrivals_per_s: float
    mean_lease_s: float = 60.0
    fragmentation: int = 2

    def __post_init__(self) -> None:
        if self.initial_jobs < 0 or not self.arrivals_per_s > 0 or not self.mean_lease_s > 0 or self.fragmentation < 1:
            raise PlanningError(
                f"{self.initial_jobs} jobs at the start, {self.arrivals_per_s} a second for {self.mean_lease_s} s, "
                f"fragmentation {self.fragmentation}: give no negative number, and positive rates"
            )


def generate(cluster: Cluster, load: Load, span_s: float, seed: int) -> tuple[Submission, ...]:
    """Jobs that come in span_s, hold whole hosts for a lease (exponential, at least a second), and leave.

    One that finds no room is turned away. Each iteration ends in an all-reduce over its hosts, in the order of the
    cluster, in as many rings as a host has devices, all in lockstep. Its times and sizes are the model's, +- 40 %.
    """
    random = np.random.default_rng(seed)
    nodes = cluster.nodes
    free_from_s = np.zeros(len(nodes))
    submissions: list[Submission] = []
    now_s, asked = 0.0, 0
    while now_s < span_s:
        model = MODELS[int(random.integers(len(MODELS)))]
        count, lease_s = int(random.choice(model.hosts)), max(1.0, float(random.exponential(load.mean_lease_s)))
        first, scale = int(random.integers(len(nodes))), random.uniform(0.6, 1.4, 2)
        free = [n for n in (*range(first, len(nodes)), *range(first)) if free_from_s[n] <= now_s]
        if len(free) >= count:
            chosen = sorted(int(n) for n in random.choice(free[: load.fragmentation * count], count, replace=False))
            free_from_s[chosen] = now_s + lease_s
            gpus, compute_s = sum(len(nodes[n].device_types) for n in chosen), model.compute_s * float(scale[0])
            flows = rings([nodes[n].name for n in chosen], model.ring_bytes * float(scale[1]), gpus // count)
            name = f"{model.name}-{len(submissions):04d}"
            flop = gpus * model.flop_per_gpu_s * compute_s
            job = Job(name, gpus, flop, compute_s, flows, model.overlap_start, lockstep=True)
            submissions.append(Submission(job, now_s, leaves_s=now_s + lease_s))
        asked += 1
        if asked >= load.initial_jobs:
            now_s += float(random.exponential(1 / load.arrivals_per_s))
    return tuple(submissions)


def rings(nodes: Sequence[str], all_reduce_bytes: float, count: int) -> tuple[Flow, ...]:
    """The flows of an all-reduce in `count` rings over the nodes: each sends 2 (n - 1) / n of the bytes to the next."""
    if len(nodes) < 2:
        return ()
    size_bytes = 2 * (len(nodes) - 1) / len(nodes) * all_reduce_bytes / count
    pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return tuple(Flow(source, destination, size_bytes) for source, destination in pairs for _ in range(count))
