"""Paths for the flows of many jobs: the most intense job first, each flow on the least congested path left to it."""

from __future__ import annotations

from collections.abc import Sequence

from ..cluster import Cluster, Path
from .job import Flow, Job, Routes, candidates, check_names, intensity_flop_per_s


def select_paths(cluster: Cluster, jobs: Sequence[Job]) -> Routes:
    """Crux's path selection (SIGCOMM 2024, section 4.1).

    A path's congestion is the largest load among its links, in seconds per iteration of every job placed so far; ties
    go to the smaller sum of the loads, then to the lower indices of links. A job's intensity, which orders the jobs,
    is the one on the paths it would take alone. The order of `jobs` does not matter.
    """
    check_names(jobs)
    alone = {job.name: place(cluster, job, {}) for job in jobs}
    order = sorted(jobs, key=lambda job: (-intensity_flop_per_s(cluster, job, alone[job.name]), job.name))
    return place_in_order(cluster, order)


def place_in_order(cluster: Cluster, order: Sequence[Job]) -> Routes:
    """Each job in turn on the least congested paths."""
    loads_s: dict[int, float] = {}
    return {job.name: place(cluster, job, loads_s) for job in order}


def place(cluster: Cluster, job: Job, loads_s: dict[int, float]) -> tuple[Path, ...]:
    """The least congested path for each flow; adds what they load to `loads_s` (by link)."""
    chosen = []
    for flow in job.flows:
        path = least_congested(cluster, flow, loads_s)
        for link in path:
            loads_s[link] = loads_s.get(link, 0.0) + flow.size_bytes / cluster.links[link].bandwidth_bytes_per_s
        chosen.append(path)
    return tuple(chosen)


def least_congested(cluster: Cluster, flow: Flow, loads_s: dict[int, float]) -> Path:
    def congestion(path: Path) -> tuple[float, float, Path]:
        loads = [loads_s.get(link, 0.0) for link in path]
        return max(loads, default=0.0), sum(loads), path

    return min(candidates(cluster, flow), key=congestion)
