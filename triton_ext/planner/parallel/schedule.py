"""The order in which a stage computes the micro-batches of a step."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import PlanningError
from .plan import ParallelPlan


class Operation(NamedTuple):
    """Forward or backward of one micro-batch through one of a stage's chunks."""

    forward: bool
    microbatch: int
    chunk: int = 0


def operations(schedule: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Operation]:
    """A stage's operations, in order.

    gpipe: all forwards, then all backwards (Huang et al., NeurIPS 2019). 1f1b: forwards until stages - stage
    micro-batches are in flight, then backward and forward by turns (PipeDream-Flush, Narayanan et al., ICML 2021).
    interleaved: the same over several chunks of layers on each device, in rounds of as many micro-batches as there are
    stages (Narayanan et al., SC 2021). Raises PlanningError where micro-batches do not fill these rounds.
    """
    if schedule != "interleaved":
        forwards = [Operation(True, m) for m in range(microbatches)]
        backwards = [Operation(False, m) for m in range(microbatches)]
        ahead = microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
    else:
        if stages < 2:
            raise PlanningError("an interleaved schedule of one stage; it needs at least two")
        if microbatches % stages:
            raise PlanningError(
                f"an interleaved schedule of {microbatches} micro-batches over {stages} stages: it goes in rounds of "
                f"{stages}; use a multiple"
            )
        rounds = range(0, microbatches, stages)
        forwards = [Operation(True, m + i, c) for m in rounds for c in range(chunks) for i in range(stages)]
        backwards = [Operation(False, m + i, c) for m in rounds for c in reversed(range(chunks)) for i in range(stages)]
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, len(forwards))
    order = forwards[:ahead]
    for backward, forward in zip(backwards, forwards[ahead:], strict=False):
        order += [backward, forward]
    return order + backwards[len(forwards) - ahead :]


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """The most micro-batches whose activations a stage of a gpipe or 1f1b schedule keeps at once."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


def layer_runs(plan: ParallelPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """By stage and chunk: the layers [begin, end) computed.

    One run without interleaving. With it, a stage's layers say how many it has: they are split into even chunks, and
    the model's layers are dealt to the chunks in the order in which a micro-batch meets them. Raises PlanningError
    for a stage with fewer layers than chunks.
    """
    chunks = plan.settings.chunks_per_stage if plan.schedule == "interleaved" else 1
    counts = []
    for number, stage in enumerate(plan.stages):
        size = stage.end - stage.begin
        if size < chunks:
            raise PlanningError(f"stage {number} has {size} layers for {chunks} chunks; give it more, or fewer chunks")
        counts.append([size // chunks + (chunk < size % chunks) for chunk in range(chunks)])
    runs: list[list[tuple[int, int]]] = [[] for _ in plan.stages]
    begin = 0
    for chunk in range(chunks):
        for stage_runs, sizes in zip(runs, counts, strict=True):
            stage_runs.append((begin, begin + sizes[chunk]))
            begin += sizes[chunk]
    return tuple(map(tuple, runs))
