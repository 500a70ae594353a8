"""A plan of priorities as rows of text, as JSON, and as settings of the jobs' environments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..cluster import Cluster
from .assignment import order_of
from .baselines import BASELINES
from .job import Job, Routes, candidates, fabric_s, intensity_flop_per_s, load_s, transmit_s
from .policy import Snapshot, crux, crux_with_priorities
from .simulator import Submission, simulate


@dataclass(frozen=True)
class Plan:
    cluster: Cluster
    jobs: tuple[Job, ...]  # from the highest priority down
    routes: Routes
    priority_flop_per_s: dict[str, float]
    levels: dict[str, int]


def plan(cluster: Cluster, jobs: tuple[Job, ...], levels: int) -> Plan:
    """What `policy.crux` decides, with what it is decided from. Raises PlanningError."""
    decision, priority = crux_with_priorities(Snapshot(cluster, jobs, levels))
    by_name = {job.name: job for job in jobs}
    order = tuple(by_name[name] for name in order_of(priority))
    return Plan(cluster, order, decision.routes, priority, dict(decision.levels))


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """Of each job: name, GPUs, t, what is slowest, intensity, k, priority, level. "-" for what it has not."""
    result = []
    for job in plan.jobs:
        paths = plan.routes[job.name]
        cells = ["-"] * 5
        if time_s := transmit_s(plan.cluster, job, paths):
            intensity = intensity_flop_per_s(plan.cluster, job, paths)
            cells[:3] = _figure(time_s), _slowest(plan, job), _figure(intensity / 1e12)
            if any(paths):
                priority = plan.priority_flop_per_s[job.name]
                cells[3:] = f"{priority / intensity:.3g}", _figure(priority / 1e12)
        result.append((job.name, str(job.gpus), *cells, str(plan.levels[job.name])))
    return result


def _figure(value: float) -> str:
    """At least four digits, however small the value is."""
    return f"{value:.0f}" if 1e3 <= value < 1e7 else f"{value:.4g}"


def _slowest(plan: Plan, job: Job) -> str:
    """Of a job that sends, the link or fabric that its traffic takes longest on."""
    if job.communication_s is not None:
        return "as declared"
    cluster = plan.cluster
    times = [
        (seconds, -link, f"{cluster.links[link].source} -> {cluster.links[link].destination}")
        for link, seconds in load_s(cluster, job, plan.routes[job.name]).items()
    ]
    times += [(seconds, 1, f"fabric of {cluster.nodes[node].name}") for node, seconds in fabric_s(cluster, job).items()]
    return max(times)[2]


def path_class(plan: Plan, job: Job) -> int | None:
    """The number that all flows of a job have among the equal-cost paths of their ends; None if it is not one."""
    numbers = {choice for choice in _choices(plan, job) if choice is not None}
    return numbers.pop() if len(numbers) == 1 else None


def _choices(plan: Plan, job: Job) -> list[int | None]:
    """By flow, the number of its path; None where there is no choice."""
    result = []
    for flow, path in zip(job.flows, plan.routes[job.name], strict=True):
        paths = candidates(plan.cluster, flow)
        result.append(paths.index(path) if len(paths) > 1 else None)
    return result


def environment(plan: Plan, job: Job) -> dict[str, str]:
    """What tells the job's processes of their priority and, if it is one for all flows, their path class."""
    result = {"TRITON_EXT_PRIORITY": str(plan.levels[job.name])}
    number = path_class(plan, job)
    if number is not None:
        result["TRITON_EXT_PATH_CLASS"] = str(number)
    return result


def comparison(plan: Plan, levels: int, span_s: float) -> list[tuple[str, ...]]:
    """Of Crux and each baseline, simulated for span_s: name, Pflop, share of GPU time computing, iterations by job."""
    result = []
    for name, policy in {"Crux": crux, **BASELINES}.items():
        outcome = simulate(plan.cluster, [Submission(job) for job in plan.jobs], policy, levels, span_s)
        done = (str(job.iterations) for job in outcome.jobs)
        result.append((name, _figure(outcome.computed_flop / 1e15), f"{outcome.utilisation:.1%}", *done))
    return result


def as_json(plan: Plan) -> str:
    """Priorities in flop per second (null: sends nothing between nodes), levels (0 first), paths by nodes."""
    links = plan.cluster.links
    jobs = [
        {
            "name": job.name,
            "priority_flop_per_s": plan.priority_flop_per_s[job.name] if any(plan.routes[job.name]) else None,
            "level": plan.levels[job.name],
            "environment": environment(plan, job),
            "paths": [
                {"class": choice, "nodes": [flow.source, *(links[link].destination for link in path)]}
                for flow, path, choice in zip(job.flows, plan.routes[job.name], _choices(plan, job), strict=True)
            ],
        }
        for job in plan.jobs
    ]
    return json.dumps({"jobs": jobs}, indent=2) + "\n"
