"""What Crux is compared with, as policies of the same form. They keep the idea of each system, not all of it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from .compression import ContentionGraph, compress_top
from .job import Job, Routes, load_s, solo_period_s, transmit_s
from .network import Network
from .path_selection import least_congested
from .policy import Alignment, Decision, Snapshot

_OFFSETS = 24  # that a time shift is chosen from
_SAMPLES = 512  # of the time over which overlap is measured
_LONGEST_PERIODS = 8  # that this time spans


def ecmp(snapshot: Snapshot) -> Decision:
    """No planning: a hash picks each flow's path, and all jobs share one level."""
    return Decision(hashed_paths(snapshot), {job.name: 0 for job in snapshot.jobs})


def shortest_first(snapshot: Snapshot) -> Decision:
    """Hashed paths; the job whose iteration takes the least time on its slowest link goes first (SJF)."""
    routes = hashed_paths(snapshot)
    seconds = {job.name: transmit_s(snapshot.network, job, routes[job.name]) for job in snapshot.jobs}
    order = sorted(seconds, key=lambda name: (seconds[name], name))
    return Decision(routes, compress_top(ContentionGraph(tuple(order), {}), snapshot.levels))


def sincronia(snapshot: Snapshot) -> Decision:
    """Hashed paths; an iteration's flows are a coflow, ordered by bottleneck (Sincronia, SIGCOMM 2018)."""
    routes = hashed_paths(snapshot)
    order = bottleneck_order(snapshot.network, snapshot.jobs, routes)
    return Decision(routes, compress_top(ContentionGraph(order, {}), snapshot.levels))


def bottleneck_order(network: Network, jobs: Sequence[Job], routes: Routes) -> tuple[str, ...]:
    """Bottleneck-select-scale-iterate, last one first: who has the least weight for its demand on the busiest link."""
    demand_s = {job.name: load_s(network, job, routes[job.name]) for job in jobs}
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


def time_shift(snapshot: Snapshot) -> Decision:
    """Hashed paths, one level; iterations are shifted so that bursts overlap little (after CASSINI, NSDI 2024).

    The job with the longest traffic first, each takes the offset with the least demand beyond the links' capacities,
    given the jobs before it; demand is that of the job alone.
    """
    network, routes = snapshot.network, hashed_paths(snapshot)
    communication_s = {job.name: transmit_s(network, job, routes[job.name]) for job in snapshot.jobs}
    senders = sorted(
        (job for job in snapshot.jobs if communication_s[job.name]),
        key=lambda job: (-communication_s[job.name], job.name),
    )
    demand: dict[int, np.ndarray] = {}  # by link: its share in use at each sampled time
    alignments = {}
    span_s = _LONGEST_PERIODS * max((solo_period_s(job, communication_s[job.name]) for job in senders), default=0.0)
    for job in senders:
        period_s = solo_period_s(job, communication_s[job.name])
        shares = {link: s / communication_s[job.name] for link, s in load_s(network, job, routes[job.name]).items()}
        times_s = np.arange(_SAMPLES) * (span_s / _SAMPLES)
        best = (np.inf, 0.0, np.zeros(0))
        for offset_s in np.arange(_OFFSETS) * (period_s / _OFFSETS):
            since_s = (times_s - offset_s - job.overlap_start * job.compute_s) % period_s
            sends = (since_s < communication_s[job.name]).astype(float)
            excess = 0.0
            for link, share in shares.items():
                if link in demand:
                    excess += float(np.maximum(demand[link] + share * sends - 1, 0).sum())
            if excess < best[0] - 1e-9:
                best = (excess, float(offset_s), sends)
        for link, share in shares.items():
            demand[link] = demand.get(link, 0.0) + share * best[2]
        alignments[job.name] = Alignment(period_s, best[1])
    return Decision(routes, {job.name: 0 for job in snapshot.jobs}, alignments)


def farthest_first(snapshot: Snapshot) -> Decision:
    """One level; flows with the most links choose first, each the least congested path (the TACCL* of Crux's paper)."""
    network = snapshot.network
    flows = [(job, i) for job in snapshot.jobs for i in range(len(job.flows))]

    def distance(item: tuple[Job, int]) -> int:
        flow = item[0].flows[item[1]]
        return len(network.paths(flow.source, flow.destination)[0])

    loads_s: dict[int, float] = {}
    chosen: dict[str, list[tuple[int, ...]]] = {job.name: [()] * len(job.flows) for job in snapshot.jobs}
    for job, i in sorted(flows, key=lambda item: (-distance(item), item[0].name, item[1])):
        flow = job.flows[i]
        path = chosen[job.name][i] = least_congested(network, flow, loads_s)
        for link in path:
            loads_s[link] = loads_s.get(link, 0.0) + flow.size_bytes / network.links[link].capacity_bytes_per_second
    return Decision({name: tuple(paths) for name, paths in chosen.items()}, {job.name: 0 for job in snapshot.jobs})


def hashed_paths(snapshot: Snapshot) -> Routes:
    """ECMP: a flow's path depends on its ends, its job and the seed, not on what else is there."""
    routes = {}
    for job in snapshot.jobs:
        paths = []
        for i, flow in enumerate(job.flows):
            candidates = snapshot.network.paths(flow.source, flow.destination)
            key = f"{snapshot.seed}/{job.name}/{i}/{flow.source}/{flow.destination}"
            paths.append(candidates[zlib.crc32(key.encode()) % len(candidates)])
        routes[job.name] = tuple(paths)
    return routes
