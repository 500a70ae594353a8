"""What has to be done for one training step of a plan: seconds to compute, bytes to send, bytes to keep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...errors import PlanningError
from ..cluster import Cluster
from . import traffic
from .flows import Resource
from .layer_tables import LayerTables, Table
from .plan import ParallelPlan, Stage
from .profiles import Profiles
from .schedule import layer_runs
from .traffic import Transfer


@dataclass(frozen=True)
class Worker:
    """A replica: seconds of a micro-batch and bytes of its activations by chunk; the slowest of its devices counts."""

    devices: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    fixed_bytes: float
    flight_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Boundary:
    """What a micro-batch sends from a stage to the next and, as gradients, back; bytes of a sample by chunk."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    sample_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Ring:
    """The all-reduce of a stage's gradients: two passes of a device's shard. No edges: nothing to reduce."""

    edges: tuple[Transfer, ...]
    latency_s: float
    shard_bytes: float


@dataclass(frozen=True)
class StepWork:
    """Workers by stage; boundaries after each stage but the last, and, with several chunks, one from the last stage to
    the first one's next chunk; rings by stage; bytes/s of every link and port that these use."""

    schedule: str
    microbatches: int
    chunks: int
    workers: tuple[tuple[Worker, ...], ...]
    boundaries: tuple[Boundary, ...]
    rings: tuple[Ring, ...]
    capacity: dict[Resource, float]

    @property
    def stages(self) -> int:
        return len(self.workers)


def check(plan: ParallelPlan, cluster: Cluster, profiles: Profiles) -> None:
    """Raises PlanningError unless a plan fits a model and a cluster."""
    if plan.layers != profiles.model.layers:
        raise PlanningError(
            f"the plan has {plan.layers} layers, the model {profiles.model.name} {profiles.model.layers}"
        )
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            if not 0 <= device < len(cluster.devices):
                raise PlanningError(
                    f"stage {number} uses device {device}; the cluster has devices 0 to {len(cluster.devices) - 1}"
                )


def step_work(plan: ParallelPlan, cluster: Cluster, tables: LayerTables) -> StepWork:
    """Of a plan; `tables` are of its settings. Raises PlanningError for a plan that does not fit the model or the
    cluster, and for profile points that are neither there nor between others."""
    check(plan, cluster, tables.profiles)
    runs, stages = layer_runs(plan), plan.stages
    outputs = tables.profiles.model.activation_bytes
    around = list(itertools.pairwise(range(len(stages))))
    if len(runs[0]) > 1:
        around.append((len(stages) - 1, 0))
    boundaries = tuple(
        Boundary(
            tuple(traffic.boundary(cluster, stages[a].replicas, stages[b].replicas)),
            tuple(traffic.boundary(cluster, stages[b].replicas, stages[a].replicas)),
            tuple(outputs[end - 1] for _, end in runs[a]),
        )
        for a, b in around
    )
    edges = [traffic.ring(cluster, stage) for stage in stages]
    transfers = [*itertools.chain(*edges), *itertools.chain(*((*b.forward, *b.backward) for b in boundaries))]
    capacity = traffic.capacities(cluster, transfers)
    rings, workers = [], []
    for stage, stage_runs, stage_edges in zip(stages, runs, edges, strict=True):
        by_replica = [_tables(tables, cluster, stage, index) for index in range(stage.dp)]
        found = list(itertools.chain(*by_replica))
        passes = [max(float(table.shard_bytes[run]) for table in found) for run in stage_runs]
        ring = Ring(tuple(stage_edges), ring_latency_s(stage_edges), sum(passes))
        gathers = [0.0] * len(passes)
        if tables.settings.shard_parameters and stage_edges:
            gathers = [ring_s(capacity, ring, passed) for passed in passes]
            ring = replace(ring, edges=())
        rings.append(ring)
        workers.append(
            tuple(
                _worker(devices.devices, own, stage_runs, gathers)
                for devices, own in zip(stage.replicas, by_replica, strict=True)
            )
        )
    return StepWork(plan.schedule, plan.microbatches, len(runs[0]), tuple(workers), boundaries, tuple(rings), capacity)


def condensed(work: StepWork) -> StepWork:
    """The same with one worker a stage: its slowest replica, and all transfers of a boundary or ring as one."""

    def one(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return (traffic.together(transfers),) if transfers else ()

    workers = tuple(
        (
            Worker(
                tuple(itertools.chain(*(worker.devices for worker in stage))),
                tuple(map(max, zip(*(worker.forward_s for worker in stage), strict=True))),
                tuple(map(max, zip(*(worker.backward_s for worker in stage), strict=True))),
                max(worker.optimizer_s for worker in stage),
                max(worker.fixed_bytes for worker in stage),
                tuple(map(max, zip(*(worker.flight_bytes for worker in stage), strict=True))),
            ),
        )
        for stage in work.workers
    )
    boundaries = tuple(Boundary(one(b.forward), one(b.backward), b.sample_bytes) for b in work.boundaries)
    rings = tuple(replace(ring, edges=one(ring.edges)) for ring in work.rings)
    return replace(work, workers=workers, boundaries=boundaries, rings=rings)


def ring_latency_s(edges: Sequence[Transfer]) -> float:
    """Of one pass."""
    return (len(edges) - 1) * max((edge.latency_s for edge in edges), default=0.0)


def ring_s(capacity: dict[Resource, float], ring: Ring, size: float) -> float:
    """Of one pass of `size` bytes of each device, alone on the links: a gather or a scatter."""
    return traffic.seconds(capacity, traffic.together(ring.edges), size) + ring.latency_s if ring.edges else 0.0


def _tables(tables: LayerTables, cluster: Cluster, stage: Stage, index: int) -> list[Table]:
    replica = stage.replicas[index]
    types = sorted({cluster.devices[device].type for device in replica.devices})
    return [tables.get((name, replica.tp, replica.samples), stage.dp) for name in types]


def _worker(
    devices: tuple[int, ...], tables: list[Table], runs: Sequence[tuple[int, int]], gathers: list[float]
) -> Worker:
    """Gathers: seconds to gather a run's sharded parameters, before a forward and a backward, and to scatter their
    gradients."""
    return Worker(
        devices,
        tuple(max(float(t.forward_s[run]) for t in tables) + g for run, g in zip(runs, gathers, strict=True)),
        tuple(max(float(t.backward_s[run]) for t in tables) + 2 * g for run, g in zip(runs, gathers, strict=True)),
        max(sum(float(t.optimizer_s[run]) for run in runs) for t in tables),
        max(sum(float(t.fixed_bytes[run]) for run in runs) for t in tables),
        tuple(max(float(t.flight_bytes[run]) for t in tables) for run in runs),
    )
