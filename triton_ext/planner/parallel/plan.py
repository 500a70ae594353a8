"""A parallelism plan as data: stages of layers, each computed by replicas of one or more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import PlanningError

SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True)
class Replica:
    """Devices (indices into `Cluster.devices`) that share each layer of a stage by tensor parallelism, and the samples
    of every micro-batch that they compute."""

    devices: tuple[int, ...]
    samples: int

    @property
    def tp(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class Stage:
    """Layers [begin, end), computed by data-parallel replicas of one tensor-parallel degree."""

    begin: int
    end: int
    replicas: tuple[Replica, ...]

    @property
    def dp(self) -> int:
        return len(self.replicas)

    @property
    def tp(self) -> int:
        return self.replicas[0].tp

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for replica in self.replicas for device in replica.devices)


@dataclass(frozen=True)
class Settings:
    """Optional dimensions of a plan."""

    recompute_activations: bool = False
    shard_optimizer: bool = False  # over the data-parallel replicas (ZeRO 1)
    shard_parameters: bool = False  # and gradients and parameters (ZeRO 3)
    sequence_parallel: bool = False
    chunks_per_stage: int = 1  # of an interleaved schedule


@dataclass(frozen=True)
class ParallelPlan:
    """A global batch as equal micro-batches through the stages, in order.

    Raises PlanningError unless the stages follow each other without gap or empty one, every device is used once, all
    replicas of a stage have one degree, and every stage computes every sample.
    """

    stages: tuple[Stage, ...]
    microbatches: int
    global_batch: int
    schedule: str = "1f1b"
    settings: Settings = Settings()

    @property
    def layers(self) -> int:
        return self.stages[-1].end

    @property
    def microbatch_samples(self) -> int:
        return self.global_batch // self.microbatches

    def renumbered(self, numbers: Mapping[int, int] | Sequence[int]) -> ParallelPlan:
        """The same plan with numbers[i] in place of device i."""
        stages = tuple(
            replace(s, replicas=tuple(Replica(tuple(numbers[d] for d in r.devices), r.samples) for r in s.replicas))
            for s in self.stages
        )
        return replace(self, stages=stages)

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanningError("a plan without stages; give at least one")
        if self.schedule not in SCHEDULES:
            raise PlanningError(f"schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.microbatches < 1 or self.global_batch < 1 or self.global_batch % self.microbatches:
            raise PlanningError(
                f"a batch of {self.global_batch} in {self.microbatches} micro-batches: samples would be lost; "
                "the number of micro-batches must divide the batch"
            )
        expected, used = 0, set[int]()
        for number, stage in enumerate(self.stages):
            where = f"stage {number}"
            if stage.begin != expected or stage.end <= stage.begin:
                raise PlanningError(f"{where} has layers {stage.begin} to {stage.end}; it must begin at {expected}")
            expected = stage.end
            if not stage.replicas or not stage.tp:
                raise PlanningError(f"{where} has no devices")
            for replica in stage.replicas:
                if replica.tp != stage.tp:
                    raise PlanningError(f"{where} has replicas of {stage.tp} and of {replica.tp} devices")
                if replica.samples < 0:
                    raise PlanningError(f"{where} has a replica with {replica.samples} samples")
            total = sum(replica.samples for replica in stage.replicas)
            if total != self.microbatch_samples:
                raise PlanningError(
                    f"{where} computes {total} samples of a micro-batch, which has {self.microbatch_samples}"
                )
            for device in stage.devices:
                if device in used:
                    raise PlanningError(f"{where} uses device {device}, which the plan has used already")
                used.add(device)
