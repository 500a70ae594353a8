"""Iterative jobs: what one iteration computes and sends. And their GPU intensity on given paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import PlanningError
from .network import Network, Path

Routes = Mapping[str, tuple[Path, ...]]  # by job: one path per flow, in the order of the job's flows


@dataclass(frozen=True)
class Flow:
    """What one node sends to another in every iteration."""

    source: str
    destination: str
    size_bytes: float


@dataclass(frozen=True)
class Job:
    """One iteration computes for compute_s on all GPUs, and sends from overlap_start of that time on (1: after it)."""

    name: str
    gpus: int
    compute_flop: float  # of one iteration, over all GPUs
    compute_s: float
    flows: tuple[Flow, ...] = ()
    overlap_start: float = 1.0

    def __post_init__(self) -> None:
        for field, value, good in (
            ("gpus", self.gpus, self.gpus >= 1),
            ("compute_flop", self.compute_flop, 0 < self.compute_flop < math.inf),
            ("compute_s", self.compute_s, 0 < self.compute_s < math.inf),
            ("overlap_start", self.overlap_start, 0 <= self.overlap_start <= 1),
        ):
            if not good:
                raise PlanningError(
                    f"job {self.name}: {field} = {value}; it must be positive, overlap_start in [0, 1]"
                )
        for flow in self.flows:
            if not 0 < flow.size_bytes < math.inf:
                raise PlanningError(
                    f"job {self.name}: {flow.source} -> {flow.destination} of {flow.size_bytes} bytes; "
                    "give a positive number or leave the flow out"
                )


def load_s(network: Network, job: Job, paths: Sequence[Path]) -> dict[int, float]:
    """Seconds of each link's time that one iteration takes, by link."""
    seconds: dict[int, float] = {}
    for flow, path in zip(job.flows, paths, strict=True):
        for link in path:
            seconds[link] = seconds.get(link, 0.0) + flow.size_bytes / network.links[link].capacity_bytes_per_second
    return seconds


def transmit_s(network: Network, job: Job, paths: Sequence[Path]) -> float:
    """t_j: the time that an iteration's traffic takes on its slowest link; 0 without traffic between nodes."""
    return max(load_s(network, job, paths).values(), default=0.0)


def solo_period_s(job: Job, communication_s: float) -> float:
    """How long an iteration takes with the network to itself."""
    return max(job.compute_s, job.overlap_start * job.compute_s + communication_s)


def intensity_flop_per_s(network: Network, job: Job, paths: Sequence[Path]) -> float:
    """GPU intensity I_j = W_j / t_j (Crux, SIGCOMM 2024, definition 2); infinite for a job that sends nothing."""
    communication_s = transmit_s(network, job, paths)
    return job.compute_flop / communication_s if communication_s else math.inf


def check_names(jobs: Sequence[Job]) -> None:
    """Raises PlanningError if two jobs have one name."""
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanningError(f"two jobs are named {twice}; give each its own name")
