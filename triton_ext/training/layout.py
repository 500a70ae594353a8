"""Who computes and sends what in a plan: pure data, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from ..errors import PlanningError
from ..planner.parallel.plan import ParallelPlan, Stage
from ..planner.parallel.schedule import layer_runs

# What torch's schedules need, or what this executor has not: refused, so that nothing is silently left out.
_NOT_EXECUTED = ("shard_optimizer", "shard_parameters", "sequence_parallel")


@dataclass(frozen=True)
class Part:
    """Samples [begin, end) of a micro-batch as one device of a stage holds them; `peer` is the other end's device."""

    peer: int
    begin: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of one stage: with an interleaved schedule a stage has several, else one."""

    stage: int
    begin: int
    end: int


def check(plan: ParallelPlan) -> None:
    """Raises PlanningError, with the setting and the numbers, for a plan that cannot be executed."""
    for name in _NOT_EXECUTED:
        if getattr(plan.settings, name):
            raise PlanningError(f"the plan has {name}, which is not executed; plan without it")
    stages, microbatches = len(plan.stages), plan.microbatches
    if plan.schedule == "interleaved":
        if stages < 2 or plan.settings.chunks_per_stage < 2:
            raise PlanningError(
                f"an interleaved schedule of {stages} stages with {plan.settings.chunks_per_stage} chunks each; it "
                "needs at least 2 of both"
            )
        if microbatches % max(1, microbatches // stages):
            raise PlanningError(
                f"an interleaved schedule of {microbatches} micro-batches over {stages} stages: torch's needs a "
                f"multiple of {microbatches // stages}, the rounds"
            )
        if any(0 in _samples(stage) for stage in plan.stages):
            raise PlanningError("an interleaved schedule with a replica without samples is not executed")
    if plan.schedule == "1f1b" and microbatches < stages:
        raise PlanningError(
            f"a 1F1B schedule of {stages} stages with {microbatches} micro-batches; torch's needs at least as many "
            "micro-batches as stages; use gpipe, or smaller micro-batches"
        )
    chunks(plan)


def chunks(plan: ParallelPlan) -> list[Chunk]:
    """The chunks in the order in which a sample passes through them (`schedule.layer_runs`)."""
    count = plan.settings.chunks_per_stage
    if count != 1 and plan.schedule != "interleaved":
        raise PlanningError(f"{count} chunks per stage need the interleaved schedule, not {plan.schedule}")
    runs = layer_runs(plan)
    return [Chunk(number, *stage_runs[turn]) for turn in range(count) for number, stage_runs in enumerate(runs)]


def place(stage: Stage, device: int) -> tuple[int, int] | None:
    """The index of a device's replica, and its place there; None if the stage does not have it."""
    for index, replica in enumerate(stage.replicas):
        if device in replica.devices:
            return index, replica.devices.index(device)
    return None


def samples(stage: Stage, replica: int) -> tuple[int, int]:
    """The samples [begin, end) of every micro-batch that a replica computes."""
    ends = list(accumulate(_samples(stage)))
    return ends[replica] - stage.replicas[replica].samples, ends[replica]


def transfers(source: Stage, destination: Stage) -> Iterator[tuple[int, Part, Part]]:
    """What crosses from one stage's devices to the next one's, for one micro-batch: (device of the source, its part,
    device of the destination's part).

    All devices of a replica hold its whole activations: each of the destination takes them from the one at its place,
    counted round where the source has fewer. Gradients go the same way between the stages exchanged.
    """
    for sender in range(source.dp):
        for receiver in range(destination.dp):
            (begin, end), (low, high) = samples(source, sender), samples(destination, receiver)
            first, last = max(begin, low), min(end, high)
            if first >= last:
                continue
            for index, device in enumerate(destination.replicas[receiver].devices):
                origin = source.replicas[sender].devices[index % source.tp]
                yield (
                    origin,
                    Part(device, first - begin, last - begin),
                    Part(origin, first - low, last - low),
                )


def sent(source: Stage, destination: Stage, device: int) -> list[Part]:
    """The parts of its samples that a device of `source` sends on."""
    return [part for origin, part, _ in transfers(source, destination) if origin == device]


def received(source: Stage, destination: Stage, device: int) -> list[Part]:
    """The parts of which a device of `destination` puts its samples together."""
    return [arrival for _, part, arrival in transfers(source, destination) if part.peer == device]


def _samples(stage: Stage) -> list[int]:
    return [replica.samples for replica in stage.replicas]
