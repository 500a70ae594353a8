"""Metis's cost of one plan (USENIX ATC 2024), in ms of a training step.

With stage times t_i of one micro-batch, B micro-batches, K stages:
- execution: (B - 1) max t_i + sum t_i
- synchronization: B times what forward and backward take beyond their layers, at the last stage
- pipeline: for each cut, what the layer before it hands on, over the slowest bandwidth of both stages; once, one way.
  A cut before the head is priced by the head's output / tp, as published.
- data parallel: the slowest stage's ring all-reduce of its parameters / tp
- update: the largest of 2 * optimizer time / tp * (share of the layers), where the time is of the degree tp already
- batch generator: B times that of the first stage

Where the publication leaves it open, or the public implementation has a fault: every stage is priced with its own
device types; a tensor-parallel group of several types by its slowest; bytes and bytes/s are used (see
`MetisSettings.cost`); with shares that differ, each replica's profile is that of its own share.
`vectorized` computes the same for many plans at once.
"""

from __future__ import annotations

from functools import cache

from ....errors import PlanningError
from ...cluster import Cluster
from ..lookup import Lookup
from ..plan import ParallelPlan
from ..profiles import BYTES_PER_PARAMETER, Profiles
from ..result import Cost, CostedPlan
from .bandwidth import Bandwidths
from .settings import MetisSettings
from .stage import Rejection, Row, StageCost, Stages


def evaluate(
    plan: ParallelPlan, profiles: Profiles, cluster: Cluster, settings: MetisSettings | None = None
) -> CostedPlan:
    """The cost of any plan, whoever made it.

    Raises PlanningError for a profile point that is neither there nor between others, for a plan of other layers than
    the model's, and for devices that the cluster has not.
    """
    return evaluate_with_memory(plan, profiles, cluster, settings)[0]


def evaluate_with_memory(
    plan: ParallelPlan, profiles: Profiles, cluster: Cluster, settings: MetisSettings | None = None
) -> tuple[CostedPlan, dict[int, int]]:
    """As `evaluate`, with the bytes that each device needs."""
    settings = settings or MetisSettings()
    lookup = Lookup(profiles, cluster, settings.model_missing)
    evaluator = Evaluator(Stages(lookup, settings.uneven_splits), cluster, profiles, settings)
    return evaluator.cost(plan), evaluator.memory_bytes(plan)


class Evaluator:
    """`evaluate` for many plans of the same inputs."""

    def __init__(self, stages: Stages, cluster: Cluster, profiles: Profiles, settings: MetisSettings) -> None:
        self._stages, self._cluster, self._model = stages, cluster, profiles.model
        self._settings = settings
        self._bandwidths = Bandwidths(cluster, settings.cost == "metis-upstream")

    def cost(self, plan: ParallelPlan) -> CostedPlan:
        model, batches = self._model, plan.microbatches
        if plan.layers != model.layers:
            raise PlanningError(f"a plan of {plan.layers} layers for {model.name}, which has {model.layers}")
        costs = [self._stage(plan, index) for index in range(len(plan.stages))]
        times = [
            max(sum(self._stages.layer_ms(row)[stage.begin : stage.end]) for row in cost.rows)
            for stage, cost in zip(plan.stages, costs, strict=True)
        ]
        cost = Cost(
            execution_ms=(batches - 1) * max(times) + sum(times),
            pipeline_ms=sum(self._cut_ms(plan, index, costs[index]) for index in range(len(times) - 1)),
            data_parallel_ms=max(self._all_reduce_ms(plan, index) for index in range(len(times))),
            update_ms=max(
                2 * cost.optimizer_ms / stage.tp * ((stage.end - stage.begin) / model.layers)
                for stage, cost in zip(plan.stages, costs, strict=True)
            ),
            synchronization_ms=batches * costs[-1].synchronization_ms,
            batch_generator_ms=batches * costs[0].batch_generator_ms,
        )
        sources: dict[str, set[tuple[str, int, int]]] = {"modelled": set(), "interpolated": set(), "measured": set()}
        for stage_cost in costs:
            for row in stage_cost.rows:
                for key, point in self._stages.points(row):
                    sources[point.source].add(key)
        return CostedPlan(
            plan,
            cost,
            tuple(times),
            tuple(max(self._memory_bytes(plan, index).values()) for index in range(len(costs))),
            modelled=_named(sources["modelled"]),
            interpolated=_named(sources["interpolated"]),
        )

    def _stage(self, plan: ParallelPlan, index: int) -> StageCost:
        stage = plan.stages[index]
        if max(stage.devices) >= len(self._cluster.devices) or min(stage.devices) < 0:
            raise PlanningError(
                f"stage {index} uses devices {list(stage.devices)}; the cluster has {len(self._cluster.devices)}"
            )
        types = [self._cluster.devices[device].type for device in stage.devices]
        cost = self._stages.cost_of_shares(types, stage.tp, [replica.samples for replica in stage.replicas])
        if isinstance(cost, Rejection):
            raise PlanningError(f"stage {index}: {cost.reason}")
        return cost

    def _cut_ms(self, plan: ParallelPlan, index: int, cost: StageCost) -> float:
        stage, after = plan.stages[index], plan.stages[index + 1]
        size: float = self._model.activation_bytes[stage.end - 1]
        if stage.end == plan.layers - 1:
            size = self._model.activation_bytes[-1] / stage.tp
        if self._settings.cost == "metis-upstream":
            size /= BYTES_PER_PARAMETER
        return max(cost.shares) * size / self._bandwidths.between_stages(stage.devices, after.devices)

    def _all_reduce_ms(self, plan: ParallelPlan, index: int) -> float:
        stage = plan.stages[index]
        if stage.dp == 1:
            return 0.0
        size = sum(self._model.parameter_bytes[stage.begin : stage.end]) / stage.tp
        return 2 * (stage.dp - 1) / stage.dp * size / self._bandwidths.data_parallel(stage.devices, stage.tp)

    def memory_bytes(self, plan: ParallelPlan) -> dict[int, int]:
        """What each device of a plan with a cost needs; 0 for one without samples."""
        needs: dict[int, int] = {}
        for index in range(len(plan.stages)):
            needs |= self._memory_bytes(plan, index)
        return needs

    def _memory_bytes(self, plan: ParallelPlan, index: int) -> dict[int, int]:
        stage = plan.stages[index]
        flying = in_flight(plan.microbatches, len(plan.stages), index)

        @cache
        def need(device_type: str, samples: int) -> int:
            if not samples:
                return 0
            point = self._stages.point(Row(device_type, stage.tp, samples, False))
            further = sum(point.activation_memory_bytes[stage.begin : stage.end])
            return sum(point.memory_bytes[stage.begin : stage.end]) + (flying - 1) * further

        types = self._cluster.devices
        return {d: need(types[d].type, replica.samples) for replica in stage.replicas for d in replica.devices}


def in_flight(batches: int, stages: int, index: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B."""
    return min(batches, stages - index)


def _named(keys: set[tuple[str, int, int]]) -> tuple[str, ...]:
    return tuple(f"{device_type} tp {tp} micro-batch {samples}" for device_type, tp, samples in sorted(keys))
