"""What a stage of a plan costs: tables of its replicas' devices, and the ring through its replicas."""

from __future__ import annotations

from ..cluster import Cluster
from . import traffic
from .flows import Resource
from .layer_tables import LayerTables, Table
from .plan import Stage


def replica_tables(tables: LayerTables, cluster: Cluster, stage: Stage, index: int) -> list[Table]:
    """The tables of a replica's devices, one for each device type: the slowest one counts."""
    replica = stage.replicas[index]
    types = sorted({cluster.devices[device].type for device in replica.devices})
    return [tables.get((name, replica.tp, replica.samples), stage.dp) for name in types]


def ring_s_per_byte(cluster: Cluster, stage: Stage) -> float:
    """Seconds for each byte of a device's shard to pass once round the replicas: (dp - 1) / dp over the busiest link
    or port. An all-reduce is two passes. 0 for one replica."""
    if stage.dp == 1:
        return 0.0
    load: dict[Resource, int] = {}
    for edge in traffic.ring(cluster, stage.replicas):
        parts = 1 if traffic.inside_node(edge) else stage.tp
        for resource in edge.resources:
            load[resource] = load.get(resource, 0) + parts
    busiest = max(parts / traffic.capacity(cluster, resource) for resource, parts in load.items())
    return (stage.dp - 1) / stage.dp * busiest


def ring_latency_s(cluster: Cluster, stage: Stage) -> float:
    """Of one pass round the replicas."""
    edges = traffic.ring(cluster, stage.replicas) if stage.dp > 1 else []
    return (stage.dp - 1) * max((edge.latency_s for edge in edges), default=0.0)


def gather_s(cluster: Cluster, tables: LayerTables, stage: Stage, run: tuple[int, int]) -> float:
    """Of the parameters of layers [begin, end), where they are sharded over the replicas; 0 where they are not."""
    if not tables.settings.shard_parameters or stage.dp == 1:
        return 0.0
    shard = max(
        float(table.shard_bytes[run])
        for index in range(stage.dp)
        for table in replica_tables(tables, cluster, stage, index)
    )
    return ring_s_per_byte(cluster, stage) * shard + ring_latency_s(cluster, stage)
