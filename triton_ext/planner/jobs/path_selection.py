"""Paths for the flows of many jobs: the most intense job first, each flow on the least congested path left to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Path
from .job import Flow, Job, Routes, candidates, check_names, intensity_flop_per_s


class Loads:
    """Seconds of each link's time that an iteration of every job placed so far takes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._bandwidths_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in cluster.links])
        self._options: dict[tuple[str, str], tuple[tuple[Path, ...], NDArray[np.int64]]] = {}
        self.clear()

    def clear(self) -> None:
        """Take all jobs away."""
        self._seconds = np.zeros(len(self._bandwidths_bytes_per_s))

    def place(self, flow: Flow) -> Path:
        """The least congested path of a flow, which is then placed there.

        A path's congestion is the largest load among its links, ties go to the smaller sum of the loads, then to the
        lower indices of links.
        """
        key = (flow.source, flow.destination)
        if key not in self._options:
            paths = candidates(self._cluster, flow)
            self._options[key] = paths, np.array(paths, dtype=np.int64)
        paths, links = self._options[key]
        best = 0
        if len(paths) > 1:
            seconds = self._seconds[links]
            worst = seconds.max(axis=1)
            best = int(np.where(worst == worst.min(), seconds.sum(axis=1), np.inf).argmin())
        self._seconds[links[best]] += flow.size_bytes / self._bandwidths_bytes_per_s[links[best]]
        return paths[best]


def select_paths(cluster: Cluster, jobs: Sequence[Job]) -> Routes:
    """Crux's path selection (SIGCOMM 2024, section 4.1).

    The most intense job chooses first, each of its flows the least congested path (`Loads.place`). A job's intensity
    here is the one on the paths that it would take alone. The order of `jobs` does not matter.
    """
    check_names(jobs)
    loads = Loads(cluster)
    intensity: dict[str, float] = {}
    for job in jobs:
        loads.clear()
        intensity[job.name] = intensity_flop_per_s(cluster, job, [loads.place(flow) for flow in job.flows])
    loads.clear()
    order = sorted(jobs, key=lambda job: (-intensity[job.name], job.name))
    return {job.name: tuple(loads.place(flow) for flow in job.flows) for job in order}
