"""Paths for the flows of many jobs: the most intense job first, each flow on the least congested path left to it."""

from __future__ import annotations

from collections.abc import Sequence

from .job import Flow, Job, Routes, check_names, intensity_flop_per_s
from .network import Network, Path


def select_paths(network: Network, jobs: Sequence[Job]) -> Routes:
    """Crux's path selection (SIGCOMM 2024, section 4.1).

    A path's congestion is the largest load among its links, in seconds per iteration of every job placed so far; ties
    go to the smaller sum of the loads, then to the lower indices of links. A job's intensity, which orders the jobs,
    is the one on the paths it would take alone. The order of `jobs` does not matter.
    """
    check_names(jobs)
    alone = {job.name: place(network, job, {}) for job in jobs}
    order = sorted(jobs, key=lambda job: (-intensity_flop_per_s(network, job, alone[job.name]), job.name))
    return place_in_order(network, order)


def place_in_order(network: Network, order: Sequence[Job]) -> Routes:
    """Each job in turn on the least congested paths."""
    loads_s: dict[int, float] = {}
    return {job.name: place(network, job, loads_s) for job in order}


def place(network: Network, job: Job, loads_s: dict[int, float]) -> tuple[Path, ...]:
    """The least congested path for each flow; adds what they load to `loads_s` (by link)."""
    chosen = []
    for flow in job.flows:
        path = least_congested(network, flow, loads_s)
        for link in path:
            loads_s[link] = loads_s.get(link, 0.0) + flow.size_bytes / network.links[link].capacity_bytes_per_second
        chosen.append(path)
    return tuple(chosen)


def least_congested(network: Network, flow: Flow, loads_s: dict[int, float]) -> Path:
    def congestion(path: Path) -> tuple[float, float, Path]:
        loads = [loads_s.get(link, 0.0) for link in path]
        return max(loads, default=0.0), sum(loads), path

    return min(network.paths(flow.source, flow.destination), key=congestion)
