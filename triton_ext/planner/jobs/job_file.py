"""Jobs in YAML and JSON files.

    jobs:
      - name: tuning
        gpus: 8
        compute_flop: 0.5e15           # of one iteration, over all GPUs
        compute_s: 0.3
        overlap_start: 1               # optional: the share of compute_s after which sending may begin
        communication_s: 0.4           # optional: as measured; replaces the modelled time of the traffic
        lockstep: false                # optional: all flows advance with the slowest, as those of one ring do
        flows:                         # of one iteration; from a node to itself: what each device sends there
          - {from: host1, to: host5, bytes: 15e9}

Unknown and missing fields, wrong types, impossible numbers, nodes and GPUs that the cluster has not raise
PlanningError, which names the file and the field. So do jobs that cannot all have their GPUs: of a node, each needs one
at least, and as many as its other nodes cannot give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...errors import ClusterError, PlanningError
from .. import documents
from ..cluster import Cluster
from ..documents import Count, Entry, Name, Positive
from .job import Flow, Job, candidates


class _Flow(Entry):
    """What one node sends to another in an iteration; from a node to itself: what each device sends over its fabric."""

    source: Annotated[str, Field(alias="from", min_length=1)]
    destination: Annotated[str, Field(alias="to", min_length=1)]
    size_bytes: Annotated[Positive, Field(alias="bytes")]


class _Job(Entry):
    """One iteration of a job."""

    name: Name
    gpus: Count
    compute_flop: Positive
    compute_s: Positive
    overlap_start: Annotated[float, Field(ge=0, le=1)] = 1.0
    communication_s: Positive | None = None
    lockstep: bool = False
    flows: list[_Flow] = Field(default_factory=list)


class _Document(Entry):
    """Jobs that share a cluster."""

    jobs: Annotated[list[_Job], Field(min_length=1)]


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a file of jobs, for editors and other programs."""
    return _Document.model_json_schema()


def load(file: Path, cluster: Cluster) -> tuple[Job, ...]:
    """The jobs of a file, checked against the cluster that they run on. Raises PlanningError."""
    document = documents.check(
        _Document, documents.load(file, PlanningError), str(file), "job file", PlanningError, "docs/priorities.md"
    )
    jobs = []
    names: set[str] = set()
    for number, entry in enumerate(document.jobs):
        where = f"{file}: jobs[{number}]"
        if entry.name in names:
            raise PlanningError(f"{where}.name: {entry.name!r}: another job has this name; give each its own")
        names.add(entry.name)
        flows = tuple(_flow(flow, cluster, f"{where}.flows[{i}]") for i, flow in enumerate(entry.flows))
        job = Job(
            entry.name,
            entry.gpus,
            entry.compute_flop,
            entry.compute_s,
            flows,
            entry.overlap_start,
            entry.communication_s,
            entry.lockstep,
        )
        _check_gpus(job, cluster, f"{where}.gpus")
        jobs.append(job)
    _check_nodes(jobs, cluster, file)
    total, available = sum(job.gpus for job in jobs), len(cluster.devices)
    if total > available:
        raise PlanningError(f"{file}: jobs: they have {total} GPUs together; the cluster has {available} devices")
    return tuple(jobs)


def _flow(entry: _Flow, cluster: Cluster, where: str) -> Flow:
    for field, name in (("from", entry.source), ("to", entry.destination)):
        try:
            cluster.node_index(name)
        except ClusterError as error:
            raise PlanningError(f"{where}.{field}: {error}") from None
    flow = Flow(entry.source, entry.destination, entry.size_bytes)
    try:
        candidates(cluster, flow)
    except ClusterError as error:
        raise PlanningError(f"{where}: {error}") from None
    return flow


def _check_gpus(job: Job, cluster: Cluster, where: str) -> None:
    names = _node_names(job)
    available = sum(_devices(cluster, name) for name in names)
    if names and not len(names) <= job.gpus <= available:
        raise PlanningError(
            f"{where}: {job.gpus}: the job's flows join {len(names)} nodes with {available} devices; "
            "give at least one GPU of each, and no more than they have"
        )


def _check_nodes(jobs: Sequence[Job], cluster: Cluster, file: Path) -> None:
    """Each job has at least one device of each of its nodes, and as many as its other nodes cannot give it."""
    needs: dict[str, list[tuple[str, int]]] = {}  # by node: job and devices
    for job in jobs:
        names = _node_names(job)
        available = sum(_devices(cluster, name) for name in names)
        for name in names:
            least = max(1, job.gpus - (available - _devices(cluster, name)))
            needs.setdefault(name, []).append((job.name, least))
    for name, of in sorted(needs.items()):
        needed = sum(least for _, least in of)
        if needed > _devices(cluster, name):
            each = ", ".join(f"{job} at least {least}" for job, least in of)
            raise PlanningError(
                f"{file}: jobs: node {name} has {_devices(cluster, name)} devices, and their jobs need {needed} "
                f"({each}); give them fewer GPUs, or other nodes"
            )


def _node_names(job: Job) -> set[str]:
    return {name for flow in job.flows for name in (flow.source, flow.destination)}


def _devices(cluster: Cluster, name: str) -> int:
    return len(cluster.nodes[cluster.node_index(name)].device_types)
