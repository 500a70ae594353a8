"""A plan of priorities as rows of text and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .assignment import order_of, priorities
from .compression import compress, contention_graph
from .job import Job, Routes, intensity_flop_per_s, load_s, transmit_s
from .path_selection import select_paths
from .reading import Cluster, read_cluster, read_jobs


@dataclass(frozen=True)
class Plan:
    cluster: Cluster
    jobs: tuple[Job, ...]  # from the highest priority down
    routes: Routes
    priority_flop_per_s: dict[str, float]
    levels: dict[str, int]


def plan(jobs_file: Path, cluster_file: Path) -> Plan:
    """Raises PlanningError, which names file and field."""
    cluster = read_cluster(cluster_file)
    jobs = read_jobs(jobs_file, cluster.network)
    routes = select_paths(cluster.network, jobs)
    priority = priorities(cluster.network, jobs, routes)
    order = order_of(priority)
    levels = compress(contention_graph(cluster.network, jobs, routes, order), cluster.levels)
    by_name = {job.name: job for job in jobs}
    return Plan(cluster, tuple(by_name[name] for name in order), routes, priority, levels)


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """Of each job: name, GPUs, t, slowest link, intensity, k, priority, level. A job that sends nothing has no more."""
    network = plan.cluster.network
    result = []
    for job in plan.jobs:
        loads_s = load_s(network, job, plan.routes[job.name])
        cells = ["-"] * 5
        if loads_s:
            slowest = network.links[max(loads_s, key=lambda link: (loads_s[link], -link))]
            intensity = intensity_flop_per_s(network, job, plan.routes[job.name])
            priority = plan.priority_flop_per_s[job.name]
            cells = [
                f"{transmit_s(network, job, plan.routes[job.name]):.3f}",
                f"{slowest.source} -> {slowest.destination}",
                f"{intensity / 1e12:.1f}",
                f"{priority / intensity:.2f}",
                f"{priority / 1e12:.1f}",
            ]
        result.append((job.name, str(job.gpus), *cells, str(plan.levels[job.name])))
    return result


def as_json(plan: Plan) -> str:
    """Priorities in flop per second (null: sends nothing), levels (0 first), and each flow's path by nodes."""
    links = plan.cluster.network.links
    jobs = [
        {
            "name": job.name,
            "priority_flop_per_s": plan.priority_flop_per_s[job.name] if any(plan.routes[job.name]) else None,
            "level": plan.levels[job.name],
            "paths": [
                [flow.source, *(links[link].destination for link in path)]
                for flow, path in zip(job.flows, plan.routes[job.name], strict=True)
            ],
        }
        for job in plan.jobs
    ]
    return json.dumps({"jobs": jobs}, indent=2) + "\n"
