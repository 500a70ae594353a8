"""What a policy sees and decides; Crux as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..cluster import Cluster
from .assignment import order_of, priorities
from .compression import compress, contention_graph
from .job import Job, Routes
from .path_selection import select_paths


@dataclass(frozen=True)
class Alignment:
    """The next iteration begins at a time that is offset_s past a multiple of period_s."""

    period_s: float
    offset_s: float


@dataclass(frozen=True)
class Snapshot:
    """The jobs in the cluster at one moment."""

    cluster: Cluster
    jobs: tuple[Job, ...]
    levels: int  # that switches have
    seed: int = 0
    alignments: Mapping[str, Alignment] = field(default_factory=dict)  # by job, as decided before


@dataclass(frozen=True)
class Decision:
    routes: Routes
    levels: Mapping[str, int]  # by job; 0 goes first
    alignments: Mapping[str, Alignment] = field(default_factory=dict)


Policy = Callable[[Snapshot], Decision]


def crux(snapshot: Snapshot) -> Decision:
    """Crux (SIGCOMM 2024): paths, then priorities, then levels."""
    return crux_with_priorities(snapshot)[0]


def crux_with_priorities(snapshot: Snapshot) -> tuple[Decision, dict[str, float]]:
    """What Crux decides, and each job's priority in flop per second before it becomes a level."""
    cluster, jobs = snapshot.cluster, snapshot.jobs
    routes = select_paths(cluster, jobs)
    priority = priorities(cluster, jobs, routes)
    graph = contention_graph(cluster, jobs, routes, order_of(priority))
    return Decision(routes, compress(graph, snapshot.levels, snapshot.seed)), priority
