"""What Crux is compared with, as policies of the same form. They keep the idea of each system, not all of it.

Paths are hashed, as without planning; those that say nothing of paths take them from another function, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from .compression import ContentionGraph, compress_top
from .job import Job, Routes, candidates, load_s, solo_period_s, transmit_s
from .path_selection import Loads
from .policy import Alignment, Decision, Policy, Snapshot

_OFFSETS = 24  # that a time shift is chosen from
_SAMPLES = 512  # of the time over which overlap is measured
_LONGEST_PERIODS = 8  # that this time spans


def ecmp(snapshot: Snapshot) -> Decision:
    """No planning: a hash picks each flow's path, and all jobs share one level."""
    return Decision(hashed_paths(snapshot), {job.name: 0 for job in snapshot.jobs})


def shortest_first(snapshot: Snapshot, paths: Callable[[Snapshot], Routes] | None = None) -> Decision:
    """The job whose iteration takes the least time on its slowest link goes first (SJF)."""
    routes = (paths or hashed_paths)(snapshot)
    seconds = {job.name: transmit_s(snapshot.cluster, job, routes[job.name]) for job in snapshot.jobs}
    order = sorted(seconds, key=lambda name: (seconds[name], name))
    return Decision(routes, compress_top(ContentionGraph(tuple(order), {}), snapshot.levels))


def sincronia(snapshot: Snapshot, paths: Callable[[Snapshot], Routes] | None = None) -> Decision:
    """An iteration's flows are a coflow, ordered by bottleneck (Sincronia, SIGCOMM 2018)."""
    routes = (paths or hashed_paths)(snapshot)
    order = bottleneck_order(snapshot.cluster, snapshot.jobs, routes)
    return Decision(routes, compress_top(ContentionGraph(order, {}), snapshot.levels))


def bottleneck_order(cluster: Cluster, jobs: Sequence[Job], routes: Routes) -> tuple[str, ...]:
    """Bottleneck-select-scale-iterate, last one first: who has the least weight for its demand on the busiest link."""
    demand_s = {job.name: load_s(cluster, job, routes[job.name]) for job in jobs}
    weight = dict.fromkeys(sorted(demand_s), 1.0)
    backwards = []
    while weight:
        total_s: dict[int, float] = {}
        for name in weight:
            for link, seconds in demand_s[name].items():
                total_s[link] = total_s.get(link, 0.0) + seconds
        if not total_s:
            backwards.extend(sorted(weight, reverse=True))
            break
        busiest = max(total_s, key=lambda link: (total_s[link], -link))
        on = [name for name in weight if busiest in demand_s[name]]
        last = min(on, key=lambda name: (weight[name] / demand_s[name][busiest], name))
        for name in on:
            if name != last:
                weight[name] -= weight[last] * demand_s[name][busiest] / demand_s[last][busiest]
        del weight[last]
        backwards.append(last)
    return tuple(reversed(backwards))


def time_shift(snapshot: Snapshot, paths: Callable[[Snapshot], Routes] | None = None) -> Decision:
    """One level; iterations are shifted so that bursts overlap little (after CASSINI, NSDI 2024).

    A job is shifted once, when it comes: by the offset with the least demand beyond the links' bandwidths, given the
    jobs before it. Of several that come at once the one with the longest traffic chooses first. Demand is that of the
    job alone.
    """
    cluster, routes = snapshot.cluster, (paths or hashed_paths)(snapshot)
    communication_s = {job.name: transmit_s(cluster, job, routes[job.name]) for job in snapshot.jobs}
    senders = sorted(
        (job for job in snapshot.jobs if any(routes[job.name])),
        key=lambda job: (job.name not in snapshot.alignments, -communication_s[job.name], job.name),
    )
    demand: dict[int, NDArray[np.float64]] = {}  # by link: its share in use at each sampled time
    alignments = {}
    span_s = _LONGEST_PERIODS * max((solo_period_s(job, communication_s[job.name]) for job in senders), default=0.0)
    times_s = np.arange(_SAMPLES) * (span_s / _SAMPLES)
    for job in senders:
        known = snapshot.alignments.get(job.name)
        period_s = solo_period_s(job, communication_s[job.name])
        shares = {link: s / communication_s[job.name] for link, s in load_s(cluster, job, routes[job.name]).items()}
        offsets_s = np.array([known.offset_s]) if known else np.arange(_OFFSETS) * (period_s / _OFFSETS)
        since_s = times_s - offsets_s[:, None] - job.overlap_start * job.compute_s
        sends = (since_s % period_s < communication_s[job.name]).astype(float)  # by offset and time
        excess = np.zeros(len(offsets_s))
        for link, share in shares.items():
            if link in demand:
                excess += np.maximum(demand[link] + share * sends - 1, 0).sum(axis=1)
        best = int(np.argmin(excess.round(9)))
        for link, share in shares.items():
            demand[link] = demand.get(link, 0.0) + share * sends[best]
        alignments[job.name] = known or Alignment(period_s, float(offsets_s[best]))
    return Decision(routes, {job.name: 0 for job in snapshot.jobs}, alignments)


def farthest_first(snapshot: Snapshot) -> Decision:
    """One level; flows with the most links choose first, each the least congested path (the TACCL* of Crux's paper)."""
    cluster = snapshot.cluster
    flows = [(job, i) for job in snapshot.jobs for i in range(len(job.flows))]

    def distance(item: tuple[Job, int]) -> int:
        flow = item[0].flows[item[1]]
        return len(candidates(cluster, flow)[0])

    loads = Loads(cluster)
    chosen: dict[str, list[tuple[int, ...]]] = {job.name: [()] * len(job.flows) for job in snapshot.jobs}
    for job, i in sorted(flows, key=lambda item: (-distance(item), item[0].name, item[1])):
        chosen[job.name][i] = loads.place(job.flows[i])
    return Decision({name: tuple(paths) for name, paths in chosen.items()}, {job.name: 0 for job in snapshot.jobs})


def hashed_paths(snapshot: Snapshot) -> Routes:
    """ECMP: a flow's path depends on its ends, its job and the seed, not on what else is there."""
    routes = {}
    for job in snapshot.jobs:
        paths = []
        for i, flow in enumerate(job.flows):
            paths_of_flow = candidates(snapshot.cluster, flow)
            key = f"{snapshot.seed}/{job.name}/{i}/{flow.source}/{flow.destination}"
            digest = hashlib.blake2b(key.encode(), digest_size=8).digest()  # a CRC would send neighbours one way
            paths.append(paths_of_flow[int.from_bytes(digest) % len(paths_of_flow)])
        routes[job.name] = tuple(paths)
    return routes


BASELINES: dict[str, Policy] = {
    "ECMP": ecmp,
    "SJF": shortest_first,
    "Sincronia": sincronia,
    "time shift": time_shift,
    "TACCL*": farthest_first,
}
