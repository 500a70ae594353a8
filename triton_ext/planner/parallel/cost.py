"""Our cost model: what a step of a plan takes, and what each device has to keep.

The pipeline's fill and drain are followed exactly, by the recurrence that the simulator runs, for a few rounds of
micro-batches. A pipeline is periodic in between (it is a max-plus linear system: Baccelli et al., Synchronization and
Linearity, 1992), so every further micro-batch adds one period. The work does not grow with the
number of micro-batches. Held to the simulator by tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cluster import Cluster
from .layer_tables import LayerTables
from .pipeline import ALL_REDUCE, BACKWARD, OPTIMIZER, Step, run
from .plan import ParallelPlan
from .profiles import Profiles
from .schedule import operations
from .step_work import StepWork, step_work

_ROUNDS = 3  # of as many micro-batches as there are stages, before the one that is measured
_MORE = 6


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step: its parts follow each other and add up. memory_bytes: by device of the plan.

    Of the stage that ends last: compute_s, of all micro-batches; pipeline_s, its bubble, with what it waits for;
    all_reduce_s and optimizer_s.
    """

    step_time_s: float
    compute_s: float
    pipeline_s: float
    all_reduce_s: float
    optimizer_s: float
    memory_bytes: dict[int, int]

    def over_memory(self, cluster: Cluster) -> tuple[int, ...]:
        """The devices whose memory does not suffice."""
        limits = {device.index: cluster.device_type(device.type).memory_bytes for device in cluster.devices}
        return tuple(device for device, need in sorted(self.memory_bytes.items()) if need > limits[device])


def estimate(plan: ParallelPlan, cluster: Cluster, profiles: Profiles, tables: LayerTables | None = None) -> Estimate:
    """Of one step. `tables` (of the plan's settings) save time over many plans of one model. Raises PlanningError as
    `simulate` does."""
    work = step_work(plan, cluster, tables or LayerTables(profiles, plan.settings))
    return of_work(work)


def of_work(work: StepWork) -> Estimate:
    """Of what a step is made of."""
    shorter, period_s = work, 0.0
    rounds = (_ROUNDS + 1) * work.stages
    few = rounds + _MORE - _MORE % work.stages if work.schedule == "interleaved" else rounds + _MORE
    if work.microbatches > few:
        shorter = replace(work, microbatches=few)
    step = run(shorter)
    if shorter is not work:
        period_s = _gpipe_period_s(step, shorter) if work.schedule == "gpipe" else _period_s(step, shorter)
    more_s = (work.microbatches - shorter.microbatches) * period_s
    # The step's end, from the back: the optimizer and the all-reduce of the stage that ends last.
    last = max((event for event in step.events if event.kind == OPTIMIZER), key=lambda event: event.end_s)
    ring = [event for event in step.events if event.kind == ALL_REDUCE and event.stage == last.stage]
    all_reduce_s = ring[0].end_s - ring[0].start_s if ring else 0.0
    optimizer_s = last.end_s - last.start_s
    computed = [sum(worker.forward_s) + sum(worker.backward_s) for worker in work.workers[last.stage]]
    compute_s = work.microbatches * max(computed)
    step_time_s = step.step_time_s + more_s
    return Estimate(
        step_time_s=step_time_s,
        compute_s=compute_s,
        pipeline_s=step_time_s - compute_s - all_reduce_s - optimizer_s,
        all_reduce_s=all_reduce_s,
        optimizer_s=optimizer_s,
        memory_bytes=memory_bytes(work),
    )


def memory_bytes(work: StepWork) -> dict[int, int]:
    """The most that each device keeps at once: it follows from the order of operations alone."""
    needs = {}
    for number, stage in enumerate(work.workers):
        order = operations(work.schedule, number, work.stages, work.microbatches, work.chunks)
        for worker in stage:
            kept = peak = worker.fixed_bytes
            for operation in order:
                kept += worker.flight_bytes[operation.chunk] * (1 if operation.forward else -1)
                peak = max(peak, kept)
            for device in worker.devices:
                needs[device] = round(peak)
    return needs


def _period_s(step: Step, work: StepWork) -> float:
    """From one micro-batch's last backward to the next one's, between fill and drain."""
    ends: dict[int, float] = {}
    for event in step.events:
        if event.kind == BACKWARD and event.stage == 0:
            ends[event.microbatch] = max(ends.get(event.microbatch, 0.0), event.end_s)
    last = work.microbatches - work.stages - 1
    first = last - max(work.stages, 2) * max(1, last // 2 // max(work.stages, 2))
    return (ends[last] - ends[first]) / (last - first)


def _gpipe_period_s(step: Step, work: StepWork) -> float:
    """What one more micro-batch adds to all forwards and to all backwards."""
    fewer = run(replace(work, microbatches=work.microbatches - work.stages))
    return (step.step_time_s - fewer.step_time_s) / work.stages
