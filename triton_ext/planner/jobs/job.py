"""Iterative jobs: what one iteration computes and sends. And their GPU intensity on given paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import PlanningError
from ..cluster import Cluster, Path

MOST = 1e200  # that is added up, in any unit; and the least is 1 / MOST
Routes = Mapping[str, tuple[Path, ...]]  # by job: one path per flow, in the order of the job's flows


@dataclass(frozen=True)
class Flow:
    """What one node sends to another in every iteration; to itself: what each of its devices sends over its fabric."""

    source: str
    destination: str
    size_bytes: float


@dataclass(frozen=True)
class Job:
    """One iteration computes for compute_s on all GPUs, and sends from overlap_start of that time on (1: after it).

    `communication_s`, where it was measured, stands for the modelled time of an iteration's traffic wherever that
    counts. The flows of a job advance each on its own or, in lockstep, as those of one ring do: with the slowest.
    """

    name: str
    gpus: int
    compute_flop: float  # of one iteration, over all GPUs
    compute_s: float
    flows: tuple[Flow, ...] = ()
    overlap_start: float = 1.0
    communication_s: float | None = None
    lockstep: bool = False

    def __post_init__(self) -> None:
        sent_s = self.communication_s
        for field, value, good in (
            ("gpus", self.gpus, self.gpus >= 1),
            ("compute_flop", self.compute_flop, 0 < self.compute_flop < math.inf),
            ("compute_s", self.compute_s, 0 < self.compute_s < math.inf),
            ("communication_s", sent_s, sent_s is None or 0 < sent_s < math.inf),
        ):
            if not good:
                raise PlanningError(f"job {self.name}: {field} is {value}; give a positive number")
        if not 0 <= self.overlap_start <= 1:
            raise PlanningError(f"job {self.name}: overlap_start is {self.overlap_start}; give a share of compute_s")
        for flow in self.flows:
            if not 0 < flow.size_bytes < math.inf:
                raise PlanningError(
                    f"job {self.name}: {flow.source} -> {flow.destination} of {flow.size_bytes} bytes; "
                    "give a positive number or leave the flow out"
                )


def candidates(cluster: Cluster, flow: Flow) -> tuple[Path, ...]:
    """The equal-cost paths of a flow; within a node the one, fixed, that uses no link between nodes."""
    return cluster.paths(cluster.node_index(flow.source), cluster.node_index(flow.destination))


def load_s(cluster: Cluster, job: Job, paths: Sequence[Path]) -> dict[int, float]:
    """Seconds of each link's time that one iteration takes, by link."""
    seconds: dict[int, float] = {}
    for flow, path in zip(job.flows, paths, strict=True):
        for link in path:
            seconds[link] = seconds.get(link, 0.0) + flow.size_bytes / cluster.links[link].bandwidth_bytes_per_s
    return seconds


def fabric_s(cluster: Cluster, job: Job) -> dict[int, float]:
    """Seconds that an iteration's flows within each node take of its fabric: a crossbar, which no other job slows."""
    seconds: dict[int, float] = {}
    for flow in job.flows:
        if flow.source == flow.destination:
            node = cluster.node_index(flow.source)
            more = flow.size_bytes / cluster.nodes[node].fabric.bandwidth_bytes_per_s
            seconds[node] = seconds.get(node, 0.0) + more
    return seconds


def transmit_s(cluster: Cluster, job: Job, paths: Sequence[Path]) -> float:
    """t_j: the time of an iteration's traffic, as declared or on its slowest link or fabric; 0 without traffic."""
    if job.communication_s is not None:
        return job.communication_s
    return max([0.0, *load_s(cluster, job, paths).values(), *fabric_s(cluster, job).values()])


def solo_period_s(job: Job, communication_s: float) -> float:
    """How long an iteration takes with the network to itself."""
    return max(job.compute_s, job.overlap_start * job.compute_s + communication_s)


def intensity_flop_per_s(cluster: Cluster, job: Job, paths: Sequence[Path]) -> float:
    """GPU intensity I_j = W_j / t_j (Crux, SIGCOMM 2024, definition 2); infinite for a job that sends nothing.

    Raises PlanningError where the numbers are too large or too small to reckon with.
    """
    if not job.flows and job.communication_s is None:
        return math.inf
    communication_s = transmit_s(cluster, job, paths)
    intensity = job.compute_flop / communication_s if communication_s else math.inf
    check_magnitude(job, "flop/s of its traffic's time", intensity)
    return intensity


def check_magnitude(job: Job, what: str, value: float) -> None:
    """Raises PlanningError for a number whose sums and products could overflow, or vanish."""
    if not 1 / MOST < value < MOST:
        raise PlanningError(
            f"job {job.name}: {value:g} {what}, between {1 / MOST:g} and {MOST:g} can be reckoned with; check "
            f"compute_flop ({job.compute_flop:g}), compute_s ({job.compute_s:g}), its bytes and the links' bandwidths"
        )


def check_names(jobs: Sequence[Job]) -> None:
    """Raises PlanningError if two jobs have one name."""
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanningError(f"two jobs are named {twice}; give each its own name")
